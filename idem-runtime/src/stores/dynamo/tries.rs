//! Counts the tries that the SDK makes of one call, and the refusals of DynamoDB.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use aws_sdk_dynamodb::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextRef,
};
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};

/// The tries that the SDK makes of one call. The SDK repeats a failed call, as configured in the user's client. A call
/// that ends with a refusal may thus have taken effect in an earlier try.
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

    /// Returns the time of DynamoDB's first answer by DynamoDB's clock, in seconds since 1970.
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
