//! Operations inside of an open transaction of the user's.
//!
//! The engine and whatever it hands out (attempts, late writes) need a store that lives as long as they do, and may be used
//! from any thread; a borrowed transaction is neither. So the engine gets a [`Mailbox`], and the future of the call, which
//! may borrow the transaction, answers what is asked there. When the call is over, so is its mailbox: nothing is renewed,
//! and nothing is written late.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use crate::{
    Error, Finish, Heartbeats, Inspection, Key, KeyError, Lease, Operation, Policy, Recorder, Release, Reservation,
    Reserve, Store, StoreError, StoreErrorKind, StoreFuture, SystemClock, Write, run,
};

/// Records inside of an open transaction of yours; made by `PostgresStore::within` and `SqliteStore::within`, for
/// `store = PostgresStore::within(tx)`.
///
/// The record and what the body writes through the same transaction commit together or not at all, so the effect happens
/// exactly once, whatever dies when.
///
/// - *Who commits*: you, after the call has returned `Ok`. The record and the result become visible to others at that
///   moment, and not before; until then nobody can know whether they will.
/// - *A roll-back* undoes the record with everything else, and frees the key. Roll back when the call returns an error. If
///   you commit all the same, the record says that the attempt ended without a result, and the next delivery runs.
/// - *A body that is cancelled or panics* has its transaction rolled back when that is dropped. If you commit it all the
///   same, the record is that of an attempt which died: the next delivery takes over when its lease has lapsed
///   (`on_crash = fail`: the operation counts as interrupted then).
/// - *No lease and no heartbeat*: the transaction holds the key for as long as it is open.
/// - *A duplicate that runs at the same time* gets [`Error::InProgress`] at once, or waits with `in_progress = wait("…")`.
/// - *A statement that fails* leaves a transaction that can't go on: the error is [`Error::Store`] or
///   [`Error::Unrecorded`] of kind [`StoreErrorKind::Aborted`], and nothing takes effect.
///
/// Use one scope either inside of transactions or with the store itself, so that neither waits for the other.
#[derive(Clone, Copy)]
pub struct Within<C>(pub(crate) C);

impl<C> fmt::Debug for Within<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Within")
    }
}

impl<C: Transaction> Within<C> {
    /// An operation named by `key` in this transaction, for [`run_within`].
    pub fn operation(&self, key: Result<Key, KeyError>, policy: Policy) -> OperationWithin<C> {
        let (asks, asked) = mpsc::unbounded_channel();
        let mailbox: Arc<dyn Store> = Arc::new_cyclic(|this| Mailbox {
            this: Weak::clone(this),
            name: C::NAME,
            heartbeats: Heartbeats::none(Arc::new(SystemClock::default())),
            asks,
        });
        OperationWithin { operation: Operation::new(&mailbox, key, policy), asked, transaction: self.0.clone() }
    }

    #[doc(hidden)]
    pub fn idem_operation(&self, key: Result<Key, KeyError>, policy: Policy) -> OperationWithin<C> {
        self.operation(key, policy)
    }
}

/// One call of an idempotent function inside of a transaction; see [`Within`].
pub struct OperationWithin<C> {
    operation: Operation,
    asked: mpsc::UnboundedReceiver<Ask>,
    transaction: C,
}

impl<C> OperationWithin<C> {
    /// The operation with the fingerprint of its payload.
    #[must_use]
    pub fn fingerprint<F: Serialize + ?Sized>(self, payload: &F) -> Self {
        Self { operation: self.operation.fingerprint(payload), ..self }
    }
}

impl<C> fmt::Debug for OperationWithin<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationWithin").field("operation", &self.operation).finish_non_exhaustive()
    }
}

/// What [`run`] is for a [`Store`], for a transaction: runs `body` once for the key of `operation`, and replays its recorded
/// result to every duplicate. The transaction is left open; see [`Within`].
///
/// # Errors
/// What `body` returned, or the [`Error`] that says why it has no result.
///
/// # Panics
/// If `body` does.
///
/// # Cancel safety
/// Dropping the future cancels the body and writes nothing more through the transaction.
pub fn run_within<C, T, E, R, B>(
    operation: OperationWithin<C>,
    recorder: R,
    body: B,
) -> impl Future<Output = Result<T, E>>
where
    C: Transaction,
    R: Recorder<T, E>,
    E: From<Error>,
    B: Future<Output = Result<T, E>>,
{
    let OperationWithin { operation, asked, transaction } = operation;
    Call {
        asked,
        answer: move |ask| answer(transaction.clone(), ask),
        answering: None,
        run: run(operation, recorder, body),
    }
}

pin_project! {
    /// A call, and the answers to what its engine asks of the transaction.
    struct Call<F, A, R> {
        // Dropped before the engine, whose late writes then find the mailbox closed.
        asked: mpsc::UnboundedReceiver<Ask>,
        answer: F,
        #[pin]
        answering: Option<A>,
        #[pin]
        run: R,
    }
}

