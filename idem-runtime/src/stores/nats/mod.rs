//! Records in a key-value bucket of NATS JetStream.
//!
//! A record is the last message on its subject. Every write names the sequence number of the message that it replaces
//! (`Nats-Expected-Last-Subject-Sequence`), so the stream decides which write wins. The server removes a message after
//! its retention (`Nats-TTL`).

mod access;
mod bucket;
mod failure;
mod held;
mod link;
mod message;
mod operator;
mod options;
mod outbox;
mod reservation;
mod sender;
mod server_clock;
#[cfg(feature = "conformance")]
pub(crate) mod stored;
mod subject;
mod wake;
mod write;

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::iter;

use self::access::{Access, NatsCore};
use self::failure::{corrupt, misconfigured};
use self::link::Link;
use self::message::LastMessage;
pub use self::options::NatsOptions;
use self::write::Change;
use crate::combine::race;
use crate::key::Key;
use crate::kit::per_runtime::PerRuntime;
use crate::record::format;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Release, Reservation, ReserveRequest, Verdict,
};
use crate::store::{Answers, Filter, Page, Store, StoreContext, StoreError, StoreFuture, store_of_shared};
use crate::sync::SharedOnce;

/// Largest number of renewals of one call in flight.
const RENEWED_AT_ONCE: usize = 256;
/// First pause of a waiting duplicate between two reads of its record; the pause grows up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a message on the subject of the record, which the stream may not have stored yet.
const PAUSE_AFTER_HINT: Duration = Duration::from_millis(1);

/// A store in a key-value bucket of JetStream, on NATS 2.11 or newer.
///
/// - *Atomicity*: the stream stores a message only if the last message on its subject has the sequence number that the
///   write names. Reads ask the leader of the stream; a stream without replicas is read directly (`allow_direct`),
///   until a mirror (`mirror_direct`) answers such a read. An answer from before a write that the stream has confirmed
///   is an error, never a lost lease.
/// - *Clock*: the clock of the stream's leader. Each message holds the time at which the leader stored it, and the
///   leader's answer to a question about the stream holds its present time. A lease has lapsed, and a retention has
///   ended, only if such an answer shows it. After a failover the clock of the new leader applies; each server removes
///   messages by its own clock.
/// - *Durability*: by default a server confirms a write before the write is on its disk (`sync_interval`, 2 minutes).
///   The kill of a server loses nothing. A machine that loses power can lose the records of the last minutes, and their
///   operations can then run again. With 3 replicas ([`num_replicas`](NatsOptions::num_replicas)) a majority has
///   received each confirmed write, but one power loss together with a pause or a partition of another server can still
///   lose confirmed records. For payments, set `sync_interval: always` on every server: it writes to the disk before
///   each answer, and takes more time.
/// - *Unreadable messages*: a server that can't read a message (an error of its disk, no free file descriptor) answers
///   that there is none, and lets a write of a new key replace the message: the operation can run again. Give the
///   server enough descriptors (`nofile`), and watch its log for such errors.
/// - *Limits*: a record is one message, so a result that does not fit into `max_payload` of the server (default: 1 MB)
///   or `max_msg_size` of the stream is refused before it is sent
///   ([`StoreErrorKind::TooLarge`](crate::StoreErrorKind::TooLarge)), and the operation is recorded without its result.
///   A bucket whose `max_bytes`, or the limits of the account, are used up forgets no record and refuses every write
///   that takes more room: new records, and also the first renewal or mark of an attempt, and most results. A line of
///   the server (`max_control_line`) must hold a subject of 3.5 KB.
/// - *Cost*: two round trips for a first run, two for a replay (one if most calls are replays), two for a duplicate of
///   a running attempt, four for a takeover, and one for each lease at each beat. The renewals of one beat are sent
///   together. A write of a record that another process has changed takes two more. A record costs its message and its
///   headers, about 300 bytes without a result.
///
/// [`connect`](NatsStore::connect) creates the stream `KV_<bucket>` unless it exists, and refuses a stream whose
/// settings could lose or change a record: another history than 1, `max_age`, `discard: old` with a limit, messages in
/// memory, `subject_delete_marker_ttl`, mirrors and sources. A value that another program deletes with the tools for
/// buckets is an absent record.
///
/// The login needs the right to subscribe to its inbox and to `$KV.<bucket>.>`, and the right to publish:
///
/// | on | for |
/// |---|---|
/// | `$KV.<bucket>.>`, `$JS.API.STREAM.INFO.KV_<bucket>`, `$JS.API.STREAM.MSG.GET.KV_<bucket>` | all calls |
/// | `$JS.API.DIRECT.GET.KV_<bucket>.>` | cheaper reads of a stream without replicas |
/// | `$JS.API.STREAM.CREATE.KV_<bucket>` | the creation of the stream |
/// | `$JS.API.CONSUMER.*.KV_<bucket>.>`, `$JS.API.CONSUMER.MSG.NEXT.KV_<bucket>.>` | lists of records |
/// | the subjects of [`outbox`](NatsOptions::outbox) | messages of handlers in the stream of the bucket |
///
/// A duplicate that waits for another process subscribes to the subject of the record, and reads the record when a
/// message may have changed it, and once a second.
///
/// Clones share their connection, which reconnects. Each tokio runtime that uses the store has its own connection,
/// which ends with it; renewals and late writes have a separate connection.
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::NatsStore;
/// let store = NatsStore::connect("nats://user:password@localhost:4222").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct NatsStore(Arc<NatsInner>);

