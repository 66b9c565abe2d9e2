//! One server, and a connection to it for each kind of operation.

use std::time::Duration;

use super::batch::{Dispatch, OpFuture};
use super::limits::SURE;
use super::op::Op;
use super::place::ServerConnection;
use super::terms::ExchangeTerms;

/// One server, and a store's connections to it.
pub(super) struct Node {
    /// Connection for operations that no replica has to confirm.
    plain: Dispatch,
    /// Connection for operations that replicas have to confirm. `WAIT` blocks every later command on this connection.
    confirmed: Option<Dispatch>,
    /// Connection for renewals; only a node for upkeep has this connection.
    renewing: Option<Dispatch>,
    /// Connection for large results and journals. A server may refuse a large value by closing the connection, and a
    /// slow network carries a large value slowly.
    large: Dispatch,
}

impl Node {
    /// Makes a node whose connections are made by `connect`, and opened at their first use. `plain` is a connection
    /// that is already open; `None` if `connect` has to make this connection, too. A node for upkeep renews leases over
    /// a separate connection, so that the answers to other operations delay no renewal.
    pub(super) fn new(
        plain: Option<ServerConnection>,
        connect: impl Fn(Duration) -> ServerConnection,
        terms: &ExchangeTerms,
        for_upkeep: bool,
    ) -> Self {
        let plain = plain.unwrap_or_else(|| connect(terms.timeout));
        let writing = || Dispatch::new(connect(terms.write_timeout()), terms.clone());
        Self {
            plain: Dispatch::new(plain, ExchangeTerms { replicas: None, ..terms.clone() }),
            confirmed: terms.replicas.map(|_| writing()),
            renewing: for_upkeep.then(writing),
            large: writing(),
        }
    }

    pub(super) fn connection(&self) -> &ServerConnection {
        self.plain.connection()
    }

    /// Returns the connection for `op`.
    fn dispatch(&self, op: &Op<'_>) -> &Dispatch {
        let writing = self.confirmed.as_ref().unwrap_or(&self.plain);
        match op {
            Op::Finish(write) if write.value_len() >= SURE => &self.large,
            Op::Write(command) if command.value_len >= SURE => &self.large,
            Op::Reserve(_) | Op::Finish(_) | Op::Write(_) => writing,
            Op::Renew(_) => self.renewing.as_ref().unwrap_or(writing),
            Op::Read(_) => &self.plain,
        }
    }

    /// Runs `op` over the connection for its kind.
    pub(super) fn run<'a>(&'a self, op: Op<'a>) -> OpFuture<'a> {
        self.dispatch(&op).run(op)
    }

    /// Runs `op`, preceded by `ASKING`, while the slot of its key is still migrating to this server.
    pub(super) fn run_asking<'a>(&'a self, op: Op<'a>) -> OpFuture<'a> {
        self.dispatch(&op).run_asking(op)
    }
}
