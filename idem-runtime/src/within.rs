//! Records inside your own open transaction.

// The engine and the values that it hands out (attempts, late writes) need a store that lives as long as they do and
// that any thread may use. A borrowed transaction offers neither. So the engine gets a [`Mailbox`] as its store. The
// future of the call, which may borrow the transaction, answers the requests in that mailbox. The mailbox ends with the
// call: no lease is renewed, and nothing is written late.
//
// Each call has a savepoint ([`SavepointScope`]). A call that ends without a completed record is rolled back to its
// savepoint, so that a swallowed error leaves nothing of the body. Savepoints form a stack. So calls in one transaction
// that are not nested take turns ([`Turn`]): otherwise the end of one call would undo another call.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::clock::{Clock, SystemClock};
use crate::codec::Json;
use crate::combine::race;
use crate::engine::{Operation, RecordValues, Recorder, TransactionEnd, settle, unreached, unsettled};
use crate::error::Error;
use crate::key::{Key, KeyError};
use crate::policy::{Mode, OnCrash, Policy};
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Release, Reservation, ReserveRequest, StoredResult, Verdict,
};
use crate::store::{Answers, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture};
use crate::sync::{PerProcess, lock};

/// Size in bytes from which a result may be too large for the server. Such a result is written with a savepoint of its
/// own.
const LARGE: usize = 1024 * 1024;
/// Longest time that a call waits for another call in its transaction.
const TURN_LIMIT: Duration = Duration::from_secs(30);

/// Records inside your open transaction; made by `PostgresStore::within` and `SqliteStore::within`, for
/// `store = PostgresStore::within(tx)`.
///
/// The record and the writes of the body through the same transaction commit together or not at all. So the effect
/// happens exactly once, even if any step fails. `PostgresStore::transact`, `PostgresStore::transact_sqlx` and
/// `SqliteStore::transact` begin the transaction, call, commit and return the action for the message: use them to
/// handle messages.
///
/// - *The commit* is up to you after the call has returned `Ok`, or to `transact`. The record and the result become
///   visible to others at the commit; until then it is unknown whether they will. So the [`Outcome`](crate::Outcome) of
///   a call that ran its body in your transaction is [pending](crate::Outcome::is_pending_commit), and its disposition
///   is to deliver the message again, until [`Outcome::committed`](crate::Outcome::committed) notes that the commit
///   succeeded; the library logs a warning about a pending outcome. The next delivery replays the committed result, and
///   is acknowledged. A driver may answer `Ok` to the `COMMIT` of a transaction in which a statement has failed,
///   although the server has rolled it back; `transact` detects that.
/// - *A rollback* undoes the record with everything else, and frees the key. Roll back when the call returns an error.
///   After a rollback `transact` writes the ends of its attempts in a separate transaction, so that they count and the
///   pauses grow. A process that dies leaves no trace of its attempt. `max_attempts` is refused in a transaction that
///   you begin yourself, with [`Error::Store`] of kind [`StoreErrorKind::Misconfigured`], because no attempt would
///   count there.
/// - *A swallowed error* leaves nothing of the body. Each call has a savepoint, and the writes of the body are undone
///   when the body returns an error, panics or is cancelled. All other writes through the transaction during the call
///   are undone as well. If you commit then, the record of a body that returned an error shows that the attempt ended
///   without a result, and the next delivery runs; under `on_error = record` the record holds the error. A call that
///   was cancelled or panicked leaves no trace, except under `on_crash = fail`: there it counts as an attempt that
///   died, and the operation as interrupted once its lease has lapsed.
/// - *To keep the writes of a failing body*, return a value: `Ok(Declined)` instead of an error is committed with them.
/// - *No lease and no heartbeat*: the transaction holds the key for as long as it is open.
/// - *A concurrent duplicate* gets [`Error::InProgress`] immediately, or waits with `in_progress = wait("…")`.
/// - *Several calls in one transaction* may be nested, or made one after the other. Concurrent calls, by a `join!`,
///   take turns.
/// - *A failed statement of the library* is undone, and the transaction goes on. If that is not possible, the error is
///   [`Error::Store`] or [`Error::Unrecorded`] of kind [`StoreErrorKind::Aborted`], and nothing takes effect.
///
/// Use a scope either inside transactions or with the store itself, but not both, so that neither waits for the other.
#[derive(Clone, Copy)]
pub struct Within<C>(pub(crate) C);

