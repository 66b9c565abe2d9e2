//! Checks of a PostgreSQL server.

use std::time::Duration;

use tokio_postgres::types::FromSql;
use tokio_postgres::{Client, Row};

use super::{Findings, MANY_EXPIRED};
use crate::report::Stop;
use crate::store::postgres::{Database, VERSION, ask, differences, refused};

/// Number of dead rows above which the doctor warns, if the table also has more than half as many dead rows
/// as live rows.
const MANY_DEAD: i64 = 10_000;
/// Highest fill factor that leaves space for a small result in the page of its reservation (measured:
/// benches/README.md).
const FULLEST: f64 = 50.0;
/// Smallest number of updates from which the share of updates that stay in their page is meaningful.
const MANY_UPDATES: i64 = 10_000;
/// Highest good threshold of autovacuum, in dead rows. With a higher threshold, autovacuum starts too late for a table
/// whose purge removes many rows.
const LATE_VACUUM: f64 = 1e6;
/// Longest total pause of one autovacuum run, in seconds, that the doctor accepts.
const SLOW_VACUUM: f64 = 3600.0;
/// Number of pages in 64 MB. The bloat of a smaller table does not matter.
const LARGE_PAGES: f64 = 8192.0;
/// Ratios of the size of a table, and of its indexes, to the size of its rows, above which the doctor warns. The fill
/// factor alone doubles a table with small results, and triples a table that holds only reservations.
const BLOATED_HEAP: f64 = 4.0;
const BLOATED_INDEX: f64 = 3.0;

pub(crate) async fn examine(database: &Database, timeout: Duration, findings: &mut Findings) -> Result<(), Stop> {
    let client = database.connect(timeout).await?;
    check(database, &client, findings).await.map_err(|error| refused(&error))?;
    pooler(database, &client, timeout, findings).await
}

async fn check(database: &Database, client: &Client, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let number: i32 = one(client, "SELECT current_setting('server_version_num')::int", &[]).await?;
    match number {
        120_000.. => findings.ok("version", format!("PostgreSQL {}", number / 10_000)),
        _ => findings.error(
            "version",
            format!("PostgreSQL {}", number / 10_000),
            "the store refuses to open",
            "use PostgreSQL 12 or newer",
        ),
    }
    // Settings without which a crash loses confirmed records.
    for (name, consequence) in [
        ("fsync", "a crash of the machine may damage the whole database"),
        ("full_page_writes", "a crash of the machine may damage pages"),
        ("synchronous_commit", "a crash of the server forgets the last records, and their operations run again"),
    ] {
        let value: String = one(client, "SELECT current_setting($1)", &[name]).await?;
        match value.as_str() {
            "off" => {
                let remedy =
                    format!("`ALTER SYSTEM SET {name} = on`, or for this login `ALTER ROLE … SET {name} = on`");
                findings.error(name, "off", consequence, &remedy);
            }
            value => findings.ok(name, value),
        }
    }
    let standby: bool = one(client, "SELECT pg_is_in_recovery()", &[]).await?;
    if standby {
        findings.error(
            "role",
            "a standby",
            "it takes no writes: handlers and decisions fail; `idem show`, `list`, `stats` and `watch` work",
            "connect to the primary",
        );
    }
    replication(client, findings).await?;
    let found = differences(client, &database.schema).await?;
    match found {
        None => findings.error(
            "schema",
            format!("there is no table `records` in the schema `{}`", database.schema),
            "the store refuses to open",
            "`idem schema migrate`, or run what `idem schema print postgres` prints",
        ),
        Some(differences) if differences.is_empty() => findings.ok("schema", VERSION),
        Some(differences) => findings.error(
            "schema",
            differences.join("; "),
            "the store refuses to open, or is slower than it could be",
            "compare with `idem schema print postgres`; a table of a later release needs that release",
        ),
    }
    rows(database, client, findings).await
}

/// Checks whether a failover loses confirmed records.
async fn replication(client: &Client, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let names: String = one(client, "SELECT current_setting('synchronous_standby_names')", &[]).await?;
    // A login without the right to see other sessions can still count the standbys.
    let standbys: i64 = one(client, "SELECT count(*) FROM pg_stat_replication", &[]).await?;
    match (standbys, names.as_str()) {
        (0, "") => findings.ok("replication", "no standby follows this server"),
        (count, "") => findings.warning(
            "replication",
            format!("no commit waits for a standby, and {count} follow"),
            "a failover forgets the records that the new primary has not received yet, and their operations run again",
            "`synchronous_standby_names = 'ANY 1 (*)'`, which costs each commit a round trip",
        ),
        (_, names) => findings.ok("replication", format!("commits wait for standbys: {names}")),
    }
    Ok(())
}

