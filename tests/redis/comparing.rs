//! Completions by `SET … IFEQ` on servers that support it, and completions that a script must decide.

use std::collections::BTreeMap;

use super::*;

/// Returns the number of scripts and the number of `SET`s that the server has executed.
async fn ran(server: &RedisServer) -> (u64, u64) {
    let calls = calls_of(server).await;
    (calls("evalsha") + calls("eval"), calls("set"))
}

/// Returns the number of calls of each command that the server has executed, also inside of scripts.
async fn all_calls(raw: &mut redis::aio::MultiplexedConnection) -> BTreeMap<String, u64> {
    let stats: String = redis::cmd("INFO").arg("commandstats").query_async(raw).await.unwrap();
    let line = |line: &str| {
        let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_owned(), rest.split(',').next()?.parse().ok()?))
    };
    stats.lines().filter_map(line).collect()
}

async fn value_of(server: &RedisServer, name: &str) -> Vec<u8> {
    server.raw().await.get(format!("idem:1/test/{name}")).await.unwrap()
}

/// Sets the flag of waiters in the record, as a waiting duplicate does.
async fn flag(server: &RedisServer, name: &str) {
    let flags = value_of(server, name).await[format::FLAGS_AT] | format::FLAG_WAITED_FOR;
    let name = format!("idem:1/test/{name}");
    let _: usize = server.raw().await.setrange(name, 6, [flags].as_slice()).await.unwrap();
}

async fn finishes(store: &RedisStore, lease: &Lease) -> Verdict {
    store.finish(lease, &done()).await.unwrap()
}

#[tokio::test]
async fn a_first_run_without_a_waiter_or_renewal_calls_no_script() {
    let server = RedisServer::start(Kind::Valkey);
    let store = connect(&server).await;
    let runs = AtomicU32::new(0);
    // Under `fail`, a script marks the record as begun, so the bytes of the record no longer equal the compared bytes.
    for (name, policy, scripts) in [("retry", POLICY, 0), ("fail", POLICY.on_crash(OnCrash::Fail), 2)] {
        let before = ran(&server).await;
        call_with(&store, name, policy, &runs).await.0.unwrap();
        let after = ran(&server).await;
        assert_eq!((after.0 - before.0, after.1 - before.1), (scripts, 2), "{name}: a reservation and a completion");
    }
    let before = ran(&server).await.0;
    // A longer record, with a holder, a trace and a fingerprint, can be compared too.
    let told = request(&store, "told")
        .holder(Holder::new("host/7/name"))
        .traceparent(TRACEPARENT.parse().ok())
        .fingerprint(Fingerprint::from_bytes([0x5a; 32]));
    let lease = wins(&store, &told).await;
    assert_eq!(finishes(&store, &lease).await, Verdict::Applied);
    assert_eq!(ran(&server).await.0, before);
    let value = value_of(&server, "told").await.into();
    assert_eq!(format::decode(&value).unwrap(), Record::after(&lease, done().state()));
    let [seen, began] = format::times(&value);
    assert!(seen.is_some() && seen == began, "its times are noted: {seen:?}, {began:?}");

    let names: Vec<_> = (0..500).map(|n| format!("k{n}")).collect();
    for first in [true, false] {
        let calls = futures::future::join_all(names.iter().map(|name| call(&store, name, &runs))).await;
        assert!(calls.iter().all(|(result, outcome)| result.is_ok() && outcome.executed() == first));
    }
    assert_eq!(ran(&server).await.0, before, "nor do many at once");
}

