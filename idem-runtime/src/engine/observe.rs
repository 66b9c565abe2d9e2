//! Observed deliveries: their settings, and the polls of their handlers.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;

use super::beat::{Beats, NoBeat, OnBeat, OnBeatLost, TimerSlot};
use super::disposition::DeliveryResult;
use super::observer::{Message, Observation, Observer, with_observer};
use super::outcome::Outcome;
use super::poll_notes::note_refusal;
use crate::error::Error;
use crate::key::Key;
use crate::record::Traceparent;
use crate::store::{Beat, Callback};

/// Runs `future`, which handles one delivery, and returns its result and its [`Outcome`].
///
/// The [`Outcome`] describes the last idempotent call of the delivery. The [disposition](Outcome::disposition) depends
/// on the set of all calls that began, not on their order:
///
/// - A delivery that returns an error is never acknowledged, even if all of its calls succeeded: after an error such as
///   a refused commit, the message must be delivered again.
/// - A delivery that returns `Ok` is acknowledged if all of its operations have finished. If the delivery swallowed an
///   error of a call, the message is delivered again. If no delivery can change that error, the message is set aside,
///   although the delivery returned `Ok`. A recorded error is an exception: its operation has finished, so the message
///   is acknowledged even if the delivery swallowed the error.
/// - If the delivery returns a recorded error, the message is set aside. An error of the delivery is taken for the
///   recorded error of a call if the delivery ends in the same poll as that call. An error of a later poll is a
///   different error, and the message is delivered again.
/// - If a call was dropped before it returned, for example by a time-out around it, the message is delivered again. The
///   message is also delivered again if the dropped call was made in a nested `observe`, `observe_all` or `transact`.
/// - If the delivery called no idempotent function, the message is delivered again, and the library logs a warning. A
///   call in a spawned task must be observed in that task: `tokio::spawn(observe(…))`.
///
/// Calls inside the body of an idempotent function are not reported. Only the call of the function itself is reported.
///
/// ```
/// # use std::time::Duration;
/// # use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
/// async fn ship(store: &MemoryStore, id: u32) -> Result<String, Error> {
///     Ok(format!("parcel for {id}"))
/// }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new();
/// let (first, outcome) = observe(ship(&store, 42)).await;
/// assert!(outcome.executed());
/// let (duplicate, outcome) = observe(ship(&store, 42)).await;
/// assert!(outcome.replayed());
/// assert_eq!(outcome.disposition(), Disposition::Ack);
/// assert_eq!(first.unwrap(), duplicate.unwrap());
/// # });
/// ```
///
/// # Cancel safety
/// Cancel safe if `future` is cancel safe.
pub fn observe<F, T, E>(future: F) -> Observe<F>
where
    F: Future<Output = Result<T, E>>,
{
    Observe::new(future, Result::is_err)
}

pin_project! {
    /// Future of [`observe`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Observe<F: Future, B = NoBeat> {
        #[pin]
        future: Option<F>,
        observer: Option<Observer>,
        failed: fn(&F::Output) -> bool,
        beat: B,
    }
}

impl<F: Future, B: fmt::Debug> fmt::Debug for Observe<F, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls = self.observer.as_ref().map(|observer| &observer.calls);
        f.debug_struct("Observe").field("calls", &calls).field("beat", &self.beat).finish_non_exhaustive()
    }
}

impl<F: Future> Observe<F> {
    pub(crate) fn new(future: F, failed: fn(&F::Output) -> bool) -> Self {
        Self { future: Some(future), observer: Some(Observer::default()), failed, beat: NoBeat }
    }

    fn with_beat<B>(self, beat: B) -> Observe<F, B> {
        let Self { future, observer, failed, beat: NoBeat } = self;
        Observe { future, observer, failed, beat }
    }
}

