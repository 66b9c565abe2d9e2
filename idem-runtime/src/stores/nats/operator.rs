//! Work of operators: inspections, decisions about single records, and lists of records.

use std::time::Duration;

use async_nats::StatusCode;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::{Either, select};
use serde::Deserialize;

use super::access::{Access, RecordTimes, WriteOutcome};
use super::failure::{ApiError, corrupt, keeps_changing, unavailable, unexpected};
use super::message::{LastMessage, StoredRecord, read_delivered};
use super::server_clock::ServerTime;
use super::subject::{key_of, subjects_of};
use crate::combine::race;
use crate::kit::looks::{LOOKS, pause_before};
use crate::record::format::{self, FormatError, START_BYTES, millis};
use crate::record::{Decision, DecisionAnswer, Inspection, Record, Ruling};
use crate::store::{Cursor, Filter, Page, StoreError, StoreErrorKind};

/// Largest number of messages that one page of a list reads.
const READ_AT_ONCE: usize = 256;
/// Number of bytes after which a page of a list ends.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
/// Time after which the server removes the consumer of a list whose reader has vanished.
const CONSUMER_IDLE: Duration = Duration::from_secs(10);

/// Pause before a consumer that does not listen yet is asked again.
const PAUSE_BEFORE_ASKING_AGAIN: Duration = Duration::from_millis(5);

/// Makes the inspection of a record.
pub(super) fn inspection(stored: &StoredRecord, record: Record, standing: RecordTimes) -> Inspection {
    let now = u64::try_from(standing.now / 1_000_000).unwrap_or_default();
    let [first_seen, began] = format::times(&stored.body);
    let ago = |at: Option<u64>| at.map(|at| Duration::from_millis(now.saturating_sub(at)));
    let lapses_in = record.is_pending().then_some(standing.lapses_in);
    Inspection::new(record, standing.expires_in, lapses_in).since(ago(first_seen), ago(began))
}

/// Returns the record on `subject` as an operator sees it; `None` if its retention has ended.
pub(super) async fn examine(access: &Access<'_>, subject: &str) -> Result<Option<Inspection>, StoreError> {
    match access.get(subject).await? {
        LastMessage::Record(stored) => seen(access, &stored).await,
        LastMessage::Absent(_) => Ok(None),
    }
}

/// Returns the record in `stored` as an operator sees it; `None` if its retention has ended.
async fn seen(access: &Access<'_>, stored: &StoredRecord) -> Result<Option<Inspection>, StoreError> {
    match format::decode(&stored.body) {
        Ok(record) => {
            let standing = access.standing(stored, &record).await?;
            Ok(standing.map(|standing| inspection(stored, record, standing)))
        }
        Err(why) => Ok(Some(damaged(why, stored))),
    }
}

/// Makes the inspection of a message that is no record. Two such messages differ in their bytes or their numbers.
fn damaged(why: FormatError, stored: &StoredRecord) -> Inspection {
    Inspection::damaged(corrupt(why).to_string(), [&stored.body[..], &stored.sequence.to_be_bytes()])
}

/// Reads the record, decides, and writes if the record is unchanged.
pub(super) async fn decide(access: &Access<'_>, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
    let subject = access.core.subject_of(&decision.key);
    for look in 0..LOOKS {
        pause_before(look, access.clock()).await;
        let LastMessage::Record(stored) = access.get(&subject).await? else { return Ok(DecisionAnswer::NoRecord) };
        let Some(found) = seen(access, &stored).await? else { return Ok(DecisionAnswer::NoRecord) };
        let written = match found.decide(decision) {
            Ruling::Answer(refused) => return Ok(refused),
            Ruling::Replace(with) => {
                // The record keeps its retention, which is counted from the time of this write. The retention is never
                // longer than before, and may be shorter by the time that an answer about the stream took.
                let retention = match found.expires_in {
                    Duration::MAX => u64::MAX,
                    expires_in => millis(expires_in),
                };
                let times = format::times(&stored.body).map(|time| time.unwrap_or_else(|| access.core.millis()));
                access.put(&subject, stored.sequence, &with, times, retention).await?
            }
            Ruling::Remove => {
                // The attempt that still runs learns from this message that its record was removed.
                let kept = if found.record.is_pending() { found.expires_in } else { Duration::ZERO };
                access.remove(&subject, stored.sequence, kept).await?
            }
        };
        if let WriteOutcome::Done(_) = written {
            access.core.waiting.here().wake(&subject);
            return Ok(DecisionAnswer::Applied);
        }
    }
    Err(keeps_changing())
}

