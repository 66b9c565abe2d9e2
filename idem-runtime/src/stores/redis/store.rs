//! The store: the promises of [`RedisStore`], and its operations.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use redis::{Cmd, Value};

use super::batch::OpFuture;
use super::cluster::slot_of;
use super::command::{Name, RedisCommand};
use super::connections::{ConnectPlan, Connections};
use super::failure::{ExchangeFailure, corrupt, damaged, failed, unexpected};
use super::limits::{Limits, SURE};
use super::op::{Op, OpAnswer};
use super::scripts::{Script, Scripts};
use super::terms::ExchangeTerms;
use super::write::RecordWrite;
use crate::clock::{Clock, Instant, wall_millis};
use crate::key::Key;
use crate::kit::per_runtime::{Here, PerRuntime};
use crate::record::format::{self, millis};
use crate::record::{
    Admission, Decision, DecisionAnswer, Finish, Inspection, Lease, OwnerToken, Record, Release, Reservation,
    ReserveRequest, ReservedAt, Ruling, State, Verdict,
};
use crate::store::{
    Answers, Cursor, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture, store_of_shared,
};
use crate::sync::{PerProcess, SharedOnce, lock};

/// Number of looks of a reservation at a record that keeps changing. Each retry means that another attempt won, so the
/// loop ends on its own; the limit guards against bugs and faulty servers.
const LOOKS: u32 = 20;
/// Pause before the fourth look. The pause doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Number of leases that one script call renews. Limits the time for which the server does nothing else.
const RENEWED_AT_ONCE: usize = 100;
/// Approximate number of keys that one `SCAN` looks at. Limits the time for which the server does nothing else.
const SCANNED_AT_ONCE: usize = 250;
/// Number of leases of other handles that are remembered as held.
const REMEMBERED: usize = 1024;

/// A store in Redis 7.0 or newer, or Valkey 8 or newer: one server, a primary with sentinels, or a cluster.
///
/// - *Atomicity*: `SET … NX GET` decides which attempt reserves a key. `SET … IFEQ` (Valkey 8.1, Redis 8.4) or scripts
///   that compare the owner token decide the rest. Each names keys of one slot only.
/// - *Clock*: the server's. A step of that clock shifts leases and retentions. After a failover the new primary's clock
///   counts. For operators only, a completion notes when its attempt began: by the wall clock of its process, or by the
///   server's if its lease was renewed before.
/// - *Durability*: the server's own (`appendonly`, `save`). A record that the server loses in a crash, or evicts, is
///   forgotten: use `maxmemory-policy noeviction`; otherwise [`connect`](RedisStore::connect) logs a warning.
///   Replication is asynchronous, so a failover forgets the writes that the new primary had not received yet, unless
///   [`min_replicas`](RedisOptions::min_replicas) makes every answer wait for the replicas.
/// - *Limits*: keys up to [`Key::MAX_BYTES`], results up to `max_result_bytes`, and never more than the server takes
///   (`proto-max-bulk-len`, default: 512 MB).
/// - *Cost*: two round trips for a first run, one for a replay. With `SET … IFEQ` a completion for which a duplicate
///   waits takes one more. A heartbeat is one exchange (per node), whatever the number of leases; in a cluster the
///   leases of one slot share a script call. Commands of concurrent tasks share a pipeline; a lone command never waits.
///   With `min_replicas` every exchange also takes the time until the replicas have confirmed.
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

/// One handle of a store. Its connections are its own, so that other handles don't delay it.
pub(super) struct RedisInner {
    this: Weak<RedisInner>,
    core: Arc<Core>,
    lines: PerRuntime<Connections>,
    /// The handle for upkeep; `None` if this is it.
    upkeep: Option<SharedOnce<Arc<RedisInner>>>,
}

/// State that all handles of a store share.
pub(super) struct Core {
    pub(super) context: Arc<StoreContext>,
    pub(super) plan: ConnectPlan,
    pub(super) terms: ExchangeTerms,
    pub(super) prefix: Box<str>,
    pub(super) limits: Arc<Limits>,
    /// Time until which leases of other handles are sure to hold: a duplicate of a hot key then costs one call.
    pub(super) held: PerProcess<Mutex<HashMap<OwnerToken, Instant>>>,
}

