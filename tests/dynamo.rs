//! `DynamoStore` on emulators: items, costs, clocks and faults. The tests script answers that no emulator gives
//! (throttling, conflicts, invalid answers).
#![allow(
    clippy::unchecked_time_subtraction,
    clippy::semicolon_if_nothing_returned,
    reason = "the durations are constants"
)]
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::types::{
    AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
};
use idem_runtime::StoreExt;
use idem_runtime::dynamodb::DynamoOptions;
use idem_runtime::key::Fingerprint;
use idem_runtime::policy::StepPolicy;
use idem_runtime::record::{Record, State, StoredResult, Traceparent};
use idem_runtime::step::StepProblem;
use idem_runtime::store::{Filter, Finish, Holder, OwnerToken, Release, Reservation, Verdict, renew_all};
use idem_runtime::{
    DynamoStore, Error, InProgress, Key, OnCrash, Operation, Store, StoreError, StoreErrorKind, current, observe,
};
use idem_tests::Reopen as _;
use idem_tests::calls::{
    Confirming, LEASE, POLICY, TRACEPARENT, TTL, call, done, is_of_a_later_format, kept, one_step, publish, request,
    reserved, stored, takes_its_largest_journal, wins, with_journal,
};
use idem_tests::clock::OddClock;
use idem_tests::dynamo::{Emulator, Kind, Reply, TABLE, Wire, client, client_with, open};
use idem_tests::log::Log;
use idem_tests::proxy::{Line, Proxy};
use idem_tests::race::Race;
use tokio::sync::Semaphore;

/// Time that the tests' wall clocks show until a test sets them, in milliseconds since 1970: a Tuesday in November
/// 2023.
const THEN: i64 = 1_700_000_000_000;

/// Options with a namespace that no other test uses, and with a time limit that suits slow machines.
fn options(test: &str) -> DynamoOptions {
    DynamoStore::options().namespace(format!("{test}:")).response_timeout(Duration::from_secs(60))
}

/// Returns a store on the shared emulator, in a namespace that no other test uses, and the HTTP client that carries the
/// store's requests.
fn wired(test: &str) -> (DynamoStore, Wire) {
    let wire = Wire::to(&Kind::Dynoxide.shared());
    (options(test).build(client(&wire), TABLE), wire)
}

/// Returns a store as [`wired`] does, with this clock skew in milliseconds and a clock that stands still at `now`.
fn timed(test: &str, skew: i64, now: i64) -> (DynamoStore, OddClock) {
    let (clock, skew) = (OddClock::at(now), Duration::from_millis(skew.unsigned_abs()));
    let options = options(test).max_clock_skew(skew).clock(clock.clone());
    (options.build(client(&Wire::to(&Kind::Dynoxide.shared())), TABLE), clock)
}

fn raw() -> Client {
    client(&Wire::to(&Kind::Dynoxide.shared()))
}

async fn item(raw: &Client, name: &str) -> BTreeMap<String, AttributeValue> {
    let key = AttributeValue::S(name.to_owned());
    let found = raw.get_item().table_name(TABLE).key("key", key).consistent_read(true).send().await.unwrap();
    found.item.expect("recorded").into_iter().collect()
}

/// Item in DynamoDB's JSON, with binary values as hexadecimal digits.
fn json(item: &BTreeMap<String, AttributeValue>) -> String {
    let attributes = item.iter().map(|(name, value)| {
        let value = match value {
            AttributeValue::S(text) => serde_json::json!({ "S": text }),
            AttributeValue::N(number) => serde_json::json!({ "N": number }),
            AttributeValue::Bool(bool) => serde_json::json!({ "BOOL": bool }),
            AttributeValue::B(bytes) => {
                let hex = bytes.as_ref().iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
                serde_json::json!({ "B": hex })
            }
            other => panic!("{other:?}"),
        };
        (name.clone(), value)
    });
    serde_json::Value::Object(attributes.collect()).to_string()
}

// Stored items.

