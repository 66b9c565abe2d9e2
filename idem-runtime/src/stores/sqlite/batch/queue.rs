//! The operations for the threads of a store handle, and the queues in which they wait.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::clock::Instant;
use crate::key::Key;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Release, Reservation, ReserveRequest, StoredResult,
    Verdict,
};
use crate::store::{Filter, Page, StoreError, StoreErrorKind};
use crate::sync::lock;

/// Largest number of operations in one transaction.
pub(super) const BATCH: usize = 256;
/// A transaction with this many bytes of results, in requests or answers, takes no more operations.
pub(super) const BATCH_BYTES: usize = 4 * 1024 * 1024;

/// An operation for a thread.
#[derive(Debug)]
pub(in super::super) enum SqliteRequest {
    /// A reservation. The flag is true if the reservation must not yet take over a lease that lapsed while the file was
    /// locked.
    Reserve(ReserveRequest, bool),
    Begin(Lease),
    Renew(Lease),
    Append(Lease, Journal),
    Finish(Lease, Finish),
    Release(Lease, Release),
    Decide(Decision),
    Purge(u32),
    Inspect(Key),
    List(Filter),
    Ping,
}

impl SqliteRequest {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Finish(_, finish) => finish.result().stored_bytes(),
            Self::Append(_, journal) => journal.bytes().len(),
            Self::Decide(decision) => decision.stored_bytes(),
            _ => 0,
        }
    }

    /// Returns whether the operation only reads.
    pub(super) fn reads(&self) -> bool {
        matches!(self, Self::Inspect(_) | Self::List(_) | Self::Ping)
    }

    /// Returns the key whose waiting duplicates must read the record again after this answer.
    pub(super) fn wakes(&self, answered: &OpResult) -> Option<&Key> {
        match (self, answered) {
            (Self::Reserve(ReserveRequest { key, .. }, _), Ok(Answer::Reservation(Reservation::Granted { .. })))
            | (
                Self::Finish(Lease { key, .. }, _) | Self::Release(Lease { key, .. }, _),
                Ok(Answer::Write(Verdict::Applied)),
            )
            | (Self::Decide(Decision { key, .. }), Ok(Answer::Decided(DecisionAnswer::Applied))) => Some(key),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(in super::super) enum Answer {
    Reservation(Reservation),
    Decided(DecisionAnswer),
    /// Another owner's lease lapsed while the file was locked: the owner first gets time to renew the lease.
    Spared,
    Write(Verdict),
    Removed(u64),
    Inspection(Option<Inspection>),
    Page(Page),
    Pong,
}

impl Answer {
    pub(super) fn bytes(&self) -> usize {
        let record = match self {
            Self::Reservation(Reservation::Finished { record, .. }) => record,
            Self::Inspection(Some(inspection)) => &inspection.record,
            _ => return 0,
        };
        record.state.result().map_or(0, StoredResult::stored_bytes)
    }
}

/// Returns the error for an answer of the wrong kind. The error does not show the answer, which may contain a payload.
pub(in super::super) fn nonsense(_: &Answer) -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, "the thread of the store answered another request")
}

pub(super) type OpResult = Result<Answer, StoreError>;

/// Destination of an answer.
pub(super) enum AnswerTarget {
    One(oneshot::Sender<OpResult>),
    /// The caller that renews several leases, and the index of the lease.
    Lease(usize, mpsc::UnboundedSender<(usize, OpResult)>),
}

pub(super) struct Op {
    pub(super) number: u64,
    /// Time of the request; `None` unless the operation is for the upkeep thread, which gives up operations that have
    /// waited too long.
    pub(super) asked_at: Option<Instant>,
    pub(super) ask: SqliteRequest,
    pub(super) reply: AnswerTarget,
}

impl AnswerTarget {
    pub(super) fn send(self, answer: OpResult) {
        // The result of sending is ignored: a caller that is gone needs no answer.
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Lease(at, reply) => drop(reply.send((at, answer))),
        }
    }
}

impl Op {
    pub(super) fn answer(self, answer: OpResult) {
        self.reply.send(answer);
    }

    /// Returns whether the operation can be skipped: its caller is gone, and the operation ends no attempt.
    pub(super) fn is_abandoned(&self) -> bool {
        let is_gone = || match &self.reply {
            AnswerTarget::One(reply) => reply.is_closed(),
            AnswerTarget::Lease(_, reply) => reply.is_closed(),
        };
        !matches!(self.ask, SqliteRequest::Finish(..) | SqliteRequest::Release(..)) && is_gone()
    }
}

/// The operations that wait for one thread.
#[derive(Default)]
pub(super) struct Queue {
    gathered: Mutex<QueuedOps>,
    ready: Condvar,
}

