//! The connections of this process. A forked child closes the connections that it inherits.
//!
//! SQLite keeps a list of the files that this process has open and of the locks it holds on them. A forked child
//! inherits the list and the connections, but not the locks. A new connection of the child would rely on locks that the
//! child does not hold: another process could then take itself for the last user of the file, and remove the WAL with
//! the child's commits. So a child closes its inherited connections before it opens a connection. Closing is safe if no
//! thread was using the inherited connection at the fork. The lock of the [`ConnectionSlot`] shows whether a thread was
//! using the connection: each thread holds that lock while it is inside SQLite.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::Duration;

use rusqlite::config::DbConfig;

use super::failure::misconfigured;
use super::file::{FileConnection, Files, abandon};
use crate::store::StoreError;
use crate::sync::{PerProcess, Process, lock};

/// The slots of all connections in the memory of this process, including inherited connections.
static SLOTS: Mutex<Vec<Weak<ConnectionSlot>>> = Mutex::new(Vec::new());
/// Lock that a thread holds while it closes a connection, until the slot has cleared its `files`.
static CLOSING: PerProcess<Mutex<()>> = PerProcess::empty();
/// Number of tries to lock the list, with a [`PAUSE`] in between. A thread of this process holds that lock only
/// briefly; a lock that a thread of the parent held at the fork is never released.
const LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(1);

/// A connection, which one thread uses at a time.
pub(super) struct ConnectionSlot {
    process: Process,
    connected: Mutex<Option<FileConnection>>,
    /// Files of the connection. A thread that holds this lock neither takes another lock nor calls SQLite.
    files: Mutex<Option<Files>>,
}

impl ConnectionSlot {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { process: Process::this(), connected: Mutex::default(), files: Mutex::default() })
    }

    /// Waits for the lock of the connection. The guard holds `None` if the connection is closed. A thread holds this
    /// lock while it uses or closes the connection.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<FileConnection>> {
        lock(&self.connected)
    }

    /// Locks the connection as [`lock`](Self::lock) does. Returns `None` if another thread holds the lock.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Option<FileConnection>>> {
        match self.connected.try_lock() {
            Ok(connected) => Some(connected),
            Err(TryLockError::Poisoned(connected)) => Some(connected.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Opens the connection of this slot, unless it is open.
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
            // Waits until no other connection is being closed. If the last connection was just closed, SQLite has
            // removed log and index, and `made` uses new files.
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

    /// Adds this slot to the list. Returns the other slots of this process.
    fn enlist(self: &Arc<Self>) -> Result<Vec<Arc<Self>>, StoreError> {
        let mut slots = list()?;
        let mut others: Vec<_> = slots.iter().filter_map(Weak::upgrade).filter(|it| !Arc::ptr_eq(it, self)).collect();
        let inherited: Vec<_> = others.extract_if(.., |slot| !slot.process.is_this()).collect();
        // All inherited connections are checked before the first one is closed: a thread of the parent that was inside
        // SQLite at the fork may have held a lock that closing needs.
        let unused = inherited.iter().map(|slot| slot.try_lock().ok_or_else(forked_at_work));
        for connected in unused.collect::<Result<Vec<_>, _>>()? {
            let_go(connected)?;
        }
        slots.retain(|other| other.strong_count() > 0);
        if !slots.iter().any(|other| Weak::as_ptr(other) == Arc::as_ptr(self)) {
            slots.push(Arc::downgrade(self));
        }
        Ok(others)
    }

    /// Closes a connection whose files were removed or replaced. A thread that is using the connection notices the
    /// change itself.
    fn close_if_outdated(&self) {
        // Most slots are connections to files that are still in place. The locks of such connections are not taken: a
        // lone caller that found its connection locked would have to use the reader thread.
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

    /// Closes the connection. Connections are closed one at a time: the last connection of a process cleans up the
    /// file, and if two connections were closed at the same time, neither would be the last.
    pub(super) fn close(&self) {
        let _one_at_a_time = closing();
        if let Some(connected) = self.lock().take() {
            connected.close();
        }
        *lock(&self.files) = None;
    }
}

/// Returns a guard. While the guard lives, no other connection of this process is closed.
fn closing() -> MutexGuard<'static, ()> {
    lock(CLOSING.here())
}

/// Closes a connection that this process inherited at a fork.
fn let_go(mut connected: MutexGuard<'_, Option<FileConnection>>) -> Result<(), StoreError> {
    let Some(FileConnection { connection, .. }) = connected.take() else { return Ok(()) };
    // Keeps SQLite from checking whether this is the last connection: SQLite would trust the inherited list of locks,
    // and remove a WAL that other processes still use.
    let quiet = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    let closed = match quiet {
        Ok(_) => connection.close().map_err(|(connection, _)| connection),
        Err(_) => Err(connection),
    };
    closed.map_err(|connection| {
        // The connection is leaked, because its `drop` would try to close it again.
        std::mem::forget(connection);
        forked_at_work()
    })
}

fn list() -> Result<MutexGuard<'static, Vec<Weak<ConnectionSlot>>>, StoreError> {
    for _ in 0..LOOKS {
        match SLOTS.try_lock() {
            Ok(slots) => return Ok(slots),
            Err(TryLockError::Poisoned(slots)) => return Ok(slots.into_inner()),
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
