//! Delivery limit of a message, and the pauses between its deliveries.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::SystemClock;
use crate::error::Disposition;
use crate::key::Key;
use crate::policy::Backoff;
use crate::store::StoreContext;
use crate::sync::SharedOnce;

/// Delivery count and delivery limit of a message.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Budget {
    pub(super) number: Option<u32>,
    pub(super) limit: Option<u32>,
}

impl Budget {
    /// Number of final deliveries in which a duplicate waits instead of returning an error.
    const LAST: u32 = 2;

    /// Returns this budget with its unknown parts taken from `outer`.
    pub(super) fn or(self, outer: Self) -> Self {
        Self { number: self.number.or(outer.number), limit: self.limit.or(outer.limit) }
    }

    /// Returns the number of this delivery, if it is known.
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

    /// Returns whether few deliveries are left before the broker sets the message aside.
    pub(super) fn is_scarce(self) -> bool {
        // If only the limit is known, any delivery may be the last delivery.
        self.limit.is_some_and(|limit| self.number.unwrap_or(limit).saturating_add(Self::LAST) > limit)
    }
}

impl Budget {
    /// Returns the disposition of a message that is to be delivered again. In its last delivery the message becomes a
    /// dead letter, because some brokers delete a message after its last delivery. Otherwise the message is delivered
    /// again after `after`. If `after` is unknown, the pause is at least `again`, and grows with the number of
    /// deliveries if the broker reports that number.
    pub(super) fn retry(self, after: Option<Duration>, again: Option<Duration>, key: Option<&Key>) -> Disposition {
        match self.is_last() {
            true => Disposition::DeadLetter,
            false => Disposition::Retry { after: after.unwrap_or_else(|| self.pause(again, key)) },
        }
    }

    /// Returns the pause before the next delivery; `again` is the least pause, if known.
    pub(super) fn pause(self, again: Option<Duration>, key: Option<&Key>) -> Duration {
        let (seed, again) = match key {
            Some(key) => (key.spread(), again),
            // A run in simulated time must be repeatable to the byte, so the seed is constant.
            None if unreached_calls().clock().is_moved() => (0, again),
            None => {
                let seed = unreached_calls().new_owner().seed();
                (seed, again.or_else(|| Some(Backoff::DEFAULT.during(unreached_calls().store_failed(), seed))))
            }
        };
        match (self.number(), again) {
            (None, Some(again)) => again,
            (number, again) => Backoff::DEFAULT.after(number.unwrap_or(1), seed).max(again.unwrap_or_default()),
        }
    }
}

/// Returns a context without a store. Its outage record holds the time since which no delivery of this process has
/// reached a call, usually because no connection was available.
pub(super) fn unreached_calls() -> &'static StoreContext {
    static UNREACHED: SharedOnce<StoreContext> = SharedOnce::new();
    UNREACHED.get_or_init(|| StoreContext::without_renewal("none", Arc::new(SystemClock::default())))
}

/// Returns the pause of a delivery that reached no call. The pause grows until another delivery reaches a call.
#[cfg(feature = "within")]
pub(crate) fn unreached() -> Duration {
    Backoff::DEFAULT.during(unreached_calls().store_failed(), unreached_calls().new_owner().seed())
}
