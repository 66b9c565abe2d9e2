//! Records in one Redis or Valkey server, in a cluster, or in the primary that sentinels name.
//!
//! A record is one string in the [format](crate::record::format) that all byte stores share.
//! `SET key record NX GET PX retention` reserves a key or returns its record in one round trip. The only clock is the
//! server's: each renewal sets the full retention anew, so the age of a lease is the retention minus what is left of it.
//! Only changes of an existing record need a script. Each script checks the owner token; those of a renewal and of a
//! completion also check the attempt's number.
//!
//! The topology varies beneath: a [route](route) chooses the server of an operation, a [dispatch](dispatch) batches the
//! operations of many tasks, a [connection](connection) is reopened when it breaks.

mod cluster;
mod connect;
mod connection;
mod dispatch;
mod limits;
mod lines;
mod route;
mod sentinel;
mod stream;
mod wake;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::runtime::Handle;

use self::connect::Plan;
pub use self::connect::RedisOptions;
use self::connection::{Failure, Refusal};
use self::dispatch::{Answer, Ask, Completion, DAMAGED, Replicas, Scripts, Terms};
use self::limits::Limits;
use self::lines::{Found, Line, Lines};
use self::route::Op;
use crate::clock::{Clock, Instant};
use crate::key::Key;
use crate::record::format::{self, millis};
use crate::record::{
    Admission, Finish, Inspection, Lease, OwnerToken, Record, Release, Reservation, ReserveRequest, State, Verdict,
};
use crate::store::{Answers, Heartbeats, Store, StoreError, StoreErrorKind, StoreFuture, forward};
use crate::sync::{PerProcess, lock};

/// How often a reservation looks at a record that keeps changing. Each retry means that another attempt won, so the loop
/// ends by itself; the limit guards against bugs and faulty servers.
const LOOKS: u32 = 20;
/// The pause before the fourth look; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How many leases one script call renews: it bounds how long the server does nothing else.
const RENEWED_AT_ONCE: usize = 100;
/// How many leases of other handles are remembered as held.
const REMEMBERED: usize = 1024;

/// A store in Redis 7.0 or newer, or Valkey 8 or newer: one server, a primary with sentinels, or a cluster.
///
/// - *Atomicity*: `SET … NX GET` decides which attempt reserves a key; scripts that compare the owner token decide the
///   rest. Each names keys of one slot only.
/// - *Clock*: the server's. A clock step of the server shifts leases and retentions; after a failover the new primary's
///   clock counts.
/// - *Durability*: the server's own (`appendonly`, `save`). A record that the server loses in a crash, or evicts, is
///   forgotten: use `maxmemory-policy noeviction`; otherwise [`connect`](RedisStore::connect) logs a warning. Replication
///   is asynchronous, so a failover forgets what the new primary had not received yet, unless
///   [`min_replicas`](RedisOptions::min_replicas) makes every answer wait for the replicas.
/// - *Limits*: keys up to [`Key::MAX_BYTES`], results up to `max_result_bytes`, in any case up to what the server takes
///   (`proto-max-bulk-len`, default: 512 MB).
/// - *Cost*: two round trips for a first run, one for a replay. A heartbeat is one exchange (per node), whatever the number
///   of leases; in a cluster each lease is a script call of its own. Commands of concurrent tasks share a pipeline; a lone
///   command never waits. With `min_replicas` every exchange also takes the time until the replicas have confirmed.
///
/// Clones share their connections, which are multiplexed and reconnect. Each tokio runtime that uses the store has
/// connections of its own, which end with it.
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::RedisStore;
/// let store = RedisStore::connect("redis://:password@localhost:6379/0").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RedisStore(Arc<Shared>);

