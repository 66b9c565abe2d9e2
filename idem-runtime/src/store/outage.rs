//! Log lines about a store or broker that does not answer for a while, alternately fails and answers, or answers
//! slowly: a few lines with counts, and one line when the store or broker answers again. Readiness probes read the same
//! state.

use std::time::Duration;

use super::StoreError;
use super::error::StoreErrorKind;
use crate::clock::Instant;
use crate::metrics::StoreOp;
use crate::sync::SharedOrAnew;
use crate::sync::atomic::{AtomicBool, Ordering};

/// Pause between the first two lines of an outage. The pause doubles with each line up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(30);
/// Longest pause between two lines. If no operation fails for this long, the next outage begins with [`FIRST_PAUSE`].
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Failed operations since the last success, and the time of the next line about them.
#[derive(Default)]
pub(super) struct Outage {
    /// True from a failed operation until a success ends the outage. Every success reads this flag first.
    open: AtomicBool,
    state: SharedOrAnew<OutageState>,
}

#[derive(Debug, Default)]
struct OutageState {
    since: Option<Instant>,
    failed: [u64; 4],
    /// Time of the last failure of each kind of operation; `None` once an operation of that kind has succeeded.
    failing: [Option<Instant>; 4],
    /// True if a line about the current failures was written.
    told: bool,
    last_line: Option<Instant>,
    last_failure: Option<Instant>,
    pause: Duration,
}

/// Content of a log line.
struct LogLine {
    /// Time since the first failure.
    since: Duration,
    /// Number of failures by kind.
    failed: [u64; 4],
    /// True for the first line of an outage.
    is_first: bool,
}

impl Outage {
    /// Counts a failed operation of the kind `what`. Returns the content of a line if a line is due.
    fn fails(&self, what: usize, now: Instant) -> Option<LogLine> {
        let mut state = self.state.lock();
        let passed = |earlier: Option<Instant>| earlier.map(|earlier| now.saturating_since(earlier));
        let quiet = passed(state.last_line);
        let is_new = passed(state.last_failure.replace(now)).is_none_or(|well| well >= LONGEST_PAUSE);
        if !self.open.swap(true, Ordering::Relaxed) && is_new {
            state.failed = [0; 4];
        }
        state.failed[what] += 1;
        state.failing[what] = Some(now);
        let since = *state.since.get_or_insert(now);
        if quiet.is_some_and(|quiet| quiet < state.pause) {
            return None;
        }
        state.pause = if is_new { FIRST_PAUSE } else { (state.pause * 2).min(LONGEST_PAUSE) };
        state.last_line = Some(now);
        let is_first = !std::mem::replace(&mut state.told, true);
        Some(LogLine { since: now.saturating_since(since), failed: state.failed, is_first })
    }

    /// Records a successful operation of the kind `what`. Returns a line if this success ends an outage that was
    /// reported. The function costs one atomic load if no operation has failed.
    #[inline]
    fn succeeds(&self, what: usize, now: impl FnOnce() -> Instant) -> Option<LogLine> {
        if self.open.load(Ordering::Relaxed) { self.ends(what, now()) } else { None }
    }

    #[cold]
    fn ends(&self, what: usize, now: Instant) -> Option<LogLine> {
        let mut state = self.state.lock();
        state.failing[what] = None;
        // A store that renews leases but accepts no results is still in an outage: other kinds of operations must
        // succeed too. A kind of operation whose last failure is older than [`FIRST_PAUSE`] is no longer requested, and
        // does not prolong the outage.
        let goes_on = |failed: &Instant| now.saturating_since(*failed) < FIRST_PAUSE;
        if state.failing.iter().flatten().any(goes_on) {
            return None;
        }
        state.failing = [None; 4];
        self.open.store(false, Ordering::Relaxed);
        let since = state.since.take()?;
        // A single failure between successes gets no log line of its own; a later line includes the failure in
        // its counts.
        if !std::mem::take(&mut state.told) {
            return None;
        }
        let failed = std::mem::take(&mut state.failed);
        Some(LogLine { since: now.saturating_since(since), failed, is_first: false })
    }

    /// Logs that the operation `op` of the store `name` has failed, if a line is due.
    pub(super) fn store_fails(&self, name: &'static str, op: StoreOp, error: &StoreError, now: Instant) {
        if !is_outage(error.kind()) {
            return;
        }
        let Some(LogLine { since, failed, is_first }) = self.fails(kind_of(op), now) else { return };
        let [reservations, renewals, endings, others] = failed;
        let kind = error.kind().label().name();
        if is_first {
            tracing::warn!(
                store = name, kind, %error, reservations, renewals, endings, others,
                "{}; each write is tried again for as long as its lease holds", state(error.kind())
            );
        } else {
            tracing::warn!(
                store = name, kind, %error, ?since, reservations, renewals, endings, others,
                "the outage goes on: {}; so many operations have failed since its beginning", state(error.kind())
            );
        }
    }