impl fmt::Debug for RedisInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.core.prefix).finish_non_exhaustive()
    }
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

    /// Returns the time for which a pending record's lease is sure to hold, by the state of this handle, without asking
    /// the server.
    ///
    /// A lease only grows while its record is pending, so an earlier answer stays true. Only durations are carried from
    /// the server's clock to this process's clock.
    fn known_to_hold(&self, owner: OwnerToken) -> Option<Duration> {
        let now = self.now();
        let until = self.context.leases().held_until(owner).or_else(|| lock(self.held.here()).get(&owner).copied())?;
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

impl RedisInner {
    /// Makes the first handle of a store, with the connections of the current runtime, which opened them.
    pub(super) fn new(core: Arc<Core>, connected: Connections) -> Arc<Self> {
        let store = Self::on(core, Some(SharedOnce::new()));
        store.lines.here(|_| connected);
        store
    }

    fn on(core: Arc<Core>, upkeep: Option<SharedOnce<Arc<Self>>>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { this: this.clone(), core, lines: PerRuntime::default(), upkeep })
    }

    /// Returns the connections of the current runtime.
    fn line(&self) -> Result<Here<'_, Connections>, StoreError> {
        let Core { plan, terms, .. } = &*self.core;
        // A connection itself refuses use in another process than its own.
        let line = self.lines.here_or_inherited(|_| plan.line(terms, self.upkeep.is_none()));
        line.ok_or_else(|| failed(ExchangeFailure::Unusable("no tokio runtime: call the store from inside one".into())))
    }

    /// Returns the age of a record whose attempt `began` then. `began` is a time of the holder or of the server, and
    /// the answer does not contain their present time. So the age is measured by the wall clock of this host, as
    /// exactly as the clocks agree.
    fn age(&self, began: Option<u64>) -> Option<Duration> {
        let now = u64::try_from(wall_millis(self.core.clock())).unwrap_or_default();
        began.map(|began| Duration::from_millis(now.saturating_sub(began)))
    }

    fn name_of<'a>(&'a self, key: &'a Key) -> Name<'a> {
        Name { prefix: &self.core.prefix, key: key.as_str() }
    }

    async fn try_reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let line = self.line()?;
        let name = self.name_of(&request.key);
        let first = Record::first(request);
        let ttl_ms = millis(first.retention(request.ttl));
        let write = RecordWrite { name, record: &first, reserved_at: None, expected: None, ttl_ms };
        // The record found in place of the earlier one, and the rest of its lease.
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
                None => match looked(line.route.run(name, Op::Reserve(write)).await, request.owner).map_err(failed)? {
                    Value::Nil => {
                        let mut lease = first.lease(request);
                        lease.reserved_at = ReservedAt::new(now(self.core.clock()));
                        return Ok(Reservation::Granted { lease, takeover: false });
                    }
                    Value::BulkString(found) => (Bytes::from(found), None),
                    other => return Err(unexpected(&other)),
                },
            };
            // A finished record answers without a look at its lease.
            let (seen, [_, began]) = (format::identity(&found).unwrap_or_default(), format::times(&found));
            let record = format::decode_owned(found).map_err(corrupt)?;
            if record.is_finished() {
                match record.admit_owned(request, Duration::ZERO) {
                    Admission::Answer(answer) => return Ok(answer.aged(self.age(began))),
                    Admission::Replace { .. } => unreachable!("a finished record is not replaced"),
                }
            }
            // A pending record whose lease holds for sure answers without a further call.
            let pending = record.is_pending();
            let holds = if pending { left.filter(|left| !left.is_zero()) } else { None };
            if pending && let Some(lapses_in) = holds.or_else(|| self.core.known_to_hold(record.owner)) {
                match record.admit(request, lapses_in) {
                    Admission::Answer(answer) => return Ok(answer),
                    Admission::Replace { .. } => unreachable!("a live lease is not replaced"),
                }
            }
            // The decision if the lease had lapsed. In every other state there is no lease to ask about.
            let meeting = record.admit(request, Duration::ZERO);
            if let Admission::Answer(answer) = &meeting
                && (!pending || left.is_some())
            {
                return Ok(answer.clone());
            }
            let asked_at = self.core.now();
            // Boxed: most calls don't get here, but would carry its size inline.
            let taken = Box::pin(self.take(&line, name, &seen, &record, &meeting, request.owner)).await?;
            match (taken, meeting) {
                (TakeoverAnswer::Held(_), Admission::Answer(answer)) if !depends_on_lease(&answer) => {
                    return Ok(answer);
                }
                (TakeoverAnswer::Lapsed, Admission::Answer(answer)) => return Ok(answer),
                (TakeoverAnswer::Replaced, Admission::Replace { with, takeover }) => {
                    return Ok(Reservation::Granted { lease: with.lease(request), takeover });
                }
                (TakeoverAnswer::Held(lapses_in), _) => {
                    self.core.remember(record.owner, asked_at.saturating_add(lapses_in));
                    return Ok(Reservation::InProgress { attempt: record.attempt, lapses_in });
                }
                (TakeoverAnswer::Changed(now), _) => changed = now,
                (taken, meeting) => {
                    let message = format!("the server gave the unexpected answer {taken:?} to {meeting:?}");
                    return Err(StoreError::new(StoreErrorKind::Unconfirmed, message));
                }
            }
        }
        Err(keeps_changing())
    }

    /// Replaces the record `met` if it is still the same and its lease has lapsed. Without a replacement in `meeting`,
    /// only asks for the lease.
    async fn take(
        &self,
        line: &Connections,
        name: Name<'_>,
        seen: &[u8],
        met: &Record,
        meeting: &Admission,
        owner: OwnerToken,
    ) -> Result<TakeoverAnswer, StoreError> {
        let lease = match met.state {
            State::Pending { lease, .. } => millis(lease),
            _ => 0,
        };
        let retention = millis(met.retention(Duration::ZERO));
        let (value, new_retention) = match meeting {
            Admission::Replace { with, .. } => (format::encode(with), millis(with.retention(Duration::ZERO))),
            Admission::Answer(_) => (Vec::new(), 0),
        };
        let asked = ask(&self.core.scripts().take, name, |command| {
            command.arg(seen).arg(lease).arg(retention).arg(&value).arg(new_retention);
            command.arg(&*self.core.terms.channel);
        });
        // Replicas must confirm the takeover. A lease that another attempt holds is a valid answer without them.
        let taken = line.route.run(name, Op::Write(asked.returns_record())).await;
        let taken = match taken {
            // As in `looked`: the lease is another attempt's.
            Err(ExchangeFailure::Unreplicated(taken, why)) => match *taken {
                Value::Int(1..) if met.owner != owner => *taken,
                Value::Array(parts) if is_held_by_another(&parts, owner) => Value::Array(parts),
                taken => return Err(failed(ExchangeFailure::Unreplicated(Box::new(taken), why))),
            },
            taken => taken.map_err(failed)?,
        };
        match taken {
            Value::Int(-2) => Ok(TakeoverAnswer::Replaced),
            Value::Int(-1) => Ok(TakeoverAnswer::Changed(None)),
            Value::Int(0) => Ok(TakeoverAnswer::Lapsed),
            Value::Int(left) => Ok(TakeoverAnswer::Held(Duration::from_millis(left.unsigned_abs()))),
            Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
                Ok([Value::BulkString(record), Value::Int(left)]) => {
                    let left = Duration::from_millis(u64::try_from(left).unwrap_or_default());
                    Ok(TakeoverAnswer::Changed(Some((Bytes::from(record), left))))
                }
                other => Err(unexpected(&Value::Array(other.map_or_else(|parts| parts, Vec::from)))),
            },
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the value under `name`, read as an [`Op::Read`] or, once replicas have confirmed it, as an
    /// [`Op::Write`].
    async fn look_at(
        &self,
        line: &Connections,
        name: Name<'_>,
        op: fn(RedisCommand) -> Op<'static>,
    ) -> Result<Option<StoredValue>, StoreError> {
        let asked = ask(&self.core.scripts().inspect, name, |_| {});
        let found = line.route.run(name, op(asked.returns_record())).await;
        let found = found.map_err(failed)?;
        let Value::Array(parts) = found else { return Err(unexpected(&found)) };
        let [value, Value::Int(left), Value::Int(expires_at)] = &parts[..] else {
            return Err(unexpected(&Value::Array(parts)));
        };
        let value = match value {
            Value::Nil => return Ok(None),
            Value::BulkString(value) => Bytes::copy_from_slice(value),
            other => return Err(unexpected(other)),
        };
        let record = format::decode(&value).map_err(corrupt);
        let found = record.and_then(|record| inspection(record, &value, *left, *expires_at));
        Ok(Some(StoredValue { value, left: *left, found }))
    }

    /// Walks along the keys of one server, as far as one `SCAN` does. A cursor is a server and its scan cursor.
    async fn scan(&self, filter: &Filter) -> Result<Page, StoreError> {
        if !filter.scan {
            let message = "Redis has no order of keys to walk by: ask for a scan of all keys (`Filter::scan`), which may miss \
                           records and repeat them";
            return Err(StoreError::new(StoreErrorKind::Unsupported, message));
        }
        let (server, place) = match &filter.after {
            None => ("", "0"),
            Some(cursor) => cursor.as_str().rsplit_once('|').ok_or_else(|| cursor.is_foreign())?,
        };
        if place.is_empty() || !place.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(filter.after.as_ref().map_or_else(keeps_changing, Cursor::is_foreign));
        }
        let line = self.line()?;
        let line = &*line;
        let prefix = &*self.core.prefix;
        let mut command = redis::cmd("SCAN");
        command.arg(place).arg("MATCH").arg(format!("{}*", escaped(&[prefix, &filter.prefix()].concat())));
        command.arg("COUNT").arg(SCANNED_AT_ONCE);
        let asked = line.route.ask_in_turn(server, RedisCommand::plain(command)).await;
        let (server, found, following) = asked.map_err(failed)?;
        let (place, keys) = scanned(&found).ok_or_else(|| unexpected(&found))?;
        let names: Vec<String> = keys.into_iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        let mut looks: Vec<_> = names.iter().map(|key| Box::pin(self.glance(line, Name { prefix: "", key }))).collect();
        let looks = crate::combine::all(&mut looks).await;
        let mut page = Page::default();
        for (name, look) in names.iter().zip(looks) {
            match look {
                // Another application keeps a value of another type under such a name.
                Err(error) if error.kind() != StoreErrorKind::Corrupt => return Err(error),
                found => page.add(filter, name.strip_prefix(prefix).unwrap_or_default(), found),
            }
        }
        page.next = match (place, following) {
            ("0", following) => following.map(|server| Cursor::new(format!("{server}|0"))),
            (place, _) => Some(Cursor::new(format!("{server}|{place}"))),
        };
        Ok(page)
    }

    /// Returns the record of `name`, without its result; with it if the record can't be read otherwise.
    async fn glance(&self, line: &Connections, name: Name<'_>) -> Result<Option<Inspection>, StoreError> {
        let asked = ask(&self.core.scripts().glance, name, |command| {
            command.arg(format::START_BYTES);
        });
        let found = line.route.run(name, Op::Read(asked)).await.map_err(failed)?;
        let Value::Array(parts) = &found else { return Err(unexpected(&found)) };
        let [Value::BulkString(start), Value::Int(len), Value::Int(left), Value::Int(expires_at)] = &parts[..] else {
            return Err(unexpected(&found));
        };
        if *len == 0 {
            return Ok(None);
        }
        let start = Bytes::copy_from_slice(start);
        let record = format::decode_start(&start, usize::try_from(*len).unwrap_or_default()).map_err(corrupt);
        match record.and_then(|record| inspection(record, &start, *left, *expires_at)) {
            Ok(found) => Ok(Some(found)),
            Err(_) => Ok(self.look_at(line, name, Op::Read).await?.map(|stored| stored.inspection())),
        }
    }

    /// Reads the record, decides, and writes if the record is unchanged.
    async fn try_decide(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        let line = self.line()?;
        let (limits, clock) = (&self.core.limits, self.core.clock());
        let name = self.name_of(&decision.key);
        for _ in 0..LOOKS {
            let Some(stored) = self.look_at(&line, name, Op::Read).await? else {
                return Ok(DecisionAnswer::NoRecord);
            };
            let found = stored.inspection();
            let value = match found.decide(decision) {
                Ruling::Answer(refused) => return Ok(refused),
                Ruling::Replace(with) => format::encode(&with),
                Ruling::Remove => Vec::new(),
            };
            limits.check(value.len(), clock)?;
            let asked = match found.damage {
                Some(_) => self.removal(name, &stored),
                None => self.replacement(name, decision, &found.record, &stored, &value),
            };
            let decided = line.route.run(name, Op::Write(asked)).await;
            match written(&limits.learn(value.len(), decided, clock)?)? {
                Verdict::Applied => return Ok(DecisionAnswer::Applied),
                Verdict::Refused => {}
            }
        }
        Err(keeps_changing())
    }

    /// Replaces the record that was found by `value`, or removes it if `value` is empty.
    fn replacement(
        &self,
        name: Name<'_>,
        decision: &Decision,
        met: &Record,
        stored: &StoredValue,
        value: &[u8],
    ) -> RedisCommand {
        let seen = format::identity(&stored.value).unwrap_or_default();
        let lapsed = match met.state {
            State::Pending { ttl, .. } if !decision.ends_live_lease() => millis(ttl).to_string(),
            _ => String::new(),
        };
        ask(&self.core.scripts().decide, name, |command| {
            command.arg(&seen[..]).arg(&lapsed).arg(value).arg(&*self.core.terms.channel);
        })
    }

    /// Removes a value that can't be read.
    fn removal(&self, name: Name<'_>, met: &StoredValue) -> RedisCommand {
        ask(&self.core.scripts().remove, name, |command| {
            command.arg(&met.value[..]).arg(u8::from(met.expires())).arg(&*self.core.terms.channel);
        })
    }

    /// Renews the `leases` in `group`, in one call of the script. In a cluster they are of one slot.
    async fn renew_group(
        &self,
        line: &Connections,
        leases: &[Lease],
        group: &[LeaseIndex],
        answer: &Answers<'_>,
    ) -> Result<(), StoreError> {
        match self.ask_to_renew(line, leases, group).await {
            // Nothing was renewed. Each lease alone can be.
            Err(failure) if failure.is_split_slot() && group.len() > 1 => {
                let each = group.chunks(1).map(|one| async move {
                    let answers = self.ask_to_renew(line, leases, one).await;
                    renewed(one, answers, answer)
                });
                join_all(each).await.into_iter().collect()
            }
            answers => renewed(group, answers, answer),
        }
    }

    fn ask_to_renew<'a>(&'a self, line: &'a Connections, leases: &'a [Lease], group: &[LeaseIndex]) -> OpFuture<'a> {
        let some = || group.iter().map(|(_, at)| &leases[*at]);
        let names = some().map(|lease| self.name_of(&lease.key));
        let asked = RedisCommand::script(&self.core.scripts().renew, names, |command| {
            for lease in some() {
                command.arg(&attempt_of(lease)[..]).arg(millis(lease.duration.saturating_add(lease.ttl)));
            }
        });
        line.route.run(self.name_of(&leases[group[0].1].key), Op::Renew(asked))
    }
}

