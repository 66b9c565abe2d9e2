//! Which server an operation goes to.

use std::sync::Arc;

use redis::Cmd;

#[cfg(feature = "redis-cluster")]
use super::cluster::Cluster;
use super::connection::{Background, Connection};
use super::dispatch::{Answer, Completion, Dispatch, Replicas, Scripts, Terms};

/// One server, by the connections that a store has to it.
pub(super) struct Node {
    /// For what nobody has to confirm.
    plain: Dispatch,
    /// For what replicas have to confirm. A connection of its own: `WAIT` holds up whatever comes behind it.
    confirmed: Option<Dispatch>,
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
    /// A command that decides something.
    Write(Cmd),
    /// A command whose answer may get lost with the server.
    Read(Cmd),
}

impl Node {
    pub(super) fn new(plain: Connection, confirmed: Option<(Connection, Replicas)>, terms: &Terms) -> Self {
        Self {
            plain: Dispatch::new(plain, terms.clone(), None),
            confirmed: confirmed.map(|(connection, replicas)| {
                // What is ahead of an exchange on its connection may have its own wait.
                let timeout = replicas.exchange(terms.timeout);
                Dispatch::new(connection, Terms { timeout, ..terms.clone() }, Some(replicas))
            }),
        }
    }

    #[cfg(feature = "redis-cluster")]
    pub(super) fn connection(&self) -> &Connection {
        self.plain.connection()
    }

    fn writing(&self) -> &Dispatch {
        self.confirmed.as_ref().unwrap_or(&self.plain)
    }

    pub(super) async fn run(&self, op: Op<'_>) -> Answer {
        match op {
            Op::Reserve { key, value, ttl_ms } => self.writing().reserve(key, value, ttl_ms).await,
            Op::Finish(completion) => self.writing().finish(&completion).await,
            Op::Write(command) => self.writing().command(command).await,
            Op::Read(command) => self.plain.command(command).await,
        }
    }

    /// Runs `op` although the slot of its key is only on its way to this server.
    #[cfg(feature = "redis-cluster")]
    pub(super) async fn run_asking(&self, op: Op<'_>) -> Answer {
        match op {
            Op::Reserve { key, value, ttl_ms } => self.writing().reserve_asking(key, value, ttl_ms).await,
            Op::Finish(completion) => self.writing().finish_asking(&completion).await,
            Op::Write(command) => self.writing().command_asking(command).await,
            Op::Read(command) => self.plain.command_asking(command).await,
        }
    }
}

/// The servers of a store.
pub(super) enum Route {
    /// One server, and what keeps looking where it is.
    One(Node, #[expect(dead_code, reason = "ends with the store")] Vec<Background>),
    #[cfg(feature = "redis-cluster")]
    Cluster(Arc<Cluster>),
}

/// How operations get to their servers.
pub(super) struct Router {
    route: Route,
    scripts: Arc<Scripts>,
    one_key: bool,
}

impl Router {
    pub(super) fn new(route: Route, terms: Terms) -> Self {
        Self { route, scripts: terms.scripts, one_key: terms.one_key }
    }

    pub(super) fn scripts(&self) -> &Scripts {
        &self.scripts
    }

    /// Whether a command may name one key only.
    pub(super) fn one_key(&self) -> bool {
        self.one_key
    }

    /// Runs `op`, whose key is `key`.
    #[cfg_attr(not(feature = "redis-cluster"), expect(unused_variables, reason = "one server has all keys"))]
    pub(super) async fn run(&self, key: &[u8], op: Op<'_>) -> Answer {
        match &self.route {
            Route::One(node, _) => node.run(op).await,
            #[cfg(feature = "redis-cluster")]
            Route::Cluster(cluster) => cluster.run(key, op).await,
        }
    }
}
