//! Exchanges with one server over one connection. If replicas have to confirm writes, each exchange ends with two more
//! commands on the same connection: a write that changes nothing, and `WAIT`.

use std::sync::Arc;

use redis::{Cmd, Pipeline, ServerError, Value};

use super::super::command::{RedisCommand, argument, key_of, with_source};
use super::super::failure::ExchangeFailure;
use super::super::op::OpAnswer;
use super::super::place::ServerConnection;
use super::super::scripts::TOUCH;
use super::super::terms::Replicas;
use super::answer::{ExchangeAnswers, ReplicationResult};
use crate::record::format::millis;

/// A connection to a server, and the replicas that have to confirm each exchange.
pub(super) struct Exchanges {
    pub(super) connection: ServerConnection,
    pub(super) replicas: Option<Replicas>,
}

impl Exchanges {
    /// Sends one command.
    pub(super) async fn one(&self, command: &Cmd) -> OpAnswer {
        if self.replicas.is_none() {
            return self.connection.one(command).await;
        }
        let mut pipeline = Pipeline::with_capacity(3);
        pipeline.add_command(command.clone());
        self.many(&mut pipeline).await?.next()
    }

    /// Sends one command. If the server has forgotten the script of the command, sends the command again with the
    /// script's source.
    pub(super) async fn call(&self, RedisCommand { command, source, .. }: &RedisCommand) -> OpAnswer {
        match (self.one(command).await, source) {
            // The server restarted, failed over or flushed its scripts: nothing was written.
            (Err(failure), Some(source)) if failure.is_unknown_script() => {
                self.one(&with_source(command, source)).await
            }
            (answer, _) => answer,
        }
    }

    /// Sends one command after `ASKING`, which permits one command for a slot that is migrating to this node.
    pub(super) async fn asking(&self, command: Cmd) -> OpAnswer {
        let mut pipeline = Pipeline::with_capacity(5);
        pipeline.cmd("ASKING").add_command(command);
        let mut answers = self.many(&mut pipeline).await?;
        let _asking = answers.next();
        answers.next()
    }

    /// Sends the commands of `pipeline` in one exchange.
    pub(super) async fn many(&self, pipeline: &mut Pipeline) -> Result<ExchangeAnswers, ExchangeFailure> {
        match self.replicas {
            None => Ok(ExchangeAnswers::new(self.connection.many(pipeline).await?, Ok(()))),
            Some(replicas) => self.confirmed(pipeline, replicas).await,
        }
    }

    /// Sends the commands of `pipeline`, and waits until the replicas confirm.
    ///
    /// `WAIT` waits only for earlier writes of its own connection. Two kinds of operations write nothing: a replay, and
    /// a repeated write whose first copy has already taken effect. After such an operation, `WAIT` alone would succeed
    /// although perhaps no replica has the record in the answer. So a write that changes nothing follows the commands.
    /// Replicas apply all writes in one order: a replica that confirms this write has every record in the answers.
    async fn confirmed(&self, pipeline: &mut Pipeline, replicas: Replicas) -> Result<ExchangeAnswers, ExchangeFailure> {
        let (asking, key) = match &pipeline.cmd_iter().collect::<Vec<_>>()[..] {
            [first, second, ..] if argument(first, 0) == b"ASKING" => (true, key_of(second).to_vec()),
            [first, ..] => (false, key_of(first).to_vec()),
            [] => return Ok(ExchangeAnswers::new(Vec::new(), Ok(()))),
        };
        if asking {
            pipeline.cmd("ASKING");
        }
        add_confirmation(pipeline, &key, replicas);
        let generation = self.connection.generation();
        let mut values = self.connection.many(pipeline).await?;
        let (mut confirmed, mut touched) = (values.pop(), values.pop());
        if asking {
            values.pop();
        } else if matches!(&touched, Some(Value::ServerError(error)) if is_redirect(error)) {
            // The slot of the first key is migrating, so the server refused the confirming write to that key. Repeats
            // the confirming write with a key that this server did serve. The connection stays the same: another
            // connection may lead to a server that lacks the writes to confirm.
            let mut served = pipeline.cmd_iter().zip(&values).filter(|(_, it)| !matches!(it, Value::ServerError(_)));
            if let Some((command, _)) = served.next() {
                let mut again = Pipeline::with_capacity(2);
                add_confirmation(&mut again, key_of(command), replicas);
                let mut answers = self.connection.many(&again).await?;
                if self.connection.generation() == generation {
                    (confirmed, touched) = (answers.pop(), answers.pop());
                }
            }
        }
        Ok(ExchangeAnswers::new(values, replication(confirmed, touched, replicas.count)))
    }
}

/// Adds a write to `key` that changes nothing, and a `WAIT` for the replicas.
fn add_confirmation(pipeline: &mut Pipeline, key: &[u8], Replicas { count, within }: Replicas) {
    pipeline.cmd("EVAL").arg(TOUCH).arg(1).arg(key);
    pipeline.cmd("WAIT").arg(count).arg(millis(within).max(1));
}

/// Reads the answers to a `WAIT` and to the write before it.
fn replication(confirmed: Option<Value>, touched: Option<Value>, count: usize) -> ReplicationResult {
    match (confirmed, touched) {
        (Some(Value::Int(have)), Some(Value::Int(1))) if usize::try_from(have).is_ok_and(|have| have >= count) => {
            Ok(())
        }
        (Some(Value::ServerError(error)), _) | (_, Some(Value::ServerError(error))) => Err(Some(error_text(&error))),
        _ => Err(None),
    }
}

/// Returns whether a cluster node refused a command because it does not serve the key (yet).
fn is_redirect(error: &ServerError) -> bool {
    matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN")
}

/// Returns the text of an error of the server.
fn error_text(error: &ServerError) -> Arc<str> {
    format!("{} {}", error.code(), error.details().unwrap_or_default()).into()
}
