//! Trace of a scenario that has run.

use std::time::Duration;

use super::problem::{Finding, Problem};
use super::worker::LaterDeliveries;

/// Trace of a scenario that has run.
pub(super) struct Run {
    pub(super) scenario: String,
    pub(super) awaits: Vec<String>,
    pub(super) store_calls: Vec<String>,
    pub(super) effect_calls: Vec<String>,
    pub(super) effects: std::collections::BTreeMap<String, usize>,
    /// Effects that a body repeated after its reconciler had answered `NotDone`, and whose first request arrived late.
    pub(super) too_early: std::collections::BTreeSet<String>,
    /// Steps that were journaled.
    pub(super) steps: std::collections::BTreeSet<String>,
    pub(super) later: LaterDeliveries,
    /// True if the handler has a reconciler.
    pub(super) reconciles: bool,
    /// Largest number of awaits of a delivery that asked its reconciler.
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
}