/// Returns owner token and number of an attempt, side by side as in its record.
fn attempt_of(lease: &Lease) -> [u8; 20] {
    let mut attempt = [0; 20];
    attempt[..16].copy_from_slice(lease.owner.as_bytes());
    attempt[16..].copy_from_slice(&lease.attempt.to_be_bytes());
    attempt
}

/// The slot of a lease's key (0 outside a cluster), and the index of the lease in the batch.
type LeaseIndex = (u16, usize);

/// Passes on the answers to one call.
fn renewed(group: &[LeaseIndex], answers: OpAnswer, answer: &Answers<'_>) -> Result<(), StoreError> {
    let answers = match answers.map_err(failed)? {
        Value::BulkString(answers) if answers.len() == group.len() => answers,
        other => return Err(unexpected(&other)),
    };
    let mut result = Ok(());
    for ((_, at), byte) in group.iter().zip(answers) {
        match byte {
            b'1' => answer(*at, Verdict::Applied),
            b'0' => answer(*at, Verdict::Refused),
            _ => result = Err(damaged()),
        }
    }
    result
}

/// The value under a name.
struct StoredValue {
    value: Bytes,
    /// Milliseconds until the value expires; negative if it does not.
    left: i64,
    /// The record, or the reason why the value can't be read as a record.
    found: Result<Inspection, StoreError>,
}

