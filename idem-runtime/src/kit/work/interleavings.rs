//! Tests of operations that gather while lanes start and end, in many orders of the threads.

use std::pin::pin;
use std::sync::atomic::AtomicUsize;

use shuttle::future::{block_on, yield_now};
use shuttle::thread;

use super::*;
use crate::kit::lanes::interleavings::{GatedServer, polled_once};
use crate::sync::{TestClock, explore, join_all};

/// Connections of which [`ROOM_FOR_LARGE`] take large operations.
struct TestLink {
    clock: Arc<dyn Clock>,
    large: Semaphore,
}

impl Link for TestLink {
    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn moved(&self) -> Instant {
        Instant::new(Duration::ZERO)
    }

    fn large(&self) -> Option<&Semaphore> {
        Some(&self.large)
    }
}

/// Reason why an operation of the test server has no answer.
#[derive(Clone, PartialEq, Eq, Debug)]
enum TestFailure {
    NotSent,
    Lost,
    Locked,
}

impl WorkFailure for TestFailure {
    fn not_sent(_: &str) -> Self {
        Self::NotSent
    }

    fn lost() -> Self {
        Self::Lost
    }

    fn is_locked(&self) -> bool {
        *self == Self::Locked
    }

    fn is_worth_repeating(&self) -> bool {
        *self == Self::Locked
    }

    fn blames_one(&self) -> bool {
        *self == Self::Locked
    }
}

/// A server that answers each operation with the operation's key. An operation on the key `locked` fails its whole
/// batch, as if another session had locked the row. An operation on a key that starts with `large` has a large result.
struct Echo<const OUTLIVES: bool> {
    link: TestLink,
    turns: Option<WriteTurns>,
    server: Arc<GatedServer>,
    /// Number of large operations in flight.
    large: Arc<AtomicUsize>,
}

impl<const OUTLIVES: bool> Echo<OUTLIVES> {
    async fn exchange(&self, keys: &[&String]) {
        let count = keys.iter().filter(|key| is_large(key)).count();
        assert!(count == 0 || keys.len() == 1, "a large operation has others with it: {keys:?}");
        let _done = LargeGuard { large: &self.large, count };
        let large = self.large.fetch_add(count, Ordering::SeqCst) + count;
        assert!(large <= ROOM_FOR_LARGE + 1, "large operations take {large} connections");
        self.server.exchange(keys.iter().map(|key| (*key).clone())).await;
    }
}

/// Ends the large operations of an exchange, even if the exchange is dropped.
struct LargeGuard<'a> {
    large: &'a AtomicUsize,
    count: usize,
}

impl Drop for LargeGuard<'_> {
    fn drop(&mut self) {
        self.large.fetch_sub(self.count, Ordering::SeqCst);
    }
}

fn is_large(key: &str) -> bool {
    key.starts_with("large")
}

impl<const OUTLIVES: bool> Work for Echo<OUTLIVES> {
    type Operation = String;
    type Answer = String;
    type Failure = TestFailure;
    type Link = TestLink;

    const BATCH: usize = 128;
    const LANES: usize = 2;
    const OUTLIVES: bool = OUTLIVES;

    fn link(&self) -> &TestLink {
        &self.link
    }

    fn turns(&self) -> Option<&WriteTurns> {
        self.turns.as_ref()
    }

    fn key(operation: &String) -> &str {
        operation
    }

    fn bytes(operation: &String) -> usize {
        if is_large(operation) { LARGE + 1 } else { 1 }
    }

    async fn one(&self, operation: &String) -> Result<String, TestFailure> {
        self.exchange(&[operation]).await;
        if operation == "locked" { Err(TestFailure::Locked) } else { Ok(operation.clone()) }
    }

    async fn many(&self, operations: &[QueuedOp<Self>]) -> Result<Vec<String>, TestFailure> {
        let keys: Vec<_> = operations.iter().map(|waiting| &waiting.operation).collect();
        self.exchange(&keys).await;
        if keys.iter().any(|key| *key == "locked") {
            return Err(TestFailure::Locked);
        }
        Ok(keys.into_iter().cloned().collect())
    }
}

/// Number of connections that large operations may take in addition to the lone operation's connection.
const ROOM_FOR_LARGE: usize = 2;

