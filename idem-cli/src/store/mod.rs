//! Which store a verb works on.

#[cfg(feature = "dynamodb")]
pub(crate) mod dynamodb;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::Store;

use crate::cost::Meter;
use crate::doctor::Findings;
use crate::report::{Stop, hidden};

const FORMS: &str = "sqlite:PATH[?table=NAME], redis://[user:password@]host[:port][/database], rediss://…, \
                     redis-cluster://host[:port][,host…], redis-sentinel://host[:port][,host…]/name, \
                     postgres://[user[:password]@]host[:port][/database][?schema=NAME][&sslmode=require][&pgbouncer=true] \
                     or dynamodb://TABLE?region=NAME[&endpoint=URL]";

/// The schemes of stores, which this program may have been built without.
const KNOWN: [&str; 8] =
    ["sqlite", "redis", "rediss", "redis-cluster", "redis-sentinel", "postgres", "postgresql", "dynamodb"];

/// Which store, and which records in it.
#[derive(clap::Args, Debug)]
pub(crate) struct StoreArguments {
    /// Where the records are; docs/cli.md has the forms (default: the variable `IDEM_STORE`, which keeps passwords out of
    /// lists of processes)
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// The namespace that the application gives its store (default: the variable `IDEM_NAMESPACE`, or else the store's own
    /// default)
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// How long one answer of the store may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

impl StoreArguments {
    /// The namespace, if one is said.
    pub(crate) fn namespace(&self) -> Result<Option<String>, Stop> {
        match &self.namespace {
            Some(namespace) => Ok(Some(namespace.clone())),
            None => variable("IDEM_NAMESPACE"),
        }
    }

    /// The URL, if one is said.
    pub(crate) fn url(&self) -> Result<Option<String>, Stop> {
        match &self.store {
            Some(url) => Ok(Some(url.clone())),
            None => variable("IDEM_STORE"),
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    pub(crate) fn place(&self) -> Result<Box<dyn Place>, Stop> {
        let missing = || Stop::Usage(format!("which store? Give --store URL, or set IDEM_STORE: {FORMS}"));
        let url = self.url()?.ok_or_else(missing)?;
        place(&url).map_err(Stop::Usage)
    }

    /// Opens the store. It has to be there: nothing is created.
    pub(crate) async fn open(&self) -> Result<Arc<dyn Store>, Stop> {
        self.place()?.open(self.namespace()?, self.timeout()).await
    }
}

/// An environment variable; empty is as good as none.
fn variable(name: &str) -> Result<Option<String>, Stop> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() => Ok(Some(value)),
        Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(Stop::Usage(format!("the variable {name} is not UTF-8"))),
    }
}

/// The answer of a place, some time.
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, Stop>> + 'a>>;

/// Where records are, of one kind of store.
pub(crate) trait Place {
    /// What errors and logs call a store of this kind.
    fn kind(&self) -> &'static str;

    /// What a record with this stored key is called in the server, and the server's own command that shows it.
    fn look_up(&self, namespace: Option<&str>, key: &str) -> (String, String);

    /// Opens the store. It has to be there: nothing is created.
    fn open(&self, namespace: Option<String>, timeout: Duration) -> Answer<'_, Arc<dyn Store>>;

    /// Creates what is missing of the schema, in PostgreSQL with so many partitions.
    fn create(&self, partitions: Option<u16>, timeout: Duration) -> Answer<'_, ()>;

    /// How the schema differs from the one that is needed, in PostgreSQL with so many partitions; `None` if there is none.
    fn differences(&self, partitions: Option<u16>, timeout: Duration) -> Answer<'_, Option<Vec<String>>>;

    /// What measures the cost of calls.
    fn meter(&self, namespace: Option<String>, timeout: Duration) -> Answer<'_, Box<dyn Meter>>;

    /// Adds what is wrong with the server.
    fn examine<'a>(
        &'a self,
        namespace: Option<&'a str>,
        timeout: Duration,
        findings: &'a mut Findings,
    ) -> Answer<'a, ()>;
}

/// Reads a URL. What is wrong with it is said without the URL, which may hold a password.
fn place(url: &str) -> Result<Box<dyn Place>, String> {
    let Some((scheme, _)) = url.split_once(':') else {
        return Err(format!("the store is no URL; write one of {FORMS}"));
    };
    match scheme {
        #[cfg(feature = "sqlite")]
        "sqlite" => boxed(sqlite::File::parse(url)),
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis+unix" | "unix" | "redis-cluster" | "redis-sentinel" => {
            boxed(redis::Servers::parse(url))
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => boxed(postgres::Database::parse(url)),
        #[cfg(feature = "dynamodb")]
        "dynamodb" => boxed(dynamodb::Table::parse(url)),
        known if KNOWN.contains(&known) => {
            Err(format!("this `idem` was built without the feature for `{scheme}:` URLs; build it anew, with that"))
        }
        _ => Err(format!("the store has the unknown scheme `{}:`; write one of {FORMS}", hidden(scheme))),
    }
}

#[allow(dead_code, reason = "without a store there is no place")]
fn boxed(parsed: Result<impl Place + 'static, String>) -> Result<Box<dyn Place>, String> {
    match parsed {
        Ok(place) => Ok(Box::new(place)),
        Err(problem) => Err(format!("the URL of the store can't be used: {}", hidden(&problem))),
    }
}

/// A URL without its query, and the parameters of that.
#[allow(dead_code, reason = "without a store nobody reads a URL")]
pub(crate) fn parameters(url: &str) -> (&str, Vec<(&str, &str)>) {
    let (url, query) = url.split_once('?').unwrap_or((url, ""));
    let parameters = query.split('&').filter(|it| !it.is_empty());
    (url, parameters.map(|it| it.split_once('=').unwrap_or((it, ""))).collect())
}

/// The columns that a statement creates.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
fn columns(sql: &str) -> Vec<&str> {
    let table = sql.split_once("CREATE TABLE").map_or("", |(_, table)| table);
    let lines = table.lines().skip(1).take_while(|line| line.starts_with("    "));
    lines.filter_map(|line| line.split_whitespace().next()).collect()
}

/// How the columns that were found differ from those that the statement creates.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
fn compare(sql: &str, found: &[String]) -> Vec<String> {
    let needed = columns(sql);
    let missing = needed.iter().filter(|name| !found.iter().any(|it| it == *name));
    let missing = missing.map(|name| format!("the column `{name}` is missing"));
    let other = found.iter().filter(|name| !needed.contains(&name.as_str()));
    missing.chain(other.map(|name| format!("the column `{name}` is not of this release"))).collect()
}
