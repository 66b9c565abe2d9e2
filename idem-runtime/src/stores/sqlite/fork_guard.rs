//! The connections of this process, and how a forked child treats the connections that it inherits.
//!
//! SQLite keeps a list of the files that this process has open and of the locks it holds on them. A forked child
//! inherits the list and the connections, but not the locks. A new connection of the child would rely on locks that are
//! not held: the process that closes the file last would then remove its WAL, and with it the child's commits. So a
//! child closes its inherited connections before it opens any. That is safe if no thread was using an inherited
//! connection at the fork. The lock of its [`Link`] shows this: a thread holds the lock while it is inside SQLite.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::Duration;

use rusqlite::config::DbConfig;

use super::failure::misconfigured;
use super::file::{FileConnection, Files, abandon};
use crate::store::StoreError;
use crate::sync::{PerProcess, Process, lock};

/// All connections in the memory of this process.
static LINKS: Mutex<Vec<Weak<Link>>> = Mutex::new(Vec::new());
/// Held while a connection is closed, until its `files` are forgotten.
static CLOSING: PerProcess<Mutex<()>> = PerProcess::empty();
/// Number of tries to lock the list, and the pause in between. A thread of this process holds the list for a moment
/// only; a lock that a parent's thread held at the fork is never released.
const LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(1);

/// A connection, which one thread uses at a time.
pub(super) struct Link {
    process: Process,
    connected: Mutex<Option<FileConnection>>,
    /// Files of the connection. No thread takes another lock or calls SQLite while it holds this lock.
    files: Mutex<Option<Files>>,
}

impl Link {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { process: Process::this(), connected: Mutex::default(), files: Mutex::default() })
    }

    /// Locks the connection, if there is one. The lock is held to use the connection or to close it.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<FileConnection>> {
        lock(&self.connected)
    }

    /// Like [`lock`](Self::lock), but returns `None` if another thread holds the lock.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Option<FileConnection>>> {
        match self.connected.try_lock() {
            Ok(connected) => Some(connected),
            Err(TryLockError::Poisoned(connected)) => Some(connected.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Connects, unless there is a connection.
    ///
    /// # Errors
    /// The errors of `connect`; [`StoreErrorKind::Misconfigured`](crate::StoreErrorKind) if this process has inherited
    /// a connection that it can't close; [`StoreErrorKind::Unavailable`](crate::StoreErrorKind) while another
    /// connection of this process uses an index of the file that was removed or replaced.
    pub(super) fn open(
        self: &Arc<Self>,
        connect: impl FnOnce() -> Result<FileConnection, StoreError>,
    ) -> Result<(), StoreError> {
        let mut connected = self.lock();
        if connected.is_none() {
            let others = self.enlist()?;
            {
                let _one_at_a_time = closing();
                for other in &others {
                    other.close_if_outdated();
                }
            }
            let made = connect()?;
            // A connection that was being closed is closed by now, and its files are forgotten. If it was the last
            // connection, it has removed log and index, and `made` uses new ones.
            let _one_at_a_time = closing();
            let checked = others.iter().try_for_each(|other| match &*lock(&other.files) {
                Some(files) => made.files.check_against(files),
                None => Ok(()),
            });
            if let Err(error) = checked {
                abandon(made.connection);
                return Err(error);
            }
            *lock(&self.files) = Some(made.files.clone());
            *connected = Some(made);
        }
        Ok(())
    }

    /// Adds this link to the list. Returns the other links of this process.
    fn enlist(self: &Arc<Self>) -> Result<Vec<Arc<Self>>, StoreError> {
        let mut links = list()?;
        let mut others: Vec<_> = links.iter().filter_map(Weak::upgrade).filter(|it| !Arc::ptr_eq(it, self)).collect();
        let inherited: Vec<_> = others.extract_if(.., |link| !link.process.is_this()).collect();
        // Checks all of them before it closes the first: a thread of the parent that was inside SQLite may have held a
        // lock there.
        let unused = inherited.iter().map(|link| link.try_lock().ok_or_else(forked_at_work));
        for connected in unused.collect::<Result<Vec<_>, _>>()? {
            let_go(connected)?;
        }
        links.retain(|other| other.strong_count() > 0);
        if !links.iter().any(|other| Weak::as_ptr(other) == Arc::as_ptr(self)) {
            links.push(Arc::downgrade(self));
        }
        Ok(others)
    }

    /// Closes a connection whose files were removed or replaced, unless a thread is using it. That thread finds out on
    /// its own.
    fn close_if_outdated(&self) {
        // Most links belong to other files. Their lock is left alone: a lone caller that meets it held would hand its
        // read to the reader.
        let files = lock(&self.files).clone();
        if files.is_none_or(|files| files.check().is_ok()) {
            return;
        }
        let Some(mut connected) = self.try_lock() else { return };
        if let Some(outdated) = connected.take_if(|it| it.files.check().is_err()) {
            outdated.close();
            *lock(&self.files) = None;
        }
    }

    /// Closes the connection. Only one connection closes at a time: the last connection of a process cleans up the
    /// file, and of two that close at the same moment each would take the other for one that stays.
    pub(super) fn close(&self) {
        let _one_at_a_time = closing();
        if let Some(connected) = self.lock().take() {
            connected.close();
        }
        *lock(&self.files) = None;
    }
}

/// Locks out the closing of any other connection of this process.
fn closing() -> MutexGuard<'static, ()> {
    lock(CLOSING.here())
}

/// Closes an inherited connection.
fn let_go(mut connected: MutexGuard<'_, Option<FileConnection>>) -> Result<(), StoreError> {
    let Some(FileConnection { connection, .. }) = connected.take() else { return Ok(()) };
    // Otherwise closing checks whether this is the last connection, and removes the WAL of the remaining connections.
    let quiet = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    let closed = match quiet {
        Ok(_) => connection.close().map_err(|(connection, _)| connection),
        Err(_) => Err(connection),
    };
    closed.map_err(|connection| {
        // Dropping the connection must not try to close it again.
        std::mem::forget(connection);
        forked_at_work()
    })
}

fn list() -> Result<MutexGuard<'static, Vec<Weak<Link>>>, StoreError> {
    for _ in 0..LOOKS {
        match LINKS.try_lock() {
            Ok(links) => return Ok(links),
            Err(TryLockError::Poisoned(links)) => return Ok(links.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::park_timeout(PAUSE),
        }
    }
    Err(forked_at_work())
}

fn forked_at_work() -> StoreError {
    misconfigured(
        "this process was forked while a store of its parent was in use, so SQLite can't be used here: fork before \
         stores are opened, or while no call is under way"
            .to_owned(),
    )
}
