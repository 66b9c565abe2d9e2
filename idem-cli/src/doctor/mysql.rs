//! Checks of a MySQL or MariaDB server.

use std::collections::HashMap;
use std::time::Duration;

use mysql_async::prelude::Queryable;

use super::Findings;
use crate::report::Stop;
use crate::store::mysql::{Database, refused};

pub(crate) async fn examine(database: &Database, timeout: Duration, findings: &mut Findings) -> Result<(), Stop> {
    let mut conn = database.connect(timeout).await?;
    let read = async {
        let version: Option<String> = conn.query_first("SELECT version()").await?;
        let names = "'read_only', 'super_read_only', 'innodb_read_only', 'log_bin', 'binlog_format', 'sync_binlog', \
                     'innodb_flush_log_at_trx_commit', 'innodb_doublewrite', 'max_allowed_packet', 'wsrep_on', \
                     'group_replication_single_primary_mode'";
        let question = format!("SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})");
        let mut variables: Vec<(String, String)> = conn.query(question).await?;
        let question = "SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_cluster_size', 'Innodb_redo_log_enabled')";
        variables.extend(conn.query::<(String, String), _>(question).await?);
        Ok((version.unwrap_or_default(), variables.into_iter().collect()))
    };
    let (version, variables) = read.await.map_err(|error: mysql_async::Error| refused(&error))?;
    findings.ok("version", version);
    check(&variables, findings);
    Ok(())
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
