//! Missing rights of the store's Redis login: the store reports a missing right by a separate kind of error, and never
//! reads the refusal as "no record" or as the record of another attempt.

use idem_tests::Reopen as _;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream};

use super::*;

/// Commands that a connected store sends. The login needs the right to execute each of them.
const RIGHTS: [&str; 10] =
    ["set", "get", "mget", "pttl", "pexpire", "evalsha", "getrange", "setrange", "publish", "eval"];
/// Number of concurrent requests, enough to fill several batches.
const MANY: usize = 20;

/// Creates a user on `server` with every right. Returns the URL with its login.
async fn worker(server: &RedisServer) -> String {
    allow(server, &["reset", "on", ">secret", "~*", "&*", "+@all"]).await;
    format!("redis://worker:secret@127.0.0.1:{}", server.port())
}

async fn allow(server: &RedisServer, rules: &[&str]) {
    let mut raw = server.raw().await;
    let _: () = redis::cmd("ACL").arg("SETUSER").arg("worker").arg(rules).query_async(&mut raw).await.unwrap();
}

/// Answer to an operation as one word, or the error.
type AnswerWord = Result<&'static str, StoreError>;

fn reservation(answer: Result<Reservation, StoreError>) -> AnswerWord {
    answer.map(|answer| match answer {
        Reservation::Granted { takeover: false, .. } => "reserved",
        Reservation::Granted { takeover: true, .. } => "taken over",
        Reservation::InProgress { .. } => "pending",
        Reservation::Finished { .. } => "finished",
        Reservation::Interrupted { .. } => "interrupted",
        _ => "something else",
    })
}

fn write(answer: Result<Verdict, StoreError>) -> AnswerWord {
    answer.map(|answer| if answer == Verdict::Applied { "done" } else { "refused" })
}

/// Stores and leases for one operation of each kind. `others`, a store with all rights, has prepared the records;
/// `store` is the store under test.
struct Scene {
    others: RedisStore,
    store: RedisStore,
    prefix: String,
    held: Lease,
    finished: Lease,
    lapsed: Lease,
    finishing: Lease,
    releasing: Lease,
}

impl Scene {
    async fn new(others: &RedisStore, store: &RedisStore, prefix: String) -> Self {
        let named = async |name: &str| reserved(others, &format!("{prefix} {name}")).await;
        let finished = named("finished").await;
        assert_eq!(others.finish(&finished, &done()).await.unwrap(), Verdict::Applied);
        let short = request(others, &format!("{prefix} lapsed")).lease(Duration::from_millis(1));
        let lapsed = wins(others, &short).await;
        until("the lease has lapsed", async || {
            others.inspect(&short.key).await.unwrap().unwrap().lapses_in == Some(Duration::ZERO)
        })
        .await;
        Self {
            held: named("held").await,
            finishing: named("finishing").await,
            releasing: named("releasing").await,
            finished,
            lapsed,
            others: others.clone(),
            store: store.clone(),
            prefix,
        }
    }

    fn request(&self, of: &Lease) -> ReserveRequest {
        request(&self.store, "any").key(of.key.clone())
    }

    /// Runs every operation. Returns, for each operation, its name, the expected answer and the actual answer.
    async fn play(&self) -> Vec<(&'static str, &'static str, AnswerWord)> {
        let Self { store, held, finished, lapsed, finishing, releasing, .. } = self;
        let new = request(store, &format!("{} new", self.prefix));
        vec![
            ("a new key", "reserved", reservation(store.reserve(&new).await)),
            ("a held key", "pending", reservation(store.reserve(&self.request(held)).await)),
            ("a finished key", "finished", reservation(store.reserve(&self.request(finished)).await)),
            ("a renewal", "done", renew_all(store, std::slice::from_ref(held)).await.map(|_| "done")),
            ("a finish", "done", write(store.finish(finishing, &done()).await)),
            ("a release", "done", write(store.release(releasing, Release::Returned).await)),
            (
                "a wait",
                "pending",
                store.wait(&held.key, 1, Duration::from_millis(1)).await.map(|told| {
                    if told.is_none_or(|told| told.record.is_pending()) { "pending" } else { "something else" }
                }),
            ),
            (
                "an inspection",
                "finished",
                store.inspect(&finished.key).await.map(|found| {
                    if found.is_some_and(|found| found.record.is_finished()) { "finished" } else { "nothing" }
                }),
            ),
            ("a reopening", "done", write(store.reopen(&finished.key, 1).await)),
            ("a lapsed key", "taken over", reservation(store.reserve(&self.request(lapsed)).await)),
        ]
    }

