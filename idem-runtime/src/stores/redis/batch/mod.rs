//! Sends the operations of many tasks over one connection. An operation passes through these files:
//!
//! | file | step |
//! |---|---|
//! | `mod` | the caller of a lone operation drives it; concurrent operations gather |
//! | `lanes` | a lane takes the operations that have gathered |
//! | `op_batch` | the records of gathered operations are encoded, end to end, in one buffer |
//! | `sender` | the batch becomes one exchange, or a few |
//! | `pipeline` | the commands of an exchange |
//! | `exchange` | the round trip, which can end with the confirmation of replicas |
//! | `answer`, `expectations` | the meaning of a reply, for its operation and for later exchanges |
//! | `replies`, `op_future` | the answer reaches the caller |
//!
//! - A lone command never waits: while nothing is in flight, a command goes straight to the connection. Operations that
//!   are called while another operation is in flight gather, and share one pipeline: one write, one answer to read, one
//!   wake-up.
//! - A completion is `SET … IFEQ` with the bytes that the reservation wrote, if the server supports that option and the
//!   caller has the bytes. If the bytes differ (a duplicate has marked the record, or another attempt holds it), a
//!   script decides. Completions that need a script share one call for many keys.
//! - While most reservations turn out to be replays, one `MGET` first looks up the keys of all gathered reservations.
//!   For each key, the look-up costs the server a tenth of the work of a reservation. The absent keys are then
//!   reserved.
//! - A batch is limited by the size of its requests, and by the size of its answers as estimated from the latest
//!   answers.
//! - If a caller drops its future before the operation is sent, the operation is not sent. The end of an attempt is an
//!   exception: a lane still sends it.

mod answer;
mod exchange;
mod expectations;
mod lanes;
mod op_batch;
mod op_future;
mod pipeline;
mod replies;
mod sender;

#[cfg(all(test, shuttle))]
mod interleavings;

use std::sync::Arc;

pub(super) use self::answer::lone_letter;
use self::lanes::ConnectionLanes;
use self::op_future::DelegatedOp;
pub(super) use self::op_future::OpFuture;
use self::sender::BatchSender;
use super::command::{RedisCommand, with_source};
use super::op::{Op, OpAnswer};
use super::place::ServerConnection;
use super::terms::ExchangeTerms;
use super::write::RecordWrite;
use crate::kit::lanes::LoneTurn;

/// One connection and everything in flight on it.
pub(super) struct Dispatch(Arc<ConnectionLanes>);

impl Dispatch {
    /// Makes a dispatch that sends over `connection`, from tasks of the current runtime.
    pub(super) fn new(connection: ServerConnection, terms: ExchangeTerms) -> Self {
        Self(Arc::new(ConnectionLanes::new(BatchSender::new(connection, terms))))
    }

    /// Returns the connection, for requests that are not operations.
    pub(super) fn connection(&self) -> &ServerConnection {
        self.0.sender.connection()
    }

    /// Sends an operation: alone if nothing else is in flight, otherwise in a batch.
    pub(super) fn run<'a>(&'a self, op: Op<'a>) -> OpFuture<'a> {
        let op = match op {
            // A server without `SET … IFEQ` needs no bytes to compare with.
            Op::Finish(write) if !self.0.sender.compares() => Op::Finish(RecordWrite { expected: None, ..write }),
            op => op,
        };
        let Some(turn) = self.0.enter() else { return OpFuture::Gathered(self.0.gather(op)) };
        match op {
            Op::Reserve(write) => {
                let command = write.reserve();
                OpFuture::alone(async move {
                    let _turn = turn;
                    self.0.sender.reserve(&command).await
                })
            }
            Op::Finish(write) => OpFuture::alone(self.finish_alone(turn, write)),
            Op::Renew(command) | Op::Write(command) | Op::Read(command) => {
                OpFuture::alone(self.call_alone(turn, command))
            }
        }
    }

    async fn finish_alone(&self, _turn: LoneTurn<'_>, write: RecordWrite<'_>) -> OpAnswer {
        let unanswered = DelegatedOp::new(|| drop(self.0.gather(Op::Finish(write))));
        let mut bytes = Vec::new();
        let layout = write.encode(&mut bytes);
        let answer = self.0.sender.finish(layout.write_in(&bytes)).await;
        unanswered.done();
        answer
    }

    async fn call_alone(&self, _turn: LoneTurn<'_>, command: RedisCommand) -> OpAnswer {
        let unanswered = DelegatedOp::new(|| {
            if command.is_kept {
                drop(self.0.gather(Op::Write(command.clone())));
            }
        });
        let answer = self.0.sender.call(&command).await;
        unanswered.done();
        answer
    }

    /// Sends an operation alone, for a key whose slot is migrating to this node.
    pub(super) fn run_asking<'a>(&'a self, op: Op<'a>) -> OpFuture<'a> {
        let sender = &self.0.sender;
        let command = match op {
            Op::Reserve(write) => write.reserve(),
            Op::Finish(write) => sender.finish_with_source(&write),
            Op::Renew(op) | Op::Write(op) | Op::Read(op) => match op.source {
                Some(source) => with_source(&op.command, source),
                None => op.command,
            },
        };
        OpFuture::alone(sender.asking(command))
    }
}
