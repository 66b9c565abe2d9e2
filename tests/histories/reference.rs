//! Reference that computes the correct answers of a store, written as simply as possible and without the library's
//! code.
//!
//! A time is a number of milliseconds. Owners are small numbers, and each requested reservation has an owner of its
//! own.

use std::collections::HashMap;

use idem_runtime::OnCrash;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Action, Finish, Release, Standing, UnsentMessages, Verdict};

/// Reservation that a history requests.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) key: usize,
    pub(crate) owner: usize,
    pub(crate) lease: u64,
    pub(crate) ttl: u64,
    pub(crate) fingerprint: Option<u8>,
    pub(crate) on_crash: OnCrash,
    pub(crate) max_attempts: Option<u32>,
    /// Limit of the questions to the caller's reconciler; `None` without a reconciler.
    pub(crate) max_reconciliations: Option<u16>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Pending { lease: u64, ttl: u64, on_crash: OnCrash, begun: bool, lapses_at: u64 },
    Released,
    Interrupted,
    Finished(Finish),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub(crate) owner: usize,
    /// Number of decisions since the latest attempt began; `by` is the operator who decided last.
    pub(crate) decisions: u32,
    pub(crate) by: String,
    pub(crate) attempt: u32,
    pub(crate) starts: u32,
    pub(crate) fingerprint: Option<u8>,
    /// Number of questions to a reconciler since the last decision.
    pub(crate) asked: u16,
    pub(crate) phase: Phase,
    pub(crate) forgotten_at: u64,
    /// Size of the journal in bytes; zero without a journal.
    pub(crate) journal: usize,
    /// Messages of a finished operation that are not marked as sent.
    pub(crate) unsent: Vec<Unsent>,
}

/// Message that is not marked as sent.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Unsent {
    pub(crate) id: String,
    pub(crate) refusals: u32,
    pub(crate) set_aside: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Reserved { attempt: u32, starts: u32, fingerprint: Option<u8>, takeover: bool, in_doubt: bool },
    Pending { attempt: u32, lapses_in: u64 },
    Finished(Entry),
    Mismatch { attempt: u32 },
    Interrupted { attempt: u32 },
    Exhausted { attempts: u32 },
    Released { attempt: u32 },
}

/// Record as an operator saw it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Sight {
    pub(crate) owner: usize,
    pub(crate) decisions: u32,
    pub(crate) attempt: u32,
    pub(crate) standing: Standing,
    /// Size of the journal in bytes.
    pub(crate) journal: usize,
}

/// Owner that has made no request.
#[allow(dead_code, reason = "the simulation alone meets owners whose requests it has not heard of")]
pub(crate) const NOBODY: usize = usize::MAX;

#[derive(Clone, Default, Debug)]
pub(crate) struct Reference {
    pub(crate) now: u64,
    entries: HashMap<usize, Entry>,
}

impl Reference {
    pub(crate) fn look(&self, key: usize) -> Option<&Entry> {
        self.entries.get(&key).filter(|entry| self.now < entry.forgotten_at)
    }

    fn touch(&mut self, key: usize) -> Option<&mut Entry> {
        let now = self.now;
        self.entries.get_mut(&key).filter(|entry| now < entry.forgotten_at)
    }

    /// Grants an attempt. `asked` is its number of questions, and `in_doubt` is true if its reconciler is asked first.
    fn grant(
        &mut self,
        ask: &Ask,
        (attempt, starts): (u32, u32),
        fingerprint: Option<u8>,
        takeover: bool,
        (asked, in_doubt): (u16, bool),
    ) -> Answer {
        let lapses_at = self.now + ask.lease;
        // The mark of the body in doubt remains.
        let begun = in_doubt;
        let phase = Phase::Pending { lease: ask.lease, ttl: ask.ttl, on_crash: ask.on_crash, begun, lapses_at };
        let forgotten_at = lapses_at + ask.ttl;
        let (owner, decisions, by) = (ask.owner, 0, String::new());
        let journal = self.look(ask.key).map_or(0, |earlier| earlier.journal);
        let unsent = Vec::new();
        let entry =
            Entry { owner, decisions, by, attempt, starts, fingerprint, asked, phase, forgotten_at, journal, unsent };
        self.entries.insert(ask.key, entry);
        Answer::Reserved { attempt, starts, fingerprint, takeover, in_doubt }
    }

