//! Appends of concurrent tasks, which share one call of their script.

use idem_runtime::store::Journal;

use super::*;

fn journal(bytes: &[u8]) -> Journal {
    Journal::new(bytes.to_vec()).expect("not empty")
}

/// Appends a journal to each record at the same time.
async fn append_all(store: &RedisStore, appends: &[(Lease, Journal)]) -> Vec<Result<Verdict, StoreErrorKind>> {
    let appended = appends
        .iter()
        .map(|(lease, journal)| async { store.append(lease, journal).await.map_err(|error| error.kind()) });
    futures::future::join_all(appended).await
}

#[tokio::test]
async fn each_append_of_a_shared_call_has_its_own_answer() {
    for kind in [Kind::Redis, Kind::Valkey] {
        let server = RedisServer::start(kind);
        let store = connect(&server).await;
        let mut raw = server.raw().await;
        let mut appends = Vec::new();
        for n in 0..150 {
            appends.push((reserved(&store, &format!("key {n}")).await, journal(format!("journal {n}").as_bytes())));
        }
        let name = |n: usize| format!("idem:{}", appends[n].0.key.as_str());
        // Every fifth record has lost its expiry, is cut off, belongs to another attempt, or is gone. The first of
        // these gets an expiry again.
        for n in (0..150).step_by(5) {
            match n % 20 {
                0 => raw.persist(name(n)).await.unwrap(),
                5 => {
                    let record: Vec<u8> = raw.get(name(n)).await.unwrap();
                    // The flag of a provenance, and no provenance.
                    let damaged = [&record[..6], &[record[6] | 8], &record[7..64]].concat();
                    let () = raw
                        .set_options(
                            name(n),
                            damaged,
                            redis::SetOptions::default().with_expiration(redis::SetExpiry::KEEPTTL),
                        )
                        .await
                        .unwrap();
                }
                10 => assert_eq!(store.release(&appends[n].0, Release::Returned).await.unwrap(), Verdict::Applied),
                _ => raw.del(name(n)).await.unwrap(),
            }
        }
        for round in 0..2 {
            // In the first round the server has forgotten the script.
            if round == 0 {
                let () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut raw).await.unwrap();
            }
            let before = calls_of(&server).await("evalsha");
            let answers = append_all(&store, &appends).await;
            for (n, answer) in answers.into_iter().enumerate() {
                match n % 20 {
                    5 => assert_eq!(answer, Err(StoreErrorKind::Corrupt), "{n}: cut off"),
                    10 | 15 => assert_eq!(answer, Ok(Verdict::Refused), "{n}"),
                    _ => assert_eq!(answer, Ok(Verdict::Applied), "{n}"),
                }
            }
            let calls = calls_of(&server).await("evalsha") - before;
            assert!(calls < 20, "150 appends took {calls} calls");
        }
        for (n, (lease, journal)) in appends.iter().enumerate().filter(|(n, _)| n % 5 != 0 || n % 20 == 0) {
            let found = store.inspect(&lease.key).await.unwrap().unwrap();
            assert_eq!(found.record.journal.as_ref(), Some(journal));
            assert!(raw.pttl::<_, i64>(name(n)).await.unwrap() > 0, "{n}");
        }
    }
}

#[tokio::test]
async fn two_appends_of_one_key_in_a_shared_call_keep_the_longer_journal() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let (lease, beside) = (reserved(&store, "k").await, reserved(&store, "beside").await);
    for longer_first in [false, true] {
        let (short, long) = (journal(b"1"), journal(if longer_first { b"1234" } else { b"123" }));
        let mut appends = vec![(beside.clone(), short.clone()), (lease.clone(), short), (lease.clone(), long.clone())];
        if longer_first {
            appends.swap(1, 2);
        }
        assert_eq!(append_all(&store, &appends).await, [Ok(Verdict::Applied); 3]);
        let found = store.inspect(&lease.key).await.unwrap().unwrap();
        assert_eq!(found.record.journal.as_ref(), Some(&long));
    }
}
