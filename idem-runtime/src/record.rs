//! What a store holds for a key, what a reservation meets there, and the versioned bytes of both.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::codec::CodecName;
use crate::{Fingerprint, Lease, OnCrash, Owner, Reservation, Reserve, Write};

/// What a store holds for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The attempt that wrote the record last.
    pub owner: Owner,
    /// The number of the latest attempt: the fencing token. Strictly increases while the record is retained.
    pub attempt: u32,
    /// How many attempts count against `max_attempts`; those whose body is known not to have started don't.
    pub starts: u32,
    /// The fingerprint of the payload, if the handler gives one.
    pub fingerprint: Option<Fingerprint>,
    /// Where the operation stands.
    pub state: State,
}

/// Where an operation stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// An attempt is running, or died without an answer.
    Pending {
        /// How long the record is honoured without a renewal.
        lease: Duration,
        /// How long it is remembered beyond its lease.
        ttl: Duration,
        /// What happens once the lease has lapsed.
        on_crash: OnCrash,
    },
    /// The latest attempt ended without a result to record; the next one may run. The record stays so that attempts
    /// are counted and fencing tokens never repeat.
    Released,
    /// A body started and did not return, under [`OnCrash::Fail`]; nobody runs until an operator decides.
    Interrupted,
    /// The body succeeded. Never changes within the retention.
    Completed(Payload),
    /// The body returned an error that is replayed. Never changes within the retention.
    Failed(Payload),
}

/// The recorded result of a finished operation, or why there is none.
#[derive(Clone, PartialEq, Eq)]
pub enum Payload {
    /// The encoded result.
    Stored {
        /// The codec that wrote it.
        codec: CodecName,
        /// What it wrote.
        bytes: Bytes,
    },
    /// The encoded result was larger than the policy allows.
    TooLarge {
        /// Its size in bytes.
        bytes: u64,
    },
    /// The codec could not write the result.
    Unencodable,
    /// The result is recorded, but what is needed to read it is gone or was altered. Only wrappers that keep results in
    /// another form answer this; it is never written.
    Unreadable {
        /// What is wrong, without the result.
        reason: Arc<str>,
    },
}

impl Payload {
    /// How many bytes of result are stored.
    pub fn stored_bytes(&self) -> usize {
        match self {
            Self::Stored { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }
}

/// Shows the size of a result, never the result: payloads don't reach logs.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored { codec, bytes } => write!(f, "Stored({} bytes of {codec:?})", bytes.len()),
            Self::TooLarge { bytes } => write!(f, "TooLarge({bytes} bytes)"),
            Self::Unencodable => f.write_str("Unencodable"),
            Self::Unreadable { reason } => write!(f, "Unreadable({reason})"),
        }
    }
}

/// What a reservation does with the record it met; see [`Record::meet`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Meeting {
    /// The record stays as it is, and this is the answer.
    Answer(Reservation),
    /// The record may be replaced by this one, if it still is the one that was met.
    Replace {
        /// The pending record of the new attempt.
        with: Record,
        /// Whether an attempt whose lease has lapsed is taken over.
        takeover: bool,
    },
}

impl Record {
    /// The record of a key's first attempt.
    pub fn first(request: &Reserve) -> Self {
        Self::pending(request, 1, 1, request.fingerprint)
    }

    fn pending(request: &Reserve, attempt: u32, starts: u32, fingerprint: Option<Fingerprint>) -> Self {
        let state = State::Pending { lease: request.lease, ttl: request.ttl, on_crash: request.on_crash };
        Self { owner: request.owner, attempt, starts, fingerprint, state }
    }

    /// Decides what `request` does with this record, whose lease (if it is pending) lapses in `lapses_in`; zero means it
    /// has lapsed. Pure: every store asks this one function, and then makes the answer atomic in its own way.
    pub fn meet(&self, request: &Reserve, lapses_in: Duration) -> Meeting {
        self.decide(request, lapses_in).unwrap_or_else(|| Meeting::Answer(Reservation::Finished(self.clone())))
    }

