//! Reasons why a step did not run, or has no value.

use std::fmt;
use std::time::Duration;

use crate::codec::ResultProblem;
use crate::key::{Fingerprint, FingerprintError};
use crate::record::journal::{JournalError, MAX_STEP_NAME_BYTES};

/// Reason why a step did not run, or has no value; see [`Error::Step`](crate::Error::Step).
#[derive(Debug)]
#[non_exhaustive]
pub enum StepProblem {
    /// The name is empty, longer than 256 bytes, begins with `idem:`, or has a `[` outside of its key. The body of the
    /// step did not run.
    InvalidName,
    /// This attempt has already used the name, for a step that runs, or whose body has returned `Ok`. The body of the
    /// step did not run.
    UsedTwice,
    /// The step is inside of another step of the same attempt. The body of the step did not run.
    Nested,
    /// The attempt runs in the user's transaction, whose rows and record commit together. The body of the step did not
    /// run.
    InTransaction,
    /// The attempt has ended. The body of the step did not run.
    AttemptEnded,
    /// The journal holds as many steps as it may. The body of the step did not run.
    #[non_exhaustive]
    TooMany {
        /// Largest number of steps.
        max: usize,
    },
    /// The journal has no room for the entries of the step. The body of the step did not run.
    #[non_exhaustive]
    JournalFull {
        /// Largest size of the journal in bytes.
        max: usize,
    },
    /// The inputs can't be hashed. The body of the step did not run.
    InvalidInputs(FingerprintError),
    /// An earlier attempt ran the step with other inputs. The body of the step did not run again.
    #[non_exhaustive]
    OtherInputs {
        /// Number of the attempt that ran the step. For a step in a transaction: of the attempt in its record.
        attempt: u32,
        /// Fingerprint of the inputs in the journal; `None` if the step had no fingerprint.
        recorded: Option<Box<Fingerprint>>,
        /// Fingerprint of the inputs of this attempt.
        presented: Box<Fingerprint>,
    },
    /// The step has ended in an earlier attempt, but its value is not available. The body of the step did not run
    /// again.
    #[non_exhaustive]
    ValueUnavailable {
        /// Number of the attempt that ran the step. For a step in a transaction: of the attempt in its record.
        attempt: u32,
        /// Reason why there is no value.
        problem: Box<ResultProblem>,
    },
    /// The body of the step has begun in an earlier attempt, and its end is not known. The body did not run again, and
    /// an operator has to decide whether the effect happened.
    #[non_exhaustive]
    Interrupted {
        /// Number of the attempt whose effect is in doubt.
        attempt: u32,
    },
    /// The body of the step has begun in an earlier attempt, and the reconciler does not know whether the effect
    /// happened. The body did not run again.
    #[non_exhaustive]
    Unresolved {
        /// Number of the attempt whose effect is in doubt.
        attempt: u32,
        /// Time until the reconciler may know more.
        ask_again: Duration,
    },
    /// The body of the step ran for longer than its time limit and was dropped. Its effect may have happened; for a
    /// step in a transaction, the writes of the body are undone.
    #[non_exhaustive]
    TimedOut {
        /// Time limit of the step.
        timeout: Duration,
        /// Suggested time until the next delivery.
        retry_after: Duration,
    },
    /// The body of the handler returned `Ok` without having reached the step, which an earlier attempt has journaled,
    /// and [`StepPolicy::strict`](crate::policy::StepPolicy::strict) makes that an error. The result is not recorded.
    #[non_exhaustive]
    NotReached {
        /// Number of the attempt that ran the step.
        attempt: u32,
    },
    /// The journal can't be read, so the step may have ended in an earlier attempt. The body of the step did not run.
    UnreadableJournal(JournalError),
}

impl StepProblem {
    /// Returns whether the deployment is wrong, as opposed to the message.
    pub(crate) fn is_misconfiguration(&self) -> bool {
        match self {
            Self::InvalidName
            | Self::UsedTwice
            | Self::Nested
            | Self::InTransaction
            | Self::TooMany { .. }
            | Self::JournalFull { .. }
            | Self::NotReached { .. } => true,
            Self::ValueUnavailable { problem, .. } => problem.is_misconfiguration(),
            Self::UnreadableJournal(error) => matches!(error, JournalError::LaterVersion(_)),
            Self::AttemptEnded
            | Self::InvalidInputs(_)
            | Self::OtherInputs { .. }
            | Self::Interrupted { .. }
            | Self::Unresolved { .. }
            | Self::TimedOut { .. } => false,
        }
    }
}

impl fmt::Display for StepProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidName => write!(
                f,
                "the name is not valid, and the step did not run; use a text of 1 to {MAX_STEP_NAME_BYTES} bytes without \
                 `[`, which does not begin with `idem:`"
            ),
            Self::UsedTwice => f.write_str(
                "this attempt has already used the name, and the step did not run; in a loop, name each step with a key: \
                 `step((\"reserve\", line.sku))`",
            ),
            Self::Nested => f.write_str(
                "the step is inside of another step, and did not run; run the two steps one after the other",
            ),
            Self::InTransaction => f.write_str(
                "a call in your transaction keeps no journal, and the step did not run; the rows and the record of the \
                 call commit together, so the effect needs no step",
            ),
            Self::AttemptEnded => f.write_str("the attempt has ended, and the step did not run"),
            Self::TooMany { max } => {
                write!(f, "the journal holds {max} steps, and the step did not run; join steps, or use several handlers")
            }
            Self::JournalFull { max } => write!(
                f,
                "the journal has {max} bytes at most and no room for the step, which did not run; return smaller values from \
                 steps, or raise `StepPolicy::max_journal_bytes`, if the store can hold more"
            ),
            Self::InvalidInputs(error) => write!(f, "the inputs can't be hashed, and the step did not run: {error}"),
            Self::OtherInputs { attempt, recorded, presented } => {
                let recorded = recorded.as_ref().map_or_else(|| "no inputs".to_owned(), |it| it.short().to_string());
                write!(
                    f,
                    "attempt {attempt} ran the step with other inputs (fingerprint {recorded}, now {}), and the step did \
                     not run again; the inputs of a step must be the same on every attempt",
                    presented.short()
                )
            }
            Self::ValueUnavailable { attempt, problem } => {
                write!(f, "the step ended in attempt {attempt}, its value is not available, and it did not run again: {problem}")
            }
            Self::Interrupted { attempt } => write!(
                f,
                "the step began in attempt {attempt} and may have had its effect, and it did not run again; find out whether \
                 the effect happened, and record that with `idem resolve --step`"
            ),
            Self::Unresolved { attempt, ask_again } => write!(
                f,
                "the step began in attempt {attempt} and may have had its effect, and it did not run again; its reconciler \
                 is asked again in {ask_again:.0?}"
            ),
            Self::TimedOut { timeout, .. } => write!(
                f,
                "the step ran for longer than its time limit of {timeout:?} and was dropped; its effect may have happened"
            ),
            Self::NotReached { attempt } => write!(
                f,
                "attempt {attempt} has journaled the step, and this attempt returned `Ok` without having reached it; the \
                 result is not recorded; give a renamed step its old name by `was`, or remove `StepPolicy::strict`"
            ),
            Self::UnreadableJournal(error) => {
                write!(f, "the steps of earlier attempts can't be read, and the step did not run: {error}")
            }
        }
    }
}