    /// Checks that a completion and a release took effect if they returned `Ok`, and changed nothing if they returned
    /// an error.
    async fn audit(&self, played: &[(&str, &str, AnswerWord)]) {
        for (lease, what) in [(&self.finishing, "a finish"), (&self.releasing, "a release")] {
            let done = played.iter().any(|(name, _, said)| *name == what && said.is_ok());
            let found = self.others.inspect(&lease.key).await.unwrap().unwrap().record;
            assert_eq!(found.is_pending(), !done, "{what}: {found:?}");
            assert_eq!(found.owner, lease.owner);
        }
    }
}

#[tokio::test]
async fn a_missing_right_is_never_read_as_an_answer() {
    for kind in [Kind::Redis, Kind::Valkey] {
        let server = RedisServer::start(kind);
        let url = worker(&server).await;
        let others = connect(&server).await;
        for right in RIGHTS {
            let store = RedisStore::connect(&url).await.unwrap();
            let alone = Scene::new(&others, &store, format!("{right} alone")).await;
            let mut together = Vec::new();
            for n in 0..MANY {
                together.push(Scene::new(&others, &store, format!("{right} {n}")).await);
            }
            allow(&server, &[&format!("-{right}")]).await;
            if right == "eval" {
                let mut raw = server.raw().await;
                let _: () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut raw).await.unwrap();
            }
            let mut played = vec![(&alone, alone.play().await)];
            let plays = futures::future::join_all(together.iter().map(Scene::play)).await;
            played.extend(together.iter().zip(plays));
            allow(&server, &[&format!("+{right}")]).await;
            let mut missed = 0;
            for (scene, played) in played {
                for (name, expected, said) in &played {
                    match said {
                        Ok(said) => assert_eq!(said, expected, "{kind:?} without {right}: {name}"),
                        Err(error) => {
                            missed += 1;
                            let kind = error.kind();
                            assert_eq!(kind, StoreErrorKind::Misconfigured, "without {right}: {name}: {error}");
                        }
                    }
                }
                scene.audit(&played).await;
            }
            // Without `publish` no wake-up arrives, but waiters also poll, so no operation fails.
            assert_eq!(missed == 0, right == "publish", "{kind:?} without {right}: {missed} errors");
        }
    }
}

#[tokio::test]
async fn connect_names_every_right_that_is_missing() {
    for kind in [Kind::Redis, Kind::Valkey] {
        let server = RedisServer::start(kind);
        let url = worker(&server).await;
        let others = [("wait", true), ("del", true), ("persist", true), ("pexpireat", true), ("pexpiretime", true)];
        let rights = RIGHTS.into_iter().map(|right| (right, false)).chain(others);
        for (right, for_replicas) in rights {
            allow(&server, &[&format!("-{right}")]).await;
            let plain = RedisStore::connect(&url).await;
            let replicated = RedisStore::options().min_replicas(1, Duration::from_secs(1)).connect(&url).await;
            for (connected, needed) in [(plain, !for_replicas && right != "publish"), (replicated, right != "publish")]
            {
                match connected {
                    Ok(_) => assert!(!needed, "{kind:?}: connected without {right}"),
                    Err(error) => {
                        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
                        let named = format!("may not send `{right}`:");
                        assert!(needed && error.to_string().contains(&named), "{kind:?} without {right}: {error}");
                    }
                }
            }
            allow(&server, &[&format!("+{right}")]).await;
        }
        // The login may use only the keys of another application.
        allow(&server, &["resetkeys", "~shop:*"]).await;
        let error = RedisStore::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        let store = RedisStore::options().namespace("shop:").connect(&url).await.unwrap();
        reserved(&store, "k").await;
    }
}

