//! A spare connection, on which a lone caller itself reads the record that it replays. Passing the request to the
//! reader thread and the answer back would take several times as long as the read.
//!
//! - The spare connection answers only with a finished record that has a small result. In every other case (another
//!   record, an error, a lock) the reader thread reads the record, as if the spare connection had not been used.
//! - Only one caller at a time uses the connection, and only while the reader thread has no other reservation. The
//!   reader serves many callers more cheaply.
//! - The connection waits for no lock, and writes nothing. A read that waits for the disk blocks the thread of the
//!   caller's runtime, so [`Pace`] limits the share of time that slow reads take.
//! - The reader thread opens the connection before it answers a lone replay, and closes the connection when the thread
//!   ends.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::failure::breaks_connection;
use super::file::{Database, FileConnection};
use super::fork_guard::ConnectionSlot;
use super::sql::{Table, Trouble};
use crate::clock::{Instant, wall_millis};
use crate::record::{Reservation, ReserveRequest};
use crate::sync::lock;

/// Duration above which a read is slow: such a read has probably waited for the disk.
const SLOW: Duration = Duration::from_micros(200);
/// Divisor of the time that slow reads may take: one twentieth of all time at most.
const SHARE: u32 = 20;
/// Largest debt of slow reads ([`Pace::debt`]) with which lone callers still read.
const GRACE: Duration = Duration::from_millis(5);
/// Longest time that one slow read adds to the debt, unless the read before it was also slow: if the system paused the
/// thread during a single read, the disk only seems slow.
const ALONE: Duration = Duration::from_micros(500);
/// Debt after a failure to open the connection. The next try to open the connection follows when the debt has fallen to
/// [`GRACE`], about one second later.
const NOT_OPENED: Duration = Duration::from_millis(55);

pub(super) struct InlineReader {
    link: Arc<ConnectionSlot>,
    /// True if the connection is open, and no read has found it unusable.
    usable: AtomicBool,
    /// Number of reservations that the reader thread has not answered yet.
    others: AtomicUsize,
    pace: Mutex<Pace>,
}

/// Guard that counts a reservation until the reader thread has answered it.
pub(super) struct ReaderTurn<'a>(&'a AtomicUsize);

impl Drop for ReaderTurn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl InlineReader {
    pub(super) fn new() -> Self {
        Self {
            link: ConnectionSlot::new(),
            usable: AtomicBool::new(false),
            others: AtomicUsize::new(0),
            pace: Mutex::default(),
        }
    }

    /// Counts a reservation that is passed to the reader thread.
    pub(super) fn count_other(&self) -> ReaderTurn<'_> {
        self.others.fetch_add(1, Ordering::Relaxed);
        ReaderTurn(&self.others)
    }

    /// Returns the finished record that answers `request`, if the spare connection can read it now.
    pub(super) fn replay(&self, database: &Database, request: &ReserveRequest) -> Option<Reservation> {
        if !self.usable.load(Ordering::Acquire) || self.others.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let slot = self.link.try_lock()?;
        let Some(connected) = slot.as_ref() else {
            // The opening of another connection has closed this connection, because its files were removed or replaced.
            self.usable.store(false, Ordering::Release);
            return None;
        };
        let began = database.clock.now();
        if !lock(&self.pace).allows(began) {
            return None;
        }
        let found = read(database, connected, request);
        lock(&self.pace).took(database.clock.now().saturating_since(began));
        match found {
            Ok(found) => found,
            Err(Unusable) => {
                // The reader thread will close the connection.
                self.usable.store(false, Ordering::Release);
                None
            }
        }
    }

    /// Opens the connection, unless it is open and usable. Only the reader thread calls this function.
    pub(super) fn open(&self, database: &Database) {
        if self.usable.load(Ordering::Acquire) || !lock(&self.pace).allows(database.clock.now()) {
            return;
        }
        self.link.close();
        match self.link.open(|| database.reconnect()) {
            Ok(()) => self.usable.store(true, Ordering::Release),
            Err(error) => {
                tracing::debug!(%error, "lone replays go through the reader, as no connection can be opened for them");
                lock(&self.pace).debt = NOT_OPENED;
            }
        }
    }

    /// Closes the connection. The reader thread calls this function when the thread ends.
    pub(super) fn close(&self) {
        self.usable.store(false, Ordering::Release);
        self.link.close();
    }
}

/// Error: the connection must not be used again.
struct Unusable;

fn read(
    database: &Database,
    connected: &FileConnection,
    request: &ReserveRequest,
) -> Result<Option<Reservation>, Unusable> {
    connected.files.check().map_err(|_| Unusable)?;
    let mut table = Table::kept(&connected.connection, &database.texts);
    match table.replay(request, wall_millis(&*database.clock)) {
        Ok(found) => Ok(found),
        Err(Trouble::Sqlite(error)) if breaks_connection(&error) => Err(Unusable),
        // The file is locked, or the record is damaged: the reader thread reads the record again, and
        // reports the error.
        Err(_) => Ok(None),
    }
}

/// Limits the time that slow reads take. Each slow read adds to a debt, which is paid off as time passes. So lone
/// callers stop reading while the cache is cold or the disk is slow. Lone callers try again after a while: the slower
/// the reads were, the later.
#[derive(Default, Debug)]
struct Pace {
    debt: Duration,
    /// Time of the latest update of `debt`.
    at: Option<Instant>,
    /// Duration of the latest read.
    latest: Duration,
}

impl Pace {
    /// Returns whether a read may begin at `now`.
    fn allows(&mut self, now: Instant) -> bool {
        let passed = now.saturating_since(self.at.replace(now).unwrap_or(now));
        self.debt = self.debt.saturating_sub(passed / SHARE);
        self.debt <= GRACE
    }

    /// Notes the duration of a read.
    fn took(&mut self, time: Duration) {
        if time > SLOW {
            self.debt = self.debt.saturating_add(time.min(self.latest.max(ALONE)));
        }
        self.latest = time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant::new(Duration::from_micros(micros))
    }

    #[test]
    fn slow_reads_take_a_small_part_of_the_time() {
        for slow in [300, 3_000, 30_000, 3_000_000] {
            let (mut pace, mut now, mut reading, mut reads) = (Pace::default(), 0, 0, 0);
            while now < 200 * slow {
                if pace.allows(at(now)) {
                    pace.took(Duration::from_micros(slow));
                    (reading, reads) = (reading + slow, reads + 1);
                    now += slow;
                } else {
                    now += 10;
                }
            }
            let most = now / u64::from(SHARE) + 2 * u64::try_from(GRACE.as_micros()).unwrap() + 2 * slow;
            assert!(reads > 2 && reading <= most, "{reads} reads of {slow} took {reading} of {now}");
        }
    }

    #[test]
    fn a_rare_slow_read_among_fast_reads_stops_no_reads() {
        let (mut pace, mut now) = (Pace::default(), 0);
        for n in 0..100_000 {
            assert!(pace.allows(at(now)), "read {n}");
            // Models an overloaded machine: after about 7 ms of work the thread is not scheduled for 5 ms.
            let took = if n % 1_000 == 0 { 5_000 } else { 7 };
            pace.took(Duration::from_micros(took));
            now += took;
        }
    }
}
