//! Policy of an operation: all options of its protection, as one value.

mod backoff;
mod mode;
mod options;
mod recovery;
mod steps;
mod uncertain;

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

pub use self::backoff::Backoff;
use self::mode::ModeSource;
pub use self::mode::{Mode, ModeSwitch};
pub use self::options::{InProgress, Migrate, MissingKey, OnCrash, OnError, OnStoreError, OnUndecodable};
pub use self::recovery::RecoveryPolicy;
pub use self::steps::StepPolicy;
pub use self::uncertain::{Doubt, Uncertain};
use crate::key::{DisplayByte, KeyDisplay};

/// Protection of operations: retention, lease, and the reaction to each failure.
///
/// A policy is a small `Copy` value that can be built in a `const`. The `#[idempotent]` attribute builds a policy from
/// its options. Options written next to `policy = …` override the options of that policy.
///
/// ```
/// use std::time::Duration;
/// use idem_runtime::{InProgress, OnCrash, Policy};
///
/// const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
///     .lease(Duration::from_secs(60))
///     .in_progress(InProgress::Wait(Duration::from_secs(10)))
///     .on_crash(OnCrash::Fail)
///     .max_attempts(5);
/// assert!(PAYMENTS.check().is_ok());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    pub(crate) ttl: Duration,
    pub(crate) error_ttl: OptionalMillis,
    pub(crate) lease: Duration,
    pub(crate) in_progress: InProgress,
    pub(crate) on_crash: OnCrash,
    pub(crate) max_attempts: Option<NonZeroU32>,
    pub(crate) missing_key: MissingKey,
    pub(crate) on_store_error: OnStoreError,
    max_result_bytes: u32,
    pub(crate) timeout: Duration,
    max_pause: OptionalMillis,
    pub(crate) backoff: Backoff,
    pub(crate) on_uncertain: Option<fn(Uncertain<'_>)>,
    pub(crate) on_undecodable: OnUndecodable,
    pub(crate) key_display: DisplayByte,
    max_reconciliations: NonZeroU16,
    /// True if the handler has a reconciler.
    pub(crate) reconciles: bool,
    mode: ModeSource,
}

const DEFAULT_RECONCILIATIONS: NonZeroU16 = NonZeroU16::new(Policy::DEFAULT_MAX_RECONCILIATIONS).unwrap();

impl Policy {
    /// Default lease: 30 s.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
    /// Shortest lease that can be renewed in time over a network.
    pub const MIN_LEASE: Duration = Duration::from_millis(100);
    /// Longest lease and longest retention: 100 years.
    pub const MAX_DURATION: Duration = Duration::from_secs(100 * 366 * 86_400);
    /// Default time limit of a body: one hour.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3600);
    /// Default size limit of a recorded result: 256 KiB.
    pub const DEFAULT_MAX_RESULT_BYTES: usize = 256 * 1024;
    /// Default limit of the questions to a reconciler about one operation.
    pub const DEFAULT_MAX_RECONCILIATIONS: u16 = 16;