    /// The same for a record that nobody else needs.
    #[cfg(feature = "memory")]
    pub(crate) fn met_by(self, request: &Reserve, lapses_in: Duration) -> Meeting {
        self.decide(request, lapses_in).unwrap_or_else(|| Meeting::Answer(Reservation::Finished(self)))
    }

    /// `None` if the record itself is the answer.
    fn decide(&self, request: &Reserve, lapses_in: Duration) -> Option<Meeting> {
        // Checked in every state: a replay or a takeover for another payload would be a wrong answer.
        if let (Some(recorded), Some(presented)) = (self.fingerprint, request.fingerprint)
            && recorded.is_comparable(&presented)
            && recorded != presented
        {
            return Some(Meeting::Answer(Reservation::Mismatch { attempt: self.attempt }));
        }
        let (on_crash, takeover) = match &self.state {
            State::Completed(_) | State::Failed(_) => return None,
            // A reservation that was repeated because its answer got lost recognises its own record.
            State::Pending { .. } if self.owner == request.owner => {
                return Some(Meeting::Answer(Reservation::Reserved { lease: self.lease(request), takeover: false }));
            }
            State::Pending { .. } if !lapses_in.is_zero() => {
                return Some(Meeting::Answer(Reservation::Pending { attempt: self.attempt, lapses_in }));
            }
            State::Pending { on_crash, .. } => (*on_crash, true),
            State::Interrupted => (OnCrash::Fail, false),
            // A request that arrives after its own release must not hold the key: nobody would run under it.
            State::Released if self.owner == request.owner => {
                return Some(Meeting::Answer(Reservation::Released { attempt: self.attempt }));
            }
            State::Released => (OnCrash::Retry, false),
        };
        // Whoever started or meets the interrupted body under `fail` has promised at most one run.
        let interrupted = on_crash == OnCrash::Fail || (takeover && request.on_crash == OnCrash::Fail);
        if interrupted {
            return Some(Meeting::Answer(Reservation::Interrupted { attempt: self.attempt }));
        }
        if self.attempt == u32::MAX || request.max_attempts.is_some_and(|max| self.starts >= max.get()) {
            return Some(Meeting::Answer(Reservation::Exhausted { attempts: self.starts }));
        }
        let fingerprint = request.fingerprint.or(self.fingerprint);
        let with = Self::pending(request, self.attempt + 1, self.starts + 1, fingerprint);
        Some(Meeting::Replace { with, takeover })
    }

    /// The lease that `request` holds on this pending record.
    pub fn lease(&self, request: &Reserve) -> Lease {
        Lease {
            key: request.key.clone(),
            owner: request.owner,
            attempt: self.attempt,
            starts: self.starts,
            lease: request.lease,
            ttl: request.ttl,
            on_crash: request.on_crash,
            fingerprint: self.fingerprint,
        }
    }

    /// The record after the attempt that holds `lease` wrote `state`.
    pub fn after(lease: &Lease, state: State) -> Self {
        Self { owner: lease.owner, attempt: lease.attempt, starts: lease.starts, fingerprint: lease.fingerprint, state }
    }

    /// Whether this is the record of the attempt that holds `lease`: an attempt is its owner token and its number. A
    /// reservation that arrives again late may give its owner another attempt, which is not the one that is running.
    pub fn is_of(&self, lease: &Lease) -> bool {
        self.owner == lease.owner && self.attempt == lease.attempt
    }

    /// What a write that ends the attempt of `lease`, with a result or without one, is answered if it met this record and
    /// not a pending one that it may end: done if an earlier write of the same attempt did it.
    pub fn ended(&self, lease: &Lease, with_result: bool) -> Write {
        // A release may not know its number; see `Store::release`.
        let own = if with_result { self.is_of(lease) } else { self.owner == lease.owner };
        // A finished record is done; a released one is not finished any more.
        let repeated = own && !self.is_pending() && self.is_finished() == with_result;
        if repeated { Write::Done } else { Write::Refused }
    }

