//! The part of a consumer that decides when the next message is fetched: slots of handlers, outages, shutdown.

use std::fmt::{self, Display};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::DeadLetter;
use crate::clock::Instant;
use crate::combine::race;
use crate::engine::Outcome;
use crate::metrics::StoreOp;
use crate::policy::Backoff;
use crate::store::{Store, StoreError};
use crate::sync::{Mutex, lock};

/// Pauses between the pings of a store that does not answer.
const PING_PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
/// Time after a successful ping during which the intake stays open although the store is in doubt.
const PING_COUNTS: Duration = Duration::from_secs(1);
/// Time after which a trial admits one more message, if no reservation of the earlier messages has ended.
const TRIAL: Duration = Duration::from_secs(1);
/// Pause between two looks at the result of a trial.
const TRIAL_LOOK: Duration = Duration::from_millis(50);
/// Pauses between the tries to reach a broker.
const BROKER_PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
/// Time without a failure of the broker after which the pauses begin again with the first pause.
const BROKER_QUIET: Duration = Duration::from_secs(10);

/// Intake of a consumer: decides when the next message is fetched.
///
/// A consumer takes a slot before it fetches a message, and its handler holds the slot until the message is settled. So
/// no more messages are fetched than handlers can run, and a message that waits for a handler does not lose its time at
/// the broker.
///
/// - *Outage of the store*: while the store does not answer, [`slot`](Intake::slot) waits, so that the outage uses up
///   no deliveries. The intake learns of an outage from the operations of the store's handles. The intake then pings
///   the store, after pauses that grow from 0.1 s to 5 s. Once a ping succeeds, consuming goes on. If the latest
///   reservation got no answer although pings do (the store is full, or read-only), the intake admits single messages
///   until the store answers a reservation. One line is logged at the beginning of the pause, and one at its end.
/// - *Outage of the broker*: [`broker_failed`](Intake::broker_failed) waits before the next try. A consumer never ends
///   because its broker is away.
/// - *Retry that waits in the process*: wait without a slot, and take the slot afterwards. Otherwise healthy messages
///   wait behind failed ones.
/// - *Shutdown*: [`stop`](Intake::stop) ends the loop, [`drain`](Intake::drain) waits for the handlers.
/// - *Message that is set aside*: [`dead_letter`](Intake::dead_letter), [`unreadable`](Intake::unreadable) and
///   [`beyond_limit`](Intake::beyond_limit) return the reasons, as headers for the message.
///
/// An intake depends on no broker's client. Clones are handles of the same intake. The intake uses the clock of its
/// store. With `on_store_error = run`, handlers run even while the store is away, so their consumer needs a semaphore
/// in place of an intake.
///
/// ```
/// use std::time::Duration;
///
/// use idem_runtime::brokers::{DeadLetter, Intake};
/// use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
///
/// # #[derive(Clone, Default)]
/// # struct Broker(std::sync::Arc<std::sync::Mutex<Vec<u64>>>);
/// # struct Message { order: u64, delivered: u32 }
/// # impl Broker {
/// #     async fn fetch(&self) -> Result<Option<Message>, std::io::Error> {
/// #         let next = self.0.lock().unwrap().pop();
/// #         next.map(|order| Some(Message { order, delivered: 1 })).ok_or(std::io::Error::other("away"))
/// #     }
/// #     async fn ack(&self, _: &Message) {}
/// #     async fn retry(&self, _: &Message, _: Duration) {}
/// #     async fn set_aside(&self, _: &Message, _: &DeadLetter) {}
/// # }
/// #[idempotent(key = "order:{order}", ttl = "28d", max_attempts = 5, store = store)]
/// async fn ship(store: &MemoryStore, order: u64) -> Result<String, Error> {
///     Ok(format!("parcel for order {order}"))
/// }
///
/// async fn consume(store: MemoryStore, broker: Broker, terminated: impl Future<Output = ()> + Send + 'static) {
///     let intake = Intake::new(&store, 8);
///     tokio::spawn({
///         let intake = intake.clone();
///         async move {
///             terminated.await;
///             intake.stop();
///         }
///     });
///     while let Some(slot) = intake.slot().await {
///         let message = match broker.fetch().await {
///             Ok(Some(message)) => message,
///             Ok(None) => continue,
///             Err(error) => {
///                 intake.broker_failed(&error).await;
///                 continue;
///             }
///         };
///         let (store, broker, intake) = (store.clone(), broker.clone(), intake.clone());
///         tokio::spawn(async move {
///             let _slot = slot;
///             let call = observe(ship(&store, message.order)).delivery(message.delivered).delivery_limit(20);
///             let (result, outcome) = call.catch_panics().await;
///             match outcome.disposition() {
///                 Disposition::Ack => broker.ack(&message).await,
///                 Disposition::Retry { after } => broker.retry(&message, after).await,
///                 Disposition::DeadLetter => {
///                     broker.set_aside(&message, &intake.dead_letter(&result, &outcome)).await;
///                 }
///             }
///         });
///     }
///     intake.drain().await;
/// }
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
/// # let broker = Broker(std::sync::Arc::new(vec![1, 2, 3].into()));
/// # runtime.block_on(async {
/// #     let left = broker.clone();
/// #     let terminated = async move { while !left.0.lock().unwrap().is_empty() { tokio::task::yield_now().await } };
/// #     consume(MemoryStore::new(), broker, terminated).await;
/// # });
/// ```
#[derive(Clone)]
pub struct Intake(Arc<IntakeInner>);