impl<F, A, R> Future for Call<F, A, R>
where
    F: Fn(Ask) -> A,
    A: Future<Output = ()>,
    R: Future,
{
    type Output = R::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R::Output> {
        loop {
            let mut this = self.as_mut().project();
            if let Some(answering) = this.answering.as_mut().as_pin_mut() {
                ready!(answering.poll(cx));
                this.answering.set(None);
            }
            if let Poll::Ready(result) = this.run.poll(cx) {
                return Poll::Ready(result);
            }
            match ready!(this.asked.poll_recv(cx)) {
                Some(ask) => this.answering.set(Some((this.answer)(ask))),
                // The engine keeps its end of the mailbox for as long as it runs.
                None => return Poll::Pending,
            }
        }
    }
}

/// What can be asked of a store whose records are seen through one transaction.
pub(crate) enum Ask {
    Reserve(Reserve, Sender<Reservation>),
    Finish(Lease, Finish, Sender<Write>),
    Release(Lease, Release, Sender<Write>),
    Wait(Key, Duration, Sender<()>),
    Inspect(Key, Sender<Option<Inspection>>),
    Reopen(Key, u32, Sender<Write>),
}

type Sender<T> = oneshot::Sender<Result<T, StoreError>>;

/// An open transaction: what a store does in one statement or in a few, inside of it. Errors of statements are of kind
/// [`StoreErrorKind::Aborted`], as the transaction can't go on.
pub trait Transaction: sealed::Sealed + Clone {
    #[doc(hidden)]
    const NAME: &'static str;

    #[doc(hidden)]
    fn reserve(&self, request: &Reserve) -> impl Future<Output = Result<Reservation, StoreError>>;

    #[doc(hidden)]
    fn finish(&self, lease: &Lease, finish: &Finish) -> impl Future<Output = Result<Write, StoreError>>;

    #[doc(hidden)]
    fn release(&self, lease: &Lease, release: Release) -> impl Future<Output = Result<Write, StoreError>>;

    /// Waits until no other transaction holds `key`, and at most `at_most`.
    #[doc(hidden)]
    fn wait(&self, key: &Key, at_most: Duration) -> impl Future<Output = Result<(), StoreError>>;

    #[doc(hidden)]
    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Option<Inspection>, StoreError>>;

    #[doc(hidden)]
    fn reopen(&self, key: &Key, attempt: u32) -> impl Future<Output = Result<Write, StoreError>>;
}

pub(crate) mod sealed {
    /// Implemented here only: what a transaction must do may grow.
    pub trait Sealed {}
}

async fn answer<C: Transaction>(transaction: C, ask: Ask) {
    // Whoever asked may be gone; the answer is then nobody's.
    match ask {
        Ask::Reserve(request, answer) => drop(answer.send(transaction.reserve(&request).await)),
        Ask::Finish(lease, finish, answer) => drop(answer.send(transaction.finish(&lease, &finish).await)),
        Ask::Release(lease, release, answer) => drop(answer.send(transaction.release(&lease, release).await)),
        Ask::Wait(key, at_most, answer) => drop(answer.send(transaction.wait(&key, at_most).await)),
        Ask::Inspect(key, answer) => drop(answer.send(transaction.inspect(&key).await)),
        Ask::Reopen(key, attempt, answer) => drop(answer.send(transaction.reopen(&key, attempt).await)),
    }
}

/// The store of one call: hands everything to the future of the call, which has the transaction.
struct Mailbox {
    this: Weak<Mailbox>,
    name: &'static str,
    heartbeats: Heartbeats,
    asks: mpsc::UnboundedSender<Ask>,
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mailbox({})", self.name)
    }
}

impl Mailbox {
    async fn ask<T>(&self, ask: impl FnOnce(Sender<T>) -> Ask) -> Result<T, StoreError> {
        let (sender, answer) = oneshot::channel();
        let over = || StoreError::new(StoreErrorKind::Aborted, "the call that had the transaction is over");
        self.asks.send(ask(sender)).map_err(|_| over())?;
        answer.await.map_err(|_| over())?
    }

    /// A write, refused once the call is over: the transaction alone decides then what is left of its record.
    async fn write(&self, ask: impl FnOnce(Sender<Write>) -> Ask) -> Result<Write, StoreError> {
        if self.asks.is_closed() { Ok(Write::Refused) } else { self.ask(ask).await }
    }
}

impl Store for Mailbox {
    fn name(&self) -> &'static str {
        self.name
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
    }

    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a Reserve) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.ask(|answer| Ask::Reserve(request.clone(), answer)))
    }

    /// The transaction holds its keys for as long as it is open.
    fn renew<'a>(&'a self, leases: &'a [Lease]) -> StoreFuture<'a, Vec<Write>> {
        let held = if self.asks.is_closed() { Write::Refused } else { Write::Done };
        StoreFuture::ready(Ok(vec![held; leases.len()]))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Write> {
        StoreFuture::new(self.write(|answer| Ask::Finish(lease.clone(), finish.clone(), answer)))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Write> {
        StoreFuture::new(self.write(move |answer| Ask::Release(lease.clone(), release, answer)))
    }

    fn wait<'a>(&'a self, key: &'a Key, _: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::new(self.ask(move |answer| Ask::Wait(key.clone(), at_most, answer)))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(self.ask(|answer| Ask::Inspect(key.clone(), answer)))
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Write> {
        StoreFuture::new(self.write(move |answer| Ask::Reopen(key.clone(), attempt, answer)))
    }
}
