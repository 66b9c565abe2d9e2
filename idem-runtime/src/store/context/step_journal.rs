//! The journal of a running attempt: the steps that have ended, and the steps that run.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::record::Journal;
use crate::record::journal::{JournalEntry, JournalError, JournalWriter};
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
    /// All entries of earlier attempts and of this attempt.
    written: JournalWriter,
    /// Number of bytes of `written` that the store has confirmed.
    confirmed: usize,
    /// Reason why the journal of earlier attempts can't be read.
    damage: Option<JournalError>,
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
        let (written, confirmed) = (JournalWriter::after(journal), journal.bytes().len());
        let steps = Steps { earlier, used: BTreeSet::new(), written, confirmed, damage };
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
        if steps.written.entries() >= Self::MAX_ENTRIES {
            steps.used.remove(name);
            return StepClaim::Full;
        }
        StepClaim::Runs
    }

    /// Frees the name of a step that has ended without a value.
    pub(crate) fn give_back(&self, name: &str) {
        lock(&self.steps).used.remove(name);
    }

    /// Adds the entry of a step that has ended. Returns the length of the journal with this entry.
    pub(crate) fn add(&self, entry: &JournalEntry) -> usize {
        let mut steps = lock(&self.steps);
        steps.written.add(entry);
        steps.written.len()
    }

    /// Returns the journal to write, or `None` if the store has confirmed the first `len` bytes.
    pub(crate) fn unconfirmed(&self, len: usize) -> Option<Journal> {
        let steps = lock(&self.steps);
        (steps.confirmed < len).then(|| Journal::new(Bytes::copy_from_slice(steps.written.bytes()))).flatten()
    }

    /// Records that the store has confirmed `journal`.
    pub(crate) fn confirm(&self, journal: &Journal) {
        let mut steps = lock(&self.steps);
        steps.confirmed = steps.confirmed.max(journal.bytes().len());
    }
}
