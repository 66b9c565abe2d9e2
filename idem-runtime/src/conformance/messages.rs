//! Clauses of the store contract about messages that a finished record holds beside its result.

use std::collections::HashSet;

use super::case::{Case, completed, stored};
use crate::combine;
use crate::key::Key;
use crate::record::messages::{OutgoingMessage, UnsentMessages};
use crate::record::{Action, Decision, DecisionAnswer, Finish, Lease, Record, Reservation, StoredResult, Verdict};
use crate::store::Filter;

/// Returns messages with these bodies; `None` for no message.
fn messages(bodies: &[&'static str]) -> Option<UnsentMessages> {
    let message = |body: &&'static str| OutgoingMessage::new(*body).key(7).addressed("orders", format!("id of {body}"));
    UnsentMessages::pushed(&bodies.iter().map(message).collect::<Vec<_>>())
}

fn with(result: &StoredResult, bodies: &[&'static str]) -> StoredResult {
    match messages(bodies) {
        Some(messages) => result.with_messages(&messages),
        None => result.clone(),
    }
}

impl Case {
    /// Returns a key whose first attempt has completed with `result` and the messages `a`, `b` and `c`.
    async fn publishes(&self, name: &str, result: &StoredResult) -> (Key, Lease) {
        let key = self.key(name);
        let lease = self.reserved(&self.request(&key), 1, "a key that was never used").await;
        let finish = Finish::Completed(with(result, &["a", "b", "c"]));
        assert_eq!(self.finish(&lease, &finish).await, Verdict::Applied);
        (key, lease)
    }

    async fn holds(&self, key: &Key, lease: &Lease, expected: &StoredResult, why: &str) {
        let record = Record::after(lease, Finish::Completed(expected.clone()).state());
        assert_eq!(self.recorded(key).await.record, record, "{why}");
        self.is_answered(&self.request(key), Reservation::finished(record), why).await;
    }
}

pub(super) async fn messages_are_marked(case: &Case) {
    let large = stored(vec![b'x'; 9000]);
    let results = [stored("1"), large, StoredResult::Unencodable, StoredResult::TooLarge { size: 7 }];
    for (n, result) in results.iter().enumerate() {
        let (key, lease) = case.publishes(&n.to_string(), result).await;
        case.holds(&key, &lease, &with(result, &["a", "b", "c"]), "a result with messages").await;
        // The retention is the one of the result, whenever messages are marked.
        let before = case.recorded(&key).await;
        for left in [&["b", "c"][..], &["c"], &[]] {
            let decision = Decision::mark_sent(&key, &before, messages(left));
            for again in ["", ", again"] {
                let why = format!("marked as sent, {} left{again}", left.len());
                assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}");
                case.holds(&key, &lease, &with(result, left), &why).await;
            }
        }
        let after = case.recorded(&key).await;
        assert!(after.expires_in <= before.expires_in, "a mark extends the retention");
    }
}

pub(super) async fn messages_never_return(case: &Case) {
    let result = stored("1");
    let (key, lease) = case.publishes("", &result).await;
    let seen = case.recorded(&key).await;
    assert_eq!(case.decide(&Decision::mark_sent(&key, &seen, messages(&["c"]))).await, DecisionAnswer::Applied);
    // The write of the attempt arrives again, and so does a mark that knows less.
    let finish = Finish::Completed(with(&result, &["a", "b", "c"]));
    assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied, "a repeated `finish`");
    case.holds(&key, &lease, &with(&result, &["c"]), "after a repeated `finish`").await;
    let late = Decision::mark_sent(&key, &seen, messages(&["b", "c"]));
    assert_eq!(case.decide(&late).await, DecisionAnswer::Applied, "a late mark");
    case.holds(&key, &lease, &with(&result, &["c"]), "after a late mark").await;
    let all = Decision::mark_sent(&key, &seen, None);
    assert_eq!(case.decide(&all).await, DecisionAnswer::Applied);
    assert_eq!(case.decide(&late).await, DecisionAnswer::Applied, "a late mark after the last one");
    assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied, "a repeated `finish` after the last mark");
    case.holds(&key, &lease, &result, "after the last mark").await;

    // Two deliveries mark at the same moment.
    for round in 0..64 {
        let (key, lease) = case.publishes(&format!("round {round}"), &result).await;
        let seen = case.recorded(&key).await;
        let [some, all] = [messages(&["c"]), None].map(|left| Decision::mark_sent(&key, &seen, left));
        let mut marks = [&some, &all].map(|mark| case.store().decide(mark));
        for told in combine::all(&mut marks).await {
            assert_eq!(told.expect("an answer"), DecisionAnswer::Applied, "one of two marks at a time");
        }
        case.holds(&key, &lease, &result, "after two marks at a time").await;
    }
}

