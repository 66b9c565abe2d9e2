//! The store: the promises of [`RedisStore`], its handles, and its operations.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::access::{Access, Core, attempt_of, call, written};
use super::batch::lone_letter;
use super::connections::Connections;
use super::failure::{ExchangeFailure, failed};
use super::inspection::look_at;
use super::limits::SURE;
use super::op::Op;
use super::write::RecordWrite;
use super::{operator, renewal, requirements, reservation};
use crate::key::Key;
use crate::kit::per_runtime::PerRuntime;
use crate::record::format::{self, millis};
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Record, Release, Reservation, ReserveRequest, Verdict,
};
use crate::store::{Answers, Filter, Page, Store, StoreContext, StoreError, StoreFuture, store_of_shared};
use crate::sync::SharedOnce;

/// A store in Redis 7.0 or newer, or Valkey 8 or newer: one server, a primary with sentinels, or a cluster.
///
/// - *Atomicity*: `SET … NX GET` decides which attempt reserves a key. All later changes are `SET … IFEQ` (Valkey 8.1,
///   Redis 8.4) or scripts that compare the owner token. Each command names keys of one slot only.
/// - *Clock*: the server's clock. A step of that clock shifts leases and retentions. After a failover the new primary's
///   clock applies. A finished record also holds the time at which its attempt began, for display only: by the wall
///   clock of the attempt's process, or by the server's clock if the lease was renewed before the completion.
/// - *Durability*: the server's settings decide (`appendonly`, `save`). A record that the server loses in a crash, or
///   evicts, is forgotten: use `maxmemory-policy noeviction`. With another policy, [`connect`](RedisStore::connect)
///   logs a warning. Replication is asynchronous, so a failover forgets the writes that the new primary had not
///   received yet, unless [`min_replicas`](super::RedisOptions::min_replicas) makes every answer wait for the replicas.
/// - *Limits*: keys up to [`Key::MAX_BYTES`], results up to `max_result_bytes`, and never more than the server takes
///   (`proto-max-bulk-len`, default: 512 MB).
/// - *Cost*: two round trips for a first run, one for a replay. With `SET … IFEQ` a completion for which a duplicate
///   waits takes one more round trip. A heartbeat is one exchange (per node), whatever the number of leases; in a
///   cluster the leases of one slot share a script call. Commands of concurrent tasks share a pipeline; a lone command
///   never waits. With `min_replicas` every exchange also takes the time until the replicas have confirmed.
///
/// Clones share their connections, which are multiplexed and reconnect. Each tokio runtime that uses the store has its
/// own connections, which end with it.
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::RedisStore;
/// let store = RedisStore::connect("redis://:password@localhost:6379/0").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RedisStore(pub(super) Arc<RedisInner>);

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

store_of_shared!(RedisStore);

/// One handle of a store. Each handle has separate connections, so that no handle delays another.
pub(super) struct RedisInner {
    this: Weak<RedisInner>,
    core: Arc<Core>,
    runtimes: PerRuntime<Connections>,
    /// The handle for renewals and late writes, made at its first use; `None` in that handle itself.
    upkeep: Option<SharedOnce<Arc<RedisInner>>>,
}

impl fmt::Debug for RedisInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.core.prefix).finish_non_exhaustive()
    }
}

impl RedisInner {
    /// Makes the first handle of a store. `connected` are the connections that the current runtime has opened.
    pub(super) fn new(core: Arc<Core>, connected: Connections) -> Arc<Self> {
        let store = Self::on(core, Some(SharedOnce::new()));
        store.runtimes.here(|_| connected);
        store
    }

    fn on(core: Arc<Core>, upkeep: Option<SharedOnce<Arc<Self>>>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { this: this.clone(), core, runtimes: PerRuntime::default(), upkeep })
    }

    /// Returns the shared state and the connections of the current runtime, for one operation. Fails outside a tokio
    /// runtime.
    fn access(&self) -> Result<Access<'_>, StoreError> {
        let core = &*self.core;
        // A forked child may inherit the connections of its parent here. Such a connection fails each exchange in the
        // child.
        let connections = self.runtimes.here_or_inherited(|_| core.plan.open(&core.terms, self.upkeep.is_none()));
        let outside = || ExchangeFailure::Unusable("no tokio runtime: call the store from inside one".into());
        Ok(Access { core, connections: connections.ok_or_else(|| failed(outside()))? })
    }
}

/// Returns the time at which `lease` was reserved, in milliseconds since 1970, if less than a third of the lease has
/// passed since. The first renewal is due after that third and changes the record, so until then the record may be
/// unchanged.
fn unchanged_since(lease: &Lease, core: &Core) -> Option<u64> {
    let reserved_at = lease.mark.get()?.get();
    let age = Duration::from_millis(core.wall_millis().saturating_sub(reserved_at));
    (age < lease.duration / 3).then_some(reserved_at)
}

