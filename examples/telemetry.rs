//! Handlers that run under load and under faults, and a route with the text of `store.metrics()`, which a Prometheus
//! scrapes. The route needs no other crate.
//!
//! ```sh
//! cargo run --example telemetry --features telemetry -- 127.0.0.1:9464 records.db     # then http://127.0.0.1:9464/metrics
//! ```
//!
//! The example runs until it is killed, and causes trouble on purpose: repeated keys, processes that die, results that
//! are too large, an unreachable store.

#![allow(clippy::disallowed_methods, reason = "traffic takes real time")]

use std::convert::Infallible;
use std::future::{Ready, pending, ready};
use std::net::TcpListener;
use std::time::Duration;
use std::{env, io};

use idem_runtime::store::ReserveRequest;
use idem_runtime::testing::{Fault, FaultyStore, StoreCall};
use idem_runtime::{
    Error, InProgress, Key, KeyPart, Mode, OnCrash, Operation, Policy, SqliteStore, Store, StoreErrorKind,
    StoreExt as _, metrics, observe,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(2);
const POLICY: Policy = Policy::new(Duration::from_secs(600)).lease(LEASE);

#[tokio::main]
async fn main() -> io::Result<()> {
    let mut arguments = env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:9464".to_owned());
    let file = arguments.next().unwrap_or_else(|| "telemetry.db".to_owned());
    let records = SqliteStore::options().holder("payments").open(&file).await.map_err(io::Error::other)?;
    // The layer between a process and its store, which makes operations fail on request.
    let store = FaultyStore::new(&records);
    let shown = store.clone();
    tokio::spawn(traffic(store.clone(), "shop::payments", 20));
    tokio::spawn(traffic(store.clone(), "shop::mails", 45));
    tokio::spawn(trouble(store.clone(), records));
    tokio::spawn(outages(store));
    let listener = tokio::net::TcpListener::from_std(listen(&address)?)?;
    println!("http://{address}/metrics, {} metrics", metrics::TABLE.len());
    loop {
        let (mut client, _) = listener.accept().await?;
        // The gauge of keys that wait for a decision shows the latest count. An outage leaves the earlier count.
        let _ = shown.count_undecided().await;
        let text = shown.metrics().prometheus_text();
        tokio::spawn(async move {
            let mut request = [0; 4096];
            let _ = client.read(&mut request).await?;
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\nconnection: close\r\ncontent-length:";
            client.write_all(format!("{head} {}\r\n\r\n{text}", text.len()).as_bytes()).await
        });
    }
}

fn listen(address: &str) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn operation(store: &impl Store, scope: &str, text: impl KeyPart, policy: Policy) -> Operation {
    Operation::new(store, Key::new(scope, text), policy)
}

/// Sends orders: some are sent twice, immediately or later, and some fail.
async fn traffic(store: FaultyStore, scope: &'static str, millis: u64) -> Infallible {
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(1)));
    for order in 0_u64.. {
        let store = store.clone();
        tokio::spawn(async move {
            let body = || async move {
                sleep(Duration::from_millis(5 + order * 7 % 90)).await;
                match order % 11 {
                    3 => Err(declined()),
                    _ => Ok("x".repeat(usize::try_from(order % 40).unwrap_or_default() * 20)),
                }
            };
            let call = || operation(&store, scope, format!("order:{order}"), wait).run(body());
            let reject = operation(&store, scope, format!("order:{order}"), POLICY).run(body());
            let _ = match order % 5 {
                0 => tokio::join!(call(), call()).0,
                1 => tokio::join!(call(), reject).0,
                _ => call().await,
            };
            // The broker redelivers because the acknowledgement was lost.
            if order % 3 == 0 {
                sleep(Duration::from_secs(1)).await;
                let _ = call().await;
            }
        });
        // The pause varies, so that the graphs show changes.
        sleep(Duration::from_millis(millis + millis * (order / 200 % 4))).await;
    }
    unreachable!("numbers go on")
}