struct IntakeInner {
    store: Arc<dyn Store>,
    handlers: usize,
    state: Mutex<IntakeState>,
    changed: Notify,
}

struct IntakeState {
    free: usize,
    is_stopped: bool,
    gate: Gate,
    /// Time of the last successful ping.
    pinged_at: Option<Instant>,
    /// Number of failures of the broker in a row.
    broker_failures: u32,
    /// End of the pause after the last failure of the broker.
    broker_paused_until: Option<Instant>,
}

/// State of the store, which decides whether messages are admitted.
#[derive(Clone, Copy)]
enum Gate {
    Open,
    /// The store does not answer. A task pings the store.
    Closed,
    /// The store answers pings, but has not answered its latest reservation. `unanswered` is the number of unanswered
    /// reservations when the trial began.
    Trial {
        unanswered: u64,
        is_taken: bool,
    },
}

/// Next step of [`Intake::slot`].
enum NextStep {
    Stop,
    Take(HandlerSlot),
    Wait,
}

/// A slot of a handler. The handler holds the slot until its message is settled; the drop frees the slot.
#[must_use = "a slot that is dropped is free again"]
pub struct HandlerSlot(Arc<IntakeInner>);

impl Intake {
    /// Creates an intake for at most `handlers` handlers at a time, whose calls use `store`.
    ///
    /// # Panics
    /// If `handlers` is 0.
    pub fn new<S: Store + ?Sized>(store: &S, handlers: usize) -> Self {
        assert!(handlers > 0, "a consumer without handlers gets no messages");
        let state = IntakeState {
            free: handlers,
            is_stopped: false,
            gate: Gate::Open,
            pinged_at: None,
            broker_failures: 0,
            broker_paused_until: None,
        };
        let (state, changed) = (Mutex::new(state), Notify::new());
        Self(Arc::new(IntakeInner { store: store.handle(), handlers, state, changed }))
    }

    /// Waits until a slot is free and the store is not away. Returns `None` after [`stop`](Intake::stop).
    ///
    /// # Cancel safety
    /// Cancel safe: a slot that was not returned stays free.
    pub async fn slot(&self) -> Option<HandlerSlot> {
        loop {
            let mut changed = pin!(self.0.changed.notified());
            // The notification is enabled before the state is read, so that no change in between is missed.
            changed.as_mut().enable();
            match self.next_step() {
                NextStep::Stop => return None,
                NextStep::Take(slot) => return Some(slot),
                NextStep::Wait => changed.await,
            }
        }
    }

    /// Returns a slot if one is free and the store is not away. Serves consumers that fetch several messages at a time,
    /// and consumers that must poll their broker although no slot is free.
    pub fn try_slot(&self) -> Option<HandlerSlot> {
        match self.next_step() {
            NextStep::Take(slot) => Some(slot),
            NextStep::Stop | NextStep::Wait => None,
        }
    }