impl<C> fmt::Debug for Within<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Within")
    }
}

impl<C: Transaction> Within<C> {
    /// Creates an operation named by `key` in this transaction.
    pub fn operation(
        &self,
        key: Result<Key, KeyError>,
        policy: Policy,
    ) -> Operation<RecordValues<Json>, InTransaction<C>> {
        let (asks, asked) = mpsc::unbounded_channel();
        let mailbox: Arc<dyn Store> = Arc::new_cyclic(|this| Mailbox {
            this: Weak::clone(this),
            namespace: self.0.namespace().into(),
            context: StoreContext::in_transaction(C::NAME, Arc::new(SystemClock::default()), self.0.place())
                .held_by(self.0.holder()),
            asks,
        });
        // Shadow mode does not change the effect of the body.
        let undoes = policy.current_mode() == Mode::Enforce;
        let place = InTransaction { asked, transaction: self.0.clone(), undoes };
        Operation::new(&mailbox, key, policy).at(place).0
    }

    #[doc(hidden)]
    pub fn idem_operation(
        &self,
        key: Result<Key, KeyError>,
        policy: Policy,
    ) -> Operation<RecordValues<Json>, InTransaction<C>> {
        self.operation(key, policy)
    }
}

/// The place of an [`Operation`] that is recorded inside of a transaction; see [`Within::operation`].
pub struct InTransaction<C> {
    asked: mpsc::UnboundedReceiver<MailboxRequest>,
    transaction: C,
    undoes: bool,
}

impl<C> fmt::Debug for InTransaction<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InTransaction")
    }
}

impl<R, C: Transaction> Operation<R, InTransaction<C>> {
    /// Runs `body` once for the key of the operation, and replays its recorded result to every duplicate. The
    /// transaction is left open; see [`Within`].
    ///
    /// # Errors
    /// The error of `body`, or the [`Error`] that gives the reason why there is no result.
    ///
    /// # Panics
    /// If `body` panics.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the body, and undoes its writes through the transaction.
    pub fn run<T, E, B>(self, body: B) -> impl Future<Output = Result<T, E>>
    where
        R: Recorder<T, E>,
        E: From<Error>,
        B: Future<Output = Result<T, E>>,
    {
        let (operation, InTransaction { asked, transaction, undoes }) = self.at(());
        let scene = Arc::new(SavepointScope { transaction, undoes, state: Mutex::new(CallState::new()) });
        let doer = Arc::clone(&scene);
        TransactionCall {
            asked,
            act: move |act| perform(Arc::clone(&doer), act),
            acting: None,
            run: operation.run(body),
            result: None,
            node: None,
            _undo: Undo(scene),
        }
    }
}

pin_project! {
    /// A call, which also answers the requests of its engine to the transaction.
    struct TransactionCall<F, A, R: Future, U> {
        // Dropped before the engine, whose late writes then find the mailbox closed.
        asked: mpsc::UnboundedReceiver<MailboxRequest>,
        act: F,
        #[pin]
        acting: Option<A>,
        #[pin]
        run: R,
        result: Option<R::Output>,
        node: Option<Arc<Node>>,
        // Dropped after the body, and after the calls in it.
        _undo: U,
    }
}

/// Next action of a call in its transaction.
#[expect(clippy::large_enum_variant, reason = "there is one at a time, and most are answers")]
enum NextAction {
    Answer(MailboxRequest),
    /// The call is over.
    End,
}