#[tokio::test]
async fn the_stored_form_is_pinned() {
    let (store, clock) = timed("golden", 1500, THEN);
    let fingerprint = Some(Fingerprint::from_bytes([0x5a; 32]));
    let mut written = String::new();
    // Each record is one line of the golden file, and the store must read it back.
    let mut show = async |name: &str, record: Record| {
        let key = Key::new("test", name).unwrap();
        let item = item(&raw(), &format!("golden:{}", key.as_str())).await;
        written.extend([name, " ", &json(&item), "\n"]);
        assert_eq!(store.inspect(&key).await.unwrap().expect("recorded").record, record, "{name}");
    };
    let begin = async |name: &str, fingerprint: Option<Fingerprint>, on_crash| {
        clock.set_wall(THEN);
        let owner = OwnerToken::from_bytes(*b"0123456789abcdef");
        let told = fingerprint.is_some();
        let request = request(&store, name).owner(owner).fingerprint(fingerprint).on_crash(on_crash);
        let request = request.holder(Holder::new(if told { "host/7/name" } else { "" }));
        let traceparent = TRACEPARENT.parse::<Traceparent>().ok().filter(|_| told);
        let lease = wins(&store, &request.traceparent(traceparent)).await;
        // The renewal or the end of the attempt comes 7.001 s later, and so not at a whole second.
        clock.set_wall(THEN + 7_001);
        lease
    };
    // The items are of every kind: pending, renewed, ended in each way, and reopened by an operator.
    let pending = |on_crash| State::Pending { lease: LEASE, ttl: TTL, on_crash, begun: false };

    let lease = begin("pending", None, OnCrash::Retry).await;
    show("pending", Record::after(&lease, pending(OnCrash::Retry))).await;
    let lease = begin("pending-fail-fingerprint", fingerprint, OnCrash::Fail).await;
    show("pending-fail-fingerprint", Record::after(&lease, pending(OnCrash::Fail))).await;
    let lease = begin("renewed", None, OnCrash::Retry).await;
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    show("renewed", Record::after(&lease, pending(OnCrash::Retry))).await;
    let lease = begin("released", fingerprint, OnCrash::Retry).await;
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    show("released", Record::after(&lease, State::Released)).await;
    let lease = begin("not-started", None, OnCrash::Retry).await;
    assert_eq!(store.release(&lease, Release::NotStarted).await.unwrap(), Verdict::Applied);
    show("not-started", {
        let mut record = Record::after(&lease, State::Released);
        record.attempts_used = 0;
        record
    })
    .await;
    let lease = begin("interrupted", None, OnCrash::Fail).await;
    assert_eq!(store.release(&lease, Release::Interrupted).await.unwrap(), Verdict::Applied);
    show("interrupted", Record::after(&lease, State::Interrupted)).await;
    for (name, fingerprint, finish) in [
        ("completed", None, Finish::Completed(stored(r#"{"a":1}"#))),
        ("completed-fingerprint", fingerprint, Finish::Completed(stored(""))),
        ("failed", None, Finish::Failed(stored("null"))),
        ("too-large", None, Finish::Completed(StoredResult::TooLarge { size: 300_000 })),
        ("unencodable", None, Finish::Completed(StoredResult::Unencodable)),
        ("completed-kept-journal", None, Finish::Completed(kept())),
    ] {
        let lease = begin(name, fingerprint, OnCrash::Retry).await;
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
        show(name, Record::after(&lease, finish.state())).await;
    }
    for (name, release) in [
        ("pending-journal", None),
        ("released-journal", Some(Release::Returned)),
        ("interrupted-journal", Some(Release::Interrupted)),
    ] {
        let lease = begin(name, fingerprint, OnCrash::Fail).await;
        assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
        if let Some(release) = release {
            assert_eq!(store.release(&lease, release).await.unwrap(), Verdict::Applied);
        }
        let state = release.map_or(pending(OnCrash::Fail), Release::state);
        show(name, with_journal(Record::after(&lease, state), one_step())).await;
    }
    let lease = begin("reopened", None, OnCrash::Retry).await;
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    assert_eq!(store.reopen(&lease.key, 1).await.unwrap(), Verdict::Applied);
    show("reopened", {
        let mut record = Record::after(&lease, State::Released);
        record.owner = idem_tests::decided(record.owner, 1);
        record.attempts_used = 0;
        record
    })
    .await;
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/dynamo-v1.txt");
        std::fs::write(path, &written).unwrap();
    }
    assert_eq!(
        written,
        include_str!("golden/dynamo-v1.txt"),
        "a released format never changes: give a new format a new version"
    );
}

#[tokio::test]
async fn items_are_purged_only_once_every_clock_has_seen_the_end_of_their_retention() {
    for (skew, now) in [(0, THEN), (0, THEN + 1), (1000, THEN), (1001, THEN), (1, THEN + 999), (2_500, THEN + 499)] {
        let (store, _) = timed(&format!("purge:{skew}:{now}"), skew, now);
        let lease = reserved(&store, "k").await;
        for (state, kept) in [("pending", LEASE + TTL), ("completed", TTL)] {
            let item = item(&raw(), &format!("purge:{skew}:{now}:1/test/k")).await;
            assert_eq!(item["state"], AttributeValue::S(state.to_owned()));
            let number = |name: &str| item[name].as_n().unwrap().parse::<i64>().unwrap();
            let kept = i64::try_from(kept.as_millis()).unwrap();
            assert_eq!(number("expires_at"), now + kept, "{state}");
            let (purged, last) = (number("purge_at") * 1000, now + kept + skew);
            assert!((last..last + 1000).contains(&purged), "{state}: {purged}, not {last}: whole seconds, rounded up");
            let _either = store.finish(&lease, &done()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_largest_item_fits_and_one_byte_more_is_refused_before_it_is_sent() {
    const LARGEST: usize = 400 * 1024;
    // The clock stands still, because the size of an item depends on the number of digits in a time.
    let wire = Wire::to(&Kind::Dynoxide.shared());
    let store = options("limit").clock(OddClock::at(THEN)).build(client(&wire), TABLE);
    for fingerprint in [None, Some(Fingerprint::from_bytes([1; 32]))] {
        let name = format!("k{}", fingerprint.is_some());
        let lease = wins(&store, &request(&store, &name).fingerprint(fingerprint)).await;
        wire.seen();
        let result = |bytes: usize| Finish::Completed(stored(vec![b'x'; bytes]));
        let error = store.finish(&lease, &result(LARGEST)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TooLarge, "{error}");
        let told: Vec<usize> =
            error.to_string().split(' ').filter_map(|word| word.trim_end_matches(',').parse().ok()).collect();
        let fits = LARGEST - (told[0] - LARGEST);
        let error = store.finish(&lease, &result(fits + 1)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TooLarge, "{error}");
        assert_eq!(wire.seen(), [""; 0], "nothing was sent");
        assert_eq!(store.finish(&lease, &result(fits)).await.unwrap(), Verdict::Applied, "{fits} bytes fit");
        let Some(found) = store.inspect(&lease.key).await.unwrap() else { panic!("recorded") };
        assert_eq!(found.record, Record::after(&lease, result(fits).state()));
        assert_eq!((found.first_seen, found.began), (Some(Duration::ZERO), Some(Duration::ZERO)));
        // DynamoDB itself enforces the limit of 400 KB.
        let mut item = item(&raw(), &format!("limit:1/test/{name}")).await;
        item.insert("result".to_owned(), AttributeValue::B(vec![b'x'; fits + 1].into()));
        let put = raw().put_item().table_name(TABLE).set_item(Some(item.into_iter().collect())).send().await;
        assert!(put.is_err_and(|error| format!("{error:?}").contains("Item size")));
    }
}

/// A step whose entry did not fit would have an effect that no later attempt knows of.
#[tokio::test]
async fn a_step_beyond_the_item_size_is_refused_before_its_body() {
    const LARGEST: usize = 392 * 1024;
    let (store, wire) = wired("full-journal");
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().max_value_bytes(1 << 20));
        // The rest of the journal has less room than the entries of one step may need.
        attempt.step("fills").run(async |_| Ok::<_, Error>("x".repeat(LARGEST - 100))).await?;
        wire.seen();
        let refused = attempt.step("refused").run(async |_| -> Result<u8, Error> { panic!("the body ran") }).await;
        assert_eq!(wire.seen(), [""; 0], "nothing was sent for the step");
        refused
    };
    let error = Operation::new(&store, Key::new("test", "steps"), POLICY).run(body).await.unwrap_err();
    let Error::Step { problem: StepProblem::JournalFull { max: LARGEST, .. }, .. } = error else { panic!("{error}") };

    takes_its_largest_journal(&store, LARGEST).await;
}

#[tokio::test]
async fn a_result_too_large_for_an_item_ends_the_operation_without_the_result() {
    let (store, wire) = wired("too-large");
    let runs = AtomicU32::new(0);
    let policy = POLICY.max_result_bytes(1 << 20);
    let call = async |name: &'static str, bytes: usize| {
        let body = async {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<_, Error>("x".repeat(bytes))
        };
        observe(Operation::new(&store, Key::new("test", name), policy).run(body)).await
    };
    let (first, outcome) = call("k", 500_000).await;
    assert!(first.is_ok() && outcome.recorded(), "{outcome:?}");
    let (second, _) = call("k", 500_000).await;
    assert!(matches!(second, Err(Error::ResultUnavailable { .. })), "{second:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    // If DynamoDB refuses an item as too large although the store has accepted its size, the operation is recorded
    // without its result, too.
    let body = r#"{"__type":"ValidationException","message":"Item size has exceeded the maximum allowed size"}"#;
    wire.script([Reply::Pass, Reply::Instead(400, body.to_owned())]);
    assert!(call("other", 10).await.1.recorded());
    let (second, _) = call("other", 10).await;
    assert!(matches!(second, Err(Error::ResultUnavailable { .. })), "{second:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn namespaces_keep_applications_apart() {
    let (a, _) = wired("prefix-a");
    let (b, _) = wired("prefix-b");
    for store in [a, b] {
        assert_eq!(reserved(&store, "k").await.attempt, 1);
    }
}

// Creation of the table in DynamoDB.

#[tokio::test]
async fn the_template_makes_the_same_table_as_create_table() {
    let template: serde_json::Value = serde_json::from_str(DynamoStore::CLOUDFORMATION).unwrap();
    let table = &template["Resources"]["IdempotencyTable"]["Properties"];
    for kind in [Kind::Dynoxide, Kind::Ministack] {
        let emulator = Emulator::start(kind);
        let raw = client(&Wire::to(&emulator.endpoint()));
        let store = DynamoStore::new(raw.clone(), TABLE);
        // Four processes create the table concurrently, and then again.
        futures::future::try_join_all((0..4).map(|_| store.ensure_table())).await.unwrap();
        store.ensure_table().await.unwrap();
        let described = raw.describe_table().table_name(TABLE).send().await.unwrap().table.unwrap();
        let ttl = raw.describe_time_to_live().table_name(TABLE).send().await.unwrap().time_to_live_description.unwrap();
        let made = serde_json::json!({
            "BillingMode": described.billing_mode_summary().unwrap().billing_mode().unwrap().as_str(),
            "AttributeDefinitions": described.attribute_definitions().iter().map(|it| {
                serde_json::json!({ "AttributeName": it.attribute_name(), "AttributeType": it.attribute_type().as_str() })
            }).collect::<Vec<_>>(),
            "KeySchema": described.key_schema().iter().map(|it| {
                serde_json::json!({ "AttributeName": it.attribute_name(), "KeyType": it.key_type().as_str() })
            }).collect::<Vec<_>>(),
            "TimeToLiveSpecification": {
                "AttributeName": ttl.attribute_name(),
                "Enabled": ttl.time_to_live_status().unwrap().as_str() == "ENABLED",
            },
        });
        for (name, value) in made.as_object().unwrap() {
            assert_eq!(&table[name], value, "{kind:?}: {name}");
        }
    }
}

#[tokio::test]
async fn a_missing_or_foreign_table_is_refused() {
    let raw = raw();
    let string = |name: &str| {
        AttributeDefinition::builder().attribute_name(name).attribute_type(ScalarAttributeType::S).build().unwrap()
    };
    let hash = KeySchemaElement::builder().attribute_name("id").key_type(KeyType::Hash).build().unwrap();
    let request = raw.create_table().table_name("others").billing_mode(BillingMode::PayPerRequest);
    request.attribute_definitions(string("id")).key_schema(hash).send().await.unwrap();
    let store = DynamoStore::new(raw.clone(), "others");
    let error = store.ensure_table().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    let store = DynamoStore::new(raw, "missing");
    let runs = AtomicU32::new(0);
    let (result, _) = call(&store, "k", &runs).await;
    let Err(Error::Store { source, .. }) = result else { panic!("{result:?}") };
    assert_eq!(source.kind(), StoreErrorKind::Misconfigured, "{source}");
    assert_eq!(runs.into_inner(), 0);
}

// Costs in requests.

#[tokio::test]
async fn each_operation_costs_its_documented_requests() {
    let (store, wire) = wired("calls");
    let runs = AtomicU32::new(0);
    let mut table = Vec::new();
    let mut costs = |what: &'static str, expected: &[&str]| {
        let seen = wire.seen();
        assert_eq!(seen, expected, "{what}");
        table.push((what, seen.len()));
    };
    assert!(call(&store, "k", &runs).await.1.executed());
    costs("first run", &["PutItem", "UpdateItem"]);
    assert!(call(&store, "k", &runs).await.1.replayed());
    costs("replay", &["PutItem"]);
    let store = store.with_sender(Confirming);
    assert!(publish(&store, "published").await.executed());
    costs("first run with a message", &["PutItem", "UpdateItem", "GetItem", "PutItem"]);
    assert!(publish(&store, "published").await.replayed());
    costs("replay with no message left", &["PutItem"]);

    // These calls are for a held key: a duplicate, renewals, the release, and the next attempt.
    let lease = reserved(&store, "held").await;
    wire.seen();
    let (result, _) = call(&store, "held", &runs).await;
    assert!(matches!(result, Err(Error::InProgress { .. })), "{result:?}");
    costs("in progress", &["PutItem"]);
    let mut leases = vec![lease.clone()];
    for n in 0..99 {
        leases.push(reserved(&store, &format!("beat{n}")).await);
    }
    wire.seen();
    assert_eq!(renew_all(&store, &leases).await.unwrap(), [Verdict::Applied; 100]);
    costs("beat of 100 leases", &["UpdateItem"; 100]);
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    costs("release", &["UpdateItem"]);
    assert!(call(&store, "held", &runs).await.1.executed());
    costs("run after a release", &["PutItem", "PutItem", "UpdateItem"]);
    assert!(store.inspect(&lease.key).await.unwrap().is_some());
    costs("inspection", &["GetItem"]);
    assert_eq!(store.reopen(&lease.key, 2).await.unwrap(), Verdict::Applied);
    costs("inspection and decision of an operator", &["GetItem", "GetItem", "PutItem"]);

    store.ping().await.unwrap();
    costs("ping", &["PutItem", "UpdateItem", "GetItem"]);

    // In a takeover, the first request finds the lapsed lease.
    let lapsed = request(&store, "lapsed").lease(Duration::from_millis(1));
    let eager = options("calls").max_clock_skew(Duration::ZERO).build(client(&wire), TABLE);
    wins(&eager, &lapsed).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    wire.seen();
    assert!(call(&eager, "lapsed", &runs).await.1.executed());
    costs("run by a takeover", &["PutItem", "PutItem", "UpdateItem"]);
    for (what, calls) in table {
        println!("{calls:>4} {what}");
    }
}

#[tokio::test]
async fn a_waiting_duplicate_is_woken_by_its_own_store_handle_and_polls_for_other_handles() {
    let (store, wire) = wired("wait");
    let (other, _) = wired("wait");
    for (name, by) in [("own", &store), ("other", &other)] {
        let lease = wins(by, &request(&store, name)).await;
        let began = std::time::Instant::now();
        wire.seen();
        let runs = AtomicU32::new(0);
        let operation = Operation::new(
            &store,
            Key::new("test", name),
            POLICY.in_progress(InProgress::Wait(Duration::from_secs(50))),
        );
        let body = async { Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst)) };
        let duplicate = observe(operation.run(body));
        let end = async {
            tokio::time::sleep(Duration::from_millis(400)).await;
            assert_eq!(by.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
        };
        let ((result, outcome), ()) = tokio::join!(duplicate, end);
        assert_eq!((result.unwrap(), outcome.replayed()), (42, true), "{name}");
        let looks = wire.seen().iter().filter(|operation| *operation == "GetItem").count();
        // The pauses between reads of the record grow. If the attempt ends in the same store handle, the last pause is
        // cut short.
        let growing = [50, 100, 200, 400, 800].into_iter().chain(std::iter::repeat(1000));
        let cut_short = usize::from(name == "own");
        let paused: u64 = growing.take(looks.saturating_sub(1 + cut_short)).sum();
        assert!(looks > 0 && Duration::from_millis(paused) <= began.elapsed(), "{name}: {looks} looks");
    }
}

// Clocks that differ.

/// Two machines, whose clocks are `ahead` of the true time by these numbers of milliseconds.
struct Machines {
    stores: [DynamoStore; 2],
    clocks: [OddClock; 2],
    ahead: [i64; 2],
}

impl Machines {
    fn new(test: &str, skew: i64, ahead: [i64; 2]) -> Self {
        let [(a, a_clock), (b, b_clock)] = [0, 1].map(|_| timed(test, skew, THEN));
        Self { stores: [a, b], clocks: [a_clock, b_clock], ahead }
    }

    fn at(&self, true_time: i64) {
        for (clock, ahead) in self.clocks.iter().zip(self.ahead) {
            clock.set_wall(THEN + true_time + ahead);
        }
    }
}

#[tokio::test]
async fn machines_within_the_skew_never_take_over_early_and_at_most_two_skews_late() {
    const SKEW: i64 = 2000;
    let lease = i64::try_from(LEASE.as_millis()).unwrap();
    for (n, ahead) in [[0, 0], [SKEW, 0], [0, SKEW], [-SKEW, 0], [0, -SKEW], [-700, 900]].into_iter().enumerate() {
        let machines = Machines::new(&format!("skew{n}"), SKEW, ahead);
        let [a, b] = &machines.stores;
        machines.at(0);
        let held = reserved(a, "k").await;
        let refused = async |why: &str| match b.reserve(&request(b, "k")).await.unwrap() {
            Reservation::InProgress { attempt: 1, lapses_in, .. } => lapses_in,
            other => panic!("{ahead:?}, {why}: {other:?}"),
        };
        // The owner renews its lease once, after half of the lease.
        machines.at(lease / 2);
        assert_eq!(renew_all(a, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Applied]);
        let lapses = lease / 2 + lease;
        for at in [lease / 2, lease, lapses - 1, lapses] {
            machines.at(at);
            let lapses_in = refused("the lease has not lapsed").await;
            assert_eq!(b.reopen(&held.key, 1).await.unwrap(), Verdict::Refused, "{ahead:?} at {at}");
            // The answer to a duplicate contains the time until a takeover is possible.
            machines.at(at + i64::try_from(lapses_in.as_millis()).unwrap() - 1);
            refused("a moment too early").await;
        }
        // The other machine takes over when its own clock is one skew past the lapse. By the true time, this takeover
        // comes at most two skews after the lapse.
        let free = lapses + ahead[0] - ahead[1] + SKEW + 1;
        assert!((lapses..=lapses + 2 * SKEW + 1).contains(&free), "{ahead:?}");
        machines.at(free - 1);
        refused("a moment too early").await;
        machines.at(free);
        let answer = b.reserve(&request(b, "k")).await.unwrap();
        let Reservation::Granted { lease: taken, takeover: true, .. } = answer else { panic!("{ahead:?}: {answer:?}") };
        assert_eq!(taken.attempt, 2);
        assert_eq!(renew_all(a, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Refused], "{ahead:?}");
        assert_eq!(a.finish(&held, &done()).await.unwrap(), Verdict::Refused, "{ahead:?}");
    }
}

#[tokio::test]
async fn machines_within_the_skew_never_forget_a_record_early() {
    const SKEW: i64 = 2000;
    let ttl = i64::try_from(TTL.as_millis()).unwrap();
    for (n, ahead) in [[0, 0], [SKEW, 0], [0, SKEW], [-700, 900]].into_iter().enumerate() {
        let machines = Machines::new(&format!("forget{n}"), SKEW, ahead);
        let [a, b] = &machines.stores;
        machines.at(0);
        let held = reserved(a, "k").await;
        assert_eq!(a.finish(&held, &done()).await.unwrap(), Verdict::Applied);
        let forgotten = ttl + ahead[0] - ahead[1] + SKEW + 1;
        assert!(forgotten > ttl, "{ahead:?}");
        for at in [1, ttl, forgotten - 1] {
            machines.at(at);
            let answer = b.reserve(&request(b, "k")).await.unwrap();
            assert!(matches!(answer, Reservation::Finished { .. }), "{ahead:?} at {at}: {answer:?}");
            assert!(b.inspect(&held.key).await.unwrap().is_some(), "{ahead:?} at {at}");
        }
        // The item still exists, but its retention has ended, so the store answers that there is no record.
        machines.at(forgotten);
        assert_eq!(b.inspect(&held.key).await.unwrap(), None, "{ahead:?}");
        assert_eq!(b.reopen(&held.key, 1).await.unwrap(), Verdict::Refused, "{ahead:?}");
        assert_eq!(reserved(b, "k").await.attempt, 1, "{ahead:?}");
    }
}

#[tokio::test]
async fn a_change_before_a_takeover_prevents_the_takeover() {
    let lapsed = i64::try_from(LEASE.as_millis()).unwrap() + 1;
    for end in ["renewed", "released", "finished", "taken over"] {
        for operator in [false, true] {
            let (owner, clock) = timed("between", 0, THEN);
            let name = format!("{}:{operator}", end.replace(' ', "-"));
            let lease = reserved(&owner, &name).await;
            clock.set_wall(THEN + lapsed);
            let wire = Wire::to(&Kind::Dynoxide.shared());
            let options = options("between").max_clock_skew(Duration::ZERO);
            let other = options.clock(clock).build(client(&wire), TABLE);
            // The first request of the other process finds the lapsed lease. The second request, which takes the lease
            // over, is held back.
            let may = Arc::new(Semaphore::new(0));
            // An operator inspects the record first.
            wire.script(
                operator.then_some(Reply::Pass).into_iter().chain([Reply::Pass, Reply::Once(Arc::clone(&may))]),
            );
            let meanwhile = async {
                while wire.left() > 0 {
                    tokio::task::yield_now().await;
                }
                match end {
                    "renewed" => {
                        assert_eq!(renew_all(&owner, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied])
                    }
                    "released" => assert_eq!(owner.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied),
                    "finished" => assert_eq!(owner.finish(&lease, &done()).await.unwrap(), Verdict::Applied),
                    _ => assert_eq!(reserved(&owner, &name).await.attempt, 2),
                }
                may.add_permits(1);
            };
            if operator {
                let (reopened, ()) = tokio::join!(other.reopen(&lease.key, 1), meanwhile);
                assert_eq!(reopened.unwrap(), Verdict::Refused, "{end}: the operator has seen another record");
                continue;
            }
            let request = request(&other, &name);
            let (answer, ()) = tokio::join!(other.reserve(&request), meanwhile);
            let answer = answer.unwrap();
            let right = match (end, &answer) {
                ("renewed", Reservation::InProgress { attempt, .. }) => *attempt == 1,
                ("released", Reservation::Granted { lease, takeover, .. }) => lease.attempt == 2 && !takeover,
                ("finished", Reservation::Finished { record, .. }) => *record == Record::after(&lease, done().state()),
                ("taken over", Reservation::InProgress { attempt, .. }) => *attempt == 2,
                _ => false,
            };
            assert!(right, "{end}: {answer:?}");
            assert_eq!(
                wire.seen().len(),
                if end == "released" { 3 } else { 2 },
                "{end}: the refusal shows the stored record"
            );
        }
    }
}

#[tokio::test]
async fn a_clock_beyond_the_skew_is_logged_once() {
    for (off, words) in [(0, None), (600_000, Some("ahead of")), (-600_000, Some("behind"))] {
        let log = Log::start();
        let store =
            options("off").clock(OddClock::ahead_by(off)).build(client(&Wire::to(&Kind::Dynoxide.shared())), TABLE);
        for n in 0..3 {
            store.reserve(&request(&store, &format!("{off}:{n}"))).await.unwrap();
        }
        let log = log.end();
        assert_eq!(log.matches("WARN").count(), usize::from(words.is_some()), "{off}: {log}");
        assert!(log.contains(words.unwrap_or_default()), "{off}: {log}");
    }
}

#[tokio::test]
async fn a_late_renewal_does_not_shorten_a_lease() {
    let (store, clock) = timed("late-renewal", 0, THEN);
    let held = reserved(&store, "k").await;
    clock.set_wall(THEN + 20_000);
    assert_eq!(renew_all(&store, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Applied]);
    let before = item(&raw(), "late-renewal:1/test/k").await;
    // The clock is set back by 10 s. To the store, the renewal below looks like a late renewal, sent 10 s earlier.
    clock.set_wall(THEN + 10_000);
    assert_eq!(
        renew_all(&store, std::slice::from_ref(&held)).await.unwrap(),
        [Verdict::Applied],
        "the key is held, with a longer lease"
    );
    assert_eq!(item(&raw(), "late-renewal:1/test/k").await, before);
    let forged = {
        let mut lease = held;
        lease.owner = store.context().new_owner();
        lease
    };
    assert_eq!(renew_all(&store, &[forged]).await.unwrap(), [Verdict::Refused]);
}

// Renewals of leases.

/// Starts a runtime of one thread that runs `work` and is then blocked until the returned sender is dropped.
fn blocked_runtime<F>(work: impl FnOnce() -> F + Send + 'static) -> std::sync::mpsc::Sender<()>
where
    F: Future<Output = ()>,
{
    let (blocked, until) = std::sync::mpsc::channel();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            work().await;
            done.send(()).unwrap();
            // Blocks the thread, so that no task, timer or connection of this runtime makes progress.
            let _: Result<(), _> = until.recv();
        });
    });
    is_done.recv().unwrap();
    blocked
}