    fn next_step(&self) -> NextStep {
        let inner = &self.0;
        let context = inner.store.context();
        let mut state = lock(&inner.state);
        if state.is_stopped {
            return NextStep::Stop;
        }
        if state.free == 0 {
            return NextStep::Wait;
        }
        match &mut state.gate {
            Gate::Closed => return NextStep::Wait,
            Gate::Trial { unanswered, is_taken } => match context.unanswered() {
                // The trial is over, and the task that watches it logs this.
                None => {}
                Some(now) if *is_taken || now != *unanswered => return NextStep::Wait,
                Some(_) => *is_taken = true,
            },
            Gate::Open if context.is_in_doubt() => {
                let now = context.clock().now();
                let is_pinged = state.pinged_at.is_some_and(|at| now.saturating_since(at) < PING_COUNTS);
                if !is_pinged || context.unanswered().is_some() {
                    state.gate = Gate::Closed;
                    drop(state);
                    context.clock().spawn(Box::pin(watch(Arc::downgrade(inner), inner.store.upkeep())));
                    return NextStep::Wait;
                }
            }
            Gate::Open => {}
        }
        state.free -= 1;
        drop(state);
        NextStep::Take(HandlerSlot(Arc::clone(inner)))
    }

    /// Ends the intake: [`slot`](Intake::slot) returns `None` from now on. Slots that are held stay valid.
    pub fn stop(&self) {
        lock(&self.0.state).is_stopped = true;
        self.0.changed.notify_waiters();
    }

    /// Waits until [`stop`](Intake::stop) is called. Await this future in a `select!`, next to a fetch that may be
    /// cancelled.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn stopped(&self) {
        self.0.until(|state| state.is_stopped).await;
    }

    /// Stops the intake, and waits until all slots are free and the late writes of the store are done. Put a time-out
    /// around this call if the process has a limited time to end: after the time-out, the handlers that still run end
    /// like in a crash, and their messages are delivered again.
    ///
    /// # Cancel safety
    /// Cancel safe: the intake stays stopped.
    pub async fn drain(&self) {
        self.stop();
        self.0.until(|state| state.free == self.0.handlers).await;
        self.0.store.context().flush().await;
    }

    /// Waits before the next try after `error` of the broker: 0.1 s after the first failure, up to 10 s after further
    /// failures. Returns whether to try again: false, without a further wait, once the intake is stopped. Failures
    /// during a pause share this pause. If no failure follows for 10 s, the next pause is the first one again. The
    /// failures 1, 2, 4, 8 … are logged as warnings.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn broker_failed(&self, error: &(impl Display + ?Sized)) -> bool {
        let context = self.0.store.context();
        let pause = {
            let mut state = lock(&self.0.state);
            let now = context.clock().now();
            let ended_for = state.broker_paused_until.map(|until| now.saturating_since(until));
            match state.broker_paused_until {
                // All handlers fail together if a connection is lost: this counts as one failure.
                Some(until) if until > now => until.saturating_since(now),
                _ => {
                    let is_new = ended_for.is_none_or(|ended_for| ended_for >= BROKER_QUIET);
                    state.broker_failures = if is_new { 1 } else { state.broker_failures.saturating_add(1) };
                    let pause = BROKER_PAUSES.after(state.broker_failures, context.new_owner().seed());
                    state.broker_paused_until = Some(now.saturating_add(pause));
                    if state.broker_failures.is_power_of_two() {
                        let failures = state.broker_failures;
                        tracing::warn!(%error, failures, ?pause, "the broker failed; trying again");
                    }
                    pause
                }
            }
        };
        race(self.stopped(), context.clock().sleep(pause)).await.is_none()
    }

    /// Returns the reasons of a message that is set aside ([`Disposition::DeadLetter`](crate::Disposition::DeadLetter))
    /// after its delivery ended with `result` and `outcome`. `result` may be `Ok`, if the handler swallowed the error
    /// of a call.
    pub fn dead_letter<T, E: Display>(&self, result: &Result<T, E>, outcome: &Outcome) -> DeadLetter {
        let error = result.as_ref().err().map(|error| error as &dyn Display);
        DeadLetter::of(error, outcome, self.wall())
    }

    /// Returns the reasons of a message that can't be read because of `error`.
    pub fn unreadable(&self, error: &(impl Display + ?Sized)) -> DeadLetter {
        DeadLetter::unhandled("unreadable", &error, None, self.wall())
    }

    /// Returns the reasons for setting a message aside if `delivery`, the number of its delivery, is above `limit`;
    /// otherwise returns `None`. The handler must not get such a message, because the message may have killed the
    /// processes of its earlier deliveries.
    ///
    /// ```
    /// use idem_runtime::MemoryStore;
    /// use idem_runtime::brokers::Intake;
    ///
    /// let intake = Intake::new(&MemoryStore::new(), 8);
    /// assert!(intake.beyond_limit(20, 20).is_none(), "the last delivery");
    /// let letter = intake.beyond_limit(21, 20).expect("one too many");
    /// assert!(letter.headers().any(|header| header == ("idem-why", "beyond_limit")));
    /// ```
    pub fn beyond_limit(&self, delivery: u32, limit: u32) -> Option<DeadLetter> {
        let error = "no delivery has settled the message: its handler may have killed or blocked its process";
        (delivery > limit).then(|| DeadLetter::unhandled("beyond_limit", &error, Some(delivery), self.wall()))
    }

    fn wall(&self) -> Duration {
        self.0.store.context().clock().wall()
    }
}