impl<F, A, R, U> Future for TransactionCall<F, A, R, U>
where
    F: Fn((NextAction, Arc<Node>)) -> A,
    A: Future<Output = ()>,
    R: Future,
{
    type Output = R::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R::Output> {
        loop {
            let mut this = self.as_mut().project();
            if let Some(acting) = this.acting.as_mut().as_pin_mut() {
                ready!(acting.poll(cx));
                this.acting.set(None);
            }
            if let Some(result) = this.result.take() {
                return Poll::Ready(result);
            }
            let node = this.node.get_or_insert_with(Node::new);
            let polled = {
                let _inside = PolledCall::enter(node);
                this.run.poll(cx)
            };
            let act = match polled {
                Poll::Ready(result) => {
                    *this.result = Some(result);
                    NextAction::End
                }
                Poll::Pending => match ready!(this.asked.poll_recv(cx)) {
                    Some(ask) => NextAction::Answer(ask),
                    // Does not happen: the engine keeps its end of the mailbox for as long as it runs.
                    None => return Poll::Pending,
                },
            };
            this.acting.set(Some((this.act)((act, Arc::clone(node)))));
        }
    }
}

/// A request of the engine to its mailbox, answered in the transaction.
pub(crate) enum MailboxRequest {
    Reserve(ReserveRequest, Sender<Reservation>),
    Finish(Lease, Finish, Sender<Verdict>),
    Release(Lease, Release, Sender<Verdict>),
    Wait(Key, Duration, Sender<()>),
    Inspect(Key, Sender<Option<Inspection>>),
    Decide(Decision, Sender<DecisionAnswer>),
}

impl MailboxRequest {
    fn refuse(self, error: StoreError) {
        match self {
            Self::Reserve(_, answer) => drop(answer.send(Err(error))),
            Self::Finish(_, _, answer) | Self::Release(_, _, answer) => drop(answer.send(Err(error))),
            Self::Decide(_, answer) => drop(answer.send(Err(error))),
            Self::Wait(_, _, answer) => drop(answer.send(Err(error))),
            Self::Inspect(_, answer) => drop(answer.send(Err(error))),
        }
    }
}

type Sender<T> = oneshot::Sender<Result<T, StoreError>>;

/// An open transaction, with the operations of a store inside it. Each takes one statement or a few.
///
/// After a failed statement, to [undo](Transaction::undo) the last open [`save`](Transaction::save) restores the state
/// of the transaction before that savepoint.
pub trait Transaction: sealed::Sealed + Clone {
    #[doc(hidden)]
    const NAME: &'static str;

    /// Identifies this transaction among all that are open.
    #[doc(hidden)]
    fn identity(&self) -> usize;

    #[doc(hidden)]
    fn namespace(&self) -> &str;

    /// Name that its records carry in addition to host and process.
    #[doc(hidden)]
    fn holder(&self) -> &str;

    /// Name of the schema that holds the table, or of the table itself.
    #[doc(hidden)]
    fn place(&self) -> &str;

    /// Makes a savepoint.
    #[doc(hidden)]
    fn save(&self) -> impl Future<Output = Result<(), StoreError>>;

    /// Undoes the writes since the last savepoint, and keeps the savepoint.
    #[doc(hidden)]
    fn rewind(&self) -> impl Future<Output = Result<(), StoreError>>;

    /// Releases the last savepoint, and keeps the writes since. Once `begun` is called, that happens even if the future
    /// is dropped.
    #[doc(hidden)]
    fn keep(&self, begun: impl FnOnce()) -> impl Future<Output = Result<(), StoreError>>;

    /// Undoes the writes since the last savepoint, and releases the savepoint.
    #[doc(hidden)]
    fn undo(&self) -> impl Future<Output = Result<(), StoreError>>;

    /// Does the same as [`undo`](Transaction::undo) in a drop, where no future can be awaited.
    #[doc(hidden)]
    fn undo_immediately(&self);

    #[doc(hidden)]
    fn reserve(&self, request: &ReserveRequest) -> impl Future<Output = Result<Reservation, StoreError>>;

    /// Marks that the body of an attempt begins.
    #[doc(hidden)]
    fn begin(&self, lease: &Lease) -> impl Future<Output = Result<Verdict, StoreError>>;

    #[doc(hidden)]
    fn finish(&self, lease: &Lease, finish: &Finish) -> impl Future<Output = Result<Verdict, StoreError>>;

    #[doc(hidden)]
    fn release(&self, lease: &Lease, release: Release) -> impl Future<Output = Result<Verdict, StoreError>>;

