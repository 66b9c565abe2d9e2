//! Concurrent handling of a batch of deliveries, each with its own outcome.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use serde::Serialize;

use super::beat::Beats;
use super::observe::{CatchPanics, Observe};
use super::outcome::Outcome;
use super::poll_notes::note_refusal;
use super::turns::Turns;
use crate::clock::{Clock, Sleep, SystemClock};
use crate::error::{Disposition, Error};
use crate::sync::{Mutex, lock};

/// Runs the deliveries of a batch concurrently, and returns the outcome of each delivery.
///
/// Each item is a pair: the id of a message, and the [`observe`](crate::observe) future that handles the message. The
/// settings of the delivery belong to this future.
///
/// - At most [`limit`](ObserveAll::limit) items run at a time (default: 16), in their order. The batch takes an item
///   from the iterator only when that item can start. So `on_beat` does not extend a message that still waits to start:
///   fetch no more messages than the limit.
/// - Items with the same key take turns, so that the body runs once and the later items replay its result. If the body
///   fails, the next item runs the body again. A turn lasts for one call: it ends when the call returns or is dropped,
///   for example by a time-out around it. If a handler keeps a call and no longer polls it, the call delays later items
///   with its key for `timeout` plus one lease at most.
/// - An error, a panic or a delay of one item does not affect other items: an item waits only for calls on its own
///   keys.
/// - Deliveries of one [`group`](Observe::group) run in their order, and stop after the first delivery that is not
///   acknowledged.
/// - At the [`deadline`](ObserveAll::deadline), if one is set, the batch ends with the items that are done.
/// - Under [`Mode::Shadow`](crate::Mode::Shadow) and [`Mode::Off`](crate::Mode::Off) no item waits for another item.
///
/// # Cancel safety
/// Dropping the future drops the items that run, and starts no further item. `#[idempotent]` describes the effect of a
/// drop on keys.
///
/// ```
/// # use idem_runtime::{Error, MemoryStore, idempotent, observe, observe_all};
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
/// async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
///     match id {
///         0 => panic!("no such order"),
///         id => Ok(format!("parcel for {id}")),
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new();
/// let messages = [("a", 41), ("b", 0), ("c", 41)];
/// let batch = observe_all(messages.map(|(id, order)| (id, observe(ship(&store, order))))).limit(8).await;
///
/// assert!(batch.items()[2].outcome.replayed());
/// // The response that AWS Lambda expects for a batch of SQS.
/// let failures = serde_json::to_string(&batch.item_failures()).unwrap();
/// assert_eq!(failures, r#"{"batchItemFailures":[{"itemIdentifier":"b"}]}"#);
/// # });
/// ```
pub fn observe_all<I, F, B, C>(calls: C) -> ObserveAll<I, F, B, C::IntoIter>
where
    C: IntoIterator<Item = (I, Observe<F, B>)>,
    F: Future,
{
    ObserveAll {
        calls: Some(calls.into_iter()),
        started: 0,
        limit: DEFAULT_LIMIT,
        running: HashMap::new(),
        ended: Vec::new(),
        woken: Arc::default(),
        turns: Turns::default(),
        groups: HashMap::new(),
        next_of_groups: VecDeque::new(),
        deadline: Deadline::None,
    }
}

/// Number of items that run at a time, unless [`ObserveAll::limit`] sets another number.
const DEFAULT_LIMIT: usize = 16;

/// Future of [`observe_all`].
#[must_use = "futures do nothing unless polled"]
pub struct ObserveAll<I, F: Future, B, C> {
    /// Iterator of the items; `None` once it has returned its last item.
    calls: Option<C>,
    started: usize,
    limit: usize,
    /// Items that have started and not ended, by index in the batch.
    running: HashMap<usize, RunningItem<I, F, B>>,
    ended: Vec<(usize, BatchItem<I, F::Output>)>,
    woken: Arc<WakeList>,
    turns: Turns,
    groups: HashMap<Box<str>, Group<I, F, B>>,
    /// Items that can start next, because the previous item of their group has ended.
    next_of_groups: VecDeque<PulledItem<I, F, B>>,
    deadline: Deadline,
}

/// An item that the batch has taken from the iterator and not started yet.
struct PulledItem<I, F: Future, B> {
    item: usize,
    id: I,
    call: Observe<F, B>,
    group: Option<Box<str>>,
}