impl RedisStore {
    /// Connects to the servers that `url` names. [`RedisOptions`] has more settings.
    ///
    /// - One server: `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS (feature `redis-tls`),
    ///   `redis+unix:///path` for a socket.
    /// - The primary that sentinels name: `redis-sentinel://[user:password@]host[:port][,host…]/name[/database]`; the hosts
    ///   are the sentinels. The login is the one for the primary; the sentinels' own is
    ///   `?sentinel_user=…&sentinel_password=…`. Name all sentinels: each new connection asks all of them, and believes the
    ///   latest failover. The store follows the primary by itself.
    /// - A cluster: `redis-cluster://[user:password@]host[:port][,host…]`; the hosts are some of
    ///   its nodes.
    ///
    /// The latter two take `?tls=true` (feature `redis-tls`) and `protocol=resp3`. Write characters with a meaning in URLs
    /// as `%XX`.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] for an invalid URL, a refused login, a server that is too old or not Redis, a
    /// replica, a name that the sentinels don't know, or a topology other than the URL's; [`StoreErrorKind::Unavailable`]
    /// if no server answers, or the cluster is down.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Settings for a connection.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Waits until late writes and renewals are done; see [`Heartbeats::flush`].
    pub async fn flush(&self) {
        self.0.core.heartbeats.flush().await;
    }

    fn shared(&self) -> &Shared {
        &self.0
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

forward! { () RedisStore => shared; }

/// One handle of a store. Its connections are its own, so that other handles don't delay it.
struct Shared {
    this: Weak<Shared>,
    core: Arc<Core>,
    lines: Arc<Lines>,
    /// The handle for upkeep; `None` if this is it.
    upkeep: Option<OnceLock<Arc<Shared>>>,
}

/// What all handles of a store share.
struct Core {
    heartbeats: Arc<Heartbeats>,
    plan: Plan,
    terms: Terms,
    replicas: Option<Replicas>,
    prefix: Box<str>,
    limits: Arc<Limits>,
    /// Until when leases of other handles are sure to hold: a duplicate of a hot key then costs one call.
    held: PerProcess<Mutex<HashMap<OwnerToken, Instant>>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.core.prefix).finish_non_exhaustive()
    }
}

/// A script, and the hash that the server knows it by.
struct Script {
    source: &'static str,
    sha: String,
}

impl Core {
    fn scripts(&self) -> &Scripts {
        &self.terms.scripts
    }

    fn now(&self) -> Instant {
        self.clock().now()
    }

    fn clock(&self) -> &dyn Clock {
        &*self.terms.clock
    }

    /// How long a pending record's lease is sure to hold, as far as this handle knows without asking the server.
    ///
    /// A lease only grows while its record is pending, so an earlier answer stays true. Only durations are carried from the
    /// server's clock to this one's.
    fn known_to_hold(&self, owner: OwnerToken) -> Option<Duration> {
        let now = self.now();
        let until = self.heartbeats.held_until(owner).or_else(|| lock(self.held.here()).get(&owner).copied())?;
        Some(until.saturating_since(now)).filter(|left| !left.is_zero())
    }

    fn remember(&self, owner: OwnerToken, until: Instant) {
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

impl Shared {
    /// The first handle of a store, with the line of the runtime that connected it.
    fn new(core: Arc<Core>, connected: (Handle, Line)) -> Arc<Self> {
        let store = Self::on(core, Some(OnceLock::new()));
        store.lines.add(connected);
        store
    }

    fn on(core: Arc<Core>, upkeep: Option<OnceLock<Arc<Self>>>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { this: this.clone(), core, lines: Arc::default(), upkeep })
    }

    /// The connections of the current runtime.
    fn line(&self) -> Result<Found<'_>, StoreError> {
        let Core { plan, terms, replicas, .. } = &*self.core;
        self.lines.here(|| plan.line(terms, *replicas, self.upkeep.is_none())).map_err(failed)
    }

    fn name_of(&self, key: &Key) -> String {
        [&self.core.prefix, key.as_str()].concat()
    }