/// Returns an error such as a handler of an application could return.
fn declined() -> Error {
    Key::new("shop", "").expect_err("blank").into()
}

/// Causes the conditions for which `ops/alerts.yaml` has alerts, from time to time.
async fn trouble(store: FaultyStore, records: SqliteStore) -> Infallible {
    for n in 0_u64.. {
        let scope = "shop::trouble";
        let text = |what: &str| format!("{what}:{n}");
        // Processes that die: one under `on_crash = fail`, and one whose key another process takes over.
        for (what, on_crash) in [("dies", OnCrash::Fail), ("crashes", OnCrash::Retry)] {
            if on_crash == OnCrash::Fail && n % 6 > 0 {
                continue;
            }
            let policy = POLICY.on_crash(on_crash).lease(LEASE / 10);
            let Ok(key) = Key::new(scope, text(what)) else { continue };
            let request = ReserveRequest::new(key, records.context().new_owner(), LEASE / 10, LEASE * 300);
            let holder = records.context().holder();
            let _ = records.reserve(&request.on_crash(on_crash).holder(holder)).await;
            sleep(LEASE / 5).await;
            let _ = operation(&store, scope, text(what), policy).run(ok(1)).await;
        }
        // A shutdown that does not wait for its running handlers.
        if n % 6 == 3 {
            let call = operation(&store, scope, text("stopped"), POLICY.on_crash(OnCrash::Fail));
            let _ = tokio::time::timeout(LEASE / 10, call.run(pending::<Result<u32, Error>>())).await;
        }
        // Calls with a result that is too large, another payload, exhausted attempts, a time-out and a missing key.
        for _ in 0..2 {
            let policy = POLICY.max_result_bytes(1000);
            let _ = operation(&store, scope, text("large"), policy).run(ok("x".repeat(5000))).await;
            let _ = operation(&store, scope, text("hangs"), POLICY.timeout(LEASE / 10))
                .run(pending::<Result<u32, Error>>())
                .await;
            let _: Result<u32, Error> =
                operation(&store, scope, text("poison"), POLICY.max_attempts(1)).run(async { Err(declined()) }).await;
            let _ = operation(&store, scope, " ", POLICY).run(ok(1)).await;
        }
        for payload in [1, 2] {
            let _ = operation(&store, scope, text("coarse"), POLICY).fingerprint(&payload).run(ok(1)).await;
            let shadow = POLICY.mode(Mode::Shadow);
            let _ = operation(&store, "shop::shadow", text("coarse"), shadow).fingerprint(&payload).run(ok(1)).await;
            let key = format!("fine:{n}:{payload}");
            let _ = operation(&store, "shop::shadow", key, shadow).fingerprint(&n).run(ok(1)).await;
        }
        // A long body whose broker sometimes misses a beat.
        let long = operation(&store, "shop::reports", text("report"), POLICY.lease(Duration::from_millis(300)));
        let long = long.run(async {
            sleep(Duration::from_secs(3)).await;
            Ok::<_, Error>(1)
        });
        let told = observe(long).on_beat(Duration::from_millis(300), move |_| {
            ready(if n % 2 == 0 { Ok(()) } else { Err("the broker is away") })
        });
        let _ = told.await;
        sleep(Duration::from_secs(2)).await;
    }
    unreachable!("numbers go on")
}

fn ok<T>(value: T) -> Ready<Result<T, Error>> {
    ready(Ok(value))
}

/// Makes the store unreachable, or slow to renew, from time to time.
async fn outages(store: FaultyStore) -> Infallible {
    loop {
        sleep(Duration::from_secs(60)).await;
        for call in [StoreCall::Reserve, StoreCall::Finish, StoreCall::Renew] {
            store.always(call, Fault::Before(StoreErrorKind::Unavailable));
        }
        sleep(Duration::from_secs(12)).await;
        for call in [StoreCall::Reserve, StoreCall::Finish, StoreCall::Renew] {
            store.always(call, Fault::None);
        }
    }
}