/// State of a group, whose items are handled one after the other.
enum Group<I, F: Future, B> {
    /// An item of the group has started; the items in the queue wait for its end.
    Busy(VecDeque<PulledItem<I, F, B>>),
    /// An item of the group was not acknowledged, so no further item of the group starts. Holds the pause after which a
    /// later delivery may succeed, if that pause is known.
    Stopped(Option<Duration>),
}

/// Deadline of a batch, at which the batch ends with the items that are done.
enum Deadline {
    None,
    /// The deadline is this long after the first poll of the batch.
    After(Duration),
    At(Sleep),
}

struct RunningItem<I, F: Future, B> {
    group: Option<Box<str>>,
    id: I,
    call: Pin<Box<CatchPanics<F, B>>>,
    waker: Waker,
}

impl<I, F: Future, B, C> ObserveAll<I, F, B, C> {
    /// Sets the number of items that run at a time (default: 16; 0 means 1).
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = limit.max(1);
        self
    }

    /// Sets the time, counted from the first poll, after which the batch ends with the items that are done (default:
    /// the batch waits for all items). The batch drops the deliveries that still run: their keys are freed, or are
    /// interrupted under `on_crash = fail`. Deliveries that have not started never start, and the batch takes all
    /// remaining items from the iterator. Dropped deliveries and deliveries that never start end with
    /// [`Error::DeadlinePassed`], to be delivered again.
    ///
    /// If AWS Lambda kills a function at its time-out, no message of the batch gets a response, and all messages are
    /// delivered again. So set a deadline one second before that time-out, and [`flush`](crate::StoreExt::flush) the
    /// store before the response: Lambda suspends the process after the response, together with the writes that free
    /// keys.
    ///
    /// The deadline uses tokio's time. A body that blocks the thread delays the response.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::brokers::ItemFailures;
    /// # use idem_runtime::{Error, MemoryStore, StoreExt as _, idempotent, observe, observe_all};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     Ok(format!("parcel for {id}"))
    /// # }
    /// async fn handle(store: &MemoryStore, messages: Vec<(String, u64)>, time_left: Duration) -> ItemFailures {
    ///     let calls = messages.into_iter().map(|(id, order)| (id, observe(ship(store, order))));
    ///     let deadline = time_left.saturating_sub(Duration::from_secs(1));
    ///     let failures = observe_all(calls).limit(10).deadline(deadline).await.item_failures();
    ///     store.flush().await;
    ///     failures
    /// }
    /// ```
    pub fn deadline(mut self, after: Duration) -> Self {
        self.deadline = Deadline::After(after);
        self
    }
}

impl<I, F: Future, B, C> fmt::Debug for ObserveAll<I, F, B, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, running, ended, .. } = self;
        let counted = (running.len(), ended.len());
        f.debug_struct("ObserveAll").field("limit", limit).field("running, ended", &counted).finish_non_exhaustive()
    }
}

// No field is pinned in place, because the items are boxed.
impl<I, F: Future, B, C> Unpin for ObserveAll<I, F, B, C> {}

impl<I, F, B, C, T, E> Future for ObserveAll<I, F, B, C>
where
    C: Iterator<Item = (I, Observe<F, B>)>,
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    type Output = Batch<I, T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        this.woken.is_polled_by(cx.waker());
        if let Deadline::After(after) = this.deadline {
            this.deadline = Deadline::At(SystemClock::default().sleep(after));
        }
        if let Deadline::At(deadline) = &mut this.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            this.pass_deadline();
            return Poll::Ready(this.batch());
        }
        loop {
            this.start();
            for item in this.woken.take() {
                this.poll_item(item);
            }
            // The loop goes on while items may start: a new item enters the wake list without a wake-up of the batch,
            // so only this loop polls the item for the first time.
            let has_more = this.calls.is_some() || !this.next_of_groups.is_empty();
            if !has_more || this.running.len() >= this.limit {
                break;
            }
        }
        if !this.running.is_empty() || this.calls.is_some() {
            return Poll::Pending;
        }
        Poll::Ready(this.batch())
    }
}

