//! Checks of a MySQL or MariaDB server.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error};

use super::{Findings, MANY_EXPIRED};
use crate::report::{Stop, human};
use crate::store::mysql::{Database, VERSION, refused};

/// Largest difference between the clocks of the server and of this machine that the doctor accepts, in microseconds.
const CLOCK_SKEW: i64 = 2_000_000;
/// The server's time in microseconds since 1970.
const NOW: &str = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))";

pub(crate) async fn examine(database: &Database, timeout: Duration, findings: &mut Findings) -> Result<(), Stop> {
    let mut conn = database.connect(timeout).await?;
    check_all(database, &mut conn, findings).await.map_err(|error| refused(&error))
}

async fn check_all(database: &Database, conn: &mut Conn, findings: &mut Findings) -> Result<(), Error> {
    let version: Option<String> = conn.query_first("SELECT version()").await?;
    check_version(&version.unwrap_or_default(), findings);
    let names = "'read_only', 'super_read_only', 'innodb_read_only', 'log_bin', 'binlog_format', 'sync_binlog', \
                 'innodb_flush_log_at_trx_commit', 'innodb_doublewrite', 'max_allowed_packet', 'wsrep_on', \
                 'group_replication_single_primary_mode'";
    let semi_sync = "'rpl\\_semi\\_sync%'";
    let question = format!("SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names}) OR Variable_name LIKE {semi_sync}");
    let mut variables: Vec<(String, String)> = conn.query(question).await?;
    let names = "'wsrep_cluster_size', 'Innodb_redo_log_enabled', 'Slaves_connected'";
    let question = format!("SHOW GLOBAL STATUS WHERE Variable_name IN ({names}) OR Variable_name LIKE {semi_sync}");
    variables.extend(conn.query::<(String, String), _>(question).await?);
    let mut variables: HashMap<_, _> = variables.into_iter().collect();
    if !variables.contains_key("Slaves_connected") {
        // MySQL has no such number. A login without the right `PROCESS` sees no session of a replica.
        let question = "SELECT count(*) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'";
        if let Ok(Some(replicas)) = conn.query_first::<u64, _>(question).await {
            variables.insert("Slaves_connected".to_owned(), replicas.to_string());
        }
    }
    check(&variables, findings);
    check_replication(&variables, findings);
    check_clock(conn, findings).await?;
    match database.differences(conn).await? {
        None => findings.error(
            "schema",
            format!("there is no table `{}`", database.table),
            "the store refuses to open",
            "`idem schema migrate`, or run what `idem schema print mysql` prints",
        ),
        Some(differences) => {
            match differences.is_empty() {
                true => findings.ok("schema", VERSION),
                false => findings.error(
                    "schema",
                    differences.join("; "),
                    "the store refuses to open, or is slower than it could be",
                    "compare with `idem schema print mysql`; a table of a later release needs that release",
                ),
            }
            check_rights(database, conn, findings).await?;
            check_purge(database, conn, findings).await;
        }
    }
    Ok(())
}

fn check_version(version: &str, findings: &mut Findings) {
    let needed = if version.contains("MariaDB") { (10, 6) } else { (8, 0) };
    let mut numbers = version.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    match (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default()) >= needed {
        true => findings.ok("version", version),
        false => findings.error(
            "version",
            version,
            "the store refuses to open",
            "use MySQL 8.0 or MariaDB 10.6, or a newer version",
        ),
    }
}