#[tokio::test]
async fn upkeep_goes_on_while_the_runtime_of_its_callers_is_blocked() {
    let endpoint = Kind::Dynoxide.shared();
    let lease = request(&wired("blocked").0, "k");
    for apart in [true, false] {
        let (calls, upkeep) = (Wire::to(&endpoint), Wire::to(&endpoint));
        let shared = client(&calls);
        let caller = options("blocked").build(shared.clone(), TABLE);
        let request = lease.clone();
        let blocked = blocked_runtime(move || async move { drop(wins(&caller, &request).await) });
        let options = match apart {
            true => options("blocked").upkeep_client(client(&upkeep)),
            false => options("blocked").response_timeout(Duration::from_millis(200)),
        };
        let store = options.build(shared, TABLE);
        let lease = Record::first(&lease).lease(&lease);
        let handle = store.upkeep();
        assert!(std::ptr::eq(handle.context(), store.context()));
        assert!(Arc::ptr_eq(&handle, &store.upkeep()) && Arc::ptr_eq(&handle, &handle.upkeep()));
        if apart {
            for _ in 0..10 {
                assert_eq!(renew_all(&*handle, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
            }
            assert_eq!((calls.seen().len(), upkeep.seen().len()), (1, 10));
        } else {
            // Both handles use the user's HTTP client, whose connection belongs to the blocked runtime.
            let answer = renew_all(&*handle, std::slice::from_ref(&lease)).await;
            assert!(answer.unwrap_err().may_have_landed());
        }
        drop(blocked);
    }
}

#[tokio::test]
async fn a_renewal_that_hangs_delays_no_other_renewal() {
    const HUNG: usize = 40;
    let (store, wire) = wired("hung");
    let mut leases = Vec::new();
    for n in 0..100 {
        leases.push(reserved(&store, &format!("k{n}")).await);
    }
    let may = Arc::new(Semaphore::new(0));
    wire.script(vec![Reply::Once(Arc::clone(&may)); HUNG]);
    let answered = Mutex::new(Vec::new());
    let answer = |at: usize, write| {
        let mut answered = answered.lock().unwrap();
        answered.push((at, write));
        if answered.len() == leases.len() - HUNG {
            // Every other renewal has been answered, so the hanging requests may go on.
            may.add_permits(HUNG);
        }
    };
    tokio::time::timeout(Duration::from_secs(30), store.renew(&leases, &answer))
        .await
        .expect("the callers wait for the connection")
        .unwrap();
    let mut answered = answered.into_inner().unwrap();
    answered.sort_by_key(|(at, _)| *at);
    assert!(answered.into_iter().eq((0..leases.len()).map(|at| (at, Verdict::Applied))));
}

#[tokio::test]
async fn a_store_call_of_several_requests_has_one_time_limit() {
    const LIMIT: Duration = Duration::from_secs(2);
    let (store, wire) = wired("limit-of-all");
    assert_eq!(store.release(&reserved(&store, "k").await, Release::Returned).await.unwrap(), Verdict::Applied);
    let hurried = options("limit-of-all").response_timeout(LIMIT).build(client(&wire), TABLE);
    assert_eq!((hurried.response_timeout(), hurried.upkeep().response_timeout()), (LIMIT, LIMIT));
    assert_eq!((Store::namespace(&hurried), hurried.upkeep().namespace()), ("limit-of-all:", "limit-of-all:"));
    let may = Arc::new(Semaphore::new(0));
    wire.script([Reply::Once(Arc::clone(&may)), Reply::Silence]);
    let began = std::time::Instant::now();
    let late = async {
        tokio::time::sleep(LIMIT - LIMIT / 10).await;
        may.add_permits(1);
    };
    let request = request(&hurried, "k");
    let (answer, ()) = tokio::join!(hurried.reserve(&request), late);
    assert!(answer.unwrap_err().may_have_landed());
    assert!(
        began.elapsed() < LIMIT * 2 - LIMIT / 10,
        "{:?}: each request has had the whole time limit",
        began.elapsed()
    );
}

// Refusals by DynamoDB, and invalid answers.

/// Answers to the request that begins an attempt, each with the kind of the expected error.
fn answers() -> Vec<(Reply, StoreErrorKind)> {
    use StoreErrorKind::{Full, Misconfigured, Unavailable, Unconfirmed};
    let mut answers = Vec::new();
    // DynamoDB refuses the request, which had no effect.
    for code in [
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "RequestLimitExceeded",
        "LimitExceededException",
        "TransactionConflictException",
        "TransactionInProgressException",
        "ReplicatedWriteConflictException",
        "ExpiredTokenException",
    ] {
        answers.push((Reply::error(400, code), Unavailable));
    }
    answers.push((Reply::error(400, "ItemCollectionSizeLimitExceededException"), Full));
    for code in [
        "ResourceNotFoundException",
        "AccessDeniedException",
        "UnrecognizedClientException",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "ValidationException",
    ] {
        answers.push((Reply::error(400, code), Misconfigured));
    }
    // The server fails, and the request may have had an effect.
    for (status, code) in [
        (500, "InternalServerError"),
        (503, "ServiceUnavailable"),
        (500, "ThrottlingException"),
        (502, "ValidationException"),
        (400, "NobodyKnowsException"),
        (408, "RequestTimeout"),
    ] {
        answers.push((Reply::error(status, code), Unconfirmed));
    }
    // DynamoDB gives no such answers, or the answer does not arrive.
    let no_answers = [
        "",
        "{}",
        "null",
        "[]",
        "{\"ok\":true}",
        "<html>please log in</html>",
        "{\"Attributes\":",
        "{\"ConsumedCapacity\":7}",
        "\u{0}\u{1}\u{2}",
        "{\"Item\":{}}",
    ];
    for body in no_answers {
        for status in [200, 204, 400, 403, 500] {
            answers.push((Reply::Instead(status, body.to_owned()), Unconfirmed));
        }
        answers.push((Reply::After(200, body.to_owned()), Unconfirmed));
    }
    answers.push((Reply::After(500, String::new()), Unconfirmed));
    answers.push((Reply::Lost, Unconfirmed));
    answers
}

#[tokio::test]
async fn every_refusal_by_dynamodb_has_its_error_kind_in_every_store_call() {
    let (store, wire) = wired("kinds");
    for (n, (reply, expected)) in answers().into_iter().enumerate() {
        let request = request(&store, &format!("k{n}"));
        let lease = Record::first(&request).lease(&request);
        let is = |call: &str, error: Option<StoreError>| {
            let error = error.unwrap_or_else(|| panic!("{call} with {reply:?} is no error"));
            assert_eq!(error.kind(), expected, "{call} with {reply:?}: {error}");
            assert!(!format!("{error:?}").contains("log in"), "the answer is not shown: {error:?}");
        };
        let play = || wire.script([reply.clone()]);
        play();
        is("reserve", store.reserve(&request).await.err());
        // The same reservation succeeds without a fault. The operations below need its record.
        assert_eq!(wins(&store, &request).await, lease, "{reply:?}");
        play();
        is("renew", renew_all(&store, std::slice::from_ref(&lease)).await.err());
        play();
        is("inspect", store.inspect(&lease.key).await.err());
        play();
        is("release", store.release(&lease, Release::Returned).await.err());
        assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied, "{reply:?}");
        play();
        is("reopen", store.reopen(&lease.key, 1).await.err());
        let second = wins(&store, &request.clone().owner(store.context().new_owner())).await;
        play();
        is("finish", store.finish(&second, &done()).await.err());
        assert_eq!(store.finish(&second, &done()).await.unwrap(), Verdict::Applied, "{reply:?}");
    }
}

#[tokio::test]
async fn a_login_that_lacks_one_right_is_not_ready_and_a_ping_writes_nothing() {
    let (store, wire) = wired("ping");
    for lacking in 0..3 {
        let replies = (0..lacking).map(|_| Reply::Pass).chain([Reply::error(400, "AccessDeniedException")]);
        wire.script(replies);
        let error = store.ping().await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{lacking}: {error}");
    }
    assert!(store.health().await.is_ready());
    let page = store.list(&Filter::new().scan()).await.unwrap();
    assert_eq!((page.records.len(), page.unreadable), (0, 0));
}

#[tokio::test]
async fn neither_a_refusal_nor_an_invalid_answer_makes_a_body_run_twice() {
    // In each step, DynamoDB answers the first `before` requests. The scripted answer then takes the place of
    // DynamoDB's answers to `times` requests.
    let steps = [("reserve", 0, 1), ("reserve", 0, 5), ("finish", 1, 1), ("finish", 1, 5)];
    let cases = answers().into_iter().enumerate().flat_map(|(n, (reply, _))| {
        steps.map(move |(step, before, times)| {
            let reply = reply.clone();
            async move {
                let (store, wire) = wired("runs");
                let name = format!("{n}:{step}:{times}");
                let runs = AtomicU32::new(0);
                wire.script(vec![Reply::Pass; before].into_iter().chain(vec![reply.clone(); times]));
                let (first, outcome) = call(&store, &name, &runs).await;
                let ran = runs.load(Ordering::SeqCst);
                assert_eq!(first.is_ok(), outcome.recorded(), "{name} {reply:?}: {first:?}");
                wire.script([]);
                store.flush().await;
                let (second, outcome) = call(&store, &name, &runs).await;
                assert!(runs.into_inner() <= 1, "{name} {reply:?}: {first:?}, then {second:?}");
                match second {
                    Ok(_) => assert_eq!(outcome.replayed(), ran == 1, "{name} {reply:?}"),
                    // The body has run and its result is unknown, so the key stays held until its lease lapses.
                    Err(Error::InProgress { .. }) => {
                        assert!(ran == 1 && first.is_err() && step == "finish", "{name} {reply:?}: {first:?}");
                    }
                    Err(error) => panic!("{name} {reply:?}: {error}"),
                }
            }
        })
    });
    futures::future::join_all(cases).await;
}

#[tokio::test]
async fn a_refusal_without_the_item_makes_the_store_read_the_item() {
    const REFUSED: &str = r#"{"__type":"ConditionalCheckFailedException","message":"The conditional request failed"}"#;
    let (store, wire) = wired("no-item");
    let bare = || Reply::Instead(400, REFUSED.to_owned());
    // DynamoDB refuses the write without returning the item, so the store reads the item. The store finds none, because
    // the item was deleted meanwhile, and repeats the reservation.
    wire.script([bare()]);
    let lease = reserved(&store, "k").await;
    assert_eq!(wire.seen(), ["PutItem", "GetItem", "PutItem"]);
    // The store reads the item and finds another attempt's record.
    wire.script([bare()]);
    assert!(matches!(store.reserve(&request(&store, "k")).await.unwrap(), Reservation::InProgress { attempt: 1, .. }));
    assert_eq!(wire.seen(), ["PutItem", "GetItem"]);
    // The store reads the item and finds the attempt's own result.
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    wire.script([bare()]);
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    // The read of the item fails, and the call returns an error.
    wire.script([bare(), Reply::error(500, "InternalServerError")]);
    assert!(store.reserve(&request(&store, "other")).await.unwrap_err().may_have_landed());
    wire.script([bare(), Reply::Instead(200, "{}".to_owned())]);
    assert!(store.reserve(&request(&store, "other")).await.unwrap_err().may_have_landed());
    // The service refuses forever, and the call ends after some tries.
    wire.script((0..1000).flat_map(|_| [bare(), Reply::Pass]));
    wire.seen();
    let error = store.reserve(&request(&store, "endless")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert_eq!(wire.seen().len(), 2 * 20, "20 tries, each with a refused write and a read");
    // The refusal contains an item that is not a record.
    let nonsense = REFUSED.replace('}', r#","Item":{"key":{"S":"x"},"state":{"N":"7"}}}"#);
    wire.script([Reply::Instead(400, nonsense)]);
    assert_eq!(store.reserve(&request(&store, "nonsense")).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[tokio::test]
async fn a_record_with_a_journal_of_a_later_format_is_left_unchanged() {
    let (store, _) = wired("later-journal");
    let lease = reserved(&store, "k").await;
    assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
    let name = "later-journal:1/test/k";
    let mut later = item(&raw(), name).await;
    later.insert("format".to_owned(), AttributeValue::N("2".to_owned()));
    raw().put_item().table_name(TABLE).set_item(Some(later.clone().into_iter().collect())).send().await.unwrap();
    is_of_a_later_format(&store, "k").await;
    assert_eq!(item(&raw(), name).await, later);
}

#[tokio::test]
async fn damaged_items_and_items_of_a_later_version_are_not_changed() {
    let (store, wire) = wired("others");
    let written = reserved(&store, "sample").await;
    let sample = item(&raw(), "others:1/test/sample").await;
    let number = |n: i64| AttributeValue::N(n.to_string());
    let text = |text: &str| AttributeValue::S(text.to_owned());
    // The item has the format of a later version. Its retention seems to have ended, but only the later version can
    // read such an item.
    let mut later = sample.clone();
    later.insert("key".to_owned(), text("others:1/test/later"));
    later.insert("format".to_owned(), number(2));
    later.insert("expires_at".to_owned(), number(1));
    raw().put_item().table_name(TABLE).set_item(Some(later.clone().into_iter().collect())).send().await.unwrap();
    let error = store.reserve(&request(&store, "later")).await.unwrap_err();
    assert!(error.kind() == StoreErrorKind::Corrupt && error.to_string().contains("format 2"), "{error}");
    assert_eq!(item(&raw(), "others:1/test/later").await, later);
    // Each damaged attribute comes with a part of the expected error. `None` removes the attribute.
    let spoiled: Vec<(&str, &str, Option<AttributeValue>)> = vec![
        ("format", "not a record", None),
        ("format", "not a record", Some(text("1"))),
        ("format", "format 2", Some(number(2))),
        ("format", "damaged", Some(number(0))),
        ("state", "damaged", None),
        ("state", "damaged", Some(text("X"))),
        ("state", "damaged", Some(number(1))),
        ("owner", "damaged", None),
        ("owner", "damaged", Some(AttributeValue::B(vec![1; 15].into()))),
        ("attempt", "damaged", Some(number(0))),
        ("attempt", "damaged", Some(text("1"))),
        ("attempt", "damaged", Some(AttributeValue::N("1.5".to_owned()))),
        ("attempts_used", "damaged", Some(number(2))),
        ("fingerprint", "damaged", Some(AttributeValue::B(vec![1; 31].into()))),
        ("fingerprint", "damaged", Some(text("x"))),
        ("on_crash_fail", "damaged", Some(text("true"))),
        ("lease_ms", "damaged", None),
        ("lease_ms", "damaged", Some(text("60000"))),
        ("ttl_ms", "damaged", Some(number(-1))),
        ("lapses_at", "damaged", None),
        ("lapses_at", "damaged", Some(text("0"))),
        ("expires_at", "damaged", None),
        ("expires_at", "damaged", Some(AttributeValue::Bool(true))),
        ("codec", "damaged", Some(number(1))),
        ("result", "damaged", Some(text("42"))),
        ("result_bytes", "damaged", Some(text("42"))),
    ];
    for (n, (attribute, words, value)) in spoiled.into_iter().enumerate() {
        let name = format!("k{n}");
        let mut spoiled = sample.clone();
        spoiled.remove(attribute);
        let what = format!("{attribute} = {value:?}");
        spoiled.extend(value.map(|value| (attribute.to_owned(), value)));
        spoiled.insert("key".to_owned(), text(&format!("others:1/test/{name}")));
        let put = raw().put_item().table_name(TABLE).set_item(Some(spoiled.clone().into_iter().collect()));
        put.send().await.unwrap();
        let runs = AtomicU32::new(0);
        let (result, _) = call(&store, &name, &runs).await;
        let Err(Error::Store { source, .. }) = result else { panic!("{what}: {result:?}") };
        assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{what}");
        assert!(source.to_string().contains(words), "{what}: {source}");
        assert_eq!(runs.into_inner(), 0, "{what}");
        // The owner's writes and an operator's `reopen` are refused, and do not change the damaged item.
        let request = request(&store, &name);
        let lease = Record::first(&request).lease(&request);
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Refused, "{what}");
        assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Refused, "{what}");
        assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Refused], "{what}");
        assert_eq!(store.reopen(&lease.key, 1).await.unwrap(), Verdict::Refused, "{what}");
        assert_eq!(item(&raw(), &format!("others:1/test/{name}")).await, spoiled, "{what} has not changed");
        idem_tests::forget_damaged(&store, &lease.key, words).await;
    }
    drop((written, wire));
}

#[tokio::test]
async fn errors_of_the_store_show_neither_signatures_nor_results() {
    let (store, wire) = wired("secrets");
    for code in ["InvalidSignatureException", "ThrottlingException", "UnrecognizedClientException", "Whatever"] {
        let body = format!("{{\"__type\":\"{code}\",\"message\":\"x-amz-security-token: hush\",\"Item\":\"hush\"}}");
        wire.script([Reply::Instead(400, body)]);
        let error = store.reserve(&request(&store, "k")).await.unwrap_err();
        assert!(!format!("{error:?} {error}").contains("hush"), "{error:?}");
        assert!(error.to_string().contains(code), "{error}");
    }
    assert!(!format!("{store:?} {:?}", DynamoStore::options()).contains("Credentials"));
}

// Requests that the client repeats.

fn retrying(test: &str) -> (DynamoStore, Wire) {
    let wire = Wire::to(&Kind::Dynoxide.shared());
    let retries = RetryConfig::standard().with_max_attempts(3).with_initial_backoff(Duration::from_millis(1));
    (options(test).build(client_with(&wire, retries), TABLE), wire)
}

#[tokio::test]
async fn writes_that_the_client_repeats_take_effect_once() {
    let (store, wire) = retrying("repeated");
    for (n, lost) in
        [Reply::After(500, String::new()), Reply::After(503, "{}".to_owned()), Reply::Lost].iter().enumerate()
    {
        let fail_at = |calls: usize| wire.script(vec![Reply::Pass; calls].into_iter().chain([lost.clone()]));
        let name = format!("k{n}");
        let first = request(&store, &name);
        fail_at(0);
        wire.seen();
        let lease = wins(&store, &first).await;
        assert_eq!((lease.attempt, wire.seen().len()), (1, 2), "{lost:?}");
        fail_at(0);
        assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied], "{lost:?}");
        fail_at(0);
        assert_eq!(store.release(&lease, Release::NotStarted).await.unwrap(), Verdict::Applied, "{lost:?}");
        let released = {
            let mut record = Record::after(&lease, State::Released);
            record.attempts_used = 0;
            record
        };
        assert_eq!(store.inspect(&lease.key).await.unwrap().unwrap().record, released, "refunded once");
        // The second request of a reservation fails, after the first has found a record.
        fail_at(1);
        let lease = reserved(&store, &name).await;
        assert_eq!((lease.attempt, lease.attempts_used), (2, 1), "{lost:?}");
        fail_at(0);
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied, "{lost:?}");
        let recorded = Record::after(&lease, done().state());
        assert_eq!(store.inspect(&lease.key).await.unwrap().unwrap().record, recorded, "{lost:?}");
        fail_at(0);
        assert_eq!(store.reopen(&lease.key, 2).await.unwrap(), Verdict::Applied, "{lost:?}");
    }
}