/// Makes lanes to a test server that answers nothing until its gate opens.
fn open<const OUTLIVES: bool>(turns: Option<WriteTurns>) -> (Arc<WorkLanes<Echo<OUTLIVES>>>, Arc<GatedServer>) {
    let clock: Arc<dyn Clock> = Arc::new(TestClock::default());
    let link = TestLink { clock, large: Semaphore::new(ROOM_FOR_LARGE) };
    let server = GatedServer::shut();
    let echo = Echo { link, turns, server: Arc::clone(&server), large: Arc::default() };
    (Arc::new(WorkLanes::new(echo)), server)
}

async fn call<const OUTLIVES: bool>(lanes: &WorkLanes<Echo<OUTLIVES>>, key: &str) {
    match lanes.call(key.to_owned()).await {
        Ok(answer) => assert_eq!(answer, key, "the answer of another operation"),
        Err(failure) => panic!("{key}: {failure:?}"),
    }
}

async fn all_have_ended<const OUTLIVES: bool>(lanes: &WorkLanes<Echo<OUTLIVES>>) {
    lanes.0.lanes.all_have_ended(VecDeque::is_empty).await;
}

fn each_gets_its_own_answer(turns: Option<WriteTurns>) {
    let (lanes, server) = open::<false>(turns);
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
    join_all(threads);
    block_on(all_have_ended(&lanes));
}

/// Each caller gets the answer to its own operation, even if the operation gathers while lanes end.
#[test]
fn each_operation_gets_its_own_answer() {
    explore(|| each_gets_its_own_answer(None));
}

/// Each caller gets the answer to its own operation if only one batch may be in flight.
#[test]
fn each_operation_gets_its_own_answer_with_one_batch_in_flight() {
    explore(|| each_gets_its_own_answer(Some(WriteTurns::new(1))));
}

/// Each caller gets the answer to its own operation if a batch takes all permits while batches are small.
#[test]
fn each_operation_gets_its_own_answer_if_small_batches_take_all_permits() {
    explore(|| each_gets_its_own_answer(Some(WriteTurns::new(2))));
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
        join_all(threads);
        block_on(all_have_ended(&lanes));
    });
}

/// Large operations share no statement, take at most half of the connections, and block no other operation.
#[test]
fn large_operations_leave_connections_to_other_operations() {
    explore(|| {
        let (lanes, server) = open::<false>(Some(WriteTurns::new(1)));
        let large: Vec<_> = (0..5)
            .map(|of| {
                let lanes = Arc::clone(&lanes);
                thread::spawn(move || block_on(call(&lanes, &format!("large-{of}"))))
            })
            .collect();
        // The gate of the server is shut, so every large operation that was sent stays in flight and keeps its
        // connection. These operations take no more than half of the connections.
        block_on(server.exchanges(ROOM_FOR_LARGE + 1));
        let small = Arc::clone(&lanes);
        let small = thread::spawn(move || block_on(call(&small, "small")));
        block_on(server.exchanges(ROOM_FOR_LARGE + 2));
        assert_eq!(server.arrived("small"), 1);
        server.open();
        join_all(large.into_iter().chain([small]));
        block_on(all_have_ended(&lanes));
        assert_eq!(server.count(), 6);
    });
}

/// Lets two callers drop their operations while the operations wait for a lane, or (`kind` is `large-`) for a permit
/// for large operations. Returns the number of dropped operations that are sent.
fn sent_without_a_caller<const OUTLIVES: bool>(kind: &'static str) -> usize {
    let (lanes, server) = open::<OUTLIVES>(None);
    // The server blocks one operation that its caller drives, and one operation for each lane; if `kind` is `large-`,
    // it blocks the same number of large operations.
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
                    assert!(!polled_once(leaving.as_mut()).await);
                });
            })
        })
        .collect();
    let stays = Arc::clone(&lanes);
    threads.push(thread::spawn(move || block_on(call(&stays, &format!("{kind}stays")))));
    join_all(leaving);
    server.open();
    join_all(threads);
    block_on(all_have_ended(&lanes));
    server.arrived(&format!("{kind}gone"))
}

/// An operation that waits for a lane is not sent if its caller is gone, unless the operation outlives its caller.
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
fn an_operation_that_outlives_its_caller_is_sent() {
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
                                if polled_once(leaving.as_mut()).await {
                                    return;
                                }
                                yield_now().await;
                            }
                            polled_once(leaving.as_mut()).await;
                        });
                    })
                })
                .collect();
            server.open();
            join_all(leaving);
            block_on(all_have_ended(&lanes));
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
        lanes.0.lanes.end_runtime();
        join_all(threads);
        block_on(all_have_ended(&lanes));
    });
}