    async fn try_reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let line = self.line()?;
        let key = self.name_of(&request.key);
        let (value, retention) = {
            let first = Record::first(request);
            (format::encode(&first), millis(first.retention(request.ttl)))
        };
        // The record found in place of the one met before, and the rest of its lease.
        let mut changed: Option<(Bytes, Duration)> = None;
        for look in 0..LOOKS {
            if look > 2 {
                // After the pause, the record found before is out of date.
                changed = None;
                let pause = FIRST_PAUSE.saturating_mul(1 << (look - 3).min(16)).min(LONGEST_PAUSE);
                self.core.clock().sleep(pause).await;
            }
            let (found, left) = match changed.take() {
                Some((found, left)) => (found, Some(left)),
                None => match Self::look(&line, &key, &value, retention, request.owner).await.map_err(failed)? {
                    Value::Nil => {
                        let lease = Record::first(request).lease(request);
                        return Ok(Reservation::Granted { lease, takeover: false });
                    }
                    Value::BulkString(found) => (Bytes::from(found), None),
                    other => return Err(unexpected(&other)),
                },
            };
            let record = format::decode(&found).map_err(corrupt)?;
            let pending = record.is_pending();
            let holds = if pending { left.filter(|left| !left.is_zero()) } else { None };
            if pending && let Some(lapses_in) = holds.or_else(|| self.core.known_to_hold(record.owner)) {
                match record.admit(request, lapses_in) {
                    Admission::Answer(answer) => return Ok(answer),
                    Admission::Replace { .. } => unreachable!("a live lease is not replaced"),
                }
            }
            // The meeting as if the lease had lapsed; in every other state there is no lease to ask about.
            let meeting = record.admit(request, Duration::ZERO);
            if let Admission::Answer(answer) = &meeting
                && (!pending || left.is_some())
            {
                return Ok(answer.clone());
            }
            let asked_at = self.core.now();
            // Boxed: most calls don't get here, but would carry its size inline.
            let taken = Box::pin(self.take(&line, &key, &found, &record, &meeting, request.owner)).await?;
            match (taken, meeting) {
                (Taken::Held(_), Admission::Answer(answer)) if !depends_on_lease(&answer) => return Ok(answer),
                (Taken::Lapsed, Admission::Answer(answer)) => return Ok(answer),
                (Taken::Replaced, Admission::Replace { with, takeover }) => {
                    return Ok(Reservation::Granted { lease: with.lease(request), takeover });
                }
                (Taken::Held(lapses_in), _) => {
                    self.core.remember(record.owner, asked_at.saturating_add(lapses_in));
                    return Ok(Reservation::InProgress { attempt: record.attempt, lapses_in });
                }
                (Taken::Changed(now), _) => changed = now,
                (taken, meeting) => {
                    let message = format!("the server answered {taken:?} to {meeting:?}");
                    return Err(StoreError::new(StoreErrorKind::Unconfirmed, message));
                }
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, "the record changed each time it was looked at"))
    }

    /// Reserves a key that has no record, or reads its record.
    async fn look(line: &Line, key: &str, value: &[u8], ttl_ms: u64, owner: OwnerToken) -> Answer {
        let key = key.as_bytes();
        match line.route.run(key, Op::Reserve { key, value, ttl_ms }).await {
            // "In progress" may come from an unreplicated record. A result or our own reservation may not: the caller
            // relies on it.
            Err(Failure::Unreplicated(found, why)) => match *found {
                Value::BulkString(found) if is_of_another(&found, owner) => Ok(Value::BulkString(found)),
                found => Err(Failure::Unreplicated(Box::new(found), why)),
            },
            answer => answer,
        }
    }

    /// Replaces the record `met` if it is still the same and its lease has lapsed; without a replacement in `meeting`, only
    /// asks.
    async fn take(
        &self,
        line: &Line,
        key: &str,
        found: &Bytes,
        met: &Record,
        meeting: &Admission,
        owner: OwnerToken,
    ) -> Result<Taken, StoreError> {
        let lease = match met.state {
            State::Pending { lease, .. } => millis(lease),
            _ => 0,
        };
        let retention = millis(met.retention(Duration::ZERO));
        let (value, new_retention) = match meeting {
            Admission::Replace { with, .. } => (format::encode(with), millis(with.retention(Duration::ZERO))),
            Admission::Answer(_) => (Vec::new(), 0),
        };
        let seen = [&found[5..6], &found[8..format::HEADER_BYTES]].concat();
        let asked = ask(&self.core.scripts().take, key, |command| {
            command.arg(&seen).arg(lease).arg(retention).arg(&value).arg(new_retention);
            command.arg(&*self.core.terms.channel);
        });
        let taken = line.route.run(key.as_bytes(), Op::Write(asked.that_brings_a_record())).await;
        let taken = match taken {
            // As in `look`: the lease is another attempt's.
            Err(Failure::Unreplicated(taken, why)) => match *taken {
                Value::Int(1..) if met.owner != owner => *taken,
                Value::Array(parts) if is_held_by_another(&parts, owner) => Value::Array(parts),
                taken => return Err(failed(Failure::Unreplicated(Box::new(taken), why))),
            },
            taken => taken.map_err(failed)?,
        };
        match taken {
            Value::Int(-2) => Ok(Taken::Replaced),
            Value::Int(-1) => Ok(Taken::Changed(None)),
            Value::Int(0) => Ok(Taken::Lapsed),
            Value::Int(left) => Ok(Taken::Held(Duration::from_millis(left.unsigned_abs()))),
            Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
                Ok([Value::BulkString(record), Value::Int(left)]) => {
                    let left = Duration::from_millis(u64::try_from(left).unwrap_or_default());
                    Ok(Taken::Changed(Some((Bytes::from(record), left))))
                }
                other => Err(unexpected(&Value::Array(other.map_or_else(|parts| parts, Vec::from)))),
            },
            other => Err(unexpected(&other)),
        }
    }

    /// Renews `leases` in one call of the script.
    async fn renew_some(
        &self,
        line: &Line,
        leases: &[Lease],
        mut answer: impl FnMut(usize, Verdict),
    ) -> Result<(), StoreError> {
        let names: Vec<String> = leases.iter().map(|lease| self.name_of(&lease.key)).collect();
        let Some(first) = names.first() else { return Ok(()) };
        let ask = Ask::script(&self.core.scripts().renew, names.iter(), |command| {
            for lease in leases {
                let attempt = [&lease.owner.as_bytes()[..], &lease.attempt.to_be_bytes()].concat();
                command.arg(attempt).arg(millis(lease.duration.saturating_add(lease.ttl)));
            }
        });
        let renewed = line.route.run(first.as_bytes(), Op::Renew(ask)).await.map_err(failed)?;
        let answers = match renewed {
            Value::BulkString(answers) if answers.len() == leases.len() => answers,
            other => return Err(unexpected(&other)),
        };
        let mut result = Ok(());
        for (at, byte) in answers.into_iter().enumerate() {
            match byte {
                b'1' => answer(at, Verdict::Applied),
                b'0' => answer(at, Verdict::Refused),
                _ => result = Err(damaged()),
            }
        }
        result
    }
}

