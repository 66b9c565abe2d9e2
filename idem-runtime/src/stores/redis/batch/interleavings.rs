//! Tests of operations that gather while lanes start and end, in many orders of the threads.

use std::pin::pin;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Cmd, Pipeline, RedisFuture, Value};
use shuttle::future::{block_on, yield_now};
use shuttle::thread;

use super::super::command::{Name, argument};
use super::super::connection::UserConnection;
use super::super::failure::ExchangeFailure;
use super::super::scripts::{Script, Scripts};
use super::lanes::LANES;
use super::*;
use crate::clock::Clock;
use crate::kit::lanes::interleavings::{GatedServer, polled_once};
use crate::record::{OwnerToken, Record, State};
use crate::sync::{TestClock, explore, join_all};

/// A server whose answer identifies the operation. The answer to a reservation is the reserved key. A completion
/// succeeds; if its key starts with `differs`, a script has to decide. An append succeeds unless its key starts with
/// `refused`. The answer to any other script is 1, and the
/// answer to any other command is the command's first argument.
#[derive(Clone)]
struct FakeServer(Arc<GatedServer>);

impl FakeServer {
    async fn exchange(&self, commands: Vec<Cmd>) -> Vec<Value> {
        let arrived = commands.iter().flat_map(|command| {
            let keys = match argument(command, 0) {
                b"MGET" => 1..command.args_iter().count(),
                b"EVALSHA" => 3..3 + keys(command),
                _ => 1..2,
            };
            keys.map(|at| String::from_utf8_lossy(argument(command, at)).into_owned())
        });
        self.0.exchange(arrived).await;
        commands
            .iter()
            .map(|command| match (argument(command, 0), argument(command, 1)) {
                (b"MGET", _) => {
                    let met = (1..command.args_iter().count()).map(|at| argument(command, at).to_vec());
                    Value::Array(met.map(Value::BulkString).collect())
                }
                (b"EVALSHA", b"finish") => Value::BulkString(vec![b'1'; keys(command)]),
                (b"EVALSHA", b"append") => {
                    let letter = |at| if argument(command, at).starts_with(b"refused") { b'0' } else { b'1' };
                    Value::BulkString((3..3 + keys(command)).map(letter).collect())
                }
                (b"EVALSHA", _) => Value::Int(1),
                (b"SET", key) if argument(command, 3) == b"IFEQ" => {
                    if key.starts_with(b"differs") {
                        Value::Nil
                    } else {
                        Value::Okay
                    }
                }
                (_, key) => Value::BulkString(key.to_vec()),
            })
            .collect()
    }
}

fn keys(call: &Cmd) -> usize {
    std::str::from_utf8(argument(call, 2)).expect("text").parse().expect("a number")
}

impl ConnectionLike for FakeServer {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move { Ok(self.exchange(vec![command.clone()]).await.remove(0)) })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        _offset: usize,
        _count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move { Ok(self.exchange(pipeline.cmd_iter().cloned().collect()).await) })
    }

    fn get_db(&self) -> i64 {
        0
    }
}

fn script(name: &str) -> Script {
    Script { source: "", sha: name.to_owned() }
}

/// Makes a dispatch to a test server that answers nothing until its gate opens.
fn open() -> (Arc<Dispatch>, Arc<GatedServer>) {
    let server = GatedServer::shut();
    let clock: Arc<dyn Clock> = Arc::new(TestClock::default());
    let timeout = Duration::from_secs(1);
    let names = [
        "append",
        "begin",
        "decide",
        "finish",
        "finish_one",
        "glance",
        "inspect",
        "ping",
        "release",
        "remove",
        "renew",
        "take",
        "watch",
    ];
    let scripts = Arc::new(Scripts::new(names.map(script)));
    let connection = ServerConnection::theirs(
        UserConnection::new(FakeServer(Arc::clone(&server)), &clock),
        Arc::clone(&clock),
        timeout,
    );
    let channel = "ends".into();
    let terms = ExchangeTerms { clock, timeout, replicas: None, channel, scripts, one_key: false, compares: true };
    (Arc::new(Dispatch::new(connection, terms)), server)
}

fn get(key: &str) -> RedisCommand {
    let mut command = Cmd::new();
    command.arg("GET").arg(key);
    RedisCommand::plain(command).returns_record()
}

static RECORD: Record = Record::new(OwnerToken::from_bytes([7; 16]), 1, State::Released);

fn name(key: &str) -> Name<'_> {
    Name { prefix: "", key }
}

fn reservation(key: &str) -> Op<'_> {
    Op::Reserve(RecordWrite { name: name(key), record: &RECORD, reserved_at: None, expected: None, ttl_ms: 1 })
}

fn completion(key: &str) -> Op<'_> {
    let (record, reserved_at, expected) = (&RECORD, Some(1), Some(&RECORD));
    Op::Finish(RecordWrite { name: name(key), record, reserved_at, expected, ttl_ms: 1 })
}

async fn reserve(dispatch: &Dispatch, key: &str) {
    let answer = dispatch.run(reservation(key)).await;
    assert!(matches!(answer, Ok(Value::BulkString(met)) if met == key.as_bytes()), "not the answer for {key}");
}

async fn finish(dispatch: &Dispatch, key: &str) {
    assert!(matches!(dispatch.run(completion(key)).await, Ok(Value::Int(1))), "not the answer for {key}");
}

