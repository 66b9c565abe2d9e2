//! The correct answers of a store, written as simply as possible and without the library's own decisions.
//!
//! Time is a number of milliseconds. Owners are small numbers, one for each requested reservation.

use std::collections::HashMap;

use idem_runtime::OnCrash;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Release, Verdict};

/// The request for an attempt.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) key: usize,
    pub(crate) owner: usize,
    pub(crate) lease: u64,
    pub(crate) ttl: u64,
    pub(crate) fingerprint: Option<u8>,
    pub(crate) on_crash: OnCrash,
    pub(crate) max_attempts: Option<u32>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Pending { lease: u64, ttl: u64, on_crash: OnCrash, lapses_at: u64 },
    Released,
    Interrupted,
    Finished(Finish),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub(crate) owner: usize,
    pub(crate) attempt: u32,
    pub(crate) starts: u32,
    pub(crate) fingerprint: Option<u8>,
    pub(crate) phase: Phase,
    pub(crate) forgotten_at: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Reserved { attempt: u32, starts: u32, fingerprint: Option<u8>, takeover: bool },
    Pending { attempt: u32, lapses_in: u64 },
    Finished(Entry),
    Mismatch { attempt: u32 },
    Interrupted { attempt: u32 },
    Exhausted { attempts: u32 },
    Released { attempt: u32 },
}

/// The owner of a result that an operator has given: none of those who ask.
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

    fn begin(&mut self, ask: &Ask, attempt: u32, starts: u32, fingerprint: Option<u8>, takeover: bool) -> Answer {
        let lapses_at = self.now + ask.lease;
        let phase = Phase::Pending { lease: ask.lease, ttl: ask.ttl, on_crash: ask.on_crash, lapses_at };
        let forgotten_at = lapses_at + ask.ttl;
        let entry = Entry { owner: ask.owner, attempt, starts, fingerprint, phase, forgotten_at };
        self.entries.insert(ask.key, entry);
        Answer::Reserved { attempt, starts, fingerprint, takeover }
    }

    pub(crate) fn reserve(&mut self, ask: &Ask) -> Answer {
        let Some(entry) = self.look(ask.key).cloned() else {
            return self.begin(ask, 1, 1, ask.fingerprint, false);
        };
        let Entry { owner, attempt, starts, fingerprint, .. } = entry;
        if fingerprint.is_some() && ask.fingerprint.is_some() && fingerprint != ask.fingerprint {
            return Answer::Mismatch { attempt };
        }
        let mut takeover = false;
        match entry.phase {
            Phase::Finished(_) => return Answer::Finished(entry),
            Phase::Interrupted => return Answer::Interrupted { attempt },
            // The owner has released the key, and this request is late.
            Phase::Released if owner == ask.owner => return Answer::Released { attempt },
            Phase::Released => {}
            Phase::Pending { .. } if owner == ask.owner => {
                return Answer::Reserved { attempt, starts, fingerprint, takeover: false };
            }
            Phase::Pending { lapses_at, .. } if self.now < lapses_at => {
                return Answer::Pending { attempt, lapses_in: lapses_at - self.now };
            }
            Phase::Pending { on_crash, .. } => {
                if on_crash == OnCrash::Fail || ask.on_crash == OnCrash::Fail {
                    return Answer::Interrupted { attempt };
                }
                takeover = true;
            }
        }
        if ask.max_attempts.is_some_and(|max| starts >= max) {
            return Answer::Exhausted { attempts: starts };
        }
        let fingerprint = if ask.fingerprint.is_some() { ask.fingerprint } else { fingerprint };
        self.begin(ask, attempt + 1, starts + 1, fingerprint, takeover)
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

    pub(crate) fn finish(&mut self, ask: &Ask, attempt: u32, finish: &Finish) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(ask.key) else { return Verdict::Refused };
        if entry.owner != ask.owner || entry.attempt != attempt {
            return Verdict::Refused;
        }
        match entry.phase {
            Phase::Pending { .. } => {
                entry.phase = Phase::Finished(finish.clone());
                entry.forgotten_at = now + ask.ttl;
                Verdict::Applied
            }
            Phase::Finished(_) => Verdict::Applied,
            Phase::Released | Phase::Interrupted => Verdict::Refused,
        }
    }

    pub(crate) fn release(&mut self, ask: &Ask, release: Release) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(ask.key) else { return Verdict::Refused };
        if entry.owner != ask.owner {
            return Verdict::Refused;
        }
        match entry.phase {
            Phase::Pending { .. } => {
                if release == Release::NotStarted {
                    entry.starts -= 1;
                }
                entry.phase = if release == Release::Interrupted { Phase::Interrupted } else { Phase::Released };
                entry.forgotten_at = now + ask.ttl;
                Verdict::Applied
            }
            Phase::Released | Phase::Interrupted => Verdict::Applied,
            Phase::Finished(_) => Verdict::Refused,
        }
    }

    pub(crate) fn reopen(&mut self, key: usize, attempt: u32) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(key) else { return Verdict::Refused };
        if entry.attempt != attempt || matches!(entry.phase, Phase::Pending { lapses_at, .. } if now < lapses_at) {
            return Verdict::Refused;
        }
        entry.phase = Phase::Released;
        entry.starts = 0;
        Verdict::Applied
    }

    pub(crate) fn break_lease(&mut self, key: usize, attempt: u32) -> Verdict {
        let Some(entry) = self.touch(key).filter(|entry| entry.attempt == attempt) else { return Verdict::Refused };
        entry.phase = match &entry.phase {
            Phase::Pending { on_crash: OnCrash::Fail, .. } | Phase::Interrupted => Phase::Interrupted,
            Phase::Pending { .. } | Phase::Released => Phase::Released,
            Phase::Finished(_) => return Verdict::Refused,
        };
        Verdict::Applied
    }

    pub(crate) fn resolve(&mut self, key: usize, attempt: u32, finish: &Finish) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(key).filter(|entry| entry.attempt == attempt) else { return Verdict::Refused };
        let missing = |result: &StoredResult| !matches!(result, StoredResult::Encoded { .. });
        match &entry.phase {
            Phase::Pending { lapses_at, .. } if now < *lapses_at => return Verdict::Refused,
            Phase::Pending { .. } | Phase::Released | Phase::Interrupted => {}
            Phase::Finished(recorded) if recorded == finish => return Verdict::Applied,
            Phase::Finished(recorded) => {
                let alike = matches!(
                    (recorded, finish),
                    (Finish::Completed(_), Finish::Completed(_)) | (Finish::Failed(_), Finish::Failed(_))
                );
                // Supplied: nobody can have been given another one.
                if !alike || !missing(recorded.result()) || missing(finish.result()) {
                    return Verdict::Refused;
                }
            }
        }
        entry.owner = NOBODY;
        entry.phase = Phase::Finished(finish.clone());
        Verdict::Applied
    }

    pub(crate) fn forget(&mut self, key: usize, attempt: u32) -> Verdict {
        let now = self.now;
        let Some(entry) = self.touch(key).filter(|entry| entry.attempt == attempt) else { return Verdict::Refused };
        if matches!(entry.phase, Phase::Pending { lapses_at, .. } if now < lapses_at) {
            return Verdict::Refused;
        }
        self.entries.remove(&key);
        Verdict::Applied
    }
}
