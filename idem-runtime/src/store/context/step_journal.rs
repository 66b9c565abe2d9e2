//! The journal of a running attempt: the steps that have ended, the steps that run, and the messages that the body has
//! pushed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::key::Fingerprint;
use crate::policy::StepPolicy;
use crate::record::journal::{JournalEntry, JournalError, StepProgress};
use crate::record::messages::{self, OutgoingMessage, UnsentMessages};
use crate::record::{Journal, StoredResult};
use crate::sync::{Mutex, lock};

/// Steps of one attempt. Clones of the attempt, which tasks of the body may hold, share this value.
#[derive(Debug, Default)]
pub(crate) struct StepJournal {
    steps: Mutex<Steps>,
    /// Held by the task that writes the journal to the store. The entries of other steps that end meanwhile leave with
    /// the next write, together. A task that has waited too long writes without its turn: the holder may be a future
    /// that is not polled, because a `select!` of the body runs another step meanwhile.
    pub(crate) turn: tokio::sync::Mutex<()>,
    messages: Mutex<PushedMessages>,
}

/// Messages that the body of an attempt has pushed.
#[derive(Debug, Default)]
struct PushedMessages {
    messages: Vec<OutgoingMessage>,
    /// Size of the messages in a record.
    bytes: usize,
    /// True if the end of the attempt has been made: no further message can be part of it.
    sealed: bool,
    /// True if the store has published the messages together with the finished record.
    left: bool,
}

/// Reason why a message was not added.
pub(crate) enum PushRefusal {
    /// The end of the attempt has been made.
    Sealed,
    /// The messages would have this size.
    TooLarge(usize),
}

#[derive(Debug, Default)]
struct Steps {
    /// Last entries of the steps of earlier attempts, and the beginnings of all steps whose effects are in doubt, by
    /// name.
    earlier: BTreeMap<Arc<str>, JournalEntry>,
    /// Names that this attempt has used: of running steps, and of steps that have ended with a value. Each name has the
    /// bytes that are kept free in the journal for the entries of its step; `None` for a name before a renaming.
    used: BTreeMap<Arc<str>, Option<usize>>,
    /// Bytes that are kept free in the journal: the sum of `used`.
    room: usize,
    /// Journal that the store has confirmed, with the entries of earlier attempts and of this attempt; `None` if it has
    /// no entry.
    confirmed: Option<Journal>,
    /// Number of entries of `confirmed`.
    entries: usize,
    /// Entries that the store has not confirmed, in the order in which their steps ended.
    unconfirmed: Vec<JournalEntry>,
    /// Steps that this attempt has reached, and whose effects may have happened although no confirmed entry says so.
    doubts: BTreeSet<Arc<str>>,
    /// Number of entries of this attempt that the store has confirmed.
    done: usize,
    /// Number of entries of this attempt that a write may have brought to the store, at least `done`. These entries
    /// never change: the store would keep the longer one of two journals.
    sent: usize,
    policy: StepPolicy,
    /// Consequences of an error of the body.
    after_error: AfterError,
    /// Reason why the journal of earlier attempts can't be read.
    damage: Option<JournalError>,
}

/// Consequences of the steps of an attempt for its end, if its body returned an error.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct AfterError {
    /// True if the error must not be recorded as the end of the operation: a step was refused, or is in doubt.
    pub(crate) keeps_open: bool,
    /// True if an operator has to decide about a step in doubt.
    pub(crate) interrupts: bool,
    /// Time until the reconciler of a step may know more.
    pub(crate) ask_again: Option<Duration>,
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
    /// The effect of the step is in doubt since this entry. Its name is taken until [`StepJournal::give_back`].
    InDoubt(JournalEntry),
    /// This attempt has already used the name.
    UsedTwice,
    /// The journal has as many steps or entries as it may have.
    TooMany { max: usize },
    /// The journal has no room for the entries of the step.
    NoRoom { max: usize },
    /// The journal of earlier attempts can't be read, so the step may have ended already.
    Damaged(JournalError),
}

