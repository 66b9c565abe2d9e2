//! The store: the promises of [`SqliteStore`], its handles, and its operations.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::batch::queue::{Answer, SqliteRequest, nonsense};
use super::batch::{Core, ThreadChoice};
use super::file::Database;
#[cfg(feature = "conformance")]
use super::{failure, sql};
use crate::clock::Clock;
use crate::combine::race;
use crate::key::Key;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Release, Reservation, ReserveRequest, Verdict,
};
use crate::store::{
    Answers, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture, store_of_shared,
};
use crate::sync::{PerProcess, SharedOnce};

/// A store in a SQLite file, which the processes of one host share.
///
/// - *Atomicity*: SQLite's transactions. Each reservation is decided under the lock of the file.
/// - *Clock*: the host's wall clock, which all processes of the host share, read under that lock. A step forward of
///   this clock ends leases and retentions earlier by the step, and a step back ends them later: let the clock be
///   slewed, not stepped. A renewal never shortens a confirmed lease.
/// - *Durability*: a confirmed write survives the death of every process. Under [`Full`] (the default) a confirmed
///   write survives a loss of power, too. Under [`Normal`] a loss of power undoes the commits since the last
///   checkpoint. Renewals of leases never wait for the disk.
/// - *Limits*: processes of one host, on a local disk: SQLite's locks don't hold over a network. Keys up to
///   [`Key::MAX_BYTES`], results up to `max_result_bytes`, and never more than 1 GB; a larger result is
///   [`StoreErrorKind::TooLarge`]. A full disk, or [`max_bytes`](super::SqliteOptions::max_bytes), is
///   [`StoreErrorKind::Full`]. New records, and [`purge`](SqliteStore::purge), remove expired records. SQLite reuses
///   the space of removed records, but the file never shrinks.
/// - *Cost*: two commits for a first run, and one look-up for a replay. Concurrent calls share commits. A heartbeat of
///   up to about a thousand leases is one transaction. A larger heartbeat takes several transactions of about 8 ms,
///   between which other writers get the lock. A completion in the same process wakes a waiting duplicate immediately;
///   a completion in another process wakes it within about 5 ms.
///
/// The records are in one table, `idem_records`, which may stand next to tables of the application. The store puts the
/// file in WAL mode, and the file stays in that mode. Removing or replacing the file while it is open makes every call
/// fail; copy the file with SQLite's own means. Clones share up to three threads, which work on the file: one writes,
/// one reads, and one renews leases and makes late writes. A replay runs on the thread of its caller if three
/// conditions hold: no other reservation is waiting for the reader thread, the result is not longer than 16 KB, and
/// recent reads took only microseconds, as they do while the file is in memory. With a slow disk, few replays run on
/// their callers' threads: slow reads may block callers for a twentieth of the time at most.
///
/// **Your own tables in the same file.** Only one transaction writes at a time. While one of your write transactions is
/// open, the store reserves no key, records no result and renews no lease; replays go on. So a lease must be longer
/// than your longest write transaction. If a transaction takes longer, leases lapse, but are rarely lost: the owner
/// tries every half millisecond to renew its leases, before all its other writes, and a call that has waited for the
/// lock waits 250 ms more before it takes over a lease that lapsed meanwhile. Only a call that starts just when the
/// transaction ends, and so has not waited, can take over such a lease before its owner renews it. Keep write
/// transactions short, and never hold one open while a handler waits for something else. To commit records together
/// with your own rows, use [`within`](SqliteStore::within).
///
/// **`fork`.** A child starts its own threads and connections when it first uses a store; the parent's stores are not
/// affected. The child first closes the connections of the stores that it has inherited. The child can close them only
/// if no call, no renewal and no late write was under way at the fork (call [`flush`](crate::StoreExt::flush) before
/// the fork). Otherwise every call in the child is [`StoreErrorKind::Misconfigured`]: SQLite's list of its locks is
/// wrong in the child, and writes would be lost. A store can't see your own connections to the file: close them before
/// you fork.
///
/// ```
/// # async fn open(folder: &std::path::Path) -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::SqliteStore;
/// let store = SqliteStore::open(folder.join("operations.db")).await?;
/// # Ok(()) }
/// # let folder = std::env::temp_dir().join(format!("idem-doc-sqlite-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(open(&folder)).unwrap();
/// # std::fs::remove_dir_all(&folder).unwrap();
/// ```
///
/// [`Full`]: super::Synchronous::Full
/// [`Normal`]: super::Synchronous::Normal
#[derive(Clone)]
pub struct SqliteStore(Arc<SqliteInner>);

impl SqliteStore {
    pub(super) fn new(core: Arc<Core>, clock: Arc<dyn Clock>) -> Self {
        let context = StoreContext::new("sqlite", clock).system("sqlite").held_by(&core.state.database.settings.holder);
        Self(SqliteInner::new(Arc::new(OpenFile(PerProcess::new(core))), Arc::new(context), ThreadChoice::Calls))
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

store_of_shared!(SqliteStore);

struct SqliteInner {
    this: Weak<SqliteInner>,
    context: Arc<StoreContext>,
    open: Arc<OpenFile>,
    lane: ThreadChoice,
    /// The handle for upkeep, made at first use; empty in the handle for upkeep itself.
    upkeep: SharedOnce<Arc<SqliteInner>>,
}

/// The open file, which the handles for calls and for upkeep share. When the file is dropped, the threads of this
/// process end.
struct OpenFile(PerProcess<Arc<Core>>);

impl OpenFile {
    /// Returns the path and the settings of the file. A forked child uses the path and the settings of its parent.
    fn database(&self) -> &Database {
        &self.0.first().state.database
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(core) = self.0.known() {
            core.close();
        }
    }
}

impl fmt::Debug for SqliteInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self.open.database();
        f.debug_struct("SqliteStore")
            .field("path", &database.path)
            .field("table", &database.settings.table)
            .finish_non_exhaustive()
    }
}

