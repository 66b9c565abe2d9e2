//! Reservations: one command reserves the key or returns its record; if the record's lease has lapsed, a takeover
//! follows.

use std::ops::ControlFlow;
use std::time::Duration;

use bytes::Bytes;
use redis::Value;

use super::access::{Access, call, keeps_changing};
use super::command::Name;
use super::failure::{ExchangeFailure, corrupt, failed, unexpected};
use super::op::{Op, OpAnswer};
use super::write::RecordWrite;
use crate::kit::looks::{LOOKS, pause_before};
use crate::record::format::{self, millis};
use crate::record::{Admission, LeaseMark, OwnerToken, Record, Reservation, ReserveRequest, State};
use crate::store::{StoreError, StoreErrorKind};

/// Reserves the key of `request`, or answers with its record.
pub(super) async fn reserve(access: &Access<'_>, request: &ReserveRequest) -> Result<Reservation, StoreError> {
    let name = access.name_of(&request.key);
    let first = Record::first(request);
    let ttl_ms = millis(first.retention(request.ttl));
    let write = RecordWrite { name, record: &first, reserved_at: None, expected: None, ttl_ms };
    // Record that the latest takeover found in place of the expected record, and the rest of its lease; `None` unless
    // that takeover failed.
    let mut changed: Option<(Bytes, Duration)> = None;
    for look in 0..LOOKS {
        if pause_before(look, access.core.clock()).await {
            // The record that the takeover found may be out of date after the pause.
            changed = None;
        }
        let (found, left) = match changed.take() {
            Some((found, left)) => (found, Some(left)),
            None => match looked(access.run(name, Op::Reserve(write)).await, request.owner).map_err(failed)? {
                Value::Nil => {
                    let mut granted = first.grant(request, false);
                    if let Reservation::Granted { lease, .. } = &mut granted {
                        lease.mark = LeaseMark::new(access.core.wall_millis());
                    }
                    return Ok(granted);
                }
                Value::BulkString(found) => (Bytes::from(found), None),
                other => return Err(unexpected(&other)),
            },
        };
        let seen = format::identity(&found).unwrap_or_default();
        let (record, meeting) = match answer_found(access, request, found, left)? {
            ControlFlow::Break(answer) => return Ok(answer),
            ControlFlow::Continue(lapsed) => lapsed,
        };
        let asked_at = access.core.now();
        // Boxed: most calls need no takeover, but would carry the size of this future inline.
        let taken = Box::pin(take(access, name, &seen, &record, &meeting, request.owner)).await?;
        match (taken, meeting) {
            (TakeoverAnswer::Held(_), Admission::Answer(answer)) if !depends_on_lease(&answer) => {
                return Ok(answer);
            }
            (TakeoverAnswer::Lapsed, Admission::Answer(answer)) => return Ok(answer),
            (TakeoverAnswer::Replaced, Admission::Replace { with, takeover }) => {
                return Ok(with.grant(request, takeover));
            }
            (TakeoverAnswer::Held(lapses_in), _) => {
                access.core.remember(record.owner, asked_at.saturating_add(lapses_in));
                return Ok(Reservation::InProgress { attempt: record.attempt, lapses_in });
            }
            (TakeoverAnswer::Changed(now), _) => {
                // This record is as fresh as one that a further look would find. Most often another attempt now holds
                // the key, and after a pause of this loop yet another one would.
                if let Some((found, left)) = now.clone()
                    && let ControlFlow::Break(answer) = answer_found(access, request, found, Some(left))?
                {
                    return Ok(answer);
                }
                changed = now;
            }
            (taken, meeting) => {
                let message = format!("the server gave the unexpected answer {taken:?} to {meeting:?}");
                return Err(StoreError::new(StoreErrorKind::Unconfirmed, message));
            }
        }
    }
    Err(keeps_changing())
}

/// Returns the answer to the reservation, if the record `found` suffices for an answer. Otherwise the record has to be
/// replaced, or this process does not know whether the record's lease still holds: then returns the record, and the
/// decision that applies if the lease has lapsed. `left` is the rest of the lease, if known.
fn answer_found(
    access: &Access<'_>,
    request: &ReserveRequest,
    found: Bytes,
    left: Option<Duration>,
) -> Result<ControlFlow<Reservation, (Record, Admission)>, StoreError> {
    // A finished record has no lease, so the record alone decides.
    let [_, began] = format::times(&found);
    let record = format::decode_owned(found).map_err(corrupt)?;
    if record.is_finished() {
        match record.admit_owned(request, Duration::ZERO) {
            Admission::Answer(answer) => return Ok(ControlFlow::Break(answer.aged(access.core.age(began)))),
            Admission::Replace { .. } => unreachable!("a finished record is not replaced"),
        }
    }
    // If the lease certainly holds, the answer needs no further round trip.
    let pending = record.is_pending();
    let holds = if pending { left.filter(|left| !left.is_zero()) } else { None };
    if pending && let Some(lapses_in) = holds.or_else(|| access.core.known_to_hold(record.owner)) {
        match record.admit(request, lapses_in) {
            Admission::Answer(answer) => return Ok(ControlFlow::Break(answer)),
            Admission::Replace { .. } => unreachable!("a live lease is not replaced"),
        }
    }
    // A record that is not pending has no lease, so its answer needs no question to the server.
    match record.admit(request, Duration::ZERO) {
        Admission::Answer(answer) if !pending || left.is_some() => Ok(ControlFlow::Break(answer)),
        lapsed => Ok(ControlFlow::Continue((record, lapsed))),
    }
}