impl<F: Future, B> Observe<F, B> {
    /// Names the message in the spans of its calls: the broker in the terms of OpenTelemetry (`kafka`, `rabbitmq`,
    /// `aws_sqs`, `gcp_pubsub`), the queue or topic, and the id of the message. The three names become the attributes
    /// `messaging.system`, `messaging.destination.name` and `messaging.message.id`.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     Ok(format!("parcel for {id}"))
    /// # }
    /// # async fn deliver(store: &MemoryStore, id: u64, message_id: &str) {
    /// let (result, outcome) = observe(ship(store, id)).message("aws_sqs", "orders", message_id).await;
    /// # let _ = (result, outcome.disposition());
    /// # }
    /// ```
    pub fn message(self, system: &'static str, destination: impl Into<String>, id: impl Into<String>) -> Self {
        let called = (system, destination.into(), id.into());
        self.map_message(|message| message.called = Some(called))
    }

    /// Sets the trace of the message, from its header `traceparent`. The record keeps the trace, so that the span of a
    /// replay can name the trace of the run that made the result (`idem.original_trace`). The HTTP layer sets the trace
    /// automatically.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     Ok(format!("parcel for {id}"))
    /// # }
    /// # async fn deliver(store: &MemoryStore, id: u64, header: &str) {
    /// let (result, outcome) = observe(ship(store, id)).traceparent(header.parse().ok()).await;
    /// # let _ = (result, outcome.disposition());
    /// # }
    /// ```
    pub fn traceparent(self, traceparent: impl Into<Option<Traceparent>>) -> Self {
        match traceparent.into() {
            Some(traceparent) => self.map_message(|message| message.traceparent = Some(traceparent)),
            None => self,
        }
    }

    /// Sets the group in which the broker wants messages handled in order: the `MessageGroupId` of a FIFO queue of SQS,
    /// the partition of Kafka, the partition key of Kinesis. Within [`observe_all`](crate::observe_all) the deliveries
    /// of one group run one after the other, in their order. If a delivery is not acknowledged, later deliveries of its
    /// group don't start: they end with [`Error::HeldBack`]. Outside of `observe_all` the group has no effect.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe, observe_all};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     if id == 0 { Err(Error::NoAttempt) } else { Ok(format!("parcel for {id}")) }
    /// # }
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let store = MemoryStore::new();
    /// let messages = [("a", "customer 1", 0), ("b", "customer 1", 41), ("c", "customer 2", 42)];
    /// let calls = messages.map(|(id, group, order)| (id, observe(ship(&store, order)).group(group)));
    /// let batch = observe_all(calls).await;
    /// let failures = serde_json::to_string(&batch.item_failures()).unwrap();
    /// // "a" fails, so "b" does not begin.
    /// assert_eq!(failures, r#"{"batchItemFailures":[{"itemIdentifier":"a"},{"itemIdentifier":"b"}]}"#);
    /// # });
    /// ```
    pub fn group(self, group: impl Into<String>) -> Self {
        self.map_observer(|observer| observer.group = Some(group.into().into_boxed_str()))
    }

    /// Sets the time for which the broker may go on redelivering the message; `None` means that there is no limit.
    pub(crate) fn redelivered_for(self, longest: Option<Duration>) -> Self {
        self.map_observer(|observer| observer.redelivered_for = Some(longest.unwrap_or(Duration::MAX)))
    }

    /// Takes the group out of the settings of the delivery.
    pub(super) fn take_group(&mut self) -> Option<Box<str>> {
        self.observer.as_mut().and_then(|observer| observer.group.take())
    }

    fn map_message(self, change: impl FnOnce(&mut Message)) -> Self {
        self.map_observer(|observer| change(Arc::make_mut(observer.message.get_or_insert_default())))
    }

    fn map_beat(self, change: impl FnOnce(B) -> B) -> Self {
        Self { beat: change(self.beat), ..self }
    }

    pub(super) fn map_observer(mut self, change: impl FnOnce(&mut Observer)) -> Self {
        change(self.observer.get_or_insert_default());
        self
    }
}

