//! Every store behind the layer, and gRPC.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{MemoryStore, MySqlStore, PostgresStore, Store};
use idem_tests::server::Kind;
use idem_tests::sqlite::Folder;
use idem_tests::{dynamo, mysql, nats, postgres, stores};

use crate::rig::*;

#[tokio::test(flavor = "multi_thread")]
async fn every_store_replays_a_response_byte_for_byte() {
    let (file, objects) = (Folder::new(), Folder::new());
    let redis = Kind::Redis.shared();
    let (postgres, schema) = postgres::shared_schema();
    let schema = schema.replace([' ', '"'], "_");
    drop(PostgresStore::options().schema(&schema).ensure_schema().connect(&postgres).await.expect("makes the table"));
    let (mysql, table) = mysql::shared_table();
    drop(MySqlStore::options().table(&table).ensure_schema().connect(&mysql).await.expect("makes the table"));
    let dynamo = dynamo::Kind::Dynoxide.shared();
    // The specs name every kind of store, each with keys that no other test uses.
    let specs = [
        format!("sqlite {}", file.file().display()),
        format!("redis {redis} http"),
        format!("postgres {postgres} {schema}"),
        format!("mysql {mysql} {table}"),
        format!("dynamo {dynamo} {}", dynamo::TABLE),
        format!("nats {} http", nats::shared()),
        format!("wrapped {redis} wrapped-http {}", objects.path().display()),
    ];
    let mut opened: Vec<(String, Arc<dyn Store>)> = vec![("memory".to_owned(), Arc::new(MemoryStore::new()))];
    for spec in specs {
        let store = stores::open(&spec, Duration::from_secs(60)).await;
        opened.push((spec, store));
    }
    for (spec, store) in opened {
        let stage = Stage::closed();
        let runs = stage.clone();
        let layer = IdempotencyLayer::new(&*store, POLICY, Caller::by(|_| Some("alice"))).scope("stores");
        // The body is no text, and is larger than a packet.
        let body: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let sent = body.clone();
        let address = serve_handler(layer.clone(), async move || {
            let run = runs.play().await;
            let mut response = answer(201, &[("location", "/p/1"), ("x-a", "1"), ("x-a", "2, 3")], sent.clone());
            response.headers_mut().insert("x-run", run.into());
            response
        })
        .await;
        let key = format!("k{}", std::process::id());
        // While the first request runs, a duplicate is rejected and another payload is refused; then the response is
        // replayed.
        let first = tokio::spawn(send(address, post(&key, "amount=1")));
        stage.entered().await;
        assert_eq!(send(address, post(&key, "amount=1")).await.problem(), (409, "in-progress".to_owned()), "{spec}");
        assert_eq!(send(address, post(&key, "amount=2")).await.problem().0, 422, "{spec}");
        stage.go();
        assert_eq!(first.await.unwrap().header("x-run"), Some("1"), "{spec}");
        for _ in 0..2 {
            let again = send(address, post(&key, "amount=1")).await;
            assert_eq!((again.status.as_u16(), again.is_replay()), (201, true), "{spec}");
            assert_eq!((again.header("location"), again.header("x-run")), (Some("/p/1"), Some("1")), "{spec}");
            assert_eq!(again.headers.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "2, 3"], "{spec}");
            assert!(again.body == body, "{spec}");
        }
        assert_eq!(send(address, post(&key, "amount=2")).await.problem().0, 422, "{spec}");
        assert_eq!(stage.begun(), 1, "{spec}");
        layer.drain().await;
    }
}