/// Answer of a server to a takeover.
#[derive(Debug)]
enum TakeoverAnswer {
    Replaced,
    Lapsed,
    /// The key now has another record, with the remaining time of its lease; `None` if the key has no record.
    Changed(Option<(Bytes, Duration)>),
    Held(Duration),
}

/// Replaces the record `met` if the record is unchanged and its lease has lapsed. If `meeting` holds no replacement,
/// writes nothing and returns the state of the lease.
async fn take(
    access: &Access<'_>,
    name: Name<'_>,
    seen: &[u8],
    met: &Record,
    meeting: &Admission,
    owner: OwnerToken,
) -> Result<TakeoverAnswer, StoreError> {
    let lease = match met.state {
        State::Pending { lease, .. } => millis(lease),
        _ => 0,
    };
    let retention = millis(met.retention(Duration::ZERO));
    let (value, new_retention) = match meeting {
        Admission::Replace { with, .. } => (format::encode(with), millis(with.retention(Duration::ZERO))),
        Admission::Answer(_) => (Vec::new(), 0),
    };
    let asked = call(&access.core.scripts().take, name, |command| {
        command.arg(seen).arg(lease).arg(retention).arg(&value).arg(new_retention);
        command.arg(&*access.core.terms.channel);
    });
    // Replicas must confirm a takeover. If another attempt holds the lease, the answer is valid without replicas.
    let taken = access.run(name, Op::Write(asked.returns_record())).await;
    let taken = match taken {
        // The answer only says "in progress", so it needs no replica (see `looked`).
        Err(ExchangeFailure::Unreplicated(taken, why)) => match *taken {
            Value::Int(1..) if met.owner != owner => *taken,
            Value::Array(parts) if is_held_by_another(&parts, owner) => Value::Array(parts),
            taken => return Err(failed(ExchangeFailure::Unreplicated(Box::new(taken), why))),
        },
        taken => taken.map_err(failed)?,
    };
    read_takeover(taken)
}

/// Reads the answer of the script.
fn read_takeover(taken: Value) -> Result<TakeoverAnswer, StoreError> {
    match taken {
        Value::Int(-2) => Ok(TakeoverAnswer::Replaced),
        Value::Int(-1) => Ok(TakeoverAnswer::Changed(None)),
        Value::Int(0) => Ok(TakeoverAnswer::Lapsed),
        Value::Int(left) => Ok(TakeoverAnswer::Held(Duration::from_millis(left.unsigned_abs()))),
        Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
            Ok([Value::BulkString(record), Value::Int(left)]) => {
                let left = Duration::from_millis(u64::try_from(left).unwrap_or_default());
                Ok(TakeoverAnswer::Changed(Some((Bytes::from(record), left))))
            }
            other => Err(unexpected(&Value::Array(other.map_or_else(|parts| parts, Vec::from)))),
        },
        other => Err(unexpected(&other)),
    }
}

/// Returns whether `answer` would differ if the lease of the record still held.
fn depends_on_lease(answer: &Reservation) -> bool {
    matches!(answer, Reservation::Interrupted { .. } | Reservation::AttemptsExhausted { .. })
}

/// Accepts the answer to a reservation without replicas if the answer is an unfinished attempt of another owner: the
/// caller only learns "in progress". A result or our own reservation must be replicated, because the caller relies on
/// it.
fn looked(answer: OpAnswer, owner: OwnerToken) -> OpAnswer {
    match answer {
        Err(ExchangeFailure::Unreplicated(found, why)) => match *found {
            Value::BulkString(found) if is_of_another(&found, owner) => Ok(Value::BulkString(found)),
            found => Err(ExchangeFailure::Unreplicated(Box::new(found), why)),
        },
        answer => answer,
    }
}

/// Returns whether the record is an unfinished attempt of another owner, running or abandoned.
fn is_of_another(found: &[u8], owner: OwnerToken) -> bool {
    // If the bytes are unreadable, the reservation fails. `true` passes the bytes to the decoder, whose error has more
    // details.
    format::is_unfinished_of_another(found, owner).unwrap_or(true)
}

/// Returns whether the record in the answer to a takeover is an attempt of another owner whose lease still holds.
fn is_held_by_another(found: &[Value], owner: OwnerToken) -> bool {
    matches!(found, [Value::BulkString(record), Value::Int(1..)] if is_of_another(record, owner))
}