impl IntakeInner {
    /// Waits until `condition` holds.
    async fn until(&self, condition: impl Fn(&IntakeState) -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if condition(&lock(&self.state)) {
                return;
            }
            changed.await;
        }
    }

    fn set_gate(&self, gate: Gate) {
        lock(&self.state).gate = gate;
        self.changed.notify_waiters();
    }

    /// Opens the gate after a successful ping.
    fn open(&self, began: Instant, is_logged: bool) {
        let context = self.store.context();
        let now = context.clock().now();
        lock(&self.state).pinged_at = Some(now);
        self.set_gate(Gate::Open);
        if is_logged {
            let after = now.saturating_since(began);
            tracing::warn!(store = context.name(), ?after, "the store answers again: consuming goes on");
        }
    }
}

/// Watches a store that may be away, until its intake is open again, stopped or dropped. `store` is the handle for the
/// library's own tasks.
async fn watch(intake: Weak<IntakeInner>, store: Arc<dyn Store>) {
    let context = store.context();
    let (began, seed, mut is_logged) = (context.clock().now(), context.new_owner().seed(), false);
    for tries in 1.. {
        let pinged = store.ping().watched(&*store, StoreOp::Ping).await;
        let Some(intake) = intake.upgrade().filter(|intake| !lock(&intake.state).is_stopped) else { return };
        let failed = match (pinged, context.unanswered()) {
            (Ok(()), None) => return intake.open(began, is_logged),
            (Ok(()), Some(unanswered)) => {
                if try_messages(&intake, unanswered).await {
                    return intake.open(began, is_logged);
                }
                intake.set_gate(Gate::Closed);
                None
            }
            (Err(error), _) => Some(error),
        };
        drop(intake);
        if !std::mem::replace(&mut is_logged, true) {
            log_pause(context.name(), failed.as_ref());
        }
        context.clock().sleep(PING_PAUSES.after(tries, seed)).await;
    }
}

/// Admits single messages until a reservation shows whether the store answers reservations again. `unanswered` is the
/// number of reservations without an answer before the trial.
async fn try_messages(intake: &IntakeInner, unanswered: u64) -> bool {
    let context = intake.store.context();
    loop {
        intake.set_gate(Gate::Trial { unanswered, is_taken: false });
        let next = context.clock().now().saturating_add(TRIAL);
        while context.clock().now() < next {
            match context.unanswered() {
                None => return true,
                Some(now) if now != unanswered => return false,
                Some(_) if lock(&intake.state).is_stopped => return true,
                Some(_) => context.clock().sleep(TRIAL_LOOK).await,
            }
        }
    }
}

fn log_pause(store: &'static str, error: Option<&StoreError>) {
    let error = error.map(tracing::field::display);
    tracing::warn!(store, error, "the store does not answer: consuming is paused until it does");
}

impl Drop for HandlerSlot {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.free += 1;
        if let Gate::Trial { is_taken, .. } = &mut state.gate {
            *is_taken = false;
        }
        drop(state);
        self.0.changed.notify_waiters();
    }
}

impl fmt::Debug for Intake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (free, is_stopped) = {
            let state = lock(&self.0.state);
            (state.free, state.is_stopped)
        };
        let mut shown = f.debug_struct("Intake");
        shown.field("handlers", &self.0.handlers).field("free", &free).field("is_stopped", &is_stopped);
        shown.finish_non_exhaustive()
    }
}

impl fmt::Debug for HandlerSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerSlot")
    }
}