impl SqliteInner {
    fn new(open: Arc<OpenFile>, context: Arc<StoreContext>, lane: ThreadChoice) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { this: Weak::clone(this), context, open, lane, upkeep: SharedOnce::new() })
    }

    /// Returns the queues of this process's threads. Makes them at the first use after a fork.
    fn core(&self) -> &Arc<Core> {
        self.open.0.here_or(|parents| Arc::new(Core::new(Arc::clone(&parents.state.database))))
    }

    fn ask(&self, ask: SqliteRequest) -> impl Future<Output = Result<Answer, StoreError>> {
        self.core().ask(self.lane, ask)
    }

    /// Returns the record of `key`, if it can be read.
    async fn look(&self, core: &Arc<Core>, key: &Key) -> Result<Option<Inspection>, StoreError> {
        readable(self.examine(core, key).await?)
    }

    /// Returns the record of `key` as an operator sees it.
    async fn examine(&self, core: &Arc<Core>, key: &Key) -> Result<Option<Inspection>, StoreError> {
        match core.ask(self.lane, SqliteRequest::Inspect(key.clone())).await? {
            Answer::Inspection(inspection) => Ok(inspection),
            other => Err(nonsense(&other)),
        }
    }

    /// Runs an operation whose answer is a [`Verdict`].
    async fn write(&self, ask: SqliteRequest) -> Result<Verdict, StoreError> {
        match self.ask(ask).await? {
            Answer::Write(write) => Ok(write),
            other => Err(nonsense(&other)),
        }
    }
}

/// Converts a damaged record into an error.
fn readable(found: Option<Inspection>) -> Result<Option<Inspection>, StoreError> {
    let readable = found.map(Inspection::readable).transpose();
    readable.map_err(|why| StoreError::new(StoreErrorKind::Corrupt, why))
}

impl Store for SqliteInner {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        if self.lane == ThreadChoice::Upkeep {
            return self.handle();
        }
        let new = || Self::new(Arc::clone(&self.open), Arc::clone(&self.context), ThreadChoice::Upkeep);
        Arc::clone(self.upkeep.get_or_init(new)) as _
    }

    fn namespace(&self) -> &str {
        &self.open.database().settings.namespace
    }

    fn response_timeout(&self) -> Duration {
        self.open.database().settings.response_timeout
    }

    fn context(&self) -> &StoreContext {
        &self.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move {
            match self.core().reserve(self.lane, request).await? {
                Answer::Reservation(reservation) => Ok(reservation),
                other => Err(nonsense(&other)),
            }
        })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(SqliteRequest::Begin(lease.clone())))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move { self.core().renew(self.lane, leases, answer).await })
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(SqliteRequest::Append(lease.clone(), journal.clone())))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(SqliteRequest::Finish(lease.clone(), finish.clone())))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(SqliteRequest::Release(lease.clone(), release)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let core = self.core();
            // The duplicate is counted before its first read: from now on the reader thread checks for commits of other
            // handles.
            let _counted = core.state.count_waiter();
            let waiter = core.state.waiting.join(key.as_str());
            let ended = async {
                loop {
                    let mut woken = pin!(waiter.woken());
                    woken.as_mut().enable();
                    match self.look(core, key).await? {
                        Some(found) if found.record.is_pending() && found.attempt() == attempt => woken.await,
                        found => return Ok(found),
                    }
                }
            };
            match race(ended, self.context.clock().sleep(at_most)).await {
                Some(ended) => ended,
                None => self.look(core, key).await,
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move { self.examine(self.core(), key).await })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move {
            match self.core().ask(self.lane, SqliteRequest::Decide(decision.clone())).await? {
                Answer::Decided(decided) => Ok(decided),
                other => Err(nonsense(&other)),
            }
        })
    }

    /// Removes expired records. Reservations that write also clean up two rows each, so only a store that is no longer
    /// used needs `purge`.
    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        StoreFuture::new(async move {
            match self.core().ask(self.lane, SqliteRequest::Purge(batch)).await? {
                Answer::Removed(removed) => Ok(removed),
                other => Err(nonsense(&other)),
            }
        })
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(async move {
            match self.ask(SqliteRequest::List(filter.clone())).await? {
                Answer::Page(page) => Ok(page),
                other => Err(nonsense(&other)),
            }
        })
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            match self.ask(SqliteRequest::Ping).await? {
                Answer::Pong => Ok(()),
                other => Err(nonsense(&other)),
            }
        })
    }
}

/// Inspects and reserves `request.key` at `now`, for tests with an untrusted row on `connection`.
#[cfg(feature = "conformance")]
pub fn meet_row(
    connection: &rusqlite::Connection,
    request: &ReserveRequest,
    now: i64,
) -> (Result<Option<Inspection>, StoreError>, Result<Reservation, StoreError>) {
    let mut table = sql::Table::new(connection, sql::NAME);
    let seen = table.inspect(&request.key, now).map_err(|trouble| failure::failed(&trouble));
    let seen = seen.and_then(readable);
    (seen, table.reserve(request, now).map_err(|trouble| failure::failed(&trouble)))
}