    /// Whether an attempt is running, or died without an answer.
    pub fn is_pending(&self) -> bool {
        matches!(self.state, State::Pending { .. })
    }

    /// Whether the operation has finished: completed or failed.
    pub fn is_finished(&self) -> bool {
        self.state.payload().is_some()
    }

    /// How long the record is remembered from a write at this moment; `ttl` unless it is pending.
    pub fn retention(&self, ttl: Duration) -> Duration {
        match self.state {
            State::Pending { lease, ttl, .. } => lease.saturating_add(ttl),
            _ => ttl,
        }
    }
}

/// The bytes of a record, version 1, for stores that keep records as one value. Integers are big-endian.
///
/// | bytes | content |
/// |---|---|
/// | 0–3 | `idem` |
/// | 4 | version of the format: 1 |
/// | 5 | state: `P`ending, `R`eleased, `I`nterrupted, `C`ompleted, `F`ailed |
/// | 6 | flags: 1 somebody waits for this record, 2 `on_crash = fail`, 4 has a fingerprint |
/// | 7 | payload: 0 none, 1 stored, 2 too large, 3 unencodable |
/// | 8–23 | owner token |
/// | 24–27 | attempt |
/// | 28–31 | starts |
/// | 32–63 | fingerprint, if there is one |
/// | rest | pending: lease and ttl, milliseconds, 8 bytes each; stored: length of the codec's name (1 byte), name, result; too large: size of the result, 8 bytes |
pub mod format {
    use super::{Bytes, CodecName, Duration, Fingerprint, OnCrash, Owner, Payload, Record, State, fmt};

    /// The first bytes of every record.
    pub const MAGIC: &[u8; 4] = b"idem";
    /// The version that is written.
    pub const VERSION: u8 = 1;
    /// How many bytes every record has at least.
    pub const HEADER_BYTES: usize = 32;
    /// Where the flags are.
    pub const FLAGS_AT: usize = 6;
    /// The flag that a waiting duplicate sets on a pending record, so that the write that ends it wakes the waiter.
    pub const FLAG_WAITED_FOR: u8 = 1;
    const FLAG_ON_CRASH_FAIL: u8 = 2;
    const FLAG_FINGERPRINT: u8 = 4;

