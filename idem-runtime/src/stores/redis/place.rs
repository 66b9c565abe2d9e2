//! The location of a server: a fixed address, or the primary that sentinels name.

use std::sync::Arc;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Client, ErrorKind, RedisError, Value};

use super::connection::{Connection, Place};
use super::sentinel::Sentinels;

/// A connection to a server that keeps records.
pub(super) type ServerConnection = Connection<ServerPlace>;

/// Location of a server that keeps records.
#[derive(Clone)]
pub(super) enum ServerPlace {
    /// A fixed address: the address of this client.
    At(Box<Client>),
    /// The address that the sentinels name for the primary.
    Primary(Arc<Sentinels>),
}

impl ServerPlace {
    /// Waits until the server moves to another address than the address of `version`; forever if the address is fixed.
    pub(super) async fn moved(&self, version: u64) {
        match self {
            Self::At(_) => std::future::pending().await,
            Self::Primary(sentinels) => sentinels.moved(version).await,
        }
    }
}

impl Place for ServerPlace {
    fn version(&self) -> u64 {
        match self {
            Self::At(_) => 0,
            Self::Primary(sentinels) => sentinels.version(),
        }
    }

    async fn client(&self) -> Result<(Client, u64), RedisError> {
        match self {
            Self::At(client) => client.client().await,
            Self::Primary(sentinels) => sentinels.primary().await,
        }
    }

    /// Checks that the server reports itself as a primary: sentinels may name a server that has been demoted.
    async fn check(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        if matches!(self, Self::At(_)) {
            return Ok(());
        }
        let role = connection.req_packed_command(&redis::cmd("ROLE")).await?;
        match role.extract_error()? {
            Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(role)) if role == b"master") => {
                Ok(())
            }
            _ => {
                Err((ErrorKind::Io, "the server that the sentinels name does not report itself as the primary").into())
            }
        }
    }
}
