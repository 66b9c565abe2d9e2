//! How one call ended, without a change to its signature.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;

use crate::{Error, Key};

/// What to do with the message that was being handled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// The operation has finished: acknowledge the message.
    Ack,
    /// Deliver the message again, if a time is given not before it has passed.
    Retry {
        /// When a new delivery is likely to get further.
        after: Option<Duration>,
    },
    /// No delivery of this message can succeed: set it aside for a person.
    DeadLetter,
}

/// Why a call did not run its body, or would not have run it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// The operation had finished: its result would have been replayed (shadow mode).
    Replay,
    /// Another attempt was running.
    InProgress,
    /// The payload was another one.
    FingerprintMismatch,
    /// An earlier run had been interrupted.
    Interrupted,
    /// As many attempts as are allowed had started.
    AttemptsExhausted,
    /// The key was missing or not valid, or the fingerprint or the policy was not.
    Invalid,
    /// The operation had finished, and its result can't be replayed.
    ResultUnavailable,
    /// The store did not answer.
    Store,
}

impl Refusal {
    /// `None` if the body had started.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        match error {
            Error::InProgress { .. } => Some(Self::InProgress),
            Error::FingerprintMismatch { .. } => Some(Self::FingerprintMismatch),
            Error::Interrupted { .. } => Some(Self::Interrupted),
            Error::AttemptsExhausted { .. } => Some(Self::AttemptsExhausted),
            Error::ResultUnavailable { .. } => Some(Self::ResultUnavailable),
            Error::Store { .. } => Some(Self::Store),
            Error::LeaseLost { .. } | Error::Unrecorded { .. } => None,
            Error::MissingKey { .. }
            | Error::InvalidKey { .. }
            | Error::InvalidFingerprint { .. }
            | Error::InvalidPolicy { .. } => Some(Self::Invalid),
        }
    }
}

/// How one call of an idempotent function ended; [`observe`] returns it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::struct_excessive_bools)] // Independent facts, each with an accessor of its own.
pub struct Outcome {
    pub(crate) key: Option<Key>,
    pub(crate) executed: bool,
    pub(crate) replayed: bool,
    pub(crate) waited: bool,
    pub(crate) takeover: bool,
    pub(crate) recorded: bool,
    pub(crate) result_stored: bool,
    pub(crate) attempt: Option<u32>,
    pub(crate) refused: Option<Refusal>,
    pub(crate) suppressed: Option<Refusal>,
    pub(crate) disposition: Disposition,
}

impl Outcome {
    /// The outcome of a call that hasn't come further than this.
    pub(crate) const UNKNOWN: Self = Self {
        key: None,
        executed: false,
        replayed: false,
        waited: false,
        takeover: false,
        recorded: false,
        result_stored: false,
        attempt: None,
        refused: None,
        suppressed: None,
        // What did not reach an idempotent function must not be acknowledged on its behalf.
        disposition: Disposition::Retry { after: None },
    };

    /// The key of the operation, where there is one.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Whether this call ran the body.
    pub fn executed(&self) -> bool {
        self.executed
    }

    /// Whether this call returned a recorded result without running the body.
    pub fn replayed(&self) -> bool {
        self.replayed
    }

    /// Whether this call waited for another attempt.
    pub fn waited(&self) -> bool {
        self.waited
    }

    /// Whether this call took over from an attempt whose lease had lapsed.
    pub fn took_over(&self) -> bool {
        self.takeover
    }

    /// Whether the operation is recorded as finished, by this run or by the one that is replayed. False for a body that
    /// ran unprotected, whose error was released, or whose lease was lost.
    pub fn recorded(&self) -> bool {
        self.recorded
    }

    /// Whether duplicates can replay the result: false where it was too large or could not be encoded, although the
    /// completion is [recorded](Outcome::recorded).
    pub fn result_stored(&self) -> bool {
        self.result_stored
    }

    /// The number of the attempt that ran under a reservation or is replayed.
    pub fn attempt(&self) -> Option<u32> {
        self.attempt
    }

    /// Why the call returned an [`Error`] instead of running its body.
    pub fn refused(&self) -> Option<Refusal> {
        self.refused
    }

    /// Under [`Mode::Shadow`](crate::Mode::Shadow) or `on_store_error = run`: why the body, which did run, would not have.
    pub fn suppressed(&self) -> Option<Refusal> {
        self.suppressed
    }

    /// What to do with the message.
    pub fn disposition(&self) -> Disposition {
        self.disposition
    }
}

thread_local! {
    /// Where the engine reports, while the future of an [`observe`] is being polled.
    static OBSERVER: RefCell<Option<Outcome>> = const { RefCell::new(None) };
}

/// Puts a slot in place for the outcome of calls made on this thread, until it is dropped.
pub(crate) struct Observation<'a> {
    slot: &'a mut Option<Outcome>,
}

impl<'a> Observation<'a> {
    /// `None` in the slot means that nobody observes.
    pub(crate) fn enter(slot: &'a mut Option<Outcome>) -> Self {
        swap(slot);
        Self { slot }
    }
}

impl Drop for Observation<'_> {
    fn drop(&mut self) {
        swap(self.slot);
    }
}

fn swap(slot: &mut Option<Outcome>) {
    OBSERVER.with_borrow_mut(|observer| {
        // Most calls are observed by nobody.
        if observer.is_some() || slot.is_some() {
            std::mem::swap(observer, slot);
        }
    });
}

/// Reports how a call ended to whoever observes it.
pub(crate) fn report(outcome: impl FnOnce() -> Outcome) {
    OBSERVER.with_borrow_mut(|observer| {
        if let Some(observer) = observer {
            *observer = outcome();
        }
    });
}

/// Runs `future` and tells how the idempotent call in it ended.
///
/// Where several are made one after the other, the last one counts: behind a `?` that is the one that failed. Calls made
/// inside the body of an idempotent function are that function's own affair. If the future reaches no idempotent
/// function, the disposition is to retry.
///
/// ```
/// # use std::time::Duration;
/// # use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
/// async fn ship(store: &MemoryStore, id: u32) -> Result<String, Error> {
///     Ok(format!("parcel for {id}"))
/// }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new();
/// let (first, outcome) = observe(ship(&store, 42)).await;
/// assert!(outcome.executed());
/// let (duplicate, outcome) = observe(ship(&store, 42)).await;
/// assert!(outcome.replayed());
/// assert_eq!(outcome.disposition(), Disposition::Ack);
/// assert_eq!(first.unwrap(), duplicate.unwrap());
/// # });
/// ```
///
/// # Cancel safety
/// As cancel safe as `future`.
pub fn observe<F: Future>(future: F) -> Observe<F> {
    Observe { future, outcome: Some(Outcome::UNKNOWN) }
}

pin_project! {
    /// The future of [`observe`].
    #[must_use = "futures do nothing unless polled"]
    #[derive(Debug)]
    pub struct Observe<F> {
        #[pin]
        future: F,
        outcome: Option<Outcome>,
    }
}

impl<F: Future> Future for Observe<F> {
    type Output = (F::Output, Outcome);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let polled = {
            let _observation = Observation::enter(this.outcome);
            this.future.poll(cx)
        };
        polled.map(|output| (output, this.outcome.take().unwrap_or(Outcome::UNKNOWN)))
    }
}
