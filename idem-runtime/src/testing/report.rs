//! Report of an exploration.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::effects::{EffectCount, EffectPlace, RepetitionCause, totals};
use super::problem::{Finding, Problem};
use super::run::Run;

/// Findings of [`explore`](super::explore). `Display` writes the findings as text. Two explorations of one handler give
/// equal texts.
#[derive(Clone, Debug)]
#[must_use = "look at its findings, or call `assert_once`"]
pub struct Report {
    at_most_once: bool,
    scenarios: usize,
    awaits: Vec<String>,
    store_calls: Vec<String>,
    effect_calls: Vec<String>,
    /// Number of times that each effect happened in each place of the plain run.
    expected: BTreeMap<EffectPlace, EffectCount>,
    /// Number of messages for each destination in the plain run.
    expected_messages: BTreeMap<String, usize>,
    set_aside: bool,
    /// Number of steps of the handler.
    steps: usize,
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
            expected_messages: plain.messages.clone(),
            set_aside: plain.set_aside,
            steps: plain.step_values.len(),
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

    /// Returns the awaits at which the plain run was pending. Other scenarios cut the delivery at each await.
    pub fn awaits(&self) -> &[String] {
        &self.awaits
    }

    /// Returns the store calls of the plain run. For each of these calls there is another scenario in which the
    /// call failed.
    pub fn store_calls(&self) -> &[String] {
        &self.store_calls
    }

    /// Returns the effects of the plain run, and its [questions](super::Worker::happened) about effects. For each of
    /// these effects and questions there is another scenario in which the handler got no answer.
    pub fn effects(&self) -> &[String] {
        &self.effect_calls
    }

    /// Returns the findings, in the order of the scenarios.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Asserts that every effect happened as often as expected, and that every message was acknowledged or set aside as
    /// expected.
    ///
    /// # Panics
    /// If there are findings, or if the default limit left scenarios out. The panic message contains the report.
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

    /// Adds the differences between `run` and the plain run to the findings.
    pub(super) fn judge(&mut self, run: &Run, at_most_once: bool) {
        self.scenarios += 1;
        for problem in &run.problems {
            self.add(run, problem.clone());
        }
        let mut problems = Vec::new();
        let (times, expected) = (totals(&run.effects), totals(&self.expected));
        for (place @ (effect, step), happened) in &run.effects {
            let times = (times[&**effect], expected.get(&**effect).copied().unwrap_or_default());
            let expected_here = self.expected.get(place).map_or(0, |expected| expected.times);
            if times.0 > times.1 && happened.times > expected_here {
                problems.push(self.repetition(effect, step.as_ref(), times, happened.cause));
            }
        }
        for (effect, expected) in expected {
            let times = times.get(effect).copied().unwrap_or_default();
            if times < expected && !(at_most_once && run.set_aside) {
                problems.push(Problem::Missing { effect: effect.to_owned(), times, expected });
            }
        }
        let may_miss = at_most_once && run.set_aside;
        for destination in self.expected_messages.keys().chain(run.messages.keys()).collect::<BTreeSet<_>>() {
            let number = |of: &BTreeMap<String, usize>| of.get(destination).copied().unwrap_or_default();
            let (times, expected) = (number(&run.messages), number(&self.expected_messages));
            let destination = destination.clone();
            match times.cmp(&expected) {
                Ordering::Greater => problems.push(Problem::MessageRepeated { destination, times, expected }),
                Ordering::Less if !may_miss => {
                    problems.push(Problem::MessageMissing { destination, times, expected });
                }
                _ => {}
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

    /// Returns the problem of an effect that happened too often in `step`, or outside of a step.
    fn repetition(
        &self,
        effect: &str,
        step: Option<&String>,
        (times, expected): (usize, usize),
        cause: RepetitionCause,
    ) -> Problem {
        let (effect, step) = (effect.to_owned(), step.cloned());
        match (cause, step) {
            (RepetitionCause::NotDone { by_step }, step) => {
                Problem::FalseNotDone { step: step.filter(|_| by_step), effect, times, expected }
            }
            (RepetitionCause::CertainError, Some(step)) => Problem::CertainError { step, effect, times, expected },
            (_, Some(step)) => Problem::StepRepeated { step, effect, times, expected },
            (_, None) => Problem::Repeated { effect, times, expected, outside_of_steps: self.steps > 0 },
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
        // Each problem is shown with one story, from the scenario with the fewest lines.
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

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