    /// Waits until no other transaction holds `key`, at most for `at_most`. Returns whether the caller should keep the
    /// effects of the wait, or undo them.
    #[doc(hidden)]
    fn wait(&self, key: &Key, at_most: Duration) -> impl Future<Output = Result<bool, StoreError>>;

    #[doc(hidden)]
    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Option<Inspection>, StoreError>>;

    #[doc(hidden)]
    fn decide(&self, decision: &Decision) -> impl Future<Output = Result<DecisionAnswer, StoreError>>;
}

pub(crate) mod sealed {
    /// Implemented only in this crate, so that the requirements for a transaction can grow.
    pub trait Sealed {}
}

/// A call and its savepoint.
struct SavepointScope<C> {
    transaction: C,
    /// True if the writes of a body that does not complete are undone; false in shadow mode.
    undoes: bool,
    state: Mutex<CallState>,
}

struct CallState {
    turn: Option<Turn>,
    /// Number of open savepoints: of the call, and of a write in it.
    saved: usize,
    /// The reservation of the call.
    reserved: Option<ReserveRequest>,
}

impl CallState {
    const fn new() -> Self {
        Self { turn: None, saved: 0, reserved: None }
    }
}

impl<C: Transaction> SavepointScope<C> {
    fn state(&self) -> std::sync::MutexGuard<'_, CallState> {
        lock(&self.state)
    }

    async fn save(&self) -> Result<(), StoreError> {
        self.transaction.save().await?;
        self.state().saved += 1;
        Ok(())
    }

    async fn keep(&self) -> Result<(), StoreError> {
        self.transaction.keep(|| self.state().saved -= 1).await
    }

    async fn undo(&self) -> Result<(), StoreError> {
        self.transaction.undo().await?;
        self.state().saved -= 1;
        Ok(())
    }

    /// Runs `work` inside a savepoint, so that it takes effect in full or not at all.
    async fn saved<T>(&self, work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.save().await?;
        match work.await {
            Ok(done) => {
                self.keep().await?;
                Ok(done)
            }
            Err(error) => {
                self.undo().await?;
                Err(error)
            }
        }
    }

    /// Waits until no other call in this transaction is under way, except those that enclose this one.
    async fn take_turn(&self, node: &Arc<Node>) -> Result<(), StoreError> {
        if self.state().turn.is_none() {
            let turn = Turn::take(self.transaction.identity(), node).await?;
            self.state().turn = Some(turn);
        }
        Ok(())
    }

    async fn reserve(&self, request: ReserveRequest) -> Result<Reservation, StoreError> {
        if self.undoes && request.max_attempts.is_some() && !journal(|_| ()) {
            // Without a journal the user began the transaction, and no attempt is counted after a rollback.
            let message = "`max_attempts` can't count in a transaction that you begin yourself, as a rollback takes the \
                           attempt with it; use `transact`, which counts it after the rollback";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        self.save().await?;
        let reserved = match self.reserve_marked(&request).await {
            Ok(reserved) => reserved,
            Err(error) => {
                self.undo().await?;
                return Err(error);
            }
        };
        match &reserved {
            Reservation::Granted { .. } if self.undoes => {
                if request.on_crash == OnCrash::Fail {
                    // The mark that the body has started must survive the undo of the body's writes.
                    self.keep().await?;
                    self.save().await?;
                }
                journal(|journal| {
                    let place = self.transaction.place().to_owned();
                    journal.attempts.push(UndoneAttempt { place, request: request.clone(), failure: None });
                });
                self.state().reserved = Some(request);
            }
            _ => self.keep().await?,
        }
        Ok(reserved)
    }

    /// Reserves a key. Under `on_crash = fail` the same step marks in the record that the body begins: the commit
    /// decides about both.
    async fn reserve_marked(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let reserved = self.transaction.reserve(request).await?;
        if let Reservation::Granted { lease, .. } = &reserved
            && request.on_crash == OnCrash::Fail
            && self.transaction.begin(lease).await? == Verdict::Refused
        {
            let message = "the lease lapsed before the record could say that the body begins";
            return Err(StoreError::new(StoreErrorKind::Aborted, message));
        }
        Ok(reserved)
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        match finish {
            Finish::Completed(_) if !self.undoes => self.saved(self.transaction.finish(lease, finish)).await,
            Finish::Completed(payload) => {
                let written = match is_large(payload) {
                    true => self.saved(self.transaction.finish(lease, finish)).await?,
                    false => self.transaction.finish(lease, finish).await?,
                };
                if written == Verdict::Applied {
                    self.over().await?;
                }
                Ok(written)
            }
            Finish::Failed(_) => {
                let written = self.end_undone(lease, UndoneEnd::Finish(finish)).await?;
                if written == Verdict::Applied
                    && let Some(request) = self.state().reserved.take()
                {
                    journal(|journal| {
                        let mut attempts = journal.attempts.iter_mut();
                        if let Some(attempt) = attempts.find(|it| it.request.owner == request.owner) {
                            attempt.failure = Some(finish.clone());
                        }
                    });
                }
                Ok(written)
            }
        }
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        self.end_undone(lease, UndoneEnd::Release(release)).await
    }

    /// Undoes the writes of the body, and ends its attempt.
    async fn end_undone(&self, lease: &Lease, ending: UndoneEnd<'_>) -> Result<Verdict, StoreError> {
        let Some(request) = self.state().reserved.clone() else {
            return self.saved(ending.write(&self.transaction, lease)).await;
        };
        self.transaction.rewind().await?;
        let written = match request.on_crash {
            OnCrash::Fail => ending.write(&self.transaction, lease).await?,
            // The rewind undid the reservation as well. The new reservation gets the same attempt number.
            _ => match self.transaction.reserve(&request).await? {
                Reservation::Granted { lease, .. } => ending.write(&self.transaction, &lease).await?,
                // Another transaction has reserved the key in between. Nothing of this attempt is left.
                _ => Verdict::Applied,
            },
        };
        self.over().await?;
        Ok(written)
    }

    /// Keeps the writes of the call.
    async fn over(&self) -> Result<(), StoreError> {
        if self.state().saved > 0 {
            self.keep().await?;
        }
        Ok(())
    }

    /// Undoes the rest once the call is over without an end of its attempt: its lease was lost, or its result could not
    /// be recorded.
    async fn end(&self) {
        while self.state().saved > 0 {
            if let Err(error) = self.undo().await {
                tracing::debug!(
                    %error,
                    "the writes of a call could not be undone; its transaction can't be committed either"
                );
                return;
            }
        }
        self.state().turn = None;
    }

    async fn answer(&self, ask: MailboxRequest) {
        // The asking call may be gone. Then its answer is dropped.
        let at = &self.transaction;
        match ask {
            MailboxRequest::Reserve(request, answer) => drop(answer.send(self.reserve(request).await)),
            MailboxRequest::Finish(lease, finish, answer) => {
                drop(answer.send(self.finish(&lease, &finish).await.map_err(ended)));
            }
            MailboxRequest::Release(lease, release, answer) => {
                drop(answer.send(self.release(&lease, release).await.map_err(ended)));
            }
            MailboxRequest::Wait(key, at_most, answer) => drop(answer.send(self.wait(&key, at_most).await)),
            MailboxRequest::Inspect(key, answer) => drop(answer.send(self.saved(at.inspect(&key)).await)),
            MailboxRequest::Decide(decision, answer) => drop(answer.send(self.saved(at.decide(&decision)).await)),
        }
    }

    async fn wait(&self, key: &Key, at_most: Duration) -> Result<(), StoreError> {
        self.save().await?;
        match self.transaction.wait(key, at_most).await {
            Ok(true) => self.keep().await,
            Ok(false) => self.undo().await,
            Err(error) => {
                self.undo().await?;
                Err(error)
            }
        }
    }
}

