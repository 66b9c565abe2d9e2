//! The records of one shard, in as few bytes as possible, and the order in which they expire.
//!
//! A place is an index into a slab of slots. The slab grows by an eighth: a hash map of records would take up to twice
//! the size of its records. A record stores only what its state needs: a pending record shares the text of its key with
//! its call, and a finished record holds key and result in one allocation.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use slab::Slab;

use super::{Nanos, span};
use crate::codec::CodecName;
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;
use crate::record::{Finish, Holder, Journal, OwnerToken, Provenance, Record, Release, State, StoredResult};

/// Largest number of slots whose memory a shard keeps when its last record is removed.
const KEPT: usize = 32;

/// A record, the end of its retention, and the time at which that end is checked.
pub(super) struct Slot {
    owner: OwnerToken,
    attempt: u32,
    starts: u32,
    pub(super) expires_at: Nanos,
    /// Position in the [`Order`]. The position is never later than `expires_at`, and often earlier: a renewal does not
    /// move the record in the order.
    pub(super) listed_at: Nanos,
    seen_at: Tick,
    began_at: Tick,
    body: Body,
}

/// A point in time to show to an operator, in units of 2^24 nanoseconds (17 ms). A tick has half the size of a
/// [`Nanos`], and wraps around after two years, so only ages of less than two years are right.
#[derive(Clone, Copy)]
struct Tick(u32);

impl Tick {
    const BITS: u32 = 24;

    #[expect(clippy::cast_possible_truncation, reason = "it comes round")]
    fn at(now: Nanos) -> Self {
        Self((now >> Self::BITS) as u32)
    }

    fn ago(self, now: Nanos) -> Duration {
        Duration::from_nanos(u64::from(Self::at(now).0.wrapping_sub(self.0)) << Self::BITS)
    }
}

/// The parts of a record that depend on its state, and the first bits of the hash of its key.
enum Body {
    /// A record that is pending, released or interrupted.
    Open {
        stage: Stage,
        head: Head,
        hash: u32,
        bytes: Arc<[u8]>,
        /// Duration of the lease. Meaningful only while the record is pending.
        lease: Nanos,
        ttl: Nanos,
    },
    Completed {
        form: Form,
        head: Head,
        hash: u32,
        bytes: Bytes,
    },
    Failed {
        form: Form,
        head: Head,
        hash: u32,
        bytes: Bytes,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Pending(PendingByte),
    Released,
    Interrupted,
}

/// A pending attempt in one byte: its `on_crash`, and whether its body is marked as begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PendingByte {
    Retry,
    Fail,
    RetryBegun,
    FailBegun,
}

impl PendingByte {
    fn new(on_crash: OnCrash, begun: bool) -> Self {
        match (on_crash, begun) {
            (OnCrash::Retry, false) => Self::Retry,
            (OnCrash::Retry, true) => Self::RetryBegun,
            (OnCrash::Fail, false) => Self::Fail,
            (OnCrash::Fail, true) => Self::FailBegun,
        }
    }

    fn on_crash(self) -> OnCrash {
        if matches!(self, Self::Fail | Self::FailBegun) { OnCrash::Fail } else { OnCrash::Retry }
    }

    fn begun(self) -> bool {
        matches!(self, Self::RetryBegun | Self::FailBegun)
    }
}

/// Describes the start of a slot's bytes (a fingerprint, if there is one, and the stored form of the key), and where
/// the provenance is stored.
#[derive(Clone, Copy)]
struct Head(u16);

impl Head {
    const FINGERPRINTED: u16 = 1 << 15;
    /// The provenance consists of [`Slots::own`], the holder text of the store's own handles.
    const OWN_PROVENANCE: u16 = 1 << 14;
    /// The provenance is in [`Slots::provenances`].
    const OTHER_PROVENANCE: u16 = 1 << 13;
    const FLAGS: u16 = Self::FINGERPRINTED | Self::OWN_PROVENANCE | Self::OTHER_PROVENANCE;

    fn new(key: &Key, fingerprint: Option<&Fingerprint>) -> Self {
        const { assert!(Key::MAX_BYTES < Self::OTHER_PROVENANCE as usize) };
        let len = u16::try_from(key.as_str().len()).expect("a key has at most `Key::MAX_BYTES`");
        Self(len | if fingerprint.is_some() { Self::FINGERPRINTED } else { 0 })
    }

