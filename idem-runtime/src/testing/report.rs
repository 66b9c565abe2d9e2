//! The findings of an exploration.

use std::collections::BTreeMap;
use std::fmt;

use super::explorer::Run;

/// The findings of [`explore`](super::explore). `Display` writes them for people; the same handler gives the same text.
#[derive(Clone, Debug)]
#[must_use = "look at its findings, or call `assert_once`"]
pub struct Report {
    at_most_once: bool,
    scenarios: usize,
    awaits: Vec<String>,
    store_calls: Vec<String>,
    effect_calls: Vec<String>,
    /// Number of times that each effect happens in the plain run.
    expected: BTreeMap<String, usize>,
    set_aside: bool,
    findings: Vec<Finding>,
    pub(super) left_out: usize,
    pub(super) incomplete: bool,
}

impl Report {
    pub(super) fn new(at_most_once: bool, plain: &Run) -> Self {
        Self {
            at_most_once,
            scenarios: 0,
            awaits: plain.awaits.clone(),
            store_calls: plain.store_calls.clone(),
            effect_calls: plain.effect_calls.clone(),
            expected: plain.effects.clone(),
            set_aside: plain.set_aside,
            findings: Vec::new(),
            left_out: 0,
            incomplete: false,
        }
    }

    /// Returns the number of scenarios that were run.
    pub fn scenarios(&self) -> usize {
        self.scenarios
    }

    /// Returns the number of scenarios that the limit left out.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Returns the awaits at which the plain run was pending. The delivery was cut at each of them.
    pub fn awaits(&self) -> &[String] {
        &self.awaits
    }

    /// Returns the store calls of the plain run. Each of them failed in some scenario.
    pub fn store_calls(&self) -> &[String] {
        &self.store_calls
    }

    /// Returns the effects that the plain run called, and the [questions](super::Worker::happened) that it asked. In
    /// some scenario each answer got lost.
    pub fn effects(&self) -> &[String] {
        &self.effect_calls
    }

    /// Returns the findings, in the order of the scenarios.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Asserts that every effect happened as often as expected, and every message ended.
    ///
    /// # Panics
    /// With the report, if there are findings, or if the default limit left scenarios out.
    pub fn assert_once(&self) {
        assert!(self.findings.is_empty() && !self.incomplete, "{self}");
    }

    pub(super) fn size(&self) -> String {
        format!(
            "{}, {} and {}",
            counted(self.awaits.len(), "await"),
            counted(self.store_calls.len(), "store call"),
            counted(self.effect_calls.len(), "effect")
        )
    }

    pub(super) fn clear(&mut self) {
        self.findings.clear();
        self.scenarios = 0;
    }

    pub(super) fn add(&mut self, run: &Run, problem: Problem) {
        self.findings.push(run.finding(problem));
    }

    /// Compares a run with the plain run.
    pub(super) fn judge(&mut self, run: &Run, at_most_once: bool) {
        self.scenarios += 1;
        for problem in &run.problems {
            self.add(run, problem.clone());
        }
        let mut problems = Vec::new();
        for (effect, &times) in &run.effects {
            let expected = self.expected.get(effect).copied().unwrap_or_default();
            if times > expected {
                problems.push(Problem::Repeated { effect: effect.clone(), times, expected });
            }
        }
        for (effect, &expected) in &self.expected {
            let times = run.effects.get(effect).copied().unwrap_or_default();
            if times < expected && !(at_most_once && run.set_aside) {
                problems.push(Problem::Missing { effect: effect.clone(), times, expected });
            }
        }
        if run.set_aside && !self.set_aside && !at_most_once {
            problems.push(Problem::SetAside);
        }
        if run.values.iter().any(|value| *value != run.values[0]) {
            problems.push(Problem::ResultsDiffer);
        }
        for problem in problems {
            self.add(run, problem);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let promise = if self.at_most_once { "at most once" } else { "exactly once" };
        writeln!(f, "{} of a handler with {}: {promise}", counted(self.scenarios, "scenario"), self.size())?;
        if self.left_out > 0 {
            writeln!(f, "{} more were left out; see `Explorer::max_scenarios`", self.left_out)?;
        }
        if self.findings.is_empty() {
            return write!(f, "nothing found");
        }
        // One story for each problem, from the scenario with the fewest lines.
        let mut problems: Vec<(&Problem, Vec<&Finding>)> = Vec::new();
        for finding in &self.findings {
            match problems.iter_mut().find(|(problem, _)| problem.is_like(&finding.problem)) {
                Some((_, findings)) => findings.push(finding),
                None => problems.push((&finding.problem, vec![finding])),
            }
        }
        for (_, findings) in problems {
            let Some(shortest) = findings.iter().min_by_key(|finding| finding.story.len()) else { continue };
            let Finding { problem, .. } = shortest;
            writeln!(f, "\n{problem}, in {} of the scenarios; this is one of them:", findings.len())?;
            write!(f, "{shortest}")?;
            let others: Vec<_> = findings.iter().filter(|it| it.scenario != shortest.scenario).collect();
            if !others.is_empty() {
                let shown: Vec<_> = others.iter().take(8).map(|finding| finding.scenario.as_str()).collect();
                let more = if others.len() > shown.len() { ", …" } else { "" };
                writeln!(f, "  also in: {}{more}", shown.join(", "))?;
            }
        }
        Ok(())
    }
}

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
    fn is_like(&self, other: &Self) -> bool {
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

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn often(times: usize) -> String {
    match times {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => format!("{times} times"),
    }
}
