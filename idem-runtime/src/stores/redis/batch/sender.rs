//! Sends batches and lone operations, and reads their answers.
//!
//! A batch takes one exchange, or a few. A second exchange reserves the keys that the first exchange only looked up and
//! found absent, and repeats each call of a script that the server has forgotten, with the script's source. A further
//! exchange finishes, by script, the records that have changed since their reservation. Large records are sent in
//! separate exchanges.

use std::ops::Range;

use redis::{Cmd, Pipeline, Value};

use super::super::command::RedisCommand;
use super::super::failure::ExchangeFailure;
use super::super::limits::SURE;
use super::super::op::OpAnswer;
use super::super::place::ServerConnection;
use super::super::terms::ExchangeTerms;
use super::super::write::{EncodedWrite, RecordWrite};
use super::answer::{ExchangeAnswers, compared, deliver_decided, looked_up, record_bytes};
use super::exchange::Exchanges;
use super::expectations::Expectations;
use super::op_batch::{BatchEntry, OpBatch, WriteEntry};
use super::pipeline::{FirstExchange, SecondExchange, SentCommand, SharedCall, chunks, finish_call, finish_one};
use super::replies::Replies;

/// Smallest number of reservations in a batch for which the keys are looked up first, if replays are expected.
const LOOK_FIRST: usize = 8;
/// Reason in the error of an operation that was not sent.
pub(super) const STALLED: &str = "the server did not answer earlier requests";

/// A connection, and the expectations about its answers.
pub(super) struct BatchSender {
    exchanges: Exchanges,
    pub(super) terms: ExchangeTerms,
    pub(super) expectations: Expectations,
}

impl BatchSender {
    pub(super) fn new(connection: ServerConnection, terms: ExchangeTerms) -> Self {
        let (expectations, replicas) = (Expectations::new(&terms), terms.replicas);
        Self { exchanges: Exchanges { connection, replicas }, terms, expectations }
    }

    pub(super) fn connection(&self) -> &ServerConnection {
        &self.exchanges.connection
    }

    /// Returns whether to send `SET … IFEQ` to the server.
    pub(super) fn compares(&self) -> bool {
        self.expectations.compares(self.connection().generation())
    }

    /// Sends the command of one reservation.
    pub(super) async fn reserve(&self, command: &Cmd) -> OpAnswer {
        let answer = self.exchanges.one(command).await;
        self.expectations.note_largest(record_bytes(&answer));
        answer
    }

    /// Sends one completion.
    pub(super) async fn finish(&self, write: EncodedWrite<'_>) -> OpAnswer {
        if !write.expected.is_empty() && self.compares() {
            let answer = self.exchanges.one(&write.compare()).await;
            if let Some(answer) = self.compared(answer) {
                return answer;
            }
        }
        match self.exchanges.one(&finish_one(&self.terms, write, false)).await {
            Err(failure) if failure.is_unknown_script() => {
                self.exchanges.one(&finish_one(&self.terms, write, true)).await
            }
            answer => answer,
        }
    }

    /// Sends one command.
    pub(super) async fn call(&self, command: &RedisCommand) -> OpAnswer {
        let answer = self.exchanges.call(command).await;
        if command.returns_record {
            self.expectations.note_largest(record_bytes(&answer));
        }
        answer
    }

    /// Sends one command for a key whose slot is migrating to this node.
    pub(super) async fn asking(&self, command: Cmd) -> OpAnswer {
        self.exchanges.asking(command).await
    }

    /// Makes the command that finishes a record by a script, with the script's source: the server may lack the script.
    pub(super) fn finish_with_source(&self, write: &RecordWrite<'_>) -> Cmd {
        let mut bytes = Vec::new();
        finish_one(&self.terms, write.encode(&mut bytes).write_in(&bytes), true)
    }

    /// Sends a batch and answers its operations.
    pub(super) async fn send(&self, batch: &mut OpBatch) {
        batch.forget_gone();
        // Large results and journals are sent alone, after the batch: a server that refuses a large value closes the
        // connection, and the other operations of a batch would lose their answers.
        let large: Vec<WriteEntry> = batch.completions.extract_if(.., |entry| entry.op.value >= SURE).collect();
        let large_commands: Vec<_> = batch.commands.extract_if(.., |entry| entry.op.value_len >= SURE).collect();
        // Operations that would make the answers too large are left for further exchanges.
        let mut overflow = batch.split_off(self.expectations.records_at_once());
        loop {
            if let Err(failure) = self.send_part(batch).await {
                let large = large.iter().map(|entry| entry.slot);
                let unsent = overflow.slots().chain(large).chain(large_commands.iter().map(|entry| entry.slot));
                batch.replies.refuse(unsent, &ExchangeFailure::NotSent(STALLED.into()));
                return batch.replies.refuse_rest(&failure);
            }
            if overflow.is_empty() {
                break;
            }
            batch.refill(&mut overflow, self.expectations.records_at_once());
        }
        for entry in large {
            let answer = self.finish(batch.write(&entry)).await;
            batch.replies.deliver(std::iter::once((entry.slot, answer)));
        }
        for BatchEntry { slot, op } in large_commands {
            let answer = self.call(&op).await;
            batch.replies.deliver(std::iter::once((slot, answer)));
        }
    }