/// Calls a script on one key.
fn ask(script: &Script, key: &str, args: impl FnOnce(&mut Cmd)) -> Ask {
    Ask::script(script, std::iter::once(key), args)
}

/// Whether `answer` would differ if the lease of the record still held.
fn depends_on_lease(answer: &Reservation) -> bool {
    matches!(answer, Reservation::Interrupted { .. } | Reservation::AttemptsExhausted { .. })
}

/// Whether the record is an unfinished attempt of another owner, running or abandoned.
fn is_of_another(found: &[u8], owner: OwnerToken) -> bool {
    match format::decode(&Bytes::copy_from_slice(found)) {
        Ok(record) => !record.is_finished() && record.owner != owner,
        // Both ways lead to an error; the decoder's says more.
        Err(_) => true,
    }
}

/// Whether the record found in place of another is an attempt of another owner whose lease still holds.
fn is_held_by_another(found: &[Value], owner: OwnerToken) -> bool {
    matches!(found, [Value::BulkString(record), Value::Int(1..)] if is_of_another(record, owner))
}

#[derive(Debug)]
enum Taken {
    Replaced,
    Lapsed,
    /// Another record is there now, with the rest of its lease; `None` if there is no record.
    Changed(Option<(Bytes, Duration)>),
    Held(Duration),
}