impl<F: Future, B: Beats<F::Output>> Observe<F, B> {
    fn poll_observed(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        if let Some(observer) = this.observer {
            observer.final_error = false;
        }
        let observer = this.observer.as_ref();
        let lost = || {
            let (key, attempt, retry_after) = Observer::last(observer);
            Error::MessageLost { key, attempt, retry_after }
        };
        if let Some(output) = this.beat.lost(&lost, cx) {
            note_refusal();
            return Poll::Ready(output);
        }
        let wanted_outside =
            this.observer.as_mut().is_some_and(|observer| observer.is_inside_of_another(B::WANTS_TIMER));
        let polled = {
            let _observation = Observation::enter(this.observer);
            this.future.as_mut().as_pin_mut().expect("polled after it was ready").poll(cx)
        };
        if polled.is_pending()
            && let Some(Observer { timer: timer @ TimerSlot::Known(..), .. }) = this.observer
        {
            this.beat.start(timer, cx);
            if wanted_outside {
                with_observer(|outer| outer.timer = timer.clone());
            }
        }
        polled
    }

    /// Ends the delivery, and returns its `output` with its outcome.
    fn conclude(self: Pin<&mut Self>, output: F::Output) -> (F::Output, Outcome, Observer) {
        let mut this = self.project();
        {
            // A call that has not ended, for example inside of a time-out that has passed, ends here.
            let _observation = Observation::enter(this.observer);
            this.future.set(None);
        }
        this.beat.stop();
        let mut observer = this.observer.take().unwrap_or_default();
        let returned = match (this.failed)(&output) {
            true => DeliveryResult::Err { with_a_call: observer.final_error },
            false => DeliveryResult::Ok,
        };
        let (calls, (steps_in_doubt, _)) = (std::mem::take(&mut observer.calls), observer.steps_in_doubt);
        let outcome = Outcome::of_delivery(calls, steps_in_doubt, returned, observer.budget);
        (output, outcome, observer)
    }
}

impl<F, T, E, B> Observe<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    /// Turns a panic of the delivery into [`Error::Panicked`], so that the panic ends this delivery and not the
    /// consumer. The delivery is dropped first: its keys are freed, or are interrupted under `on_crash = fail`.
    ///
    /// ```
    /// # use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn ship(store: &MemoryStore, id: u32) -> Result<String, Error> {
    ///     panic!("order {id} has no address")
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let store = MemoryStore::new();
    /// let (result, outcome) = observe(ship(&store, 42)).catch_panics().await;
    /// assert!(matches!(result, Err(Error::Panicked { .. })));
    /// assert!(outcome.executed() && outcome.uncertain());
    /// assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    /// # });
    /// ```
    pub fn catch_panics(self) -> CatchPanics<F, B> {
        CatchPanics { observe: self }
    }
}

pin_project! {
    /// Future of [`Observe::catch_panics`].
    #[must_use = "futures do nothing unless polled"]
    #[derive(Debug)]
    pub struct CatchPanics<F: Future, B = NoBeat> {
        #[pin]
        observe: Observe<F, B>,
    }
}

impl<F, T, E, B> Future for CatchPanics<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    type Output = (Result<T, E>, Outcome);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut observe = self.project().observe;
        // After a panic the future is dropped below and never polled again.
        match std::panic::catch_unwind(AssertUnwindSafe(|| observe.as_mut().poll_observed(cx))) {
            Ok(polled) => {
                let (result, outcome, _) = observe.conclude(ready!(polled));
                Poll::Ready((result, outcome))
            }
            Err(_) => {
                Poll::Ready(observe.cut_off(|key, attempt, retry_after| Error::Panicked { key, attempt, retry_after }))
            }
        }
    }
}

impl<F, T, E, B> Observe<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    /// Ends the delivery. The result of the delivery is an error with the key and the attempt of the last call, and
    /// the time until the next delivery.
    fn cut_off(
        mut self: Pin<&mut Self>,
        error: impl FnOnce(Option<Key>, Option<u32>, Duration) -> Error,
    ) -> (Result<T, E>, Outcome) {
        let this = self.as_mut().project();
        if let Some(observer) = this.observer {
            // The delivery ends with the new error, and not with the error of a call.
            observer.final_error = false;
        }
        let (key, attempt, retry_after) = Observer::last(this.observer.as_ref());
        let (result, outcome, _) = self.conclude(Err(E::from(error(key, attempt, retry_after))));
        (result, outcome)
    }
}