    /// Bytes that are not a record of this version.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum FormatError {
        /// Something else wrote the value.
        Foreign,
        /// A later release of this library wrote the record.
        LaterVersion(u8),
        /// The record is damaged.
        Damaged,
    }

    impl fmt::Display for FormatError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self {
                Self::Foreign => f.write_str("the value is not a record of this library; it is left alone"),
                Self::LaterVersion(version) => write!(
                    f,
                    "the record has format {version}, this release reads up to {VERSION}; upgrade this process"
                ),
                Self::Damaged => f.write_str("the record is damaged; it is left alone"),
            }
        }
    }

    impl std::error::Error for FormatError {}

    /// Milliseconds, rounded up: a lease is never cut short by its written form.
    pub fn millis(duration: Duration) -> u64 {
        u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
    }

    /// Writes `record`.
    pub fn encode(record: &Record) -> Vec<u8> {
        let (mut flags, tag, room) = match &record.state {
            State::Pending { on_crash: OnCrash::Retry, .. } => (0, 0, 16),
            State::Pending { .. } => (FLAG_ON_CRASH_FAIL, 0, 16),
            State::Released | State::Interrupted => (0, 0, 0),
            State::Completed(payload) | State::Failed(payload) => (0, tag(payload), room(payload)),
        };
        if record.fingerprint.is_some() {
            flags |= FLAG_FINGERPRINT;
        }
        let mut out = Vec::with_capacity(HEADER_BYTES + Fingerprint::BYTES + room);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, record.state.letter().as_bytes()[0], flags, tag]);
        out.extend_from_slice(record.owner.as_bytes());
        out.extend_from_slice(&record.attempt.to_be_bytes());
        out.extend_from_slice(&record.starts.to_be_bytes());
        if let Some(fingerprint) = &record.fingerprint {
            out.extend_from_slice(fingerprint.as_bytes());
        }
        match &record.state {
            State::Pending { lease, ttl, .. } => {
                out.extend_from_slice(&millis(*lease).to_be_bytes());
                out.extend_from_slice(&millis(*ttl).to_be_bytes());
            }
            State::Completed(Payload::Stored { codec, bytes }) | State::Failed(Payload::Stored { codec, bytes }) => {
                let name = codec.as_str().as_bytes();
                out.push(u8::try_from(name.len()).unwrap_or_default());
                out.extend_from_slice(name);
                out.extend_from_slice(bytes);
            }
            State::Completed(Payload::TooLarge { bytes }) | State::Failed(Payload::TooLarge { bytes }) => {
                out.extend_from_slice(&bytes.to_be_bytes());
            }
            _ => {}
        }
        out
    }

    fn tag(payload: &Payload) -> u8 {
        match payload {
            Payload::Stored { .. } => 1,
            Payload::TooLarge { .. } => 2,
            // Nobody writes what could not be read; if somebody did, it would stay unavailable.
            Payload::Unencodable | Payload::Unreadable { .. } => 3,
        }
    }

    fn room(payload: &Payload) -> usize {
        match payload {
            Payload::Stored { bytes, .. } => 1 + CodecName::MAX_BYTES + bytes.len(),
            _ => 8,
        }
    }

    /// Reads what [`encode`] wrote; the result shares the memory of `value`.
    ///
    /// # Errors
    /// [`FormatError`] for everything else, down to a single byte too many.
    pub fn decode(value: &Bytes) -> Result<Record, FormatError> {
        if value.len() < HEADER_BYTES || value[..4] != *MAGIC {
            return Err(FormatError::Foreign);
        }
        match value[4] {
            VERSION => {}
            0 => return Err(FormatError::Damaged),
            later => return Err(FormatError::LaterVersion(later)),
        }
        read(value).ok_or(FormatError::Damaged)
    }

    fn read(value: &Bytes) -> Option<Record> {
        let mut rest = Reader(value.clone());
        let [_, _, _, _, _, state, flags, tag] = rest.array()?;
        let owner = Owner::from_bytes(rest.array()?);
        let attempt = u32::from_be_bytes(rest.array()?);
        let starts = u32::from_be_bytes(rest.array()?);
        let known = FLAG_WAITED_FOR | FLAG_ON_CRASH_FAIL | FLAG_FINGERPRINT;
        let fingerprint =
            if flags & FLAG_FINGERPRINT == 0 { None } else { Some(Fingerprint::from_bytes(rest.array()?)) };
        let state = match (state, tag) {
            (b'P', 0) => State::Pending {
                lease: Duration::from_millis(u64::from_be_bytes(rest.array()?)),
                ttl: Duration::from_millis(u64::from_be_bytes(rest.array()?)),
                on_crash: if flags & FLAG_ON_CRASH_FAIL == 0 { OnCrash::Retry } else { OnCrash::Fail },
            },
            (b'R', 0) => State::Released,
            (b'I', 0) => State::Interrupted,
            (b'C', tag) => State::Completed(rest.payload(tag)?),
            (b'F', tag) => State::Failed(rest.payload(tag)?),
            _ => return None,
        };
        let sound = attempt > 0 && starts <= attempt && flags & !known == 0 && rest.0.is_empty();
        sound.then_some(Record { owner, attempt, starts, fingerprint, state })
    }

    struct Reader(Bytes);

    impl Reader {
        fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
            let bytes = (self.0.len() >= N).then(|| self.0.split_to(N))?;
            bytes.as_ref().try_into().ok()
        }

        fn payload(&mut self, tag: u8) -> Option<Payload> {
            match tag {
                1 => {
                    let [len] = self.array()?;
                    let name = (self.0.len() >= usize::from(len)).then(|| self.0.split_to(usize::from(len)))?;
                    let codec = CodecName::new(&name)?;
                    Some(Payload::Stored { codec, bytes: std::mem::take(&mut self.0) })
                }
                2 => Some(Payload::TooLarge { bytes: u64::from_be_bytes(self.array()?) }),
                3 => Some(Payload::Unencodable),
                _ => None,
            }
        }
    }
}

