//! Classifies SQLite's errors.

use rusqlite::ffi::{self, ErrorCode};

use super::sql::Trouble;
use crate::store::{StoreError, StoreErrorKind};

pub(super) fn code(error: &rusqlite::Error) -> Option<ErrorCode> {
    error.sqlite_error_code()
}

fn extended(error: &rusqlite::Error) -> Option<i32> {
    error.sqlite_error().map(|error| error.extended_code)
}

/// Returns SQLite's error for a lock that another connection holds.
pub(super) fn busy() -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None)
}

pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(code(error), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Returns whether the connection must be reopened after `error`.
pub(super) fn breaks_connection(error: &rusqlite::Error) -> bool {
    !matches!(
        code(error),
        Some(
            ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::DiskFull
                | ErrorCode::TooBig
                | ErrorCode::ConstraintViolation
        )
    )
}

/// Converts `error`, whose transaction has not been committed.
pub(super) fn not_written(error: &rusqlite::Error) -> StoreError {
    use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable};
    let (kind, what) = match code(error) {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (Unavailable, "another process holds the lock on the file")
        }
        Some(ErrorCode::DiskFull) => (Full, "the disk is full, or the file has reached `max_bytes`"),
        // The file was removed or replaced. The error is `Unavailable`, because the next call checks which file is at
        // the path.
        Some(ErrorCode::ReadOnly) if extended(error) == Some(ffi::SQLITE_READONLY_DBMOVED) => {
            (Unavailable, "the file was moved away")
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied) => {
            (Misconfigured, "the file can't be written")
        }
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => (Corrupt, "the file is damaged"),
        Some(ErrorCode::TooBig) => (TooLarge, "SQLite can't hold a row of that size"),
        // SQLite reports these errors if, for example, the table was removed or altered, or a trigger refuses the
        // write.
        Some(ErrorCode::Unknown | ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch) => {
            (Misconfigured, "the table can't be used")
        }
        _ => (Unavailable, "SQLite failed"),
    };
    StoreError::new(kind, format!("nothing was written: {what}: {error}"))
}

/// Converts `error`, the answer to a commit.
pub(super) fn not_committed(error: &rusqlite::Error) -> StoreError {
    match code(error) {
        // Nothing was committed: a commit needs the lock, and space for the last frame of the transaction. Without this
        // last frame, the other frames are not valid.
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::DiskFull) => not_written(error),
        _ => StoreError::new(
            StoreErrorKind::Unconfirmed,
            format!("the commit failed, but may still take effect after a crash: {error}"),
        ),
    }
}

/// Returns the error for a commit that other processes possibly don't see.
pub(super) fn unconfirmed(error: &StoreError) -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, format!("other processes may not see the commit: {error}"))
}

/// Converts the error of one operation.
pub(super) fn failed(trouble: &Trouble) -> StoreError {
    match trouble {
        Trouble::Sqlite(error) => not_written(error),
        Trouble::Format(error) => StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(*error),
        Trouble::TooLarge(bytes) => {
            StoreError::new(StoreErrorKind::TooLarge, format!("the file can't hold a result of {bytes} bytes"))
        }
    }
}

pub(super) fn unavailable(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

pub(super) fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

/// Returns a copy of an error, for another operation of the same transaction.
pub(super) fn same(error: &StoreError) -> StoreError {
    StoreError::new(error.kind(), error.to_string())
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi::*;

    use super::*;

    #[test]
    fn each_error_of_sqlite_has_the_expected_kind() {
        use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
        // Columns: SQLite's code; kind of the error before a commit; kind as the answer to a commit; whether the
        // connection must be reopened.
        let codes = [
            (SQLITE_BUSY, Unavailable, Unavailable, false),
            (SQLITE_BUSY_RECOVERY, Unavailable, Unavailable, false),
            (SQLITE_BUSY_SNAPSHOT, Unavailable, Unavailable, false),
            (SQLITE_LOCKED, Unavailable, Unavailable, false),
            (SQLITE_FULL, Full, Full, false),
            (SQLITE_READONLY, Misconfigured, Unconfirmed, true),
            (SQLITE_READONLY_DIRECTORY, Misconfigured, Unconfirmed, true),
            (SQLITE_READONLY_DBMOVED, Unavailable, Unconfirmed, true),
            (SQLITE_PERM, Misconfigured, Unconfirmed, true),
            (SQLITE_CANTOPEN, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_READ, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_WRITE, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_FSYNC, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_SHMSIZE, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_NOMEM, Unavailable, Unconfirmed, true),
            (SQLITE_NOMEM, Unavailable, Unconfirmed, true),
            (SQLITE_PROTOCOL, Unavailable, Unconfirmed, true),
            (SQLITE_INTERRUPT, Unavailable, Unconfirmed, true),
            (SQLITE_CORRUPT, Corrupt, Unconfirmed, true),
            (SQLITE_CORRUPT_INDEX, Corrupt, Unconfirmed, true),
            (SQLITE_NOTADB, Corrupt, Unconfirmed, true),
            (SQLITE_TOOBIG, TooLarge, Unconfirmed, false),
            // The table does not exist, has other columns, or has a trigger that refuses the write.
            (SQLITE_ERROR, Misconfigured, Unconfirmed, true),
            (SQLITE_CONSTRAINT_TRIGGER, Misconfigured, Unconfirmed, false),
        ];
        for (code, before, commit, anew) in codes {
            let error = rusqlite::Error::SqliteFailure(Error::new(code), None);
            assert_eq!(not_written(&error).kind(), before, "{error}");
            assert_eq!(not_committed(&error).kind(), commit, "{error}");
            assert_eq!(breaks_connection(&error), anew, "{error}");
        }
    }
}