    fn key_at(self) -> usize {
        if self.0 & Self::FINGERPRINTED == 0 { 0 } else { Fingerprint::BYTES }
    }

    fn len(self) -> usize {
        self.key_at() + usize::from(self.0 & !Self::FLAGS)
    }

    fn key(self, bytes: &[u8]) -> &[u8] {
        &bytes[self.key_at()..self.len()]
    }

    fn fingerprint(self, bytes: &[u8]) -> Option<Fingerprint> {
        let bytes = bytes[..self.key_at()].first_chunk()?;
        Some(Fingerprint::from_bytes(*bytes))
    }
}

/// Describes what follows the head in the bytes of a finished record. A value up to the longest codec name is the
/// length of that name, which precedes the result. Any other value is one of the constants.
#[derive(Clone, Copy)]
struct Form(u8);

impl Form {
    const TOO_LARGE: u8 = 0x10;
    const UNENCODABLE: u8 = 0x11;
    const UNREADABLE: u8 = 0x12;

    /// Writes head and payload into one allocation of exactly their size.
    fn write(head: &[u8], payload: &StoredResult) -> (Self, Bytes) {
        let written;
        let (form, name, rest): (u8, &[u8], &[u8]) = match payload {
            StoredResult::Encoded { codec, bytes } => {
                let name = codec.as_bytes();
                (u8::try_from(name.len()).unwrap_or_default(), name, bytes)
            }
            StoredResult::TooLarge { size } => {
                written = size.to_be_bytes();
                (Self::TOO_LARGE, &[], &written)
            }
            // `LeftOut` occurs only in the answer to a list, and is never written.
            StoredResult::Unencodable | StoredResult::LeftOut { .. } => (Self::UNENCODABLE, &[], &[]),
            StoredResult::Unreadable { reason } => (Self::UNREADABLE, &[], reason.as_bytes()),
        };
        let mut bytes = Vec::with_capacity(head.len() + name.len() + rest.len());
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(rest);
        let bytes = Bytes::from(bytes);
        // The first clone of a `Bytes` allocates the state that all clones share. This clone makes that allocation now,
        // so that no replay allocates.
        drop(bytes.clone());
        (Self(form), bytes)
    }

    fn read(self, head: Head, bytes: &Bytes) -> StoredResult {
        let rest = &bytes[head.len()..];
        match self.0 {
            Self::TOO_LARGE => {
                StoredResult::TooLarge { size: rest.first_chunk().map_or(0, |it| u64::from_be_bytes(*it)) }
            }
            Self::UNENCODABLE => StoredResult::Unencodable,
            Self::UNREADABLE => StoredResult::Unreadable { reason: String::from_utf8_lossy(rest).into() },
            name => {
                let name = usize::from(name);
                let codec = CodecName::new(&rest[..name]).expect("the name was taken from a `CodecName`");
                StoredResult::Encoded { codec, bytes: bytes.slice(head.len() + name..) }
            }
        }
    }
}

impl Slot {
    /// Makes a slot whose `listed_at` is `ttl` from now. If the attempt finishes immediately, the record expires at
    /// `listed_at`, so the slot need not move in the [`Order`]. The provenance is not part of a slot: only [`Slots`]
    /// handles provenances.
    pub(super) fn new(record: Record, key: &Key, hash: u32, ttl: Nanos, now: Nanos) -> Self {
        let Record { owner, attempt, attempts_used: starts, fingerprint, state, .. } = record;
        let body = Body::new(key, hash, fingerprint.as_ref(), &state);
        let (seen_at, began_at) = (Tick::at(now), Tick::at(now));
        let mut slot = Self { owner, attempt, starts, expires_at: now, listed_at: now + ttl, seen_at, began_at, body };
        slot.date(ttl, now);
        slot
    }

    /// Replaces the record, and keeps its times. Also keeps the provenance of the record, until
    /// [`Slots::set_provenance`] is called.
    pub(super) fn set(&mut self, record: Record, key: &Key) {
        let Record { owner, attempt, attempts_used: starts, fingerprint, state, .. } = record;
        let body = Body::new(key, self.hash(), fingerprint.as_ref(), &state);
        let provenance = self.head().0 & (Head::OWN_PROVENANCE | Head::OTHER_PROVENANCE);
        *self = Self { owner, attempt, starts, body, ..*self };
        self.head_mut().0 |= provenance;
    }