impl StoredValue {
    fn expires(&self) -> bool {
        self.left >= 0
    }

    /// Returns the record as an operator sees it.
    fn inspection(&self) -> Inspection {
        match &self.found {
            Ok(found) => found.clone(),
            Err(why) => {
                let expires_in = u64::try_from(self.left).map_or(Duration::MAX, Duration::from_millis);
                let stored: [&[u8]; 2] = [&self.value, &[u8::from(self.expires())]];
                Inspection { expires_in, ..Inspection::damaged(why.to_string(), stored) }
            }
        }
    }
}

/// Makes the inspection of a record whose retention ends in `left` milliseconds, at `expires_at` by the server's clock.
/// Each is negative if there is no such time.
fn inspection(record: Record, value: &Bytes, left: i64, expires_at: i64) -> Result<Inspection, StoreError> {
    // Negative without an expiry: a record without a lease is then kept forever.
    let expires_in = u64::try_from(left).map_or(Duration::MAX, Duration::from_millis);
    let [mut seen, mut began] = format::times(value);
    let lapses_in = match record.state {
        State::Pending { .. } if left < 0 => return Err(damaged()),
        State::Pending { lease, ttl, .. } => {
            // Not renewed yet: its retention runs since the attempt began.
            let since = u64::try_from(expires_at).ok().and_then(|at| at.checked_sub(millis(lease) + millis(ttl)));
            began = began.or(since);
            seen = seen.or(began);
            Some(expires_in.saturating_sub(ttl))
        }
        _ => None,
    };
    let now = expires_at.checked_sub(left).filter(|_| left >= 0 && expires_at >= 0);
    let now = now.and_then(|now| u64::try_from(now).ok());
    let ago = |at: Option<u64>| Some(Duration::from_millis(now?.saturating_sub(at?)));
    Ok(Inspection::new(record, expires_in, lapses_in).since(ago(seen), ago(began)))
}

