//! Store of one call in a transaction. This store forwards each request of the engine to the future of the call.
//!
//! The engine, its attempts and its late writes need a store that lives as long as they do, and that any thread may
//! use. A borrowed transaction does not live that long. So the engine gets a [`Mailbox`] as its store. The future of
//! the call, which may borrow the transaction, answers the requests in that mailbox. The mailbox ends with the call: no
//! lease is renewed, and nothing is written late.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::journal::Journal as TransactionJournal;
use super::turns::CallNode;
use crate::clock::Clock;
use crate::key::Key;
use crate::record::messages::OutgoingMessage;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Release, Reservation, ReserveRequest, Verdict,
};
use crate::store::sender::{SendFuture, Sender as MessageSender};
use crate::store::{Answers, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture};
use crate::sync::lock;

/// A request of the engine, which the future of the call answers in the transaction.
pub(super) enum MailboxRequest {
    Reserve(ReserveRequest, Sender<Reservation>),
    Finish(Lease, Finish, Sender<Verdict>),
    Release(Lease, Release, Sender<Verdict>),
    Wait(Key, Duration, Sender<()>),
    Inspect(Key, Sender<Option<Inspection>>),
    Decide(Decision, Sender<DecisionAnswer>),
}

impl MailboxRequest {
    /// Answers the request with `error`.
    pub(super) fn refuse(self, error: StoreError) {
        match self {
            Self::Reserve(_, answer) => drop(answer.send(Err(error))),
            Self::Finish(_, _, answer) | Self::Release(_, _, answer) => drop(answer.send(Err(error))),
            Self::Decide(_, answer) => drop(answer.send(Err(error))),
            Self::Wait(_, _, answer) => drop(answer.send(Err(error))),
            Self::Inspect(_, answer) => drop(answer.send(Err(error))),
        }
    }
}

pub(super) type Sender<T> = oneshot::Sender<Result<T, StoreError>>;

/// The store of one call. Forwards every request to the future of the call, which borrows the transaction.
pub(super) struct Mailbox {
    this: Weak<Mailbox>,
    namespace: Box<str>,
    context: StoreContext,
    asks: mpsc::UnboundedSender<MailboxRequest>,
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mailbox({})", self.context.name())
    }
}

impl Mailbox {
    /// Makes the mailbox of one call. Returns the mailbox, and the receiver of its requests. `place` is the table or
    /// the schema of the records; `outbox` takes the messages that no record holds.
    pub(super) fn open(
        name: &'static str,
        (namespace, holder): (&str, &str),
        place: &str,
        clock: Arc<dyn Clock>,
        outbox: Option<Arc<dyn MessageSender>>,
    ) -> (Arc<dyn Store>, mpsc::UnboundedReceiver<MailboxRequest>) {
        let (asks, asked) = mpsc::unbounded_channel();
        let context = StoreContext::in_transaction(name, clock, place).held_by(holder);
        if let Some(outbox) = outbox {
            context.set_sender(outbox);
        }
        let mailbox =
            Arc::new_cyclic(|this| Self { this: Weak::clone(this), namespace: namespace.into(), context, asks });
        (mailbox, asked)
    }

    async fn ask<T>(&self, ask: impl FnOnce(Sender<T>) -> MailboxRequest) -> Result<T, StoreError> {
        let (sender, answer) = oneshot::channel();
        let over = || StoreError::new(StoreErrorKind::Aborted, "the call that used the transaction has ended");
        self.asks.send(ask(sender)).map_err(|_| over())?;
        answer.await.map_err(|_| over())?
    }

    /// Sends a write. A write after the end of the call is refused, because then only the commit or rollback decides
    /// about the record.
    async fn write(&self, ask: impl FnOnce(Sender<Verdict>) -> MailboxRequest) -> Result<Verdict, StoreError> {
        if self.asks.is_closed() { Ok(Verdict::Refused) } else { self.ask(ask).await }
    }
}

impl Store for Mailbox {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn response_timeout(&self) -> Duration {
        Duration::ZERO
    }

    fn context(&self) -> &StoreContext {
        &self.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.ask(|answer| MailboxRequest::Reserve(request.clone(), answer)))
    }

    /// Sends no request. Under `on_crash = fail`, the reservation has already marked the record as begun. No lease can
    /// lapse, because the open transaction holds the key.
    fn begin<'a>(&'a self, _: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::ready(Ok(if self.asks.is_closed() { Verdict::Refused } else { Verdict::Applied }))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        let held = if self.asks.is_closed() { Verdict::Refused } else { Verdict::Applied };
        (0..leases.len()).for_each(|at| answer(at, held));
        StoreFuture::ready(Ok(()))
    }

    /// The engine refuses steps in a transaction: its rows and its record commit together, so no step is needed.
    fn append<'a>(&'a self, _: &'a Lease, _: &'a Journal) -> StoreFuture<'a, Verdict> {
        let message = "a transaction keeps no journal: its rows and its record commit together";
        StoreFuture::ready(Err(StoreError::new(StoreErrorKind::Misconfigured, message)))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(|answer| MailboxRequest::Finish(lease.clone(), finish.clone(), answer)))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(move |answer| MailboxRequest::Release(lease.clone(), release, answer)))
    }

    fn wait<'a>(&'a self, key: &'a Key, _: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            self.ask(move |answer| MailboxRequest::Wait(key.clone(), at_most, answer)).await?;
            Ok(None)
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(self.ask(|answer| MailboxRequest::Inspect(key.clone(), answer)))
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(self.ask(|answer| MailboxRequest::Decide(decision.clone(), answer)))
    }

    /// Does nothing: expired records are not part of the user's transaction.
    fn purge(&self, _: u32) -> StoreFuture<'_, u64> {
        StoreFuture::ready(Ok(0))
    }

    /// Refuses to list records: a scan of the table would keep the user's transaction open for too long.
    fn list<'a>(&'a self, _: &'a Filter) -> StoreFuture<'a, Page> {
        let message = "records are not listed inside of a transaction; ask a store of its own";
        StoreFuture::ready(Err(StoreError::new(StoreErrorKind::Unsupported, message)))
    }

    /// Sends no request: the next statement of the transaction shows whether the connection works.
    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::ready(Ok(()))
    }
}

/// Sender of a call in a transaction: keeps the messages that no record holds until the commit.
pub(super) struct UntilCommit {
    pub(super) journal: Arc<Mutex<TransactionJournal>>,
    pub(super) store: Arc<dyn Store>,
    pub(super) key: Key,
}

impl MessageSender for UntilCommit {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        // The future of the call polls its engine, which sends.
        let call = CallNode::polled().unwrap_or_else(CallNode::new);
        lock(&self.journal).outbox.unrecorded(call, &self.store, &self.key, message.clone());
        Box::pin(async { Ok(()) })
    }
}
