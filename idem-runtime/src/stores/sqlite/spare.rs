//! A spare connection, on which a lone caller reads the record that it replays: the way to the reader thread and back
//! takes several times as long as the read.
//!
//! - Only a finished record with a small result is taken from it. Whatever else is found, fails or is locked, the reader
//!   looks again, as if nothing had been tried.
//! - Only one caller uses it, and only while no other reservation is with the reader, which serves many better.
//! - It waits for no lock, and writes nothing. What it can't avoid is to wait for a disk, and with it the thread of the
//!   caller's runtime: [`Pace`] bounds the share of time that this may take.
//! - The reader thread opens it, before it serves a lone replay, and closes it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::failure::breaks_connection;
use super::file::{Connected, Database};
use super::link::Link;
use super::sql::{Table, Trouble};
use crate::clock::{Instant, wall_millis};
use crate::record::{Reservation, ReserveRequest};
use crate::sync::lock;

/// A read that takes longer has probably waited for the disk.
const SLOW: Duration = Duration::from_micros(200);
/// Such reads may take one part in so many of the time,
const SHARE: u32 = 20;
/// and this much at once.
const GRACE: Duration = Duration::from_millis(5);
/// A slow read counts as no more than this, unless the one before it took as long: a thread that loses its processor looks
/// like a slow disk.
const ALONE: Duration = Duration::from_micros(500);
/// What a failure to open the connection counts as, so that it is not tried with every read.
const NOT_OPENED: Duration = Duration::from_millis(55);

pub(super) struct Spare {
    link: Arc<Link>,
    /// Whether the connection is open, and no read has found it unusable.
    usable: AtomicBool,
    /// How many reservations are with the reader.
    others: AtomicUsize,
    pace: Mutex<Pace>,
}

/// A reservation is with the reader until this is dropped.
pub(super) struct Other<'a>(&'a AtomicUsize);

impl Drop for Other<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Spare {
    pub(super) fn new() -> Self {
        Self { link: Link::new(), usable: AtomicBool::new(false), others: AtomicUsize::new(0), pace: Mutex::default() }
    }

    /// Counts a reservation that the reader is asked for.
    pub(super) fn count_other(&self) -> Other<'_> {
        self.others.fetch_add(1, Ordering::Relaxed);
        Other(&self.others)
    }

    /// The finished record that answers `request`, if it can be read here and now.
    pub(super) fn replay(&self, database: &Database, request: &ReserveRequest) -> Option<Reservation> {
        if !self.usable.load(Ordering::Acquire) || self.others.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let slot = self.link.try_lock()?;
        let Some(connected) = slot.as_ref() else {
            // Closed as outdated by another connection.
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
                // Its closing is for the reader.
                self.usable.store(false, Ordering::Release);
                None
            }
        }
    }

    /// Opens the connection, unless it is open and usable. For the reader.
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

    /// Closes the connection. For the reader, at its end.
    pub(super) fn close(&self) {
        self.usable.store(false, Ordering::Release);
        self.link.close();
    }
}

/// The connection is not to be used again.
struct Unusable;

fn read(database: &Database, connected: &Connected, request: &ReserveRequest) -> Result<Option<Reservation>, Unusable> {
    connected.files.check().map_err(|_| Unusable)?;
    let mut table = Table::kept(&connected.connection, &database.texts);
    match table.replay(request, wall_millis(&*database.clock)) {
        Ok(found) => Ok(found),
        Err(Trouble::Sqlite(error)) if breaks_connection(&error) => Err(Unusable),
        // Locked, or not a record: the reader says so.
        Err(_) => Ok(None),
    }
}

/// Bounds the time that slow reads take: each is a debt, which is paid off as time passes. So reads stop when the cache is
/// cold or the disk slow, and are tried again after a while, the later the slower they were.
#[derive(Default, Debug)]
struct Pace {
    debt: Duration,
    /// When `debt` was looked at last.
    at: Option<Instant>,
    /// How long the latest read took.
    latest: Duration,
}

impl Pace {
    /// Whether a read may begin at `now`.
    fn allows(&mut self, now: Instant) -> bool {
        let passed = now.saturating_since(self.at.replace(now).unwrap_or(now));
        self.debt = self.debt.saturating_sub(passed / SHARE);
        self.debt <= GRACE
    }

    /// Notes how long a read took.
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
    fn fast_reads_and_a_slow_one_now_and_then_go_on() {
        let (mut pace, mut now) = (Pace::default(), 0);
        for n in 0..100_000 {
            assert!(pace.allows(at(now)), "read {n}");
            // As on a machine that has too much to do: 5 ms without a processor after 7 ms with one.
            let took = if n % 1_000 == 0 { 5_000 } else { 7 };
            pace.took(Duration::from_micros(took));
            now += took;
        }
    }
}