impl Store for RedisInner {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        match &self.upkeep {
            Some(upkeep) => Arc::<Self>::clone(upkeep.get_or_init(|| Self::on(Arc::clone(&self.core), None))),
            None => self.handle(),
        }
    }

    fn namespace(&self) -> &str {
        &self.core.prefix
    }

    fn response_timeout(&self) -> Duration {
        self.core.terms.write_timeout()
    }

    fn context(&self) -> &StoreContext {
        &self.core.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move { reservation::reserve(&self.access()?, request).await })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let access = self.access()?;
            let name = access.name_of(&lease.key);
            let asked = call(&self.core.scripts().begin, name, |command| {
                command.arg(&attempt_of(lease)[..]);
                command.arg(millis(lease.ttl)).arg(millis(lease.duration.saturating_add(lease.ttl)));
            });
            written(&access.run(name, Op::Write(asked)).await.map_err(failed)?)
        })
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move { renewal::renew(&self.access()?, leases, answer).await })
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let access = self.access()?;
            let (limits, clock) = (&self.core.limits, self.core.clock());
            // The other parts of a record have less than `START_BYTES`. The check leaves room for all of them, so that
            // the server also takes the record of the next attempt, whose provenance may be longer.
            let bytes = format::START_BYTES + journal.bytes().len();
            limits.check(bytes, clock)?;
            let name = access.name_of(&lease.key);
            let reserved_at = lease.mark.get().map_or(0, u64::from).to_be_bytes();
            let attempt = [&attempt_of(lease)[..], &reserved_at[..]].concat();
            let asked = call(&self.core.scripts().append, name, |command| {
                command.arg(attempt).arg(&journal.bytes()[..]);
                command.arg(millis(lease.duration.saturating_add(lease.ttl)));
            });
            let answer = access.run(name, Op::Write(asked.with_value(bytes).joins())).await;
            written(&limits.learn(bytes, lone_letter(answer), clock)?)
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let access = self.access()?;
            let (limits, clock) = (&self.core.limits, self.core.clock());
            let record = Record::after(lease, finish.state());
            let bytes = format::len(&record);
            limits.check(bytes, clock)?;
            // A large value is written by the script, without trying `SET … IFEQ`: if `SET … IFEQ` failed, the value
            // would have to be sent a second time.
            let reserved_at = unchanged_since(lease, &self.core).filter(|_| bytes < SURE);
            let expected = reserved_at.map(|_| Record::reserved(lease));
            let name = access.name_of(&lease.key);
            let (expected, ttl_ms) = (expected.as_ref(), millis(lease.ttl));
            let write = RecordWrite { name, record: &record, reserved_at, expected, ttl_ms };
            let answer = access.run(name, Op::Finish(write)).await;
            written(&limits.learn(bytes, answer, clock)?)
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let access = self.access()?;
            let (state, refund) = (format::letter(&release.state()), u8::from(!release.counts()));
            let name = access.name_of(&lease.key);
            let asked = call(&self.core.scripts().release, name, |command| {
                command.arg(&lease.owner.as_bytes()[..]).arg(&[state][..]).arg(refund).arg(millis(lease.ttl));
                command.arg(&*self.core.terms.channel);
            });
            let released = access.run(name, Op::Write(asked.keep_if_dropped())).await;
            written(&released.map_err(failed)?)
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let (access, clock) = (self.access()?, self.core.clock());
            let name = access.name_of(key);
            let until = clock.now().saturating_add(at_most);
            loop {
                let mark = async {
                    let asked = call(&self.core.scripts().watch, name, |command| {
                        command.arg(&attempt.to_be_bytes()[..]);
                    });
                    let pending = access.run(name, Op::Read(asked)).await;
                    Ok(written(&pending.map_err(failed)?)? == Verdict::Applied)
                };
                access
                    .connections
                    .wakeups
                    .wait(&name.to_string(), until.saturating_since(clock.now()), clock, mark)
                    .await?;
                // This read is an `Op::Write`: with `min_replicas`, replicas have to confirm the result, because the
                // caller relies on it.
                let found = look_at(&access, name, Op::Write).await?.map(|stored| stored.found).transpose()?;
                let goes_on = found.as_ref().is_some_and(|it| it.record.is_pending() && it.attempt() == attempt);
                if !goes_on || clock.now() >= until {
                    return Ok(found);
                }
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let access = self.access()?;
            Ok(look_at(&access, access.name_of(key), Op::Read).await?.map(|stored| stored.inspection()))
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move { operator::decide(&self.access()?, decision).await })
    }

    /// Does nothing: the server removes expired records.
    fn purge(&self, _: u32) -> StoreFuture<'_, u64> {
        StoreFuture::ready(Ok(0))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(async move { operator::scan(&self.access()?, filter).await })
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            let access = self.access()?;
            let probe = requirements::probe(self.core.scripts(), &self.core.prefix, self.core.clock());
            let answers = access.connections.route.ask_all(&probe).await.map_err(failed)?;
            answers.iter().try_for_each(requirements::check_probe)
        })
    }
}