fn written(value: &Value) -> Result<Verdict, StoreError> {
    match value {
        Value::Int(1) => Ok(Verdict::Applied),
        Value::Int(0) => Ok(Verdict::Refused),
        other => Err(unexpected(other)),
    }
}

impl Store for Shared {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
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
        let timeout = self.core.terms.timeout;
        self.core.replicas.map_or(timeout, |replicas| replicas.exchange(timeout))
    }

    fn heartbeats(&self) -> &Heartbeats {
        &self.core.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let line = &*line;
            // All calls are sent at once, in one exchange (per node), and each is answered as soon as its answer arrives.
            // Calls are short, so that the server is not blocked.
            let at_once = if self.core.terms.one_key { 1 } else { RENEWED_AT_ONCE };
            let mut calls: Vec<_> = leases
                .chunks(at_once)
                .enumerate()
                .map(|(chunk, some)| {
                    Box::pin(self.renew_some(line, some, move |at, write| answer(chunk * at_once + at, write)))
                })
                .collect();
            crate::future::all(&mut calls).await.into_iter().collect()
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let (limits, clock) = (&self.core.limits, self.core.clock());
            let key = self.name_of(&lease.key);
            let value = format::encode(&Record::after(lease, finish.state()));
            limits.check(value.len(), clock)?;
            let completion = Completion { key: key.as_bytes(), value: &value, ttl_ms: millis(lease.ttl) };
            let answer = line.route.run(key.as_bytes(), Op::Finish(completion)).await;
            written(&limits.learn(value.len(), answer, clock)?)
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let (state, refund) = match release {
                Release::Returned => ("R", 0),
                Release::NotStarted => ("R", 1),
                Release::Interrupted => ("I", 0),
            };
            let key = self.name_of(&lease.key);
            let asked = ask(&self.core.scripts().release, &key, |command| {
                command.arg(&lease.owner.as_bytes()[..]).arg(state).arg(refund).arg(millis(lease.ttl));
                command.arg(&*self.core.terms.channel);
            });
            let released = line.route.run(key.as_bytes(), Op::Write(asked.that_is_kept())).await;
            written(&released.map_err(failed)?)
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let name = self.name_of(key);
            let mark = async {
                let asked = ask(&self.core.scripts().watch, &name, |command| {
                    command.arg(&attempt.to_be_bytes()[..]);
                });
                let pending = line.route.run(name.as_bytes(), Op::Read(asked)).await;
                Ok(written(&pending.map_err(failed)?)? == Verdict::Applied)
            };
            line.wakeups.wait(&name, at_most, self.core.clock(), mark).await
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let name = self.name_of(key);
            let asked = ask(&self.core.scripts().inspect, &name, |_| {});
            let found = line.route.run(name.as_bytes(), Op::Read(asked.that_brings_a_record())).await;
            let found = found.map_err(failed)?;
            let Value::Array(parts) = found else { return Err(unexpected(&found)) };
            let [value, Value::Int(left)] = &parts[..] else { return Err(unexpected(&Value::Array(parts))) };
            let value = match value {
                Value::Nil => return Ok(None),
                Value::BulkString(value) => Bytes::copy_from_slice(value),
                other => return Err(unexpected(other)),
            };
            let record = format::decode(&value).map_err(corrupt)?;
            // Negative without an expiry: a record that has no lease is then kept for ever.
            let expires_in = u64::try_from(*left).map_or(Duration::MAX, Duration::from_millis);
            let lapses_in = match record.state {
                State::Pending { .. } if *left < 0 => return Err(damaged()),
                State::Pending { ttl, .. } => Some(expires_in.saturating_sub(ttl)),
                _ => None,
            };
            Ok(Some(Inspection { record, expires_in, lapses_in }))
        })
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let name = self.name_of(key);
            let asked = ask(&self.core.scripts().reopen, &name, |command| {
                command.arg(&attempt.to_be_bytes()[..]).arg(&*self.core.terms.channel);
            });
            let reopened = line.route.run(name.as_bytes(), Op::Write(asked)).await;
            written(&reopened.map_err(failed)?)
        })
    }
}