    /// Notes that another attempt begins now. `is_first`: no unexpired record existed before.
    pub(super) fn begin(&mut self, is_first: bool, now: Nanos) {
        self.began_at = Tick::at(now);
        if is_first {
            self.seen_at = self.began_at;
        }
    }

    fn head(&self) -> Head {
        match &self.body {
            Body::Open { head, .. } | Body::Completed { head, .. } | Body::Failed { head, .. } => *head,
        }
    }

    fn head_mut(&mut self) -> &mut Head {
        match &mut self.body {
            Body::Open { head, .. } | Body::Completed { head, .. } | Body::Failed { head, .. } => head,
        }
    }

    /// Returns the stored form of the key.
    pub(super) fn key(&self) -> &str {
        std::str::from_utf8(self.head().key(self.bytes())).expect("a key is text")
    }

    /// Returns the time since the key was first seen, and the time since the latest attempt began.
    pub(super) fn since(&self, now: Nanos) -> [Duration; 2] {
        [self.seen_at.ago(now), self.age(now)]
    }

    /// Returns the time since the latest attempt began.
    pub(super) fn age(&self, now: Nanos) -> Duration {
        self.began_at.ago(now)
    }

    /// Restarts lease and retention at `now`. `ttl` applies to a record that isn't pending.
    pub(super) fn date(&mut self, ttl: Nanos, now: Nanos) {
        self.expires_at = match self.body {
            Body::Open { stage: Stage::Pending(..), lease, ttl, .. } => now + lease + ttl,
            _ => now + ttl,
        };
    }

    /// Restarts lease and retention of a pending record. `now` may be an old reading of the clock: a renewal never
    /// shortens a lease that was confirmed by a later reading.
    pub(super) fn renew(&mut self, now: Nanos) {
        if let Body::Open { stage: Stage::Pending(..), lease, ttl, .. } = self.body {
            self.expires_at = self.expires_at.max(now + lease + ttl);
        }
    }

    /// Notes that the body of the pending attempt begins, and renews the lease, if the lease is live at `now` or the
    /// record is already marked as begun. Returns whether the record is marked as begun.
    pub(super) fn mark_begun(&mut self, now: Nanos) -> bool {
        let live = !self.lapses_in(now).is_zero();
        let Body::Open { stage: Stage::Pending(pending), .. } = &mut self.body else { return false };
        let begun = pending.begun() || live;
        if begun {
            *pending = PendingByte::new(pending.on_crash(), true);
            self.renew(now);
        }
        begun
    }

    pub(super) fn owner(&self) -> OwnerToken {
        self.owner
    }

    pub(super) fn attempt(&self) -> u32 {
        self.attempt
    }

    pub(super) fn is_pending(&self) -> bool {
        matches!(self.body, Body::Open { stage: Stage::Pending(..), .. })
    }

    /// Returns the time until the lease of a pending record lapses. The retention ends one `ttl` later.
    pub(super) fn lapses_in(&self, now: Nanos) -> Duration {
        let ttl = match self.body {
            Body::Open { ttl, .. } => ttl,
            _ => 0,
        };
        Duration::from_nanos((self.expires_at - ttl).saturating_sub(now))
    }

    pub(super) fn expires_in(&self, now: Nanos) -> Duration {
        Duration::from_nanos(self.expires_at.saturating_sub(now))
    }

    pub(super) fn record(&self) -> Record {
        let (head, state) = match &self.body {
            Body::Open { stage, head, lease, ttl, .. } => (head, stage.state(*lease, *ttl)),
            Body::Completed { form, head, bytes, .. } => (head, State::Completed(form.read(*head, bytes))),
            Body::Failed { form, head, bytes, .. } => (head, State::Failed(form.read(*head, bytes))),
        };
        let fingerprint = head.fingerprint(self.bytes());
        let (owner, attempt, attempts_used) = (self.owner, self.attempt, self.starts);
        Record { owner, attempt, attempts_used, fingerprint, state, provenance: Provenance::NONE, journal: None }
    }

    /// Ends a pending attempt with a result.
    pub(super) fn finish(&mut self, finish: &Finish) {
        let Body::Open { head, hash, bytes, .. } = &self.body else { return };
        let (head, hash) = (*head, *hash);
        let (form, bytes) = Form::write(bytes, finish.result());
        self.body = match finish {
            Finish::Completed(_) => Body::Completed { form, head, hash, bytes },
            Finish::Failed(_) => Body::Failed { form, head, hash, bytes },
        };
    }