impl<F, T, E, B> CatchPanics<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    /// Drops the delivery because the deadline of its batch has passed.
    pub(super) fn passed_deadline(self: Pin<&mut Self>) -> (Result<T, E>, Outcome) {
        note_refusal();
        self.project().observe.cut_off(|key, attempt, retry_after| Error::DeadlinePassed { key, attempt, retry_after })
    }
}

impl<F: Future, B: Beats<F::Output>> Future for Observe<F, B> {
    type Output = (F::Output, Outcome);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let output = ready!(self.as_mut().poll_observed(cx));
        let (output, outcome, _) = self.conclude(output);
        Poll::Ready((output, outcome))
    }
}

impl<F, T, E> Observe<F>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    /// Calls `callback` at intervals of `every` while the delivery runs, so that the broker does not consider the
    /// message lost: the callback extends a visibility time-out, or reports progress. A good `every` is a third of the
    /// broker's time-out.
    ///
    /// The timer that renews leases also calls the callback. In every mode the beats start when the first call of the
    /// delivery first waits, for its body or for another attempt. So a handler that is ready immediately costs nothing,
    /// and the beats do not cover the part of the delivery before its first call. The beats go on between calls, and
    /// end with the delivery: a running callback is then dropped, so that it extends no settled message. A beat may
    /// come up to an eighth of `every` early.
    ///
    /// The callback is a separate task on the runtime that polls the delivery; the broker's client usually uses the
    /// same runtime. A delivery has at most one running callback. The callback has the time limit `every`, or 1 s if
    /// `every` is shorter. A callback that hangs, fails or panics is called again after a quarter of `every`, and
    /// affects neither a lease nor another delivery. A handler that blocks the only thread of its runtime keeps its
    /// lease, but has no beats meanwhile.
    ///
    /// If the broker limits the total extension (SQS: 12 h from the first receive), the callback calls [`Beat::lost`]
    /// at that limit. [`on_beat_lost`](Observe::on_beat_lost) sets the reaction.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # #[derive(Clone)]
    /// # struct Acker;
    /// # impl Acker {
    /// #     async fn progress(&self) -> Result<(), std::io::Error> { Ok(()) }
    /// # }
    /// #[idempotent(key = "film:{id}", ttl = "7d", store = store)]
    /// async fn encode(store: &MemoryStore, id: u64) -> Result<String, Error> {
    ///     Ok(format!("film {id}")) // Takes minutes.
    /// }
    ///
    /// async fn deliver(store: &MemoryStore, id: u64, acker: &Acker) {
    ///     let ack = acker.clone();
    ///     let (_, outcome) = observe(encode(store, id))
    ///         .on_beat(Duration::from_secs(10), move |_| {
    ///             let ack = ack.clone();
    ///             async move { ack.progress().await }
    ///         })
    ///         .await;
    /// #   assert!(outcome.executed());
    /// }
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// #     deliver(&MemoryStore::new(), 42, &Acker).await;
    /// # });
    /// ```
    pub fn on_beat<C, R, A, D>(self, every: Duration, callback: C) -> Observe<F, OnBeat<C>>
    where
        C: FnMut(Beat) -> R + Send + 'static,
        R: Future<Output = Result<A, D>> + Send + 'static,
        D: fmt::Display,
    {
        let boxed = |mut callback: C| -> Callback {
            Box::new(move |beat| {
                let told = callback(beat);
                Box::pin(async move { told.await.map(drop).map_err(|error| error.to_string()) })
            })
        };
        let beat = OnBeat { every, on_lost: OnBeatLost::Continue, callback: Some(callback), boxed, beating: None };
        self.with_beat(beat)
    }
}