impl<I, F, B, C, T, E> ObserveAll<I, F, B, C>
where
    C: Iterator<Item = (I, Observe<F, B>)>,
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    /// Starts items until `limit` items run.
    fn start(&mut self) {
        while self.running.len() < self.limit {
            let Some(pulled) = self.next_of_groups.pop_front().or_else(|| self.pull()) else { return };
            let PulledItem { item, id, call, group } = pulled;
            let turns = (self.turns.clone(), item);
            let call = Box::pin(call.map_observer(|observer| observer.turns = Some(turns)).catch_panics());
            let waker = Waker::from(Arc::new(ItemWaker { item, woken: Arc::clone(&self.woken) }));
            self.running.insert(item, RunningItem { group, id, call, waker });
            self.woken.ready(item);
        }
    }

    /// Takes items from the iterator until an item can start, and returns that item. An item of a busy group joins the
    /// queue of the group; an item of a stopped group ends with [`Error::HeldBack`].
    fn pull(&mut self) -> Option<PulledItem<I, F, B>> {
        loop {
            let pulled = self.next_item()?;
            let Some(name) = &pulled.group else { return Some(pulled) };
            match self.groups.get_mut(name) {
                None => {
                    self.groups.insert(name.clone(), Group::Busy(VecDeque::new()));
                    return Some(pulled);
                }
                Some(Group::Busy(waiting)) => waiting.push_back(pulled),
                Some(Group::Stopped(after)) => {
                    let after = *after;
                    self.hold_back(pulled, after);
                }
            }
        }
    }

    fn next_item(&mut self) -> Option<PulledItem<I, F, B>> {
        let Some((id, mut call)) = self.calls.as_mut()?.next() else {
            self.calls = None;
            return None;
        };
        let item = self.started;
        self.started += 1;
        let group = call.take_group();
        Some(PulledItem { item, id, call, group })
    }

    fn poll_item(&mut self, item: usize) {
        let Some(RunningItem { call, waker, .. }) = self.running.get_mut(&item) else { return };
        if let Poll::Ready((result, outcome)) = call.as_mut().poll(&mut Context::from_waker(waker))
            && let Some(RunningItem { group, id, .. }) = self.running.remove(&item)
        {
            if let Some(group) = group {
                self.go_on(group, outcome.disposition());
            }
            self.end(item, id, result, outcome);
        }
    }

    /// Lets the next item of `group` start after an item has ended with `disposition`, or stops the group.
    fn go_on(&mut self, group: Box<str>, disposition: Disposition) {
        let Some(Group::Busy(waiting)) = self.groups.get_mut(&group) else { return };
        let after = match disposition {
            Disposition::Ack => {
                match waiting.pop_front() {
                    Some(next) => self.next_of_groups.push_back(next),
                    None => drop(self.groups.remove(&group)),
                }
                return;
            }
            Disposition::Retry { after } => Some(after),
            Disposition::DeadLetter => None,
        };
        if let Some(Group::Busy(waiting)) = self.groups.insert(group, Group::Stopped(after)) {
            for pulled in waiting {
                self.hold_back(pulled, after);
            }
        }
    }

    fn hold_back(&mut self, pulled: PulledItem<I, F, B>, after: Option<Duration>) {
        note_refusal();
        let outcome = Outcome::not_begun(after);
        let error = Error::HeldBack { retry_after: outcome.retry_after() };
        self.end(pulled.item, pulled.id, Err(E::from(error)), outcome);
    }

    fn end(&mut self, item: usize, id: I, result: Result<T, E>, outcome: Outcome) {
        self.ended.push((item, BatchItem { id, result, outcome, is_set_aside: false }));
    }

    /// Drops the running items, and ends all items that have not started.
    fn pass_deadline(&mut self) {
        let mut running: Vec<_> = self.running.drain().collect();
        running.sort_unstable_by_key(|(item, _)| *item);
        for (item, RunningItem { id, mut call, .. }) in running {
            let (result, outcome) = call.as_mut().passed_deadline();
            self.end(item, id, result, outcome);
        }
        let groups = self.groups.drain().filter_map(|(_, group)| match group {
            Group::Busy(waiting) => Some(waiting),
            Group::Stopped(_) => None,
        });
        let mut not_begun: Vec<_> = groups.flatten().chain(self.next_of_groups.drain(..)).collect();
        while let Some(pulled) = self.next_item() {
            not_begun.push(pulled);
        }
        if !not_begun.is_empty() {
            note_refusal();
        }
        for PulledItem { item, id, .. } in not_begun {
            let outcome = Outcome::not_begun(None);
            let retry_after = outcome.retry_after();
            let error = Error::DeadlinePassed { key: None, attempt: None, retry_after };
            self.end(item, id, Err(E::from(error)), outcome);
        }
    }

    /// Returns the ended items, in the order of the batch.
    fn batch(&mut self) -> Batch<I, T, E> {
        let mut ended = std::mem::take(&mut self.ended);
        ended.sort_unstable_by_key(|(item, _)| *item);
        Batch { items: ended.into_iter().map(|(_, item)| item).collect() }
    }
}