#[tokio::test]
async fn the_check_of_rights_in_connect_changes_no_data() {
    let server = RedisServer::start(Kind::Redis);
    let mut raw = server.raw().await;
    let _: () = redis::cmd("SET").arg("idem:probe/").arg("another's").query_async(&mut raw).await.unwrap();
    let url = server.url();
    RedisStore::options().min_replicas(1, Duration::from_secs(1)).connect(&url).await.unwrap();
    let found: (String, i64) =
        redis::pipe().get("idem:probe/").cmd("PTTL").arg("idem:probe/").query_async(&mut raw).await.unwrap();
    assert_eq!(found, ("another's".to_owned(), -1));
    let keys: u64 = redis::cmd("DBSIZE").query_async(&mut raw).await.unwrap();
    assert_eq!(keys, 1);
}

/// Returns the number of commands that the server has executed.
async fn commands(server: &RedisServer) -> u64 {
    let mut raw = server.raw().await;
    let stats: String = redis::cmd("INFO").arg("stats").query_async(&mut raw).await.unwrap();
    let done = stats.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    done.unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn a_reservation_that_lacks_a_right_on_the_server_sends_few_commands() {
    let server = RedisServer::start(Kind::Redis);
    let store = RedisStore::connect(&worker(&server).await).await.unwrap();
    let others = connect(&server).await;
    let held = reserved(&others, "held").await;
    for right in RIGHTS {
        allow(&server, &[&format!("-{right}")]).await;
        let before = commands(&server).await;
        let request = request(&store, "any").key(held.key.clone());
        // This test checks the number of commands, whatever the answer is.
        let _ = store.reserve(&request).await;
        let sent = commands(&server).await - before;
        assert!(sent < 20, "without {right} a reservation took {sent} commands");
        allow(&server, &[&format!("+{right}")]).await;
    }
}

/// Starts a server whose records change between any two commands. Returns its address, and the counter of the commands
/// that read or write a record.
async fn fickle(record: Vec<u8>) -> (String, Arc<AtomicU32>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (mut stream, count, mut record) = (BufStream::new(stream), Arc::clone(&count), record.clone());
            tokio::spawn(async move {
                while let Some(words) = command(&mut stream).await {
                    // Byte 27 of a record is a part of its attempt number, which changes before each answer.
                    record[27] = record[27] % 200 + 1;
                    let bulk = |bytes: &[u8]| [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
                    let answer = match words[0].as_slice() {
                        b"INFO" => bulk(b"redis_version:7.0.15\r\nrole:master\r\nredis_mode:standalone\r\n"),
                        b"SCRIPT" => bulk(b"0123456789012345678901234567890123456789"),
                        b"CONFIG" => b"*0\r\n".to_vec(),
                        b"SET" => bulk(&record),
                        b"EVALSHA" => [b"*2\r\n", &bulk(&record)[..], b":0\r\n"].concat(),
                        _ => b"+OK\r\n".to_vec(),
                    };
                    count.fetch_add(u32::from(matches!(&words[0][..], b"SET" | b"EVALSHA")), Ordering::SeqCst);
                    stream.write_all(&answer).await.unwrap();
                    stream.flush().await.unwrap();
                }
            });
        }
    });
    (url, asked)
}

/// Reads the words of the client's next command.
async fn command(stream: &mut BufStream<tokio::net::TcpStream>) -> Option<Vec<Vec<u8>>> {
    let number = async |stream: &mut BufStream<tokio::net::TcpStream>| {
        let mut line = String::new();
        stream.read_line(&mut line).await.ok()?;
        line.trim_end().get(1..)?.parse::<usize>().ok()
    };
    let mut words = Vec::new();
    for _ in 0..number(stream).await? {
        let mut word = vec![0; number(stream).await? + 2];
        stream.read_exact(&mut word).await.ok()?;
        word.truncate(word.len() - 2);
        words.push(word);
    }
    Some(words)
}

