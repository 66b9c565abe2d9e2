//! What a store holds for a key, what a reservation meets there, and the versioned bytes of both.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::codec::CodecName;
use crate::{Fingerprint, Lease, OnCrash, Owner, Reservation, Reserve};

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
}

/// Shows the size of a result, never the result: payloads don't reach logs.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored { codec, bytes } => write!(f, "Stored({} bytes of {codec:?})", bytes.len()),
            Self::TooLarge { bytes } => write!(f, "TooLarge({bytes} bytes)"),
            Self::Unencodable => f.write_str("Unencodable"),
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
        // Checked in every state: a replay or a takeover for another payload would be a wrong answer.
        if let (Some(recorded), Some(presented)) = (self.fingerprint, request.fingerprint)
            && recorded != presented
        {
            return Meeting::Answer(Reservation::Mismatch { attempt: self.attempt });
        }
        let (on_crash, takeover) = match &self.state {
            State::Completed(_) | State::Failed(_) => {
                return Meeting::Answer(Reservation::Finished(self.clone()));
            }
            // A reservation that was repeated because its answer got lost recognises its own record.
            State::Pending { .. } if self.owner == request.owner => {
                return Meeting::Answer(Reservation::Reserved { lease: self.lease(request), takeover: false });
            }
            State::Pending { .. } if !lapses_in.is_zero() => {
                return Meeting::Answer(Reservation::Pending { attempt: self.attempt, lapses_in });
            }
            State::Pending { on_crash, .. } => (*on_crash, true),
            State::Interrupted => (OnCrash::Fail, false),
            State::Released => (OnCrash::Retry, false),
        };
        // Whoever started or meets the interrupted body under `fail` has promised at most one run.
        let interrupted = on_crash == OnCrash::Fail || (takeover && request.on_crash == OnCrash::Fail);
        if interrupted {
            return Meeting::Answer(Reservation::Interrupted { attempt: self.attempt });
        }
        if self.attempt == u32::MAX || request.max_attempts.is_some_and(|max| self.starts >= max.get()) {
            return Meeting::Answer(Reservation::Exhausted { attempts: self.starts });
        }
        let fingerprint = request.fingerprint.or(self.fingerprint);
        Meeting::Replace { with: Self::pending(request, self.attempt + 1, self.starts + 1, fingerprint), takeover }
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

    /// Whether the operation has finished: completed or failed.
    pub fn is_finished(&self) -> bool {
        matches!(self.state, State::Completed(_) | State::Failed(_))
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
        let (state, mut flags, tag, room) = match &record.state {
            State::Pending { on_crash: OnCrash::Retry, .. } => (b'P', 0, 0, 16),
            State::Pending { .. } => (b'P', FLAG_ON_CRASH_FAIL, 0, 16),
            State::Released => (b'R', 0, 0, 0),
            State::Interrupted => (b'I', 0, 0, 0),
            State::Completed(payload) => (b'C', 0, tag(payload), room(payload)),
            State::Failed(payload) => (b'F', 0, tag(payload), room(payload)),
        };
        if record.fingerprint.is_some() {
            flags |= FLAG_FINGERPRINT;
        }
        let mut out = Vec::with_capacity(HEADER_BYTES + Fingerprint::BYTES + room);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, state, flags, tag]);
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
            Payload::Unencodable => 3,
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
