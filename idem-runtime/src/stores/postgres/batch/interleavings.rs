//! Tests of operations that gather while lanes start and end, in many orders of the threads.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;

use shuttle::future::{block_on, yield_now};
use shuttle::thread;
use tokio_postgres::Config;

use super::super::sessions::{ConnectionSource, Sessions, Tls};
use super::*;
use crate::clock::Clock;
use crate::sync::{TestClock, explore};

/// A server that answers each operation with the operation's key. An operation on the key `locked` fails its whole
/// batch, as if another session had locked the row. An operation on a key that starts with `large` has a large result.
struct Echo<const OUTLIVES: bool> {
    database: Database,
    turn: Option<Semaphore>,
    server: Arc<Server>,
}

struct Server {
    /// Blocks each arrived exchange until it gets a permit.
    gate: Semaphore,
    // A plain mutex of `std`: no thread switch happens while a test holds this lock.
    log: std::sync::Mutex<Log>,
}

#[derive(Default)]
struct Log {
    exchanges: usize,
    arrived: Vec<String>,
    /// Number of large operations in flight.
    large: usize,
}

impl Server {
    fn arrived(&self, key: &str) -> usize {
        lock(&self.log).arrived.iter().filter(|it| *it == key).count()
    }

    /// Waits until `count` exchanges have arrived.
    async fn exchanges(&self, count: usize) {
        while lock(&self.log).exchanges < count {
            yield_now().await;
        }
    }

    fn open(&self) {
        self.gate.add_permits(1000);
    }

    async fn exchange(&self, keys: &[&String]) {
        // Models the way to the server: a caller that gives up before its next poll has sent nothing.
        yield_now().await;
        let large = keys.iter().filter(|key| is_large(key)).count();
        {
            let mut log = lock(&self.log);
            log.exchanges += 1;
            log.arrived.extend(keys.iter().map(|key| (*key).clone()));
            log.large += large;
            assert!(large == 0 || keys.len() == 1, "a large operation shares its statement: {keys:?}");
            assert!(log.large <= ROOM_FOR_LARGE + 1, "large operations take {} connections", log.large);
        }
        let _done = ExchangeGuard { server: self, large };
        let _through = self.gate.acquire().await;
        yield_now().await;
    }
}

/// Counts the large operations of an exchange as ended, even if the exchange is dropped.
struct ExchangeGuard<'a> {
    server: &'a Server,
    large: usize,
}

impl Drop for ExchangeGuard<'_> {
    fn drop(&mut self) {
        lock(&self.server.log).large -= self.large;
    }
}

fn is_large(key: &str) -> bool {
    key.starts_with("large")
}

impl<const OUTLIVES: bool> Work for Echo<OUTLIVES> {
    type Operation = String;
    type Answer = String;

    const LANES: usize = 2;
    const OUTLIVES: bool = OUTLIVES;

    fn database(&self) -> &Database {
        &self.database
    }

    fn turn(&self) -> Option<&Semaphore> {
        self.turn.as_ref()
    }

    fn key(operation: &String) -> &str {
        operation
    }

    fn bytes(operation: &String) -> usize {
        if is_large(operation) { LARGE + 1 } else { 1 }
    }

    async fn one(&self, operation: &String) -> Result<String, OpFailure> {
        self.server.exchange(&[operation]).await;
        if operation == "locked" { Err(is_locked()) } else { Ok(operation.clone()) }
    }

    async fn many(&self, operations: &[QueuedOp<Self>]) -> Result<Vec<String>, OpFailure> {
        let keys: Vec<_> = operations.iter().map(|waiting| &waiting.operation).collect();
        self.server.exchange(&keys).await;
        if keys.iter().any(|key| *key == "locked") {
            return Err(is_locked());
        }
        Ok(keys.into_iter().cloned().collect())
    }
}

fn is_locked() -> OpFailure {
    let mut failure = OpFailure::not_sent("locked");
    (failure.blames_one, failure.is_locked) = (true, true);
    failure
}

const CONNECTIONS: usize = 6;
/// Number of connections that large operations may take in addition to the lone operation's connection: half of all
/// connections, in total.
const ROOM_FOR_LARGE: usize = 2;

