//! Records in parts: columns of a table, or attributes of an item.

use std::time::Duration;

use bytes::Bytes;

use super::format::{FormatError, millis};
use super::{Journal, OwnerToken, Provenance, Record, State, StoredResult};
use crate::codec::CodecName;
use crate::key::Fingerprint;
use crate::policy::OnCrash;

/// Parts of a record, in version 1, for stores that store the parts separately: as columns of a table or attributes of
/// an item.
///
/// `codec`, `result` and `result_bytes` describe the result. A stored result sets `codec` and `result`. A result that
/// was too large sets `result_bytes`. A result that could not be encoded sets neither `codec` nor `result` nor
/// `result_bytes`. The `result` of an unfinished record, without a `codec`, is its journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Parts<'a> {
    /// Version of the parts; see [`Parts::VERSION`].
    pub(crate) format: i64,
    /// [Name](State::name) of the state.
    pub(crate) state: &'a str,
    pub(crate) owner: &'a [u8],
    pub(crate) attempt: i64,
    pub(crate) attempts_used: i64,
    pub(crate) fingerprint: Option<&'a [u8]>,
    /// True for a pending record with `on_crash = fail`.
    pub(crate) on_crash_fail: bool,
    /// True for a pending record whose body has begun.
    pub(crate) begun: bool,
    /// Duration of the lease in milliseconds; `None` unless the record is pending.
    pub(crate) lease_ms: Option<i64>,
    /// Retention in milliseconds; `None` unless the record is pending.
    pub(crate) ttl_ms: Option<i64>,
    pub(crate) codec: Option<&'a str>,
    pub(crate) result: Option<Bytes>,
    pub(crate) result_bytes: Option<i64>,
    pub(crate) reading: ReadExtent,
    pub(crate) holder: Option<&'a str>,
    pub(crate) traceparent: Option<&'a str>,
    pub(crate) decided_by: Option<&'a str>,
    pub(crate) decided_reason: Option<&'a str>,
}

/// Parts of a record that a store has read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadExtent {
    Whole,
    /// All parts except the result. The size of the result is known if the store reports it.
    WithoutResult(Option<u64>),
}

impl<'a> Parts<'a> {
    /// Version that this release writes.
    pub(crate) const VERSION: i64 = 1;

    /// Returns the parts of `record`.
    pub(crate) fn of(record: &'a Record) -> Self {
        let mut parts = Self {
            format: Self::VERSION,
            state: record.state.name(),
            owner: record.owner.as_bytes(),
            attempt: record.attempt.into(),
            attempts_used: record.attempts_used.into(),
            fingerprint: record.fingerprint.as_ref().map(|fingerprint| &fingerprint.as_bytes()[..]),
            on_crash_fail: false,
            begun: false,
            lease_ms: None,
            ttl_ms: None,
            codec: None,
            result: None,
            result_bytes: None,
            reading: ReadExtent::Whole,
            holder: record.provenance.holder().map(|holder| holder.as_str()),
            traceparent: record.provenance.traceparent_text(),
            decided_by: record.provenance.decided_by(),
            decided_reason: record.provenance.decided_reason(),
        };
        // Only pending and finished records have further parts.
        match &record.state {
            State::Pending { lease, ttl, on_crash, begun } => {
                parts.on_crash_fail = *on_crash == OnCrash::Fail;
                parts.begun = *begun;
                parts.lease_ms = Some(signed_millis(*lease));
                parts.ttl_ms = Some(signed_millis(*ttl));
            }
            State::Completed(payload) | State::Failed(payload) => match payload {
                StoredResult::Encoded { codec, bytes } => {
                    parts.codec = Some(codec.as_str());
                    parts.result = Some(bytes.clone());
                }
                // The cast keeps all 64 bits, so every size can be read back.
                StoredResult::TooLarge { size } => parts.result_bytes = Some(size.cast_signed()),
                StoredResult::Unencodable | StoredResult::Unreadable { .. } | StoredResult::LeftOut { .. } => {}
            },
            State::Released | State::Interrupted => {}
        }
        if let Some(journal) = record.journal_in(&record.state) {
            parts.result = Some(journal.bytes().clone());
        }
        parts
    }

    /// Returns the record with these parts.
    ///
    /// # Errors
    /// [`FormatError`] if neither this release nor an earlier release has written these parts.
    pub(crate) fn record(self) -> Result<Record, FormatError> {
        match self.format {
            Self::VERSION => self.read().ok_or(FormatError::Damaged),
            later => match u8::try_from(later) {
                Ok(later @ 2..) => Err(FormatError::LaterVersion(later)),
                _ => Err(FormatError::Damaged),
            },
        }
    }