#[tokio::test]
async fn a_reservation_of_an_ever_changing_record_fails_after_a_few_tries() {
    let released = {
        let mut record = Record::new(OwnerToken::from_bytes([1; 16]), 1, State::Released);
        record.attempts_used = 0;
        record
    };
    let (url, asked) = fickle(format::encode(&released)).await;
    let store = RedisStore::connect(&url).await.unwrap();
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    let asked = asked.load(Ordering::SeqCst);
    // The store reads the record at most 20 times, each time with two commands, and sends the source of the
    // script once.
    assert!((3..=41).contains(&asked), "{asked} commands");
}

#[tokio::test]
async fn a_login_that_loses_a_right_of_calls_is_not_ready() {
    for kind in [Kind::Redis, Kind::Valkey] {
        let server = RedisServer::start(kind);
        let store = RedisStore::connect(&worker(&server).await).await.unwrap();
        assert!(store.health().await.is_ready());
        for right in ["set", "get", "mget", "pttl", "pexpire", "getrange", "setrange", "evalsha"] {
            allow(&server, &[&format!("-{right}")]).await;
            let error = store.ping().await.expect_err(right);
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{kind:?} {right}: {error}");
            allow(&server, &[&format!("+{right}")]).await;
            store.ping().await.expect(right);
        }
        // The login may use keys of another application only.
        allow(&server, &["resetkeys", "~other:*"]).await;
        assert_eq!(store.ping().await.unwrap_err().kind(), StoreErrorKind::Misconfigured, "{kind:?}");
        let mut raw = server.raw().await;
        let keys: usize = redis::cmd("DBSIZE").query_async(&mut raw).await.unwrap();
        assert_eq!(keys, 0, "a ping writes nothing");
        // A new connection of the client may leave errors of its own.
        let mut statistics =
            async || -> String { redis::cmd("INFO").arg("errorstats").query_async(&mut raw).await.unwrap() };
        allow(&server, &["allkeys"]).await;
        let before = statistics().await;
        store.ping().await.unwrap();
        assert_eq!(statistics().await, before, "a ping leaves no errors in the statistics of the server");
    }
}