fn corrupt(error: format::FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// An answer that no command of this store can have. The value may be a payload and is not shown.
fn unexpected(value: &Value) -> StoreError {
    let kind = match value {
        Value::Nil => "nil",
        Value::Int(_) => "a number",
        Value::BulkString(_) => "a string",
        Value::Array(_) => "an array",
        _ => "something else",
    };
    StoreError::new(StoreErrorKind::Unconfirmed, format!("the server answered {kind} where that makes no sense"))
}

/// A pending record without an expiry: the expiry was removed, or the record was restored without one.
fn damaged() -> StoreError {
    StoreError::new(
        StoreErrorKind::Corrupt,
        "the record is pending and has lost its expiry, so nobody can tell whether its lease holds; it is left alone: \
         delete the key once no handler is running for it",
    )
}

fn too_large(bytes: usize, most: usize) -> StoreError {
    let message = format!("the server takes values of {most} bytes at most, and this one has {bytes}");
    StoreError::new(StoreErrorKind::TooLarge, message)
}

fn failed(failure: Failure) -> StoreError {
    match failure {
        // A script is never half done: it checks everything before its first write.
        Failure::Refused(refusal) => refused(&refusal),
        Failure::NotSent(reason) => {
            StoreError::new(StoreErrorKind::Unavailable, format!("the server can't be reached: {reason}"))
        }
        Failure::Unusable(reason) => {
            StoreError::new(StoreErrorKind::Misconfigured, format!("the server can't be reached: {reason}"))
        }
        Failure::Broken(error) => {
            StoreError::new(StoreErrorKind::Unconfirmed, "the connection broke before the answer came")
                .with_source(error)
        }
        Failure::TimedOut => StoreError::new(StoreErrorKind::Unconfirmed, "the server did not answer in time"),
        Failure::Lost => StoreError::new(StoreErrorKind::Unconfirmed, "the answer got lost on its way"),
        Failure::Unreplicated(_, why) => {
            let why = why.map_or_else(|| "it in time".to_owned(), |said| format!("it: the server refused: {said}"));
            let message = format!("fewer replicas than `min_replicas` confirmed {why}");
            StoreError::new(StoreErrorKind::Unconfirmed, message)
        }
    }
}

fn refused(Refusal { code, message }: &Refusal) -> StoreError {
    let (kind, what) = match &**code {
        DAMAGED => return damaged(),
        "WRONGTYPE" => (StoreErrorKind::Corrupt, "the server refused"),
        "OOM" => (StoreErrorKind::Full, "the server is full"),
        "NOAUTH" | "WRONGPASS" | "NOPERM" => {
            (StoreErrorKind::Misconfigured, "the server refused the login or what it may do")
        }
        // A command that is forbidden in a script has no error code of its own.
        "ERR" if FORBIDDEN.iter().any(|words| message.contains(words)) => {
            (StoreErrorKind::Misconfigured, "the server does not allow what the store has to do")
        }
        _ => (StoreErrorKind::Unavailable, "the server refused"),
    };
    StoreError::new(kind, format!("{what}: {code} {message}"))
}

/// How servers report in a script that the login lacks a right, or that a command does not exist: it may have been renamed.
const FORBIDDEN: [&str; 5] = [
    "The user executing the script can't",
    "ACL failure in script",
    "ACL permissions",
    "unknown command",
    "Unknown Redis command",
];