/// Returns a pattern that matches only this text.
fn escaped(text: &str) -> String {
    let is_special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '^' | '-' | '\\');
    text.chars().flat_map(|c| is_special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// Returns the next cursor and the keys in an answer of `SCAN`.
fn scanned(answer: &Value) -> Option<(&str, Vec<&[u8]>)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::BulkString(place), Value::Array(keys)] = &parts[..] else { return None };
    // An answer may contain the same key twice.
    let mut keys = keys
        .iter()
        .map(|it| {
            let Value::BulkString(key) = it else { return None };
            Some(key.as_slice())
        })
        .collect::<Option<Vec<_>>>()?;
    keys.sort_unstable();
    keys.dedup();
    Some((std::str::from_utf8(place).ok()?, keys))
}

fn keeps_changing() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, format!("the record kept changing; gave up after {LOOKS} looks"))
}

/// Calls a script on one key.
fn ask(script: &Script, name: Name<'_>, args: impl FnOnce(&mut Cmd)) -> RedisCommand {
    RedisCommand::script(script, std::iter::once(name), args)
}

/// Returns the time at which `lease` was reserved, in milliseconds since 1970, if its record may be unchanged since
/// then: a renewal, which is due after a third of the lease, changes it.
fn unchanged_since(lease: &Lease, clock: &dyn Clock) -> Option<u64> {
    let reserved_at = lease.reserved_at.millis()?;
    let age = Duration::from_millis(now(clock).saturating_sub(reserved_at));
    (age < lease.duration / 3).then_some(reserved_at)
}

