//! Observation of each store operation: its duration, its failure, and a span while it is awaited.

use std::time::Duration;

use tracing::Span;

use super::{Heartbeats, Store, StoreError, StoreErrorKind};
use crate::clock::Instant;
use crate::metrics::{ErrorKind, StoreOp};

/// Observes one operation that had no immediate answer.
pub(super) struct Watch<'a> {
    heartbeats: &'a Heartbeats,
    op: StoreOp,
    /// Start of the operation, in nanoseconds since the origin of the clock, to be small.
    began: u64,
    /// Boxed, and only if a subscriber is enabled: every call would carry its size inline.
    span: Option<Box<Span>>,
}

impl<'a> Watch<'a> {
    /// Observes an operation that began at `began`, or just now.
    pub(super) fn new<S: Store + ?Sized>(store: &'a S, op: StoreOp, began: Option<Instant>) -> Self {
        let (heartbeats, name) = (store.heartbeats(), store.name());
        let span = tracing::debug_span!(
            "idem.store",
            otel.name = %format_args!("{name} {}", op.name()),
            otel.kind = "client",
            otel.status_code = tracing::field::Empty,
            error.r#type = tracing::field::Empty,
            db.system.name = system(name),
            db.operation.name = op.name(),
            idem.store = name,
        );
        let span = (!span.is_disabled()).then(|| Box::new(span));
        heartbeats.metrics(name);
        let began = began.unwrap_or_else(|| heartbeats.clock().now());
        Self { heartbeats, op, began: began.nanos(), span }
    }

    pub(super) fn span(&self) -> Option<&Span> {
        self.span.as_deref()
    }

    /// Records the end of the operation.
    pub(super) fn ended<T>(&self, answer: &Result<T, StoreError>) {
        let now = self.heartbeats.clock().now();
        // Made at the start of the operation: the name of the store is unknown here.
        let Some(metrics) = self.heartbeats.known_metrics() else { return };
        let store = metrics.store();
        metrics.store_took(self.op, Duration::from_nanos(now.nanos().saturating_sub(self.began)));
        match answer {
            Ok(_) => self.heartbeats.outage().store_answers(store, self.op, || now),
            Err(error) => {
                if let Some(span) = self.span() {
                    span.record("otel.status_code", "ERROR");
                    span.record("error.type", error.kind().label().name());
                }
                self.heartbeats.operation_failed(store, self.op, error);
            }
        }
    }
}

impl Heartbeats {
    /// Counts an operation that the store answered immediately.
    pub(super) fn answered_at_once(&self, store: &'static str, op: StoreOp) {
        self.metrics(store).store_took(op, Duration::ZERO);
        self.outage().store_answers(store, op, || self.clock().now());
    }

    /// Counts an operation of the store that failed.
    pub(super) fn operation_failed(&self, store: &'static str, op: StoreOp, error: &StoreError) {
        self.metrics(store).store_failed(op, error.kind().label());
        self.outage().store_fails(store, op, error, self.clock().now());
    }
}

/// Returns the OpenTelemetry name of the system behind a store of the library.
fn system(store: &'static str) -> Option<&'static str> {
    match store {
        "postgres" => Some("postgresql"),
        "redis" | "sqlite" => Some(store),
        "dynamodb" => Some("aws.dynamodb"),
        _ => None,
    }
}

impl StoreErrorKind {
    /// Returns the name of the kind in labels and spans.
    pub(crate) const fn label(self) -> ErrorKind {
        match self {
            Self::Unavailable => ErrorKind::Unavailable,
            Self::Unconfirmed => ErrorKind::Unconfirmed,
            Self::Corrupt => ErrorKind::Corrupt,
            Self::Misconfigured => ErrorKind::Misconfigured,
            Self::Full => ErrorKind::Full,
            Self::TooLarge => ErrorKind::TooLarge,
            Self::Unsupported => ErrorKind::Unsupported,
            Self::Aborted => ErrorKind::Aborted,
        }
    }
}