pub(super) async fn marks_name_their_record(case: &Case) {
    let result = stored("1");
    // A decision of an operator comes between sending and marking.
    let (key, _) = case.publishes("replaced", &result).await;
    let seen = case.recorded(&key).await;
    let mark = Decision::mark_sent(&key, &seen, None);
    let other = Action::Replace(completed("2"));
    assert_eq!(case.decides(&key, 1, other).await, DecisionAnswer::Applied);
    let told = case.decide(&mark).await;
    assert!(matches!(told, DecisionAnswer::Changed { .. }), "a mark after `replace`: {told:?}");
    case.changes_nothing(&key, case.decide(&mark), "a mark after `replace`").await;
    let kept = case.recorded(&key).await.record.state;
    let expected = Finish::Completed(with(&stored("2"), &["a", "b", "c"])).state();
    assert_eq!(kept, expected, "`replace` keeps the messages");

    // Another attempt has finished since then.
    let (key, _) = case.publishes("discarded", &result).await;
    let mark = Decision::mark_sent(&key, &case.recorded(&key).await, None);
    assert_eq!(case.decides(&key, 1, Action::Discard).await, DecisionAnswer::Applied);
    let lease = case.reserved(&case.request(&key), 2, "a discarded key").await;
    assert_eq!(case.decide(&mark).await, DecisionAnswer::OtherAttempt { latest: 2 }, "a mark of attempt 1");
    let finish = Finish::Completed(with(&result, &["d"]));
    assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
    case.changes_nothing(&key, case.decide(&mark), "a mark of attempt 1").await;
    case.holds(&key, &lease, finish.result(), "messages of attempt 2").await;

    // A record without a result has no messages.
    let key = case.key("running");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, crate::record::Release::Returned).await, Verdict::Applied);
    let mark = Decision::mark_sent(&key, &case.recorded(&key).await, None);
    assert_eq!(case.decide(&mark).await, DecisionAnswer::Unfinished, "a mark of a released record");
}

pub(super) async fn operators_decide_about_messages(case: &Case) {
    let result = stored("1");
    let (key, _) = case.publishes("", &result).await;
    let set_aside = messages(&["a", "b", "c"]).map(UnsentMessages::set_aside);
    let mark = Decision::mark_sent(&key, &case.recorded(&key).await, set_aside.clone());
    assert_eq!(case.decide(&mark).await, DecisionAnswer::Applied);
    assert_eq!(case.recorded(&key).await.unsent_messages(), set_aside);
    let resend = Decision::resend_messages(&key, &case.recorded(&key).await).by("alice");
    for again in ["", ", again"] {
        assert_eq!(case.decide(&resend).await, DecisionAnswer::Applied, "`resend_messages`{again}");
        assert_eq!(case.recorded(&key).await.unsent_messages(), messages(&["a", "b", "c"]), "`resend_messages`{again}");
    }
    assert!(matches!(case.decide(&mark).await, DecisionAnswer::Changed { .. }), "a mark after `resend_messages`");
    let drop = Decision::drop_messages(&key, &case.recorded(&key).await).by("alice");
    for again in ["", ", again"] {
        assert_eq!(case.decide(&drop).await, DecisionAnswer::Applied, "`drop_messages`{again}");
        let found = case.recorded(&key).await;
        assert_eq!(found.record.state, Finish::Completed(result.clone()).state(), "`drop_messages`{again}");
    }
}

pub(super) async fn list_selects_unsent(case: &Case) {
    let [_, scope] = case.scopes();
    let key = |text: &str| Key::new(&scope, text).expect("a valid key");
    for (text, result) in [
        ("sent", stored("1")),
        ("unsent", with(&stored("1"), &["a"])),
        ("unsent without a result", with(&StoredResult::Unencodable, &["a"])),
        ("large", with(&stored(vec![b'x'; 9000]), &["a"])),
    ] {
        let lease = case.reserved(&case.request(&key(text)), 1, "a key that was never used").await;
        assert_eq!(case.finish(&lease, &Finish::Completed(result)).await, Verdict::Applied);
    }
    let filter = Filter::new().scope(&*scope).unsent();
    let expected: HashSet<_> = ["unsent", "unsent without a result", "large"].map(key).into();
    let Some(shown) = case.shown(&filter, "records with unsent messages").await else { return };
    assert_eq!(shown, expected, "records with unsent messages");
    let mark = Decision::mark_sent(&key("unsent"), &case.recorded(&key("unsent")).await, None);
    assert_eq!(case.decide(&mark).await, DecisionAnswer::Applied);
    let shown = case.shown(&filter, "records with unsent messages").await;
    assert_eq!(shown, Some(["unsent without a result", "large"].map(key).into()), "after a mark");
}