/// End of an attempt whose body is undone.
#[derive(Clone, Copy)]
enum UndoneEnd<'a> {
    Finish(&'a Finish),
    Release(Release),
}

impl UndoneEnd<'_> {
    async fn write<C: Transaction>(self, transaction: &C, lease: &Lease) -> Result<Verdict, StoreError> {
        match self {
            Self::Finish(finish) => transaction.finish(lease, finish).await,
            Self::Release(release) => transaction.release(lease, release).await,
        }
    }
}

/// Converts an error at the end of an attempt: in this transaction only a smaller result can help, so errors that
/// invite a repetition become `Aborted`.
fn ended(error: StoreError) -> StoreError {
    match error.kind() {
        StoreErrorKind::TooLarge | StoreErrorKind::Corrupt | StoreErrorKind::Aborted => error,
        _ => StoreError::new(StoreErrorKind::Aborted, error.to_string()).with_source(error),
    }
}

fn is_large(payload: &StoredResult) -> bool {
    payload.stored_bytes() >= LARGE
}

async fn perform<C: Transaction>(scene: Arc<SavepointScope<C>>, (act, node): (NextAction, Arc<Node>)) {
    match act {
        NextAction::Answer(ask) => match scene.take_turn(&node).await {
            Ok(()) => scene.answer(ask).await,
            Err(error) => ask.refuse(error),
        },
        NextAction::End => scene.end().await,
    }
}

