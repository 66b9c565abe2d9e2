//! Writes of an attempt to its own record.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::access::{Access, WriteOutcome};
use super::failure::{keeps_changing, unavailable};
use super::held::HeldRecord;
use super::message::LastMessage;
use crate::kit::looks::{LOOKS, pause_before};
use crate::record::format::{self, START_BYTES, millis};
use crate::record::{Finish, Journal, Lease, Record, Release, State, Verdict};
use crate::store::StoreError;

/// A write of an attempt to its own record.
#[derive(Clone, Copy)]
pub(super) enum Change<'a> {
    Begin,
    Renew,
    Append(&'a Journal),
    Finish(&'a Finish),
    Release(Release),
}

impl Change<'_> {
    /// Returns the record after this write, or the answer to a write that changes nothing. `lapses_in` is the time
    /// until the lease of a pending record lapses.
    fn apply(self, lease: &Lease, record: Record, lapses_in: Duration) -> Result<Record, Verdict> {
        let is_held = record.is_pending() && record.is_of(lease);
        match self {
            Self::Begin if record.may_begin(lease, lapses_in) => {
                let State::Pending { lease, ttl, on_crash, .. } = record.state else { return Err(Verdict::Refused) };
                Ok(Record { state: State::Pending { lease, ttl, on_crash, begun: true }, ..record })
            }
            Self::Renew if is_held => Ok(record),
            Self::Append(journal) if is_held => {
                // A longer journal is a later one: a late copy of an earlier request must not replace it.
                let present = record.journal.as_ref().map_or(0, |present| present.bytes().len());
                let journal = if present < journal.bytes().len() { Some(journal.clone()) } else { record.journal };
                Ok(Record { journal, ..record })
            }
            Self::Finish(finish) if is_held => Ok(Record::after(lease, finish.state())),
            Self::Release(release) if record.is_pending() && record.owner == lease.owner => {
                let attempts_used = record.attempts_used.saturating_sub(u32::from(!release.counts()));
                Ok(Record { state: release.state(), attempts_used, ..record })
            }
            Self::Finish(_) => Err(record.ended(lease, true)),
            Self::Release(_) => Err(record.ended(lease, false)),
            Self::Begin | Self::Renew | Self::Append(_) => Err(Verdict::Refused),
        }
    }
}

/// Applies `change` to the record of `lease`. A record that this process has written last is changed without a read.
pub(super) async fn change(access: &Access<'_>, lease: &Lease, change: Change<'_>) -> Result<Verdict, StoreError> {
    let subject = access.core.subject_of(&lease.key);
    if let Change::Append(journal) = change {
        // The journal leaves room for the longer provenance of a later attempt.
        access.check_size(journal.bytes().len() + 2 * START_BYTES)?;
    }
    let held = access.held(&subject, lease.owner).await?;
    // The first look uses the record as this process has written it, if nothing depends on the server's clock.
    let mut known = held.as_ref().and_then(|held| known(access, held));
    for look in 0..LOOKS {
        pause_before(look, access.clock()).await;
        let (sequence, record, times, lapses_in) = match known.take() {
            Some(known) => known,
            None => match read(access, &subject, held.as_ref()).await? {
                Some(read) => read,
                None => {
                    access.forget(lease.owner);
                    return Ok(Verdict::Refused);
                }
            },
        };
        let with = match change.apply(lease, record, lapses_in) {
            Ok(with) => with,
            Err(answer) => return Ok(answer),
        };
        let retention = millis(with.retention(lease.ttl));
        match write(access, lease, &subject, sequence, &with, times, retention).await? {
            WriteOutcome::Done(_) => {
                if !with.is_pending() {
                    access.core.waiting.here().wake(&subject);
                }
                return Ok(Verdict::Applied);
            }
            WriteOutcome::Refused => {}
        }
    }
    Err(keeps_changing())
}

/// Writes `with` in place of message number `sequence`. If the stream takes batches, it stores the messages of a
/// finished record next to the record, and in the same step.
async fn write(
    access: &Access<'_>,
    lease: &Lease,
    subject: &str,
    sequence: u64,
    with: &Record,
    times: [u64; 2],
    retention: u64,
) -> Result<WriteOutcome, StoreError> {
    let core = access.core;
    if core.batches.load(Ordering::Relaxed)
        && let Some((alone, messages)) = core.outbox.parts(with, core.max_message)
    {
        let written = access.put_with_messages(subject, sequence, &alone, times, retention, messages).await?;
        if let Some(WriteOutcome::Done(_)) = written {
            core.context.leases().messages_left(lease.owner);
        }
        if let Some(written) = written {
            return Ok(written);
        }
        // A leader that changed, too many batches at once, or no right to publish a message: the record keeps the
        // messages, and they leave after it.
    }
    access.put(subject, sequence, with, times, retention).await
}

/// A pending record to be changed: its sequence number, the record, its times, and the time until its lease lapses.
type Changeable = (u64, Record, [u64; 2], Duration);

/// Returns the record in `held`, if its lease certainly holds: the leader stored it after the request was sent.
fn known(access: &Access<'_>, held: &HeldRecord) -> Option<Changeable> {
    let record = format::decode(&held.body).ok()?;
    let State::Pending { lease, .. } = record.state else { return None };
    let passed = access.clock().now().saturating_since(held.sent);
    let lapses_in = lease.checked_sub(passed).filter(|left| !left.is_zero())?;
    Some((held.sequence, record, times_of(&held.body, access), lapses_in))
}

/// Reads the record on `subject`. `None` if there is no record, or if it is not the record of any attempt. `held` is
/// the record as this process has written it: an earlier state than that is no evidence, and an error.
async fn read(access: &Access<'_>, subject: &str, held: Option<&HeldRecord>) -> Result<Option<Changeable>, StoreError> {
    let found = access.get(subject).await?;
    let sequence = match &found {
        LastMessage::Absent(sequence) => *sequence,
        LastMessage::Record(stored) => stored.sequence,
    };
    if held.is_some_and(|held| held.is_later_than(sequence, access.clock().now())) {
        return Err(unavailable(
            "the stream answers with an earlier state than the record that it has confirmed: the server can't read the \
             record, is cut off, or the record was purged",
        ));
    }
    let LastMessage::Record(stored) = found else { return Ok(None) };
    // An unreadable message is not the record of this attempt.
    let Ok(record) = format::decode(&stored.body) else { return Ok(None) };
    let standing = access.standing(&stored, &record).await?;
    Ok(standing.map(|standing| (stored.sequence, record, times_of(&stored.body, access), standing.lapses_in)))
}

fn times_of(body: &bytes::Bytes, access: &Access<'_>) -> [u64; 2] {
    format::times(body).map(|time| time.unwrap_or_else(|| access.core.millis()))
}
