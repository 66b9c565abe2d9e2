//! Observation of each store operation: its duration, its failure, and a span while it is awaited.

use std::time::Duration;

use tracing::Span;

use super::{Store, StoreContext, StoreError, StoreErrorKind};
use crate::clock::Instant;
use crate::metrics::{ErrorKind, StoreOp};

/// Observes one store operation that got no immediate answer.
pub(super) struct Watch<'a> {
    context: &'a StoreContext,
    op: StoreOp,
    /// Start of the operation, in nanoseconds since the origin of the clock.
    began: u64,
    /// Span of the operation, if a subscriber is enabled. Boxed: every call would carry the size of the span inline.
    span: Option<Box<Span>>,
}

impl<'a> Watch<'a> {
    /// Observes an operation that began at `began`; `None` if the operation begins now.
    pub(super) fn new<S: Store + ?Sized>(store: &'a S, op: StoreOp, began: Option<Instant>) -> Self {
        let context = store.context();
        let name = context.name();
        let span = tracing::debug_span!(
            "idem.store",
            otel.name = %format_args!("{name} {}", op.name()),
            otel.kind = "client",
            otel.status_code = tracing::field::Empty,
            error.r#type = tracing::field::Empty,
            db.system.name = context.system_name(),
            db.operation.name = op.name(),
            idem.store = name,
        );
        let span = (!span.is_disabled()).then(|| Box::new(span));
        let began = began.unwrap_or_else(|| context.clock().now());
        Self { context, op, began: began.nanos(), span }
    }

    pub(super) fn span(&self) -> Option<&Span> {
        self.span.as_deref()
    }

    /// Records the end of the operation.
    pub(super) fn ended<T>(&self, answer: &Result<T, StoreError>) {
        let now = self.context.clock().now();
        let took = Duration::from_nanos(now.nanos().saturating_sub(self.began));
        self.context.metrics().store_took(self.op, took);
        match answer {
            Ok(_) => {
                self.context.outage().store_answers(self.context.name(), self.op, || now);
                self.context.slowness().took(self.context.name(), self.op, took, || now);
            }
            Err(error) => {
                if let Some(span) = self.span() {
                    span.record("otel.status_code", "ERROR");
                    span.record("error.type", error.kind().label().name());
                }
                self.context.operation_failed(self.op, error);
            }
        }
    }
}

impl StoreErrorKind {
    /// Returns the name of this kind of failure in labels and spans.
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