impl<F: Future, C> Observe<F, OnBeat<C>> {
    /// Sets the reaction to a broker that no longer extends the message (default: [`OnBeatLost::Continue`]). A body
    /// that blocks its thread is cancelled only at its next `await`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # use idem_runtime::brokers::OnBeatLost;
    /// const AT_MOST: Duration = Duration::from_secs(11 * 3600);
    ///
    /// #[idempotent(key = "film:{id}", ttl = "7d", store = store)]
    /// async fn encode(store: &MemoryStore, id: u64) -> Result<String, Error> {
    ///     Ok(format!("film {id}"))
    /// }
    ///
    /// async fn extend() -> Result<(), std::io::Error> {
    ///     Ok(())
    /// }
    ///
    /// # async fn deliver(store: &MemoryStore, id: u64) {
    /// let (_, outcome) = observe(encode(store, id))
    ///     .on_beat(Duration::from_secs(10), |beat| async move {
    ///         if beat.elapsed() > AT_MOST {
    ///             beat.lost();
    ///             return Ok(());
    ///         }
    ///         extend().await
    ///     })
    ///     .on_beat_lost(OnBeatLost::Cancel)
    ///     .await;
    /// # let _ = outcome;
    /// # }
    /// ```
    pub fn on_beat_lost(self, on_lost: OnBeatLost) -> Self {
        self.map_beat(|beat| OnBeat { on_lost, ..beat })
    }
}

impl<F: Future, B> Observe<F, B> {
    /// Sets the number of times that the broker has delivered this message, this delivery included:
    /// `ApproximateReceiveCount`, `x-delivery-count` plus one, `delivered`. With this number the pause in `Retry` grows
    /// from delivery to delivery, even if the deliveries start no attempt. If a handler runs for long, its duplicate is
    /// delivered again after a growing number of leases, up to the longest pause of the policy's
    /// [`Backoff`](crate::policy::Backoff).
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     Ok(format!("parcel for {id}"))
    /// # }
    /// # async fn deliver(store: &MemoryStore, id: u64, received: u32) {
    /// let (result, outcome) = observe(ship(store, id)).delivery(received).delivery_limit(5).await;
    /// # let _ = (result, outcome.disposition());
    /// # }
    /// ```
    pub fn delivery(self, number: u32) -> Self {
        self.map_observer(|observer| observer.budget.number = Some(number))
    }

    /// Sets the number of times that the broker delivers a message before it sets the message aside: `maxReceiveCount`,
    /// `x-delivery-limit` plus one, `max_deliver`. Together with [`delivery`](Observe::delivery) the limit gives the
    /// number of deliveries that are left. In the last two deliveries a duplicate of a running attempt waits for that
    /// attempt instead of returning an error, regardless of `in_progress`, for as long as an attempt may run (`timeout`
    /// plus one lease). So the message is not set aside while its work is in progress. At most four duplicates of a
    /// store handle wait for this reason at a time, because each waiting duplicate occupies a slot of its consumer; a
    /// further duplicate returns its error. In the last two deliveries a call whose store does not answer also repeats
    /// its request for up to `timeout` plus one lease. If the broker has a time-out for messages in delivery, combine
    /// the limit with [`on_beat`](Observe::on_beat).
    ///
    /// In the last delivery [`Disposition::Retry`](crate::Disposition::Retry) becomes
    /// [`DeadLetter`](crate::Disposition::DeadLetter), because no further delivery comes, and some brokers then delete
    /// the message. Before the last delivery, a message with a [fingerprint mismatch](Error::FingerprintMismatch) is
    /// delivered again, because the type of the payload may have changed with a deployment.
    ///
    /// A broker that can only redeliver immediately uses up the deliveries of a message quickly. For a broker without
    /// delayed redelivery, set a limit of 1, and no [`delivery`](Observe::delivery) number: then duplicates always
    /// wait.
    pub fn delivery_limit(self, limit: u32) -> Self {
        self.map_observer(|observer| observer.budget.limit = Some(limit))
    }
}