/// Returns the first value in the answer to `question`; the default value if the answer has no row.
async fn one<T>(client: &Client, question: &str, texts: &[&str]) -> Result<T, tokio_postgres::Error>
where
    T: for<'a> FromSql<'a> + Default,
{
    Ok(ask(client, question, texts).await?.first().map(|row| row.get(0)).unwrap_or_default())
}

/// Checks the number of dead rows, and of expired rows that no purge has removed.
async fn rows(database: &Database, client: &Client, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let tables = tables(client, &database.schema).await?;
    let [live, dead] = [tables.iter().map(|it| it.live).sum::<i64>(), tables.iter().map(|it| it.dead).sum()];
    if let Some(first) = tables.first() {
        let vacuumed = tables.iter().map(|it| it.vacuumed.as_str()).min().unwrap_or(&first.vacuumed);
        let found = format!("{live} live, {dead} dead, vacuumed {vacuumed}");
        match tables.iter().find(|it| it.dead > MANY_DEAD && it.dead > it.live / 2) {
            Some(table) => findings.warning(
                "dead rows",
                found,
                "the table grows, and every statement reads past them",
                &format!(
                    "`VACUUM {}`; {}; end transactions that are open for long",
                    table.name,
                    table.alter("autovacuum_vacuum_scale_factor = 0.05")
                ),
            ),
            None => findings.ok("dead rows", found),
        }
    }
    updates(&tables, findings);
    vacuum(client, &tables, findings).await?;
    bloat(client, &tables, findings).await?;
    purge(database, client, findings).await
}

/// A table that holds rows: the table of the records, or one of its partitions.
struct Table {
    /// Name with its schema, quoted where needed.
    name: String,
    /// Number of rows at the last `VACUUM` or `ANALYZE`; negative if neither has run.
    rows: f64,
    pages: f64,
    index_pages: f64,
    fill_factor: f64,
    /// True if autovacuum is on, for the server and for this table.
    is_vacuumed: bool,
    /// Number of dead rows that starts an autovacuum.
    until_vacuum: f64,
    /// Longest total pause of one autovacuum run, in seconds.
    vacuum_pauses: f64,
    live: i64,
    dead: i64,
    updates: i64,
    in_page: i64,
    vacuumed: String,
}

impl Table {
    fn alter(&self, settings: &str) -> String {
        format!("`ALTER TABLE {} SET ({settings})`", self.name)
    }
}

/// Returns the table of the records, or its partitions if the table is partitioned.
async fn tables(client: &Client, schema: &str) -> Result<Vec<Table>, tokio_postgres::Error> {
    // A vacuum pauses each time it has used up its cost limit. Each page that the vacuum changes costs one read and one
    // write.
    let question = "
        WITH held AS (
            SELECT p.oid, p.reltuples::float8 AS tuples, p.relpages::float8 AS pages,
                   (SELECT coalesce(sum(i.relpages), 0)::float8 FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
                    WHERE x.indrelid = p.oid) AS index_pages,
                   (SELECT coalesce(jsonb_object_agg(o.option_name, o.option_value), '{}')
                    FROM pg_options_to_table(p.reloptions) o) AS own
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            CROSS JOIN LATERAL (SELECT c.oid AS relid WHERE c.relkind = 'r' UNION ALL
                                SELECT t.relid FROM pg_partition_tree(c.oid) t WHERE t.isleaf AND c.relkind = 'p') AS leaf
            JOIN pg_class p ON p.oid = leaf.relid
            WHERE n.nspname = $1 AND c.relname = 'records'),
        paced AS (
            SELECT held.*, coalesce((own->>'autovacuum_vacuum_cost_delay')::float8,
                       nullif(d.setting::float8, -1), (SELECT setting::float8 FROM pg_settings WHERE name = 'vacuum_cost_delay'))
                       / 1000 AS delay,
                   coalesce((own->>'autovacuum_vacuum_cost_limit')::float8, nullif(l.setting::float8, -1),
                       current_setting('vacuum_cost_limit')::float8) AS cost
            FROM held, pg_settings d, pg_settings l
            WHERE d.name = 'autovacuum_vacuum_cost_delay' AND l.name = 'autovacuum_vacuum_cost_limit')
        SELECT oid::regclass::text, tuples, pages, index_pages, coalesce((own->>'fillfactor')::float8, 100),
               current_setting('autovacuum') = 'on' AND coalesce((own->>'autovacuum_enabled')::bool, true),
               coalesce((own->>'autovacuum_vacuum_threshold')::float8,
                        current_setting('autovacuum_vacuum_threshold')::float8)
               + greatest(tuples, 0) * coalesce((own->>'autovacuum_vacuum_scale_factor')::float8,
                        current_setting('autovacuum_vacuum_scale_factor')::float8),
               (pages + index_pages) * (current_setting('vacuum_cost_page_miss')::float8
                        + current_setting('vacuum_cost_page_dirty')::float8) / cost * delay,
               coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), coalesce(s.n_tup_upd, 0), coalesce(s.n_tup_hot_upd, 0),
               coalesce(greatest(s.last_vacuum, s.last_autovacuum)::text, 'never')
        FROM paced LEFT JOIN pg_stat_user_tables s ON s.relid = paced.oid ORDER BY paced.oid";
    let rows = ask(client, question, &[schema]).await?;
    let table = |row: &Row| Table {
        name: row.get(0),
        rows: row.get(1),
        pages: row.get(2),
        index_pages: row.get(3),
        fill_factor: row.get(4),
        is_vacuumed: row.get(5),
        until_vacuum: row.get(6),
        vacuum_pauses: row.get(7),
        live: row.get(8),
        dead: row.get(9),
        updates: row.get(10),
        in_page: row.get(11),
        vacuumed: row.get(12),
    };
    Ok(rows.iter().map(table).collect())
}