/// The parts of a record, version 1, for stores that keep them apart: the columns of a table, the attributes of an item.
///
/// Which of `codec`, `result` and `result_bytes` are there says what became of the result: codec and result if it is
/// stored, its size if it was too large, none of them if it could not be encoded.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "dynamodb"))]
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Parts<'a> {
    /// The version of the parts: [`Parts::VERSION`].
    pub(crate) format: i64,
    /// `P`ending, `R`eleased, `I`nterrupted, `C`ompleted, `F`ailed.
    pub(crate) state: &'a str,
    pub(crate) owner: &'a [u8],
    pub(crate) attempt: i64,
    pub(crate) starts: i64,
    pub(crate) fingerprint: Option<&'a [u8]>,
    /// Whether `on_crash = fail`; false unless pending.
    pub(crate) on_crash_fail: bool,
    /// Milliseconds; `None` unless pending.
    pub(crate) lease_ms: Option<i64>,
    /// Milliseconds; `None` unless pending.
    pub(crate) ttl_ms: Option<i64>,
    pub(crate) codec: Option<&'a str>,
    pub(crate) result: Option<Bytes>,
    pub(crate) result_bytes: Option<i64>,
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "dynamodb"))]
impl<'a> Parts<'a> {
    /// The version that is written.
    pub(crate) const VERSION: i64 = 1;

    /// The parts of `record`.
    pub(crate) fn of(record: &'a Record) -> Self {
        let mut parts = Self {
            format: Self::VERSION,
            state: record.state.letter(),
            owner: record.owner.as_bytes(),
            attempt: record.attempt.into(),
            starts: record.starts.into(),
            fingerprint: record.fingerprint.as_ref().map(|fingerprint| &fingerprint.as_bytes()[..]),
            on_crash_fail: false,
            lease_ms: None,
            ttl_ms: None,
            codec: None,
            result: None,
            result_bytes: None,
        };
        match &record.state {
            State::Pending { lease, ttl, on_crash } => {
                parts.on_crash_fail = *on_crash == OnCrash::Fail;
                parts.lease_ms = Some(signed_millis(*lease));
                parts.ttl_ms = Some(signed_millis(*ttl));
            }
            State::Completed(payload) | State::Failed(payload) => match payload {
                Payload::Stored { codec, bytes } => {
                    parts.codec = Some(codec.as_str());
                    parts.result = Some(bytes.clone());
                }
                // The same 64 bits, so that every size is kept.
                Payload::TooLarge { bytes } => parts.result_bytes = Some(bytes.cast_signed()),
                Payload::Unencodable | Payload::Unreadable { .. } => {}
            },
            State::Released | State::Interrupted => {}
        }
        parts
    }

    /// The record that has these parts.
    ///
    /// # Errors
    /// [`FormatError`](format::FormatError) for parts that no release up to this one has written.
    pub(crate) fn record(self) -> Result<Record, format::FormatError> {
        match self.format {
            Self::VERSION => self.read().ok_or(format::FormatError::Damaged),
            later => match u8::try_from(later) {
                Ok(later @ 2..) => Err(format::FormatError::LaterVersion(later)),
                _ => Err(format::FormatError::Damaged),
            },
        }
    }

