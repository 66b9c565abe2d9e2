//! Reads records without changing them, for waiters, operators and lists.

use std::time::Duration;

use bytes::Bytes;
use redis::Value;

use super::access::{Access, call};
use super::command::{Name, RedisCommand};
use super::failure::{corrupt, damaged, failed, unexpected};
use super::op::Op;
use crate::record::format::{self, millis};
use crate::record::{Inspection, Record, State};
use crate::store::StoreError;

/// Returns the value under `name`. `op` is [`Op::Read`], or [`Op::Write`] if replicas have to confirm the value.
pub(super) async fn look_at(
    access: &Access<'_>,
    name: Name<'_>,
    op: fn(RedisCommand) -> Op<'static>,
) -> Result<Option<StoredValue>, StoreError> {
    let asked = call(&access.core.scripts().inspect, name, |_| {});
    let found = access.run(name, op(asked.returns_record())).await;
    let found = found.map_err(failed)?;
    let Value::Array(parts) = found else { return Err(unexpected(&found)) };
    let [value, Value::Int(left), Value::Int(expires_at)] = &parts[..] else {
        return Err(unexpected(&Value::Array(parts)));
    };
    let value = match value {
        Value::Nil => return Ok(None),
        Value::BulkString(value) => Bytes::copy_from_slice(value),
        other => return Err(unexpected(other)),
    };
    let record = format::decode(&value).map_err(corrupt);
    let found = record.and_then(|record| inspection(record, &value, *left, *expires_at));
    Ok(Some(StoredValue { value, left: *left, found }))
}

/// Returns the record of `name` without its result. Reads the whole record only if its start alone can't be decoded.
pub(super) async fn glance(access: &Access<'_>, name: Name<'_>) -> Result<Option<Inspection>, StoreError> {
    let asked = call(&access.core.scripts().glance, name, |command| {
        command.arg(format::START_BYTES);
    });
    let found = access.run(name, Op::Read(asked)).await.map_err(failed)?;
    let Value::Array(parts) = &found else { return Err(unexpected(&found)) };
    let [Value::BulkString(start), Value::Int(len), Value::Int(left), Value::Int(expires_at)] = &parts[..] else {
        return Err(unexpected(&found));
    };
    if *len == 0 {
        return Ok(None);
    }
    let start = Bytes::copy_from_slice(start);
    let record = format::decode_start(&start, usize::try_from(*len).unwrap_or_default()).map_err(corrupt);
    match record.and_then(|record| inspection(record, &start, *left, *expires_at)) {
        Ok(found) => Ok(Some(found)),
        Err(_) => Ok(look_at(access, name, Op::Read).await?.map(|stored| stored.inspection())),
    }
}

/// The value under a name.
pub(super) struct StoredValue {
    pub(super) value: Bytes,
    /// Milliseconds until the value expires; negative if it does not.
    left: i64,
    /// The record, or the reason why the value can't be read as a record.
    pub(super) found: Result<Inspection, StoreError>,
}

impl StoredValue {
    pub(super) fn expires(&self) -> bool {
        self.left >= 0
    }

    /// Returns the record as an operator sees it.
    pub(super) fn inspection(&self) -> Inspection {
        match &self.found {
            Ok(found) => found.clone(),
            Err(why) => {
                let expires_in = u64::try_from(self.left).map_or(Duration::MAX, Duration::from_millis);
                let stored: [&[u8]; 2] = [&self.value, &[u8::from(self.expires())]];
                Inspection { expires_in, ..Inspection::damaged(why.to_string(), stored) }
            }
        }
    }
}

/// Makes the inspection of a record whose retention ends in `left` milliseconds, at `expires_at` by the server's clock.
/// Both numbers are negative if the record has no expiry. `expires_at` is also negative if the login may not send
/// `PEXPIRETIME`.
fn inspection(record: Record, value: &Bytes, left: i64, expires_at: i64) -> Result<Inspection, StoreError> {
    // A negative `left` means no expiry. A record without a lease is then kept forever; a pending record is damaged.
    let expires_in = u64::try_from(left).map_or(Duration::MAX, Duration::from_millis);
    let [mut seen, mut began] = format::times(value);
    let lapses_in = match record.state {
        State::Pending { .. } if left < 0 => return Err(damaged()),
        State::Pending { lease, ttl, .. } => {
            // A record without times has not been renewed: the server set its expiry when the attempt was reserved, so
            // the attempt began one full retention (lease and ttl) before the expiry.
            let since = u64::try_from(expires_at).ok().and_then(|at| at.checked_sub(millis(lease) + millis(ttl)));
            began = began.or(since);
            seen = seen.or(began);
            Some(expires_in.saturating_sub(ttl))
        }
        _ => None,
    };
    let now = expires_at.checked_sub(left).filter(|_| left >= 0 && expires_at >= 0);
    let now = now.and_then(|now| u64::try_from(now).ok());
    let ago = |at: Option<u64>| Some(Duration::from_millis(now?.saturating_sub(at?)));
    Ok(Inspection::new(record, expires_in, lapses_in).since(ago(seen), ago(began)))
}
