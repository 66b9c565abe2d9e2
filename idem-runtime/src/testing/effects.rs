//! Effects that have happened in a scenario, and the causes of their repetitions.

use std::collections::BTreeMap;

use crate::key::Key;
use crate::record::journal::{JournalEntry, StepProgress};
use crate::record::messages::OutgoingMessage;

/// Part of a handler that requests an effect.
#[derive(Clone, Default)]
pub(super) struct Requester {
    /// Operation and number of the attempt; `None` outside of a handler.
    pub(super) attempt: Option<(Key, u32)>,
    /// Operation and name of the step; `None` outside of a step.
    pub(super) step: Option<(Key, String)>,
    pub(super) rerun: Option<Rerun>,
}

/// Reason why a body runs, although an earlier body may have had its effect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rerun {
    /// The reconciler of the handler has answered that nothing happened.
    NotDone,
    /// The reconciler of the step has answered that nothing happened.
    StepNotDone,
    /// An earlier body of the step has returned an error that is certain.
    CertainError,
}

impl Rerun {
    /// Returns why the body of the step `step` runs in the attempt `attempt`, as the journal shows it. `entries`:
    /// entries of the journal before the end of this body.
    pub(super) fn of_step(entries: &[JournalEntry], step: &str, attempt: u32) -> Option<Self> {
        let (mut begun, mut last, mut undone) = (0, 0, false);
        for entry in entries.iter().filter(|entry| *entry.name == *step) {
            match entry.progress {
                StepProgress::Begun => (begun, last) = (begun + 1, entry.attempt),
                StepProgress::Undone => (begun, undone) = (0, true),
                StepProgress::Ended(_) => (begun, undone) = (0, false),
            }
        }
        // The beginning of a body in doubt is followed by another one only after the answer of the reconciler.
        match begun > 1 && last == attempt {
            true => Some(Self::StepNotDone),
            false => undone.then_some(Self::CertainError),
        }
    }
}

/// An effect that has happened.
pub(super) struct PastEffect {
    pub(super) name: String,
    pub(super) key: Option<String>,
    pub(super) by: Requester,
    /// True if the request arrived after its caller had given up, stood still or died.
    pub(super) arrived_late: bool,
}

/// Name of an effect, and the step that requests the effect; `None` outside of a step.
pub(super) type EffectPlace = (String, Option<String>);

/// Number of times that an effect has happened in one place, and the likely cause of a repetition.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct EffectCount {
    pub(super) times: usize,
    pub(super) cause: RepetitionCause,
}

/// Likely cause of the repetition of an effect.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) enum RepetitionCause {
    /// The body ran again.
    #[default]
    Rerun,
    /// A reconciler, that of the handler or of the step, has answered that nothing happened.
    NotDone { by_step: bool },
    /// The body of a step has returned an error that is certain.
    CertainError,
}

impl PastEffect {
    /// Returns the likely cause if this effect is the repetition of another effect in `all`.
    fn cause(&self, all: &[Self]) -> RepetitionCause {
        let Some(rerun) = self.by.rerun else { return RepetitionCause::Rerun };
        let by_step = match rerun {
            Rerun::CertainError => return RepetitionCause::CertainError,
            Rerun::StepNotDone => true,
            Rerun::NotDone => false,
        };
        let is_of_earlier_body =
            |other: &Self| other.arrived_late || other.by.attempt != self.by.attempt || other.by.rerun != self.by.rerun;
        let mut others = all.iter().filter(|other| other.name == self.name && !std::ptr::eq(*other, self));
        if others.any(is_of_earlier_body) { RepetitionCause::NotDone { by_step } } else { RepetitionCause::Rerun }
    }
}

/// Returns how often each effect has happened in each place.
pub(super) fn count(all: &[PastEffect]) -> BTreeMap<EffectPlace, EffectCount> {
    let mut counts: BTreeMap<EffectPlace, EffectCount> = BTreeMap::new();
    for effect in all {
        let step = effect.by.step.as_ref().map(|(_, step)| step.clone());
        let happened = counts.entry((effect.name.clone(), step)).or_default();
        happened.times += 1;
        if happened.cause == RepetitionCause::Rerun {
            happened.cause = effect.cause(all);
        }
    }
    counts
}

/// Returns the number of messages for each destination.
pub(super) fn count_messages<'a>(messages: impl Iterator<Item = &'a OutgoingMessage>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for message in messages {
        *counts.entry(message.destination().to_owned()).or_default() += 1;
    }
    counts
}

/// Returns how often each effect has happened.
pub(super) fn totals(counts: &BTreeMap<EffectPlace, EffectCount>) -> BTreeMap<&str, usize> {
    let mut totals = BTreeMap::new();
    for ((effect, _), happened) in counts {
        *totals.entry(&**effect).or_default() += happened.times;
    }
    totals
}