#[tokio::test]
async fn every_other_completion_is_decided_by_a_script() {
    let server = RedisServer::start(Kind::Valkey);
    let store = connect(&server).await;
    let short = |name: &str| request(&store, name).lease(Duration::from_millis(1));
    let scripts = async || ran(&server).await.0;
    let before = scripts().await;

    // A waiting duplicate has set the flag of waiters in the record.
    let lease = reserved(&store, "flagged").await;
    flag(&server, "flagged").await;
    assert_eq!(finishes(&store, &lease).await, Verdict::Applied);
    assert_eq!(scripts().await - before, 1);

    // A renewal has written the start of the attempt into the record.
    let lease = reserved(&store, "renewed").await;
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    let noted = format::times(&value_of(&server, "renewed").await.into());
    assert_eq!(finishes(&store, &lease).await, Verdict::Applied);
    assert_eq!(
        format::times(&value_of(&server, "renewed").await.into()),
        noted,
        "the first recorded times do not change"
    );

    // Another attempt has taken over, and the late completion changes nothing.
    let late = wins(&store, &short("taken")).await;
    let mut successor = None;
    until("the lease lapses", async || {
        let answer = store.reserve(&request(&store, "taken")).await.unwrap();
        if let Reservation::Granted { lease, takeover, .. } = answer {
            assert!(takeover);
            successor = Some(lease);
        }
        successor.is_some()
    })
    .await;
    let value = value_of(&server, "taken").await;
    assert_eq!(finishes(&store, &late).await, Verdict::Refused);
    assert_eq!(value_of(&server, "taken").await, value);
    assert_eq!(finishes(&store, &successor.unwrap()).await, Verdict::Applied);
    let value = value_of(&server, "taken").await;
    assert_eq!(finishes(&store, &late).await, Verdict::Refused);
    assert_eq!(value_of(&server, "taken").await, value);

    // The record has been deleted.
    let lease = reserved(&store, "gone").await;
    let _: () = server.raw().await.del("idem:1/test/gone").await.unwrap();
    assert_eq!(finishes(&store, &lease).await, Verdict::Refused);
    assert!(store.inspect(&lease.key).await.unwrap().is_none());

    // The lease has lapsed, but no other attempt has taken over, so the attempt may still finish.
    let lapsed = wins(&store, &short("lapsed")).await;
    until("the lease lapses", async || {
        let found = store.inspect(&lapsed.key).await.unwrap().unwrap();
        found.standing() == Standing::Lapsed
    })
    .await;
    assert_eq!(finishes(&store, &lapsed).await, Verdict::Applied);

    // A different completion is sent for a finished record: the first completion and its retention stay.
    let lease = reserved(&store, "repeated").await;
    assert_eq!(finishes(&store, &lease).await, Verdict::Applied);
    let times = || idem_tests::cluster::ask::<i64>(server.port(), "PEXPIRETIME idem:1/test/repeated").unwrap();
    let (value, expires_at) = (value_of(&server, "repeated").await, times());
    for finish in [done(), Finish::Failed(stored("late"))] {
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
        assert_eq!((value_of(&server, "repeated").await, times()), (value.clone(), expires_at));
    }
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Refused);

    // A released attempt can't finish.
    let lease = reserved(&store, "released").await;
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let value = value_of(&server, "released").await;
    assert_eq!(finishes(&store, &lease).await, Verdict::Refused);
    assert_eq!(value_of(&server, "released").await, value);

    // The store sends a result of this size only once: directly to the script, without `SET … IFEQ` before it.
    let (lease, before) = (reserved(&store, "large").await, scripts().await);
    let large = Finish::Completed(stored(vec![b'1'; 1024 * 1024]));
    assert_eq!(store.finish(&lease, &large).await.unwrap(), Verdict::Applied);
    assert_eq!(scripts().await - before, 1);
}

#[tokio::test]
async fn a_handler_with_three_steps_costs_five_exchanges() {
    for kind in [Kind::Valkey, Kind::Redis] {
        let server = RedisServer::start(kind);
        let store = connect(&server).await;
        let run = async |name: &str| {
            let body = async {
                let attempt = idem_runtime::current()?;
                for name in ["charge", "reserve", "book"] {
                    attempt.step(name).run(async |_| Ok::<_, Error>(1_u32)).await?;
                }
                Ok::<_, Error>(3_u32)
            };
            let key = idem_runtime::Key::new("test", name).unwrap();
            idem_runtime::Operation::new(&store, Ok(key), POLICY).run(body).await.unwrap();
        };
        // The first run opens the connection, and the server gets the scripts.
        run("first").await;
        let mut raw = server.raw().await;
        let before = all_calls(&mut raw).await;
        run("second").await;
        let mut counted = all_calls(&mut raw).await;
        counted.retain(|command, calls| {
            *calls -= before.get(command).copied().unwrap_or_default();
            *calls > 0
        });
        // A reservation, three entries and a completion. The server counts the commands of a script, too: each script
        // reads the record and writes it. The completion does not try a comparison first, because the journal has
        // changed the record.
        let expected = [("evalsha", 3 + 1), ("get", 3 + 1), ("info", 1), ("set", 1 + 3 + 1)];
        assert_eq!(counted, expected.map(|(command, calls)| (command.to_owned(), calls)).into(), "{kind:?}");
    }
}

