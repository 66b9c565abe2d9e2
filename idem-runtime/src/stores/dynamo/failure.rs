//! Classifies DynamoDB's errors.

use std::error::Error;
use std::io;

use aws_sdk_dynamodb::config::http::HttpResponse;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};

use super::tries::Tries;
use crate::store::{StoreError, StoreErrorKind};

/// Returns the error of the store for `error`.
///
/// `error` contains the whole answer with its headers, and thus possibly a payload. So `error` does not become the
/// source of the store's error.
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
            // A refused connection has carried no request, but an earlier try of the same call may have been sent.
            let refused = failure.as_connector_error().is_some_and(|error| is_refused(error)) && tries.open() == 1;
            let kind = if refused { Unavailable } else { Unconfirmed };
            (kind, format!("DynamoDB can't be reached, or did not answer: {}", causes(error)))
        }
        SdkError::TimeoutError(_) => {
            let kind = if tries.none_open() { Unavailable } else { Unconfirmed };
            (kind, "DynamoDB did not answer within the time-out of the client".to_owned())
        }
        _ => (Unconfirmed, "the answer can't be read".to_owned()),
    };
    StoreError::new(kind, message)
}

/// Converts an error with which DynamoDB refused a request.
pub(super) fn refused(error: &impl ProvideErrorMetadata, status: u16, tries: &Tries) -> StoreError {
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
        // The client will fetch new credentials.
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
    // A try is open if DynamoDB has not refused it. The last try was refused, but an earlier, open try may have taken
    // effect.
    let kind = if tries.none_open() { kind } else { Unconfirmed };
    // Only the messages of these codes are shown: other messages may quote the request or its signature.
    let told = match code {
        "ResourceNotFoundException" | "AccessDeniedException" | "ValidationException" => format!(": {said}"),
        _ => String::new(),
    };
    StoreError::new(kind, format!("DynamoDB refused with status {status}, {code}{told}"))
}

/// Returns the reason why a request could not be sent. The text holds no part of the request.
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
