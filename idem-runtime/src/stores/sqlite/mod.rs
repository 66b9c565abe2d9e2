//! Records in a SQLite file.
//!
//! A record is a row, and each operation is a statement or two on it ([`table`]). Concurrent calls share transactions, and
//! with them the wait for the disk ([`threads`]).

mod connect;
mod link;
mod queue;
mod session;
mod table;
mod threads;
mod within;

use std::fmt;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use self::connect::Database;
pub use self::connect::{SqliteOptions, Synchronous};
use self::queue::{Answer, Ask};
use self::threads::{Core, Lane};
pub use self::within::InSqlite;
use crate::clock::Clock;
use crate::future::race;
use crate::key::Key;
use crate::record::{Finish, Inspection, Lease, Release, Reservation, ReserveRequest, Verdict};
use crate::store::{Answers, Heartbeats, Store, StoreError, StoreErrorKind, StoreFuture, forward};
use crate::sync::PerProcess;

/// A store in a SQLite file, which the processes of one host share.
///
/// - *Atomicity*: SQLite's transactions; a reservation decides under the lock of the file.
/// - *Clock*: the host's wall clock, which all its processes share, read under that lock. A step forward ends leases and
///   retentions earlier by the step, a step back later: let the clock be slewed, not stepped. No renewal shortens what an
///   earlier one has confirmed.
/// - *Durability*: what is confirmed survives the death of every process. Under [`Synchronous::Full`] (the default) it
///   survives a loss of power, too; under [`Synchronous::Normal`] a loss of power takes back what came after the last
///   checkpoint. Renewals of leases never wait for the disk.
/// - *Limits*: processes of one host, on a local disk: SQLite's locks don't hold over a network. Keys up to
///   [`Key::MAX_BYTES`], results up to `max_result_bytes`, in any case up to 1 GB; a larger result is
///   [`StoreErrorKind::TooLarge`]. A full disk, or [`max_bytes`](SqliteOptions::max_bytes), is [`StoreErrorKind::Full`].
///   Expired records are cleaned up as new ones arrive, and by [`purge`](SqliteStore::purge); their room is used again, the
///   file never shrinks.
/// - *Cost*: two commits for a first run, which concurrent calls share; one look-up for a replay; one transaction for a
///   heartbeat of up to some thousand leases. A duplicate that waits is woken at once by its own store, and within some
///   5 ms by others.
///
/// The records are in one table, `idem_records`, which may lie beside tables of the application's own. The file is put in
/// WAL mode and stays in it. Removing or replacing it while it is open makes every call fail; copy it with SQLite's own
/// means. Clones share up to three threads, which do all work on the file: one writes, one reads, and one renews leases and
/// makes late writes.
///
/// **Tables of your own in the same file.** Only one transaction writes at a time. While one of yours is open, no key is
/// reserved, no result recorded and no lease renewed; replays go on. So a lease must be longer than your longest write
/// transaction. If a transaction takes longer anyway, leases lapse, but are rarely lost: the owner tries every half
/// millisecond to renew them, before all its other writes, and a call that has waited for the lock waits 250 ms more before
/// it takes over a lease that lapsed meanwhile. Only a process that comes at just that moment, without having waited, can
/// be faster. Keep write transactions short, and never hold one open while a handler waits for something else; to commit
/// records together with rows of your own, use [`within`](SqliteStore::within).
///
/// **`fork`.** A child starts threads and connections of its own when it first uses a store, and its parent goes on. The
/// child first closes the connections of the stores that it has inherited. It can do so only if no call, no renewal and no
/// late write was under way at the fork ([`flush`](SqliteStore::flush) first). Otherwise every call in the child is
/// [`StoreErrorKind::Misconfigured`]: SQLite's record of its locks is wrong there and would lose writes. The same holds for
/// your own connections to the file, which a store does not know: close them before you fork.
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
#[derive(Clone)]
pub struct SqliteStore(Arc<Shared>);

