//! Problems of a handler.

use std::fmt;

/// A problem in one scenario.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub(super) scenario: String,
    pub(super) problem: Problem,
    pub(super) story: Vec<String>,
}

impl Finding {
    /// The name of the scenario, for [`Explorer::only`](super::Explorer::only).
    pub fn scenario(&self) -> &str {
        &self.scenario
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The scenario line by line: simulated times and actions.
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
        /// The name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the plain run has the effect.
        expected: usize,
    },
    /// An effect did not happen, or less often than in the plain run.
    Missing {
        /// The name of the effect.
        effect: String,
        /// Number of times that the effect happened.
        times: usize,
        /// Number of times that the plain run has the effect.
        expected: usize,
    },
    /// An effect did not happen because its key had been used for another effect.
    KeyShared {
        /// The name of the effect.
        effect: String,
        /// The effect that did happen under the key.
        other: String,
    },
    /// A message was delivered many times and never acknowledged.
    Unacknowledged,
    /// A message was set aside although the plain run acknowledges it.
    SetAside,
    /// Two deliveries got different results, although both were recorded or replayed.
    ResultsDiffer,
    /// The handler panicked.
    Panicked {
        /// The message of the panic.
        message: String,
    },
    /// A delivery did not end.
    Stuck,
    /// The handler has no counted effect, so the explorer can't find anything: see
    /// [`Worker::effect`](super::Worker::effect).
    NothingCounted,
}

impl Problem {
    /// Returns whether one story can stand for both problems.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Repeated { effect, .. }, Self::Repeated { effect: other, .. })
            | (Self::Missing { effect, .. }, Self::Missing { effect: other, .. }) => effect == other,
            _ => self == other,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated { effect, times, expected } => {
                write!(f, "EFFECT REPEATED: `{effect}` happened {}, not {}", often(*times), often(*expected))
            }
            Self::Missing { effect, times, expected } => {
                write!(f, "EFFECT MISSING: `{effect}` happened {}, not {}", often(*times), often(*expected))
            }
            Self::KeyShared { effect, other } => {
                write!(f, "KEY SHARED: `{effect}` was called with the key of `{other}`")
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

pub(super) fn often(times: usize) -> String {
    match times {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => format!("{times} times"),
    }
}