    fn read(self) -> Option<Record> {
        let time = |ms: Option<i64>| Some(Duration::from_millis(u64::try_from(ms?).ok()?));
        let text = Option::<&str>::unwrap_or_default;
        // Stores write only these combinations of codec, result and size. Any other combination is a damaged record.
        let is_finished = matches!(self.state, "completed" | "failed");
        let (result, journal) =
            if is_finished { (self.result, None) } else { (None, self.result.and_then(Journal::new)) };
        let payload = match (self.codec, result, self.result_bytes) {
            (Some(codec), Some(bytes), None) => {
                StoredResult::Encoded { codec: CodecName::new(codec.as_bytes())?, bytes }
            }
            (Some(codec), None, None) => match self.reading {
                ReadExtent::Whole => return None,
                ReadExtent::WithoutResult(size) => {
                    StoredResult::LeftOut { codec: CodecName::new(codec.as_bytes())?, size }
                }
            },
            // A negative number is a size above `i64::MAX`, whose 64 bits were written as a signed integer.
            (None, None, Some(bytes)) => StoredResult::TooLarge { size: bytes.cast_unsigned() },
            (None, None, None) => StoredResult::Unencodable,
            _ => return None,
        };
        let state = match self.state {
            "pending" => State::Pending {
                lease: time(self.lease_ms)?,
                ttl: time(self.ttl_ms)?,
                on_crash: if self.on_crash_fail { OnCrash::Fail } else { OnCrash::Retry },
                begun: self.begun,
            },
            "released" => State::Released,
            "interrupted" => State::Interrupted,
            "completed" => State::Completed(payload),
            "failed" => State::Failed(payload),
            _ => return None,
        };
        let record = Record {
            owner: OwnerToken::from_bytes(self.owner.try_into().ok()?),
            attempt: u32::try_from(self.attempt).ok()?,
            attempts_used: u32::try_from(self.attempts_used).ok()?,
            fingerprint: match self.fingerprint {
                Some(bytes) => Some(Fingerprint::from_bytes(bytes.try_into().ok()?)),
                None => None,
            },
            state,
            provenance: Provenance::of_texts(
                [self.holder, self.traceparent, self.decided_by, self.decided_reason].map(text),
            ),
            journal,
        };
        (record.attempt > 0 && record.attempts_used <= record.attempt).then_some(record)
    }
}

/// Returns the milliseconds of `duration`, rounded up, for databases whose integers have a sign.
pub(crate) fn signed_millis(duration: Duration) -> i64 {
    i64::try_from(millis(duration)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(state: State) -> Record {
        let fingerprint = Some(Fingerprint::from_bytes([7; Fingerprint::BYTES]));
        Record {
            owner: OwnerToken::from_bytes([9; OwnerToken::BYTES]),
            attempt: 3,
            attempts_used: 2,
            fingerprint,
            state,
            provenance: Provenance::of_texts(["host/7/name", "", "alice", "INC-7"]),
            journal: None,
        }
    }

    #[test]
    fn parts_and_records_convert_into_each_other() {
        let (lease, ttl) = (Duration::from_millis(1500), Duration::from_secs(60));
        let stored =
            StoredResult::Encoded { codec: CodecName::new(b"json").unwrap(), bytes: Bytes::from_static(b"{}") };
        for state in [
            State::Pending { lease, ttl, on_crash: OnCrash::Retry, begun: false },
            State::Pending { lease, ttl, on_crash: OnCrash::Fail, begun: false },
            State::Pending { lease, ttl, on_crash: OnCrash::Fail, begun: true },
            State::Released,
            State::Interrupted,
            State::Completed(stored.clone()),
            State::Completed(StoredResult::TooLarge { size: 7 }),
            State::Failed(stored),
            State::Failed(StoredResult::Unencodable),
        ] {
            let mut record = record(state);
            assert_eq!(Parts::of(&record).record(), Ok(record.clone()));
            if !record.is_finished() {
                record.journal = Journal::new("steps");
                assert_eq!(Parts::of(&record).record(), Ok(record.clone()));
            }
        }
    }

    #[test]
    fn record_parts_without_an_owner_or_from_a_later_release_are_refused() {
        let record = record(State::Completed(StoredResult::Unencodable));
        let parts = Parts::of(&record);
        assert_eq!(Parts { format: 2, ..parts.clone() }.record(), Err(FormatError::LaterVersion(2)));
        assert_eq!(Parts { format: 0, ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { state: "X", ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { state: "pending", ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { attempt: 0, ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { owner: b"short", ..parts.clone() }.record(), Err(FormatError::Damaged));
        assert_eq!(Parts { codec: Some("json"), ..parts }.record(), Err(FormatError::Damaged));
    }
}