    /// Logs that the store `name` answers again, if this success ends an outage.
    #[inline]
    pub(super) fn store_answers(&self, name: &'static str, op: StoreOp, now: impl FnOnce() -> Instant) {
        let Some(LogLine { since, failed, .. }) = self.succeeds(kind_of(op), now) else { return };
        let [reservations, renewals, endings, others] = failed;
        tracing::warn!(
            store = name, after = ?since, reservations, renewals, endings, others,
            "the store answers again; so many operations have failed meanwhile"
        );
    }

    /// Logs that the broker could not extend the message with `key`, if a line is due.
    pub(super) fn broker_fails(&self, key: Option<&crate::key::Key>, elapsed: Duration, error: &str, now: Instant) {
        let key = key.map(tracing::field::display);
        let Some(LogLine { since, failed: [beats, ..], .. }) = self.fails(0, now) else { return };
        tracing::warn!(
            key,
            ?elapsed,
            error,
            ?since,
            beats,
            "the broker could not be told that messages are still being handled; trying again"
        );
    }

    /// Logs that the broker extends messages again, if this success ends an outage.
    pub(super) fn broker_answers(&self, now: impl FnOnce() -> Instant) {
        if let Some(LogLine { since, failed: [beats, ..], .. }) = self.succeeds(0, now) {
            tracing::warn!(after = ?since, beats, "the broker is told again that messages are being handled");
        }
    }
}

/// Returns the kind under which an operation is counted: 0 begins an attempt, 1 renews leases, 2 ends an attempt, 3
/// does anything else.
const fn kind_of(op: StoreOp) -> usize {
    match op {
        StoreOp::Reserve | StoreOp::Begin => 0,
        StoreOp::Renew => 1,
        StoreOp::Finish | StoreOp::Release => 2,
        _ => 3,
    }
}

/// Returns the state of a store whose operations fail with errors of `kind`, as text.
const fn state(kind: StoreErrorKind) -> &'static str {
    match kind {
        StoreErrorKind::Full => "the store is full",
        StoreErrorKind::Misconfigured => {
            "the store refuses: its setup or version, or the rights of the login, are wrong"
        }
        _ => "the store does not answer",
    }
}

/// Returns whether a failure of this kind concerns the whole store. Other failures concern one record.
const fn is_outage(kind: StoreErrorKind) -> bool {
    match kind {
        StoreErrorKind::Unavailable
        | StoreErrorKind::Unconfirmed
        | StoreErrorKind::Misconfigured
        | StoreErrorKind::Full => true,
        StoreErrorKind::Corrupt | StoreErrorKind::TooLarge | StoreErrorKind::Unsupported | StoreErrorKind::Aborted => {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::new(Duration::from_secs(seconds))
    }

    #[test]
    fn ten_minutes_of_store_failures_write_five_log_lines() {
        let outage = Outage::default();
        let lines: Vec<_> = (0..600).filter_map(|second| outage.fails(1, at(second))).collect();
        let times: Vec<_> = lines.iter().map(|line| line.since.as_secs()).collect();
        assert_eq!(times, [0, 30, 90, 210, 450]);
        assert!(lines[0].is_first && !lines[1].is_first);
        assert_eq!(lines[4].failed, [0, 451, 0, 0]);
        let end = outage.succeeds(1, || at(600)).expect("the outage was reported");
        assert_eq!((end.since.as_secs(), end.failed), (600, [0, 600, 0, 0]));
        assert!(outage.succeeds(1, || at(601)).is_none());
    }

    #[test]
    fn an_outage_lasts_while_a_store_accepts_no_results() {
        let outage = Outage::default();
        assert!(outage.fails(2, at(0)).is_some());
        assert!(outage.fails(1, at(1)).is_none());
        for second in 2..30 {
            assert!(outage.succeeds(1, || at(second)).is_none());
            assert!(outage.fails(2, at(second)).is_none());
        }
        assert!(outage.succeeds(1, || at(58)).is_none());
        // No operation writes a result after second 29. At second 59 the failure of second 29 is too old to prolong
        // the outage.
        assert!(outage.succeeds(1, || at(59)).is_some());
    }

    #[test]
    fn rare_failures_of_a_store_are_logged_at_growing_intervals() {
        let outage = Outage::default();
        let mut lines = 0;
        for second in (0..3600).step_by(10) {
            lines += usize::from(outage.fails(1, at(second)).is_some());
            lines += usize::from(outage.succeeds(1, || at(second + 1)).is_some());
        }
        assert!((10..=24).contains(&lines), "{lines}");
        let anew = outage.fails(1, at(10_000)).expect("the pause since the last failure was long");
        assert_eq!(anew.failed, [0, 1, 0, 0]);
    }
}
