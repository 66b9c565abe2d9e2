//! The journal of a running attempt: the steps that have ended, and the steps that run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::key::Fingerprint;
use crate::record::journal::{JournalEntry, JournalError, JournalWriter, StepProgress};
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
    /// Last entries of the steps of earlier attempts, and of steps of this attempt whose effects are in doubt, by name.
    /// A step takes its entry.
    earlier: BTreeMap<Box<str>, JournalEntry>,
    /// Names that this attempt has used: of running steps, and of steps that have ended with a value.
    used: BTreeSet<Box<str>>,
    /// Entries that the store has confirmed, of earlier attempts and of this attempt.
    confirmed: JournalWriter,
    /// Entries that the store has not confirmed, in the order in which their steps ended.
    unconfirmed: Vec<JournalEntry>,
    /// Number of unconfirmed entries that a write may have brought to the store, from the first one. These entries
    /// never change: the store would keep the longer one of two journals.
    sent: usize,
    /// Whether the end of the attempt fails if it has not reached a journaled step.
    strict: bool,
    /// Time until the reconciler of a step may know more.
    ask_again: Option<Duration>,
    /// Number of steps whose bodies run.
    running: usize,
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
    /// An earlier attempt has journaled the step, with this value.
    Ended { attempt: u32, inputs: Option<Fingerprint>, value: StoredResult },
    /// The step has to run. Its name is taken until [`StepJournal::give_back`].
    Runs,
    /// The effect of the step is in doubt since this entry. Its name is taken until [`StepJournal::leave_in_doubt`].
    InDoubt(JournalEntry),
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
        let (entries, damage) = match journal.entries() {
            Ok(entries) => (entries, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let confirmed = JournalWriter::after(journal, entries.len());
        let mut earlier = BTreeMap::new();
        for entry in entries {
            match entry.progress {
                StepProgress::Undone => earlier.remove(&entry.name),
                _ => earlier.insert(entry.name.clone(), entry),
            };
        }
        let steps = Steps { earlier, confirmed, damage, ..Steps::default() };
        Self { steps: Mutex::new(steps), turn: tokio::sync::Mutex::default() }
    }

    /// Takes `name` for a step that is about to begin. `was`: its name before a renaming.
    pub(crate) fn claim(&self, name: &str, was: Option<&str>) -> StepClaim {
        let mut steps = lock(&self.steps);
        if let Some(damage) = steps.damage {
            return StepClaim::Damaged(damage);
        }
        if steps.used.contains(name) || was.is_some_and(|was| steps.used.contains(was)) {
            return StepClaim::UsedTwice;
        }
        let earlier = [Some(name), was].into_iter().flatten().filter_map(|name| steps.earlier.remove(name)).reduce(
            // The entry of the new name is the later one.
            |renamed, _| renamed,
        );
        let claim = match earlier {
            Some(JournalEntry { progress: StepProgress::Ended(value), attempt, inputs, .. }) => {
                StepClaim::Ended { attempt, inputs, value }
            }
            Some(begun) => StepClaim::InDoubt(begun),
            None if steps.confirmed.entries() + steps.unconfirmed.len() + steps.running >= Self::MAX_ENTRIES => {
                return StepClaim::Full;
            }
            None => StepClaim::Runs,
        };
        steps.used.extend([Some(name), was].into_iter().flatten().map(Box::from));
        steps.running += usize::from(!matches!(claim, StepClaim::Ended { .. }));
        claim
    }

    /// Frees the names of a step that has ended without a value.
    pub(crate) fn give_back(&self, name: &str, was: Option<&str>) {
        let mut steps = lock(&self.steps);
        for name in [Some(name), was].into_iter().flatten() {
            steps.used.remove(name);
        }
        steps.running -= 1;
    }

    /// Frees the names of a step whose effect is in doubt since the entry `since`.
    pub(crate) fn leave_in_doubt(&self, name: &str, was: Option<&str>, since: JournalEntry) {
        self.give_back(name, was);
        lock(&self.steps).earlier.insert(since.name.clone(), since);
    }

    /// Adds an entry of a step that has not ended.
    pub(crate) fn add(&self, entry: JournalEntry) {
        lock(&self.steps).unconfirmed.push(entry);
    }

    /// Adds the entry of a step that has ended.
    pub(crate) fn end(&self, entry: JournalEntry) {
        let mut steps = lock(&self.steps);
        steps.unconfirmed.push(entry);
        steps.running -= 1;
    }

    /// Records that a step has ended whose entry is not in this journal. Its name stays taken.
    #[cfg(any(feature = "postgres", feature = "with-rusqlite"))]
    pub(crate) fn end_elsewhere(&self) {
        lock(&self.steps).running -= 1;
    }

    /// Takes back the entry `begun` of a body that will not run. If a write may have brought the entry to the store, a
    /// further entry cancels it with the next write.
    pub(crate) fn withdraw(&self, begun: &JournalEntry) {
        let Steps { unconfirmed, sent, .. } = &mut *lock(&self.steps);
        match unconfirmed.iter().rposition(|entry| entry == begun) {
            Some(at) if at >= *sent => drop(unconfirmed.remove(at)),
            _ => unconfirmed.push(JournalEntry { progress: StepProgress::Undone, ..begun.clone() }),
        }
    }

    /// Makes it an error if the attempt does not reach a step that an earlier attempt has journaled.
    pub(crate) fn be_strict(&self) {
        lock(&self.steps).strict = true;
    }

    /// Returns the names of the steps that an earlier attempt has journaled and this attempt has not reached, with the
    /// numbers of their attempts, and whether that is an error.
    pub(crate) fn unreached(&self) -> (Vec<(Box<str>, u32)>, bool) {
        let steps = lock(&self.steps);
        (steps.earlier.values().map(|entry| (entry.name.clone(), entry.attempt)).collect(), steps.strict)
    }

    /// Records that the reconciler of a step may know more after `pause`.
    pub(crate) fn ask_again(&self, pause: Duration) {
        let mut steps = lock(&self.steps);
        steps.ask_again = steps.ask_again.max(Some(pause));
    }

    /// Returns the time until the reconcilers of all steps may know more.
    pub(crate) fn asks_again(&self) -> Option<Duration> {
        lock(&self.steps).ask_again
    }

    /// Returns the write that brings the entry of the step `name` to the store, with all other unconfirmed entries;
    /// `None` if the store has confirmed the entry. Only the holder of `turn` writes.
    pub(crate) fn write(&self, name: &str) -> Option<JournalWrite> {
        let mut steps = lock(&self.steps);
        if !steps.unconfirmed.iter().any(|entry| *entry.name == *name) {
            return None;
        }
        let mut written = steps.confirmed.clone();
        for entry in &steps.unconfirmed {
            written.add(entry);
        }
        let (count, sent_before) = (steps.unconfirmed.len(), steps.sent);
        steps.sent = count;
        Some(JournalWrite { journal: Journal::new(written.into_bytes())?, count, sent_before })
    }

    /// Records that the store has confirmed `write`.
    pub(crate) fn confirm(&self, write: &JournalWrite) {
        let Steps { confirmed, unconfirmed, sent, .. } = &mut *lock(&self.steps);
        for entry in unconfirmed.drain(..write.count) {
            confirmed.add(&entry);
        }
        *sent -= write.count;
    }

    /// Removes the largest value from the entries of `write`, which the store can't hold and has not written. Returns
    /// the name of the step and the size of its value; `None` if no entry has a value that may be removed.
    pub(crate) fn drop_largest(&self, write: &JournalWrite) -> Option<(Box<str>, u64)> {
        let mut steps = lock(&self.steps);
        let entries = steps.unconfirmed[write.sent_before..write.count].iter_mut();
        let (value, name) = entries
            .filter_map(|JournalEntry { name, progress, .. }| match progress {
                StepProgress::Ended(value @ StoredResult::Encoded { .. }) => Some((value, name)),
                _ => None,
            })
            .max_by_key(|(value, _)| value.stored_bytes())?;
        let size = value.stored_bytes() as u64;
        *value = StoredResult::TooLarge { size };
        let name = name.clone();
        steps.sent = write.sent_before;
        Some((name, size))
    }
}

/// A journal to write.
#[derive(Debug)]
pub(crate) struct JournalWrite {
    pub(crate) journal: Journal,
    /// Number of unconfirmed entries that it contains.
    count: usize,
    /// Number of these entries that an earlier write may have brought to the store.
    sent_before: usize,
}