impl NatsStore {
    /// Connects to the NATS servers at `url`, and creates the bucket `idem` unless it exists. Several servers of a
    /// cluster are separated by commas. A URL may hold a user and a password, or a token in place of the user; `tls://`
    /// encrypts the connection. Unless the process has a default cryptography provider of rustls, `connect` installs
    /// that of `ring`: an application that installs one does so before.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`](crate::StoreErrorKind::Misconfigured) if the server is older than NATS 2.11,
    /// if JetStream is off, if the login is refused, or if the stream has settings that could lose or change a record.
    /// Otherwise the errors of any call.
    ///
    /// # Cancel safety
    /// The call may be repeated.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Returns the default settings, to be changed before connecting.
    pub fn options() -> NatsOptions {
        NatsOptions::default()
    }
}

impl fmt::Debug for NatsStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

store_of_shared!(NatsStore);

/// One handle of a store. Each handle has separate connections, so that no handle delays another.
struct NatsInner {
    this: Weak<NatsInner>,
    core: Arc<NatsCore>,
    runtimes: PerRuntime<Arc<Link>>,
    /// The handle for renewals and late writes, made at its first use; `None` in that handle itself.
    upkeep: Option<SharedOnce<Arc<NatsInner>>>,
}

impl fmt::Debug for NatsInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsStore")
            .field("bucket", &self.core.bucket.name)
            .field("namespace", &self.core.namespace)
            .finish_non_exhaustive()
    }
}

impl NatsInner {
    /// Makes the first handle of a store. `connected` is the connection of the current runtime, if there is one.
    fn new(core: Arc<NatsCore>, connected: Option<Arc<Link>>) -> Arc<Self> {
        let store = Self::on(core, Some(SharedOnce::new()));
        if let Some(connected) = connected {
            store.runtimes.here(|_| connected);
        }
        store
    }

