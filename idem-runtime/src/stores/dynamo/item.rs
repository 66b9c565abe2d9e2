//! Records as items of the table: one attribute for each part of a record, and the times.

use std::collections::{BTreeMap, HashMap};

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use bytes::Bytes;

use crate::record::format::FormatError;
use crate::record::{Inspection, Parts, ReadExtent, Record, State, signed_millis};

/// The attributes of an item by name.
pub(super) type Attributes = HashMap<String, AttributeValue>;

/// Largest item that DynamoDB holds, in bytes, including the names of attributes.
pub(super) const MAX_BYTES: usize = 400 * 1024;

pub(super) const KEY: &str = "key";
pub(super) const FORMAT: &str = "format";
pub(super) const STATE: &str = "state";
pub(super) const OWNER: &str = "owner";
pub(super) const ATTEMPT: &str = "attempt";
pub(super) const ATTEMPTS_USED: &str = "attempts_used";
pub(super) const FINGERPRINT: &str = "fingerprint";
pub(super) const ON_CRASH_FAIL: &str = "on_crash_fail";
/// True if the body has begun. Present while the record is pending.
pub(super) const BEGUN: &str = "begun";
pub(super) const LEASE_MS: &str = "lease_ms";
pub(super) const TTL_MS: &str = "ttl_ms";
pub(super) const CODEC: &str = "codec";
/// Result of a finished operation, or journal of an unfinished one.
pub(super) const RESULT: &str = "result";
pub(super) const RESULT_BYTES: &str = "result_bytes";
/// Holder of the latest attempt: `<host>/<process>/<name>`.
pub(super) const HOLDER: &str = "holder";
/// Trace of the latest attempt.
pub(super) const TRACEPARENT: &str = "traceparent";
/// The operator who last decided about the record. [`DECIDED_REASON`] is the operator's reason.
pub(super) const DECIDED_BY: &str = "decided_by";
pub(super) const DECIDED_REASON: &str = "decided_reason";
/// Time at which the key was first seen, in milliseconds since 1970 by the clock of the machine that reserved it.
pub(super) const FIRST_SEEN_AT: &str = "first_seen_at";
/// Time at which the latest attempt began, in milliseconds since 1970 by the clock of its owner.
pub(super) const BEGAN_AT: &str = "began_at";
/// Time at which the lease lapses, in milliseconds since 1970 by the clock of its owner. Present while the record is
/// pending.
pub(super) const LAPSES_AT: &str = "lapses_at";
/// End of the retention, in milliseconds since 1970 by the clock of the last writer.
pub(super) const EXPIRES_AT: &str = "expires_at";
/// Time from which DynamoDB may delete the item, in seconds since 1970: the TTL attribute of the table.
pub(super) const PURGE_AT: &str = "purge_at";

/// All attributes of a record except its result and [`PURGE_AT`]: the attributes that a list reads.
pub(super) const LISTED: [&str; 21] = [
    KEY,
    FORMAT,
    STATE,
    OWNER,
    ATTEMPT,
    ATTEMPTS_USED,
    FINGERPRINT,
    ON_CRASH_FAIL,
    BEGUN,
    LEASE_MS,
    TTL_MS,
    CODEC,
    RESULT_BYTES,
    HOLDER,
    TRACEPARENT,
    DECIDED_BY,
    DECIDED_REASON,
    FIRST_SEEN_AT,
    BEGAN_AT,
    LAPSES_AT,
    EXPIRES_AT,
];

/// The times of a record, in milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::struct_field_names, reason = "the names of the attributes")]
pub(super) struct Times {
    pub(super) lapses_at: i64,
    pub(super) expires_at: i64,
    /// Time in seconds, rounded up and later by the skew: by then, every clock has passed the end of the retention.
    pub(super) purge_at: i64,
    pub(super) first_seen_at: i64,
    pub(super) began_at: i64,
}

impl Times {
    /// Returns the times of a record that is written at `now`, with its key first seen and its attempt begun at `now`.
    pub(super) fn of(record: &Record, ttl: std::time::Duration, now: i64, skew: i64) -> Self {
        let lapses_at = match record.state {
            State::Pending { lease, .. } => now.saturating_add(signed_millis(lease)),
            _ => now,
        };
        let expires_at = now.saturating_add(signed_millis(record.retention(ttl)));
        Self { lapses_at, first_seen_at: now, began_at: now, ..Self::until(expires_at, skew) }
    }

    /// Returns the times of a record that is not pending and whose retention ends at `expires_at`.
    pub(super) fn until(expires_at: i64, skew: i64) -> Self {
        let purge_at = expires_at.saturating_add(skew).saturating_add(999) / 1000;
        Self { lapses_at: expires_at, expires_at, purge_at, first_seen_at: 0, began_at: 0 }
    }