#[tokio::test]
async fn a_refusal_that_follows_a_lost_answer_is_reported_as_unconfirmed() {
    let (store, wire) = retrying("doubt");
    let throttled = || Reply::error(400, "ThrottlingException");
    wire.script([throttled(), throttled(), throttled()]);
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "refused three times: {error}");
    // The time limit ends while the client waits before its next try.
    let wire = Wire::to(&Kind::Dynoxide.shared());
    let patient = RetryConfig::standard()
        .with_initial_backoff(Duration::from_secs(1000))
        .with_max_backoff(Duration::from_secs(1000));
    let hurried =
        options("doubt").response_timeout(Duration::from_millis(500)).build(client_with(&wire, patient), TABLE);
    for (reply, kind) in
        [(throttled(), StoreErrorKind::Unavailable), (Reply::Instead(500, String::new()), StoreErrorKind::Unconfirmed)]
    {
        wire.script(vec![reply; 3]);
        let error = hurried.reserve(&request(&store, "pause")).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
    let (store, wire) = retrying("doubt");
    for refusal in [throttled(), Reply::error(400, "AccessDeniedException")] {
        wire.seen();
        let request = request(&store, &format!("{refusal:?}").replace('/', ""));
        wire.script([Reply::After(500, String::new()), refusal.clone(), refusal.clone(), refusal.clone()]);
        let error = store.reserve(&request).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{refusal:?}: {error}");
        wire.script([]);
        assert!(store.inspect(&request.key).await.unwrap().is_some(), "the request had landed");
    }
}

