//! Converts the server's replies into the answers of operations.

use std::sync::Arc;
use std::vec;

use redis::Value;

use super::super::failure::{ErrorReply, ExchangeFailure};
use super::super::op::OpAnswer;
use super::replies::Replies;

/// `Ok` if enough replicas have confirmed the write; otherwise the reason that the server gave, if any.
pub(super) type ReplicationResult = Result<(), Option<Arc<str>>>;

/// The answers of one exchange, in the order of its commands.
pub(super) struct ExchangeAnswers {
    values: vec::IntoIter<Value>,
    replicated: ReplicationResult,
}

impl ExchangeAnswers {
    pub(super) fn new(values: Vec<Value>, replicated: ReplicationResult) -> Self {
        Self { values: values.into_iter(), replicated }
    }

    /// Takes the next answer. A missing answer must not become nil, because nil means "reserved".
    pub(super) fn next(&mut self) -> OpAnswer {
        answer(self.values.next().ok_or(ExchangeFailure::Lost)?, &self.replicated)
    }
}

/// Turns one reply of the server into the answer of its operation.
fn answer(value: Value, replicated: &ReplicationResult) -> OpAnswer {
    match (value, replicated) {
        (Value::ServerError(error), _) => Err(ExchangeFailure::from(&error)),
        (value, Ok(())) => Ok(value),
        (value, Err(why)) => Err(ExchangeFailure::Unreplicated(Box::new(value), why.clone())),
    }
}

/// Splits an answer into the server's value and the replication result.
fn parts(answer: OpAnswer) -> Result<(Value, ReplicationResult), ExchangeFailure> {
    match answer {
        Ok(value) => Ok((value, Ok(()))),
        Err(ExchangeFailure::Unreplicated(value, why)) => Ok((*value, Err(why))),
        Err(failure) => Err(failure),
    }
}

/// Reads the answer to an `MGET` of `count` keys. The item of an absent key is `None`.
pub(super) fn looked_up(
    found: OpAnswer,
    count: usize,
) -> Result<impl Iterator<Item = Option<OpAnswer>>, ExchangeFailure> {
    let (Value::Array(values), replicated) = parts(found)? else { return Err(ExchangeFailure::Lost) };
    if values.len() != count {
        return Err(ExchangeFailure::Lost);
    }
    // An absent key is reserved later, by a `SET` that replicas confirm.
    Ok(values.into_iter().map(move |value| (value != Value::Nil).then(|| answer(value, &replicated))))
}

/// Converts the answer to a `SET … IFEQ` into the answer of its completion; `None` if the server wrote nothing and a
/// script has to decide.
pub(super) fn compared(set: OpAnswer) -> Option<OpAnswer> {
    match parts(set) {
        Ok((Value::Okay, replicated)) => Some(answer(Value::Int(1), &replicated)),
        // The record is gone, is finished, belongs to another attempt, or has the mark of a waiting duplicate.
        Ok((Value::Nil, _)) => None,
        Ok((other, replicated)) => Some(answer(other, &replicated)),
        Err(failure) => Some(Err(failure)),
    }
}

/// Answers the operations that one script call has decided. `slots`: the indexes of their answers.
pub(super) fn deliver_decided(
    replies: &Replies,
    slots: impl ExactSizeIterator<Item = usize> + Clone,
    decided: OpAnswer,
) {
    match lettered(decided, slots.len()) {
        Ok(answers) => replies.deliver(slots.zip(answers)),
        Err(failure) => replies.refuse(slots, &failure),
    }
}

/// Converts the answer of a script to one key into the answer of its operation.
pub(in super::super) fn lone_letter(answer: OpAnswer) -> OpAnswer {
    lettered(answer, 1)?.next().unwrap_or(Err(ExchangeFailure::Lost))
}

/// Converts the answer of a script to `count` keys into the answers of its operations: 1 if the operation is done, 0 if
/// it was refused.
fn lettered(decided: OpAnswer, count: usize) -> Result<impl Iterator<Item = OpAnswer>, ExchangeFailure> {
    let (value, replicated) = parts(decided)?;
    // The script answers with one letter for each key. The letter `E` means that the server returned an error for this
    // key. The texts of the errors follow; the last of them stands for all further ones.
    let mut parts = match value {
        // The script for one key answers with a number.
        Value::Int(decided) if count == 1 => vec![Value::BulkString(decided.to_string().into_bytes())],
        Value::Array(parts) => parts,
        letters => vec![letters],
    }
    .into_iter();
    let Some(Value::BulkString(letters)) = parts.next() else { return Err(ExchangeFailure::Lost) };
    let mut error = None;
    Ok((0..count).map(move |at| match letters.get(at) {
        Some(b'1') => answer(Value::Int(1), &replicated),
        Some(b'0') => answer(Value::Int(0), &replicated),
        Some(b'E') => {
            if let Some(Value::BulkString(next)) = parts.next() {
                error = Some(next);
            }
            let error = error.as_ref().ok_or(ExchangeFailure::Lost)?;
            Err(ExchangeFailure::Refused(ErrorReply::read(&String::from_utf8_lossy(error))))
        }
        _ => Err(ExchangeFailure::Lost),
    }))
}

/// Returns the size of the record in an answer, in bytes; 0 if the answer holds no record.
pub(super) fn record_bytes(answer: &OpAnswer) -> usize {
    let value = match answer {
        Ok(value) => value,
        Err(ExchangeFailure::Unreplicated(value, _)) => value,
        Err(_) => return 0,
    };
    match value {
        Value::BulkString(record) => record.len(),
        // A script returns a record together with its retention or with the rest of its lease.
        Value::Array(parts) => match parts.first() {
            Some(Value::BulkString(record)) => record.len(),
            _ => 0,
        },
        _ => 0,
    }
}