/// Checks whether the new versions of rows (completions and renewals) stay in their page, so that no index changes.
fn updates(tables: &[Table], findings: &mut Findings) {
    if let Some(table) = tables.iter().find(|it| it.fill_factor > FULLEST) {
        findings.warning(
            "fill factor",
            format!("{} of {}", table.fill_factor, table.name),
            "a completed record finds no space in its page: the record moves to another page, and both indexes change",
            &format!("{}; it holds for the pages that are filled from then on", table.alter("fillfactor = 30")),
        );
    } else if let Some(table) = tables.first() {
        findings.ok("fill factor", table.fill_factor.to_string());
    }
    let few = |it: &&Table| it.updates >= MANY_UPDATES && it.in_page < it.updates / 10 * 7;
    let percent = |it: &Table| format!("{} of 100 updates stay in their page", it.in_page * 100 / it.updates.max(1));
    match tables.iter().find(few) {
        Some(table) => findings.warning(
            "updates",
            format!("{}, in {}", percent(table), table.name),
            "every other update changes both indexes: completions and renewals cost twice as much, and the indexes grow",
            "a fillfactor of 20; results of about 300 bytes to 2 KB still find no space: use `Compressed` or `Offloaded`",
        ),
        None => findings.ok("updates", tables.first().map_or_else(|| "none".to_owned(), percent)),
    }
}

/// Checks the removal of dead rows: whether autovacuum is on, how soon it runs, and what blocks it.
async fn vacuum(client: &Client, tables: &[Table], findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    match tables.iter().find(|it| !it.is_vacuumed) {
        None => findings.ok("autovacuum", "on"),
        Some(table) => findings.warning(
            "autovacuum",
            "off, for the server or for this table",
            "each completion leaves a dead row; the table grows, and every statement reads past them",
            &format!("`ALTER SYSTEM SET autovacuum = on`, or `ALTER TABLE {} RESET (autovacuum_enabled)`", table.name),
        ),
    }
    // The threshold grows with the table, and so does the space that dead rows take before an autovacuum starts.
    match tables.iter().find(|it| it.until_vacuum > LATE_VACUUM) {
        None => findings.ok("autovacuum threshold", "within a million dead rows"),
        Some(table) => findings.warning(
            "autovacuum threshold",
            format!("{:.0} dead rows in {}", table.until_vacuum, table.name),
            "space is reused only after this many rows were purged: the table and its indexes are larger by this many rows",
            &format!(
                "{}; from some ten million records on, partitions",
                table.alter("autovacuum_vacuum_scale_factor = 0.02")
            ),
        ),
    }
    // A run that pauses for too long can't keep up with the purge.
    match tables.iter().find(|it| it.vacuum_pauses > SLOW_VACUUM) {
        None => findings.ok("autovacuum pace", "pauses for less than an hour in all"),
        Some(table) => findings.warning(
            "autovacuum pace",
            format!("may pause for {:.0} hours in one run, in {}", table.vacuum_pauses / 3600.0, table.name),
            "dead rows pile up while it runs; a run that is cancelled starts anew",
            &table.alter("autovacuum_vacuum_cost_limit = 2000, autovacuum_vacuum_cost_delay = 2"),
        ),
    }
    // While a transaction is open, VACUUM can't remove the rows that have died since this transaction began.
    let question = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                    AND xact_start < statement_timestamp() - interval '10 minutes'";
    match one::<i64>(client, question, &[]).await? {
        0 => findings.ok("open transactions", "none that this login can see is older than 10 minutes"),
        count => findings.warning(
            "open transactions",
            format!("{count} older than 10 minutes"),
            "no row that has died since then can be removed, in no table; records that they locked can't be written",
            "look at `pg_stat_activity`; set `idle_in_transaction_session_timeout`",
        ),
    }
    Ok(())
}

