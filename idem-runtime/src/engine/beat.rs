//! Deliveries that report to their broker, from time to time, that the message is still being handled.

use std::fmt;
use std::future::Future;
use std::task::Context;
use std::time::Duration;

use super::outcome::{Observe, TimerSlot};
use crate::error::Error;
use crate::store::{Beat, BeatGuard, Callback};

/// Reaction of a delivery whose message the broker no longer extends; see [`Beat::lost`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnBeatLost {
    /// The delivery goes on under its lease. A redelivery finds a running attempt, and gets its result once that
    /// attempt has ended.
    #[default]
    Continue,
    /// The delivery is dropped, and returns [`Error::MessageLost`]: its keys are freed, or count as interrupted under
    /// `on_crash = fail`.
    Cancel,
}

/// Beats of an observed delivery. `O` is the output of the delivery.
pub trait Beats<O> {
    /// True if the beats need a timer.
    #[doc(hidden)]
    const WANTS_TIMER: bool;

    /// Returns the result of a delivery that is cancelled because its message is lost: made from `error`.
    #[doc(hidden)]
    fn lost(&mut self, error: &dyn Fn() -> Error, cx: &Context<'_>) -> Option<O>;

    /// Starts the beats: the delivery waits for something, and `timer` is the timer of its first call.
    #[doc(hidden)]
    fn start(&mut self, timer: &TimerSlot, cx: &Context<'_>);

    /// Stops the beats: the delivery is over.
    #[doc(hidden)]
    fn stop(&mut self);
}

/// Beats of a delivery without [`on_beat`](Observe::on_beat): none.
#[derive(Clone, Copy, Debug)]
pub struct NoBeat;

impl<O> Beats<O> for NoBeat {
    const WANTS_TIMER: bool = false;

    fn lost(&mut self, _: &dyn Fn() -> Error, _: &Context<'_>) -> Option<O> {
        None
    }

    fn start(&mut self, _: &TimerSlot, _: &Context<'_>) {}

    fn stop(&mut self) {}
}

/// Beats of a delivery with [`on_beat`](Observe::on_beat).
pub struct OnBeat<C> {
    every: Duration,
    on_lost: OnBeatLost,
    /// Boxed when the delivery first waits: a handler that is ready immediately costs nothing.
    callback: Option<C>,
    boxed: fn(C) -> Callback,
    beating: Option<BeatGuard>,
}

impl<C> fmt::Debug for OnBeat<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { every, on_lost, .. } = self;
        f.debug_struct("OnBeat").field("every", every).field("on_lost", on_lost).finish_non_exhaustive()
    }
}

impl<C, T, E: From<Error>> Beats<Result<T, E>> for OnBeat<C> {
    const WANTS_TIMER: bool = true;

    fn lost(&mut self, error: &dyn Fn() -> Error, cx: &Context<'_>) -> Option<Result<T, E>> {
        if !self.beating.as_ref()?.is_lost(cx.waker()) || self.on_lost == OnBeatLost::Continue {
            return None;
        }
        Some(Err(E::from(error())))
    }

    fn start(&mut self, timer: &TimerSlot, cx: &Context<'_>) {
        if let TimerSlot::Known(timer, key) = timer
            && let Some(callback) = self.callback.take()
        {
            let beating = self.beating.insert(timer.start(key.clone(), self.every, (self.boxed)(callback)));
            if beating.is_lost(cx.waker()) {
                cx.waker().wake_by_ref();
            }
        }
    }