/// Checks whether a failover loses confirmed records.
fn check_replication(variables: &HashMap<String, String>, findings: &mut Findings) {
    // MySQL renamed the settings, and MariaDB has the old names.
    let get = |name: &str| {
        let name = |role: &str| format!("rpl_semi_sync_{role}_{name}");
        let found = |name: String| variables.iter().find(|(it, _)| it.eq_ignore_ascii_case(&name)).map(|(_, it)| &**it);
        found(name("source")).or_else(|| found(name("master"))).unwrap_or_default()
    };
    let is_on = |name: &str| get(name).eq_ignore_ascii_case("on") || get(name) == "1";
    let loss =
        "a failover forgets the records that the new primary has not received yet, and their operations run again";
    let remedy = "semi-synchronous replication that waits before the commit shows (`AFTER_SYNC`), with a long time-out, \
                  which costs each commit a round trip";
    let replicas = variables.get("Slaves_connected").and_then(|it| it.parse().ok()).unwrap_or(0_u32);
    match (is_on("enabled"), is_on("status"), get("wait_point")) {
        (false, ..) if replicas == 0 => findings.ok("replication", "no replica is known to follow this server"),
        (false, ..) => {
            findings.warning(
                "replication",
                format!("no commit waits for a replica, and {replicas} follow"),
                loss,
                remedy,
            );
        }
        (true, false, _) => findings.warning(
            "replication",
            "commits do not wait: no replica follows, or one has not answered within the time-out",
            loss,
            remedy,
        ),
        (true, true, "AFTER_COMMIT") => findings.warning(
            "replication",
            "commits wait for a replica only after they show (`AFTER_COMMIT`)",
            "another process may replay a result that a failover then forgets",
            remedy,
        ),
        (true, true, _) => {
            let found = format!("commits wait for a replica, for {} ms at most", get("timeout"));
            findings.ok("replication", found);
        }
    }
}

/// Compares this machine's clock with the server's. Only the server's clock measures leases.
async fn check_clock(conn: &mut Conn, findings: &mut Findings) -> Result<(), Error> {
    let ours = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros());
    let before = ours();
    let theirs: Option<i64> = conn.query_first(format!("SELECT {NOW}")).await?;
    let middle = i64::try_from(u128::midpoint(before, ours())).unwrap_or(i64::MAX);
    let off = theirs.unwrap_or_default().saturating_sub(middle);
    let by = human(Duration::from_micros(off.unsigned_abs()));
    match off.abs() > CLOCK_SKEW {
        true => findings.warning(
            "clock",
            format!("the server's clock is {by} {} this machine's", if off > 0 { "ahead of" } else { "behind" }),
            "only the server's clock measures leases, but after a failover to a server with another clock leases end \
             early or late by the difference",
            "let all servers follow a time server",
        ),
        false => findings.ok("clock", "within two seconds of this machine's"),
    }
    Ok(())
}

/// Checks the rights of the login to the table. The servers check the rights of a statement when they explain it.
async fn check_rights(database: &Database, conn: &mut Conn, findings: &mut Findings) -> Result<(), Error> {
    let table = &database.table;
    let mut lacks = Vec::new();
    for (right, statement) in [
        ("SELECT", format!("SELECT * FROM `{table}` WHERE `key` = ''")),
        ("INSERT", format!("INSERT INTO `{table}` SET `key` = ''")),
        ("UPDATE", format!("UPDATE `{table}` SET `lapses_at` = 0 WHERE FALSE")),
        ("DELETE", format!("DELETE FROM `{table}` WHERE FALSE")),
    ] {
        match conn.query_drop(format!("EXPLAIN {statement}")).await {
            // A right to the table, or to some of its columns, is missing.
            Err(Error::Server(error)) if matches!(error.code, 1142 | 1143) => lacks.push(right),
            Err(error @ (Error::Io(_) | Error::Driver(_))) => return Err(error),
            // Another error is not about rights.
            _ => {}
        }
    }
    let grants = "run the grants that `idem schema print mysql --login NAME` prints";
    match &lacks[..] {
        [] => findings.ok("permissions", "the login may use the table"),
        ["DELETE"] => findings.warning(
            "permissions",
            "the login lacks DELETE on the table",
            "handlers need no such right, but `idem purge`, `idem forget` and `MySqlOptions::purge_every` do",
            grants,
        ),
        lacks => {
            let found = format!("the login lacks {} on the table", lacks.join(", "));
            findings.error("permissions", found, "calls fail, or the store refuses to open", grants);
        }
    }
    Ok(())
}