/// Checks whether table and indexes are much larger than their rows.
async fn bloat(client: &Client, tables: &[Table], findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let mut bloated = None;
    for table in tables.iter().filter(|it| it.pages + it.index_pages > LARGE_PAGES && it.rows >= 0.0) {
        // A login sees the statistics of a column only if it has the right to read that column.
        let question = "SELECT coalesce(sum(avg_width * (1 - null_frac)), 0)::float8,
                               coalesce(sum(avg_width) FILTER (WHERE attname = 'key'), 0)::float8
                        FROM pg_stats WHERE format('%I.%I', schemaname, tablename)::regclass = $1::text::regclass";
        let rows = ask(client, question, &[&table.name]).await?;
        let (width, key): (f64, f64) = rows.first().map_or((0.0, 0.0), |row| (row.get(0), row.get(1)));
        if width == 0.0 {
            continue;
        }
        // Each row, and each index entry, has a header and a pointer. Index pages of random keys are two thirds full.
        let (rows, per_page) = (table.rows.max(1.0), 8192.0);
        let (heap, indexes) = (rows * (width + 36.0) / per_page, rows * (key + 16.0 + 24.0) / 0.66 / per_page);
        let times = [table.pages / heap, table.index_pages / indexes];
        if times[0] > BLOATED_HEAP || times[1] > BLOATED_INDEX {
            bloated = Some((table, times));
            break;
        }
    }
    match bloated {
        None => findings.ok("bloat", "tables and indexes are as large as their records need"),
        Some((table, [heap, indexes])) => findings.warning(
            "bloat",
            format!("{} has {heap:.1} times the pages of its records, its indexes have {indexes:.1} times theirs", table.name),
            "unused space costs disk and cache; new records reuse it, but the server does not return it to the disk",
            &format!(
                "purge more often; `REINDEX TABLE CONCURRENTLY {0}`; for the table itself `VACUUM FULL {0}`, during which no \
                 call gets through, or `pg_repack`",
                table.name
            ),
        ),
    }
    Ok(())
}

/// Checks for expired records that no purge has removed.
async fn purge(database: &Database, client: &Client, findings: &mut Findings) -> Result<(), tokio_postgres::Error> {
    let schema = database.schema.replace('"', "\"\"");
    let question = format!(
        "SELECT count(*), coalesce(extract(epoch FROM statement_timestamp() - min(listed_at)), 0)::int8 FROM \
         (SELECT listed_at FROM \"{schema}\".records WHERE listed_at < statement_timestamp() - interval '1 day' \
         ORDER BY listed_at LIMIT {MANY_EXPIRED}) AS due"
    );
    // An error is ignored here: if the login lacks the right to read, the probe reports the missing right.
    let Ok(rows) = ask(client, &question, &[]).await else { return Ok(()) };
    let (due, oldest): (i64, i64) = rows.first().map_or((0, 0), |row| (row.get(0), row.get(1)));
    findings.due(due.unsigned_abs(), Duration::from_secs(oldest.unsigned_abs()), "PostgresOptions");
    Ok(())
}

/// Checks whether each connection has its own session in the server. Behind a pooler, two open connections share a
/// backend, or a connection changes its backend.
async fn pooler(database: &Database, client: &Client, timeout: Duration, findings: &mut Findings) -> Result<(), Stop> {
    let other = database.connect(timeout).await?;
    let backend = async |client: &Client| one::<i32>(client, "SELECT pg_backend_pid()", &[]).await;
    let backends = async || Ok((backend(client).await?, backend(&other).await?, backend(client).await?));
    let (first, others, second) = backends().await.map_err(|error| refused(&error))?;
    let pooled = first == others || first != second;
    match (pooled, database.behind_pgbouncer) {
        (true, true) => findings.ok("pooler", "transactions share sessions, and `pgbouncer=true` says so"),
        (false, false) => findings.ok("pooler", "each connection has a session of its own"),
        (true, false) => findings.error(
            "pooler",
            "a pooler gives each transaction a session of its own",
            "prepared statements and LISTEN fail: calls are refused, and duplicates that wait are not woken",
            "`PostgresOptions::behind_pgbouncer` in the application, and `pgbouncer=true` in this URL",
        ),
        (false, true) => findings.warning(
            "pooler",
            "`pgbouncer=true`, but each connection has a session of its own",
            "duplicates that wait poll every 50 ms, and statements are planned each time",
            "leave out `PostgresOptions::behind_pgbouncer` if there is no pooler in transaction mode",
        ),
    }
    Ok(())
}
