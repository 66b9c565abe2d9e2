//! Which server runs an operation.

use std::sync::Arc;
use std::time::Duration;

use super::cluster::Cluster;
use super::connection::{Background, Connection};
use super::dispatch::{Answer, Ask, Completion, Dispatch, Replicas, Terms};
use super::limits::SURE;

/// One server, and a store's connections to it.
pub(super) struct Node {
    /// For operations that no replica has to confirm.
    plain: Dispatch,
    /// For operations that replicas have to confirm. A connection of its own: `WAIT` blocks whatever comes after it.
    confirmed: Option<Dispatch>,
    /// For renewals, if they have a connection of their own.
    renewing: Option<Dispatch>,
    /// For results that a server may refuse by closing the connection, and that take long on a slow network.
    large: Dispatch,
}

/// An operation, for one key.
#[derive(Clone)]
pub(super) enum Op<'a> {
    Reserve {
        key: &'a [u8],
        value: &'a [u8],
        ttl_ms: u64,
    },
    Finish(Completion<'a>),
    /// A command that renews leases.
    Renew(Ask),
    /// Any other command that replicas have to confirm.
    Write(Ask),
    /// A command that no replica has to confirm: its answer may get lost with the server.
    Read(Ask),
}

impl Node {
    /// A node with the connections that `connect` makes, each at first use; `plain` is already open if it is given. A node
    /// for upkeep renews leases over a connection of its own, so that no late result delays them.
    pub(super) fn new(
        plain: Option<Connection>,
        connect: impl Fn(Duration) -> Connection,
        replicas: Option<Replicas>,
        terms: &Terms,
        for_upkeep: bool,
    ) -> Self {
        // The exchange ahead on the connection may end in a `WAIT` of its own.
        let confirmed = |replicas: Replicas| {
            let terms = Terms { timeout: replicas.exchange(terms.timeout), ..terms.clone() };
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

    fn finishing(&self, completion: &Completion<'_>) -> &Dispatch {
        if completion.value.len() < SURE { self.writing() } else { &self.large }
    }

    fn renewing(&self) -> &Dispatch {
        self.renewing.as_ref().unwrap_or_else(|| self.writing())
    }

    pub(super) async fn run(&self, op: Op<'_>) -> Answer {
        match op {
            Op::Reserve { key, value, ttl_ms } => self.writing().reserve(key, value, ttl_ms).await,
            Op::Finish(completion) => self.finishing(&completion).finish(&completion).await,
            Op::Renew(ask) => self.renewing().command(ask).await,
            Op::Write(ask) => self.writing().command(ask).await,
            Op::Read(ask) => self.plain.command(ask).await,
        }
    }

    /// Runs `op` while the slot of its key is still migrating to this server.
    pub(super) async fn run_asking(&self, op: Op<'_>) -> Answer {
        match op {
            Op::Reserve { key, value, ttl_ms } => self.writing().reserve_asking(key, value, ttl_ms).await,
            Op::Finish(completion) => self.finishing(&completion).finish_asking(&completion).await,
            Op::Renew(ask) => self.renewing().command_asking(ask).await,
            Op::Write(ask) => self.writing().command_asking(ask).await,
            Op::Read(ask) => self.plain.command_asking(ask).await,
        }
    }
}

/// How operations reach the servers of a store.
pub(super) enum Route {
    /// One server, and the tasks that track where it is.
    One(Node, #[expect(dead_code, reason = "ends with the store")] Vec<Background>),
    Cluster(Arc<Cluster>),
}

impl Route {
    /// Runs `op`, whose key is `key`.
    pub(super) async fn run(&self, key: &[u8], op: Op<'_>) -> Answer {
        match self {
            Self::One(node, _) => node.run(op).await,
            Self::Cluster(cluster) => Box::pin(cluster.run(key, op)).await,
        }
    }
}