/// The login loses a right while the body runs. The result is recorded as soon as the login has this right again.
#[tokio::test]
async fn no_result_is_lost_to_a_missing_right() {
    let server = RedisServer::start(Kind::Redis);
    let store = RedisStore::connect(&worker(&server).await).await.unwrap();
    let fail = POLICY.on_crash(OnCrash::Fail);
    // A completion needs all three rights if a script decides it: on a server without `SET … IFEQ`, and under `fail`,
    // because the mark of the body has changed the bytes of the record.
    let mut lacking =
        vec![("retry", POLICY, "set"), ("fail", fail, "set"), ("fail", fail, "get"), ("fail", fail, "evalsha")];
    if !server.has_ifeq().await {
        lacking.extend([("retry", POLICY, "get"), ("retry", POLICY, "evalsha")]);
    }
    for (on_crash, policy, right) in lacking {
        let refused = async || {
            let mut raw = server.raw().await;
            let log: Vec<redis::Value> = redis::cmd("ACL").arg("LOG").query_async(&mut raw).await.unwrap();
            !log.is_empty()
        };
        let mut raw = server.raw().await;
        let _: () = redis::cmd("ACL").arg("LOG").arg("RESET").query_async(&mut raw).await.unwrap();
        let runs = AtomicU32::new(0);
        let body = async {
            allow(&server, &[&format!("-{right}")]).await;
            Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let name = format!("{on_crash} without {right}");
        let operation = Operation::new(&store, Key::new("test", &name), policy);
        let called = observe(operation.run(body));
        let allowed_again = async {
            until("the result was refused", refused).await;
            allow(&server, &[&format!("+{right}")]).await;
        };
        let ((result, outcome), ()) = tokio::join!(called, allowed_again);
        assert_eq!(result.unwrap(), 1, "{name}");
        assert!(outcome.recorded(), "{name}");
        assert!(call(&store, &name, &runs).await.1.replayed(), "{name}");
        assert_eq!(runs.into_inner(), 1, "{right}");
    }
}

// Records that have lost their expiry.

async fn persist(server: &RedisServer, lease: &Lease) {
    let mut raw = server.raw().await;
    let persisted: bool = raw.persist(format!("idem:{}", lease.key.as_str())).await.unwrap();
    assert!(persisted);
}

fn corrupt<T: std::fmt::Debug>(answer: Result<T, StoreError>, what: &str) {
    let error = answer.map_err(|error| (error.kind(), error)).expect_err(what);
    assert_eq!(error.0, StoreErrorKind::Corrupt, "{what}: {error:?}");
}

/// The store computes the end of a lease from the expiry of the Redis key: without an expiry, the end of the lease is
/// unknown.
#[tokio::test]
async fn a_pending_record_without_an_expiry_is_damaged() {
    let server = RedisServer::start(Kind::Redis);
    let (owner, other) = (connect(&server).await, connect(&server).await);
    let mut raw = server.raw().await;
    for restored in [false, true] {
        let request = request(&owner, &format!("restored {restored}"));
        let lease = wins(&owner, &request).await;
        let name = format!("idem:{}", lease.key.as_str());
        // A record loses its expiry when a dump is restored, or by `PERSIST`.
        if restored {
            let dump: Vec<u8> = redis::cmd("DUMP").arg(&name).query_async(&mut raw).await.unwrap();
            let _: () = raw.del(&name).await.unwrap();
            let _: () = redis::cmd("RESTORE").arg(&name).arg(0).arg(dump).query_async(&mut raw).await.unwrap();
        } else {
            persist(&server, &lease).await;
        }
        let before: Vec<u8> = raw.get(&name).await.unwrap();
        // Every operation of the attempt that owns the key, and of other callers, fails and changes nothing.
        for (who, store) in [("owner", &owner), ("other", &other)] {
            for on_crash in [OnCrash::Retry, OnCrash::Fail] {
                let another = self::request(store, "any").on_crash(on_crash).key(lease.key.clone());
                corrupt(store.reserve(&another).await, &format!("{who} reserves"));
            }
            corrupt(store.reserve(&request).await, &format!("{who} repeats"));
            let found = store.inspect(&lease.key).await.unwrap().unwrap();
            assert!(found.damage.is_some_and(|why| why.contains("no expiry")), "{who} inspects");
            corrupt(renew_all(store, std::slice::from_ref(&lease)).await, &format!("{who} renews"));
            corrupt(store.release(&lease, Release::Returned).await, &format!("{who} releases"));
            let reopened = store.reopen(&lease.key, lease.attempt).await.unwrap();
            assert_eq!(reopened, Verdict::Refused, "{who} reopens");
        }
        let (after, left): (Vec<u8>, i64) = (raw.get(&name).await.unwrap(), raw.pttl(&name).await.unwrap());
        assert_eq!((after, left), (before, -1), "the value and its expiry have not changed");
        // A beat still renews the other leases.
        let sound = reserved(&owner, &format!("beside {restored}")).await;
        let answers = Mutex::new(Vec::new());
        let answer = |at, write| answers.lock().unwrap().push((at, write));
        corrupt(owner.renew(&[lease.clone(), sound], &answer).await, "a renewal of both");
        assert_eq!(answers.into_inner().unwrap(), [(1, Verdict::Applied)]);
        // Once the record has an expiry again, it is usable, but it is no longer the record that the operator saw.
        let seen = other.inspect(&lease.key).await.unwrap().unwrap();
        let _: bool = raw.pexpire(&name, 3_660_000).await.unwrap();
        let forgotten = other.decide(&Decision::forget(&lease.key, &seen)).await.unwrap();
        assert!(matches!(forgotten, DecisionAnswer::Changed { standing: Standing::Running, .. }), "{forgotten:?}");
        assert_eq!(renew_all(&owner, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
        assert_eq!(owner.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
        let request = self::request(&owner, &format!("forgotten {restored}"));
        let lease = wins(&owner, &request).await;
        persist(&server, &lease).await;
        idem_tests::forget_damaged(&other, &lease.key, "no expiry").await;
    }
}

/// The body of the attempt has run, and no other attempt can have begun, so a refusal of the result would
/// help no caller.
#[tokio::test]
async fn the_holder_of_a_record_without_an_expiry_records_its_result() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let mut leases = Vec::new();
    for n in 0..MANY {
        let lease = reserved(&store, &format!("k{n}")).await;
        persist(&server, &lease).await;
        leases.push(lease);
    }
    let other = {
        let mut lease = leases[0].clone();
        lease.owner = store.context().new_owner();
        lease
    };
    assert_eq!(store.finish(&other, &done()).await.unwrap(), Verdict::Refused);
    assert_eq!(store.finish(&leases[0], &done()).await.unwrap(), Verdict::Applied);
    let finish = done();
    for answer in futures::future::join_all(leases.iter().map(|lease| store.finish(lease, &finish))).await {
        assert_eq!(answer.unwrap(), Verdict::Applied);
    }
    for lease in &leases {
        let found = store.inspect(&lease.key).await.unwrap().unwrap();
        assert!(found.record.is_finished() && found.expires_in <= TTL, "with an expiry again: {found:?}");
    }
}

#[tokio::test]
async fn a_handler_whose_record_lost_its_expiry_ends_and_no_other_begins() {
    let server = RedisServer::start(Kind::Redis);
    let (store, other) = (connect(&server).await, connect(&server).await);
    let policy = POLICY.lease(Duration::from_millis(300));
    let runs = AtomicU32::new(0);
    let running = Notify::new();
    let body = async {
        let mut raw = server.raw().await;
        let _: bool = raw.persist("idem:1/test/k").await.unwrap();
        running.notify_one();
        std::future::pending::<Result<u32, Error>>().await
    };
    let operation = Operation::new(&store, Key::new("test", "k"), policy);
    let duplicates = async {
        running.notified().await;
        let since = std::time::Instant::now();
        while since.elapsed() < 3 * Duration::from_millis(300) {
            let (result, _) = call_with(&other, "k", policy, &runs).await;
            let Err(Error::Store { source, .. }) = result else { panic!("{result:?}") };
            assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{source}");
        }
    };
    // The lease can't be renewed, so the body is cancelled when the lease lapses.
    let (ended, ()) = futures::join!(operation.run(body), duplicates);
    let Err(Error::LeaseLost { source: Some(source), .. }) = ended else { panic!("{ended:?}") };
    assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{source}");
    assert_eq!(runs.into_inner(), 0);
}

/// Finished and released records without an expiry are kept for longer than requested, which is harmless.
#[tokio::test]
async fn finished_and_released_records_without_an_expiry_are_shown_unchanged() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let finished = reserved(&store, "finished").await;
    assert_eq!(store.finish(&finished, &done()).await.unwrap(), Verdict::Applied);
    persist(&server, &finished).await;
    let runs = AtomicU32::new(0);
    let (result, outcome) = call(&store, "finished", &runs).await;
    assert_eq!((result.unwrap(), outcome.replayed()), (42, true));
    assert_eq!(store.inspect(&finished.key).await.unwrap().unwrap().expires_in, Duration::MAX);
    assert_eq!(
        store.finish(&finished, &done()).await.unwrap(),
        Verdict::Applied,
        "a repeated finish recognises itself"
    );

    let released = reserved(&store, "released").await;
    assert_eq!(store.release(&released, Release::Returned).await.unwrap(), Verdict::Applied);
    persist(&server, &released).await;
    let next = reserved(&store, "released").await;
    assert_eq!(next.attempt, 2);
    assert!(store.inspect(&next.key).await.unwrap().unwrap().expires_in <= LEASE + TTL, "with an expiry again");

    let interrupted = reserved(&store, "interrupted").await;
    assert_eq!(store.release(&interrupted, Release::Interrupted).await.unwrap(), Verdict::Applied);
    persist(&server, &interrupted).await;
    let answer = store.reserve(&request(&store, "interrupted")).await.unwrap();
    assert!(matches!(answer, Reservation::Interrupted { attempt: 1 }), "{answer:?}");
    assert_eq!(store.reopen(&interrupted.key, 1).await.unwrap(), Verdict::Applied);
    assert_eq!(reserved(&store, "interrupted").await.attempt, 2);
}
