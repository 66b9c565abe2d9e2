//! Access of an operation to its store: the state that all handles share, and the connection of the caller's runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde::Deserialize;

use super::bucket::{Bucket, StreamInfo};
use super::failure::{ApiError, misconfigured, too_large, unavailable, unexpected};
use super::held::{HeldRecord, HeldRecords};
use super::link::{Ask, ConnectPlan, Link};
use super::message::{
    HEADER_BYTES, LastMessage, StoredRecord, WireMessage, add_batch, body_of, headers, read_direct, removal,
};
use super::outbox::{Outbox, PublishedMessage};
use super::server_clock::{Sample, ServerClock, ServerTime, after, read_time, since};
use super::subject::subject_of;
use crate::clock::{Clock, Instant};
use crate::key::Key;
use crate::kit::replays::Replays;
use crate::kit::waiting::WaiterTable;
use crate::record::format::millis;
use crate::record::{OwnerToken, Record, State};
use crate::store::{StoreContext, StoreError};
use crate::sync::PerProcess;

/// State that all handles of a store share.
pub(super) struct NatsCore {
    pub(super) context: Arc<StoreContext>,
    pub(super) plan: ConnectPlan,
    pub(super) bucket: Bucket,
    pub(super) namespace: String,
    /// Common beginning of the subjects of all records.
    pub(super) prefix: String,
    pub(super) response_timeout: Duration,
    /// Largest message that server and stream take, in bytes, with its headers.
    pub(super) max_message: usize,
    pub(super) outbox: Outbox,
    /// True if the stream stores messages and their record in one step.
    pub(super) batches: AtomicBool,
    /// True while only the leader answers direct reads, and the login may make them.
    pub(super) direct: AtomicBool,
    pub(super) server_clock: PerProcess<ServerClock>,
    pub(super) held: PerProcess<HeldRecords>,
    pub(super) waiting: Arc<PerProcess<WaiterTable>>,
    pub(super) replays: Replays,
}

impl NatsCore {
    pub(super) fn clock(&self) -> &dyn Clock {
        self.context.clock()
    }

    pub(super) fn subject_of(&self, key: &Key) -> String {
        subject_of(&self.prefix, key)
    }

    /// Returns the approximate time of the leader's clock in milliseconds since 1970, for people; 0 if it is unknown.
    pub(super) fn millis(&self) -> u64 {
        let now = self.server_clock.here().about(self.clock().now());
        u64::try_from(now.unwrap_or_default() / 1_000_000).unwrap_or_default()
    }
}

/// Outcome of a write that expects the sequence number of the last message on its subject.
#[derive(Clone, Copy, Debug)]
pub(super) enum WriteOutcome {
    /// The stream stored the message under this sequence number.
    Done(u64),
    /// The last message on the subject has another sequence number.
    Refused,
}

/// Remaining times of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordTimes {
    /// Time of the leader's clock.
    pub(super) now: ServerTime,
    /// Time until the retention ends; `Duration::MAX` if it never ends, zero never.
    pub(super) expires_in: Duration,
    /// Time until the lease lapses; zero if it has lapsed or if the record is not pending.
    pub(super) lapses_in: Duration,
}

impl RecordTimes {
    /// Returns the remaining times at `now`; `None` if the retention has ended.
    pub(super) fn at(now: ServerTime, stored: &StoredRecord, record: &Record) -> Option<Self> {
        let end = |millis| after(stored.stored_at, Duration::from_millis(millis));
        let expires_at = stored.retention.map_or(ServerTime::MAX, end);
        let expires_in = if expires_at == ServerTime::MAX { Duration::MAX } else { since(expires_at, now) };
        let lapses_in = match record.state {
            State::Pending { lease, .. } => since(end(millis(lease)), now),
            _ => Duration::ZERO,
        };
        (!expires_in.is_zero()).then_some(Self { now, expires_in, lapses_in })
    }
}

/// The state of a store and the connection of one runtime, for one operation.
pub(super) struct Access<'a> {
    pub(super) core: &'a NatsCore,
    pub(super) link: Arc<Link>,
    /// Time at which the operation must end.
    pub(super) until: Instant,
}

