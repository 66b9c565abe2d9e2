//! Access of an operation to its store: the state that all handles share, and the connections of the caller's runtime.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, Value};

use super::batch::OpFuture;
use super::command::{Name, RedisCommand};
use super::connections::{ConnectPlan, Connections};
use super::failure::unexpected;
use super::limits::Limits;
use super::op::Op;
use super::scripts::{Script, Scripts};
use super::terms::ExchangeTerms;
use crate::clock::{Clock, Instant, wall_millis};
use crate::key::Key;
use crate::kit::looks::looked_in_vain;
use crate::kit::per_runtime::Here;
use crate::record::{Lease, OwnerToken, Verdict};
use crate::store::{StoreContext, StoreError, StoreErrorKind};
use crate::sync::{PerProcess, lock};

/// Largest number of entries in [`Core::held`].
const REMEMBERED: usize = 1024;

/// State that all handles of a store share.
pub(super) struct Core {
    pub(super) context: Arc<StoreContext>,
    pub(super) plan: ConnectPlan,
    pub(super) terms: ExchangeTerms,
    pub(super) prefix: Box<str>,
    pub(super) limits: Arc<Limits>,
    /// Time until which the lease of another handle certainly holds, by owner token, according to an earlier answer of
    /// the server. While this time has not passed, a duplicate costs one round trip instead of two.
    pub(super) held: PerProcess<Mutex<HashMap<OwnerToken, Instant>>>,
}

impl Core {
    pub(super) fn scripts(&self) -> &Scripts {
        &self.terms.scripts
    }

    pub(super) fn now(&self) -> Instant {
        self.clock().now()
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.terms.clock
    }

    /// Returns milliseconds since 1970 by the wall clock of this process.
    pub(super) fn wall_millis(&self) -> u64 {
        u64::try_from(wall_millis(self.clock())).unwrap_or_default()
    }

    /// Returns the age of an attempt that began at `began`, in milliseconds since 1970 by the clock of its holder or of
    /// the server. No answer contains the present time of that clock, so the wall clock of this host measures the age.
    /// The age is wrong by the difference between the two clocks.
    pub(super) fn age(&self, began: Option<u64>) -> Option<Duration> {
        let now = self.wall_millis();
        began.map(|began| Duration::from_millis(now.saturating_sub(began)))
    }

    /// Returns the time for which the lease of the pending attempt `owner` certainly holds, without asking the server;
    /// `None` if this process does not know the lease, or the lease may have lapsed.
    ///
    /// While a record is pending, its lease is extended but never shortened, so an earlier answer stays true. The
    /// server answers with durations, which this process adds to the time of its own clock at which it asked.
    pub(super) fn known_to_hold(&self, owner: OwnerToken) -> Option<Duration> {
        let now = self.now();
        let until = self.context.leases().held_until(owner).or_else(|| lock(self.held.here()).get(&owner).copied())?;
        Some(until.saturating_since(now)).filter(|left| !left.is_zero())
    }

    pub(super) fn remember(&self, owner: OwnerToken, until: Instant) {
        let now = self.now();
        let mut held = lock(self.held.here());
        if held.len() >= REMEMBERED {
            held.retain(|_, until| *until > now);
        }
        if held.len() < REMEMBERED {
            held.insert(owner, until);
        }
    }
}

/// The state of a store and the connections of one runtime, for one operation.
pub(super) struct Access<'a> {
    pub(super) core: &'a Core,
    pub(super) connections: Here<'a, Connections>,
}

impl Access<'_> {
    pub(super) fn name_of<'a>(&'a self, key: &'a Key) -> Name<'a> {
        Name { prefix: &self.core.prefix, key: key.as_str() }
    }

    /// Runs an operation on the server that serves its key. Await the returned future immediately.
    pub(super) fn run<'a>(&'a self, name: Name<'a>, op: Op<'a>) -> OpFuture<'a> {
        self.connections.route.run(name, op)
    }
}

/// Makes the command that calls `script` with one key.
pub(super) fn call(script: &Script, name: Name<'_>, args: impl FnOnce(&mut Cmd)) -> RedisCommand {
    RedisCommand::script(script, std::iter::once(name), args)
}

/// Returns the owner token and the number of an attempt, encoded as in a record.
pub(super) fn attempt_of(lease: &Lease) -> [u8; 20] {
    let mut attempt = [0; 20];
    attempt[..16].copy_from_slice(lease.owner.as_bytes());
    attempt[16..].copy_from_slice(&lease.attempt.to_be_bytes());
    attempt
}

/// Reads the server's answer to a write.
pub(super) fn written(value: &Value) -> Result<Verdict, StoreError> {
    match value {
        Value::Int(1) => Ok(Verdict::Applied),
        Value::Int(0) => Ok(Verdict::Refused),
        other => Err(unexpected(other)),
    }
}

/// Returns the error for a record that changed between all [`LOOKS`](crate::kit::looks::LOOKS) reads of an operation.
pub(super) fn keeps_changing() -> StoreError {
    looked_in_vain(StoreErrorKind::Unavailable, "kept changing")
}
