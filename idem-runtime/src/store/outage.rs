//! Log lines about a store or broker that does not answer for a while, alternately fails and answers, or answers
//! slowly: a few lines with counts, and one line when the store or broker answers again. Readiness probes read the same
//! state.

use std::time::Duration;

use super::StoreError;
use super::error::StoreErrorKind;
use crate::clock::Instant;
use crate::metrics::StoreOp;
use crate::sync::SharedOrAnew;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Pause between the first two lines of an outage. The pause doubles with each line up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(30);
/// Longest pause between two lines. If no operation fails for this long, the next outage begins with [`FIRST_PAUSE`].
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Least value of [`OutageState::turns`] at which the log line states that the store alternately fails and answers.
const TURNS: u32 = 2;
/// Shortest duration of a slow operation. The alert `IdemStoreSlow` has the same limit.
pub(super) const SLOW: Duration = Duration::from_millis(500);
/// Number of slow operations in a row after which the store is slow.
const SLOW_IN_A_ROW: u32 = 3;

/// An outage: the failed operations, and the times that decide when the next log line is due.
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
    /// Error of the last failed operation of each kind in `failing`.
    errors: [Option<StoreError>; 4],
    /// Number of times in a row that an operation failed again after a success, within [`FIRST_PAUSE`] of the failure
    /// before.
    turns: u32,
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
    phase: OutagePhase,
}

/// Phase of an outage at one of its log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OutagePhase {
    Begins,
    GoesOn,
    /// Operations alternately fail and succeed.
    Turns,
    Ends,
}

impl Outage {
    /// Returns whether an operation has failed, and no later success has ended the outage.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Counts a failed operation of the kind `what`. Returns the content of a line if a line is due.
    fn fails(&self, what: usize, error: Option<&StoreError>, now: Instant) -> Option<LogLine> {
        let mut state = self.state.lock();
        let passed = |earlier: Option<Instant>| earlier.map(|earlier| now.saturating_since(earlier));
        let quiet = passed(state.last_line);
        let since_failure = passed(state.last_failure.replace(now));
        let is_new = since_failure.is_none_or(|well| well >= LONGEST_PAUSE);
        let has_answered = state.has_answered() || !self.open.swap(true, Ordering::Relaxed);
        if has_answered && is_new {
            (state.failed, state.told, state.since) = ([0; 4], false, None);
        }
        // True if the store has answered since the last failure, and fails again soon after that failure.
        let turns_again = has_answered && since_failure.is_some_and(|well| well < FIRST_PAUSE);
        state.turns = if turns_again {
            state.turns.saturating_add(1)
        } else if has_answered {
            0
        } else {
            state.turns
        };
        state.failed[what] += 1;
        state.failing[what] = Some(now);
        state.errors[what] = error.cloned();
        let since = *state.since.get_or_insert(now);
        // The first line of the phase `Turns` is due immediately: the line before it may state that the store answers
        // again.
        let is_first_turn = turns_again && state.turns == TURNS;
        if !is_first_turn && quiet.is_some_and(|quiet| quiet < state.pause) {
            return None;
        }
        state.pause = if is_new { FIRST_PAUSE } else { (state.pause * 2).min(LONGEST_PAUSE) };
        state.last_line = Some(now);
        let phase = match (std::mem::replace(&mut state.told, true), state.turns >= TURNS) {
            (_, true) => OutagePhase::Turns,
            (false, _) => OutagePhase::Begins,
            (true, _) => OutagePhase::GoesOn,
        };
        Some(LogLine { since: now.saturating_since(since), failed: state.failed, phase })
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
        state.errors[what] = None;
        // A store that renews leases but accepts no results is still in an outage: other kinds of operations must
        // succeed too. A kind of operation whose last failure is older than [`FIRST_PAUSE`] is no longer requested, and
        // does not prolong the outage.
        let goes_on = |failed: &Instant| now.saturating_since(*failed) < FIRST_PAUSE;
        if state.failing.iter().flatten().any(goes_on) {
            return None;
        }
        state.failing = [None; 4];
        state.errors = Default::default();
        // A store that alternately fails and answers has recovered once no operation has failed for a while.
        let has_failed_lately = state.last_failure.as_ref().is_some_and(goes_on);
        if has_failed_lately && state.turns >= TURNS {
            return None;
        }
        if !has_failed_lately {
            state.turns = 0;
        }
        self.open.store(false, Ordering::Relaxed);
        let since = state.since.take()?;
        // A single failure between successes gets no log line of its own; a later line includes the failure in
        // its counts.
        if !std::mem::take(&mut state.told) {
            return None;
        }
        let failed = std::mem::take(&mut state.failed);
        Some(LogLine { since: now.saturating_since(since), failed, phase: OutagePhase::Ends })
    }