/// Items that must be polled, and the waker of the task that polls the batch.
#[derive(Default)]
struct WakeList(Mutex<WakeListState>);

#[derive(Default)]
struct WakeListState {
    /// Indexes of the items. The set is ordered, so that each run of a batch polls its items in the same order.
    items: BTreeSet<usize>,
    batch: Option<Waker>,
}

impl WakeList {
    fn is_polled_by(&self, waker: &Waker) {
        let mut state = lock(&self.0);
        match &mut state.batch {
            Some(known) if known.will_wake(waker) => {}
            known => *known = Some(waker.clone()),
        }
    }

    fn ready(&self, item: usize) {
        lock(&self.0).items.insert(item);
    }

    fn take(&self) -> BTreeSet<usize> {
        std::mem::take(&mut lock(&self.0).items)
    }
}

struct ItemWaker {
    item: usize,
    woken: Arc<WakeList>,
}

impl Wake for ItemWaker {
    fn wake(self: Arc<Self>) {
        self.woken.ready(self.item);
        let batch = lock(&self.woken.0).batch.clone();
        if let Some(batch) = batch {
            batch.wake();
        }
    }
}

/// Ended deliveries of a batch, in the order of the items.
#[derive(Debug)]
#[must_use = "it says which messages are to be acknowledged"]
pub struct Batch<I, T, E> {
    items: Vec<BatchItem<I, Result<T, E>>>,
}

/// One delivery of a [`Batch`].
#[derive(Debug)]
#[non_exhaustive]
pub struct BatchItem<I, R> {
    /// Id of the message.
    pub id: I,
    /// Result of the handler, or the error of a delivery without a result, such as [`Error::Panicked`].
    pub result: R,
    /// Outcome of the delivery.
    pub outcome: Outcome,
    is_set_aside: bool,
}

impl<I, R> BatchItem<I, R> {
    /// Returns what to do with the message.
    pub fn disposition(&self) -> Disposition {
        self.outcome.disposition()
    }

    /// Records that the user has moved the message to another queue: [`Batch::acknowledged`] then includes the message,
    /// and the failures of the batch no longer include it.
    pub fn set_aside(&mut self) {
        self.is_set_aside = true;
    }

    fn is_acknowledged(&self) -> bool {
        self.is_set_aside || self.disposition() == Disposition::Ack
    }
}

impl<I, T, E> Batch<I, T, E> {
    /// Returns all items.
    pub fn items(&self) -> &[BatchItem<I, Result<T, E>>] {
        &self.items
    }

    /// Returns all items as values.
    pub fn into_items(self) -> Vec<BatchItem<I, Result<T, E>>> {
        self.items
    }

    /// Returns the ids of the messages to acknowledge: for SQS, the messages to delete.
    pub fn acknowledged(&self) -> impl Iterator<Item = &I> {
        self.items.iter().filter(|item| item.is_acknowledged()).map(|item| &item.id)
    }