    fn on(core: Arc<NatsCore>, upkeep: Option<SharedOnce<Arc<Self>>>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { this: this.clone(), core, runtimes: PerRuntime::default(), upkeep })
    }

    /// Returns the shared state and the connection of the current runtime, for one operation. Fails outside a tokio
    /// runtime.
    fn access(&self) -> Result<Access<'_>, StoreError> {
        let core = &*self.core;
        let link = self.runtimes.here(|_| Arc::default()).map(|link| Arc::clone(&link));
        let link = link.ok_or_else(|| misconfigured("no tokio runtime: call the store from inside one"))?;
        Ok(Access { core, link, until: core.clock().now().saturating_add(core.response_timeout) })
    }

    /// Returns the record on `subject`, unless its retention has ended.
    async fn look(&self, subject: &str) -> Result<Option<Inspection>, StoreError> {
        let access = self.access()?;
        let LastMessage::Record(stored) = access.get(subject).await? else { return Ok(None) };
        let record = format::decode(&stored.body).map_err(corrupt)?;
        let standing = access.standing(&stored, &record).await?;
        Ok(standing.map(|standing| operator::inspection(&stored, record, standing)))
    }

    /// Reads the record again and again until attempt number `attempt` is no longer pending. Returns the last record
    /// read.
    async fn watch(&self, subject: &str, attempt: u32) -> Result<Option<Inspection>, StoreError> {
        let (core, clock) = (&*self.core, self.core.clock());
        let waiter = core.waiting.here().join(subject);
        let access = self.access()?;
        let _watch = match access.client().await {
            Ok(client) => access.link.watches.join(client, subject, &core.waiting).await,
            Err(_) => None,
        };
        let mut pause = FIRST_PAUSE;
        loop {
            // The wake-up is enabled before the read, so that an end of the attempt in between is not missed.
            let mut woken = pin!(waiter.woken());
            woken.as_mut().enable();
            match self.look(subject).await {
                Ok(Some(found)) if found.record.is_pending() && found.attempt() == attempt => {}
                Ok(found) => return Ok(found),
                Err(error) if error.is_transient() => {}
                Err(error) => return Err(error),
            }
            let hint = race(woken, clock.sleep(pause)).await.is_some();
            pause = if hint { PAUSE_AFTER_HINT } else { (pause * 2).min(LONGEST_PAUSE) };
        }
    }

    async fn change(&self, lease: &Lease, change: Change<'_>) -> Result<Verdict, StoreError> {
        write::change(&self.access()?, lease, change).await
    }
}

impl Store for NatsInner {
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
        &self.core.namespace
    }

    fn response_timeout(&self) -> Duration {
        self.core.response_timeout
    }

    fn context(&self) -> &StoreContext {
        &self.core.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move { reservation::reserve(&self.access()?, request).await })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.change(lease, Change::Begin))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let mut outcome = Ok(());
            for (number, batch) in leases.chunks(RENEWED_AT_ONCE).enumerate() {
                let mut renewals = Vec::with_capacity(batch.len());
                for (at, lease) in batch.iter().enumerate() {
                    let renewal = self.change(lease, Change::Renew);
                    let at = number * RENEWED_AT_ONCE + at;
                    renewals.push(async move { renewal.await.map(|verdict| answer(at, verdict)) });
                }
                let mut renewals = pin!(iter(renewals).buffer_unordered(RENEWED_AT_ONCE));
                let mut is_renewed = false;
                while let Some(renewed) = renewals.next().await {
                    is_renewed |= renewed.is_ok();
                    outcome = outcome.and(renewed);
                }
                // If a whole batch has failed, the others would take a time limit each, and fail as well.
                if !is_renewed {
                    break;
                }
            }
            outcome
        })
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.change(lease, Change::Append(journal)))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.change(lease, Change::Finish(finish)))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.change(lease, Change::Release(release)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let subject = self.core.subject_of(key);
            match race(self.watch(&subject, attempt), self.core.clock().sleep(at_most)).await {
                Some(ended) => ended,
                None => self.look(&subject).await,
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let access = self.access()?;
            operator::examine(&access, &self.core.subject_of(key)).await
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

    /// Asks the leader of the stream for the settings of the stream, and checks them.
    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            let access = self.access()?;
            access.ask_stream(|info, _| self.core.bucket.check(info)).await?;
            Ok(())
        })
    }
}
