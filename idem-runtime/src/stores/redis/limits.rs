//! The largest size of a value that the server takes.
//!
//! A server refuses a value over `proto-max-bulk-len` by closing the connection, and the reason that the server
//! sends may get lost with the connection. So the store asks a server for its limit when it connects, and does not
//! send a larger value. If the login may not ask, or if a proxy has a smaller limit, the store learns the limit
//! from failures. Values that may be too large are sent over a separate connection: if that connection is closed,
//! no other operation fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::Value;

use super::failure::{ErrorReply, ExchangeFailure, failed, too_large};
use crate::clock::{Clock, Instant};
use crate::store::StoreError;
use crate::sync::{Mutex, PerProcess, lock};

/// Smallest limit that a server can be configured to, in bytes. A smaller value is never the reason for a failure.
pub(super) const SURE: usize = 1024 * 1024;
/// Default limit of a server, in bytes.
const DEFAULT: usize = 512 * 1024 * 1024;
/// Number of connections in a row that must break while a large value is sent before the store takes the size as the
/// reason.
const BREAKS: u32 = 4;
/// Time for which a learned limit applies. Afterwards the store tries again: an operator may have raised the server's
/// limit, or the network may have been the reason for the failures.
const LEARNED_FOR: Duration = Duration::from_secs(60);

/// The strictest limits among the servers of a store.
pub(super) struct Limits {
    /// Smallest limit that a server has reported; [`UNTOLD`] if no server has reported a limit.
    told: AtomicUsize,
    learned: PerProcess<Mutex<LearnedLimits>>,
}

/// Value of `told` while no server has reported a limit.
const UNTOLD: usize = usize::MAX;

#[derive(Clone, Default, Debug)]
struct LearnedLimits {
    /// Smallest size, in bytes, of the values that are refused as too large, and the time until which they are refused.
    too_large: Option<(usize, Instant)>,
    /// Size in bytes of the smallest value that was being sent when one of the latest connections broke, and the number
    /// of these connections.
    broke: Option<(usize, u32)>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { told: AtomicUsize::new(UNTOLD), learned: PerProcess::default() }
    }
}

impl Limits {
    /// Notes that a server takes values up to `most` bytes.
    pub(super) fn configure(&self, most: usize) {
        self.told.fetch_min(most, Ordering::Relaxed);
    }

    /// Takes over the limit that servers have reported to `other`, if that limit is smaller.
    pub(super) fn configure_from(&self, other: &Self) {
        self.configure(other.told.load(Ordering::Relaxed));
    }

    /// Refuses a value that some server would not take.
    pub(super) fn check(&self, bytes: usize, clock: &dyn Clock) -> Result<(), StoreError> {
        if bytes < SURE {
            return Ok(());
        }
        let told = match self.told.load(Ordering::Relaxed) {
            UNTOLD => DEFAULT,
            told => told,
        };
        let learned = lock(self.learned.copied()).too_large.filter(|(_, until)| *until > clock.now());
        match learned {
            _ if bytes > told => Err(too_large(bytes, told)),
            Some((least, _)) if bytes >= least => Err(too_large(bytes, least - 1)),
            _ => Ok(()),
        }
    }

    /// Learns a limit from the answer to a write of `bytes` bytes.
    pub(super) fn learn(
        &self,
        bytes: usize,
        answer: Result<Value, ExchangeFailure>,
        clock: &dyn Clock,
    ) -> Result<Value, StoreError> {
        if bytes < SURE {
            return answer.map_err(failed);
        }
        let mut learned = lock(self.learned.copied());
        let is_reason = match &answer {
            Ok(_) => {
                learned.broke = learned.broke.filter(|(least, _)| *least > bytes);
                false
            }
            Err(ExchangeFailure::Refused(refusal)) => is_about_size(refusal),
            Err(ExchangeFailure::Broken(_)) => {
                let (least, breaks) = learned.broke.unwrap_or((bytes, 0));
                learned.broke = Some((least.min(bytes), breaks + 1));
                bytes >= least && breaks + 1 >= BREAKS
            }
            Err(_) => false,
        };
        if !is_reason {
            return answer.map_err(failed);
        }
        learned.too_large = Some((bytes, clock.now().saturating_add(LEARNED_FOR)));
        learned.broke = None;
        Err(too_large(bytes, bytes - 1))
    }
}

/// Returns whether the server refused to read a value because of its size.
fn is_about_size(ErrorReply { message, .. }: &ErrorReply) -> bool {
    message.starts_with("Protocol error: invalid bulk length")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use redis::{ErrorKind, RedisError};

    use super::*;
    use crate::clock::ManualClock;
    use crate::store::StoreErrorKind;

    const MIB: usize = 1024 * 1024;

    fn kind<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> StoreErrorKind {
        answer.unwrap_err().kind()
    }

    #[test]
    fn a_size_limit_that_the_server_reports_replaces_the_default() {
        let (limits, clock) = (Limits::default(), ManualClock::new());
        limits.configure(3 * MIB);
        limits.configure(2 * MIB);
        assert!(limits.check(2 * MIB, &clock).is_ok());
        assert_eq!(kind(limits.check(2 * MIB + 1, &clock)), StoreErrorKind::TooLarge);
        assert_eq!(kind(Limits::default().check(DEFAULT + 1, &clock)), StoreErrorKind::TooLarge);
        // A server can be configured to take more than the default.
        let limits = Limits::default();
        limits.configure(2 * DEFAULT);
        assert!(limits.check(DEFAULT + 1, &clock).is_ok());
    }

    #[test]
    fn a_value_size_that_the_server_refused_counts_as_too_large_for_a_while() {
        let (limits, clock) = (Limits::default(), ManualClock::new());
        let refused = || {
            let message = "Protocol error: invalid bulk length";
            Err(ExchangeFailure::Refused(ErrorReply { code: "ERR".into(), message: message.into() }))
        };
        assert_eq!(kind(limits.learn(3 * MIB, refused(), &clock)), StoreErrorKind::TooLarge);
        assert_eq!(kind(limits.check(3 * MIB, &clock)), StoreErrorKind::TooLarge);
        assert!(limits.check(3 * MIB - 1, &clock).is_ok());
        // A small value is not too large, even if its connection was closed because of a large value.
        assert_eq!(kind(limits.learn(10, refused(), &clock)), StoreErrorKind::Unavailable);
        clock.advance(LEARNED_FOR);
        assert!(limits.check(3 * MIB, &clock).is_ok());
    }

    #[test]
    fn a_value_counts_as_too_large_if_connections_keep_breaking_under_it() {
        let (limits, clock) = (Limits::default(), ManualClock::new());
        let broken = || Err(ExchangeFailure::Broken(Arc::new(RedisError::from((ErrorKind::Io, "closed")))));
        for _ in 1..BREAKS {
            assert_eq!(kind(limits.learn(3 * MIB, broken(), &clock)), StoreErrorKind::Unconfirmed);
            assert_eq!(kind(limits.learn(10, broken(), &clock)), StoreErrorKind::Unconfirmed);
        }
        // A value that gets through resets the count.
        limits.learn(4 * MIB, Ok(Value::Int(1)), &clock).unwrap();
        for _ in 1..BREAKS {
            assert_eq!(kind(limits.learn(3 * MIB, broken(), &clock)), StoreErrorKind::Unconfirmed);
        }
        assert_eq!(kind(limits.learn(3 * MIB, broken(), &clock)), StoreErrorKind::TooLarge);
        assert_eq!(kind(limits.check(3 * MIB, &clock)), StoreErrorKind::TooLarge);
        assert!(limits.check(2 * MIB, &clock).is_ok());
    }
}
