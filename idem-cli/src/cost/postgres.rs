//! Bytes of write-ahead log and of rows, as PostgreSQL counts them.

use std::sync::Arc;

use idem_runtime::{Key, Store};
use tokio_postgres::Client;

use super::{Measured, Meter, Unit};
use crate::report::Stop;
use crate::store::postgres::{ask, refused};

const UNITS: [Unit; 1] = [Unit { name: "log bytes", price: Some(("wal_gb", 1e9)) }];

/// Largest result that is stored in the row itself; PostgreSQL moves larger results out of it.
const IN_ROW: f64 = 2000.0;
/// Factor for the empty part of the table's pages at its fill factor: as much space is empty as is used (measured:
/// benches/README.md).
const ROOM: f64 = 2.0;
/// Filled part of the pages of an index with random keys.
const FULL: f64 = 0.66;

/// A table, and the log of its server.
pub(crate) struct Log {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) client: Client,
    pub(crate) schema: String,
}

impl Meter for Log {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    fn units(&self) -> &'static [Unit] {
        &UNITS
    }

    fn records(&self) -> usize {
        50
    }

    fn count(&self) -> Measured<'_, Vec<f64>> {
        Box::pin(async {
            let question = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
            let rows = ask(&self.client, question, &[]).await.map_err(|error| refused(&error))?;
            Ok(vec![rows.first().map_or(0.0, |row| row.get(0))])
        })
    }

    fn stored<'a>(&'a self, key: &'a Key) -> Measured<'a, f64> {
        Box::pin(async move {
            let question = format!(
                "SELECT octet_length(r.key)::float8, coalesce(pg_column_size(r.result), 0)::float8, pg_column_size(ROW(r.listed_at, \
                 r.expires_at, r.lapses_at, r.first_seen_at, r.began_at, r.attempt, r.attempts_used, r.lease_ms, r.ttl_ms, \
                 r.result_bytes, r.format, r.on_crash_fail, r.waited, r.state, r.owner, r.key, r.fingerprint, r.holder, \
                 r.traceparent, r.decided_by, r.decided_reason, r.codec))::float8 FROM \"{}\".records AS r WHERE r.key = $1",
                self.schema.replace('"', "\"\"")
            );
            let rows = ask(&self.client, &question, &[key.as_str()]).await.map_err(|error| refused(&error))?;
            let row = rows.first().ok_or_else(|| Stop::Refused("the record is gone".to_owned()))?;
            let (name, result, rest): (f64, f64, f64) = (row.get(0), row.get(1), row.get(2));
            // Every row has a pointer in its page. A result that is moved out leaves a pointer in the row, and its
            // pieces have headers.
            let (inside, outside) = if result > IN_ROW { (18.0, result * 1.04) } else { (result, 0.0) };
            let indexes = (name + 16.0 + 24.0) / FULL;
            Ok((rest + inside + 4.0) * ROOM + outside + indexes)
        })
    }

    fn notes(&self) -> &'static [&'static str] {
        &[
            "bytes a record: the row as it is, as much room beside it, and its entries in both indexes",
            "the log of a server has whole pages besides, after each checkpoint; what others wrote meanwhile is in it, too, if \
             all rounds met it; replicas and backups cost extra",
        ]
    }
}
