//! Reservations: one write reserves a key without a record; otherwise the record decides.

use std::time::Duration;

use super::access::{Access, WriteOutcome};
use super::failure::{corrupt, keeps_changing};
use super::message::{LastMessage, StoredRecord};
use crate::kit::looks::{LOOKS, pause_before};
use crate::record::format::{self, millis};
use crate::record::{Admission, Record, Reservation, ReserveRequest};
use crate::store::StoreError;

/// Reserves the key of `request`, or answers with its record.
pub(super) async fn reserve(access: &Access<'_>, request: &ReserveRequest) -> Result<Reservation, StoreError> {
    let core = access.core;
    let subject = core.subject_of(&request.key);
    // If most calls are replays, a read costs less than a write that is refused.
    let glances = core.replays.are_expected();
    let mut found = if glances { access.glance(&subject).await? } else { LastMessage::Absent(0) };
    for look in 0..LOOKS {
        if pause_before(look, access.clock()).await {
            found = access.get(&subject).await?;
        }
        let written = match &found {
            LastMessage::Absent(sequence) => reserve_first(access, &subject, *sequence, request).await?,
            LastMessage::Record(stored) => meet(access, &subject, stored, request).await?,
        };
        match written {
            Some(answer) => {
                core.replays.note(usize::from(matches!(answer, Reservation::Finished { .. })), 1);
                return Ok(answer);
            }
            // The write was refused: another write has changed the record, or the direct read was out of date.
            // Later looks read the record after their pause.
            None if look > 0 => {}
            None if glances => found = access.get(&subject).await?,
            None => found = access.glance(&subject).await?,
        }
    }
    Err(keeps_changing())
}

/// Writes the record of a first attempt in place of message number `expected`. `None` if the record has changed.
async fn reserve_first(
    access: &Access<'_>,
    subject: &str,
    expected: u64,
    request: &ReserveRequest,
) -> Result<Option<Reservation>, StoreError> {
    let first = Record::first(request);
    let retention = millis(first.retention(request.ttl));
    let now = access.core.millis();
    match access.put(subject, expected, &first, [now, now], retention).await? {
        WriteOutcome::Done(_) => Ok(Some(first.grant(request, false))),
        WriteOutcome::Refused => Ok(None),
    }
}

/// Answers with the record in `stored`, or replaces it. `None` if the record has changed.
async fn meet(
    access: &Access<'_>,
    subject: &str,
    stored: &StoredRecord,
    request: &ReserveRequest,
) -> Result<Option<Reservation>, StoreError> {
    let record = format::decode(&stored.body).map_err(corrupt)?;
    let Some(standing) = access.standing(stored, &record).await? else {
        // The server has not removed the message yet. Its number keeps the write from replacing a later record.
        return reserve_first(access, subject, stored.sequence, request).await;
    };
    let [first_seen, began] = format::times(&stored.body);
    match record.admit_owned(request, standing.lapses_in) {
        Admission::Answer(answer) => {
            let age = began.map(|began| Duration::from_millis(access.core.millis().saturating_sub(began)));
            Ok(Some(answer.aged(age)))
        }
        Admission::Replace { with, takeover } => {
            let now = access.core.millis();
            let retention = millis(with.retention(request.ttl));
            let times = [first_seen.unwrap_or(now), now];
            match access.put(subject, stored.sequence, &with, times, retention).await? {
                WriteOutcome::Done(_) => {
                    access.core.waiting.here().wake(subject);
                    Ok(Some(with.grant(request, takeover)))
                }
                WriteOutcome::Refused => Ok(None),
            }
        }
    }
}
