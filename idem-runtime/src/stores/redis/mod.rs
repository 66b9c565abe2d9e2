//! Records in a Redis or Valkey server, in a cluster of them, or in the primary that sentinels name.
//!
//! A record is one string in the [format](crate::record::format) that every byte store shares. `SET key record NX GET PX
//! retention` reserves a key or returns its record in one round trip. There is no clock but the server's: each renewal
//! sets the whole retention anew, so the age of a lease is the retention minus what is left of it. Only what changes a
//! record that is there needs a script, and each script checks the owner token, those of a renewal
//! and a completion also the attempt's number.
//!
//! The topology varies beneath that: a [route](route) says which server an operation goes to, a [dispatch](dispatch) sends
//! what many tasks want of it, a [connection](connection) is made anew when it breaks.

#[cfg(feature = "redis-cluster")]
mod cluster;
mod connect;
mod connection;
mod dispatch;
mod route;
mod sentinel;
mod wake;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};

pub use self::connect::RedisOptions;
use self::connection::{Failure, Refusal};
use self::dispatch::{Answer, Completion};
use self::route::{Op, Router};
use self::wake::Wakeups;
use crate::clock::Instant;
use crate::record::format::{self, millis};
use crate::store::forward;
use crate::sync::lock;
use crate::{
    Finish, Heartbeats, Inspection, Key, Lease, Meeting, Owner, Record, Release, Reservation, Reserve, State, Store,
    StoreError, StoreErrorKind, StoreFuture, Write,
};

/// How often a reservation looks again at a record that changes under its eyes. Each time another attempt has got ahead,
/// so this is a bound on what can't happen rather than on what may.
const LOOKS: usize = 10_000;
/// How many leases one script renews: a bound on how long the server does nothing else.
const RENEWED_AT_ONCE: usize = 100;
/// How many leases of others are remembered as held.
const REMEMBERED: usize = 1024;