#[derive(Deserialize)]
struct ConsumerAnswer {
    #[serde(default)]
    error: Option<ApiError>,
    #[serde(default)]
    name: String,
}

/// Lists the records in the order of their latest writes, from the sequence number in the cursor on. A record that is
/// written meanwhile moves to the end, where the list shows it again.
pub(super) async fn scan(access: &Access<'_>, filter: &Filter) -> Result<Page, StoreError> {
    if !filter.scan {
        let message = "a stream has no order of keys to walk by: ask for a scan of all records (`Filter::scan`), which \
                       may repeat records";
        return Err(StoreError::new(StoreErrorKind::Unsupported, message));
    }
    let first: u64 = match &filter.after {
        None => 1,
        Some(cursor) => cursor.as_str().parse().map_err(|_| cursor.is_foreign())?,
    };
    let subjects = subjects_of(&access.core.prefix, &filter.prefix());
    let consumer = create_consumer(access, &subjects, first).await?;
    let read = fetch(access, &consumer).await;
    // The answer is not awaited: the server removes an idle consumer, too.
    let stream = &access.core.bucket.stream;
    access.client().await?.publish(format!("$JS.API.CONSUMER.DELETE.{stream}.{consumer}"), Bytes::new()).await.ok();
    let (messages, is_last) = match read? {
        FetchOutcome::Some(messages) => (messages, false),
        FetchOutcome::Rest(messages) => (messages, true),
        // The leader answers in a form that the driver can read, whatever the headers of the message are.
        FetchOutcome::Unreadable => match access.get_next(&subjects, first).await? {
            Some(message) => (vec![message], false),
            None => (Vec::new(), true),
        },
    };
    let now = access.ask_stream(|_, sample| Ok(sample.time)).await?;
    let (mut page, mut next) = (Page::default(), first);
    for (subject, found) in messages {
        let found = match found {
            LastMessage::Absent(sequence) => {
                next = next.max(sequence.saturating_add(1));
                continue;
            }
            LastMessage::Record(stored) => {
                next = next.max(stored.sequence.saturating_add(1));
                listed(&stored, now)
            }
        };
        let key = key_of(&access.core.prefix, &subject).unwrap_or_default();
        page.add(filter, &key, Ok::<_, FormatError>(found));
    }
    page.next = (!is_last).then(|| Cursor::new(next.to_string()));
    Ok(page)
}

/// Returns the record in `stored` without its result; `None` if its retention has ended at `now`.
fn listed(stored: &StoredRecord, now: ServerTime) -> Option<Inspection> {
    // Only the whole record shows whether its result can be read.
    if let Err(why) = format::decode(&stored.body) {
        return Some(damaged(why, stored));
    }
    let start = stored.body.slice(..stored.body.len().min(START_BYTES));
    match format::decode_start(&start, stored.body.len()) {
        Ok(record) => RecordTimes::at(now, stored, &record).map(|standing| inspection(stored, record, standing)),
        Err(why) => Some(damaged(why, stored)),
    }
}