    /// Returns the items that can't succeed ([`Disposition::DeadLetter`]).
    ///
    /// A stream has no dead-letter queue: Lambda reads Kinesis, DynamoDB streams and Kafka again from the first failed
    /// record of a shard or partition. So a message that can't succeed blocks all later messages until the event source
    /// gives up (`MaximumRetryAttempts`, `MaximumRecordAgeInSeconds`; by default only when the stream deletes the
    /// message). Send a message that can't succeed to a queue of your own, record that with
    /// [`set_aside`](BatchItem::set_aside), and only then respond. If the sending fails, return the error: the whole
    /// batch is delivered again, and finished operations are replayed.
    ///
    /// ```
    /// # use idem_runtime::brokers::{Batch, ItemFailures};
    /// # use idem_runtime::Error;
    /// # async fn send_to_dead_letters(id: &str, error: &Error) -> Result<(), Error> { Ok(()) }
    /// async fn answer(mut batch: Batch<String, String, Error>) -> Result<ItemFailures, Error> {
    ///     for item in batch.dead_letters() {
    ///         if let Err(error) = &item.result {
    ///             send_to_dead_letters(&item.id, error).await?;
    ///         }
    ///         item.set_aside();
    ///     }
    ///     Ok(batch.item_failures())
    /// }
    /// ```
    pub fn dead_letters(&mut self) -> impl Iterator<Item = &mut BatchItem<I, Result<T, E>>> {
        self.items.iter_mut().filter(|item| item.disposition() == Disposition::DeadLetter && !item.is_set_aside)
    }

    /// Returns the ids of all messages that are not acknowledged, in the form that AWS Lambda expects from a handler of
    /// SQS, Kinesis or DynamoDB streams (`ReportBatchItemFailures`). The ids include a message that can't succeed,
    /// unless it is [set aside](Batch::dead_letters): SQS moves such a message to the dead-letter queue after
    /// `maxReceiveCount`, but in a stream such a message blocks all later messages.
    ///
    /// Use [`kafka_failures`](Batch::kafka_failures) for Kafka.
    pub fn item_failures(&self) -> ItemFailures
    where
        I: fmt::Display,
    {
        self.failures(ToString::to_string)
    }

    fn failures<N>(&self, name: impl Fn(&I) -> N) -> ItemFailures<N> {
        let failed = self.items.iter().filter(|item| !item.is_acknowledged());
        ItemFailures {
            batch_item_failures: failed.map(|item| ItemFailure { item_identifier: name(&item.id) }).collect(),
        }
    }
}

impl<T, E> Batch<KafkaRecord, T, E> {
    /// Returns the records that are not acknowledged, in the form that AWS Lambda expects from a handler of Amazon MSK
    /// or of a self-managed Kafka (`ReportBatchItemFailures`). A record that can't succeed is included, unless it is
    /// [set aside](Batch::dead_letters).
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe, observe_all};
    /// # use idem_runtime::brokers::KafkaRecord;
    /// # #[idempotent(key = "order:{id}", ttl = "14d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     if id == 0 { Err(Error::NoAttempt) } else { Ok(format!("parcel for {id}")) }
    /// # }
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let store = MemoryStore::new();
    /// let records = [("orders-0", 7, 41), ("orders-0", 8, 0), ("orders-0", 9, 42)];
    /// let calls = records.map(|(partition, offset, order)| {
    ///     (KafkaRecord::new(partition, offset), observe(ship(&store, order)).group(partition))
    /// });
    /// let failures = serde_json::to_string(&observe_all(calls).await.kafka_failures()).unwrap();
    /// assert_eq!(
    ///     failures,
    ///     r#"{"batchItemFailures":[{"itemIdentifier":{"partition":"orders-0","offset":8}},{"itemIdentifier":{"partition":"orders-0","offset":9}}]}"#
    /// );
    /// # });
    /// ```
    pub fn kafka_failures(&self) -> ItemFailures<KafkaRecord> {
        self.failures(KafkaRecord::clone)
    }
}

/// Partition and offset of a Kafka record, as AWS Lambda names a record in the response of a handler.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[non_exhaustive]
pub struct KafkaRecord {
    /// Topic and number of the partition, as in the `records` of the event: `orders-0`.
    pub partition: String,
    /// Offset in the partition.
    pub offset: i64,
}

impl KafkaRecord {
    /// Names the record at `offset` of `partition`. The partition is a key in the `records` of the event: `orders-0`.
    pub fn new(partition: impl Into<String>, offset: i64) -> Self {
        Self { partition: partition.into(), offset }
    }
}

/// Messages of a batch that are not acknowledged; serialized as `{"batchItemFailures":[{"itemIdentifier":"…"}]}`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ItemFailures<N = String> {
    /// Entries, one for each message that is not acknowledged.
    pub batch_item_failures: Vec<ItemFailure<N>>,
}

/// Entry of a message in [`ItemFailures`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ItemFailure<N = String> {
    /// Id of the message.
    pub item_identifier: N,
}