    /// Ends a pending attempt without a result.
    pub(super) fn release(&mut self, release: Release) {
        let Body::Open { stage, .. } = &mut self.body else { return };
        *stage = match release.state() {
            State::Interrupted => Stage::Interrupted,
            _ => Stage::Released,
        };
        self.starts = self.starts.saturating_sub(u32::from(!release.counts()));
    }

    pub(super) fn hash(&self) -> u32 {
        match self.body {
            Body::Open { hash, .. } | Body::Completed { hash, .. } | Body::Failed { hash, .. } => hash,
        }
    }

    fn bytes(&self) -> &[u8] {
        match &self.body {
            Body::Open { bytes, .. } => bytes,
            Body::Completed { bytes, .. } | Body::Failed { bytes, .. } => bytes,
        }
    }

    pub(super) fn is_of(&self, hash: u32, key: &Key) -> bool {
        let (is_it, head, bytes): (_, _, &[u8]) = match &self.body {
            Body::Open { hash: it, head, bytes, .. } => (*it == hash, head, bytes),
            Body::Completed { hash: it, head, bytes, .. } | Body::Failed { hash: it, head, bytes, .. } => {
                (*it == hash, head, bytes)
            }
        };
        is_it && head.key(bytes) == key.as_str().as_bytes()
    }
}

/// Shows no content: results must not reach logs.
impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slot")
    }
}

impl Body {
    fn new(key: &Key, hash: u32, fingerprint: Option<&Fingerprint>, of: &State) -> Self {
        let head = Head::new(key, fingerprint);
        let bytes: Arc<[u8]> = match fingerprint {
            None => Arc::from(key.shared()),
            Some(fingerprint) => fingerprint.as_bytes().iter().chain(key.as_str().as_bytes()).copied().collect(),
        };
        let (stage, lease, ttl) = match of {
            State::Pending { lease, ttl, on_crash, begun } => {
                (Stage::Pending(PendingByte::new(*on_crash, *begun)), span(*lease), span(*ttl))
            }
            State::Interrupted => (Stage::Interrupted, 0, 0),
            State::Released => (Stage::Released, 0, 0),
            State::Completed(payload) => {
                let (form, bytes) = Form::write(&bytes, payload);
                return Self::Completed { form, head, hash, bytes };
            }
            State::Failed(payload) => {
                let (form, bytes) = Form::write(&bytes, payload);
                return Self::Failed { form, head, hash, bytes };
            }
        };
        Self::Open { stage, head, hash, bytes, lease, ttl }
    }
}

impl Stage {
    fn state(self, lease: Nanos, ttl: Nanos) -> State {
        match self {
            Self::Pending(pending) => {
                let (on_crash, begun) = (pending.on_crash(), pending.begun());
                let [lease, ttl] = [lease, ttl].map(Duration::from_nanos);
                State::Pending { lease, ttl, on_crash, begun }
            }
            Self::Released => State::Released,
            Self::Interrupted => State::Interrupted,
        }
    }
}

/// Slots by place. A place is valid until its slot is removed.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slab: Slab<Slot>,
    /// Holder text of the store's own handles. Most provenances consist of this text.
    own: Option<&'static str>,
    /// The provenance of each record, by the place of the record. Omits records without a provenance, and records whose
    /// provenance consists of `own` alone.
    provenances: BTreeMap<u32, Provenance>,
    /// The journals of records that have one, by the place of the record.
    journals: BTreeMap<u32, Journal>,
}

impl Slots {
    /// Makes an empty set of slots. `own` is the holder text of the store's own handles.
    pub(super) fn of(own: &'static str) -> Self {
        Self { own: Some(own), ..Self::default() }
    }

    /// Returns the record at `place`, with its provenance.
    pub(super) fn record(&self, place: u32) -> Record {
        let slot = self.get(place);
        let mut record = slot.record();
        record.provenance = match slot.head() {
            Head(head) if head & Head::OWN_PROVENANCE != 0 => {
                self.own.map(|own| Provenance::held(Holder::new(own))).unwrap_or_default()
            }
            Head(head) if head & Head::OTHER_PROVENANCE != 0 => {
                self.provenances.get(&place).cloned().unwrap_or_default()
            }
            _ => Provenance::NONE,
        };
        if !self.journals.is_empty() {
            record.journal = self.journals.get(&place).cloned();
        }
        record
    }