/// Checks for expired records that no purge has removed.
async fn check_purge(database: &Database, conn: &mut Conn, findings: &mut Findings) {
    let table = &database.table;
    let question = format!(
        "SELECT count(*), coalesce({NOW} - min(listed_at), 0) DIV 1000000 FROM \
         (SELECT listed_at FROM `{table}` WHERE listed_at < {NOW} - 86400000000 ORDER BY listed_at \
         LIMIT {MANY_EXPIRED}) AS due"
    );
    // An error is ignored here: a missing right has its own finding.
    let Ok(Some((due, oldest))) = conn.query_first::<(u64, i64), _>(question).await else { return };
    findings.due(due, Duration::from_secs(oldest.unsigned_abs()), "MySqlOptions");
}

fn check(variables: &HashMap<String, String>, findings: &mut Findings) {
    let get = |name: &str| variables.get(name).map_or("", |value| &**value);
    let is_on = |name: &str| get(name).eq_ignore_ascii_case("on") || get(name) == "1";
    // `read_only` has more values than on and off on newer servers.
    let is_off = |name: &str| matches!(get(name).to_ascii_lowercase().as_str(), "" | "0" | "off");
    match get("innodb_flush_log_at_trx_commit") {
        // 3 is a value of MariaDB, which writes more than 1.
        flush @ ("1" | "3") => findings.ok("innodb_flush_log_at_trx_commit", flush),
        other => findings.error(
            "innodb_flush_log_at_trx_commit",
            other,
            "a crash of the server forgets the results of about the last second, and their operations run again",
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and write it into the configuration",
        ),
    }
    match get("innodb_doublewrite").to_ascii_lowercase().as_str() {
        "off" | "0" => findings.warning(
            "innodb_doublewrite",
            "off",
            "a crash of the machine may leave half of a page, and with it damaged records",
            "leave it on, unless the file system writes pages atomically",
        ),
        _ => findings.ok("innodb_doublewrite", "on"),
    }
    if is_on("log_bin") {
        match get("binlog_format").to_ascii_lowercase().as_str() {
            "statement" => findings.error(
                "binlog_format",
                "STATEMENT",
                "the server refuses the statements of the store, which run under READ COMMITTED",
                "set binlog_format to ROW",
            ),
            other => findings.ok("binlog_format", other.to_ascii_uppercase()),
        }
        match get("sync_binlog") {
            "1" => findings.ok("sync_binlog", "1"),
            other => findings.error(
                "sync_binlog",
                other,
                "after a crash of the machine the server undoes what its binary log lacks, and operations run again",
                "SET GLOBAL sync_binlog = 1, and write it into the configuration",
            ),
        }
    }
    let read_only = ["read_only", "super_read_only", "innodb_read_only"].into_iter().find(|name| !is_off(name));
    match read_only {
        Some(name) => findings.error(
            "role",
            format!("`{name}` is on: a replica"),
            "no operation can be reserved or recorded",
            "connect to the primary",
        ),
        None => findings.ok("role", "accepts writes"),
    }
    if is_on("wsrep_on") && get("wsrep_cluster_size").parse().is_ok_and(|nodes: u32| nodes > 1)
        || is_off("group_replication_single_primary_mode") && !get("group_replication_single_primary_mode").is_empty()
    {
        findings.error(
            "writers",
            "several servers of the cluster accept writes",
            "their clocks differ and they see the writes of others late, so two attempts may hold one key",
            "use a server with one primary, or a replication group in the mode with a single primary",
        );
    }
    if get("Innodb_redo_log_enabled").eq_ignore_ascii_case("off") {
        findings.error(
            "redo log",
            "off",
            "a crash of the server may lose all records",
            "ALTER INSTANCE ENABLE INNODB REDO_LOG",
        );
    }
    match get("max_allowed_packet").parse::<u64>() {
        Ok(bytes) if bytes < 1 << 20 => findings.warning(
            "max_allowed_packet",
            format!("{bytes} bytes"),
            "larger results are recorded without their content, and duplicates get an error",
            "raise max_allowed_packet above `max_result_bytes` of the policies",
        ),
        Ok(bytes) => findings.ok("max_allowed_packet", format!("{} MiB", bytes >> 20)),
        Err(_) => findings.unknown("max_allowed_packet", "not shown", "make sure that results fit"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;

    #[test]
    fn a_failover_that_loses_records_is_a_warning() {
        let level = |of: &[(&str, &str)]| {
            let variables = of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let mut findings = Findings::default();
            check_replication(&variables, &mut findings);
            findings.0[0].level
        };
        let master = |enabled, status, point| {
            level(&[
                ("rpl_semi_sync_master_enabled", enabled),
                ("Rpl_semi_sync_master_status", status),
                ("rpl_semi_sync_master_wait_point", point),
                ("Slaves_connected", "1"),
            ])
        };
        assert_eq!([level(&[]), level(&[("Slaves_connected", "0")])], [Level::Ok; 2]);
        assert_eq!(level(&[("Slaves_connected", "2")]), Level::Warning);
        assert_eq!(master("OFF", "OFF", "AFTER_SYNC"), Level::Warning);
        assert_eq!(master("ON", "OFF", "AFTER_SYNC"), Level::Warning);
        assert_eq!(master("ON", "ON", "AFTER_COMMIT"), Level::Warning);
        assert_eq!(master("ON", "ON", "AFTER_SYNC"), Level::Ok);
        let source = [("rpl_semi_sync_source_enabled", "ON"), ("Rpl_semi_sync_source_status", "ON")];
        assert_eq!(level(&source), Level::Ok);
    }

    #[test]
    fn a_version_that_the_store_refuses_is_an_error() {
        for (version, level) in [
            ("10.11.19-MariaDB-0+deb12u1", Level::Ok),
            ("10.6.0-MariaDB", Level::Ok),
            ("10.5.29-MariaDB", Level::Error),
            ("8.0.46", Level::Ok),
            ("9.7.1", Level::Ok),
            ("5.7.44-log", Level::Error),
            ("", Level::Error),
        ] {
            let mut findings = Findings::default();
            check_version(version, &mut findings);
            assert_eq!(findings.0[0].level, level, "{version}");
        }
    }

    #[test]
    fn each_bad_setting_of_mysql_is_a_finding() {
        let good = [
            ("innodb_flush_log_at_trx_commit", "1"),
            ("innodb_doublewrite", "ON"),
            ("log_bin", "ON"),
            ("binlog_format", "ROW"),
            ("sync_binlog", "1"),
            ("read_only", "OFF"),
            ("max_allowed_packet", "67108864"),
        ];
        let levels = |changed: Option<(&str, &str)>| {
            let mut variables: HashMap<_, _> =
                good.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            if let Some((name, value)) = changed {
                variables.insert(name.to_owned(), value.to_owned());
            }
            if changed.is_some_and(|(name, _)| name == "wsrep_on") {
                variables.insert("wsrep_cluster_size".to_owned(), "3".to_owned());
            }
            let mut findings = Findings::default();
            check(&variables, &mut findings);
            findings.0.into_iter().filter(|it| it.level != Level::Ok).map(|it| it.check).collect::<Vec<_>>()
        };
        assert_eq!(levels(None), [""; 0]);
        for (name, value, check) in [
            ("innodb_flush_log_at_trx_commit", "2", "innodb_flush_log_at_trx_commit"),
            ("innodb_doublewrite", "OFF", "innodb_doublewrite"),
            ("binlog_format", "STATEMENT", "binlog_format"),
            ("sync_binlog", "0", "sync_binlog"),
            ("read_only", "ON", "role"),
            ("read_only", "NO_LOCK", "role"),
            ("max_allowed_packet", "1024", "max_allowed_packet"),
            ("wsrep_on", "ON", "writers"),
            ("group_replication_single_primary_mode", "OFF", "writers"),
            ("Innodb_redo_log_enabled", "OFF", "redo log"),
        ] {
            assert_eq!(levels(Some((name, value))), [check], "{name}");
        }
    }
}