    /// Sends the operations in `batch` and answers them. After an error some operations are still unanswered.
    async fn send_part(&self, batch: &mut OpBatch) -> Result<(), ExchangeFailure> {
        let looks_up =
            batch.reserves.len() >= LOOK_FIRST && self.expectations.replays.are_expected() && !self.terms.one_key;
        let first = FirstExchange::new(batch, &self.terms, self.compares(), looks_up);
        let FirstExchange { mut pipeline, commands, shared, calls, compared } = first;
        if pipeline.is_empty() {
            return Ok(());
        }
        let (batch, mut answers) = (&*batch, self.exchanges.many(&mut pipeline).await?);
        // The answers are read in the order of the commands. Operations of each kind can be left for a later exchange.
        let (mut second, mut largest) = (SecondExchange::default(), None);
        if looks_up {
            second.reserves = self.read_look_up(batch, answers.next(), &mut largest);
            for entry in &second.reserves {
                second.pipeline.add_command(batch.write(entry).reserve());
            }
        } else if !batch.reserves.is_empty() {
            self.read_reserves(batch, &mut answers, &mut largest);
        }
        read_commands(&batch.replies, commands, &pipeline, &mut answers, &mut second, &mut largest);
        read_shared(&batch.replies, shared, &pipeline, &mut answers, &mut second);
        self.read_calls(batch, calls, &mut answers, &mut second);
        let differing = self.read_compared(&batch.replies, compared, &mut answers);
        if let Some(largest) = largest {
            self.expectations.note_largest(largest);
        }
        self.send_second(batch, second).await?;
        self.finish_by_scripts(batch, &differing).await
    }

    /// Answers reservations.
    fn read_reserves(&self, batch: &OpBatch, answers: &mut ExchangeAnswers, largest: &mut Option<usize>) {
        let mut replays = 0;
        batch.replies.deliver(batch.reserves.iter().map(|entry| {
            let answer = answers.next();
            replays += usize::from(matches!(answer, Ok(Value::BulkString(_))));
            *largest = (*largest).max(Some(record_bytes(&answer)));
            (entry.slot, answer)
        }));
        self.expectations.replays.note(replays, batch.reserves.len());
    }