/// Undoes a call that is dropped before its end.
struct Undo<C: Transaction>(Arc<SavepointScope<C>>);

impl<C: Transaction> Drop for Undo<C> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        while state.saved > 0 {
            self.0.transaction.undo_immediately();
            state.saved -= 1;
        }
        state.turn = None;
    }
}

// ---- Calls in one transaction ------------------------------------------------------------------------------------------

/// A call, and the enclosing call in whose body it is made.
struct Node {
    id: u64,
    parent: Option<Arc<Node>>,
}

thread_local! {
    /// The call whose body is being polled on this thread.
    static INSIDE: RefCell<Option<Arc<Node>>> = const { RefCell::new(None) };
    /// The journal of the transaction that is being polled on this thread.
    static JOURNAL: RefCell<Option<Arc<Mutex<Journal>>>> = const { RefCell::new(None) };
}

impl Node {
    fn new() -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { id, parent: INSIDE.with_borrow(Clone::clone) })
    }

    fn is_inside(&self, id: u64) -> bool {
        let mut parent = self.parent.as_deref();
        while let Some(node) = parent {
            if node.id == id {
                return true;
            }
            parent = node.parent.as_deref();
        }
        false
    }
}

/// Marks a call as the one that is being polled on this thread, until this guard is dropped.
struct PolledCall(Option<Arc<Node>>);

impl PolledCall {
    fn enter(node: &Arc<Node>) -> Self {
        Self(INSIDE.replace(Some(Arc::clone(node))))
    }
}

impl Drop for PolledCall {
    fn drop(&mut self) {
        INSIDE.set(self.0.take());
    }
}

/// Stack of the calls under way in one transaction: each call is made in the body of the call below it.
#[derive(Default)]
struct Calls {
    stack: Mutex<Vec<u64>>,
    changed: Notify,
}

/// The calls of all transactions of this process, and how many users they have. A child goes on with none of its
/// parent's.
static CALLS: PerProcess<Mutex<CallsByTransaction>> = PerProcess::empty();

type CallsByTransaction = HashMap<usize, (Arc<Calls>, usize)>;

/// A user of the entry of a transaction in [`CALLS`]. The last user removes the entry, because another transaction may
/// be at the same address later.
struct CallsUser {
    /// Where they are among those of their process.
    all: &'static Mutex<CallsByTransaction>,
    transaction: usize,
    calls: Arc<Calls>,
}

impl CallsUser {
    fn new(transaction: usize) -> Self {
        let all = CALLS.here();
        let mut known = lock(all);
        let (calls, users) = known.entry(transaction).or_default();
        *users += 1;
        Self { all, transaction, calls: Arc::clone(calls) }
    }
}

impl Drop for CallsUser {
    fn drop(&mut self) {
        // In a child, a thread that does not exist there may hold the lock of its parent's.
        if !std::ptr::eq(self.all, CALLS.here()) {
            return;
        }
        let mut known = lock(self.all);
        if let Some((_, users)) = known.get_mut(&self.transaction) {
            *users -= 1;
            if *users == 0 {
                known.remove(&self.transaction);
            }
        }
    }
}

/// The right of a call to use its transaction.
struct Turn {
    known: CallsUser,
    id: u64,
}

