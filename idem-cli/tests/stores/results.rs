//! Tests of the shape that a result must have before `idem resolve` records it, with SQLite files and a Redis server.

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Verdict};
use idem_runtime::{RedisStore, Store};
use idem_tests::server::{Kind, RedisServer};
use serde_json::json;

use super::support::{Records, Run, completed, idem_at, interrupted, key, on_terminal, pending, revision, state};

const GOOD: &[u8] = br#"{"receipt":"r-1","cents":4111}"#;

/// Returns the recorded result of `pay/<text>`.
async fn recorded(store: &dyn Store, text: &str) -> Option<Bytes> {
    let found = store.inspect(&key(text)).await.unwrap().unwrap();
    match found.record.state.result() {
        Some(StoredResult::Encoded { bytes, .. }) => Some(bytes.clone()),
        _ => None,
    }
}

/// Resolves `pay/<text>` by a file with this content, and these further arguments.
fn resolve(records: &Records, text: &str, content: &[u8], more: &[&str]) -> Run {
    let file = records.file(content);
    let verb = [&["resolve", "--completed", file.to_str().unwrap()], more].concat();
    records.decides(&verb, &format!("pay/{text}"))
}

#[tokio::test]
async fn a_result_of_another_shape_than_good_results_is_refused() {
    let records = Records::new().await;
    completed(&records.store, "1", GOOD).await;
    completed(&records.store, "2", br#"{"receipt":"r-2","cents":1,"note":"late"}"#).await;
    interrupted(&records.store, "42").await;
    let good = r#"{"cents": integer, "note"?: text, "receipt": text}"#;
    records.idem(&["resolve", "pay/42", "--shape"]).ends(0).says(&format!("{good}, as in `pay/1` and 1 more\n"));
    for (content, problem) in [
        (&br#"{"recipt":"4111","cents":1}"#[..], "`receipt` is missing; `recipt` is not in a good result"),
        (br#"{"receipt":"4111","cents":"4111"}"#, "`cents` is text, and integer in a good result"),
        (br#"{"receipt":"4111"}"#, "`cents` is missing"),
        (b"\"4111\"", "the result is text, and {"),
        (b"null", "the result is null, and {"),
    ] {
        let refused = resolve(&records, "42", content, &[]).ends(1).complains(problem);
        let refused = refused.complains("nothing was changed").complains(good).complains("--other-shape");
        assert!(!refused.err.contains("4111") && refused.out.is_empty(), "{refused:?}");
        let error = resolve(&records, "42", content, &["--json"]).ends(1).error();
        assert_eq!(error["error"], "refused");
        assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    }
    resolve(&records, "42", br#"{"cents":7,"receipt":"r-42"}"#, &[]).ends(0).says("resolved `pay/42`");
    // With `--other-shape`, a person can record this result.
    interrupted(&records.store, "43").await;
    resolve(&records, "43", b"7", &["--other-shape"]).ends(0);
    assert_eq!(recorded(&records.store, "43").await.as_deref(), Some(&b"7"[..]));
    // The result that a person has recorded does not change the shape of good results.
    records.idem(&["resolve", "pay/42", "--shape"]).ends(0).says(good);
    // An end without a result has no shape.
    interrupted(&records.store, "44").await;
    records.decides(&["resolve", "--without-result"], "pay/44").ends(0);
}

#[tokio::test]
async fn a_wrong_recorded_result_is_replaced_only_by_one_of_a_good_shape() {
    let records = Records::new().await;
    completed(&records.store, "42", b"{\"oops\":true}").await;
    // Without other records, the result on record is the model.
    records.idem(&["resolve", "pay/42", "--shape"]).ends(0).says("{\"oops\": boolean}, as in `pay/42`\n");
    resolve(&records, "42", GOOD, &["--replace"]).ends(1).complains("`oops` is missing");
    // The results of other keys take precedence, because the result on record may be the wrong one.
    completed(&records.store, "1", GOOD).await;
    resolve(&records, "42", b"{\"oops\":false}", &["--replace"]).ends(1).complains("`oops` is not in a good result");
    assert_eq!(recorded(&records.store, "42").await.as_deref(), Some(&b"{\"oops\":true}"[..]));
    resolve(&records, "42", GOOD, &["--replace"]).ends(0).says("in place of what was recorded");
    assert_eq!(recorded(&records.store, "42").await.as_deref(), Some(GOOD));
}

#[tokio::test]
async fn a_result_of_another_codec_than_good_results_is_refused() {
    let records = Records::new().await;
    completed(&records.store, "1", GOOD).await;
    interrupted(&records.store, "42").await;
    let refused = resolve(&records, "42", GOOD, &["--codec", "msgpack"]).ends(1);
    refused.complains("it is written as `msgpack`, and a good result as `json`");
    let file = records.file(b"HTTP/1.1 204 No Content\n\n");
    let response = ["resolve", "--http-response", file.to_str().unwrap()];
    records.decides(&response, "pay/42").ends(1).complains("it is written as `http1`");
    // An error is compared with errors, not with results.
    let lease = pending(&records.store, "2").await;
    let error = StoredResult::Encoded { codec: CodecName::new(b"json").unwrap(), bytes: Bytes::from_static(b"\"no\"") };
    assert_eq!(records.store.finish(&lease, &Finish::Failed(error)).await.unwrap(), Verdict::Applied);
    let file = records.file(GOOD);
    records.decides(&["resolve", "--failed", file.to_str().unwrap()], "pay/42").ends(1).complains("as in `pay/2`");
    let file = records.file(b"\"declined\"");
    records.decides(&["resolve", "--failed", file.to_str().unwrap()], "pay/42").ends(0);
}

#[tokio::test]
async fn the_question_before_a_decision_shows_the_shape_of_a_good_result() {
    let records = Records::new().await;
    completed(&records.store, "1", GOOD).await;
    interrupted(&records.store, "42").await;
    let file = records.file(br#"{"receipt":"r-42","cents":7}"#);
    let line = |more: &str| {
        let (program, file, url) = (env!("CARGO_BIN_EXE_idem"), file.display(), records.url());
        format!("{program} resolve pay/42 --completed {file} --store {url} {more}")
    };
    let (status, said) = on_terminal(&line(""), "n\n");
    assert_eq!(status, 1, "{said}");
    let shape = said.find(r#"good result  {"cents": integer, "receipt": text}, as in `pay/1`"#);
    assert!(shape.is_some_and(|at| said[at..].contains("[y/N]")), "{said}");
    records.file(b"{}");
    let (status, said) = on_terminal(&line("--other-shape"), "n\n");
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("differs      `cents` is missing; `receipt` is missing"), "{said}");
    // Without any good result, the question states that no good result is known.
    interrupted(&records.store, "first").await;
    let other = line("").replace("pay/42", "bill/1");
    let lease = bill(&records.store).await;
    let _ = records.store.release(&lease, idem_runtime::store::Release::Interrupted).await.unwrap();
    let (status, said) = on_terminal(&other, "y\n");
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("good result  no good result is known"), "{said}");
}

/// Reserves `bill/1`, a key of another scope.
async fn bill(store: &dyn Store) -> idem_runtime::store::Lease {
    use idem_runtime::store::{Reservation, ReserveRequest};
    let hour = std::time::Duration::from_secs(3600);
    let request = ReserveRequest::new("bill/1".parse().unwrap(), store.context().new_owner(), hour, hour);
    match store.reserve(&request).await.unwrap() {
        Reservation::Granted { lease, .. } => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn redis_compares_with_the_record_that_the_option_like_names() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes"]);
    let url = server.url();
    let store = RedisStore::connect(&url).await.unwrap();
    completed(&store, "1", GOOD).await;
    interrupted(&store, "42").await;
    interrupted(&store, "43").await;
    // A list would scan the whole server.
    idem_at(&url, &["resolve", "pay/42", "--shape"]).ends(4).complains("`--like KEY` names a record that has one");
    let shape = idem_at(&url, &["resolve", "pay/42", "--shape", "--like", "pay/1", "--json"]).ends(0).json();
    assert_eq!(
        shape,
        json!({
            "key": "pay/42", "store": "redis", "action": "shape", "codec": "json",
            "shape": r#"{"cents": integer, "receipt": text}"#, "from": ["pay/1"],
        })
    );
    let folder = idem_tests::sqlite::Folder::new();
    let file = super::support::file(folder.path(), b"7");
    let resolve = |key: &str, more: &[&str]| {
        let seen = revision(&url, key);
        let verb = ["resolve", key, "--completed", file.to_str().unwrap(), "--seen", &seen, "--yes"];
        idem_at(&url, &[&verb[..], more].concat())
    };
    resolve("pay/42", &["--like", "pay/1"]).ends(1).complains("the result is integer, and {");
    resolve("pay/42", &["--like", "pay/none"]).ends(4).complains("which `--like` names");
    resolve("pay/42", &["--like", "pay/43"]).ends(2).complains("has no result to compare with");
    assert_eq!(state(&store, "42").await, Some("interrupted"));
    resolve("pay/42", &[]).ends(0);
}