impl StepJournal {
    /// Largest number of entries of a journal, whatever number of steps its policy allows: a step that begins and is
    /// undone leaves two entries each time.
    const MAX_ENTRIES: usize = 8 * StepPolicy::DEFAULT_MAX_STEPS;

    /// Makes the journal of an attempt that continues with `journal`.
    pub(crate) fn of(journal: &Journal) -> Self {
        let (entries, damage) = match journal.entries() {
            Ok(entries) => (entries, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let (confirmed, count) = (Some(journal.clone()), entries.len());
        let mut earlier = BTreeMap::new();
        for entry in entries {
            match entry.progress {
                StepProgress::Undone => earlier.remove(&entry.name),
                _ => earlier.insert(entry.name.clone(), entry),
            };
        }
        let steps = Steps { earlier, confirmed, entries: count, damage, ..Steps::default() };
        Self { steps: Mutex::new(steps), ..Self::default() }
    }

    /// Adds a message that `address` makes of its place, unless the messages would have more than `max_bytes` in a
    /// record, or the end of the attempt has been made.
    pub(crate) fn push(
        &self,
        max_bytes: usize,
        address: impl FnOnce(usize) -> OutgoingMessage,
    ) -> Result<(), PushRefusal> {
        let pushed = &mut *lock(&self.messages);
        if pushed.sealed {
            return Err(PushRefusal::Sealed);
        }
        let message = address(pushed.messages.len());
        let bytes = pushed.bytes + messages::written_bytes(&message);
        if bytes > max_bytes {
            return Err(PushRefusal::TooLarge(bytes));
        }
        pushed.messages.push(message);
        pushed.bytes = bytes;
        Ok(())
    }

    /// Returns the messages that the body has pushed, `None` if there are none. From here on no message is added: it
    /// would be accepted and never leave.
    pub(crate) fn seal(&self) -> Option<UnsentMessages> {
        let pushed = &mut *lock(&self.messages);
        pushed.sealed = true;
        UnsentMessages::pushed(&pushed.messages)
    }

    /// Records that the store has published the messages together with the finished record.
    #[cfg(feature = "nats")]
    pub(crate) fn messages_left(&self) {
        lock(&self.messages).left = true;
    }

    /// Returns whether the store has published the messages together with the finished record.
    pub(crate) fn have_messages_left(&self) -> bool {
        lock(&self.messages).left
    }

    /// Takes `name` for a step that is about to begin. `was`: its name before a renaming. `store_limit`: largest
    /// journal that the store can hold.
    pub(crate) fn claim(&self, name: &Arc<str>, was: Option<&Arc<str>>, store_limit: usize) -> StepClaim {
        let mut steps = lock(&self.steps);
        if let Some(damage) = steps.damage {
            return StepClaim::Damaged(damage);
        }
        if steps.used.contains_key(name) || was.is_some_and(|was| steps.used.contains_key(was)) {
            return StepClaim::UsedTwice;
        }
        let names = || [Some(name), was].into_iter().flatten();
        let room = names().map(|name| room_for(name)).sum();
        // If both names have an entry, the entry of the new name is the later one.
        let claim = match names().find_map(|name| steps.earlier.get(name)).cloned() {
            Some(JournalEntry { progress: StepProgress::Ended(value), attempt, inputs, .. }) => {
                StepClaim::Ended { attempt, inputs, value }
            }
            Some(begun) => {
                steps.doubts.insert(Arc::clone(name));
                StepClaim::InDoubt(begun)
            }
            None => match steps.refusal(room, store_limit) {
                Some(refusal) => return refusal,
                None => StepClaim::Runs,
            },
        };
        // A step that has ended has its entry.
        let room = if let StepClaim::Ended { .. } = claim { 0 } else { room };
        steps.room += room;
        steps.used.extend(was.map(|was| (Arc::clone(was), None)));
        steps.used.insert(Arc::clone(name), Some(room));
        claim
    }

    /// Frees the names of a step that has ended without a value. A doubt about its effect remains.
    pub(crate) fn give_back(&self, name: &str, was: Option<&str>) {
        let mut steps = lock(&self.steps);
        for name in [Some(name), was].into_iter().flatten() {
            let room = steps.used.remove(name).flatten();
            steps.room -= room.unwrap_or_default();
        }
    }

    /// Frees the room of a step that has ended and adds no further entry.
    #[cfg(feature = "within")]
    pub(crate) fn free_room(&self, name: &str) {
        lock(&self.steps).free_room(name);
    }

    /// Returns whether the effect of the step `name`, which this attempt has reached, is in doubt.
    pub(crate) fn is_in_doubt(&self, name: &str) -> bool {
        lock(&self.steps).doubts.contains(name)
    }

    /// Records whether the effect of the step `name` is in doubt: from the beginning of its body until the body has
    /// returned an error that is certain, or the store has confirmed the entry of its end.
    pub(crate) fn doubt(&self, name: &Arc<str>, in_doubt: bool) {
        let doubts = &mut lock(&self.steps).doubts;
        match in_doubt {
            true => doubts.insert(Arc::clone(name)),
            false => doubts.remove(name),
        };
    }

    /// Returns the number of steps that this attempt has reached, and whose effects are in doubt.
    pub(crate) fn doubts(&self) -> u32 {
        u32::try_from(lock(&self.steps).doubts.len()).unwrap_or(u32::MAX)
    }

    /// Records that the store has confirmed the entry `begun`: from here on the effect of its step is in doubt.
    pub(crate) fn began(&self, begun: JournalEntry) {
        lock(&self.steps).earlier.insert(begun.name.clone(), begun);
    }

    /// Adds an entry of a step that has not ended.
    pub(crate) fn add(&self, entry: JournalEntry) {
        lock(&self.steps).unconfirmed.push(entry);
    }

    /// Adds the entry of a step that has ended. `since`: name under which its effect was in doubt. If the value does
    /// not fit into the rest of the journal, leaves out the value and returns its size.
    pub(crate) fn end(&self, mut entry: JournalEntry, since: Option<&str>, store_limit: usize) -> Option<u64> {
        let mut steps = lock(&self.steps);
        steps.free_room(&entry.name);
        let renamed = since.filter(|since| **since != *entry.name).map(|since| JournalEntry {
            name: since.into(),
            progress: StepProgress::Undone,
            inputs: entry.inputs,
            attempt: entry.attempt,
        });
        if let Some(since) = since {
            steps.earlier.remove(since);
        }
        let entry_bytes = entry.written_bytes();
        let beside = renamed.as_ref().map_or(0, JournalEntry::written_bytes);
        let left_out = match &mut entry.progress {
            StepProgress::Ended(value @ StoredResult::Encoded { .. })
                if steps.bytes() + steps.room + beside + entry_bytes > steps.limit(store_limit) =>
            {
                let size = value.stored_bytes() as u64;
                *value = StoredResult::TooLarge { size };
                Some(size)
            }
            _ => None,
        };
        // The end comes first: a journal that ends between the two entries still says that the step has ended.
        steps.unconfirmed.push(entry);
        steps.unconfirmed.extend(renamed);
        left_out
    }

    /// Adds the entry that the effect of a step, which was in doubt, has not happened.
    pub(crate) fn undo(&self, undone: JournalEntry) {
        let mut steps = lock(&self.steps);
        steps.earlier.remove(&undone.name);
        steps.unconfirmed.push(undone);
    }

    /// Takes back the entry `begun` of a body that will not run. If a write may have brought the entry to the store, a
    /// further entry cancels it with the next write.
    pub(crate) fn withdraw(&self, begun: &JournalEntry) {
        let Steps { unconfirmed, done, sent, .. } = &mut *lock(&self.steps);
        match unconfirmed.iter().rposition(|entry| entry == begun) {
            Some(at) if *done + at >= *sent => drop(unconfirmed.remove(at)),
            _ => unconfirmed.push(JournalEntry { progress: StepProgress::Undone, ..begun.clone() }),
        }
    }

    pub(crate) fn set_policy(&self, policy: StepPolicy) {
        lock(&self.steps).policy = policy;
    }

    pub(crate) fn policy(&self) -> StepPolicy {
        lock(&self.steps).policy
    }

    /// Returns the names of the steps that an earlier attempt than `attempt` has journaled and this attempt has not
    /// reached, with the numbers of their attempts, and whether that is an error.
    pub(crate) fn unreached(&self, attempt: u32) -> (Vec<(Arc<str>, u32)>, bool) {
        let steps = lock(&self.steps);
        let unreached =
            steps.earlier.values().filter(|entry| entry.attempt != attempt && !steps.used.contains_key(&entry.name));
        (unreached.map(|entry| (entry.name.clone(), entry.attempt)).collect(), steps.policy.strict)
    }

    /// Records that an error of the body must not end the operation.
    pub(crate) fn keep_open(&self) {
        lock(&self.steps).after_error.keeps_open = true;
    }

    /// Records that an operator has to decide about a step in doubt.
    pub(crate) fn interrupt(&self) {
        lock(&self.steps).after_error.interrupts = true;
    }

    /// Records that the reconciler of a step may know more after `pause`.
    pub(crate) fn ask_again(&self, pause: Duration) {
        let ask_again = &mut lock(&self.steps).after_error.ask_again;
        *ask_again = (*ask_again).max(Some(pause));
    }

    /// Returns what the steps mean for the end of the attempt if its body returned an error.
    pub(crate) fn after_error(&self) -> AfterError {
        let steps = lock(&self.steps);
        // A journal that can't be read may have a step in doubt.
        let in_doubt =
            steps.damage.is_some() || steps.earlier.values().any(|entry| entry.progress == StepProgress::Begun);
        AfterError { keeps_open: steps.after_error.keeps_open || in_doubt, ..steps.after_error }
    }

    /// Returns the write that brings the entry of the step `name` to the store, with all other unconfirmed entries;
    /// `None` if the store has confirmed the entry. See `turn` for who writes.
    pub(crate) fn write(&self, name: &str) -> Option<JournalWrite> {
        let mut steps = lock(&self.steps);
        if !steps.unconfirmed.iter().any(|entry| *entry.name == *name) {
            return None;
        }
        let journal = steps.written()?;
        let (upto, sent_before) = (steps.done + steps.unconfirmed.len(), steps.sent);
        steps.sent = upto;
        Some(JournalWrite { journal, upto, sent_before })
    }

    /// Returns the journal with all entries, if the policy keeps it with the result.
    pub(crate) fn kept(&self) -> Option<Journal> {
        let steps = lock(&self.steps);
        if steps.policy.keep { steps.written() } else { None }
    }

    /// Records that the store has confirmed `write`.
    pub(crate) fn confirm(&self, write: &JournalWrite) {
        let Steps { confirmed, entries, unconfirmed, doubts, done, .. } = &mut *lock(&self.steps);
        // Another task may have written these entries meanwhile; see `turn`.
        let count = write.upto.saturating_sub(*done);
        if count == 0 {
            return;
        }
        for entry in unconfirmed.drain(..count) {
            if let StepProgress::Ended(_) = entry.progress {
                doubts.remove(&entry.name);
            }
        }
        // The journal of a later write begins with the journal of each earlier write.
        *confirmed = Some(write.journal.clone());
        *entries += count;
        *done += count;
    }

    /// Removes the largest value from the entries of `write`, which the store can't hold and has not written. Returns
    /// the name of the step and the size of its value; `None` if no entry has a value that may be removed.
    pub(crate) fn drop_largest(&self, write: &JournalWrite) -> Option<(Arc<str>, u64)> {
        let Steps { unconfirmed, done, sent, .. } = &mut *lock(&self.steps);
        let unsent = write.sent_before.max(*done);
        if *sent != write.upto || unsent > write.upto {
            // Another task has sent these entries again, and its write may land.
            return None;
        }
        let entries = unconfirmed[unsent - *done..write.upto - *done].iter_mut();
        let (value, name) = entries
            .filter_map(|JournalEntry { name, progress, .. }| match progress {
                StepProgress::Ended(value @ StoredResult::Encoded { .. }) => Some((value, name)),
                _ => None,
            })
            .max_by_key(|(value, _)| value.stored_bytes())?;
        let size = value.stored_bytes() as u64;
        *value = StoredResult::TooLarge { size };
        let name = name.clone();
        *sent = unsent;
        Some((name, size))
    }
}

impl Steps {
    /// Returns why the journal can't take a further step, whose entries without a value need `room`.
    fn refusal(&self, room: usize, store_limit: usize) -> Option<StepClaim> {
        let max = self.policy.max_steps;
        let unused = self.earlier.keys().filter(|name| !self.used.contains_key(*name)).count();
        let entries = self.entries + self.unconfirmed.len();
        let used = self.used.values().flatten().count();
        if used + unused >= max || entries >= StepJournal::MAX_ENTRIES {
            return Some(StepClaim::TooMany { max: max.min(StepJournal::MAX_ENTRIES) });
        }
        let max = self.limit(store_limit);
        (self.bytes() + self.room + room > max).then_some(StepClaim::NoRoom { max })
    }

    /// Returns the journal with all entries; `None` if there are none.
    fn written(&self) -> Option<Journal> {
        Journal::continued(self.confirmed.as_ref(), self.unconfirmed.iter())
    }

    /// Returns the largest size of the journal.
    fn limit(&self, store_limit: usize) -> usize {
        self.policy.max_journal_bytes.min(store_limit)
    }

    /// Returns the size of the journal with all entries.
    fn bytes(&self) -> usize {
        self.confirmed.as_ref().map_or(0, |journal| journal.bytes().len())
            + self.unconfirmed.iter().map(JournalEntry::written_bytes).sum::<usize>()
    }

    fn free_room(&mut self, name: &str) {
        if let Some(Some(room)) = self.used.get_mut(name) {
            self.room -= std::mem::take(room);
        }
    }
}

/// Returns the size of the entries that a step of this name may need in one attempt, without a value: its beginning,
/// and its end or that it is undone.
fn room_for(name: &str) -> usize {
    2 * JournalEntry::bytes_without_value(name)
}

/// A journal to write.
#[derive(Debug)]
pub(crate) struct JournalWrite {
    pub(crate) journal: Journal,
    /// Number of entries of this attempt up to the last one in it.
    upto: usize,
    /// Number of these entries that an earlier write may have brought to the store.
    sent_before: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(name: &str) -> JournalEntry {
        let progress = StepProgress::Ended(StoredResult::Unencodable);
        JournalEntry { name: name.into(), attempt: 1, inputs: None, progress }
    }

    /// Two tasks write at a time if one of them has waited too long for its turn.
    #[test]
    fn answers_to_two_writes_leave_all_entries_in_either_order() {
        for is_late in [false, true] {
            let journal = StepJournal::default();
            let [first, second] = ["a", "b"].map(|name| {
                journal.end(ended(name), None, usize::MAX);
                journal.write(name).unwrap()
            });
            let answered = if is_late { [second, first] } else { [first, second] };
            for write in &answered {
                journal.confirm(write);
            }
            journal.end(ended("c"), None, usize::MAX);
            let entries = journal.write("c").unwrap().journal.entries().unwrap();
            assert_eq!(entries, ["a", "b", "c"].map(ended));
        }
    }
}