    /// Creates a policy that keeps finished records for `ttl`, counted from completion. All other options have their
    /// defaults.
    pub const fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            error_ttl: OptionalMillis::NONE,
            lease: Self::DEFAULT_LEASE,
            in_progress: InProgress::Reject,
            on_crash: OnCrash::Retry,
            max_attempts: None,
            missing_key: MissingKey::Reject,
            on_store_error: OnStoreError::Fail,
            max_result_bytes: clamped(Self::DEFAULT_MAX_RESULT_BYTES),
            timeout: Self::DEFAULT_TIMEOUT,
            max_pause: OptionalMillis::NONE,
            backoff: Backoff::DEFAULT,
            on_uncertain: None,
            on_undecodable: OnUndecodable::Error,
            key_display: DisplayByte::WHOLE,
            max_reconciliations: DEFAULT_RECONCILIATIONS,
            reconciles: false,
            mode: ModeSource::Fixed(Mode::Enforce),
        }
    }

    /// Sets the retention of a finished record, counted from completion. The retention must be longer than the broker's
    /// retention of the message.
    #[must_use]
    pub const fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// Sets the retention of a recorded error, counted from its completion (default: [`ttl`](Self::ttl)). After this
    /// time a message that the broker still delivers runs the body again.
    #[must_use]
    pub const fn error_ttl(self, error_ttl: Duration) -> Self {
        Self { error_ttl: OptionalMillis::of(error_ttl), ..self }
    }

    /// Returns the retention of a finished record; `is_error` is true for a recorded error.
    pub(crate) fn retention(&self, is_error: bool) -> Duration {
        self.error_ttl.get().filter(|_| is_error).unwrap_or(self.ttl)
    }

    /// Demands that every handler with this policy names the reaction to a crash: `on_crash = retry`, `fail` or
    /// `reconcile(…)`. A handler without that option does not compile.
    ///
    /// ```compile_fail
    /// # use std::time::Duration;
    /// use idem_runtime::policy::RecoveryPolicy;
    /// use idem_runtime::{Error, MemoryStore, Policy, idempotent};
    ///
    /// const PAYMENTS: RecoveryPolicy = Policy::new(Duration::from_secs(30 * 86_400)).require_recovery();
    ///
    /// #[idempotent(key = "{order}", store = store, policy = PAYMENTS)] // No `on_crash`: does not compile.
    /// async fn charge(store: &MemoryStore, order: u64) -> Result<u64, Error> {
    ///     Ok(order)
    /// }
    /// ```
    pub const fn require_recovery(self) -> RecoveryPolicy {
        RecoveryPolicy::new(self)
    }

    /// Sets the lease: the time for which an attempt holds its key without a renewal (default: 30 s). A running attempt
    /// renews its lease every third of this time.
    #[must_use]
    pub const fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// Sets the time limit of the body (default: 1 h). After this time the body is cancelled, the key is freed, and the
    /// call returns `Error::TimedOut`; under [`OnCrash::Fail`] the operation is interrupted. A body that blocks its
    /// thread can't be cancelled: its lease is no longer renewed, and lapses. The call holds the key until the values
    /// of the cancelled body are dropped; this drop has the same time limit again.
    #[must_use]
    pub const fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets the longest pause of a body whose lease has lapsed because the store does not answer its renewals (default:
    /// three times the lease). The body goes on if the store answers in time and no other attempt has taken over. After
    /// the longest pause the body is cancelled, and the call returns [`Error::LeaseLost`](crate::Error::LeaseLost) with
    /// the last error of the store. If the store refuses the renewal permanently, because a right is missing or the
    /// record is damaged, the body ends when its lease lapses.
    #[must_use]
    pub const fn max_pause(self, max_pause: Duration) -> Self {
        Self { max_pause: OptionalMillis::of(max_pause), ..self }
    }

    /// Sets the pause before a message is delivered again after a failure (default: from 1 s to 5 min).
    #[must_use]
    pub const fn backoff(self, backoff: Backoff) -> Self {
        Self { backoff, ..self }
    }

    /// Calls `hook` whenever an effect may have happened although no record shows it (default: no hook). Use the hook
    /// for alerts. [`Error::is_uncertain`](crate::Error::is_uncertain) gives the caller the same information, but a
    /// dropped call returns no error: only the hook reports it.
    ///
    /// The hook runs on the thread of the call, also while a dropped call is cleaned up, so it must be quick. A panic
    /// of the hook is caught and logged.
    #[must_use]
    pub const fn on_uncertain(self, hook: fn(Uncertain<'_>)) -> Self {
        Self { on_uncertain: Some(hook), ..self }
    }

    /// Sets the reaction of a duplicate while another attempt holds the key (default: [`InProgress::Reject`]).
    #[must_use]
    pub const fn in_progress(self, in_progress: InProgress) -> Self {
        Self { in_progress, ..self }
    }

    /// Sets the reaction of the next delivery to an attempt that crashed before it recorded an end (default:
    /// [`OnCrash::Retry`]).
    #[must_use]
    pub const fn on_crash(self, on_crash: OnCrash) -> Self {
        Self { on_crash, ..self }
    }

    /// Limits the runs of the body without a recorded result: after `max_attempts` runs the call returns
    /// [`Error::AttemptsExhausted`] instead of running the body again (default: unlimited). In a transaction of the
    /// user, `transact` counts the runs; a call in a transaction that the user opened without `transact` refuses this
    /// option.
    ///
    /// # Panics
    /// If `max_attempts` is zero, because the body could never run. In a `const` this panic is a compile error.
    ///
    /// [`Error::AttemptsExhausted`]: crate::Error::AttemptsExhausted
    #[must_use]
    pub const fn max_attempts(self, max_attempts: u32) -> Self {
        let limit = NonZeroU32::new(max_attempts);
        assert!(limit.is_some(), "`max_attempts` must be at least 1");
        Self { max_attempts: limit, ..self }
    }

    /// Limits the questions to the [reconciler](crate::Reconciliation) about one operation (default: 16). After this
    /// number of questions without an answer, duplicates get [`Error::Interrupted`](crate::Error::Interrupted) until an
    /// operator decides; a decision sets the number back to zero.
    ///
    /// # Panics
    /// If `max_reconciliations` is zero, because the reconciler could never be asked. In a `const` this panic is a
    /// compile error.
    #[must_use]
    pub const fn max_reconciliations(self, max_reconciliations: u16) -> Self {
        match NonZeroU16::new(max_reconciliations) {
            Some(max_reconciliations) => Self { max_reconciliations, ..self },
            None => panic!("`max_reconciliations` must be at least 1"),
        }
    }

    /// Returns the policy of a handler with a reconciler. A crash then leaves the operation interrupted, and the
    /// reconciler settles the doubt.
    pub(crate) const fn reconciling(self) -> Self {
        Self { on_crash: OnCrash::Fail, reconciles: true, ..self }
    }

    /// Returns the size limit of a recorded result.
    pub(crate) const fn result_limit(&self) -> usize {
        self.max_result_bytes as usize
    }

    /// Returns the largest number of questions to the reconciler; `None` if the handler has no reconciler.
    pub(crate) fn reconciliations(&self) -> Option<NonZeroU16> {
        self.reconciles.then_some(self.max_reconciliations)
    }

    /// Sets the reaction to a key that is `None`, empty or blank (default: [`MissingKey::Reject`]).
    #[must_use]
    pub const fn missing_key(self, missing_key: MissingKey) -> Self {
        Self { missing_key, ..self }
    }

    /// Sets the reaction to a store that can't reserve the key (default: [`OnStoreError::Fail`]).
    #[must_use]
    pub const fn on_store_error(self, on_store_error: OnStoreError) -> Self {
        Self { on_store_error, ..self }
    }

    /// Sets the size limit of a recorded result after encoding, in bytes (default: 256 KiB). A larger result is
    /// returned to its caller, and the completion is recorded without the result: duplicates get
    /// [`Error::ResultUnavailable`](crate::Error::ResultUnavailable).
    #[must_use]
    pub const fn max_result_bytes(self, max_result_bytes: usize) -> Self {
        Self { max_result_bytes: clamped(max_result_bytes), ..self }
    }

    /// Sets the reaction to a recorded result that can't be decoded any more (default: [`OnUndecodable::Error`]). A
    /// migration produces one return type, but a policy may serve handlers with several return types. So set a
    /// migration at the handler: `on_undecodable = migrate`.
    #[must_use]
    pub const fn on_undecodable(self, on_undecodable: OnUndecodable) -> Self {
        Self { on_undecodable, ..self }
    }

    /// Sets the part of a key that errors, logs and spans show (default: [`KeyDisplay::Whole`]).
    #[must_use]
    pub const fn key_display(self, key_display: KeyDisplay) -> Self {
        Self { key_display: DisplayByte::new(key_display), ..self }
    }

    /// Sets a fixed mode (default: [`Mode::Enforce`]).
    #[must_use]
    pub const fn mode(self, mode: Mode) -> Self {
        Self { mode: ModeSource::Fixed(mode), ..self }
    }

    /// Reads the mode from a switch at the beginning of each call.
    ///
    /// Before Rust 1.90 a `const` can't refer to a `static` with interior mutability: make a policy with a switch a
    /// `static`.
    #[must_use]
    pub const fn mode_switch(self, switch: &'static ModeSwitch) -> Self {
        Self { mode: ModeSource::Switch(switch), ..self }
    }

    /// Returns the mode of a call that begins now.
    pub fn current_mode(&self) -> Mode {
        match self.mode {
            ModeSource::Fixed(mode) => mode,
            ModeSource::Switch(switch) => switch.get(),
        }
    }

    /// Returns the time between two renewals: a third of the lease.
    pub const fn beat(&self) -> Duration {
        match self.lease.checked_div(3) {
            Some(beat) => beat,
            None => self.lease,
        }
    }

    /// Returns [`max_pause`](Self::max_pause), or its default if the option is not set.
    pub(crate) const fn longest_pause(&self) -> Duration {
        match self.max_pause.get() {
            Some(pause) => pause,
            None => self.lease.saturating_mul(3),
        }
    }

    /// Checks that the durations can be honoured.
    ///
    /// # Errors
    /// [`PolicyProblem`] names the option that can't be honoured, and suggests a value.
    pub const fn check(&self) -> Result<(), PolicyProblem> {
        if is_shorter(self.lease, Self::MIN_LEASE) {
            return Err(PolicyProblem::LeaseTooShort(self.lease));
        }
        if self.timeout.is_zero() {
            return Err(PolicyProblem::NoTime);
        }
        if is_shorter(Self::MAX_DURATION, self.lease) || is_shorter(Self::MAX_DURATION, self.ttl) {
            return Err(PolicyProblem::TooLong);
        }
        if let Some(error_ttl) = self.error_ttl.get()
            && (is_shorter(error_ttl, MILLISECOND) || is_shorter(Self::MAX_DURATION, error_ttl))
        {
            return Err(PolicyProblem::ErrorTtl(error_ttl));
        }
        // The comparison is in milliseconds, because stores keep the retention in milliseconds.
        if is_shorter(self.ttl, MILLISECOND) || is_shorter(self.ttl, self.beat()) {
            return Err(PolicyProblem::TtlTooShort { ttl: self.ttl, beat: self.beat() });
        }
        Ok(())
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

/// Returns whether `duration` is shorter than `other`. Each call checks its policy, and the comparison of nanoseconds
/// would multiply numbers of 128 bits; the comparison of the type itself is not `const`.
const fn is_shorter(duration: Duration, other: Duration) -> bool {
    let (seconds, nanos) = (duration.as_secs(), duration.subsec_nanos());
    seconds < other.as_secs() || (seconds == other.as_secs() && nanos < other.subsec_nanos())
}

/// Optional duration, in half the bytes of an `Option<Duration>`, because every call carries its policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptionalMillis(u64);

impl OptionalMillis {
    const NONE: Self = Self(u64::MAX);

    /// Rounds `duration` up to milliseconds.
    const fn of(duration: Duration) -> Self {
        let millis = duration.as_nanos().div_ceil(1_000_000);
        // The cast keeps the value, which is below `NONE`.
        #[allow(clippy::cast_possible_truncation)]
        Self(if millis < u64::MAX as u128 { millis as u64 } else { u64::MAX - 1 })
    }

    pub(crate) const fn get(self) -> Option<Duration> {
        match self.0 {
            u64::MAX => None,
            millis => Some(Duration::from_millis(millis)),
        }
    }
}

/// Returns `bytes`, but at most 4 GiB, because no store accepts a longer result.
const fn clamped(bytes: usize) -> u32 {
    // The cast keeps the value.
    #[allow(clippy::cast_possible_truncation)]
    if bytes < u32::MAX as usize { bytes as u32 } else { u32::MAX }
}

/// Reason why a [`Policy`] can't be honoured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PolicyProblem {
    /// The lease is shorter than [`Policy::MIN_LEASE`].
    LeaseTooShort(Duration),
    /// The retention is zero or shorter than the time between two renewals.
    #[non_exhaustive]
    TtlTooShort {
        /// Configured retention.
        ttl: Duration,
        /// Time between two renewals.
        beat: Duration,
    },
    /// The lease or the retention is longer than [`Policy::MAX_DURATION`].
    TooLong,
    /// The retention of recorded errors is zero or longer than [`Policy::MAX_DURATION`].
    ErrorTtl(Duration),
    /// The `timeout` is zero.
    NoTime,
    /// The broker may deliver a message again after its record has expired; see
    /// [`Observe::redelivery`](crate::future::Observe::redelivery).
    #[non_exhaustive]
    TtlBelowRedelivery {
        /// Configured retention.
        ttl: Duration,
        /// Time for which the broker may go on redelivering the message; `None` if that time is unlimited.
        redelivery: Option<Duration>,
    },
    /// The response timeout of the store is as long as the lease, or longer.
    #[non_exhaustive]
    LeaseBelowResponseTimeout {
        /// Configured lease.
        lease: Duration,
        /// Longest duration of a call of the store.
        response_timeout: Duration,
    },
}

impl fmt::Display for PolicyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseTooShort(lease) => {
                write!(
                    f,
                    "`lease` is {lease:?}, too short to be renewed in time; give at least {:?}",
                    Policy::MIN_LEASE
                )
            }
            Self::TtlTooShort { ttl, beat } => write!(
                f,
                "`ttl` is {ttl:?}, shorter than the time between two renewals ({beat:?}); \
                 give more than the broker keeps a message"
            ),
            Self::TooLong => write!(f, "`lease` or `ttl` is longer than 100 years"),
            Self::ErrorTtl(ttl) => {
                write!(f, "`error_ttl` is {ttl:?}; give more than zero and at most 100 years, or leave it out")
            }
            Self::NoTime => write!(f, "`timeout` is zero, so no body could run; leave it out or give it time"),
            Self::TtlBelowRedelivery { ttl, redelivery: Some(redelivery) } => write!(
                f,
                "`ttl` is {ttl:?}, and the broker may deliver the message again for up to {redelivery:?}: a duplicate that comes \
                 after `ttl` would run the body again; give a `ttl` of at least that"
            ),
            Self::TtlBelowRedelivery { ttl, redelivery: None } => write!(
                f,
                "`ttl` is {ttl:?}, and the broker may deliver the message again at any time, so no `ttl` suffices: let the \
                 broker delete messages after some time"
            ),
            Self::LeaseBelowResponseTimeout { lease, response_timeout } => write!(
                f,
                "`lease` is {lease:?}, but one store call may take {response_timeout:?}: a single slow call would \
                 lose the lease; give a lease of at least three times that, or the store a shorter `response_timeout`"
            ),
        }
    }
}