/// Returns milliseconds since 1970 by the wall clock of this process.
fn now(clock: &dyn Clock) -> u64 {
    u64::try_from(wall_millis(clock)).unwrap_or_default()
}

/// Returns whether `answer` would differ if the lease of the record still held.
fn depends_on_lease(answer: &Reservation) -> bool {
    matches!(answer, Reservation::Interrupted { .. } | Reservation::AttemptsExhausted { .. })
}

/// Checks the answer to a reservation. "In progress" may come from an unreplicated record. A result or our own
/// reservation may not: the caller relies on it.
fn looked(answer: OpAnswer, owner: OwnerToken) -> OpAnswer {
    match answer {
        Err(ExchangeFailure::Unreplicated(found, why)) => match *found {
            Value::BulkString(found) if is_of_another(&found, owner) => Ok(Value::BulkString(found)),
            found => Err(ExchangeFailure::Unreplicated(Box::new(found), why)),
        },
        answer => answer,
    }
}

/// Returns whether the record is an unfinished attempt of another owner, running or abandoned.
fn is_of_another(found: &[u8], owner: OwnerToken) -> bool {
    // Both values lead to an error. The decoder's error has more details.
    format::is_unfinished_of_another(found, owner).unwrap_or(true)
}

/// Returns whether the record found in place of another is an attempt of another owner whose lease still holds.
fn is_held_by_another(found: &[Value], owner: OwnerToken) -> bool {
    matches!(found, [Value::BulkString(record), Value::Int(1..)] if is_of_another(record, owner))
}