impl Turn {
    async fn take(transaction: usize, node: &Node) -> Result<Self, StoreError> {
        let known = CallsUser::new(transaction);
        let calls = Arc::clone(&known.calls);
        let free = async {
            loop {
                let mut changed = pin!(calls.changed.notified());
                changed.as_mut().enable();
                {
                    let mut stack = lock(&calls.stack);
                    if stack.last().is_none_or(|last| node.is_inside(*last)) {
                        stack.push(node.id);
                        return;
                    }
                }
                changed.await;
            }
        };
        // Most calls don't have to wait, and then need no timer.
        let mut free = pin!(free);
        let at_once = poll_fn(|cx| Poll::Ready(free.as_mut().poll(cx).is_ready())).await;
        if !at_once && race(free, SystemClock::default().sleep(TURN_LIMIT)).await.is_none() {
            let message = format!(
                "another call in the same transaction has been running for {TURN_LIMIT:?}; it may be waiting for this \
                 one"
            );
            return Err(StoreError::new(StoreErrorKind::Aborted, message));
        }
        Ok(Self { known, id: node.id })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.known.calls.stack).retain(|id| *id != self.id);
        self.known.calls.changed.notify_waiters();
    }
}

// ---- Transactions that the library begins and commits ------------------------------------------------------------------

/// Notes about a transaction for the time after its rollback.
#[derive(Default)]
pub(crate) struct Journal {
    /// Attempts that began in the transaction, the earliest first.
    pub(crate) attempts: Vec<UndoneAttempt>,
    /// True if a statement of the library conflicted with another transaction, so that the whole transaction should be
    /// tried again.
    #[cfg_attr(
        not(any(feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7")),
        allow(dead_code, reason = "SQLite has no conflicts of transactions")
    )]
    pub(crate) conflict: bool,
}

/// An attempt whose record was rolled back with its transaction.
pub(crate) struct UndoneAttempt {
    pub(crate) place: String,
    request: ReserveRequest,
    /// Error that the attempt recorded. `None`: the key of the attempt is free.
    failure: Option<Finish>,
}

impl UndoneAttempt {
    /// Returns whether the attempt recorded an error.
    pub(crate) fn has_failure(&self) -> bool {
        self.failure.is_some()
    }

    /// Writes only the end of the attempt, so that the attempt counts and the next attempt has another number. Returns
    /// false if nothing is written, because another attempt has the key by now.
    pub(crate) async fn write<C: Transaction>(&self, transaction: &C) -> Result<bool, StoreError> {
        match transaction.reserve(&self.request).await? {
            Reservation::Granted { lease, .. } => {
                let written = match &self.failure {
                    Some(failure) => transaction.finish(&lease, failure).await?,
                    None => transaction.release(&lease, Release::Returned).await?,
                };
                Ok(written == Verdict::Applied)
            }
            _ => Ok(false),
        }
    }
}

/// Adds a note to the journal of the transaction that is being polled. Returns whether there is a journal: whether the
/// library began the transaction.
pub(crate) fn journal(note: impl FnOnce(&mut Journal)) -> bool {
    JOURNAL.with_borrow(|journal| journal.as_ref().map(|journal| note(&mut lock(journal))).is_some())
}

/// Failure of the work in a transaction.
pub(crate) enum WorkFailure<E> {
    Error(E),
    Panic(Box<dyn Any + Send>),
}

impl<E> WorkFailure<E> {
    /// Returns the error.
    ///
    /// # Panics
    /// If the work panicked.
    pub(crate) fn into_error(self) -> E {
        match self {
            Self::Error(error) => error,
            Self::Panic(panic) => resume_unwind(panic),
        }
    }
}

struct JournalEntry<F> {
    /// `None` once the work has ended.
    work: Option<Pin<Box<F>>>,
    journal: Arc<Mutex<Journal>>,
}