/// A store in a Redis 7.0 or newer, or a Valkey 8 or newer: one server, a primary with sentinels, or a cluster (feature
/// `redis-cluster`).
///
/// - *Atomicity*: `SET … NX GET` decides who is first, scripts that compare the owner token decide the rest. Each names
///   keys of one slot only.
/// - *Clock*: the server's. A clock step of the server moves leases and retentions with it, and after a failover it is the
///   new primary's.
/// - *Durability*: the server's own (`appendonly`, `save`). A record that the server loses in a crash, or evicts, is
///   forgotten: use `maxmemory-policy noeviction`; [`connect`](RedisStore::connect) logs a warning otherwise. Replication
///   is asynchronous, so a failover forgets what the new primary did not have yet, unless
///   [`min_replicas`](RedisOptions::min_replicas) makes every answer wait for the replicas.
/// - *Limits*: keys of [`Key::MAX_BYTES`], results of `max_result_bytes`, in any case 512 MB.
/// - *Cost*: two round trips for a first run, one for a replay. A heartbeat is one exchange (with each node), whatever the
///   number of leases; in a cluster each lease is a script call of its own. Commands of concurrent tasks leave together; a
///   lone command never waits. With `min_replicas` every exchange also takes the time until the replicas have confirmed.
///
/// Clones share their connections, which are multiplexed and reconnect. They live on the tokio runtime they were made on.
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
    /// Connects to what `url` names. [`RedisOptions`] has more settings.
    ///
    /// - One server: `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS (feature `redis-tls`),
    ///   `redis+unix:///path` for a socket.
    /// - The primary that sentinels name: `redis-sentinel://[user:password@]host[:port][,host…]/name[/database]`, the
    ///   hosts being the sentinels'. The login is the servers'; that of the sentinels is
    ///   `?sentinel_user=…&sentinel_password=…`. Name all sentinels: each new connection asks all of them, and believes the
    ///   latest failover. The store moves to the new primary by itself.
    /// - A cluster: `redis-cluster://[user:password@]host[:port][,host…]` (feature `redis-cluster`), the hosts being some
    ///   of its nodes.
    ///
    /// The latter two take `?tls=true` (feature `redis-tls`) and `protocol=resp3`. Characters with a meaning in URLs are
    /// written as `%XX`.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] for a URL that can't be read, a refused login, a server that is too old or is
    /// something else, a replica, a name that the sentinels don't know, and one topology in place of another;
    /// [`StoreErrorKind::Unavailable`] if nobody answers, or the cluster is down.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Settings for a connection.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Waits until late writes and renewals are through; see [`Heartbeats::flush`].
    pub async fn flush(&self) {
        self.0.heartbeats.flush().await;
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

struct Shared {
    this: Weak<Shared>,
    heartbeats: Heartbeats,
    router: Router,
    wakeups: Wakeups,
    prefix: Box<str>,
    /// Leases of other handles that are sure to hold until then: a hot key costs its duplicates one call each.
    held: Mutex<HashMap<Owner, Instant>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// A script, and the name that the server has for it.
struct Script {
    source: &'static str,
    sha: String,
}

impl Shared {
    fn name_of(&self, key: &Key) -> String {
        [&self.prefix, key.as_str()].concat()
    }

    fn now(&self) -> Instant {
        self.heartbeats.clock().now()
    }

    async fn try_reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        let key = self.name_of(&request.key);
        let first = Record::first(request);
        let value = format::encode(&first);
        let retention = millis(first.retention(request.ttl));
        let mut changed = None;
        for _ in 0..LOOKS {
            let found = match changed.take() {
                Some(found) => found,
                None => match self.look(&key, &value, retention, request.owner).await.map_err(failed)? {
                    Value::Nil => return Ok(Reservation::Reserved { lease: first.lease(request), takeover: false }),
                    Value::BulkString(found) => Bytes::from(found),
                    other => return Err(unexpected(&other)),
                },
            };
            let record = format::decode(&found).map_err(corrupt)?;
            let pending = matches!(record.state, State::Pending { .. });
            if pending && let Some(lapses_in) = self.known_to_hold(record.owner) {
                match record.meet(request, lapses_in) {
                    Meeting::Answer(answer) => return Ok(answer),
                    Meeting::Replace { .. } => unreachable!("a live lease is not replaced"),
                }
            }
            // What follows if the lease has lapsed; for every other state there is no lease to ask about.
            let meeting = record.meet(request, Duration::ZERO);
            match &meeting {
                Meeting::Answer(answer) if !pending || !depends_on_lease(answer) => return Ok(answer.clone()),
                _ => {}
            }
            let asked_at = self.now();
            match (self.take(&key, &found, &record, &meeting).await?, meeting) {
                (Taken::Lapsed, Meeting::Answer(answer)) => return Ok(answer),
                (Taken::Replaced, Meeting::Replace { with, takeover }) => {
                    return Ok(Reservation::Reserved { lease: with.lease(request), takeover });
                }
                (Taken::Held(lapses_in), _) => {
                    self.remember(record.owner, asked_at.saturating_add(lapses_in));
                    return Ok(Reservation::Pending { attempt: record.attempt, lapses_in });
                }
                (Taken::Changed(now), _) => changed = now,
                (taken, meeting) => {
                    let message = format!("the server answered {taken:?} to {meeting:?}");
                    return Err(StoreError::new(StoreErrorKind::Unknown, message));
                }
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, "the record changed each time it was looked at"))
    }

    /// Reserves a key that has no record, or reads its record.
    async fn look(&self, key: &str, value: &[u8], ttl_ms: u64, owner: Owner) -> Answer {
        let key = key.as_bytes();
        match self.router.run(key, Op::Reserve { key, value, ttl_ms }).await {
            // That somebody else is running is no promise to anybody, so no replica has to have it. A result is one: the
            // caller is told that it is recorded, and a reservation of its own that it has it.
            Err(Failure::Unreplicated(found)) => match *found {
                Value::BulkString(found) if is_of_another(&found, owner) => Ok(Value::BulkString(found)),
                found => Err(Failure::Unreplicated(Box::new(found))),
            },
            answer => answer,
        }
    }

    /// Replaces the record that was met, if it still is the one that was met and its lease has lapsed.
    async fn take(&self, key: &str, found: &Bytes, met: &Record, meeting: &Meeting) -> Result<Taken, StoreError> {
        let lease = match met.state {
            State::Pending { lease, .. } => millis(lease),
            _ => 0,
        };
        let retention = millis(met.retention(Duration::ZERO));
        let (value, new_retention) = match meeting {
            Meeting::Replace { with, .. } => (format::encode(with), millis(with.retention(Duration::ZERO))),
            Meeting::Answer(_) => (Vec::new(), 0),
        };
        let seen = [&found[5..6], &found[8..format::HEADER_BYTES]].concat();
        let taken = self
            .call(&self.router.scripts().take, key, Op::Write, |command| {
                command.arg(&seen).arg(lease).arg(retention).arg(&value).arg(new_retention);
                command.arg(self.wakeups.channel());
            })
            .await;
        let taken = match taken {
            // As above: the lease is somebody else's.
            Err(Failure::Unreplicated(left)) if matches!(*left, Value::Int(1..)) => *left,
            taken => taken.map_err(failed)?,
        };
        match taken {
            Value::Int(-2) => Ok(Taken::Replaced),
            Value::Int(-1) => Ok(Taken::Changed(None)),
            Value::BulkString(record) => Ok(Taken::Changed(Some(Bytes::from(record)))),
            Value::Int(0) => Ok(Taken::Lapsed),
            Value::Int(left) => Ok(Taken::Held(Duration::from_millis(left.unsigned_abs()))),
            other => Err(unexpected(&other)),
        }
    }

    /// How long a pending record's lease is sure to hold as far as this handle knows, without asking the server.
    ///
    /// A lease only ever grows while its record is pending, so what was true of it stays true; and only a length of time
    /// is carried from the server's clock to this one's.
    fn known_to_hold(&self, owner: Owner) -> Option<Duration> {
        let now = self.now();
        let until = self.heartbeats.held_until(owner).or_else(|| lock(&self.held).get(&owner).copied())?;
        Some(until.saturating_since(now)).filter(|left| !left.is_zero())
    }

    fn remember(&self, owner: Owner, until: Instant) {
        let now = self.now();
        let mut held = lock(&self.held);
        if held.len() >= REMEMBERED {
            held.retain(|_, until| *until > now);
        }
        if held.len() < REMEMBERED {
            held.insert(owner, until);
        }
    }

    async fn renew_some(&self, leases: &[Lease]) -> Result<Vec<Write>, StoreError> {
        let script = &self.router.scripts().renew;
        let renewed = self
            .call_many(script, leases.iter().map(|lease| self.name_of(&lease.key)), Op::Write, |command| {
                for lease in leases {
                    let attempt = [&lease.owner.as_bytes()[..], &lease.attempt.to_be_bytes()].concat();
                    command.arg(attempt).arg(millis(lease.lease.saturating_add(lease.ttl)));
                }
            })
            .await
            .map_err(failed)?;
        match renewed {
            Value::BulkString(answers) if answers.len() == leases.len() => Ok(answers
                .into_iter()
                .map(|answer| if answer == b'1' { Write::Done } else { Write::Refused })
                .collect()),
            other => Err(unexpected(&other)),
        }
    }

    /// Calls a script on one key.
    async fn call(&self, script: &Script, key: &str, op: fn(Cmd) -> Op<'static>, args: impl Fn(&mut Cmd)) -> Answer {
        self.call_many(script, std::iter::once(key), op, args).await
    }

    async fn call_many<K: AsRef<str>>(
        &self,
        script: &Script,
        keys: impl ExactSizeIterator<Item = K> + Clone,
        op: fn(Cmd) -> Op<'static>,
        args: impl Fn(&mut Cmd),
    ) -> Answer {
        let Some(first) = keys.clone().next() else { return Err(Failure::Lost) };
        let first = first.as_ref().as_bytes();
        let command = |name: &str, script: &str| {
            let mut command = Cmd::new();
            command.arg(name).arg(script).arg(keys.len());
            keys.clone().for_each(|key| {
                command.arg(key.as_ref());
            });
            args(&mut command);
            op(command)
        };
        match self.router.run(first, command("EVALSHA", &script.sha)).await {
            // Restarted, failed over or flushed: nothing was written, and EVAL loads the script again.
            Err(failure) if failure.is_unknown_script() => self.router.run(first, command("EVAL", script.source)).await,
            answer => answer,
        }
    }
}

/// Whether `answer` would be another one if the lease of the record still held.
fn depends_on_lease(answer: &Reservation) -> bool {
    matches!(answer, Reservation::Interrupted { .. } | Reservation::Exhausted { .. })
}

/// Whether the record is an attempt that somebody else is running, or has left behind.
fn is_of_another(found: &[u8], owner: Owner) -> bool {
    match format::decode(&Bytes::copy_from_slice(found)) {
        Ok(record) => !record.is_finished() && record.owner != owner,
        // An error either way, and one that says more.
        Err(_) => true,
    }
}

#[derive(Debug)]
enum Taken {
    Replaced,
    Lapsed,
    Changed(Option<Bytes>),
    Held(Duration),
}

fn written(value: &Value) -> Result<Write, StoreError> {
    match value {
        Value::Int(1) => Ok(Write::Done),
        Value::Int(0) => Ok(Write::Refused),
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

    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a Reserve) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease]) -> StoreFuture<'a, Vec<Write>> {
        StoreFuture::new(async move {
            // Sent together and answered together: one exchange (with each node), in calls that are short for the server.
            let at_once = if self.router.one_key() { 1 } else { RENEWED_AT_ONCE };
            let mut calls: Vec<_> = leases.chunks(at_once).map(|some| Box::pin(self.renew_some(some))).collect();
            let mut answers = Vec::with_capacity(leases.len());
            for renewed in crate::clock::all(&mut calls).await {
                answers.extend(renewed?);
            }
            Ok(answers)
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Write> {
        StoreFuture::new(async move {
            let key = self.name_of(&lease.key);
            let value = format::encode(&Record::after(lease, finish.state()));
            let completion = Completion { key: key.as_bytes(), value: &value, ttl_ms: millis(lease.ttl) };
            written(&self.router.run(key.as_bytes(), Op::Finish(completion)).await.map_err(failed)?)
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Write> {
        StoreFuture::new(async move {
            let (state, refund) = match release {
                Release::Returned => ("R", 0),
                Release::NotStarted => ("R", 1),
                Release::Interrupted => ("I", 0),
            };
            let script = &self.router.scripts().release;
            let released = self
                .call(script, &self.name_of(&lease.key), Op::Write, |command| {
                    command.arg(&lease.owner.as_bytes()[..]).arg(state).arg(refund).arg(millis(lease.ttl));
                    command.arg(self.wakeups.channel());
                })
                .await;
            written(&released.map_err(failed)?)
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let name = self.name_of(key);
            let mark = async {
                let script = &self.router.scripts().watch;
                let pending = self.call(script, &name, Op::Read, |command| {
                    command.arg(&attempt.to_be_bytes()[..]);
                });
                Ok(written(&pending.await.map_err(failed)?)? == Write::Done)
            };
            self.wakeups.wait(&name, at_most, self.heartbeats.clock(), mark).await
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let script = &self.router.scripts().inspect;
            let found = self.call(script, &self.name_of(key), Op::Read, |_| {}).await.map_err(failed)?;
            let Value::Array(parts) = found else { return Err(unexpected(&found)) };
            let [value, Value::Int(left)] = &parts[..] else { return Err(unexpected(&Value::Array(parts))) };
            let value = match value {
                Value::Nil => return Ok(None),
                Value::BulkString(value) => Bytes::copy_from_slice(value),
                other => return Err(unexpected(other)),
            };
            let record = format::decode(&value).map_err(corrupt)?;
            let expires_in = Duration::from_millis(u64::try_from(*left).unwrap_or_default());
            let lapses_in = match record.state {
                State::Pending { ttl, .. } => Some(expires_in.saturating_sub(ttl)),
                _ => None,
            };
            Ok(Some(Inspection { record, expires_in, lapses_in }))
        })
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Write> {
        StoreFuture::new(async move {
            let script = &self.router.scripts().reopen;
            let reopened = self
                .call(script, &self.name_of(key), Op::Write, |command| {
                    command.arg(&attempt.to_be_bytes()[..]).arg(self.wakeups.channel());
                })
                .await;
            written(&reopened.map_err(failed)?)
        })
    }
}

fn corrupt(error: format::FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// An answer that no command of this store has. The value itself may be a payload and is not shown.
fn unexpected(value: &Value) -> StoreError {
    let kind = match value {
        Value::Nil => "nil",
        Value::Int(_) => "a number",
        Value::BulkString(_) => "a string",
        Value::Array(_) => "an array",
        _ => "something else",
    };
    StoreError::new(StoreErrorKind::Unknown, format!("the server answered {kind} where that makes no sense"))
}

fn failed(failure: Failure) -> StoreError {
    match failure {
        // A script can't be half done: it looks at everything before its first write.
        Failure::Refused(Refusal { code, message }) => match &*code {
            "WRONGTYPE" => StoreError::new(StoreErrorKind::Corrupt, format!("the server refused: {code} {message}")),
            "NOAUTH" | "WRONGPASS" | "NOPERM" => {
                let message = format!("the server refused the login or what it may do: {code} {message}");
                StoreError::new(StoreErrorKind::Misconfigured, message)
            }
            _ => StoreError::new(StoreErrorKind::Unavailable, format!("the server refused: {code} {message}")),
        },
        Failure::NotSent(reason) => {
            StoreError::new(StoreErrorKind::Unavailable, format!("the server can't be reached: {reason}"))
        }
        Failure::Broken(error) => {
            StoreError::new(StoreErrorKind::Unknown, "the connection broke before the answer came").with_source(error)
        }
        Failure::TimedOut => StoreError::new(StoreErrorKind::Unknown, "the server did not answer in time"),
        Failure::Lost => StoreError::new(StoreErrorKind::Unknown, "the answer got lost on its way"),
        Failure::Unreplicated(_) => {
            StoreError::new(StoreErrorKind::Unknown, "fewer replicas than `min_replicas` confirmed it in time")
        }
    }
}