// Faults.

#[tokio::test]
async fn a_store_call_without_an_answer_ends_at_its_time_limit() {
    let (store, _) = wired("silence");
    let wire = Wire::to(&Kind::Dynoxide.shared());
    let hurried = options("silence").response_timeout(Duration::from_millis(100)).build(client(&wire), TABLE);
    let first = request(&store, "k");
    let silent = async {
        wire.script(vec![Reply::Silence; 5]);
        assert!(hurried.reserve(&first).await.unwrap_err().may_have_landed());
        let lease = wins(&store, &first).await;
        assert!(renew_all(&hurried, std::slice::from_ref(&lease)).await.unwrap_err().may_have_landed());
        assert!(hurried.inspect(&lease.key).await.is_err());
        assert!(hurried.reopen(&lease.key, 1).await.is_err());
        assert!(hurried.finish(&lease, &done()).await.unwrap_err().may_have_landed());
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied, "recognised, or written now");
    };
    tokio::time::timeout(Duration::from_secs(50), silent).await.expect("every call ends");
}

#[tokio::test]
async fn calls_through_a_line_that_breaks_take_effect_once() {
    let emulator = Emulator::with_table(Kind::Dynoxide).await;
    let direct = open(&emulator.endpoint(), TABLE);
    let broken = async |line: Line| {
        let proxy = Proxy::to(emulator.port()).await;
        let through = Wire::to(&proxy.url().replace("redis:", "http:"));
        let store = DynamoStore::options().response_timeout(Duration::from_secs(2)).build(client(&through), TABLE);
        let (runs, name) = (AtomicU32::new(0), format!("finish:{line:?}"));
        // The line breaks while the result is being recorded, and recovers after a while.
        let body = async {
            proxy.set(line);
            Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let operation = Operation::new(&store, Key::new("test", &name), POLICY);
        let call_through = observe(operation.run(body));
        let heal = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            proxy.set(Line::Pass);
        };
        let ((result, outcome), ()) = tokio::join!(call_through, heal);
        assert_eq!(result.unwrap(), 1, "{line:?}");
        assert!(outcome.recorded(), "{line:?}");
        assert!(call(&direct, &name, &runs).await.1.replayed(), "{line:?}");
        assert_eq!(runs.into_inner(), 1, "{line:?}");
        // The line breaks while the key is being reserved, and recovers after a while.
        let (runs, name) = (AtomicU32::new(0), format!("reserve:{line:?}"));
        proxy.set(line);
        let (result, _) = call(&store, &name, &runs).await;
        assert!(matches!(result, Err(Error::Store { .. })), "{line:?}: {result:?}");
        proxy.set(Line::Pass);
        store.flush().await;
        assert!(call(&direct, &name, &runs).await.1.executed(), "{line:?}: the key is released, or was never reserved");
        assert_eq!(runs.into_inner(), 1, "{line:?}");
    };
    let lines = [Line::LoseReplies, Line::ResetOnReply, Line::LoseRequests, Line::Refuse];
    futures::future::join_all(lines.map(broken)).await;
}

#[tokio::test]
async fn the_error_for_an_unreachable_server_says_that_nothing_was_written() {
    let store = DynamoStore::new(client(&Wire::to("http://127.0.0.1:1")), TABLE);
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    let wire = Wire::to("http://127.0.0.1:1");
    let retries = RetryConfig::standard().with_initial_backoff(Duration::from_millis(1));
    let store = DynamoStore::new(client_with(&wire, retries), TABLE);
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(wire.seen().len(), 3);
    assert!(error.is_transient(), "{error}");
}

#[tokio::test]
async fn processes_race_for_the_same_keys_while_the_server_restarts() {
    let mut emulator = Emulator::durable().await;
    let spec = format!("dynamo {} {TABLE}", emulator.endpoint());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let restarts = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(700)).await;
            emulator.kill();
            emulator.run();
        }
    };
    let effects = race.run(restarts).await;
    // If the emulator is away for longer than a lease, each process may leave an effect without a record.
    println!("{} effects more than one for each key", effects.repeated());
    assert!(effects.repeated() <= race.kills + 3 * (race.racers + 1), "{effects:?}");
}
