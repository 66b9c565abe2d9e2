//! `idem doctor`: checks whether the server keeps recorded results.

#[cfg(feature = "dynamodb")]
mod dynamodb;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "postgres")]
mod postgres;
mod probe;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

#[cfg(any(feature = "mysql", feature = "postgres"))]
use crate::report::human;
use crate::report::{Output, STATUSES, Stop, hidden};
#[cfg(feature = "redis")]
use crate::store::redis::NAMESPACE;
use crate::store::{Access, Server, StoreArguments};

/// Checks the server of a store: durability, rights of the login, and a probe key through all operations.
///
/// Each finding states its consequence and a remedy. Exit status 1 if a finding is an error. Writes only the record of
/// a probe key, in the scope `idem-doctor`, and removes this record at the end.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct DoctorArguments {
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Number of rows that expired more than a day ago and still exist, at which the doctor stops counting, and warns.
#[cfg(any(feature = "mysql", feature = "postgres"))]
const MANY_EXPIRED: u64 = 10_000;

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Level {
    Ok,
    /// The check was not possible.
    #[allow(dead_code, reason = "some stores tell everything")]
    Unknown,
    Warning,
    Error,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// Result of a check.
#[derive(Debug)]
pub(crate) struct Finding {
    check: &'static str,
    level: Level,
    found: String,
    /// Consequence of the finding. Both `consequence` and `remedy` are empty if the check found no problem.
    consequence: String,
    remedy: String,
}

/// The findings of all checks so far.
#[derive(Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, check: &'static str, level: Level, found: &str, consequence: &str, remedy: &str) {
        let (found, consequence, remedy) = (hidden(found), consequence.to_owned(), remedy.to_owned());
        self.0.push(Finding { check, level, found, consequence, remedy });
    }

    pub(crate) fn ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(check, Level::Ok, &found.into(), "", "");
    }

    /// Adds a check that the server did not answer.
    #[allow(dead_code, reason = "some stores tell everything")]
    pub(crate) fn unknown(&mut self, check: &'static str, found: impl Into<String>, remedy: &str) {
        self.add(check, Level::Unknown, &found.into(), "this was not checked", remedy);
    }

    #[allow(dead_code, reason = "without a store there is nothing to warn of")]
    pub(crate) fn warning(&mut self, check: &'static str, found: impl Into<String>, consequence: &str, remedy: &str) {
        self.add(check, Level::Warning, &found.into(), consequence, remedy);
    }

    pub(crate) fn error(&mut self, check: &'static str, found: impl Into<String>, consequence: &str, remedy: &str) {
        self.add(check, Level::Error, &found.into(), consequence, remedy);
    }

    /// Adds the check whether a purge removes expired records. `due`: number of records that were due a day ago, at
    /// most [`MANY_EXPIRED`]. `options`: name of the store's options.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    fn due(&mut self, due: u64, oldest: Duration, options: &str) {
        let oldest = human(oldest);
        match due {
            0 => self.ok("purge", "no record was due a day ago"),
            MANY_EXPIRED.. => self.warning(
                "purge",
                format!("{MANY_EXPIRED} records or more were due a day ago; the oldest {oldest} ago"),
                "expired records are never removed, or fewer than come: the table grows",
                &format!("set `{options}::purge_every`, or run `idem purge` from time to time"),
            ),
            due => self.ok("purge", format!("{due} records were due a day ago; the oldest {oldest} ago")),
        }
    }
}

/// Examines the server through its own driver, and adds the findings.
#[allow(unused_variables, reason = "a build without stores examines none")]
async fn examine(
    server: Server<'_>,
    namespace: Option<&str>,
    timeout: Duration,
    findings: &mut Findings,
) -> Result<(), Stop> {
    match server {
        #[cfg(feature = "dynamodb")]
        Server::Dynamo(table) => dynamodb::examine(table, timeout, findings).await,
        #[cfg(feature = "mysql")]
        Server::MySql(database) => mysql::examine(database, timeout, findings).await,
        #[cfg(feature = "nats")]
        Server::Nats(bucket) => nats::examine(bucket, timeout, findings).await,
        #[cfg(feature = "postgres")]
        Server::Postgres(database) => postgres::examine(database, timeout, findings).await,
        #[cfg(feature = "redis")]
        Server::Redis(servers) => redis::examine(servers, namespace.unwrap_or(NAMESPACE), timeout, findings).await,
        #[cfg(feature = "sqlite")]
        Server::Sqlite(file) => sqlite::examine(file, findings),
        #[cfg(not(any(
            feature = "dynamodb",
            feature = "mysql",
            feature = "nats",
            feature = "postgres",
            feature = "redis",
            feature = "sqlite"
        )))]
        Server::Absent(never) => match *never {},
    }
}

pub(crate) async fn main(arguments: &DoctorArguments) -> Result<ExitCode, Stop> {
    let place = arguments.store.place()?;
    let (namespace, timeout) = (arguments.store.namespace(&*place)?, arguments.store.timeout());
    let mut findings = Findings::default();
    examine(place.server(), namespace.as_deref(), timeout, &mut findings).await?;
    match place.open(namespace, timeout, Access::Write).await {
        Ok(store) => probe::probe(&*store, &mut findings).await,
        Err(Stop::Unreachable(found)) => findings.error(
            "open",
            found,
            "no process can use this store",
            "do what the message says, then run this again",
        ),
        Err(stop) => return Err(stop),
    }
    let output = Output { json: arguments.json };
    let count = |level| findings.0.iter().filter(|it| it.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    for Finding { check, level, found, consequence, remedy } in &findings.0 {
        let object = json!({
            "check": check, "level": level.name(), "found": found, "consequence": consequence, "remedy": remedy,
        });
        let mut text = format!("{:<8} {check}: {found}", level.name());
        for (name, said) in [("consequence", consequence), ("remedy", remedy)] {
            if !said.is_empty() {
                text = format!("{text}\n         {name}: {said}");
            }
        }
        output.line(&object, &text)?;
    }
    if !arguments.json {
        let (kind, checks) = (place.kind(), findings.0.len());
        let text = format!("\n{kind}: checks: {checks}, errors: {errors}, warnings: {warnings}");
        output.line(&json!(null), &text)?;
    }
    Ok(if errors == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