#[derive(Debug)]
enum TakeoverAnswer {
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

impl Store for RedisInner {
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
        self.core.terms.write_timeout()
    }

    fn context(&self) -> &StoreContext {
        &self.core.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let name = self.name_of(&lease.key);
            let asked = ask(&self.core.scripts().begin, name, |command| {
                command.arg(&attempt_of(lease)[..]);
                command.arg(millis(lease.ttl)).arg(millis(lease.duration.saturating_add(lease.ttl)));
            });
            written(&line.route.run(name, Op::Write(asked)).await.map_err(failed)?)
        })
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let line = &*line;
            // All calls are sent together, in one exchange (per node), and each is answered as soon as its answer
            // arrives. Calls are short, so that the server is not blocked. In a cluster a call names keys of one slot.
            let is_cluster = self.core.terms.one_key;
            let slot = |lease: &Lease| if is_cluster { slot_of(self.name_of(&lease.key)) } else { 0 };
            let mut places: Vec<LeaseIndex> = leases.iter().enumerate().map(|(at, lease)| (slot(lease), at)).collect();
            if is_cluster {
                places.sort_unstable();
            }
            let groups = places.chunk_by(|a, b| a.0 == b.0).flat_map(|of_slot| of_slot.chunks(RENEWED_AT_ONCE));
            let calls = groups.map(|group| self.renew_group(line, leases, group, answer));
            // Polls only the calls that are woken. With many thousands of calls, polling all of them after each answer
            // takes longer than the servers do.
            join_all(calls).await.into_iter().collect()
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let line = self.line()?;
            let (limits, clock) = (&self.core.limits, self.core.clock());
            let record = Record::after(lease, finish.state());
            let bytes = format::len(&record);
            limits.check(bytes, clock)?;
            // A large value is not sent twice if the record differs.
            let reserved_at = unchanged_since(lease, clock).filter(|_| bytes < SURE);
            let expected = reserved_at.map(|_| Record::reserved(lease));
            let name = self.name_of(&lease.key);
            let (expected, ttl_ms) = (expected.as_ref(), millis(lease.ttl));
            let write = RecordWrite { name, record: &record, reserved_at, expected, ttl_ms };
            let answer = line.route.run(name, Op::Finish(write)).await;
            written(&limits.learn(bytes, answer, clock)?)
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
            let name = self.name_of(&lease.key);
            let asked = ask(&self.core.scripts().release, name, |command| {
                command.arg(&lease.owner.as_bytes()[..]).arg(state).arg(refund).arg(millis(lease.ttl));
                command.arg(&*self.core.terms.channel);
            });
            let released = line.route.run(name, Op::Write(asked.keep_if_dropped())).await;
            written(&released.map_err(failed)?)
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let (line, clock) = (self.line()?, self.core.clock());
            let name = self.name_of(key);
            let until = clock.now().saturating_add(at_most);
            loop {
                let mark = async {
                    let asked = ask(&self.core.scripts().watch, name, |command| {
                        command.arg(&attempt.to_be_bytes()[..]);
                    });
                    let pending = line.route.run(name, Op::Read(asked)).await;
                    Ok(written(&pending.map_err(failed)?)? == Verdict::Applied)
                };
                line.wakeups.wait(&name.to_string(), until.saturating_since(clock.now()), clock, mark).await?;
                // The caller relies on a result: replicas have to confirm it, as in `looked`.
                let found = self.look_at(&line, name, Op::Write).await?.map(|stored| stored.found).transpose()?;
                let goes_on = found.as_ref().is_some_and(|it| it.record.is_pending() && it.attempt() == attempt);
                if !goes_on || clock.now() >= until {
                    return Ok(found);
                }
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let line = self.line()?;
            Ok(self.look_at(&line, self.name_of(key), Op::Read).await?.map(|stored| stored.inspection()))
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(self.try_decide(decision))
    }

    /// Does nothing: the server removes expired records.
    fn purge(&self, _: u32) -> StoreFuture<'_, u64> {
        StoreFuture::ready(Ok(0))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(self.scan(filter))
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            let line = self.line()?;
            line.route.ask_all(&RedisCommand::plain(redis::cmd("PING"))).await.map_err(failed)
        })
    }
}
