//! Trace of a scenario that has run.

use std::collections::BTreeMap;
use std::time::Duration;

use super::effects::{EffectCount, EffectPlace};
use super::problem::{Finding, Problem};
use crate::record::StoredResult;

/// Trace of a scenario that has run.
pub(super) struct Run {
    pub(super) scenario: String,
    pub(super) awaits: Vec<String>,
    pub(super) store_calls: Vec<String>,
    pub(super) effect_calls: Vec<String>,
    /// Number of times that each effect has happened in each place.
    pub(super) effects: BTreeMap<EffectPlace, EffectCount>,
    /// Number of messages with different ids that have arrived for each destination.
    pub(super) messages: BTreeMap<String, usize>,
    /// Values of the steps that were journaled.
    pub(super) step_values: BTreeMap<String, StoredResult>,
    /// True if a later delivery may find an effect in doubt: the handler has a reconciler, or a step that journals its
    /// beginning.
    pub(super) leaves_doubts: bool,
    /// Largest number of awaits of a delivery that found an effect in doubt.
    pub(super) awaits_in_doubt: usize,
    pub(super) values: Vec<String>,
    pub(super) set_aside: bool,
    pub(super) problems: Vec<Problem>,
    pub(super) story: Vec<String>,
    pub(super) lease: Duration,
}

impl Run {
    pub(super) fn finding(&self, problem: Problem) -> Finding {
        Finding { scenario: self.scenario.clone(), problem, story: self.story.clone() }
    }

    /// Returns what other scenarios use of this run, the plain run.
    pub(super) fn facts(&self) -> PlainFacts {
        let mut step_effects: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for ((effect, step), happened) in &self.effects {
            if let Some(step) = step {
                step_effects.entry(step.clone()).or_default().insert(effect.clone(), happened.times);
            }
        }
        PlainFacts { lease: self.lease, step_effects, step_values: self.step_values.clone() }
    }
}

/// Facts of the plain run that other scenarios use.
#[derive(Default)]
pub(super) struct PlainFacts {
    pub(super) lease: Duration,
    /// Effects of each step, and how often each of them happened.
    pub(super) step_effects: BTreeMap<String, BTreeMap<String, usize>>,
    pub(super) step_values: BTreeMap<String, StoredResult>,
}
