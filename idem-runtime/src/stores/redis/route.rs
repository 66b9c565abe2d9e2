//! Selects the server that runs an operation.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::batch::{
    BatchTerms, Dispatch, Name, OpFuture, PendingCompletion, PendingReservation, RedisCommand, Replicas,
};
use super::cluster::Cluster;
use super::connection::Connection;
use super::failure::ExchangeFailure;
use super::limits::SURE;
use super::task::OwnedTask;
use crate::combine::all;

/// One server, and a store's connections to it.
pub(super) struct Node {
    /// For operations that no replica has to confirm.
    plain: Dispatch,
    /// For operations that replicas have to confirm. A separate connection: `WAIT` blocks every later command on it.
    confirmed: Option<Dispatch>,
    /// For renewals, if they have their own connection.
    renewing: Option<Dispatch>,
    /// For results that a server may refuse by closing the connection, and that take long on a slow network.
    large: Dispatch,
}

/// An operation, for one key (or for several of one slot, if it renews leases).
#[derive(Clone)]
pub(super) enum Op<'a> {
    Reserve(PendingReservation<'a>),
    Finish(PendingCompletion<'a>),
    /// A command that renews leases.
    Renew(RedisCommand),
    /// Any other command that replicas have to confirm.
    Write(RedisCommand),
    /// A command that no replica has to confirm: its answer may get lost with the server.
    Read(RedisCommand),
}

impl Node {
    /// Makes a node with the connections that `connect` makes, each at first use. `plain`, if given, is already open. A
    /// node for upkeep renews leases over its own connection, so that no late result delays them.
    pub(super) fn new(
        plain: Option<Connection>,
        connect: impl Fn(Duration) -> Connection,
        replicas: Option<Replicas>,
        terms: &BatchTerms,
        for_upkeep: bool,
    ) -> Self {
        // The exchange ahead on the connection may end in its own `WAIT`.
        let confirmed = |replicas: Replicas| {
            let terms = BatchTerms { timeout: replicas.exchange(terms.timeout), ..terms.clone() };
            Dispatch::new(connect(terms.timeout), terms, Some(replicas))
        };
        let unconfirmed = |connection| Dispatch::new(connection, terms.clone(), None);
        let writing = || replicas.map_or_else(|| unconfirmed(connect(terms.timeout)), confirmed);
        Self {
            plain: unconfirmed(plain.unwrap_or_else(|| connect(terms.timeout))),
            confirmed: replicas.map(confirmed),
            renewing: for_upkeep.then(writing),
            large: writing(),
        }
    }

    pub(super) fn connection(&self) -> &Connection {
        self.plain.connection()
    }

    fn writing(&self) -> &Dispatch {
        self.confirmed.as_ref().unwrap_or(&self.plain)
    }

    fn finishing(&self, finishing: &PendingCompletion<'_>) -> &Dispatch {
        if finishing.value_len() < SURE { self.writing() } else { &self.large }
    }

    fn renewing(&self) -> &Dispatch {
        self.renewing.as_ref().unwrap_or_else(|| self.writing())
    }

    /// Hands `op` over.
    pub(super) fn run<'a>(&'a self, op: Op<'a>) -> OpFuture<'a> {
        match op {
            Op::Reserve(reserving) => self.writing().reserve(&reserving),
            Op::Finish(finishing) => self.finishing(&finishing).finish(&finishing),
            Op::Renew(ask) => self.renewing().command(ask),
            Op::Write(ask) => self.writing().command(ask),
            Op::Read(ask) => self.plain.command(ask),
        }
    }

    /// Runs `op` while the slot of its key is still migrating to this server.
    pub(super) fn run_asking<'a>(&'a self, op: Op<'a>) -> OpFuture<'a> {
        match op {
            Op::Reserve(reserving) => self.writing().reserve_asking(&reserving),
            Op::Finish(finishing) => self.finishing(&finishing).finish_asking(&finishing),
            Op::Renew(ask) => self.renewing().command_asking(ask),
            Op::Write(ask) => self.writing().command_asking(ask),
            Op::Read(ask) => self.plain.command_asking(ask),
        }
    }
}

/// The route of operations to the servers of a store.
pub(super) enum Route {
    /// One server, and the tasks that track its location.
    One(Node, #[expect(dead_code, reason = "ends with the store")] Vec<OwnedTask>),
    Cluster(Arc<Cluster>),
}

impl Route {
    /// Runs `op`, whose key is `name`. Over one server the operation is handed over immediately; await the result as
    /// soon as it is made.
    pub(super) fn run<'a>(&'a self, name: Name<'a>, op: Op<'a>) -> OpFuture<'a> {
        match self {
            Self::One(node, _) => node.run(op),
            Self::Cluster(cluster) => OpFuture::alone(cluster.run(name, op)),
        }
    }

    /// Sends `ask` to all servers concurrently. Fails if one of them does.
    pub(super) async fn ask_all(&self, ask: &RedisCommand) -> Result<(), ExchangeFailure> {
        match self {
            Self::One(node, _) => node.run(Op::Read(ask.clone())).await.map(drop),
            Self::Cluster(cluster) => {
                let primaries = cluster.primaries();
                if primaries.is_empty() {
                    return Err(ExchangeFailure::NotSent("no node of the cluster is known".into()));
                }
                let mut asked: Vec<_> =
                    primaries.iter().map(|primary| primary.node().run(Op::Read(ask.clone()))).collect();
                all(&mut asked).await.into_iter().try_for_each(|answer| answer.map(drop))
            }
        }
    }

    /// Sends `ask` to one server: the one of this name, or else the next one in order. Returns its name, its answer,
    /// and the name of the server that follows. A lone server has no name.
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
