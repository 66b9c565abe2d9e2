//! Checks of DynamoDB's answers: whether an answer comes from DynamoDB, and whether an unconfirmed write may have taken
//! effect.

use std::error::Error;

use aws_sdk_dynamodb::config::http::HttpResponse;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::delete_item::{DeleteItemError, DeleteItemOutput};
use aws_sdk_dynamodb::operation::get_item::GetItemOutput;
use aws_sdk_dynamodb::operation::put_item::{PutItemError, PutItemOutput};
use aws_sdk_dynamodb::operation::scan::ScanOutput;
use aws_sdk_dynamodb::operation::update_item::{UpdateItemError, UpdateItemOutput};

use super::failure::{failed, refused};
use super::item::Attributes;
use super::tries::Tries;
use crate::store::{StoreError, StoreErrorKind};

/// An answer that shows whether it comes from DynamoDB. Every request asks for the consumed capacity, which only
/// DynamoDB returns. Without this check, an answer with status 200 from a portal or a proxy, or an empty answer, would
/// mean "written" or "no such item".
pub(super) trait Genuine {
    fn is_genuine(&self) -> bool;
}

macro_rules! genuine {
    ($($output:ty),*) => { $(
        impl Genuine for $output {
            fn is_genuine(&self) -> bool {
                self.consumed_capacity().is_some()
            }
        }
    )* };
}

genuine!(DeleteItemOutput, GetItemOutput, PutItemOutput, ScanOutput, UpdateItemOutput);

/// An error that may be the refusal of a conditional write.
pub(super) trait Conditional: ProvideErrorMetadata + Error + Send + Sync + 'static {
    /// Returns the item on which the condition failed; `None` if there was no item.
    fn met(self) -> Result<Option<Attributes>, Self>
    where
        Self: Sized;
}

macro_rules! conditional {
    ($($error:ident),*) => { $(
        impl Conditional for $error {
            fn met(self) -> Result<Option<Attributes>, Self> {
                match self {
                    Self::ConditionalCheckFailedException(refused) => Ok(refused.item),
                    other => Err(other),
                }
            }
        }
    )* };
}

conditional!(DeleteItemError, PutItemError, UpdateItemError);

/// Outcome of a conditional write.
#[derive(Debug)]
pub(super) enum WriteOutcome {
    Done,
    /// The condition failed on this item; `None` if there was no item.
    Refused(Option<Attributes>),
}

/// Converts the `answer` to a write into its outcome.
pub(super) fn written<T: Genuine, E: Conditional>(
    answer: Result<T, SdkError<E, HttpResponse>>,
    tries: &Tries,
) -> Result<WriteOutcome, StoreError> {
    match answer {
        Ok(output) => genuine(output).map(|_| WriteOutcome::Done),
        Err(SdkError::ServiceError(error)) => {
            let status = error.raw().status().as_u16();
            match error.into_err().met() {
                Ok(met) => Ok(WriteOutcome::Refused(met)),
                Err(error) => Err(refused(&error, status, tries)),
            }
        }
        Err(error) => Err(failed(&error, tries)),
    }
}

/// Returns `output` if the answer comes from DynamoDB, otherwise an error.
pub(super) fn genuine<T: Genuine>(output: T) -> Result<T, StoreError> {
    if output.is_genuine() {
        return Ok(output);
    }
    let message = "the answer is not DynamoDB's: it lacks the consumed capacity";
    Err(StoreError::new(StoreErrorKind::Unconfirmed, message))
}