    /// Sets the journal of the record at `place`.
    pub(super) fn set_journal(&mut self, place: u32, journal: Option<Journal>) {
        match journal {
            Some(journal) => drop(self.journals.insert(place, journal)),
            None if self.journals.is_empty() => {}
            None => drop(self.journals.remove(&place)),
        }
    }

    /// Keeps the later one of `journal` and the journal of the record at `place`.
    pub(super) fn append(&mut self, place: u32, journal: &Journal) {
        let kept = match self.journals.remove(&place) {
            Some(known) => known.later(journal.clone()),
            None => journal.clone(),
        };
        self.journals.insert(place, kept);
    }

    /// Sets the provenance of the record at `place`.
    pub(super) fn set_provenance(&mut self, place: u32, provenance: Provenance) {
        let is_own = match (provenance.handle(), self.own) {
            (Some(text), Some(own)) => std::ptr::eq(text, own),
            _ => false,
        };
        let flag = match () {
            () if is_own => Head::OWN_PROVENANCE,
            () if provenance.is_empty() => 0,
            () => Head::OTHER_PROVENANCE,
        };
        let head = self.get_mut(place).head_mut();
        let before = head.0;
        head.0 = (before & !(Head::OWN_PROVENANCE | Head::OTHER_PROVENANCE)) | flag;
        if flag == Head::OTHER_PROVENANCE {
            self.provenances.insert(place, provenance);
        } else if before & Head::OTHER_PROVENANCE != 0 {
            self.provenances.remove(&place);
        }
    }

    /// Returns the slots from `place` on, with their places.
    pub(super) fn from(&self, place: u32) -> impl Iterator<Item = (u32, &Slot)> {
        let places = place..u32::try_from(self.slab.capacity()).unwrap_or(u32::MAX);
        places.filter_map(|place| Some((place, self.slab.get(place as usize)?)))
    }

    pub(super) fn get(&self, place: u32) -> &Slot {
        &self.slab[place as usize]
    }

    pub(super) fn get_mut(&mut self, place: u32) -> &mut Slot {
        &mut self.slab[place as usize]
    }

    pub(super) fn insert(&mut self, slot: Slot) -> u32 {
        if self.slab.len() == self.slab.capacity() {
            self.slab.reserve_exact(growth(self.slab.len()));
        }
        u32::try_from(self.slab.insert(slot)).expect("a shard of less than 2^32 records")
    }

    pub(super) fn remove(&mut self, place: u32) {
        self.set_provenance(place, Provenance::NONE);
        self.set_journal(place, None);
        self.slab.remove(place as usize);
        if self.slab.is_empty() && self.slab.capacity() > KEPT {
            // Frees the memory after a burst.
            *self = Self { own: self.own, ..Self::default() };
        }
    }
}

/// Returns the number of items by which a full vector grows: an eighth. `Vec` would double its capacity, and most
/// stores would never use the added half.
fn growth(len: usize) -> usize {
    (len / 8).max(16)
}