/// Makes lanes to a server whose gate is shut.
fn open<const OUTLIVES: bool>(turn: Option<Semaphore>) -> (Arc<Lanes<Echo<OUTLIVES>>>, Arc<Server>) {
    let clock: Arc<dyn Clock> = Arc::new(TestClock::default());
    let limit = Duration::from_secs(1);
    let source = ConnectionSource::Config(Box::new(Config::new()), Tls::Off);
    let sessions = Sessions::new(source, CONNECTIONS, limit, Arc::clone(&clock));
    let database = Database::new(sessions, clock, limit, false);
    let server = Arc::new(Server { gate: Semaphore::new(0), log: std::sync::Mutex::default() });
    (Arc::new(Lanes::new(Echo { database, turn, server: Arc::clone(&server) })), server)
}

async fn call<const OUTLIVES: bool>(lanes: &Lanes<Echo<OUTLIVES>>, key: &str) {
    match lanes.call(key.to_owned()).await {
        Ok(answer) => assert_eq!(answer, key, "the answer of another operation"),
        Err(failure) => panic!("{key}: {failure:?}"),
    }
}

async fn poll_once<F: Future>(call: Pin<&mut F>) -> bool {
    let mut call = call;
    poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await
}

/// Checks that after the end of all lanes no operation is left, and that no lane is still counted.
async fn all_is_over<const OUTLIVES: bool>(lanes: &Lanes<Echo<OUTLIVES>>) {
    let shared = &lanes.0;
    shared.runtime.0.idle().await;
    assert_eq!(shared.runtime.0.alive(), 0, "a lane is still running");
    assert_eq!(shared.lanes.load(Ordering::SeqCst), 0, "a lane that ended is still counted");
    assert!(lock(&shared.queue).is_empty(), "an operation is left that no lane will take");
    assert!(!shared.lone.load(Ordering::SeqCst), "the turn of a lone operation was not given back");
}

