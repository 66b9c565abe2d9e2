//! The clock of the stream's leader, as its answers show it.
//!
//! A message holds the time at which the leader stored it, and the answer to a question about the stream holds the
//! leader's present time. A decision that frees a key compares these two. Between two questions the store extrapolates
//! the latest answer by its own clock, which measures only how much time has passed since.

use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::clock::Instant;
use crate::sync::{Mutex, lock};

/// Time for which an answer is extrapolated. The two clocks differ in speed by less than 0.1 %, so the extrapolated
/// time is wrong by less than 60 ms. A step of the server's clock is noticed after this time at the latest.
const FRESH_FOR: Duration = Duration::from_secs(60);

/// A time of the leader's clock, in nanoseconds since 1970.
pub(super) type ServerTime = i64;

/// The leader's time in an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) time: ServerTime,
    pub(super) asked: Instant,
    pub(super) answered: Instant,
}

/// The latest answer.
#[derive(Debug, Default)]
pub(super) struct ServerClock(Mutex<Option<Sample>>);

impl ServerClock {
    pub(super) fn note(&self, sample: Sample) {
        *lock(&self.0) = Some(sample);
    }

    pub(super) fn latest(&self) -> Option<Sample> {
        *lock(&self.0)
    }

    /// Returns the range of times within which the leader's clock is at `now`, by an answer that is not too old.
    pub(super) fn range(&self, now: Instant) -> Option<[ServerTime; 2]> {
        let sample = self.latest()?;
        (now.saturating_since(sample.answered) < FRESH_FOR)
            .then(|| [sample.answered, sample.asked].map(|since| after(sample.time, now.saturating_since(since))))
    }

    /// Returns the approximate time of the leader's clock at `now`, for people; `None` before the first answer.
    pub(super) fn about(&self, now: Instant) -> Option<ServerTime> {
        let sample = self.latest()?;
        Some(after(sample.time, now.saturating_since(sample.answered)))
    }
}

/// Returns the time `passed` after `time`.
pub(super) fn after(time: ServerTime, passed: Duration) -> ServerTime {
    time.saturating_add(i64::try_from(passed.as_nanos()).unwrap_or(i64::MAX))
}

/// Returns the time from `earlier` to `later`; zero if `earlier` is the later time.
pub(super) fn since(later: ServerTime, earlier: ServerTime) -> Duration {
    Duration::from_nanos(u64::try_from(later.saturating_sub(earlier)).unwrap_or_default())
}

/// Reads a time of a server, such as `2026-11-27T16:19:23.74054653Z`. Servers write times in UTC.
pub(super) fn read_time(text: &str) -> Option<ServerTime> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    ServerTime::try_from(time.unix_timestamp_nanos()).ok().filter(|time| *time >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::new(Duration::from_secs(seconds))
    }

    #[test]
    fn times_of_servers_are_read() {
        for (text, seconds, nanos) in [
            ("1970-01-01T00:00:00Z", 0, 0),
            ("2026-11-27T16:19:23.74054653Z", 1_795_796_363, 740_546_530),
            ("2024-02-29T23:59:59.000000001Z", 1_709_251_199, 1),
            ("2100-03-01T00:00:00Z", 4_107_542_400, 0),
        ] {
            assert_eq!(read_time(text), Some(seconds * 1_000_000_000 + nanos), "{text}");
        }
        for text in [
            "",
            "0001-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "2263-01-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-13-27T16:19:23Z",
            "2026-11-27",
            "2026-11-27T16:19:-3Z",
        ] {
            assert_eq!(read_time(text), None, "{text}");
        }
    }

    #[test]
    fn the_range_of_the_time_holds_the_time_of_the_request() {
        let clock = ServerClock::default();
        assert_eq!(clock.range(at(1)), None);
        clock.note(Sample { time: 1_000_000_000, asked: at(10), answered: at(12) });
        // The leader wrote its time between second 10 and second 12.
        assert_eq!(clock.range(at(13)), Some([2_000_000_000, 4_000_000_000]));
        assert_eq!(clock.range(at(12 + 60)), None, "an old answer proves nothing");
        assert_eq!(clock.about(at(12 + 60)), Some(61_000_000_000));
    }
}