impl<F: Future<Output = Result<T, E>>, T, E> Future for JournalEntry<F> {
    type Output = Result<T, WorkFailure<E>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        struct NestingGuard(Option<Arc<Mutex<Journal>>>);
        impl Drop for NestingGuard {
            fn drop(&mut self) {
                JOURNAL.set(self.0.take());
            }
        }
        let _entered = NestingGuard(JOURNAL.replace(Some(Arc::clone(&self.journal))));
        let Self { work, .. } = &mut *self;
        let polling = work.as_mut().expect("polled after it was ready").as_mut();
        // A panic does not end the transaction: the attempt that panicked is written after the rollback.
        let ended = match catch_unwind(AssertUnwindSafe(|| polling.poll(cx))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(result)) => result.map_err(WorkFailure::Error),
            Err(panic) => Err(WorkFailure::Panic(panic)),
        };
        *work = None;
        Poll::Ready(ended)
    }
}

/// Runs `work` in a transaction. Returns its result, and the journal of the transaction.
///
/// Boxed: a call in a transaction is large, and its caller's future would store it more than once.
pub(crate) async fn journaled<T, E>(work: impl Future<Output = Result<T, E>>) -> (Result<T, WorkFailure<E>>, Journal) {
    let journal = Arc::new(Mutex::new(Journal::default()));
    let ended = JournalEntry { work: Some(Box::pin(work)), journal: Arc::clone(&journal) }.await;
    let journal = std::mem::take(&mut *lock(&journal));
    (ended, journal)
}

/// Notes that the transaction of the delivery is committed.
pub(crate) fn committed() {
    settle(TransactionEnd::Committed);
}

/// Notes that the transaction of the delivery was rolled back. `recorded`: whether the errors that its calls had
/// recorded are recorded again.
pub(crate) fn rolled_back(recorded: Result<bool, StoreError>) {
    let failures_recorded = recorded.unwrap_or_else(|error| {
        tracing::warn!(%error, "a transaction was rolled back, and its attempts could not be counted");
        false
    });
    settle(TransactionEnd::RolledBack { failures_recorded });
}

/// Notes that no transaction could be begun for the delivery, mostly for lack of a connection.
pub(crate) fn not_begun() {
    settle(TransactionEnd::NotBegun { again: unreached() });
}

/// Notes that the transaction of the delivery has begun, for the first time or again.
pub(crate) fn begun() {
    unsettled();
}

/// Number of tries of a transaction that conflicts with others.
#[cfg(any(feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7"))]
pub(crate) const TRIES: u32 = 5;

/// Pauses before try number `next`.
#[cfg(any(feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7"))]
pub(crate) async fn pause_before(next: u32) {
    SystemClock::default().sleep(Duration::from_millis(10 << next.min(6))).await;
}

/// The store of one call: forwards every request to the future of the call, which has the transaction.
struct Mailbox {
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
    async fn ask<T>(&self, ask: impl FnOnce(Sender<T>) -> MailboxRequest) -> Result<T, StoreError> {
        let (sender, answer) = oneshot::channel();
        let over = || StoreError::new(StoreErrorKind::Aborted, "the call that used the transaction has ended");
        self.asks.send(ask(sender)).map_err(|_| over())?;
        answer.await.map_err(|_| over())?
    }

    /// Sends a write. The write is refused once the call is over: then the transaction alone decides about its record.
    async fn write(&self, ask: impl FnOnce(Sender<Verdict>) -> MailboxRequest) -> Result<Verdict, StoreError> {
        if self.asks.is_closed() { Ok(Verdict::Refused) } else { self.ask(ask).await }
    }
}

impl Store for Mailbox {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
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

    /// Sends nothing: the reservation has marked the record, and the transaction holds its keys for as long as it is
    /// open.
    fn begin<'a>(&'a self, _: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::ready(Ok(if self.asks.is_closed() { Verdict::Refused } else { Verdict::Applied }))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        let held = if self.asks.is_closed() { Verdict::Refused } else { Verdict::Applied };
        (0..leases.len()).for_each(|at| answer(at, held));
        StoreFuture::ready(Ok(()))
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

    /// Refuses: a scan of the table takes more time than the user's transaction should.
    fn list<'a>(&'a self, _: &'a Filter) -> StoreFuture<'a, Page> {
        let message = "records are not listed inside of a transaction; ask a store of its own";
        StoreFuture::ready(Err(StoreError::new(StoreErrorKind::Unsupported, message)))
    }

    /// Sends nothing: the next statement of the transaction shows whether its connection works.
    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::ready(Ok(()))
    }
}
