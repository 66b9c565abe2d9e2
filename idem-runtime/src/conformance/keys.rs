//! Clauses of the store contract about keys: distinct keys have distinct records.

use std::collections::HashSet;

use super::case::{Case, completed};
use crate::key::Key;
use crate::record::Verdict;

/// Checks that each of `keys` has its own record.
async fn are_distinct(case: &Case, keys: &[Key]) {
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len(), "the keys of this clause differ");
    let mut leases = Vec::new();
    for key in keys {
        leases.push(case.reserved(&case.request(key), 1, &format!("{key:?}, which was never used")).await);
    }
    for lease in leases.iter().step_by(2) {
        let result = completed(&lease.key.to_string());
        assert_eq!(case.finish(lease, &result).await, Verdict::Applied, "{:?}", lease.key);
    }
    for (at, lease) in leases.iter().enumerate() {
        let record = case.recorded(&lease.key).await.record;
        assert_eq!(record.owner, lease.owner, "{:?} has a record of its own", lease.key);
        assert_eq!(record.is_finished(), at % 2 == 0, "{:?} has a state of its own", lease.key);
    }
}

pub(super) async fn similar_keys_are_distinct(case: &Case) {
    // The texts differ in letter case, trailing space, Unicode normalization and collation, numbers, separators,
    // escapes, control characters, and characters that some stores treat as a pattern, a hash tag or a quotation mark.
    #[rustfmt::skip]
    let texts = [
        "a", "A", "b", "aa", "a ", " a", "a  ", "a\u{a0}", "a\u{200b}", "a:", ":a", "a/", "/a", "a//", "a\\", "a%", "%",
        "a*", "a?", "[a]", "{a}", "a}", "{", "a'", "a\"", "a;", "a--", "a_", "a-", "a.", "a,", "a=", "a&", "a+", "a#",
        "a@", "a|", "$a", "~a", "\u{e4}", "a\u{308}", "\u{c4}", "ae", "\u{df}", "ss", "i", "I", "\u{131}", "\u{130}",
        "a\0", "a\n", "a%00", "1", "01", "1.0", "+1", "1e0", "null", "NULL", "nil", "true", "\u{2161}", "II", "\u{ff21}", "\u{1f980}",
        "\u{1f980}\u{fe0f}", "\u{65e5}\u{672c}", "\u{5e9}\u{5dc}\u{5d5}\u{5dd}",
    ];
    let mut keys: Vec<_> = texts.iter().map(|text| case.key(text)).collect();
    // These keys have the same text under another scope; some scopes are prefixes of other scopes.
    for scope in ["conformanc", "conformance ", "Conformance", "conformance:x", "conformance\u{e9}"] {
        keys.push(Key::new(scope, case.key("a").text()).expect("a short key"));
    }
    are_distinct(case, &keys).await;
}

pub(super) async fn long_keys_are_distinct(case: &Case) {
    // These keys have the greatest length, and differ only at the start, at the end, or in their length.
    let prefix = case.key("-").as_str().len();
    let room = Key::MAX_BYTES - prefix;
    let mut keys = vec![
        case.key(&format!("-{}", "x".repeat(room))),
        case.key(&format!("-{}", "x".repeat(room - 1))),
        case.key(&format!("-{}y", "x".repeat(room - 1))),
        case.key(&format!("-y{}", "x".repeat(room - 1))),
        case.key(&format!("-{}", "\u{1f980}".repeat(room / 4))),
        case.key(&format!("-{}\u{1f981}", "\u{1f980}".repeat(room / 4 - 1))),
    ];
    let scope = |last: &str| format!("{}{last}", "s".repeat(Key::MAX_SCOPE_BYTES - 1));
    for last in ["s", "t"] {
        keys.push(Key::new(&scope(last), case.key("").text()).expect("a short key"));
    }
    assert!(keys.iter().any(|key| key.as_str().len() == Key::MAX_BYTES), "one key has the greatest length");
    are_distinct(case, &keys).await;
}
