//! Checks of a SQLite file.

use std::path::Path;

use rusqlite::Connection;

use super::Findings;
use crate::report::Stop;
use crate::store::sqlite::File;

/// File systems whose locks or shared memory do not reach other machines.
const REMOTE: [&str; 9] = ["nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs"];
/// Size in bytes from which the doctor warns about a WAL. A WAL grows to this size only if SQLite could not copy it
/// into the file for a long time.
const LARGE_WAL: u64 = 64 << 20;

pub(crate) fn examine(file: &File, findings: &mut Findings) -> Result<(), Stop> {
    let connection = file.read()?;
    check(file, &connection, findings).map_err(|error| file.failed(&error))
}

fn check(file: &File, connection: &Connection, findings: &mut Findings) -> rusqlite::Result<()> {
    let mode: String = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0))?;
    // Stores use WAL, so another mode means that no store has opened this file.
    match mode.as_str() {
        "wal" => findings.ok("journal mode", "wal"),
        other => findings.warning(
            "journal mode",
            format!("`{other}`"),
            "the first process that opens the store changes it to WAL; until then no store has used this file",
            "make sure that this is the right file",
        ),
    }
    // This check finds damage to the table, which the other checks do not read.
    let damage: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    match damage.as_str() {
        "ok" => findings.ok("integrity", "quick_check finds nothing"),
        damage => findings.error(
            "integrity",
            format!("quick_check: {damage}"),
            "records are lost or can't be read, and operations run again",
            "stop all processes, keep a copy of the file, and restore the last good one",
        ),
    }
    // SQLite excludes other processes by file locks, which the file system must support.
    match file_system(&file.path) {
        Some(kind) if REMOTE.contains(&kind.as_str()) => findings.error(
            "file system",
            format!("`{kind}`, which is on another machine"),
            "SQLite's locks don't hold there: two processes may run one operation at once, and the file may be damaged",
            "put the file on a local disk; use PostgreSQL or Redis for several machines",
        ),
        Some(kind) if ["tmpfs", "ramfs"].contains(&kind.as_str()) => findings.warning(
            "file system",
            format!("`{kind}`, which is in memory"),
            "a restart of the machine forgets all records, and their operations run again",
            "put the file on a disk",
        ),
        Some(kind) => findings.ok("file system", format!("`{kind}`")),
        None => findings.unknown("file system", "unknown on this system", "make sure that the disk is a local one"),
    }
    let mut wal = file.path.clone().into_os_string();
    wal.push("-wal");
    // A reader that stays open keeps the WAL from shrinking.
    match std::fs::metadata(&wal).map(|wal| wal.len()).unwrap_or_default() {
        large @ LARGE_WAL.. => findings.warning(
            "WAL",
            format!("{} MiB", large >> 20),
            "a reader has been open for long, and every look-up searches the WAL",
            "end the transaction that reads; the WAL shrinks with the next checkpoint",
        ),
        bytes => findings.ok("WAL", format!("{} KiB", bytes >> 10)),
    }
    // The check opens the file for writing, because the mode of a file shows neither ACLs nor a read-only mount.
    match std::fs::OpenOptions::new().append(true).open(&file.path) {
        Ok(_) => findings.ok("permissions", "the file can be written"),
        Err(error) => findings.error(
            "permissions",
            format!("the file can't be written: {error}"),
            "no operation can be reserved or recorded",
            "give this user the right to write the file and its folder",
        ),
    }
    Ok(())
}

/// Returns the kind of the file system that holds `path`, if the system reports it.
fn file_system(path: &Path) -> Option<String> {
    let path = std::fs::canonicalize(path).ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let of = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (point, kind) = (fields.next()?.replace("\\040", " "), fields.next()?.to_owned());
        path.starts_with(&point).then_some((point.len(), kind))
    };
    // If several file systems are mounted at one path, the last mount is in effect.
    mounts.lines().filter_map(of).max_by_key(|(len, _)| *len).map(|(_, kind)| kind)
}