    fn read(self) -> Option<Record> {
        let time = |ms: Option<i64>| Some(Duration::from_millis(u64::try_from(ms?).ok()?));
        let payload = match (self.codec, self.result, self.result_bytes) {
            (Some(codec), Some(bytes), None) => Payload::Stored { codec: CodecName::new(codec.as_bytes())?, bytes },
            // The largest stands for everything that is larger.
            (None, None, Some(bytes)) => Payload::TooLarge { bytes: bytes.cast_unsigned() },
            (None, None, None) => Payload::Unencodable,
            _ => return None,
        };
        let state = match self.state {
            "P" => State::Pending {
                lease: time(self.lease_ms)?,
                ttl: time(self.ttl_ms)?,
                on_crash: if self.on_crash_fail { OnCrash::Fail } else { OnCrash::Retry },
            },
            "R" => State::Released,
            "I" => State::Interrupted,
            "C" => State::Completed(payload),
            "F" => State::Failed(payload),
            _ => return None,
        };
        let record = Record {
            owner: Owner::from_bytes(self.owner.try_into().ok()?),
            attempt: u32::try_from(self.attempt).ok()?,
            starts: u32::try_from(self.starts).ok()?,
            fingerprint: match self.fingerprint {
                Some(bytes) => Some(Fingerprint::from_bytes(bytes.try_into().ok()?)),
                None => None,
            },
            state,
        };
        (record.attempt > 0 && record.starts <= record.attempt).then_some(record)
    }
}

/// Milliseconds, rounded up, for systems whose integers have a sign.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "dynamodb"))]
pub(crate) fn signed_millis(duration: Duration) -> i64 {
    i64::try_from(format::millis(duration)).unwrap_or(i64::MAX)
}

impl State {
    /// The result of a finished operation; `None` unless it has finished.
    pub fn payload(&self) -> Option<&Payload> {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => Some(payload),
            _ => None,
        }
    }

    /// The letter that stands for the state wherever it is written.
    pub(crate) fn letter(&self) -> &'static str {
        match self {
            Self::Pending { .. } => "P",
            Self::Released => "R",
            Self::Interrupted => "I",
            Self::Completed(_) => "C",
            Self::Failed(_) => "F",
        }
    }
}

#[cfg(all(test, any(feature = "sqlite", feature = "postgres", feature = "dynamodb")))]
mod tests {
    use super::*;
    use format::FormatError;

    fn record(state: State) -> Record {
        let fingerprint = Some(Fingerprint::from_bytes([7; Fingerprint::BYTES]));
        Record { owner: Owner::from_bytes([9; Owner::BYTES]), attempt: 3, starts: 2, fingerprint, state }
    }

    #[test]
    fn parts_make_the_record_they_came_from() {
        let (lease, ttl) = (Duration::from_millis(1500), Duration::from_secs(60));
        let stored = Payload::Stored { codec: CodecName::new(b"json").unwrap(), bytes: Bytes::from_static(b"{}") };
        for state in [
            State::Pending { lease, ttl, on_crash: OnCrash::Retry },
            State::Pending { lease, ttl, on_crash: OnCrash::Fail },
            State::Released,
            State::Interrupted,
            State::Completed(stored.clone()),
            State::Completed(Payload::TooLarge { bytes: 7 }),
            State::Failed(stored),
            State::Failed(Payload::Unencodable),
        ] {
            let record = record(state);
            assert_eq!(Parts::of(&record).record(), Ok(record.clone()));
        }
    }

    #[test]
    fn parts_of_nobody_or_of_a_later_release_are_refused() {
        let record = record(State::Completed(Payload::Unencodable));
        let parts = Parts::of(&record);
        assert_eq!(Parts { format: 2, ..parts.clone() }.record(), Err(FormatError::LaterVersion(2)));
        assert_eq!(Parts { format: 0, ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { state: "X", ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { state: "P", ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { attempt: 0, ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { owner: b"short", ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { codec: Some("json"), ..parts }.record(), Err(FormatError::Damaged));
    }
}