    /// Sets the times at which the key was first seen and at which the latest attempt began.
    pub(super) fn since(self, first_seen_at: i64, began_at: i64) -> Self {
        Self { first_seen_at, began_at, ..self }
    }
}

pub(super) fn number(n: i64) -> AttributeValue {
    AttributeValue::N(n.to_string())
}

pub(super) fn text(text: &str) -> AttributeValue {
    AttributeValue::S(text.to_owned())
}

pub(super) fn binary(bytes: impl Into<Vec<u8>>) -> AttributeValue {
    AttributeValue::B(Blob::new(bytes))
}

/// Returns the item of `record` under the key `name`.
pub(super) fn write(name: &str, record: &Record, times: Times) -> Attributes {
    let parts = Parts::of(record);
    let pending = matches!(record.state, State::Pending { .. });
    let attributes = [
        (KEY, Some(text(name))),
        (FORMAT, Some(number(parts.format))),
        (STATE, Some(text(parts.state))),
        (OWNER, Some(binary(parts.owner))),
        (ATTEMPT, Some(number(parts.attempt))),
        (ATTEMPTS_USED, Some(number(parts.attempts_used))),
        (FINGERPRINT, parts.fingerprint.map(binary)),
        (ON_CRASH_FAIL, pending.then_some(AttributeValue::Bool(parts.on_crash_fail))),
        (BEGUN, pending.then_some(AttributeValue::Bool(parts.begun))),
        (LEASE_MS, parts.lease_ms.map(number)),
        (TTL_MS, parts.ttl_ms.map(number)),
        (CODEC, parts.codec.map(text)),
        (RESULT, parts.result.map(binary)),
        (RESULT_BYTES, parts.result_bytes.map(number)),
        (LAPSES_AT, pending.then(|| number(times.lapses_at))),
        (FIRST_SEEN_AT, Some(number(times.first_seen_at))),
        (BEGAN_AT, Some(number(times.began_at))),
        (HOLDER, parts.holder.map(text)),
        (TRACEPARENT, parts.traceparent.map(text)),
        (DECIDED_BY, parts.decided_by.map(text)),
        (DECIDED_REASON, parts.decided_reason.map(text)),
        (EXPIRES_AT, Some(number(times.expires_at))),
        (PURGE_AT, Some(number(times.purge_at))),
    ];
    attributes.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A record and its times, as read from an item.
#[derive(Debug)]
pub(super) struct FoundItem {
    pub(super) record: Record,
    /// Time at which the lease lapses, if the record is pending.
    pub(super) lapses_at: i64,
    pub(super) expires_at: i64,
    pub(super) first_seen_at: i64,
    pub(super) began_at: i64,
}

/// Reads an item that [`write`] wrote.
pub(super) fn read(item: Attributes) -> Result<FoundItem, FormatError> {
    read_as(item, ReadExtent::Whole)
}

/// Reads an item without its result.
pub(super) fn read_without_result(item: Attributes) -> Result<FoundItem, FormatError> {
    read_as(item, ReadExtent::WithoutResult(None))
}

fn read_as(mut item: Attributes, reading: ReadExtent) -> Result<FoundItem, FormatError> {
    // An item without a format number was not written by this library.
    let format = match item.get(FORMAT) {
        None => return Err(FormatError::Foreign),
        Some(format) => integer(format).ok_or(FormatError::Foreign)?,
    };
    let result = match item.remove(RESULT) {
        None => None,
        Some(AttributeValue::B(blob)) => Some(Bytes::from(blob.into_inner())),
        Some(_) => return Err(FormatError::Damaged),
    };
    let parts = parts(&item, format, result).ok_or(FormatError::Damaged)?;
    let record = Parts { reading, ..parts }.record()?;
    let pending = matches!(record.state, State::Pending { .. });
    let time = |name: &str| item.get(name).and_then(integer);
    let (lapses_at, expires_at) = match (time(LAPSES_AT), time(EXPIRES_AT)) {
        (Some(lapses_at), Some(expires_at)) => (lapses_at, expires_at),
        (None, Some(expires_at)) if !pending => (expires_at, expires_at),
        _ => return Err(FormatError::Damaged),
    };
    let (Some(first_seen_at), Some(began_at)) = (time(FIRST_SEEN_AT), time(BEGAN_AT)) else {
        return Err(FormatError::Damaged);
    };
    Ok(FoundItem { record, lapses_at, expires_at, first_seen_at, began_at })
}

fn parts(item: &Attributes, format: i64, result: Option<Bytes>) -> Option<Parts<'_>> {
    // An attribute of an unexpected type makes the item damaged: such an attribute is not treated as absent.
    let optional = |name: &str| match item.get(name) {
        None => Some(None),
        Some(number) => integer(number).map(Some),
    };
    let words = |name: &str| match item.get(name) {
        None => Some(None),
        Some(text) => Some(Some(text.as_s().ok()?.as_str())),
    };
    let flag = |name: &str| match item.get(name) {
        None => Some(false),
        Some(flag) => flag.as_bool().ok().copied(),
    };
    // A later version of this library may give the attributes another meaning, so only the format number of its
    // items is read.
    let ours = format == Parts::VERSION;
    let (empty, nothing): (&[u8], _) = (&[], 0);
    Some(Parts {
        format,
        state: item.get(STATE).and_then(|it| it.as_s().ok()).map(String::as_str).or((!ours).then_some(""))?,
        owner: item.get(OWNER).and_then(|it| it.as_b().ok()).map(AsRef::as_ref).or((!ours).then_some(empty))?,
        attempt: item.get(ATTEMPT).and_then(integer).or((!ours).then_some(nothing))?,
        attempts_used: item.get(ATTEMPTS_USED).and_then(integer).or((!ours).then_some(nothing))?,
        fingerprint: match item.get(FINGERPRINT) {
            None => None,
            Some(fingerprint) => Some(fingerprint.as_b().ok()?.as_ref()),
        },
        on_crash_fail: flag(ON_CRASH_FAIL)?,
        begun: flag(BEGUN)?,
        lease_ms: optional(LEASE_MS)?,
        ttl_ms: optional(TTL_MS)?,
        codec: words(CODEC)?,
        result,
        result_bytes: optional(RESULT_BYTES)?,
        reading: ReadExtent::Whole,
        holder: words(HOLDER)?,
        traceparent: words(TRACEPARENT)?,
        decided_by: words(DECIDED_BY)?,
        decided_reason: words(DECIDED_REASON)?,
    })
}

