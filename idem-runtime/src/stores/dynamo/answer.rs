//! What DynamoDB's answers mean, and whether an unconfirmed write may have taken effect.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use aws_sdk_dynamodb::config::http::HttpResponse;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextRef,
};
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::get_item::GetItemOutput;
use aws_sdk_dynamodb::operation::put_item::{PutItemError, PutItemOutput};
use aws_sdk_dynamodb::operation::update_item::{UpdateItemError, UpdateItemOutput};
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};

use super::item::Attributes;
use crate::store::{StoreError, StoreErrorKind};

/// The tries that the SDK makes of one call. It repeats by itself what the user's client tells it to, so a call that ends
/// with a refusal may have taken effect before.
#[derive(Clone, Default, Debug)]
pub(super) struct Tries(Arc<Counts>);

#[derive(Default, Debug)]
struct Counts {
    sent: AtomicUsize,
    /// The tries among them that DynamoDB has not refused.
    open: AtomicUsize,
    /// The `Date` of the first answer, in seconds since 1970.
    date: OnceLock<i64>,
}

impl Tries {
    /// Whether nothing has left this process.
    fn none_sent(&self) -> bool {
        self.0.sent.load(Ordering::Relaxed) == 0
    }

    /// Whether every sent try was refused, so that nothing was written.
    pub(super) fn none_open(&self) -> bool {
        self.open() == 0
    }

    /// When DynamoDB first answered, by its own clock, in seconds since 1970.
    pub(super) fn date(&self) -> Option<i64> {
        self.0.date.get().copied()
    }

    fn open(&self) -> usize {
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

/// An answer that shows whether DynamoDB gave it. Every request asks for the consumed capacity. Anything else that answers
/// with status 200 (a portal, a proxy, nothing at all) would otherwise read as "written" or as "no such item".
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

genuine!(GetItemOutput, PutItemOutput, UpdateItemOutput);

/// An error that may be the refusal of a conditional write.
pub(super) trait Conditional: ProvideErrorMetadata + Error + Send + Sync + 'static {
    /// The item that the condition met, if there was one.
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

conditional!(PutItemError, UpdateItemError);

/// The outcome of a conditional write.
#[derive(Debug)]
pub(super) enum Written {
    Done,
    /// The condition did not hold; with the item that it met, if any.
    Refused(Option<Attributes>),
}

/// The outcome of a write with this `answer`.
pub(super) fn written<T: Genuine, E: Conditional>(
    answer: Result<T, SdkError<E, HttpResponse>>,
    tries: &Tries,
) -> Result<Written, StoreError> {
    match answer {
        Ok(output) => genuine(output).map(|_| Written::Done),
        Err(SdkError::ServiceError(error)) => {
            let status = error.raw().status().as_u16();
            match error.into_err().met() {
                Ok(met) => Ok(Written::Refused(met)),
                Err(error) => Err(refused(&error, status, tries)),
            }
        }
        Err(error) => Err(failed(&error, tries)),
    }
}

/// `output`, if DynamoDB gave it.
pub(super) fn genuine<T: Genuine>(output: T) -> Result<T, StoreError> {
    if output.is_genuine() {
        return Ok(output);
    }
    let message = "an answer came that is not DynamoDB's: it doesn't tell the capacity that was asked for";
    Err(StoreError::new(StoreErrorKind::Unconfirmed, message))
}

/// The error of the store for `error`.
///
/// The error itself is not kept as a source: it holds the answer with its headers, and the answer may hold a payload.
pub(super) fn failed<E: ProvideErrorMetadata + Error + 'static>(
    error: &SdkError<E, HttpResponse>,
    tries: &Tries,
) -> StoreError {
    use StoreErrorKind::{Misconfigured, Unavailable, Unconfirmed};
    let (kind, message) = match error {
        SdkError::ServiceError(error) => return refused(error.err(), error.raw().status().as_u16(), tries),
        SdkError::ConstructionFailure(_) => (Misconfigured, format!("the request can't be made: {}", causes(error))),
        _ if tries.none_sent() => (Unavailable, format!("the request could not be sent: {}", causes(error))),
        SdkError::DispatchFailure(failure) => {
            // A refused connection has carried nothing, but an earlier try may have.
            let refused = failure.as_connector_error().is_some_and(|error| is_refused(error)) && tries.open() == 1;
            let kind = if refused { Unavailable } else { Unconfirmed };
            (kind, format!("DynamoDB can't be reached, or did not answer: {}", causes(error)))
        }
        SdkError::TimeoutError(_) => {
            let kind = if tries.none_open() { Unavailable } else { Unconfirmed };
            (kind, "DynamoDB did not answer in the time that the client allows".to_owned())
        }
        _ => (Unconfirmed, "the answer can't be read".to_owned()),
    };
    StoreError::new(kind, message)
}

/// What DynamoDB's refusal with `error` means.
fn refused(error: &impl ProvideErrorMetadata, status: u16, tries: &Tries) -> StoreError {
    use StoreErrorKind::{Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
    let code = error.code().unwrap_or("no code");
    let said = error.message().unwrap_or_default();
    let kind = match code {
        "ProvisionedThroughputExceededException"
        | "ThrottlingException"
        | "Throttling"
        | "RequestLimitExceeded"
        | "LimitExceededException"
        | "TransactionConflictException"
        | "TransactionInProgressException"
        | "ReplicatedWriteConflictException"
        // The client fetches new credentials.
        | "ExpiredTokenException" => Unavailable,
        "ItemCollectionSizeLimitExceededException" => Full,
        "ValidationException" if said.contains("tem size") && said.contains("exceeded") => TooLarge,
        "ResourceNotFoundException"
        | "AccessDeniedException"
        | "UnrecognizedClientException"
        | "InvalidClientTokenId"
        | "IncompleteSignature"
        | "IncompleteSignatureException"
        | "InvalidSignatureException"
        | "MissingAuthenticationToken"
        | "MissingAuthenticationTokenException"
        | "NotAuthorized"
        | "OptInRequired"
        | "SerializationException"
        | "UnknownOperationException"
        | "ValidationError"
        | "ValidationException" => Misconfigured,
        _ => Unconfirmed,
    };
    // A try that was answered with a failure of the server stays open. Whatever this try was refused for, an earlier one
    // may have taken effect.
    let kind = if tries.none_open() { kind } else { Unconfirmed };
    // Other messages may quote the request or its signature.
    let told = match code {
        "ResourceNotFoundException" | "AccessDeniedException" | "ValidationException" => format!(": {said}"),
        _ => String::new(),
    };
    StoreError::new(kind, format!("DynamoDB refused with status {status}, {code}{told}"))
}

/// Why something could not be sent. It holds no part of the request.
fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    error.downcast_ref::<io::Error>().is_some_and(refused) || error.source().is_some_and(is_refused)
}
