//! One server, and the connection of each kind of operation to it.

use std::time::Duration;

use super::batch::{BatchTerms, Dispatch, OpFuture, PendingCompletion, PendingReservation, RedisCommand, Replicas};
use super::limits::SURE;
use super::place::ServerConnection;

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
        plain: Option<ServerConnection>,
        connect: impl Fn(Duration) -> ServerConnection,
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

    pub(super) fn connection(&self) -> &ServerConnection {
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