    /// Answers a request about an effect in doubt: a caller with a reconciler gets the key.
    fn settle_doubt(&mut self, ask: &Ask, entry: &Entry, takeover: bool) -> Answer {
        let Entry { owner, attempt, fingerprint, asked, .. } = *entry;
        // A lapsed attempt whose record is not marked may never have begun its body, and is not counted.
        let unmarked = matches!(entry.phase, Phase::Pending { begun: false, .. }) && entry.starts > 0;
        let starts = entry.starts - u32::from(unmarked);
        // The request takes effect late: its owner has already ended its attempt.
        if owner == ask.owner && ask.max_reconciliations.is_some() {
            return Answer::Released { attempt };
        }
        if ask.max_reconciliations.is_none_or(|max| asked >= max) {
            return Answer::Interrupted { attempt };
        }
        self.grant(ask, (attempt + 1, starts + 1), ask.fingerprint.or(fingerprint), takeover, (asked + 1, true))
    }

    pub(crate) fn reserve(&mut self, ask: &Ask) -> Answer {
        let Some(entry) = self.look(ask.key).cloned() else {
            return self.grant(ask, (1, 1), ask.fingerprint, false, (0, false));
        };
        let Entry { owner, attempt, starts, fingerprint, asked, .. } = entry;
        // The fingerprint is compared first, in every phase of the record.
        if fingerprint.is_some() && ask.fingerprint.is_some() && fingerprint != ask.fingerprint {
            return Answer::Mismatch { attempt };
        }
        let mut takeover = false;
        let mut counted = starts;
        // The phase of the record leads to an answer, or to another attempt.
        match entry.phase {
            Phase::Finished(_) => return Answer::Finished(entry),
            Phase::Interrupted => return self.settle_doubt(ask, &entry, false),
            // The request takes effect late: its owner has already released the key.
            Phase::Released if owner == ask.owner => return Answer::Released { attempt },
            Phase::Released => {}
            Phase::Pending { begun, .. } if owner == ask.owner => {
                let in_doubt = begun && ask.max_reconciliations.is_some();
                return Answer::Reserved { attempt, starts, fingerprint, takeover: false, in_doubt };
            }
            Phase::Pending { lapses_at, .. } if self.now < lapses_at => {
                return Answer::Pending { attempt, lapses_in: lapses_at - self.now };
            }
            Phase::Pending { on_crash, begun, .. } => {
                // Under `fail` a body has begun only if the record is marked; under `retry` it may have begun without a
                // mark.
                let interrupted = match on_crash {
                    OnCrash::Fail => begun,
                    _ => ask.on_crash == OnCrash::Fail,
                };
                if interrupted {
                    return self.settle_doubt(ask, &entry, true);
                }
                takeover = true;
                counted -= u32::from(!begun && counted > 0);
            }
        }
        // Another attempt is possible if the counted attempts are below the limit.
        if ask.max_attempts.is_some_and(|max| counted >= max) {
            return Answer::Exhausted { attempts: counted };
        }
        let fingerprint = if ask.fingerprint.is_some() { ask.fingerprint } else { fingerprint };
        self.grant(ask, (attempt + 1, counted + 1), fingerprint, takeover, (asked, false))
    }

    pub(crate) fn begin(&mut self, key: usize, owner: usize, number: u32) -> Verdict {
        let now = self.now;
        let Some(Entry { owner: holder, attempt, phase, .. }) = self.touch(key) else { return Verdict::Refused };
        match phase {
            Phase::Pending { begun, lapses_at, .. }
                if (*holder, *attempt) == (owner, number) && (*begun || now < *lapses_at) =>
            {
                *begun = true;
                self.renew(key, owner, number)
            }
            _ => Verdict::Refused,
        }
    }