async fn append(dispatch: &Dispatch, key: &str, verdict: i64) {
    let append = RedisCommand::script(&script("append"), std::iter::once(name(key)), |command| {
        command.arg("owner").arg("journal").arg(1);
    });
    let answer = lone_letter(dispatch.run(Op::Write(append.joins())).await);
    assert!(matches!(answer, Ok(Value::Int(met)) if met == verdict), "not the answer for {key}");
}

async fn ask(dispatch: &Dispatch, key: &str) {
    let answer = dispatch.run(Op::Read(get(key))).await;
    assert!(matches!(answer, Ok(Value::BulkString(met)) if met == key.as_bytes()), "not the answer for {key}");
}

async fn all_have_ended(dispatch: &Dispatch) {
    dispatch.0.lanes.all_have_ended(|queue| queue.batches.is_empty()).await;
}

/// Each caller gets the answer to its own operation, even if the operation gathers while lanes end.
#[test]
fn each_operation_gets_its_own_answer() {
    explore(|| {
        let (dispatch, server) = open();
        server.open();
        let threads: Vec<_> = (0..4)
            .map(|of| {
                let dispatch = Arc::clone(&dispatch);
                thread::spawn(move || {
                    block_on(async {
                        reserve(&dispatch, &format!("reserve-{of}")).await;
                        match of {
                            0 => finish(&dispatch, "finish").await,
                            1 => finish(&dispatch, "differs").await,
                            2 => append(&dispatch, "append", 1).await,
                            _ => append(&dispatch, "refused", 0).await,
                        }
                    });
                })
            })
            .collect();
        join_all(threads);
        block_on(all_have_ended(&dispatch));
    });
}

/// An operation that waits for a lane is not sent if its caller is gone, unless the operation ends an attempt.
#[test]
fn an_operation_without_a_caller_is_not_sent() {
    explore(|| {
        let (dispatch, server) = open();
        // The server blocks one operation that its caller drives, and one operation for each lane.
        let mut threads = Vec::new();
        for of in 0..=LANES {
            let held = Arc::clone(&dispatch);
            threads.push(thread::spawn(move || block_on(ask(&held, &format!("held-{of}")))));
            block_on(server.exchanges(of + 1));
        }
        // Two callers poll an operation of each kind once, and drop it.
        let leaving: Vec<_> = (0..2)
            .map(|of| {
                let dispatch = Arc::clone(&dispatch);
                thread::spawn(move || {
                    block_on(async {
                        let (reserved, got) = (format!("reserve-{of}"), format!("get-{of}"));
                        let mut reserving = pin!(dispatch.run(reservation(&reserved)));
                        assert!(!polled_once(reserving.as_mut()).await);
                        let mut asking = pin!(dispatch.run(Op::Read(get(&got))));
                        assert!(!polled_once(asking.as_mut()).await);
                        let (finished, kept) = (format!("finish-{of}"), format!("kept-{of}"));
                        let mut finish = pin!(dispatch.run(completion(&finished)));
                        assert!(!polled_once(finish.as_mut()).await);
                        let mut keeping = pin!(dispatch.run(Op::Write(get(&kept).keep_if_dropped())));
                        assert!(!polled_once(keeping.as_mut()).await);
                    });
                })
            })
            .collect();
        let stays = Arc::clone(&dispatch);
        threads.push(thread::spawn(move || block_on(reserve(&stays, "stays"))));
        join_all(leaving);
        server.open();
        join_all(threads);
        block_on(all_have_ended(&dispatch));
        for of in 0..2 {
            for (what, times) in [("reserve", 0), ("get", 0), ("finish", 1), ("kept", 1)] {
                assert_eq!(server.arrived(&format!("{what}-{of}")), times, "how often {what}-{of} was sent");
            }
        }
    });
}

/// A completion that its caller drives is sent even if the caller drops the completion after any poll.
#[test]
fn a_completion_is_sent_although_its_caller_drops_it() {
    explore(|| {
        let (dispatch, server) = open();
        let leaving: Vec<_> = (0..3)
            .map(|of| {
                let dispatch = Arc::clone(&dispatch);
                thread::spawn(move || {
                    block_on(async {
                        let key = format!("finish-{of}");
                        let mut finish = pin!(dispatch.run(completion(&key)));
                        for _ in 0..of {
                            if polled_once(finish.as_mut()).await {
                                return;
                            }
                            yield_now().await;
                        }
                        polled_once(finish.as_mut()).await;
                    });
                })
            })
            .collect();
        server.open();
        join_all(leaving);
        block_on(all_have_ended(&dispatch));
        for of in 0..3 {
            assert!(server.arrived(&format!("finish-{of}")) > 0, "finish-{of} was never sent");
        }
    });
}

/// When the runtime of the lanes shuts down, no caller waits for an answer that can't come.
#[test]
fn a_runtime_that_shuts_down_leaves_no_caller_waiting() {
    explore(|| {
        let (dispatch, server) = open();
        server.open();
        let threads: Vec<_> = (0..4)
            .map(|of| {
                let dispatch = Arc::clone(&dispatch);
                thread::spawn(move || {
                    let key = format!("key-{of}");
                    let answer = block_on(dispatch.run(reservation(&key)));
                    match answer {
                        Ok(Value::BulkString(met)) => assert_eq!(met, key.as_bytes()),
                        Err(ExchangeFailure::NotSent(_) | ExchangeFailure::Lost) => {}
                        other => panic!("unexpected: {other:?}"),
                    }
                })
            })
            .collect();
        dispatch.0.lanes.end_runtime();
        join_all(threads);
        block_on(all_have_ended(&dispatch));
    });
}
