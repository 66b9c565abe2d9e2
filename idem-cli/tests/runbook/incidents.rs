//! One test for each incident: its cause, its alerts, and its resolution.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use idem_runtime::clock::{Clock as _, ManualClock, SystemClock};
use idem_runtime::{
    Codec as _, CodecError, Disposition, Error, Json, Key, OnCrash, OnUndecodable, Operation, Outcome, PostgresStore,
    RedisStore, SqliteStore, StoreExt as _, Undecodable, current, observe,
};
use idem_tests::postgres::PostgresServer;
use idem_tests::proxy::{Line, Proxy};
use idem_tests::server::{Kind, RedisServer, until};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::scene::{Failure, PAY, Scene, deliver, key};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Returns whether the broker should deliver the message again.
fn comes_again(outcome: &Outcome) -> bool {
    matches!(outcome.disposition(), Disposition::Retry { .. })
}

#[tokio::test]
async fn the_runbook_resolves_the_death_of_a_worker_under_on_crash_fail() {
    let (scene, store) = Scene::on_file("A worker died under `on_crash = fail`").await;
    let policy = PAY.lease(SECOND).on_crash(OnCrash::Fail);
    let mut worker = scene.worker("42", OnCrash::Fail, SECOND).await;
    worker.kill();
    // The broker keeps delivering until the lease has lapsed.
    until("the operation is interrupted", async || {
        let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
        let refused = matches!(result, Err(Failure::Refused(Error::Interrupted { .. })));
        assert!(if refused { outcome.disposition() == Disposition::DeadLetter } else { comes_again(&outcome) });
        refused
    })
    .await;
    assert_eq!(store.count_undecided().await.unwrap(), 1);
    scene.is_seen(&store);
    // An operator has asked the payment provider: the customer was charged.
    scene.play();
    let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert_eq!((result.unwrap(), outcome.disposition()), (json!({ "receipt": "r-42" }), Disposition::Ack));
    assert_eq!(scene.charges("42"), 1);
    // The operator finds no charge for order 43 at the payment provider.
    let mut worker = scene.worker("43", OnCrash::Fail, SECOND).await;
    worker.kill();
    until("the operation is interrupted", async || {
        let (result, _) = deliver(&store, "43", policy, scene.charge("43")).await;
        matches!(result, Err(Failure::Refused(Error::Interrupted { .. })))
    })
    .await;
    scene.play();
    let (result, outcome) = deliver(&store, "43", policy, scene.charge("43")).await;
    assert!(result.is_ok() && outcome.executed() && outcome.attempt() == Some(2), "{outcome:?}");
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_step_in_doubt() {
    let (scene, store) = Scene::on_file("A step is in doubt").await;
    let order = async |order: &str, carrier_answers: bool| {
        let body = async {
            let attempt = current()?;
            let charge: Value = attempt.step("charge").run(async |_| scene.charge(order).await).await?;
            let booking = attempt.step("book").fail().timeout(SECOND / 100);
            let parcel: String = booking
                .run(async |_| match carrier_answers {
                    true => Ok::<_, Failure>("p-9".to_owned()),
                    false => std::future::pending().await,
                })
                .await?;
            Ok(json!({ "receipt": charge["receipt"], "parcel": parcel }))
        };
        deliver(&store, order, PAY, body).await
    };
    let interrupts = async |number: &str| {
        // The carrier does not answer, and the step runs into its time limit.
        let (result, _) = order(number, false).await;
        assert!(matches!(result, Err(Failure::Refused(Error::Step { .. }))), "{result:?}");
        let (result, outcome) = order(number, true).await;
        assert!(matches!(result, Err(Failure::Refused(Error::Interrupted { .. }))), "{result:?}");
        assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    };
    interrupts("42").await;
    assert_eq!(store.count_undecided().await.unwrap(), 1);
    scene.is_seen(&store);
    // The carrier has a parcel for order 42.
    scene.play();
    let (result, outcome) = order("42", true).await;
    assert_eq!(result.unwrap(), json!({ "receipt": "r-42", "parcel": "p-7" }));
    assert_eq!((outcome.disposition(), scene.charges("42")), (Disposition::Ack, 1));
    // The carrier has no parcel for order 43.
    interrupts("43").await;
    scene.play();
    let (result, _) = order("43", true).await;
    assert_eq!(result.unwrap(), json!({ "receipt": "r-43", "parcel": "p-9" }));
    assert_eq!(scene.charges("43"), 1);
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_hung_process_that_holds_its_lease() {
    let (scene, store) = Scene::on_file("A process hangs and holds its lease").await;
    // The lease is so long that the test can't wait for its lapse.
    let policy = PAY.lease(HOUR);
    let mut worker = scene.worker("42", OnCrash::Retry, HOUR).await;
    for _ in 0..4 {
        let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
        assert!(matches!(result, Err(Failure::Refused(Error::InProgress { .. }))), "{result:?}");
        assert!(comes_again(&outcome), "{outcome:?}");
    }
    scene.is_seen(&store);
    scene.play();
    worker.kill();
    scene.play();
    let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert!(result.is_ok() && outcome.executed() && outcome.attempt() == Some(2), "{outcome:?}");
    // The guarantee is at-least-once: the first worker had charged before it hung.
    assert_eq!(scene.charges("42"), 2);
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_result_that_grew_too_large() {
    let (scene, store) = Scene::on_file("A result grew too large").await;
    let policy = PAY.max_result_bytes(1024);
    let large = async {
        let mut receipt = scene.charge("42").await?;
        receipt["invoice"] = "x".repeat(5000).into();
        Ok(receipt)
    };
    let (result, outcome) = deliver(&store, "42", policy, large).await;
    assert!(result.is_ok() && outcome.disposition() == Disposition::Ack, "the caller has the result");
    let duplicate = async || deliver(&store, "42", policy, scene.charge("42")).await;
    let (result, outcome) = duplicate().await;
    assert!(matches!(result, Err(Failure::Refused(Error::ResultUnavailable { .. }))), "{result:?}");
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    scene.is_seen(&store);
    scene.play();
    let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert_eq!((result.unwrap(), outcome.replayed()), (json!({ "receipt": "r-42" }), true));
    assert_eq!(scene.charges("42"), 1);
    scene.ends();
}

/// The result type of the previous release. `Now` is the result type of this release.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Before {
    receipt: String,
    cents: u64,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Now {
    receipt: String,
    amount: String,
}

fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    let Before { receipt, cents } = recorded.decode()?;
    Json::encode(&Now { receipt, amount: format!("{}.{:02} EUR", cents / 100, cents % 100) })
}

#[tokio::test]
async fn the_runbook_resolves_a_return_type_that_a_deployment_changed() {
    let (scene, store) = Scene::on_file("A deployment changed a return type").await;
    let before = async || {
        let body = async {
            scene.charge("42").await?;
            Ok(Before { receipt: "r-42".to_owned(), cents: 1999 })
        };
        deliver(&store, "42", PAY, body).await
    };
    let now = async |policy| deliver::<Now>(&store, "42", policy, async { panic!("the body runs again") }).await;
    let first = before().await.0.unwrap();
    let (result, outcome) = now(PAY).await;
    assert!(matches!(result, Err(Failure::Refused(Error::ResultUnavailable { .. }))), "{result:?}");
    assert!(comes_again(&outcome) && outcome.misconfigured(), "{outcome:?}");
    scene.is_seen(&store);
    // The old release still replays the result. The new release replays the result with a migration.
    assert_eq!(before().await.0.unwrap(), first);
    let (result, outcome) = now(PAY.on_undecodable(OnUndecodable::Migrate(migrate))).await;
    let expected = Now { receipt: "r-42".to_owned(), amount: "19.99 EUR".to_owned() };
    assert_eq!((result.unwrap(), outcome.disposition()), (expected, Disposition::Ack));
    assert_eq!(scene.charges("42"), 1);
    scene.play();
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_ttl_that_is_too_short() {
    let clock = ManualClock::new();
    let mut scene = Scene::at("A `ttl` is too short", "");
    scene.url = format!("sqlite:{}", scene.folder.file().display());
    // The clock of the test starts in the past, and shows the present wall time at the end, because the command uses
    // the real clock.
    clock.set_wall(SystemClock::default().wall().saturating_sub(HOUR + HOUR / 12));
    let options = SqliteStore::options().holder("payments").clock(clock.clone());
    let store = options.open(scene.folder.file()).await.unwrap();
    scene.begins(&store);
    let policy = PAY.ttl(HOUR);
    for order in ["42", "43"] {
        assert!(deliver(&store, order, policy, scene.charge(order)).await.1.executed());
    }
    clock.advance(HOUR * 11 / 12);
    // The broker delivers the message again late, but within the `ttl`.
    for _ in 0..3 {
        assert!(deliver(&store, "42", policy, scene.charge("42")).await.1.replayed());
    }
    clock.advance(HOUR / 6);
    let (_, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert!(
        outcome.executed() && outcome.attempt() == Some(1),
        "the record is gone, so this attempt is the first: {outcome:?}"
    );
    assert_eq!(scene.charges("42"), 2);
    scene.is_seen(&store);
    scene.play();
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_flush_of_redis() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes"]);
    let mut scene = Scene::at("Redis was flushed", &server.url());
    let store = RedisStore::options().holder("payments").connect(&server.url()).await.unwrap();
    scene.begins(&store);
    // A provider that recognises idempotency keys.
    let provider = Mutex::new(BTreeSet::new());
    let policy = PAY.lease(SECOND);
    let charge = async |order: &str| {
        let known = current()?.child_key("charge");
        provider.lock().unwrap().insert(known);
        scene.charge(order).await
    };
    assert!(deliver(&store, "42", policy, charge("42")).await.1.executed());
    // One call runs during the flush.
    let running = deliver(&store, "43", policy, async {
        scene.charge("43").await?;
        let mut raw = server.raw().await;
        let _: () = redis::cmd("FLUSHALL").query_async(&mut raw).await.unwrap();
        std::future::pending::<Result<Value, Failure>>().await
    });
    let (result, outcome) = running.await;
    assert!(matches!(result, Err(Failure::Refused(Error::LeaseLost { .. }))), "{result:?}");
    assert!(comes_again(&outcome), "{outcome:?}");
    scene.is_seen(&store);
    scene.play();
    let (_, outcome) = deliver(&store, "42", policy, charge("42")).await;
    assert!(outcome.executed(), "the flush removed the record: {outcome:?}");
    assert_eq!((scene.charges("42"), provider.lock().unwrap().len()), (2, 1), "the child key is the same as before");
    scene.ends();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runbook_resolves_a_failover_of_postgresql() {
    let mut primary = PostgresServer::start();
    let store = PostgresStore::options().ensure_schema().connect(&primary.url()).await.unwrap();
    drop(store);
    let line = Proxy::to(primary.port()).await;
    let standby = PostgresServer::standby_of(&primary, line.port());
    let mut scene = Scene::at("PostgreSQL failed over", &standby.url());
    // The URL names both hosts, as the URL of an application does.
    let both = format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres", primary.port(), standby.port());
    let store = PostgresStore::options().holder("payments").connect(&both).await.unwrap();
    scene.begins(&store);
    let policy = PAY.lease(SECOND);
    assert!(deliver(&store, "41", policy, scene.charge("41")).await.1.executed());
    let raw = standby.raw().await;
    until("the standby has the record", async || {
        let rows = raw.query("SELECT state FROM idem.records WHERE key = '1/pay/order:41'", &[]).await.unwrap();
        rows.first().is_some_and(|row| row.get::<_, &str>(0) == "completed")
    })
    .await;
    // The standby falls behind, and no commit waits for it.
    line.set(Line::Refuse);
    assert!(deliver(&store, "42", policy, scene.charge("42")).await.1.executed());
    let began = tokio::sync::Notify::new();
    let running = deliver(&store, "43", policy, async {
        scene.charge("43").await?;
        began.notify_one();
        std::future::pending::<Result<Value, Failure>>().await
    });
    let failover = async {
        began.notified().await;
        primary.kill();
        // Delivers messages while neither server answers.
        for _ in 0..3 {
            let (result, outcome) = deliver(&store, "44", policy, scene.charge("44")).await;
            assert!(matches!(result, Err(Failure::Refused(Error::Store { .. }))), "{result:?}");
            assert!(comes_again(&outcome), "{outcome:?}");
        }
        raw.execute("SELECT pg_promote()", &[]).await.unwrap();
    };
    let ((result, outcome), ()) = tokio::join!(running, failover);
    assert!(matches!(result, Err(Failure::Refused(Error::LeaseLost { .. }))), "{result:?}");
    assert!(comes_again(&outcome), "{outcome:?}");
    scene.is_seen(&store);
    scene.play();
    // Operations whose records had reached the standby are replayed; all other operations run again.
    assert!(deliver(&store, "41", policy, scene.charge("41")).await.1.replayed());
    until("the library notices that the store is back", async || {
        deliver(&store, "44", policy, scene.charge("44")).await.1.executed()
    })
    .await;
    assert!(deliver(&store, "42", policy, scene.charge("42")).await.1.executed());
    assert_eq!(["41", "42"].map(|order| scene.charges(order)), [1, 2]);
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_poison_message() {
    let (scene, store) = Scene::on_file("A poison message").await;
    let policy = PAY.max_attempts(3);
    for _ in 0..3 {
        let fails = async { Err::<Value, _>(Failure::Declined) };
        let (result, outcome) = deliver(&store, "42", policy, fails).await;
        assert!(matches!(result, Err(Failure::Declined)) && comes_again(&outcome));
    }
    let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert!(matches!(result, Err(Failure::Refused(Error::AttemptsExhausted { .. }))), "{result:?}");
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    scene.is_seen(&store);
    scene.play();
    // The cause is fixed.
    let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert!(result.is_ok() && outcome.executed() && outcome.attempt() == Some(4), "{outcome:?}");
    assert_eq!(scene.charges("42"), 1);
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_key_that_is_too_coarse() {
    let (scene, store) = Scene::on_file("A key is too coarse").await;
    // Each shop has its own order numbers.
    let deliver = async |key: &str, shop: &str| {
        let operation =
            Operation::new(&store, Key::new("pay", key), PAY).fingerprint(&json!({ "shop": shop, "id": 7 }));
        observe(operation.run(scene.charge(shop))).await
    };
    assert!(deliver("order:7", "acme").await.1.executed());
    let (result, outcome) = deliver("order:7", "bolt").await;
    assert!(matches!(result, Err(Failure::Refused(Error::FingerprintMismatch { .. }))), "{result:?}");
    assert_eq!((outcome.disposition(), scene.charges("bolt")), (Disposition::DeadLetter, 0));
    scene.is_seen(&store);
    // After a deployment with a finer key, the message is delivered again from the dead-letter queue.
    let (_, outcome) = deliver("order:bolt:7", "bolt").await;
    assert!(outcome.executed(), "{outcome:?}");
    assert_eq!(["acme", "bolt"].map(|shop| scene.charges(shop)), [1, 1]);
    scene.play();
    scene.ends();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runbook_resolves_an_hour_without_the_store() {
    let mut server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes", "--appendfsync", "always"]);
    let mut scene = Scene::at("The store was away for an hour", &server.url());
    let store = RedisStore::options().holder("payments").connect(&server.url()).await.unwrap();
    scene.begins(&store);
    // The test waits for a few leases instead of an hour: after a few leases, as after an hour, the leases of all
    // earlier attempts have lapsed.
    let policy = PAY.lease(Duration::from_secs(3));
    assert!(deliver(&store, "41", policy, scene.charge("41")).await.1.executed());
    let (result, outcome) = deliver(&store, "42", policy, async {
        let receipt = scene.charge("42").await;
        server.kill();
        receipt
    })
    .await;
    assert!(matches!(result, Err(Failure::Refused(Error::Unrecorded { .. }))), "{result:?}");
    assert!(comes_again(&outcome), "{outcome:?}");
    for order in ["41", "42", "43"] {
        let (result, outcome) = deliver(&store, order, policy, scene.charge(order)).await;
        assert!(matches!(result, Err(Failure::Refused(Error::Store { .. }))), "{result:?}");
        assert!(comes_again(&outcome), "{outcome:?}");
    }
    scene.is_seen(&store);
    scene.play();
    server.run();
    let looks = RedisStore::connect(&server.url()).await.unwrap();
    until("the lease has lapsed", async || {
        use idem_runtime::Store as _;
        let found = looks.inspect(&key("42").unwrap()).await.unwrap().unwrap();
        found.standing() == idem_runtime::store::Standing::Lapsed
    })
    .await;
    scene.play();
    let (result, _) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert_eq!(result.unwrap(), json!({ "receipt": "r-42" }));
    assert!(deliver(&store, "41", policy, scene.charge("41")).await.1.replayed());
    until("the library notices that the store is back", async || {
        deliver(&store, "43", policy, scene.charge("43")).await.1.executed()
    })
    .await;
    assert_eq!(["41", "42", "43"].map(|order| scene.charges(order)), [1, 1, 1]);
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_wrong_result() {
    let (scene, store) = Scene::on_file("A wrong result is recorded").await;
    assert!(deliver(&store, "41", PAY, scene.charge("41")).await.1.executed());
    // A bug: the receipt of another order.
    let wrong = async {
        scene.charge("42").await?;
        Ok(json!({ "receipt": "r-99" }))
    };
    assert!(deliver(&store, "42", PAY, wrong).await.1.executed());
    let retry = async || deliver(&store, "42", PAY, scene.charge("42")).await;
    assert_eq!(retry().await.0.unwrap(), json!({ "receipt": "r-99" }));
    scene.play();
    let (result, outcome) = retry().await;
    assert_eq!((result.unwrap(), outcome.replayed()), (json!({ "receipt": "r-42" }), true));
    assert_eq!(scene.charges("42"), 1);
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_full_store() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes"]);
    let mut scene = Scene::at("The store is full", &server.url());
    let store = RedisStore::options().holder("payments").connect(&server.url()).await.unwrap();
    scene.begins(&store);
    assert!(deliver(&store, "41", PAY, scene.charge("41")).await.1.executed());
    let memory = async |most: &str| {
        let mut raw = server.raw().await;
        let _: () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(most).query_async(&mut raw).await.unwrap();
    };
    memory("1").await;
    let (result, outcome) = deliver(&store, "42", PAY, scene.charge("42")).await;
    assert!(matches!(result, Err(Failure::Refused(Error::Store { .. }))), "{result:?}");
    assert!(comes_again(&outcome) && scene.charges("42") == 0, "{outcome:?}");
    // Redis refuses the command of a reservation before it looks at the key.
    let (result, _) = deliver(&store, "41", PAY, scene.charge("41")).await;
    assert!(matches!(result, Err(Failure::Refused(Error::Store { .. }))), "{result:?}");
    scene.is_seen(&store);
    // The health of a new pod shows that the pod is not ready, and why.
    let pod = RedisStore::connect(&server.url()).await.unwrap();
    let health = pod.health().await;
    assert!(!health.is_ready() && health.to_string().contains("the server is full"), "{health}");
    scene.play();
    memory("0").await;
    assert!(deliver(&store, "42", PAY, scene.charge("42")).await.1.executed());
    assert!(pod.health().await.is_ready());
    assert_eq!(scene.charges("42"), 1);
    scene.ends();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runbook_resolves_a_slow_store() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes"]);
    let line = Proxy::to(server.port()).await;
    let mut scene = Scene::at("The store is slow", &line.url());
    let store = RedisStore::options().holder("payments").connect(&line.url()).await.unwrap();
    scene.begins(&store);
    line.set(Line::Delay(Duration::from_millis(400)));
    for order in ["41", "42", "43"] {
        assert!(deliver(&store, order, PAY, scene.charge(order)).await.1.executed());
    }
    scene.is_seen(&store);
    let health = store.health().await;
    assert!(health.is_ready() && health.to_string().contains("and slow for "), "{health}");
    scene.play();
    line.set(Line::Pass);
    assert!(deliver(&store, "44", PAY, scene.charge("44")).await.1.executed());
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_a_clock_that_was_set() {
    let clock = ManualClock::new();
    let mut scene = Scene::at("A clock was set", "");
    scene.url = format!("sqlite:{}", scene.folder.file().display());
    // At the end the clock of the test shows the present wall time: the command uses the real clock.
    clock.set_wall(SystemClock::default().wall().saturating_sub(HOUR));
    let options = || SqliteStore::options().holder("payments").clock(clock.clone());
    let store = options().open(scene.folder.file()).await.unwrap();
    scene.begins(&store);
    let (result, outcome) = deliver(&store, "42", PAY, async {
        let receipt = scene.charge("42").await;
        // The clock of the host goes forward by an hour, and another pod gets the message.
        clock.set_wall(clock.wall() + HOUR);
        let pod = options().open(scene.folder.file()).await.unwrap();
        assert!(deliver(&pod, "42", PAY, scene.charge("42")).await.1.executed());
        receipt
    })
    .await;
    assert!(matches!(result, Err(Failure::Refused(Error::LeaseLost { .. }))), "{result:?}");
    assert!(comes_again(&outcome), "{outcome:?}");
    assert_eq!(scene.charges("42"), 2);
    scene.is_seen(&store);
    scene.play();
    assert!(deliver(&store, "42", PAY, scene.charge("42")).await.1.replayed());
    scene.ends();
}

#[tokio::test]
async fn the_runbook_resolves_two_decisions_at_once() {
    let (scene, store) = Scene::on_file("Two people decide at once").await;
    let policy = PAY.lease(SECOND).on_crash(OnCrash::Fail);
    let mut worker = scene.worker("42", OnCrash::Fail, SECOND).await;
    worker.kill();
    until("the operation is interrupted", async || {
        let (result, _) = deliver(&store, "42", policy, scene.charge("42")).await;
        matches!(result, Err(Failure::Refused(Error::Interrupted { .. })))
    })
    .await;
    scene.is_seen(&store);
    assert_eq!(store.count_undecided().await.unwrap(), 1);
    scene.play();
    assert_eq!(store.count_undecided().await.unwrap(), 0);
    let (result, outcome) = deliver(&store, "42", policy, scene.charge("42")).await;
    assert_eq!((result.unwrap(), outcome.replayed()), (json!({ "receipt": "r-42" }), true));
    assert_eq!(scene.charges("42"), 1);
    scene.ends();
}