/// Returns an unreadable item, as an operator sees it.
pub(super) fn damaged(item: &Attributes, why: FormatError) -> Inspection {
    let sorted: BTreeMap<_, _> = item.iter().collect();
    let stored = sorted.into_iter().flat_map(|(name, value)| [name.clone().into_bytes(), raw(value)]);
    Inspection::damaged(why.to_string(), stored)
}

/// Returns the type and the bytes of a value. The parts of maps and sets are sorted, because their order in answers
/// varies.
fn raw(value: &AttributeValue) -> Vec<u8> {
    let sized = |part: Vec<u8>| [part.len().to_be_bytes().to_vec(), part].concat();
    let many = |kind: &[u8], parts: Vec<Vec<u8>>| [kind.to_vec(), parts.into_iter().flat_map(sized).collect()].concat();
    let set = |kind: &[u8], mut parts: Vec<Vec<u8>>| {
        parts.sort_unstable();
        many(kind, parts)
    };
    let texts = |texts: &[String]| texts.iter().map(|text| text.clone().into_bytes()).collect();
    match value {
        AttributeValue::S(text) => [b"S", text.as_bytes()].concat(),
        AttributeValue::N(digits) => [b"N", digits.as_bytes()].concat(),
        AttributeValue::B(bytes) => [b"B", bytes.as_ref()].concat(),
        AttributeValue::Bool(flag) => vec![b'F', u8::from(*flag)],
        AttributeValue::Null(_) => vec![b'0'],
        AttributeValue::Ss(parts) => set(b"s", texts(parts)),
        AttributeValue::Ns(parts) => set(b"n", texts(parts)),
        AttributeValue::Bs(parts) => set(b"b", parts.iter().map(|part| part.as_ref().to_vec()).collect()),
        AttributeValue::L(parts) => many(b"L", parts.iter().map(raw).collect()),
        AttributeValue::M(parts) => {
            let sorted: BTreeMap<_, _> = parts.iter().collect();
            many(b"M", sorted.into_iter().flat_map(|(name, part)| [name.clone().into_bytes(), raw(part)]).collect())
        }
        _ => b"?".to_vec(),
    }
}

pub(super) fn integer(value: &AttributeValue) -> Option<i64> {
    value.as_n().ok()?.parse().ok()
}

/// Returns the size of an item by DynamoDB's own rules: the names of the attributes and their values.
pub(super) fn size(item: &Attributes) -> usize {
    let value = |value: &AttributeValue| match value {
        AttributeValue::S(text) => text.len(),
        AttributeValue::B(bytes) => bytes.as_ref().len(),
        // A number takes one byte for two significant digits, and one more byte.
        AttributeValue::N(digits) => digits.trim_end_matches('0').len().div_ceil(2) + 1,
        _ => 1,
    };
    item.iter().map(|(name, it)| name.len() + value(it)).sum()
}