/// If `SET … IFEQ` did not apply a completion, a script decides about the completion in the next exchange. The source
/// of the script is sent along if the server has lost the script.
#[tokio::test]
async fn one_batch_of_completions_uses_comparisons_and_scripts() {
    let server = RedisServer::start(Kind::Valkey);
    let store = connect(&server).await;
    for flush in [false, true] {
        let names: Vec<_> = (0..300).map(|n| format!("{flush}{n}")).collect();
        let leases = futures::future::join_all(names.iter().map(|name| reserved(&store, name))).await;
        for name in names.iter().skip(1).step_by(2) {
            flag(&server, name).await;
        }
        // The record of this lease is in another namespace, so `store` must refuse the completion.
        let taken = RedisStore::options().namespace("other:").connect(&server.url()).await.unwrap();
        let foreign = reserved(&taken, &format!("foreign {flush}")).await;
        if flush {
            let mut raw = server.raw().await;
            let _: () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut raw).await.unwrap();
        }
        let finish = done();
        let mut all: Vec<_> = leases.iter().map(|lease| store.finish(lease, &finish)).collect();
        all.push(store.finish(&foreign, &finish));
        let mut answers = futures::future::join_all(all).await;
        assert_eq!(answers.pop().unwrap().unwrap(), Verdict::Refused, "the other server has no record of the key");
        for (lease, answer) in leases.iter().zip(answers) {
            assert_eq!(answer.unwrap(), Verdict::Applied);
            let found = store.inspect(&lease.key).await.unwrap().unwrap();
            assert_eq!(found.record, Record::after(lease, done().state()));
        }
    }
}

/// An older server takes over the address of a newer one.
#[tokio::test]
async fn completions_at_an_older_server_after_a_failover_use_scripts() {
    let replace = |server: RedisServer, kind| {
        let port = server.port();
        drop(server);
        RedisServer::start_at(kind, port, &["--appendonly", "no"], &[])
    };
    // Counts the `SET`s that the server refused because it does not know their option.
    let refused = async |server: &RedisServer| {
        let mut raw = server.raw().await;
        let stats: String = redis::cmd("INFO").arg("commandstats").query_async(&mut raw).await.unwrap();
        let of_set = stats.lines().find(|line| line.starts_with("cmdstat_set:")).unwrap_or_default();
        of_set.rsplit('=').next().map_or(0, |failed| failed.trim().parse::<u64>().unwrap_or(0))
    };
    let heals = async |store: &RedisStore| until("the store reconnects", async || store.ping().await.is_ok()).await;
    let runs = AtomicU32::new(0);
    let many = async |store: &RedisStore, name: &str| {
        let names: Vec<_> = (0..300).map(|n| format!("{name}{n}")).collect();
        let calls = futures::future::join_all(names.iter().map(|name| call(store, name, &runs))).await;
        assert!(calls.iter().all(|(result, outcome)| result.is_ok() && outcome.recorded()), "{name}");
    };

    for at_once in [false, true] {
        let mut server = RedisServer::start(Kind::Valkey);
        let store = connect(&server).await;
        let leases = futures::future::join_all((0..100).map(|n| {
            let store = store.clone();
            async move { reserved(&store, &format!("before{n}")).await }
        }))
        .await;
        let mut values = Vec::new();
        for n in 0..leases.len() {
            values.push(value_of(&server, &format!("before{n}")).await);
        }
        server = replace(server, Kind::BaselineRedis);
        // The older server has the same records, as after a failover.
        for (n, value) in values.iter().enumerate() {
            let mut raw = server.raw().await;
            let _: () = raw.pset_ex(format!("idem:1/test/before{n}"), value, 3_660_000).await.unwrap();
        }
        heals(&store).await;
        // The first request that the older server receives is a completion.
        let finish = done();
        if at_once {
            let finishes = futures::future::join_all(leases.iter().map(|lease| store.finish(lease, &finish))).await;
            assert!(finishes.into_iter().all(|verdict| verdict.unwrap() == Verdict::Applied));
        } else {
            for lease in &leases {
                assert_eq!(finishes(&store, lease).await, Verdict::Applied);
            }
        }
        // Every completion is recorded although the older server refuses comparisons. After one refusal the store sends
        // no more comparisons.
        for lease in &leases {
            let found = store.inspect(&lease.key).await.unwrap().unwrap();
            assert_eq!(found.record, Record::after(lease, done().state()));
        }
        let told = refused(&server).await;
        assert!(told >= 1 && (at_once || told == 1), "the server refused the unknown option {told} times");
        many(&store, "older").await;
        assert_eq!(refused(&server).await, told, "once is enough");

        // A newer server has the address again. The store notices this when it connects.
        server = replace(server, Kind::Valkey);
        heals(&store).await;
        // The pings of `heals` are scripts, too.
        let before = ran(&server).await.0;
        many(&store, "newer").await;
        assert_eq!(ran(&server).await.0, before);
    }

    // Another store connects to an older server first.
    let mut server = RedisServer::start(Kind::BaselineRedis);
    let store = connect(&server).await;
    // `connect` has sent the command once with arguments that the server refuses, to check the right to send
    // the command.
    let tried = refused(&server).await;
    many(&store, "k").await;
    assert_eq!(refused(&server).await, tried, "its version tells");
    server = replace(server, Kind::Valkey);
    heals(&store).await;
    let before = ran(&server).await.0;
    many(&store, "k").await;
    assert_eq!(ran(&server).await.0, before);
}
