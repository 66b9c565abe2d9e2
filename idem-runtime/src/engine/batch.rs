//! Many deliveries at once, each with an outcome of its own.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use serde::Serialize;

use super::beat::Beats;
use super::outcome::{CatchPanics, Observe, Outcome};
use crate::error::{Disposition, Error};
use crate::key::Key;
use crate::sync::{Mutex, lock};

/// Runs the deliveries of a batch beside one another, and tells how each of them ended.
///
/// Each item is the id of a message, and the [`observe`](crate::observe) of its handling, with whatever else that was told.
///
/// - At most [`limit`](ObserveAll::limit) items run at a time (default: 16), in their order. The iterator is asked for an item
///   only when it may start, so a message that waits for its place is not extended by its `on_beat` yet: fetch no more than
///   may run.
/// - Items with one key take turns, so that the body runs once and the others replay its result. If it fails, the next item
///   runs it.
/// - One item's error, panic or delay is no other's.
///
/// # Cancel safety
/// Dropping the future drops the items that have not ended, and starts no other; see `#[idempotent]` for what that means.
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
/// // What AWS Lambda takes as the answer to a batch of SQS.
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
        running: Vec::new(),
        ended: Vec::new(),
        woken: Arc::default(),
        turns: Turns::default(),
    }
}

/// How many items of a batch run at a time where nothing else is said.
const DEFAULT_LIMIT: usize = 16;

/// The future of [`observe_all`].
#[must_use = "futures do nothing unless polled"]
pub struct ObserveAll<I, F: Future, B, C> {
    /// `None` once it has given its last item.
    calls: Option<C>,
    started: usize,
    limit: usize,
    running: Vec<Running<I, F, B>>,
    ended: Vec<(usize, BatchItem<I, F::Output>)>,
    woken: Arc<Woken>,
    turns: Turns,
}

struct Running<I, F: Future, B> {
    item: usize,
    id: I,
    call: Pin<Box<CatchPanics<F, B>>>,
    waker: Waker,
}

impl<I, F: Future, B, C> ObserveAll<I, F, B, C> {
    /// How many items run at a time (default: 16); 0 is 1.
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = limit.max(1);
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

// Nothing in it is pinned in place: items are boxed.
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
        loop {
            this.start();
            for item in this.woken.take() {
                this.poll_item(item);
            }
            // An item that is woken meanwhile wakes the batch, too; one that is started in the place of another does not.
            if this.calls.is_none() || this.running.len() >= this.limit {
                break;
            }
        }
        if !this.running.is_empty() || this.calls.is_some() {
            return Poll::Pending;
        }
        let mut ended = std::mem::take(&mut this.ended);
        ended.sort_by_key(|(item, _)| *item);
        Poll::Ready(Batch { items: ended.into_iter().map(|(_, item)| item).collect() })
    }
}

impl<I, F, B, C, T, E> ObserveAll<I, F, B, C>
where
    C: Iterator<Item = (I, Observe<F, B>)>,
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    /// Starts items while there is room for them.
    fn start(&mut self) {
        while self.running.len() < self.limit
            && let Some(calls) = &mut self.calls
        {
            let Some((id, call)) = calls.next() else {
                self.calls = None;
                return;
            };
            let item = self.started;
            self.started += 1;
            let turns = (self.turns.clone(), item);
            let call = Box::pin(call.map_observer(|observer| observer.turns = Some(turns)).catch_panics());
            let waker = Waker::from(Arc::new(ItemWaker { item, woken: Arc::clone(&self.woken) }));
            self.running.push(Running { item, id, call, waker });
            self.woken.ready(item);
        }
    }

    fn poll_item(&mut self, item: usize) {
        let Some(place) = self.running.iter().position(|running| running.item == item) else { return };
        let Running { call, waker, .. } = &mut self.running[place];
        if let Poll::Ready((result, outcome)) = call.as_mut().poll(&mut Context::from_waker(waker)) {
            let Running { item, id, .. } = self.running.swap_remove(place);
            self.turns.leave_all(item);
            self.ended.push((item, BatchItem { id, result, outcome }));
        }
    }
}

/// Which items are to be polled, and who polls them.
#[derive(Default)]
struct Woken(Mutex<WokenState>);

#[derive(Default)]
struct WokenState {
    items: Vec<usize>,
    batch: Option<Waker>,
}

impl Woken {
    fn is_polled_by(&self, waker: &Waker) {
        let mut state = lock(&self.0);
        match &mut state.batch {
            Some(known) if known.will_wake(waker) => {}
            known => *known = Some(waker.clone()),
        }
    }

