//! Settings of a file, for its connections and threads.

use std::time::Duration;

use super::sql;

/// Durability of a commit: whether a loss of power can undo the commit. The death of a process undoes no commit.
/// Neither a loss of power nor the death of a process damages the file.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Synchronous {
    /// Each commit waits for the disk, and survives a loss of power. Concurrent calls share commits.
    #[default]
    Full,
    /// Commits don't wait for the disk. A loss of power, or a crash of the operating system, undoes the commits since
    /// the last checkpoint: seconds of work or more. Operations that had finished run again, attempt numbers start
    /// anew, and an operation with `on_crash = fail` can run a second time.
    Normal,
}

impl Synchronous {
    pub(super) fn pragma(self) -> &'static str {
        match self {
            Self::Full => "PRAGMA synchronous = FULL",
            Self::Normal => "PRAGMA synchronous = NORMAL",
        }
    }
}

/// Values of [`SqliteOptions`](super::SqliteOptions), except for the clock.
#[derive(Clone, Debug)]
pub(super) struct SqliteSettings {
    pub(super) table: String,
    pub(super) synchronous: Synchronous,
    pub(super) busy_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) queue_capacity: usize,
    pub(super) max_bytes: Option<u64>,
    pub(super) namespace: String,
    pub(super) holder: String,
}

impl Default for SqliteSettings {
    fn default() -> Self {
        Self {
            table: sql::NAME.to_owned(),
            synchronous: Synchronous::Full,
            busy_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(10),
            queue_capacity: 16_384,
            max_bytes: None,
            namespace: String::new(),
            holder: String::new(),
        }
    }
}