    /// Returns the error of the latest operation of a call that failed within the last [`FIRST_PAUSE`], and the time
    /// since this failure; `None` if an operation of its kind has succeeded since. A failure does not count for longer:
    /// a process that gets no calls because it is not ready could never become ready.
    pub(super) fn failing_calls(&self, now: Instant) -> Option<(StoreError, Duration)> {
        if !self.open.load(Ordering::Relaxed) {
            return None;
        }
        let state = self.state.lock();
        // Pings, lists and decisions belong to the last kind, which calls don't use.
        let failing = state.failing.iter().zip(&state.errors).take(OTHERS);
        let failing = failing.filter_map(|(at, error)| Some((error.clone()?, now.saturating_since((*at)?))));
        failing.min_by_key(|(_, ago)| *ago).filter(|(_, ago)| *ago < FIRST_PAUSE)
    }

    /// Logs that the operation `op` of the store `name` has failed, if a line is due.
    pub(super) fn store_fails(&self, name: &'static str, op: StoreOp, error: &StoreError, now: Instant) {
        if !is_outage(error.kind()) {
            return;
        }
        let Some(LogLine { since, failed, phase }) = self.fails(kind_of(op), Some(error), now) else { return };
        let [reservations, renewals, endings, others] = failed;
        let kind = error.kind().label().name();
        match phase {
            OutagePhase::Begins => tracing::warn!(
                store = name, kind, %error, reservations, renewals, endings, others,
                "{}; each write is tried again for as long as its lease holds. `idem doctor` names the cause",
                state(error.kind())
            ),
            OutagePhase::Turns => tracing::warn!(
                store = name, kind, %error, ?since, reservations, renewals, endings, others,
                "the store fails and answers by turns; so many operations have failed since the first of these failures"
            ),
            OutagePhase::GoesOn | OutagePhase::Ends => tracing::warn!(
                store = name, kind, %error, ?since, reservations, renewals, endings, others,
                "the outage goes on: {}; so many operations have failed since its beginning", state(error.kind())
            ),
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
        let Some(LogLine { since, failed: [beats, ..], .. }) = self.fails(0, None, now) else { return };
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

impl OutageState {
    /// Returns true if no kind of operation is failing although the outage is open: the store alternately fails and
    /// answers.
    fn has_answered(&self) -> bool {
        self.turns >= TURNS && self.failing.iter().all(Option::is_none)
    }
}

/// Slow operations since the last fast one.
#[derive(Default)]
pub(super) struct Slowness {
    /// Number of slow operations in a row. Every fast operation reads this number.
    in_a_row: AtomicU32,
    /// Paces the log lines, as for an outage.
    outage: Outage,
}

impl Slowness {
    /// Records that the operation `op` of the store `name` has succeeded, and logs if a line is due. The function costs
    /// two atomic loads if no operation was slow.
    pub(super) fn took(&self, name: &'static str, op: StoreOp, took: Duration, now: impl FnOnce() -> Instant) {
        // Only operations of calls are judged: other operations read many records, or wait.
        if kind_of(op) == OTHERS {
            return;
        }
        if took < SLOW {
            if self.in_a_row.load(Ordering::Relaxed) != 0 {
                self.in_a_row.store(0, Ordering::Relaxed);
            }
            if let Some(LogLine { since, failed: [count, ..], .. }) = self.outage.succeeds(0, now) {
                tracing::warn!(store = name, after = ?since, count, "the store answers quickly again");
            }
            return;
        }
        let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if in_a_row < SLOW_IN_A_ROW {
            return;
        }
        if let Some(LogLine { since, failed: [count, ..], .. }) = self.outage.fails(0, None, now()) {
            tracing::warn!(
                store = name,
                op = op.name(),
                ?took,
                ?since,
                count,
                "the store is slow: each of its operations takes more than {SLOW:?}. `idem doctor` measures its round trips"
            );
        }
    }

    /// Returns the time for which the store has been slow; `None` if it is not slow.
    pub(super) fn lasts(&self, now: Instant) -> Option<Duration> {
        let is_slow = self.in_a_row.load(Ordering::Relaxed) >= SLOW_IN_A_ROW;
        let since = self.outage.state.lock().since.filter(|_| is_slow)?;
        Some(now.saturating_since(since))
    }
}

/// Kind of the operations that are not part of a call; see [`kind_of`].
const OTHERS: usize = 3;

/// Returns the kind under which an operation is counted: 0 begins an attempt, 1 renews leases or journals steps, 2 ends
/// an attempt, 3 does anything else.
const fn kind_of(op: StoreOp) -> usize {
    match op {
        StoreOp::Reserve | StoreOp::Begin => 0,
        StoreOp::Renew | StoreOp::Append => 1,
        StoreOp::Finish | StoreOp::Release => 2,
        _ => OTHERS,
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
        let lines: Vec<_> = (0..600).filter_map(|second| outage.fails(1, None, at(second))).collect();
        let times: Vec<_> = lines.iter().map(|line| line.since.as_secs()).collect();
        assert_eq!(times, [0, 30, 90, 210, 450]);
        assert_eq!([lines[0].phase, lines[1].phase], [OutagePhase::Begins, OutagePhase::GoesOn]);
        assert_eq!(lines[4].failed, [0, 451, 0, 0]);
        let end = outage.succeeds(1, || at(600)).expect("the outage was reported");
        assert_eq!((end.since.as_secs(), end.failed), (600, [0, 600, 0, 0]));
        assert!(outage.succeeds(1, || at(601)).is_none());
    }

    #[test]
    fn an_outage_lasts_while_a_store_accepts_no_results() {
        let outage = Outage::default();
        assert!(outage.fails(2, None, at(0)).is_some());
        assert!(outage.fails(1, None, at(1)).is_none());
        for second in 2..30 {
            assert!(outage.succeeds(1, || at(second)).is_none());
            assert!(outage.fails(2, None, at(second)).is_none());
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
            lines += usize::from(outage.fails(1, None, at(second)).is_some());
            lines += usize::from(outage.succeeds(1, || at(second + 1)).is_some());
        }
        assert!((10..=24).contains(&lines), "{lines}");
        let anew = outage.fails(1, None, at(10_000)).expect("the pause since the last failure was long");
        assert_eq!(anew.failed, [0, 1, 0, 0]);
    }

    #[test]
    fn a_store_that_fails_and_answers_by_turns_is_logged_until_it_recovers() {
        let outage = Outage::default();
        let mut lines = Vec::new();
        for second in 0..100 {
            let line = match second % 2 {
                0 => outage.fails(0, None, at(second)),
                _ => outage.succeeds(0, || at(second)),
            };
            lines.extend(line.map(|line| (second, line.phase)));
        }
        assert_eq!(lines[..3], [(0, OutagePhase::Begins), (1, OutagePhase::Ends), (4, OutagePhase::Turns)]);
        assert!(lines[3..].iter().all(|(_, phase)| *phase == OutagePhase::Turns) && lines.len() >= 4, "{lines:?}");
        assert!(outage.succeeds(0, || at(127)).is_none(), "the last failure was 29 s ago");
        let end = outage.succeeds(0, || at(128)).expect("no operation has failed for 30 s");
        assert_eq!((end.phase, end.failed[0]), (OutagePhase::Ends, 49));
        assert_eq!(outage.fails(0, None, at(1000)).map(|line| line.phase), Some(OutagePhase::Begins));
    }

    #[test]
    fn a_failed_call_is_reported_until_a_call_succeeds_or_thirty_seconds_have_passed() {
        let (outage, error) = (Outage::default(), StoreError::new(StoreErrorKind::Full, "full"));
        assert!(outage.failing_calls(at(0)).is_none());
        outage.fails(0, Some(&error), at(1));
        assert_eq!(outage.failing_calls(at(11)).expect("a call failed").1.as_secs(), 10);
        // The success of another kind of operation does not show that reservations succeed.
        assert!(outage.succeeds(OTHERS, || at(12)).is_none());
        assert!(outage.failing_calls(at(30)).is_some() && outage.failing_calls(at(31)).is_none());
        outage.fails(0, Some(&error), at(40));
        outage.succeeds(0, || at(41));
        assert!(outage.failing_calls(at(41)).is_none());
        outage.fails(OTHERS, Some(&error), at(50));
        assert!(outage.failing_calls(at(50)).is_none(), "a failed ping is no call");
    }

    #[test]
    fn a_slow_store_is_reported_until_it_is_quick_again() {
        let slowness = Slowness::default();
        let took = |op, ms, second| slowness.took("redis", op, Duration::from_millis(ms), || at(second));
        took(StoreOp::Reserve, 900, 0);
        took(StoreOp::Finish, 900, 1);
        assert_eq!(slowness.lasts(at(1)), None, "two slow operations may be chance");
        took(StoreOp::Wait, 1, 1);
        took(StoreOp::Reserve, 900, 2);
        assert_eq!(slowness.lasts(at(9)), Some(Duration::from_secs(7)));
        took(StoreOp::Renew, 1, 10);
        assert_eq!(slowness.lasts(at(10)), None);
    }
}
