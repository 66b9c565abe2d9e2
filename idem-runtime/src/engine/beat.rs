//! Beats of deliveries: periodic signals to the broker that the message is still being handled.

use std::fmt;
use std::task::Context;
use std::time::Duration;

use crate::error::Error;
use crate::key::Key;
use crate::store::{BeatGuard, Callback, Timer};

/// Reaction of a delivery to [`Beat::lost`](crate::store::Beat::lost). The callback of the beats calls `lost` to report
/// that the broker no longer extends the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnBeatLost {
    /// The delivery goes on under its lease. A redelivery of the message finds a running attempt, and gets the result
    /// once that attempt has ended.
    #[default]
    Continue,
    /// The delivery is dropped, and returns [`Error::MessageLost`]: its keys are freed, or are interrupted under
    /// `on_crash = fail`.
    Cancel,
}

/// Beats of an observed delivery. `O` is the type of the delivery's output.
pub trait Beats<O> {
    /// True if the beats need a timer.
    #[doc(hidden)]
    const WANTS_TIMER: bool;

    /// Returns the output of a delivery that is cancelled because the broker no longer extends its message; `None` if
    /// the delivery goes on. `error` makes the error of a cancelled delivery.
    #[doc(hidden)]
    fn lost(&mut self, error: &dyn Fn() -> Error, cx: &Context<'_>) -> Option<O>;

    /// Starts the beats when the delivery first waits. `timer` is the timer of the delivery's first call.
    #[doc(hidden)]
    fn start(&mut self, timer: &TimerSlot, cx: &Context<'_>);

    /// Stops the beats when the delivery is over.
    #[doc(hidden)]
    fn stop(&mut self);
}

/// Absence of beats: the delivery has no [`on_beat`](crate::future::Observe::on_beat).
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

/// Beats of a delivery with [`on_beat`](crate::future::Observe::on_beat).
pub struct OnBeat<C> {
    pub(super) every: Duration,
    pub(super) on_lost: OnBeatLost,
    /// Callback of the beats. The callback is boxed when the delivery first waits, so that a handler that is ready
    /// immediately allocates nothing.
    pub(super) callback: Option<C>,
    pub(super) boxed: fn(C) -> Callback,
    pub(super) beating: Option<BeatGuard>,
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

/// Timer of a delivery's first call, for a delivery that needs a timer.
#[derive(Clone, Debug, Default)]
pub enum TimerSlot {
    #[default]
    Unwanted,
    Wanted,
    Known(Timer, Option<Key>),
}