impl SqliteStore {
    /// Opens the file at `path`, and creates it and its table if they are missing. [`SqliteOptions`] has settings.
    ///
    /// Any number of handles and processes of this host may have it open.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] if the file or its folder can't be read and written, is not a SQLite database, or
    /// holds a table `idem_records` that is not this library's or of a later release; [`StoreErrorKind::Unavailable`] if
    /// another process keeps the file locked.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::options().open(path).await
    }

    /// Settings for a store.
    pub fn options() -> SqliteOptions {
        SqliteOptions::default()
    }

    fn new(core: Arc<Core>, clock: Arc<dyn Clock>) -> Self {
        Self(Shared::new(Arc::new(Open(PerProcess::new(core))), Arc::new(Heartbeats::new(clock)), Lane::Calls))
    }

    /// Waits until late writes and renewals are done (see [`Heartbeats::flush`]), and all earlier requests to the file.
    pub async fn flush(&self) {
        self.0.heartbeats.flush().await;
        self.0.core().pass().await;
    }

    /// Looks at up to `batch` records that may have expired and removes those that have. Returns how many it removed. Every
    /// reservation that is written does the same for two records, so this is for a store that is no longer used.
    ///
    /// # Errors
    /// [`StoreError`] if the file did not confirm.
    pub async fn purge(&self, batch: u32) -> Result<u64, StoreError> {
        match self.0.core().ask(Lane::Calls, Ask::Purge(batch)).await? {
            Answer::Removed(removed) => Ok(removed),
            other => Err(nonsense(&other)),
        }
    }

    fn shared(&self) -> &Shared {
        &self.0
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

forward! { () SqliteStore => shared; }

struct Shared {
    this: Weak<Shared>,
    heartbeats: Arc<Heartbeats>,
    open: Arc<Open>,
    lane: Lane,
    /// The handle with the other lane.
    upkeep: OnceLock<Arc<Shared>>,
}

/// Shared by the handles of both lanes. When it is dropped, the threads of this process end.
struct Open(PerProcess<Arc<Core>>);

impl Open {
    /// The file, which is the same for all processes.
    fn database(&self) -> &Database {
        &self.0.first().database
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(core) = self.0.known() {
            core.close();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self.open.database();
        f.debug_struct("SqliteStore")
            .field("path", &database.path)
            .field("table", &database.options.table)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn new(open: Arc<Open>, heartbeats: Arc<Heartbeats>, lane: Lane) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { this: Weak::clone(this), heartbeats, open, lane, upkeep: OnceLock::new() })
    }

    /// The threads of this process.
    fn core(&self) -> &Arc<Core> {
        self.open.0.here_or(|parents| Arc::new(Core::new(Arc::clone(&parents.database))))
    }

    fn ask(&self, ask: Ask) -> impl Future<Output = Result<Answer, StoreError>> {
        self.core().ask(self.lane, ask)
    }

    /// Asks for a compare-and-set.
    async fn write(&self, ask: Ask) -> Result<Verdict, StoreError> {
        match self.ask(ask).await? {
            Answer::Write(write) => Ok(write),
            other => Err(nonsense(&other)),
        }
    }
}

/// The error for an answer to another question. The answer may hold a payload and is not shown.
fn nonsense(_: &Answer) -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, "the thread of the store answered another question")
}

impl Store for Shared {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        if self.lane == Lane::Upkeep {
            return self.handle();
        }
        let new = || Self::new(Arc::clone(&self.open), Arc::clone(&self.heartbeats), Lane::Upkeep);
        Arc::clone(self.upkeep.get_or_init(new)) as _
    }

    fn namespace(&self) -> &str {
        &self.open.database().options.namespace
    }

    fn response_timeout(&self) -> Duration {
        self.open.database().options.response_timeout
    }

    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move {
            match self.core().reserve(self.lane, request.clone()).await? {
                Answer::Reservation(reservation) => Ok(reservation),
                other => Err(nonsense(&other)),
            }
        })
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move { self.core().renew(self.lane, leases, answer).await })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(Ask::Finish(lease.clone(), finish.clone())))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(Ask::Release(lease.clone(), release)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let core = self.core();
            // Counted before the first look: from now on the reader looks for commits of others.
            let _counted = core.count_waiter();
            let waiter = core.waiting.join(key.as_str());
            let ended = async {
                loop {
                    let mut woken = pin!(waiter.woken());
                    woken.as_mut().enable();
                    match core.ask(self.lane, Ask::IsPending(key.clone(), attempt)).await? {
                        Answer::IsPending(true) => woken.await,
                        Answer::IsPending(false) => return Ok(()),
                        other => return Err(nonsense(&other)),
                    }
                }
            };
            race(ended, self.heartbeats.clock().sleep(at_most)).await.unwrap_or(Ok(()))
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            match self.ask(Ask::Inspect(key.clone())).await? {
                Answer::Inspection(inspection) => Ok(inspection),
                other => Err(nonsense(&other)),
            }
        })
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.write(Ask::Reopen(key.clone(), attempt)))
    }
}

/// What a look at `request.key` and a reservation of it answer at `now`, if the row on `connection` is untrusted: for
/// tests.
#[cfg(feature = "conformance")]
pub fn meet_row(
    connection: &rusqlite::Connection,
    request: &ReserveRequest,
    now: i64,
) -> (Result<Option<Inspection>, StoreError>, Result<Reservation, StoreError>) {
    let mut table = table::Table::new(connection, table::NAME);
    let seen = table.inspect(&request.key, now).map_err(|trouble| connect::failed(&trouble));
    (seen, table.reserve(request, now).map_err(|trouble| connect::failed(&trouble)))
}