/// The places of all records, as a heap: the place with the earliest `listed_at` is in front.
#[derive(Debug, Default)]
pub(super) struct Order(Vec<ListEntry>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ListEntry(u32);

impl ListEntry {
    fn at(self, slots: &Slots) -> Nanos {
        slots.get(self.0).listed_at
    }
}

impl Order {
    pub(super) fn first(&self) -> Option<u32> {
        self.0.first().map(|listed| listed.0)
    }

    /// Returns the earliest `listed_at`, or the largest number if the heap is empty.
    pub(super) fn first_due(&self, slots: &Slots) -> Nanos {
        self.0.first().map_or(Nanos::MAX, |first| first.at(slots))
    }

    pub(super) fn push(&mut self, place: u32, slots: &Slots) {
        if self.0.len() == self.0.capacity() {
            self.0.reserve_exact(growth(self.0.len()));
        }
        self.0.push(ListEntry(place));
        self.up(self.0.len() - 1, slots);
    }

    /// Moves a place whose `listed_at` is now earlier.
    pub(super) fn sooner(&mut self, place: u32, slots: &Slots) {
        if let Some(at) = self.0.iter().position(|listed| listed.0 == place) {
            self.up(at, slots);
        }
    }

    /// Moves the first place, whose `listed_at` is now later.
    pub(super) fn first_is_later(&mut self, slots: &Slots) {
        self.down(slots);
    }

    pub(super) fn remove_first(&mut self, slots: &Slots) {
        if !self.0.is_empty() {
            self.0.swap_remove(0);
            self.down(slots);
            if self.0.is_empty() {
                self.0 = Vec::new();
            }
        }
    }

    fn up(&mut self, mut at: usize, slots: &Slots) {
        let due = self.0[at].at(slots);
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.0[parent].at(slots) <= due {
                break;
            }
            self.0.swap(at, parent);
            at = parent;
        }
    }

    fn down(&mut self, slots: &Slots) {
        let mut at = 0;
        loop {
            let children = [2 * at + 1, 2 * at + 2].into_iter().filter(|child| *child < self.0.len());
            let Some(child) = children.min_by_key(|child| self.0[*child].at(slots)) else { break };
            if self.0[at].at(slots) <= self.0[child].at(slots) {
                break;
            }
            self.0.swap(at, child);
            at = child;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_the_documented_size() {
        assert_eq!(size_of::<Slot>(), 88);
    }

    #[test]
    fn a_renewal_by_an_old_reading_of_the_clock_shortens_no_lease() {
        let (lease, ttl) = (Duration::from_nanos(100), Duration::from_nanos(1001));
        let state = State::Pending { lease, ttl, on_crash: OnCrash::Retry, begun: false };
        let record = Record {
            owner: OwnerToken::from_bytes([0; OwnerToken::BYTES]),
            attempt: 1,
            attempts_used: 1,
            fingerprint: None,
            state,
            provenance: Provenance::NONE,
            journal: None,
        };
        let mut slot = Slot::new(record, &Key::new("renew", 1).unwrap(), 0, span(ttl), 0);
        for (now, lapses_at) in [(50, 150), (40, 150), (60, 160), (0, 160)] {
            slot.renew(now);
            assert_eq!(slot.lapses_in(0), Duration::from_nanos(lapses_at), "renewed at {now}");
            assert_eq!(slot.expires_in(0), Duration::from_nanos(lapses_at) + ttl, "renewed at {now}");
        }
    }

    /// The first place is always the one with the earliest `listed_at`, after every push, move and removal.
    #[test]
    fn the_first_record_in_the_order_has_the_earliest_listed_at() {
        let (mut slots, mut order) = (Slots::default(), Order::default());
        let slot = |ttl: Nanos| {
            let key = Key::new("order", ttl).unwrap();
            let record = Record {
                owner: OwnerToken::from_bytes([0; OwnerToken::BYTES]),
                attempt: 1,
                attempts_used: 1,
                fingerprint: None,
                state: State::Released,
                provenance: Provenance::NONE,
                journal: None,
            };
            Slot::new(record, &key, 0, ttl, 0)
        };
        let first = |slots: &Slots, order: &Order| order.first().map(|place| slots.get(place).listed_at);
        // Inserts many records, then makes every third record due sooner.
        let mut places = Vec::new();
        for n in 0..1_000 {
            let place = slots.insert(slot(10_000 + n * 7_919 % 1_000));
            order.push(place, &slots);
            places.push(place);
        }
        for (n, place) in (0..).zip(places.iter().step_by(3)) {
            slots.get_mut(*place).listed_at = 5_000 + n * 7_919 % 1_000;
            order.sooner(*place, &slots);
        }
        // Empties the heap. Every fifth time, the first place becomes due later instead of being removed, at most once
        // for each place.
        let mut due = Vec::new();
        for n in 0.. {
            let Some(place) = order.first() else { break };
            assert_eq!(first(&slots, &order), Some(order.first_due(&slots)));
            let at = slots.get(place).listed_at;
            if n % 5 == 0 && at < 20_000 {
                slots.get_mut(place).listed_at = at + 20_000;
                order.first_is_later(&slots);
                continue;
            }
            due.push(at);
            order.remove_first(&slots);
            slots.remove(place);
        }
        assert_eq!(due.len(), places.len());
        assert!(due.is_sorted(), "{due:?}");
        assert_eq!(slots.insert(slot(1)), 0, "an empty shard gives its chunks back");
    }
}