    /// Answers the reservations whose keys exist: the existing value is also the answer of `SET … NX GET`. Returns the
    /// reservations of absent keys whose callers still wait. A failed look-up has written nothing, so all callers get
    /// its failure.
    fn read_look_up<'a>(
        &self,
        batch: &'a OpBatch,
        answer: OpAnswer,
        largest: &mut Option<usize>,
    ) -> Vec<&'a WriteEntry> {
        let count = batch.reserves.len();
        let values = match looked_up(answer, count) {
            Ok(values) => values,
            Err(failure) => {
                batch.replies.refuse(batch.reserves.iter().map(|entry| entry.slot), &failure);
                return Vec::new();
            }
        };
        let mut absent = Vec::new();
        batch.replies.deliver(batch.reserves.iter().zip(values).filter_map(|(entry, answer)| {
            let Some(answer) = answer else {
                absent.push(entry);
                return None;
            };
            *largest = (*largest).max(Some(record_bytes(&answer)));
            Some((entry.slot, answer))
        }));
        self.expectations.replays.note(count - absent.len(), count);
        let is_gone = batch.replies.gone();
        absent.retain(|entry| !is_gone(entry.slot));
        absent
    }

    /// Answers the completions that were sent as script calls. If the server has forgotten the script, the second
    /// exchange repeats the call.
    fn read_calls(
        &self,
        batch: &OpBatch,
        calls: Vec<Range<usize>>,
        answers: &mut ExchangeAnswers,
        second: &mut SecondExchange<'_>,
    ) {
        for call in calls {
            let entries = &batch.completions[call.clone()];
            match answers.next() {
                Err(failure) if failure.is_unknown_script() => {
                    second.pipeline.add_command(finish_call(&self.terms, batch, entries, true));
                    second.calls.push(call);
                }
                answer => deliver_decided(&batch.replies, slots(entries), answer),
            }
        }
    }

    /// Answers the completions that were sent as `SET … IFEQ`. Returns the completions that a script has to decide.
    fn read_compared(
        &self,
        replies: &Replies,
        compared: Vec<WriteEntry>,
        answers: &mut ExchangeAnswers,
    ) -> Vec<WriteEntry> {
        let mut differing = Vec::new();
        replies.deliver(compared.into_iter().filter_map(|entry| match self.compared(answers.next()) {
            Some(answer) => Some((entry.slot, answer)),
            None => {
                differing.push(entry);
                None
            }
        }));
        differing
    }

    /// Converts the answer to a `SET … IFEQ` into the answer of its completion; `None` if the server wrote nothing and
    /// a script has to decide.
    fn compared(&self, answer: OpAnswer) -> Option<OpAnswer> {
        if matches!(&answer, Err(failure) if failure.is_unknown_option()) {
            self.expectations.note_plain_sets(self.connection().generation());
            return None;
        }
        compared(answer)
    }

    /// Sends and answers the operations that the first exchange has not answered.
    async fn send_second(&self, batch: &OpBatch, mut second: SecondExchange<'_>) -> Result<(), ExchangeFailure> {
        if second.pipeline.is_empty() {
            return Ok(());
        }
        let mut answers = self.exchanges.many(&mut second.pipeline).await?;
        batch.replies.deliver(second.reserves.into_iter().map(|entry| (entry.slot, answers.next())));
        batch.replies.deliver(second.commands.into_iter().map(|slot| (slot, answers.next())));
        for shared in second.shared {
            deliver_decided(&batch.replies, shared.into_iter(), answers.next());
        }
        for call in second.calls {
            deliver_decided(&batch.replies, slots(&batch.completions[call]), answers.next());
        }
        Ok(())
    }

    /// Finishes `entries` by scripts, in a further exchange. If the server has forgotten the scripts, one more exchange
    /// sends their source.
    async fn finish_by_scripts(&self, batch: &OpBatch, entries: &[WriteEntry]) -> Result<(), ExchangeFailure> {
        let mut calls: Vec<_> = chunks(entries.len(), &self.terms).collect();
        for with_source in [false, true] {
            if calls.is_empty() {
                break;
            }
            let mut pipeline = Pipeline::with_capacity(calls.len());
            for call in &calls {
                pipeline.add_command(finish_call(&self.terms, batch, &entries[call.clone()], with_source));
            }
            let mut answers = self.exchanges.many(&mut pipeline).await?;
            calls.retain(|call| match answers.next() {
                Err(failure) if failure.is_unknown_script() && !with_source => true,
                answer => {
                    deliver_decided(&batch.replies, slots(&entries[call.clone()]), answer);
                    false
                }
            });
        }
        Ok(())
    }
}

/// Returns the indexes of the answers of `entries`.
fn slots(entries: &[WriteEntry]) -> impl ExactSizeIterator<Item = usize> + Clone {
    entries.iter().map(|entry| entry.slot)
}

/// Answers the commands that share script calls. If the server has forgotten the script, the second exchange repeats
/// the call with its source.
fn read_shared(
    replies: &Replies,
    shared: Vec<SharedCall>,
    pipeline: &Pipeline,
    answers: &mut ExchangeAnswers,
    second: &mut SecondExchange<'_>,
) {
    for call in shared {
        let answer = answers.next();
        let is_unknown = matches!(&answer, Err(failure) if failure.is_unknown_script());
        match is_unknown.then(|| call.with_source(pipeline)).flatten() {
            Some(again) => {
                second.pipeline.add_command(again);
                second.shared.push(call.slots);
            }
            None => deliver_decided(replies, call.slots.into_iter(), answer),
        }
    }
}

/// Answers the commands other than `SET`. Calls of scripts that the server has forgotten (restart, failover, `SCRIPT
/// FLUSH`) wrote nothing, and are repeated with their source in the second exchange.
fn read_commands(
    replies: &Replies,
    commands: Vec<SentCommand>,
    pipeline: &Pipeline,
    answers: &mut ExchangeAnswers,
    second: &mut SecondExchange<'_>,
    largest: &mut Option<usize>,
) {
    replies.deliver(commands.into_iter().filter_map(|command| {
        let answer = answers.next();
        let is_unknown = matches!(&answer, Err(failure) if failure.is_unknown_script());
        if let Some(call) = is_unknown.then(|| command.with_source(pipeline)).flatten() {
            second.pipeline.add_command(call);
            second.commands.push(command.slot);
            return None;
        }
        if command.returns_record {
            *largest = (*largest).max(Some(record_bytes(&answer)));
        }
        Some((command.slot, answer))
    }));
}