    pub(crate) fn renew(&mut self, key: usize, owner: usize, attempt: u32) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(key) else { return Verdict::Refused };
        if entry.owner != owner || entry.attempt != attempt {
            return Verdict::Refused;
        }
        let Phase::Pending { lease, ttl, lapses_at, .. } = &mut entry.phase else { return Verdict::Refused };
        *lapses_at = now + *lease;
        entry.forgotten_at = *lapses_at + *ttl;
        Verdict::Applied
    }

    /// Puts a journal of this size into the record, unless its journal is larger, and renews the lease.
    #[allow(dead_code, reason = "the simulation alone has bodies with steps")]
    pub(crate) fn append(&mut self, key: usize, owner: usize, attempt: u32, journal: usize) -> Verdict {
        let verdict = self.renew(key, owner, attempt);
        if let (Verdict::Applied, Some(entry)) = (verdict, self.touch(key)) {
            entry.journal = entry.journal.max(journal);
        }
        verdict
    }

    /// Finishes an attempt whose body has pushed `messages`.
    pub(crate) fn finish(&mut self, ask: &Ask, attempt: u32, finish: &Finish, messages: &[Unsent]) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(ask.key) else { return Verdict::Refused };
        if entry.owner != ask.owner || entry.decisions > 0 || entry.attempt != attempt {
            return Verdict::Refused;
        }
        match entry.phase {
            Phase::Pending { .. } => {
                entry.phase = Phase::Finished(finish.clone());
                entry.forgotten_at = now + ask.ttl;
                entry.journal = 0;
                entry.unsent = messages.to_vec();
                Verdict::Applied
            }
            Phase::Finished(_) => Verdict::Applied,
            Phase::Released | Phase::Interrupted => Verdict::Refused,
        }
    }

    pub(crate) fn release(&mut self, ask: &Ask, release: Release) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(ask.key) else { return Verdict::Refused };
        if entry.owner != ask.owner || entry.decisions > 0 {
            return Verdict::Refused;
        }
        match entry.phase {
            Phase::Pending { .. } => {
                if matches!(release, Release::NotStarted | Release::Unresolved) {
                    entry.starts -= 1;
                }
                entry.phase = match release {
                    Release::Interrupted | Release::Unresolved => Phase::Interrupted,
                    Release::Returned | Release::NotStarted => Phase::Released,
                };
                entry.forgotten_at = now + ask.ttl;
                Verdict::Applied
            }
            Phase::Released | Phase::Interrupted => Verdict::Applied,
            Phase::Finished(_) => Verdict::Refused,
        }
    }

    pub(crate) fn decide(&mut self, key: usize, sight: &Sight, action: &Action, by: &str) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(key) else { return Verdict::Refused };
        if (entry.owner, entry.attempt) != (sight.owner, sight.attempt) {
            return Verdict::Refused;
        }
        let free = Phase::Released;
        // Next phase and next number of counted attempts, if the decision applies to the record that the operator saw.
        let next = match (action, &entry.phase) {
            (Action::Reopen | Action::ReopenWith(_) | Action::BreakLease, Phase::Finished(_)) => {
                return Verdict::Refused;
            }
            (Action::Reopen | Action::ReopenWith(_), _) | (Action::Discard, Phase::Finished(_)) => Some((free, 0)),
            (Action::BreakLease, Phase::Pending { on_crash: OnCrash::Fail, begun: true, .. } | Phase::Interrupted) => {
                Some((Phase::Interrupted, entry.starts))
            }
            (Action::BreakLease, Phase::Pending { on_crash: OnCrash::Fail, .. }) => {
                Some((free, entry.starts.saturating_sub(1)))
            }
            (Action::BreakLease, _) => Some((free, entry.starts)),
            (Action::Replace(finish), Phase::Finished(_)) | (Action::Resolve(finish), _) => {
                Some((Phase::Finished(finish.clone()), entry.starts))
            }
            _ => None,
        };
        // Size of the journal after the decision. A finished record has none.
        let journal = match (action, &next) {
            (Action::ReopenWith(journal), _) => journal.as_ref().map_or(0, |journal| journal.bytes().len()),
            (_, Some((Phase::Finished(_), _))) => 0,
            _ => entry.journal,
        };
        // The operator repeats the decision because its first answer was lost.
        if entry.decisions == sight.decisions + 1 && entry.by == by {
            let is_its_end = match action {
                Action::Reopen | Action::Discard => entry.phase == Phase::Released && entry.starts == 0,
                Action::ReopenWith(_) => {
                    entry.phase == Phase::Released && entry.starts == 0 && entry.journal == journal
                }
                Action::Resolve(finish) | Action::Replace(finish) => entry.phase == Phase::Finished(finish.clone()),
                Action::BreakLease => matches!(entry.phase, Phase::Released | Phase::Interrupted),
                _ => false,
            };
            return if is_its_end { Verdict::Applied } else { Verdict::Refused };
        }
        // A decision applies only to the record that the operator saw. A lease may be broken whether or not it has
        // lapsed.
        let standing = match &entry.phase {
            Phase::Pending { lapses_at, .. } if now < *lapses_at => Standing::Running,
            Phase::Pending { .. } => Standing::Lapsed,
            Phase::Released => Standing::Released,
            Phase::Interrupted => Standing::Interrupted,
            Phase::Finished(Finish::Completed(_)) => Standing::Completed,
            Phase::Finished(Finish::Failed(_)) => Standing::Failed,
        };
        let lapsed_since = (sight.standing, standing) == (Standing::Running, Standing::Lapsed);
        let breaks = *action == Action::BreakLease;
        let as_seen = standing == sight.standing || (breaks && lapsed_since);
        let same_steps = !matches!(action, Action::ReopenWith(_)) || entry.journal == sight.journal;
        let is_same = entry.decisions == sight.decisions && same_steps;
        if !is_same || !as_seen || (standing == Standing::Running && !breaks) {
            return Verdict::Refused;
        }
        if let (Action::Resolve(finish), Phase::Finished(recorded)) = (action, &entry.phase) {
            let missing = |result: &StoredResult| !matches!(result, StoredResult::Encoded { .. });
            let alike = matches!(
                (recorded, finish),
                (Finish::Completed(_), Finish::Completed(_)) | (Finish::Failed(_), Finish::Failed(_))
            );
            // An operator may supply a missing result, because no caller can have received another one.
            if recorded != finish && (!alike || !missing(recorded.result()) || missing(finish.result())) {
                return Verdict::Refused;
            }
        }
        // A mark removes messages, and is no decision of a person.
        if let (Action::MarkSent(left), Phase::Finished(_)) = (action, &entry.phase) {
            entry.unsent = marked(&entry.unsent, left.as_ref());
            return Verdict::Applied;
        }
        // The decision is applied, counted, and noted with the operator's name.
        match next {
            Some((phase, starts)) => {
                let (decisions, by) = (entry.decisions + 1, by.to_owned());
                // The messages of a finished operation stay when its result is replaced.
                let stays = matches!(phase, Phase::Finished(_)) && matches!(entry.phase, Phase::Finished(_));
                let unsent = if stays { entry.unsent.clone() } else { Vec::new() };
                *entry = Entry { decisions, by, starts, phase, asked: 0, journal, unsent, ..entry.clone() };
            }
            None if *action == Action::Forget => drop(self.entries.remove(&key)),
            None => return Verdict::Refused,
        }
        Verdict::Applied
    }
}

/// Returns the messages that a mark leaves: of `unsent` those that are in `left` too, with the refusals of both.
fn marked(unsent: &[Unsent], left: Option<&UnsentMessages>) -> Vec<Unsent> {
    let left = left.map_or(&[][..], UnsentMessages::messages);
    let kept = unsent.iter().filter_map(|it| {
        let other = left.iter().find(|other| other.message().id() == it.id)?;
        let refusals = it.refusals.max(other.refusals());
        Some(Unsent { id: it.id.clone(), refusals, set_aside: it.set_aside || other.is_set_aside() })
    });
    kept.collect()
}