impl std::error::Error for PolicyProblem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_with_impossible_durations_is_refused() {
        let policy = Policy::new(Duration::from_secs(60));
        assert_eq!(policy.check(), Ok(()));
        assert_eq!(policy.beat(), Duration::from_secs(10));
        let short = Duration::from_millis(99);
        assert_eq!(policy.lease(short).check(), Err(PolicyProblem::LeaseTooShort(short)));
        assert!(matches!(policy.ttl(Duration::ZERO).check(), Err(PolicyProblem::TtlTooShort { .. })));
        assert!(matches!(policy.ttl(Duration::from_secs(9)).check(), Err(PolicyProblem::TtlTooShort { .. })));
        assert_eq!(policy.ttl(Duration::from_secs(10)).check(), Ok(()));
        assert_eq!(policy.ttl(Duration::MAX).check(), Err(PolicyProblem::TooLong));
    }

    #[test]
    fn a_mode_switch_changes_the_mode_of_its_policy() {
        static SWITCH: ModeSwitch = ModeSwitch::new(Mode::Off);
        static POLICY: Policy = Policy::new(Duration::from_secs(1)).mode_switch(&SWITCH);
        for mode in ModeSwitch::MODES {
            SWITCH.set(mode);
            assert_eq!(POLICY.current_mode(), mode);
        }
    }
}
