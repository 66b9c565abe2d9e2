//! Problems of a handler that the explorer finds.

use std::fmt;

/// A problem that a scenario has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub(super) scenario: String,
    pub(super) problem: Problem,
    pub(super) story: Vec<String>,
}

impl Finding {
    /// Name of the scenario, for [`Explorer::only`](super::Explorer::only).
    pub fn scenario(&self) -> &str {
        &self.scenario
    }

    /// Problem that the scenario has shown.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Story of the scenario: its actions line by line, with simulated times.
    pub fn story(&self) -> &[String] {
        &self.story
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.story {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "  alone: Explorer::new().only(\"{}\")", self.scenario)
    }
}

/// A problem of a handler.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Problem {
    /// An effect happened more often than in the plain run.
    Repeated {
        /// Name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the effect happened in the plain run.
        expected: usize,
        /// True if the handler has steps, and the effect happened outside of them.
        outside_of_steps: bool,
    },
    /// An effect of a step happened more often than in the plain run: the step was cut off between the effect and its
    /// journal entry, so the next attempt ran the step again, and the request had no key by which the other service
    /// recognises a repetition ([`Step::child_key`](crate::step::Step::child_key)).
    StepRepeated {
        /// Name of the step.
        step: String,
        /// Name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the effect happened in the plain run.
        expected: usize,
    },
    /// An effect of a step with `.fail()` or `.reconcile(…)` happened again, because an earlier body of the step had
    /// returned an error that counts as certain, although the effect had happened, or its request was on its way. See
    /// [`StepBuilder::uncertain_errors`](crate::step::StepBuilder::uncertain_errors).
    CertainError {
        /// Name of the step.
        step: String,
        /// Name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the effect happened in the plain run.
        expected: usize,
    },
    /// An effect happened again, because a reconciler answered [`NotDone`](crate::Reconciliation::NotDone), although
    /// the effect had happened, or its request was on its way.
    FalseNotDone {
        /// Name of the step whose reconciler answered; `None` for the reconciler of the handler.
        step: Option<String>,
        /// Name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the effect happened in the plain run.
        expected: usize,
    },
    /// An effect happened less often than in the plain run, or not at all.
    Missing {
        /// Name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the effect happened in the plain run.
        expected: usize,
    },
    /// An effect did not happen because its key had been used for another effect.
    KeyShared {
        /// Name of the effect that did not happen.
        effect: String,
        /// Name of the effect that had used the key before.
        other: String,
    },
    /// Messages with different ids arrived for a destination, more of them than in the plain run: the body published
    /// again, in another attempt or without the [outbox](crate::Attempt::outbox).
    MessageRepeated {
        /// Destination of the messages.
        destination: String,
        /// Number of messages with different ids.
        times: usize,
        /// Number of messages in the plain run.
        expected: usize,
    },
    /// Fewer messages arrived for a destination than in the plain run, or none.
    MessageMissing {
        /// Destination of the messages.
        destination: String,
        /// Number of messages with different ids.
        times: usize,
        /// Number of messages in the plain run.
        expected: usize,
    },
    /// Two messages with different content arrived with one id.
    MessageIdShared {
        /// Destination of the later message.
        destination: String,
    },
    /// A message was delivered many times and never acknowledged.
    Unacknowledged,
    /// A message was set aside although the plain run acknowledges it.
    SetAside,
    /// Two deliveries got different results, although both results were recorded or replayed.
    ResultsDiffer,
    /// The handler panicked.
    Panicked {
        /// Message of the panic.
        message: String,
    },
    /// A delivery did not end.
    Stuck,
    /// The handler has no counted effect, so the explorer can't find a problem; see
    /// [`Worker::effect`](super::Worker::effect).
    NothingCounted,
}

impl Problem {
    /// Returns whether the report shows one story for both problems.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Repeated { effect, .. }, Self::Repeated { effect: other, .. })
            | (Self::Missing { effect, .. }, Self::Missing { effect: other, .. }) => effect == other,
            (Self::MessageRepeated { destination, .. }, Self::MessageRepeated { destination: other, .. })
            | (Self::MessageMissing { destination, .. }, Self::MessageMissing { destination: other, .. }) => {
                destination == other
            }
            (Self::StepRepeated { step, effect, .. }, Self::StepRepeated { step: in_step, effect: other, .. })
            | (Self::CertainError { step, effect, .. }, Self::CertainError { step: in_step, effect: other, .. }) => {
                (step, effect) == (in_step, other)
            }
            (Self::FalseNotDone { step, effect, .. }, Self::FalseNotDone { step: in_step, effect: other, .. }) => {
                (step, effect) == (in_step, other)
            }
            _ => self == other,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated { effect, times, expected, outside_of_steps } => {
                f.write_str(&repeated(effect, *times, *expected))?;
                f.write_str(if *outside_of_steps { ", outside of a step" } else { "" })
            }
            Self::StepRepeated { step, effect, times, expected } => {
                write!(f, "{}: step `{step}` ran again without its key", repeated(effect, *times, *expected))
            }
            Self::CertainError { step, effect, times, expected } => write!(
                f,
                "{}: the body of step `{step}` returned an error that counts as certain",
                repeated(effect, *times, *expected)
            ),
            Self::FalseNotDone { step, effect, times, expected } => {
                let of_step = step.as_ref().map_or_else(String::new, |step| format!(" of step `{step}`"));
                let repeated = repeated(effect, *times, *expected);
                write!(f, "{repeated}: the reconciler{of_step} answered NotDone, and an earlier request had its effect")
            }
            Self::Missing { effect, times, expected } => {
                write!(f, "EFFECT MISSING: `{effect}` happened {}, not {}", often(*times), often(*expected))
            }
            Self::KeyShared { effect, other } => {
                write!(f, "KEY SHARED: `{effect}` was called with the key of `{other}`")
            }
            Self::MessageRepeated { destination, times, expected } => write!(
                f,
                "MESSAGE REPEATED: {times} messages with different ids arrived for `{destination}`, not {expected}"
            ),
            Self::MessageMissing { destination, times, expected } => {
                write!(f, "MESSAGE MISSING: {times} of {expected} messages arrived for `{destination}`")
            }
            Self::MessageIdShared { destination } => {
                write!(f, "MESSAGE ID SHARED: two messages for `{destination}` have one id and different content")
            }
            Self::Unacknowledged => f.write_str("NEVER ACKNOWLEDGED: the message was delivered again and again"),
            Self::SetAside => f.write_str("SET ASIDE: no delivery of the message could succeed"),
            Self::ResultsDiffer => f.write_str("RESULTS DIFFER: two deliveries got different results"),
            Self::Panicked { message } => write!(f, "PANIC: {message}"),
            Self::Stuck => f.write_str("STUCK: a delivery did not end"),
            Self::NothingCounted => f.write_str("NOTHING COUNTED: no effect was called through `Worker::effect`"),
        }
    }
}

fn repeated(effect: &str, times: usize, expected: usize) -> String {
    format!("EFFECT REPEATED: `{effect}` happened {}, not {}", often(times), often(expected))
}

fn often(times: usize) -> String {
    match times {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => format!("{times} times"),
    }
}