fn each_gets_its_own_answer(turn: Option<Semaphore>) {
    let (lanes, server) = open::<false>(turn);
    server.open();
    let threads: Vec<_> = (0..4)
        .map(|of| {
            let lanes = Arc::clone(&lanes);
            thread::spawn(move || {
                block_on(async {
                    call(&lanes, &format!("first-{of}")).await;
                    call(&lanes, &format!("second-{of}")).await;
                    call(&lanes, &format!("large-{of}")).await;
                });
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
    block_on(all_is_over(&lanes));
}

/// Each operation gets its own answer, even if the operation gathers while lanes end.
#[test]
fn each_operation_gets_its_own_answer() {
    explore(|| each_gets_its_own_answer(None));
}

/// Each operation gets its own answer if only one batch may be in flight.
#[test]
fn each_operation_gets_its_own_answer_in_turn() {
    explore(|| each_gets_its_own_answer(Some(Semaphore::new(1))));
}

/// An operation on a row that another session has locked fails alone: the other operations of its batch succeed.
#[test]
fn an_operation_on_a_locked_row_fails_alone() {
    explore(|| {
        let (lanes, server) = open::<false>(None);
        server.open();
        let threads: Vec<_> = ["a", "locked", "b", "locked"]
            .into_iter()
            .map(|key| {
                let lanes = Arc::clone(&lanes);
                thread::spawn(move || {
                    block_on(async {
                        match key {
                            "locked" => assert!(lanes.call(key.to_owned()).await.is_err()),
                            _ => call(&lanes, key).await,
                        }
                    });
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        block_on(all_is_over(&lanes));
    });
}

/// Large operations share no statement, take half of the connections, and block no other operation.
#[test]
fn large_operations_leave_connections_to_other_operations() {
    explore(|| {
        let (lanes, server) = open::<false>(Some(Semaphore::new(1)));
        let large: Vec<_> = (0..5)
            .map(|of| {
                let lanes = Arc::clone(&lanes);
                thread::spawn(move || block_on(call(&lanes, &format!("large-{of}"))))
            })
            .collect();
        // The server blocks the operations that were sent, and checks their number.
        block_on(server.exchanges(ROOM_FOR_LARGE + 1));
        let small = Arc::clone(&lanes);
        let small = thread::spawn(move || block_on(call(&small, "small")));
        block_on(server.exchanges(ROOM_FOR_LARGE + 2));
        assert_eq!(server.arrived("small"), 1);
        server.open();
        for thread in large.into_iter().chain([small]) {
            thread.join().expect("no panic");
        }
        block_on(all_is_over(&lanes));
        assert_eq!(lock(&server.log).exchanges, 6);
    });
}

/// Lets two callers drop their operations while the operations wait for a lane, or (`kind` is `large-`) for a permit
/// for large operations. Returns the number of dropped operations that are sent.
fn sent_without_a_caller<const OUTLIVES: bool>(kind: &'static str) -> usize {
    let (lanes, server) = open::<OUTLIVES>(None);
    // The server blocks one operation that its caller drives, and one operation for each lane, or as many large
    // operations.
    let mut threads = Vec::new();
    for of in 0..=Echo::<OUTLIVES>::LANES {
        let held = Arc::clone(&lanes);
        threads.push(thread::spawn(move || block_on(call(&held, &format!("{kind}held-{of}")))));
        block_on(server.exchanges(of + 1));
    }
    let leaving: Vec<_> = (0..2)
        .map(|_| {
            let lanes = Arc::clone(&lanes);
            thread::spawn(move || {
                block_on(async {
                    let mut leaving = pin!(lanes.call(format!("{kind}gone")));
                    assert!(!poll_once(leaving.as_mut()).await);
                });
            })
        })
        .collect();
    let stays = Arc::clone(&lanes);
    threads.push(thread::spawn(move || block_on(call(&stays, &format!("{kind}stays")))));
    for thread in leaving {
        thread.join().expect("no panic");
    }
    server.open();
    for thread in threads {
        thread.join().expect("no panic");
    }
    block_on(all_is_over(&lanes));
    server.arrived(&format!("{kind}gone"))
}

/// An operation that waits for a lane is not sent once its caller is gone. An operation that outlives its caller is
/// sent.
#[test]
fn an_operation_without_a_caller_is_not_sent() {
    explore(|| {
        for kind in ["", "large-"] {
            assert_eq!(sent_without_a_caller::<false>(kind), 0);
            assert_eq!(sent_without_a_caller::<true>(kind), 2);
        }
    });
}

/// An operation that outlives its caller is sent even if the caller drops the operation after any poll.
#[test]
fn an_operation_that_outlives_its_caller_is_done() {
    explore(|| {
        for kind in ["", "large-"] {
            let (lanes, server) = open::<true>(None);
            let leaving: Vec<_> = (0..3)
                .map(|of| {
                    let lanes = Arc::clone(&lanes);
                    thread::spawn(move || {
                        block_on(async {
                            let mut leaving = pin!(lanes.call(format!("{kind}gone-{of}")));
                            for _ in 0..of {
                                if poll_once(leaving.as_mut()).await {
                                    return;
                                }
                                yield_now().await;
                            }
                            poll_once(leaving.as_mut()).await;
                        });
                    })
                })
                .collect();
            server.open();
            for thread in leaving {
                thread.join().expect("no panic");
            }
            block_on(all_is_over(&lanes));
            for of in 0..3 {
                assert!(server.arrived(&format!("{kind}gone-{of}")) > 0, "{kind}gone-{of} was never sent");
            }
        }
    });
}

/// When the runtime of the lanes shuts down, no caller waits for an answer that can't come.
#[test]
fn a_runtime_that_shuts_down_leaves_no_caller_waiting() {
    explore(|| {
        let (lanes, server) = open::<false>(None);
        server.open();
        let threads: Vec<_> = (0..4)
            .map(|of| {
                let lanes = Arc::clone(&lanes);
                thread::spawn(move || {
                    let key = format!("{}key-{of}", if of < 2 { "" } else { "large-" });
                    if let Ok(answer) = block_on(lanes.call(key.clone())) {
                        assert_eq!(answer, key);
                    }
                })
            })
            .collect();
        lanes.0.runtime.0.end();
        for thread in threads {
            thread.join().expect("no panic");
        }
        block_on(all_is_over(&lanes));
    });
}