/// Creates a consumer that delivers the messages on `subjects` from sequence number `first` on, and returns its name.
async fn create_consumer(access: &Access<'_>, subjects: &str, first: u64) -> Result<String, StoreError> {
    let stream = &access.core.bucket.stream;
    let name = format!("idem-list-{:032x}", access.clock().entropy());
    let settings = serde_json::json!({
        "stream_name": stream,
        "action": "create",
        "config": {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first.max(1),
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": subjects,
            "mem_storage": true,
            "num_replicas": 1,
            "inactive_threshold": u64::try_from(CONSUMER_IDLE.as_nanos()).unwrap_or(u64::MAX),
        },
    });
    let answer = access.ask_api(&format!("$JS.API.CONSUMER.CREATE.{stream}.{name}"), settings.to_string()).await?;
    let answer: ConsumerAnswer = serde_json::from_slice(&answer).map_err(|_| unexpected("a consumer"))?;
    match answer.error {
        Some(error) => Err(error.failed()),
        None if answer.name == name => Ok(name),
        None => Err(unexpected("another consumer")),
    }
}

/// Messages of a consumer, with their subjects.
enum FetchOutcome {
    /// More messages may follow.
    Some(Vec<(String, LastMessage)>),
    /// No more messages follow.
    Rest(Vec<(String, LastMessage)>),
    /// The connection broke before the first message. The driver gives up a connection if it can't read a message, for
    /// example because its headers are no text.
    Unreadable,
}

/// Returns the next messages of a consumer.
async fn fetch(access: &Access<'_>, consumer: &str) -> Result<FetchOutcome, StoreError> {
    let client = access.client().await?;
    let inbox = client.new_inbox();
    let stopped = || unavailable("the connection to NATS was closed during a list");
    let breaks = access.link.breaks();
    let mut answers = client.subscribe(inbox.clone()).await.map_err(|_| stopped())?;
    let most = PAGE_BYTES.max(2 * access.core.max_message);
    let question = serde_json::json!({ "batch": READ_AT_ONCE, "max_bytes": most, "no_wait": true }).to_string();
    let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{consumer}", access.core.bucket.stream);
    let question = Bytes::from(question);
    let ask = || client.publish_with_reply(subject.clone(), inbox.clone(), question.clone());
    ask().await.map_err(|_| stopped())?;
    let mut ended = Box::pin(select(Box::pin(access.link.refused(&subject)), Box::pin(access.link.broken(breaks))));
    let mut messages = Vec::new();
    while messages.len() < READ_AT_ONCE {
        let left = access.until.saturating_since(access.clock().now());
        let next = match race(select(answers.next(), &mut ended), access.clock().sleep(left)).await {
            Some(Either::Left((next, _))) => Some(next),
            Some(Either::Right((Either::Left((refusal, _)), _))) => return Err(refusal),
            Some(Either::Right((Either::Right(_), _))) if messages.is_empty() => return Ok(FetchOutcome::Unreadable),
            Some(Either::Right((Either::Right(_), _))) => return Ok(FetchOutcome::Some(messages)),
            None => None,
        };
        let message = next.ok_or_else(|| unavailable("NATS did not answer in time"))?.ok_or_else(stopped)?;
        match message.status {
            None => {
                let read = read_delivered(&message);
                messages.push(read.ok_or_else(|| unexpected("a message of a consumer"))?);
            }
            // There are no more messages, or the page has enough bytes.
            Some(StatusCode::NOT_FOUND | StatusCode::TIMEOUT) => return Ok(FetchOutcome::Rest(messages)),
            // In a cluster the consumer may be on another server, which has not yet told this one that it listens.
            Some(StatusCode::NO_RESPONDERS) if messages.is_empty() => {
                access.clock().sleep(PAUSE_BEFORE_ASKING_AGAIN).await;
                ask().await.map_err(|_| stopped())?;
            }
            Some(_) if !messages.is_empty() => return Ok(FetchOutcome::Some(messages)),
            Some(status) => return Err(unavailable(format!("the consumer of the list ended with status {status}"))),
        }
    }
    Ok(FetchOutcome::Some(messages))
}
