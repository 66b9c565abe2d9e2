//! Advice about a record: the effect of the next delivery, and the commands for an operator.

use std::time::Duration;

use idem_runtime::OnCrash;
use idem_runtime::record::{Record, State, StoredResult};

use crate::steps::doubts;

/// Returns the effect of the next delivery with the same payload, and the commands for an operator. `lapses_in` is the
/// time until the lease of a pending record lapses.
///
/// A step in doubt holds up the operation unless its handler has a reaction of its own, which a record does not hold.
///
/// A record does not hold the `max_attempts` of its handler, so the text names the largest `max_attempts` under which
/// no delivery runs.
pub(crate) fn advice(record: &Record, lapses_in: Duration) -> String {
    let doubts = doubts(record);
    let at_doubts = doubts.as_ref().map_or(String::new(), |steps| {
        format!(
            " and asks the reconciler of {steps}, or is refused there: `idem resolve --step` records whether its effect \
             happened"
        )
    });
    let may_run = |verb: &str| match (record.attempt, record.attempts_counted()) {
        (u32::MAX, _) => {
            "no delivery runs: attempts can't be numbered any further; `idem forget` lets the next delivery \
                          run as the first one"
                .to_owned()
        }
        (_, 0) => format!("the next delivery {verb}{at_doubts}"),
        (_, counted) => format!(
            "the next delivery {verb}{at_doubts}, unless `max_attempts` of its handler is {counted} or less: then it ends \
             with `AttemptsExhausted`, and `idem reopen` lets the next one run"
        ),
    };
    match &record.state {
        State::Pending { .. } if !lapses_in.is_zero() => {
            "it is running; if its process is gone for sure: `idem release --break-lease`".to_owned()
        }
        State::Pending { on_crash: OnCrash::Fail, begun: true, .. } | State::Interrupted if doubts.is_some() => {
            let steps = doubts.unwrap_or_default();
            format!(
                "nothing runs until you decide, or the reconciler of its handler, if it has one, knows: find out whether the \
                 effect of {steps} happened; `idem resolve --step` records that, and the next delivery runs"
            )
        }
        State::Pending { on_crash: OnCrash::Fail, begun: true, .. } | State::Interrupted => {
            "nothing runs until you decide, or the reconciler of its handler, if it has one, knows: find out whether the \
             effect happened; `idem resolve` if it did, `idem reopen` if it did not"
                .to_owned()
        }
        State::Pending { .. } => may_run("takes over"),
        State::Released => may_run("runs"),
        State::Completed(StoredResult::TooLarge { .. } | StoredResult::Unencodable) => {
            "duplicates get an error that says so; `idem resolve --completed FILE` supplies the result, \
             `--http-response FILE` that of a request"
                .to_owned()
        }
        State::Failed(StoredResult::TooLarge { .. } | StoredResult::Unencodable) => {
            "duplicates get an error that says so; `idem resolve --failed FILE` supplies the handler's own error".to_owned()
        }
        State::Completed(StoredResult::Unreadable { .. }) | State::Failed(StoredResult::Unreadable { .. }) => {
            "duplicates get an error that says so; `idem resolve --replace` records another result".to_owned()
        }
        _ => "duplicates are answered with the result; `idem resolve --replace` if it is wrong".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use bytes::Bytes;
    use idem_runtime::codec::CodecName;
    use idem_runtime::record::{Admission, Ruling};
    use idem_runtime::store::{Action, Decision, Finish, Inspection, Journal, OwnerToken, Reservation, ReserveRequest};
    use idem_runtime::{Json, Key};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// Journal of version 1 in which step `pay` of attempt 1 has begun.
    const DOUBTFUL: &[u8] = b"\x01\0\x03pay\0\0\0\x01\0\x04";

    fn encoded() -> StoredResult {
        StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: Bytes::from_static(b"7") }
    }

    /// Returns records in every state, with every combination of the facts on which a reservation depends.
    fn records() -> Vec<(Record, Duration)> {
        let results = || {
            let reason = "a part is missing".into();
            [
                encoded(),
                StoredResult::TooLarge { size: 9 },
                StoredResult::Unencodable,
                StoredResult::Unreadable { reason },
            ]
        };
        let mut states = vec![State::Released, State::Interrupted];
        states.extend(results().map(State::Completed));
        states.extend(results().map(State::Failed));
        for on_crash in [OnCrash::Retry, OnCrash::Fail] {
            states.extend([false, true].map(|begun| State::Pending { lease: LONG, ttl: LONG, on_crash, begun }));
        }
        let mut records = Vec::new();
        for state in states {
            for (attempt, used) in [(1, 0), (1, 1), (2, 1), (3, 3), (7, 4), (u32::MAX, 2)] {
                for lapses_in in [Duration::ZERO, LONG] {
                    let mut record = Record::new(OwnerToken::from_bytes([1; 16]), attempt, state.clone());
                    record.attempts_used = used;
                    records.push((record.clone(), lapses_in));
                    if state.result().is_none() {
                        record.journal = Journal::new(DOUBTFUL);
                        records.push((record, lapses_in));
                    }
                }
            }
        }
        records
    }

    /// Returns the answer to a delivery that `sentence` announces, under this `max_attempts`.
    fn announced(sentence: &str, max_attempts: Option<NonZeroU32>) -> &'static str {
        let exhausting = sentence.split_once("`max_attempts` of its handler is ");
        let exhausting = exhausting.and_then(|(_, rest)| rest.split(' ').next()?.parse::<u32>().ok());
        let is_exhausted = exhausting.zip(max_attempts).is_some_and(|(used, most)| most.get() <= used);
        let announced = [
            ("it is running", "in progress"),
            ("nothing runs until you decide", "interrupted"),
            ("no delivery runs: attempts", "exhausted"),
            ("the next delivery", if is_exhausted { "exhausted" } else { "runs" }),
            ("duplicates are answered with the result", "result"),
            ("duplicates get an error", "no result"),
        ];
        let found = announced.into_iter().find(|(begin, _)| sentence.starts_with(begin));
        found.unwrap_or_else(|| panic!("an unknown sentence: {sentence}")).1
    }

    /// Returns the answer of the record to a delivery whose policy has the `on_crash` of the record.
    fn answered(record: &Record, lapses_in: Duration, max_attempts: Option<NonZeroU32>) -> &'static str {
        let on_crash = match record.state {
            State::Pending { on_crash, .. } => on_crash,
            _ => OnCrash::Retry,
        };
        let key: Key = "pay/42".parse().unwrap();
        let request = ReserveRequest::new(key, OwnerToken::from_bytes([2; 16]), LONG, LONG);
        match record.admit(&request.on_crash(on_crash).max_attempts(max_attempts), lapses_in) {
            Admission::Replace { with, takeover } => {
                assert_eq!((with.attempt, takeover), (record.attempt + 1, record.is_pending()));
                "runs"
            }
            Admission::Answer(Reservation::InProgress { .. }) => "in progress",
            Admission::Answer(Reservation::Interrupted { .. }) => "interrupted",
            Admission::Answer(Reservation::AttemptsExhausted { .. }) => "exhausted",
            Admission::Answer(_) => match record.state.result() {
                Some(StoredResult::Encoded { .. }) => "result",
                _ => "no result",
            },
        }
    }

    #[test]
    fn the_advice_about_each_record_is_what_a_reservation_answers() {
        let mut answers = std::collections::BTreeMap::<_, u32>::new();
        for (record, lapses_in) in records() {
            let sentence = advice(&record, lapses_in);
            for most in [None, Some(1), Some(2), Some(3), Some(4), Some(5)] {
                let most = most.and_then(NonZeroU32::new);
                let answer = answered(&record, lapses_in, most);
                assert_eq!(announced(&sentence, most), answer, "{sentence}\n{record:?} under {most:?}");
                *answers.entry(answer).or_default() += 1;
            }
        }
        assert_eq!(answers.len(), 6, "{answers:?}");
    }

    #[test]
    fn a_step_in_doubt_is_in_the_advice_unless_the_operation_runs() {
        for (record, lapses_in) in records() {
            let is_running = record.is_pending() && !lapses_in.is_zero();
            let is_named = advice(&record, lapses_in).contains("step `pay`");
            let says_so = record.journal.is_some() && !is_running && record.attempt < u32::MAX;
            let waits = matches!(
                record.state,
                State::Interrupted | State::Pending { begun: true, on_crash: OnCrash::Fail, .. }
            );
            assert_eq!(is_named, says_so || (record.journal.is_some() && !is_running && waits), "{record:?}");
        }
    }

    #[test]
    fn each_command_in_the_advice_is_possible_for_the_record() {
        let key: Key = "pay/42".parse().unwrap();
        for (record, lapses_in) in records() {
            let sentence = advice(&record, lapses_in);
            let completes = || Finish::Completed(encoded());
            let actions = [
                ("`idem release --break-lease`", Action::BreakLease),
                ("`idem resolve`", Action::Resolve(completes())),
                ("`idem resolve --step`", Action::ReopenWith(Journal::new(DOUBTFUL))),
                ("`idem resolve --completed FILE`", Action::Resolve(completes())),
                ("`idem resolve --failed FILE`", Action::Resolve(Finish::Failed(encoded()))),
                ("`idem resolve --replace`", Action::Replace(completes())),
                ("`idem reopen`", Action::Reopen),
                ("`idem forget`", Action::Forget),
            ];
            let mut named = 0;
            for (command, action) in actions {
                if sentence.contains(command) {
                    named += 1;
                    let is_pending = record.is_pending().then_some(lapses_in);
                    let seen = Inspection::new(record.clone(), LONG, is_pending);
                    let ruling = record.decide(&Decision::new(&key, &seen, action), lapses_in);
                    assert!(!matches!(ruling, Ruling::Answer(_)), "{command} for {record:?}: {ruling:?}");
                }
            }
            assert_eq!(sentence.matches("`idem ").count(), named, "{sentence}");
        }
    }
}