#[derive(Default)]
struct QueuedOps {
    ops: VecDeque<Op>,
    /// Number of waiting operations at which the thread must be woken; 0 while the thread is awake.
    wakes_at: usize,
    /// True if the thread of the queue is running.
    started: bool,
    closed: bool,
}

impl Queue {
    /// Adds operations, unless the queue would exceed `capacity`. Returns true if no thread is running yet, so that the
    /// caller has to start one.
    pub(super) fn push(&self, ops: impl ExactSizeIterator<Item = Op>, capacity: usize) -> Result<bool, &'static str> {
        let mut gathered = lock(&self.gathered);
        if gathered.closed {
            return Err("the thread of the store has ended");
        }
        let len = gathered.ops.len().saturating_add(ops.len());
        if len > capacity {
            let before = gathered.ops.len();
            gathered.ops.retain(|op| !op.is_abandoned());
            if len - (before - gathered.ops.len()) > capacity {
                return Err("too many calls wait for the file");
            }
        }
        gathered.ops.extend(ops);
        let starts = !std::mem::replace(&mut gathered.started, true);
        let wakes = gathered.wakes_at > 0 && gathered.ops.len() >= gathered.wakes_at;
        if wakes {
            gathered.wakes_at = 0;
        }
        drop(gathered);
        if wakes {
            self.ready.notify_one();
        }
        Ok(starts)
    }

    /// Waits for operations (up to `at_most`, if given), and takes them. Returns false if the queue is closed and
    /// empty.
    pub(super) fn take(&self, batch: &mut Vec<Op>, at_most: Option<Duration>) -> bool {
        let mut gathered = lock(&self.gathered);
        while gathered.ops.is_empty() {
            if gathered.closed {
                return false;
            }
            gathered.wakes_at = 1;
            match at_most {
                None => gathered = self.ready.wait(gathered).unwrap_or_else(PoisonError::into_inner),
                Some(at_most) => {
                    let waited = self.ready.wait_timeout(gathered, at_most).unwrap_or_else(PoisonError::into_inner);
                    gathered = waited.0;
                    if waited.1.timed_out() {
                        gathered.wakes_at = 0;
                        break;
                    }
                }
            }
        }
        gathered.fill(batch, BATCH);
        true
    }

    /// Takes waiting operations until the batch has `at_most` operations.
    pub(super) fn take_more(&self, batch: &mut Vec<Op>, at_most: usize) {
        lock(&self.gathered).fill(batch, at_most);
    }

    /// Takes the waiting operations. If the queue is empty and the batch has fewer than `expected` operations, first
    /// waits up to `at_most` for the missing operations.
    pub(super) fn gather(&self, batch: &mut Vec<Op>, expected: usize, at_most: Duration) {
        let mut gathered = lock(&self.gathered);
        let missing = expected.saturating_sub(batch.len());
        if missing > 0 && gathered.ops.is_empty() && !gathered.closed && !at_most.is_zero() {
            gathered.wakes_at = missing;
            let waited = self.ready.wait_timeout_while(gathered, at_most, |it| it.wakes_at > 0 && !it.closed);
            gathered = waited.unwrap_or_else(PoisonError::into_inner).0;
            gathered.wakes_at = 0;
        }
        gathered.fill(batch, BATCH);
    }

    /// Returns the number of waiting operations.
    pub(super) fn len(&self) -> usize {
        lock(&self.gathered).ops.len()
    }

    /// Removes an operation that no thread has taken. Returns whether the operation was in the queue.
    pub(super) fn forget(&self, number: u64) -> bool {
        let mut gathered = lock(&self.gathered);
        let at = gathered.ops.iter().position(|op| op.number == number);
        at.and_then(|at| gathered.ops.remove(at)).is_some()
    }

    /// Notes whether the thread of the queue was started. If the thread could not be started, drops the waiting
    /// operations.
    pub(super) fn set_started(&self, started: bool) {
        let mut gathered = lock(&self.gathered);
        gathered.started = started;
        if !started {
            gathered.ops.clear();
        }
    }

    /// Closes the queue, and drops its operations.
    pub(super) fn end(&self) {
        self.close();
        lock(&self.gathered).ops.clear();
    }

    pub(super) fn close(&self) {
        lock(&self.gathered).closed = true;
        self.ready.notify_all();
    }
}

impl QueuedOps {
    fn fill(&mut self, batch: &mut Vec<Op>, at_most: usize) {
        let mut bytes = batch.iter().map(|op| op.ask.bytes()).sum::<usize>();
        while batch.len() < at_most && bytes < BATCH_BYTES {
            let Some(op) = self.ops.pop_front() else { break };
            if !op.is_abandoned() {
                bytes += op.ask.bytes();
                batch.push(op);
            }
        }
    }
}
