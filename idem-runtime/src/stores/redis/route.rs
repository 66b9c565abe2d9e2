//! Selects the server that runs an operation.

use std::sync::Arc;

use redis::Value;

use super::batch::OpFuture;
use super::cluster::Cluster;
use super::command::{Name, RedisCommand};
use super::failure::ExchangeFailure;
use super::node::Node;
use super::op::Op;
use super::task::OwnedTask;
use crate::combine::all;

/// The route of operations to the servers of a store.
pub(super) enum Route {
    /// One server, and the tasks that track its location.
    One(Node, #[expect(dead_code, reason = "ends with the store")] Vec<OwnedTask>),
    Cluster(Arc<Cluster>),
}

impl Route {
    /// Runs `op`, whose key is `name`. With one server, this call already queues the operation; await the returned
    /// future immediately.
    pub(super) fn run<'a>(&'a self, name: Name<'a>, op: Op<'a>) -> OpFuture<'a> {
        match self {
            Self::One(node, _) => node.run(op),
            Self::Cluster(cluster) => OpFuture::alone(cluster.run(name, op)),
        }
    }

    /// Sends `ask` to all servers concurrently, and returns their answers. Fails if one server fails.
    pub(super) async fn ask_all(&self, ask: &RedisCommand) -> Result<Vec<Value>, ExchangeFailure> {
        match self {
            Self::One(node, _) => Ok(vec![node.run(Op::Read(ask.clone())).await?]),
            Self::Cluster(cluster) => {
                let primaries = cluster.primaries();
                if primaries.is_empty() {
                    return Err(ExchangeFailure::NotSent("no node of the cluster is known".into()));
                }
                let mut asked: Vec<_> =
                    primaries.iter().map(|primary| primary.node().run(Op::Read(ask.clone()))).collect();
                all(&mut asked).await.into_iter().collect()
            }
        }
    }

    /// Sends `ask` to the server called `name`, or to the next server by name if that server is gone. Returns the name
    /// of the asked server, its answer, and the name of the server that follows. The name of a lone server is empty.
    pub(super) async fn ask_in_turn(
        &self,
        name: &str,
        ask: RedisCommand,
    ) -> Result<(String, Value, Option<String>), ExchangeFailure> {
        match self {
            Self::One(node, _) => Ok((String::new(), node.run(Op::Read(ask)).await?, None)),
            Self::Cluster(cluster) => {
                let mut primaries = cluster.primaries();
                primaries.sort_by_key(|primary| primary.name());
                let mut rest = primaries.iter().skip_while(|primary| *primary.name() < *name);
                let asked =
                    rest.next().ok_or_else(|| ExchangeFailure::NotSent("no node of the cluster is known".into()))?;
                let answer = asked.node().run(Op::Read(ask)).await?;
                Ok((asked.name(), answer, rest.next().map(|next| next.name())))
            }
        }
    }
}