#[derive(Deserialize)]
struct WriteAnswer<'a> {
    #[serde(default)]
    error: Option<ApiError>,
    #[serde(default)]
    stream: Option<&'a str>,
    #[serde(default)]
    seq: u64,
    /// Number of messages that were stored together; 0 for a message outside of a batch.
    #[serde(default)]
    count: usize,
}

/// Answer to a question about a message.
#[derive(Deserialize)]
pub(super) struct GetAnswer<'a> {
    #[serde(default)]
    error: Option<ApiError>,
    #[serde(borrow, default)]
    pub(super) message: Option<WireMessage<'a>>,
}

impl Access<'_> {
    pub(super) fn clock(&self) -> &dyn Clock {
        self.core.clock()
    }

    pub(super) async fn client(&self) -> Result<&async_nats::Client, StoreError> {
        self.link.client(&self.core.plan, &self.core.waiting, self.clock(), self.until).await
    }

    async fn ask(
        &self,
        kind: Ask,
        subject: &str,
        headers: Option<HeaderMap>,
        payload: impl Into<Bytes>,
    ) -> Result<Bytes, StoreError> {
        let client = self.client().await?;
        let request = (subject, headers, payload.into());
        Ok(self.link.ask(client, self.clock(), self.until, kind, request).await?.payload)
    }

    /// Sends a request to the interface of JetStream. The request writes nothing that concerns records.
    pub(super) async fn ask_api(&self, subject: &str, payload: impl Into<Bytes>) -> Result<Bytes, StoreError> {
        self.ask(Ask::Read, subject, None, payload).await
    }

    /// Refuses a record of `bytes` bytes if the stream would refuse it.
    pub(super) fn check_size(&self, bytes: usize) -> Result<(), StoreError> {
        let most = self.core.max_message.saturating_sub(HEADER_BYTES);
        if bytes > most { Err(too_large(bytes, most)) } else { Ok(()) }
    }

    /// Publishes a message, and returns the answer of the stream.
    pub(super) async fn publish(
        &self,
        subject: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<WriteOutcome, StoreError> {
        let outcome = self.publish_last(0, subject, headers, body).await?;
        outcome.ok_or_else(|| unexpected("an acknowledgement of a batch"))
    }

    /// Publishes a message, or the last one of a batch of `count` messages, and returns the answer of the stream.
    /// `None` if the stream has stored no message of the batch.
    async fn publish_last(
        &self,
        count: usize,
        subject: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Option<WriteOutcome>, StoreError> {
        let answer = self.ask(Ask::Write, subject, Some(headers), body).await?;
        let answer: WriteAnswer<'_> = serde_json::from_slice(&answer).map_err(|_| unexpected("an acknowledgement"))?;
        match answer {
            WriteAnswer { error: Some(error), .. } if error.is_wrong_sequence() => Ok(Some(WriteOutcome::Refused)),
            WriteAnswer { error: Some(error), .. } if count > 0 && error.is_no_batch() => Ok(None),
            WriteAnswer { error: Some(error), .. } => Err(error.failed()),
            WriteAnswer { stream: Some(stream), seq: sequence @ 1.., count: stored, .. }
                if stream == self.core.bucket.stream && stored == count =>
            {
                Ok(Some(WriteOutcome::Done(sequence)))
            }
            _ => Err(unexpected("an acknowledgement of another stream")),
        }
    }

    /// Writes `record` in place of message number `expected`, to be kept for `retention` milliseconds. `times` are the
    /// times when its key was first seen and when its latest attempt began.
    pub(super) async fn put(
        &self,
        subject: &str,
        expected: u64,
        record: &Record,
        times: [u64; 2],
        retention: u64,
    ) -> Result<WriteOutcome, StoreError> {
        let body = body_of(record, times);
        self.check_size(body.len())?;
        let (sent, kept) = (self.clock().now(), Duration::from_millis(retention));
        let held = self.core.held.here();
        let epoch = held.epoch();
        let written = self.publish(subject, headers(expected, retention), body.clone()).await;
        match (&written, &record.state) {
            (Ok(WriteOutcome::Done(sequence)), State::Pending { .. }) => {
                held.set(
                    record.owner,
                    HeldRecord { subject: subject.into(), sequence: *sequence, body, sent, kept, epoch },
                );
            }
            (Ok(WriteOutcome::Done(_)), _) => held.forget(record.owner),
            // The record may have changed, or this write may have ended the attempt.
            _ => held.doubt(record.owner),
        }
        written
    }

    /// Writes the finished `record` like [`put`](Self::put), together with `messages`: the stream stores all of them or
    /// none. `None` if it takes no batch.
    pub(super) async fn put_with_messages(
        &self,
        subject: &str,
        expected: u64,
        record: &Record,
        times: [u64; 2],
        retention: u64,
        messages: Vec<PublishedMessage>,
    ) -> Result<Option<WriteOutcome>, StoreError> {
        let body = body_of(record, times);
        self.check_size(body.len())?;
        let client = self.client().await?;
        self.link.connected(client, self.clock(), self.until).await?;
        let (batch, count) = (format!("{:032x}", self.clock().entropy()), messages.len() + 1);
        for (at, message) in messages.into_iter().enumerate() {
            let PublishedMessage { subject, mut headers, body } = message;
            add_batch(&mut headers, &batch, at + 1, count);
            let published = client.publish_with_headers(subject, headers, body).await;
            // Without the last message, the server gives up the batch.
            published.map_err(|_| unavailable("the connection to NATS is closed"))?;
        }
        let mut headers = headers(expected, retention);
        add_batch(&mut headers, &batch, count, count);
        let written = self.publish_last(count, subject, headers, body).await;
        let held = self.core.held.here();
        match written {
            Ok(Some(WriteOutcome::Done(_))) => held.forget(record.owner),
            // No message of the batch was stored.
            Ok(None) => {}
            _ => held.doubt(record.owner),
        }
        written
    }

    /// Removes message number `expected`, which is the last on `subject`. The message that says so is kept for `kept`.
    pub(super) async fn remove(
        &self,
        subject: &str,
        expected: u64,
        kept: Duration,
    ) -> Result<WriteOutcome, StoreError> {
        self.publish(subject, removal(expected, millis(kept)), Bytes::new()).await
    }

    /// Returns the pending record of `owner` on `subject` as this process has written it last. If the connection is
    /// another one than at the latest call, the server may have lost that write, and the record has to be read.
    pub(super) async fn held(&self, subject: &str, owner: OwnerToken) -> Result<Option<HeldRecord>, StoreError> {
        let records = self.core.held.here();
        let get = || records.get(owner).filter(|held| *held.subject == *subject);
        if get().is_none() {
            return Ok(None);
        }
        let client = self.client().await?;
        self.link.connected(client, self.clock(), self.until).await?;
        if self.link.was_replaced(client) {
            records.doubt_all();
        }
        let mut held = get();
        if let Some(held) = held.as_mut().filter(|held| held.epoch != records.epoch()) {
            held.body.clear();
        }
        Ok(held)
    }

    /// Reads the last message on `subject`, from the leader of the stream.
    pub(super) async fn get(&self, subject: &str) -> Result<LastMessage, StoreError> {
        let question = serde_json::json!({ "last_by_subj": subject });
        let found = self.get_message(question, |message| message.read(subject)).await?;
        Ok(found.unwrap_or(LastMessage::Absent(0)))
    }

    /// Reads the first message from sequence number `first` on whose subject is among `subjects`, from the leader of
    /// the stream. `None` if there is none.
    pub(super) async fn get_next(
        &self,
        subjects: &str,
        first: u64,
    ) -> Result<Option<(String, LastMessage)>, StoreError> {
        let question = serde_json::json!({ "seq": first.max(1), "next_by_subj": subjects });
        self.get_message(question, |message| Some((message.subject().to_owned(), message.content()?))).await
    }

    async fn get_message<T>(
        &self,
        question: serde_json::Value,
        read: impl FnOnce(&WireMessage<'_>) -> Option<T>,
    ) -> Result<Option<T>, StoreError> {
        let answer = self.ask_api(&self.core.bucket.api("MSG.GET"), question.to_string()).await?;
        let answer: GetAnswer<'_> = serde_json::from_slice(&answer).map_err(|_| unexpected("a message"))?;
        match answer {
            GetAnswer { error: Some(error), .. } if error.is_no_message() => Ok(None),
            GetAnswer { error: Some(error), .. } => Err(error.failed()),
            GetAnswer { message: Some(message), .. } => read(&message).map(Some).ok_or_else(|| unexpected("a message")),
            GetAnswer { .. } => Err(unexpected("no message and no error")),
        }
    }

    /// Reads the last message on `subject` for a reservation, directly if the stream has one server. If the stream has
    /// got replicas since the last question about it, the message may be an earlier one. A write that names its number
    /// is then refused, and the reservation reads from the leader.
    pub(super) async fn glance(&self, subject: &str) -> Result<LastMessage, StoreError> {
        if !self.core.direct.load(Ordering::Relaxed) {
            return self.get(subject).await;
        }
        match self.get_directly(subject).await {
            Ok(found) => Ok(found),
            // A message of another stream is from a mirror, which may be behind. After an answer that the driver can't
            // read, the connection is a new one. The leader answers in both cases.
            Err(_) => self.get(subject).await,
        }
    }

    /// Reads the last message on `subject` from any server that has the stream.
    pub(super) async fn get_directly(&self, subject: &str) -> Result<LastMessage, StoreError> {
        let stream = &self.core.bucket.stream;
        let question = format!("$JS.API.DIRECT.GET.{stream}.{subject}");
        let client = self.client().await?;
        let request = (&*question, None, Bytes::new());
        let answer = self.link.ask(client, self.clock(), self.until, Ask::Read, request).await?;
        read_direct(&answer, stream, subject).ok_or_else(|| {
            // Another server than the leader answers direct reads (`mirror_direct`), so no further read is direct.
            self.core.direct.store(false, Ordering::Relaxed);
            unexpected("a message")
        })
    }

    /// Asks the leader of the stream about the stream, and notes the time of its clock.
    pub(super) async fn ask_stream<T>(
        &self,
        read: impl FnOnce(&StreamInfo<'_>, Sample) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let bucket = &self.core.bucket.name;
        self.find_stream(read)
            .await?
            .ok_or_else(|| misconfigured(format!("there is no bucket `{bucket}` (stream `KV_{bucket}`)")))
    }

    /// Asks like [`ask_stream`](Self::ask_stream). `None` if there is no stream.
    pub(super) async fn find_stream<T>(
        &self,
        read: impl FnOnce(&StreamInfo<'_>, Sample) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        let asked = self.clock().now();
        let answer = self.ask_api(&self.core.bucket.api("INFO"), Bytes::new()).await?;
        let answered = self.clock().now();
        let info: StreamInfo<'_> = serde_json::from_slice(&answer).map_err(|_| unexpected("settings of a stream"))?;
        if let Some(error) = &info.error {
            return if error.is_no_stream() { Ok(None) } else { Err(error.failed()) };
        }
        let time = info.ts.as_deref().and_then(read_time).ok_or_else(|| unexpected("settings without a time"))?;
        if !Bucket::reads_directly(&info) {
            self.core.direct.store(false, Ordering::Relaxed);
        }
        if !self.core.outbox.is_empty() {
            let server = self.client().await?.server_info().version;
            self.core.batches.store(self.core.bucket.takes_batches(&info, &server), Ordering::Relaxed);
        }
        let sample = Sample { time, asked, answered };
        self.core.server_clock.here().note(sample);
        read(&info, sample).map(Some)
    }

    /// Returns the remaining times of the record in `stored`; `None` if its retention has ended.
    ///
    /// An earlier answer of the leader suffices if it shows that neither the lease nor the retention has ended. That
    /// one of them has ended is decided only by a fresh answer.
    pub(super) async fn standing(
        &self,
        stored: &StoredRecord,
        record: &Record,
    ) -> Result<Option<RecordTimes>, StoreError> {
        let range = self.core.server_clock.here().range(self.clock().now());
        let known = range.and_then(|[_, latest]| RecordTimes::at(latest, stored, record));
        if let Some(known) = known.filter(|known| !record.is_pending() || !known.lapses_in.is_zero()) {
            return Ok(Some(known));
        }
        let now = self.ask_stream(|_, sample| Ok(sample.time)).await?;
        Ok(RecordTimes::at(now, stored, record))
    }

    pub(super) fn forget(&self, owner: OwnerToken) {
        self.core.held.here().forget(owner);
    }
}
