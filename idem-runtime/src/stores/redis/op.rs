//! Operations of a store on its keys. The same type describes an operation in the caller and in the exchange.

use redis::Value;

use super::command::RedisCommand;
use super::failure::ExchangeFailure;
use super::write::RecordWrite;

/// An operation on one key. A renewal may name several keys of one slot.
#[derive(Clone)]
pub(super) enum Op<'a> {
    /// `SET key value NX GET PX ttl`. The answer is nil if the key is now reserved, otherwise the existing value.
    Reserve(RecordWrite<'a>),
    /// A completion. The answer is 1 if the record of this attempt is now finished, otherwise 0.
    Finish(RecordWrite<'a>),
    /// A command that renews leases.
    Renew(RedisCommand),
    /// Any other command that replicas have to confirm.
    Write(RedisCommand),
    /// A command that no replica has to confirm: the state that it returns may get lost with the server.
    Read(RedisCommand),
}

/// Answer of an operation.
pub(super) type OpAnswer = Result<Value, ExchangeFailure>;
