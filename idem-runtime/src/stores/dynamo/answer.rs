//! DynamoDB's answers: whether DynamoDB gave them, and whether an unconfirmed write may have taken effect.

use std::error::Error;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use aws_sdk_dynamodb::config::http::HttpResponse;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextRef,
};
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::delete_item::{DeleteItemError, DeleteItemOutput};
use aws_sdk_dynamodb::operation::get_item::GetItemOutput;
use aws_sdk_dynamodb::operation::put_item::{PutItemError, PutItemOutput};
use aws_sdk_dynamodb::operation::scan::ScanOutput;
use aws_sdk_dynamodb::operation::update_item::{UpdateItemError, UpdateItemOutput};
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};

use super::failure::{failed, refused};
use super::item::Attributes;
use crate::store::{StoreError, StoreErrorKind};

/// The tries that the SDK makes of one call. The SDK repeats a call on its own, as configured in the user's client, so
/// a call that ends with a refusal may have taken effect before.
#[derive(Clone, Default, Debug)]
pub(super) struct Tries(Arc<TryCounts>);

#[derive(Default, Debug)]
struct TryCounts {
    sent: AtomicUsize,
    /// Number of sent tries that DynamoDB has not refused.
    open: AtomicUsize,
    /// The `Date` of the first answer, in seconds since 1970.
    date: OnceLock<i64>,
}

impl Tries {
    /// Returns whether no try has left this process.
    pub(super) fn none_sent(&self) -> bool {
        self.0.sent.load(Ordering::Relaxed) == 0
    }

    /// Returns whether every sent try was refused, so that nothing was written.
    pub(super) fn none_open(&self) -> bool {
        self.open() == 0
    }

    /// Returns the time of DynamoDB's first answer, by its own clock, in seconds since 1970.
    pub(super) fn date(&self) -> Option<i64> {
        self.0.date.get().copied()
    }

    pub(super) fn open(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }
}

impl Intercept for Tries {
    fn name(&self) -> &'static str {
        "idem"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        self.0.sent.fetch_add(1, Ordering::Relaxed);
        self.0.open.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn read_after_transmit(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let response = context.response();
        if response.status().is_client_error() {
            self.0.open.fetch_sub(1, Ordering::Relaxed);
        }
        let date = response.headers().get("date").map(|date| DateTime::from_str(date, DateTimeFormat::HttpDate));
        if let Some(Ok(date)) = date {
            self.0.date.get_or_init(|| date.secs());
        }
        Ok(())
    }
}

/// An answer that shows whether it comes from DynamoDB. Every request asks for the consumed capacity, which only
/// DynamoDB returns. Any other answer with status 200 (from a portal or a proxy, or an empty one) would otherwise read
/// as "written" or as "no such item".
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
    /// Returns the item that refused the write, if there was one.
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
    /// The condition did not hold. Holds the item that refused the write, if there was one.
    Refused(Option<Attributes>),
}

/// Returns the outcome of a write with this `answer`.
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

/// Returns `output`, if it comes from DynamoDB.
pub(super) fn genuine<T: Genuine>(output: T) -> Result<T, StoreError> {
    if output.is_genuine() {
        return Ok(output);
    }
    let message = "the answer is not DynamoDB's: it lacks the consumed capacity";
    Err(StoreError::new(StoreErrorKind::Unconfirmed, message))
}