    fn stop(&mut self) {
        self.beating = None;
    }
}

impl<F, T, E> Observe<F>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    /// Calls `callback` every `every` while the delivery runs, so that the broker does not take the message for lost:
    /// the callback extends a visibility time-out, or reports progress. A good `every` is a third of the broker's
    /// time-out.
    ///
    /// The timer is the same that renews leases. In every mode it starts when the first call of the delivery first
    /// waits, also when the call waits for another attempt. So a handler that is ready immediately costs nothing, and
    /// the part of the delivery before its first call is not covered. The timer goes on between calls, and ends with
    /// the delivery: a running callback is dropped then, so that it extends no message that has been settled. A beat
    /// may come up to an eighth of `every` early.
    ///
    /// The callback is a separate task on the runtime that polls the delivery, which is the runtime of the broker's
    /// client as well. Each delivery has one callback at a time, for at most `every`, or 1 s if that is longer. A
    /// callback that hangs, fails or panics is called again after a quarter of `every`, and affects neither a lease nor
    /// another delivery. A handler that blocks the only thread of its runtime keeps its lease, but has no beats
    /// meanwhile.
    ///
    /// Where the broker has a limit of its own (SQS: 12 h from the first receive), the callback calls [`Beat::lost`] at
    /// that limit. [`on_beat_lost`](Observe::on_beat_lost) sets the reaction.
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
    /// that blocks its thread is cancelled at its next `await`.
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
    /// Sets the number of times that the broker has delivered this message, this time included:
    /// `ApproximateReceiveCount`, `x-delivery-count` plus one, `delivered`. With this number the time in `Retry` grows
    /// with the deliveries, even where no attempt counts them. The duplicate of a handler that runs for long is
    /// delivered again after more leases each time that it finds the same attempt, up to the longest pause of the
    /// policy's [`Backoff`](crate::policy::Backoff).
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
    /// `x-delivery-limit` plus one, `max_deliver`. Together with [`delivery`](Observe::delivery) this gives the number
    /// of deliveries that are left. On the last two deliveries a duplicate of a running attempt waits for that attempt
    /// instead of returning an error, regardless of `in_progress`, for as long as an attempt may run (`timeout`, and a
    /// lease). So the message is not set aside while its work is in progress. At most four duplicates of a store handle
    /// wait this way at a time, because each takes a place of its consumer; any other duplicate gets its answer. A call
    /// whose store does not answer waits for the store for the same time. Combine the limit with
    /// [`on_beat`](Observe::on_beat) where the broker has a time-out.
    ///
    /// On the last delivery [`Disposition::Retry`](crate::Disposition::Retry) becomes
    /// [`DeadLetter`](crate::Disposition::DeadLetter): no other delivery comes, and some brokers then delete the
    /// message. Before the last delivery, a [fingerprint mismatch](Error::FingerprintMismatch) is delivered again,
    /// because the type of the payload may have changed with a deployment.
    ///
    /// A broker that can only redeliver immediately soon has no deliveries left: give a limit of 1 without
    /// [`delivery`](Observe::delivery), and duplicates always wait.
    pub fn delivery_limit(self, limit: u32) -> Self {
        self.map_observer(|observer| observer.budget.limit = Some(limit))
    }
}

/// Delivery count and delivery limit of a message.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Budget {
    number: Option<u32>,
    limit: Option<u32>,
}

impl Budget {
    /// Number of final deliveries on which a duplicate waits instead of returning an error.
    const LAST: u32 = 2;

    /// Fills the parts that are not known here from `outer`.
    pub(super) fn or(self, outer: Self) -> Self {
        Self { number: self.number.or(outer.number), limit: self.limit.or(outer.limit) }
    }

    /// Returns the number of this delivery, if known.
    pub(super) fn number(self) -> Option<u32> {
        self.number
    }

    /// Returns whether this is the last delivery of the message.
    pub(super) fn is_last(self) -> bool {
        matches!((self.number, self.limit), (Some(number), Some(limit)) if number >= limit)
    }

    /// Returns whether the broker is known to deliver the message once more if this delivery fails.
    pub(super) fn has_more(self) -> bool {
        matches!((self.number, self.limit), (Some(number), Some(limit)) if number < limit)
    }

    /// Returns whether the broker may soon set the message aside.
    pub(super) fn is_scarce(self) -> bool {
        // If only the limit is known, each delivery may be the last.
        self.limit.is_some_and(|limit| self.number.unwrap_or(limit).saturating_add(Self::LAST) > limit)
    }
}