    fn ready(&self, item: usize) {
        let mut state = lock(&self.0);
        if !state.items.contains(&item) {
            state.items.push(item);
        }
    }

    fn take(&self) -> Vec<usize> {
        std::mem::take(&mut lock(&self.0).items)
    }
}

struct ItemWaker {
    item: usize,
    woken: Arc<Woken>,
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

/// The keys that items of a batch work on: items with one key take turns.
#[derive(Clone, Default)]
pub(super) struct Turns(Arc<Mutex<Vec<Turn>>>);

struct Turn {
    key: Key,
    item: usize,
    waiting: Vec<Waker>,
}

impl Turns {
    /// Waits until no other call of the batch works on `key`. Returns whether it had to.
    pub(super) async fn enter(&self, key: &Key, item: usize) -> bool {
        let mut waited = false;
        poll_fn(|cx| {
            let mut turns = lock(&self.0);
            match turns.iter_mut().find(|turn| turn.key == *key) {
                // A call inside of another one's body has a delivery of its own, and waits for nobody.
                Some(turn) if turn.item != item => {
                    waited = true;
                    turn.waiting.push(cx.waker().clone());
                    Poll::Pending
                }
                Some(_) => Poll::Ready(()),
                None => {
                    turns.push(Turn { key: key.clone(), item, waiting: Vec::new() });
                    Poll::Ready(())
                }
            }
        })
        .await;
        waited
    }

    /// The call of `item` for `key` is over.
    pub(super) fn leave(&self, key: &Key, item: usize) {
        self.leave_if(|turn| turn.item == item && turn.key == *key);
    }

    /// All calls of `item` are over.
    fn leave_all(&self, item: usize) {
        self.leave_if(|turn| turn.item == item);
    }

    fn leave_if(&self, is_over: impl Fn(&Turn) -> bool) {
        let mut turns = lock(&self.0);
        let mut waiting = Vec::new();
        turns.retain_mut(|turn| {
            let over = is_over(turn);
            if over {
                waiting.append(&mut turn.waiting);
            }
            !over
        });
        drop(turns);
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// How the deliveries of a batch ended, in the order in which they were given.
#[derive(Debug)]
#[must_use = "it says which messages are to be acknowledged"]
pub struct Batch<I, T, E> {
    items: Vec<BatchItem<I, Result<T, E>>>,
}

/// One delivery of a [`Batch`].
#[derive(Debug)]
#[non_exhaustive]
pub struct BatchItem<I, R> {
    /// The id that it was given.
    pub id: I,
    /// What its handler returned, or [`Error::Panicked`].
    pub result: R,
    /// How it ended.
    pub outcome: Outcome,
}

impl<I, R> BatchItem<I, R> {
    /// What to do with the message.
    pub fn disposition(&self) -> Disposition {
        self.outcome.disposition()
    }
}

impl<I, T, E> Batch<I, T, E> {
    /// All items.
    pub fn items(&self) -> &[BatchItem<I, Result<T, E>>] {
        &self.items
    }

    /// All items, as values.
    pub fn into_items(self) -> Vec<BatchItem<I, Result<T, E>>> {
        self.items
    }

    /// The ids of the messages that are to be acknowledged: those that SQS is told to delete.
    pub fn acknowledged(&self) -> impl Iterator<Item = &I> {
        self.items.iter().filter(|item| item.disposition() == Disposition::Ack).map(|item| &item.id)
    }

    /// The ids of all other messages, in the form in which AWS Lambda wants them from a handler of SQS, Kinesis or DynamoDB
    /// streams (`ReportBatchItemFailures`). One that can't succeed is among them: Lambda has no other answer, and SQS moves it
    /// to the dead-letter queue after `maxReceiveCount`.
    pub fn item_failures(&self) -> ItemFailures
    where
        I: fmt::Display,
    {
        let failed = self.items.iter().filter(|item| item.disposition() != Disposition::Ack);
        let batch_item_failures = failed.map(|item| ItemFailure { item_identifier: item.id.to_string() }).collect();
        ItemFailures { batch_item_failures }
    }
}

/// The messages of a batch that are not to be acknowledged; serialized as `{"batchItemFailures":[{"itemIdentifier":"…"}]}`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ItemFailures {
    /// One for each message.
    pub batch_item_failures: Vec<ItemFailure>,
}

/// One message of [`ItemFailures`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ItemFailure {
    /// The id of the message.
    pub item_identifier: String,
}
