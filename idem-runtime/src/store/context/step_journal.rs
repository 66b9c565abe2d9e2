//! The journal of a running attempt: the steps that have ended, and the steps that run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::record::journal::{JournalEntry, JournalError, JournalWriter};
use crate::record::{Journal, StoredResult};
use crate::sync::{Mutex, lock};

/// Steps of one attempt. Clones of the attempt, which tasks of the body may hold, share this value.
#[derive(Debug, Default)]
pub(crate) struct StepJournal {
    steps: Mutex<Steps>,
    /// Held by the task that writes the journal to the store. The entries of other steps that end meanwhile leave with
    /// the next write, together.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Steps {
    /// Entries of earlier attempts, by name. A step takes its entry.
    earlier: BTreeMap<Box<str>, JournalEntry>,
    /// Names that this attempt has used: of running steps, and of steps that have ended with a value.
    used: BTreeSet<Box<str>>,
    /// Entries that the store has confirmed, of earlier attempts and of this attempt.
    confirmed: JournalWriter,
    /// Entries that the store has not confirmed, in the order in which their steps ended.
    unconfirmed: Vec<JournalEntry>,
    /// Reason why the journal of earlier attempts can't be read.
    damage: Option<JournalError>,
}

/// Whether the steps of an attempt are journaled.
pub(crate) enum JournalAccess {
    On(Arc<StepJournal>),
    /// The attempt is one of shadow mode.
    Off,
    /// The attempt has ended.
    Ended,
}

/// Answer to a step that is about to begin.
#[derive(Debug)]
pub(crate) enum StepClaim {
    /// An earlier attempt has journaled the step.
    Ended(JournalEntry),
    /// The step has to run. Its name is taken until [`StepJournal::give_back`].
    Runs,
    /// This attempt has already used the name.
    UsedTwice,
    /// The journal has as many entries as it may have.
    Full,
    /// The journal of earlier attempts can't be read, so the step may have ended already.
    Damaged(JournalError),
}

impl StepJournal {
    /// Largest number of entries of a journal.
    pub(crate) const MAX_ENTRIES: usize = 1000;

    /// Makes the journal of an attempt that continues with `journal`.
    pub(crate) fn of(journal: &Journal) -> Self {
        let (earlier, damage) = match journal.entries() {
            Ok(entries) => (entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect(), None),
            Err(error) => (BTreeMap::new(), Some(error)),
        };
        let steps = Steps { earlier, confirmed: JournalWriter::after(journal), damage, ..Steps::default() };
        Self { steps: Mutex::new(steps), turn: tokio::sync::Mutex::default() }
    }

    /// Takes `name` for a step that is about to begin.
    pub(crate) fn claim(&self, name: &str) -> StepClaim {
        let mut steps = lock(&self.steps);
        if let Some(damage) = steps.damage {
            return StepClaim::Damaged(damage);
        }
        if !steps.used.insert(name.into()) {
            return StepClaim::UsedTwice;
        }
        if let Some(entry) = steps.earlier.remove(name) {
            return StepClaim::Ended(entry);
        }
        if steps.confirmed.entries() + steps.unconfirmed.len() >= Self::MAX_ENTRIES {
            steps.used.remove(name);
            return StepClaim::Full;
        }
        StepClaim::Runs
    }

    /// Frees the name of a step that has ended without a value.
    pub(crate) fn give_back(&self, name: &str) {
        lock(&self.steps).used.remove(name);
    }

    /// Adds the entry of a step that has ended.
    pub(crate) fn add(&self, entry: JournalEntry) {
        lock(&self.steps).unconfirmed.push(entry);
    }

    /// Returns the journal to write and its number of new entries, or `None` if the store has confirmed the entry of
    /// the step `name`.
    pub(crate) fn unconfirmed(&self, name: &str) -> Option<(Journal, usize)> {
        let steps = lock(&self.steps);
        if !steps.unconfirmed.iter().any(|entry| *entry.name == *name) {
            return None;
        }
        let mut written = steps.confirmed.clone();
        for entry in &steps.unconfirmed {
            written.add(entry);
        }
        Some((Journal::new(written.into_bytes())?, steps.unconfirmed.len()))
    }

    /// Records that the store has confirmed the first `count` entries that [`unconfirmed`](Self::unconfirmed) returned.
    pub(crate) fn confirm(&self, count: usize) {
        let Steps { confirmed, unconfirmed, .. } = &mut *lock(&self.steps);
        for entry in unconfirmed.drain(..count) {
            confirmed.add(&entry);
        }
    }

    /// Removes the value of the step `name` from its entry, because the store can't hold it. Returns false if the
    /// entry has no value.
    pub(crate) fn drop_value(&self, name: &str) -> bool {
        let mut steps = lock(&self.steps);
        let Some(entry) = steps.unconfirmed.iter_mut().find(|entry| *entry.name == *name) else { return false };
        let size = entry.value.stored_bytes();
        let had_value = matches!(entry.value, StoredResult::Encoded { .. });
        entry.value = StoredResult::TooLarge { size: size as u64 };
        had_value
    }
}
