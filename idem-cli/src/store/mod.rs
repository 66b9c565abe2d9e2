//! The store that a command works on.

#[cfg(feature = "dynamodb")]
pub(crate) mod dynamodb;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "nats")]
pub(crate) mod nats;
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

use crate::report::{Stop, hidden, time_limit};

const FORMS: &str = "sqlite:PATH[?table=NAME], redis://[user:password@]host[:port][/database], rediss://…, \
                     redis-cluster://host[:port][,host…], redis-sentinel://host[:port][,host…]/name, \
                     postgres://[user[:password]@]host[:port][/database][?schema=NAME][&sslmode=require][&pgbouncer=true], \
                     mysql://[user[:password]@]host[:port]/database[?table=NAME][&require_ssl=true], \
                     nats://[user:password@]host[:port][,host…][/BUCKET] or dynamodb://TABLE?region=NAME[&endpoint=URL]";

/// Schemes of all stores, including those that this build leaves out.
const KNOWN: [&str; 10] = [
    "sqlite",
    "redis",
    "rediss",
    "redis-cluster",
    "redis-sentinel",
    "postgres",
    "postgresql",
    "mysql",
    "nats",
    "dynamodb",
];

/// Selection of the store and of its namespace.
#[derive(clap::Args, Debug)]
pub(crate) struct StoreArguments {
    /// URL of the store; docs/cli.md lists the forms (default: the variable `IDEM_STORE`, which keeps passwords out of
    /// process lists)
    #[arg(long, value_name = "URL", global = true)]
    store: Option<String>,
    /// Namespace that the application gives its store (default: the variable `IDEM_NAMESPACE`, or else the store's own
    /// default)
    #[arg(long, value_name = "NAME", global = true)]
    namespace: Option<String>,
    /// Time limit for an answer of the store, as `10s` or `2m`
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_limit, global = true)]
    timeout: Duration,
}

impl StoreArguments {
    /// Returns the namespace, if it is set. Fails if records of `place` have no namespace.
    pub(crate) fn namespace(&self, place: &dyn Place) -> Result<Option<String>, Stop> {
        match (self.any_namespace()?, place.without_namespace()) {
            (Some(_), Some(instead)) => Err(Stop::Usage(format!(
                "the records of {} have no namespace, so `--namespace` and IDEM_NAMESPACE select none of them: leave both \
                 out; {instead}",
                place.kind()
            ))),
            (namespace, _) => Ok(namespace),
        }
    }

    /// Returns the namespace, if it is set, for keys of no particular store.
    pub(crate) fn any_namespace(&self) -> Result<Option<String>, Stop> {
        match &self.namespace {
            Some(namespace) => Ok(Some(namespace.clone())),
            None => variable("IDEM_NAMESPACE"),
        }
    }

    /// Returns the URL, if it is set.
    pub(crate) fn url(&self) -> Result<Option<String>, Stop> {
        match &self.store {
            Some(url) => Ok(Some(url.clone())),
            None => variable("IDEM_STORE"),
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn place(&self) -> Result<Box<dyn Place>, Stop> {
        let missing = || Stop::Usage(format!("which store? Give --store URL, or set IDEM_STORE: {FORMS}"));
        let url = self.url()?.ok_or_else(missing)?;
        place(&url).map_err(Stop::Usage)
    }

    /// Opens the store, which must exist.
    pub(crate) async fn open(&self) -> Result<Arc<dyn Store>, Stop> {
        self.open_for(Access::Write).await
    }

    /// Opens the store, which must exist, for commands that only read.
    pub(crate) async fn open_to_read(&self) -> Result<Arc<dyn Store>, Stop> {
        self.open_for(Access::Read).await
    }

    async fn open_for(&self, access: Access) -> Result<Arc<dyn Store>, Stop> {
        let place = self.place()?;
        place.open(self.namespace(&*place)?, self.timeout(), access).await
    }
}

/// Returns an environment variable; `None` if the variable is not set, or is empty.
fn variable(name: &str) -> Result<Option<String>, Stop> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() => Ok(Some(value)),
        Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(Stop::Usage(format!("the variable {name} is not UTF-8"))),
    }
}

/// Future that a method of [`Place`] returns.
pub(crate) type PlaceFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Stop>> + 'a>>;

/// Purpose for which a command opens a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// The command only reads, so a standby suffices.
    Read,
    Write,
}

/// Location of records, for one kind of store.
pub(crate) trait Place {
    /// Returns the name of this kind of store in errors and logs.
    fn kind(&self) -> &'static str;

    /// Returns the name that a record with this stored key has in the server, and the command line of the server's own
    /// client that shows the record. The command line can be pasted into a shell, and has no password.
    fn look_up(&self, namespace: Option<&str>, key: &str) -> (String, String);

    /// Returns a text that names what keeps the records of applications apart in this store; `None` if a namespace
    /// does.
    fn without_namespace(&self) -> Option<&'static str> {
        None
    }

    /// Opens the store, which must exist.
    fn open(&self, namespace: Option<String>, timeout: Duration, access: Access) -> PlaceFuture<'_, Arc<dyn Store>>;

    /// Creates the missing parts of the schema (in PostgreSQL, with this number of partitions).
    fn create(&self, partitions: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()>;

    /// Lists the differences between the schema and the schema that this release needs (in PostgreSQL, with this number
    /// of partitions); `None` if the schema does not exist.
    fn differences(&self, partitions: Option<u16>, timeout: Duration) -> PlaceFuture<'_, Option<Vec<String>>>;

    /// Returns this place as its concrete type, for commands that treat the kinds of stores differently.
    fn server(&self) -> Server<'_>;
}

/// A [`Place`] as its concrete type.
pub(crate) enum Server<'a> {
    #[cfg(feature = "dynamodb")]
    Dynamo(&'a dynamodb::Table),
    #[cfg(feature = "mysql")]
    MySql(&'a mysql::Database),
    #[cfg(feature = "nats")]
    Nats(&'a nats::Bucket),
    #[cfg(feature = "postgres")]
    Postgres(&'a postgres::Database),
    #[cfg(feature = "redis")]
    Redis(&'a redis::Servers),
    #[cfg(feature = "sqlite")]
    Sqlite(&'a sqlite::File),
    /// Never constructed. Keeps the enum valid in a build without stores.
    #[cfg(not(any(
        feature = "dynamodb",
        feature = "mysql",
        feature = "nats",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite"
    )))]
    #[expect(dead_code, reason = "it only gives the lifetime a use")]
    Absent(&'a std::convert::Infallible),
}

/// Parses a URL. The error does not contain the URL, which may hold a password.
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
        #[cfg(feature = "mysql")]
        "mysql" => boxed(mysql::Database::parse(url)),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => boxed(postgres::Database::parse(url)),
        #[cfg(feature = "nats")]
        "nats" => boxed(nats::Bucket::parse(url)),
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

/// Splits a URL into the part before its query, and the parameters of the query.
#[allow(dead_code, reason = "a build without stores reads no URL")]
pub(crate) fn parameters(url: &str) -> (&str, Vec<(&str, &str)>) {
    let (url, query) = url.split_once('?').unwrap_or((url, ""));
    let parameters = query.split('&').filter(|it| !it.is_empty());
    (url, parameters.map(|it| it.split_once('=').unwrap_or((it, ""))).collect())
}

/// Returns the columns that a statement creates.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
fn columns(sql: &str) -> Vec<&str> {
    let table = sql.split_once("CREATE TABLE").map_or("", |(_, table)| table);
    let lines = table.lines().skip(1).take_while(|line| line.starts_with("    "));
    lines.filter_map(|line| line.split_whitespace().next()).collect()
}

/// Difference of a table without the index that a purge reads.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
const NO_INDEX_FOR_PURGES: &str = "there is no index on `listed_at`: purging reads the whole table";
/// Difference of a table without the index of the keys that wait for a decision.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
const NO_INDEX_FOR_DECISIONS: &str = "there is no index on `key` where `on_crash_fail`: counting the keys that wait for a decision reads the whole table";

/// Lists the differences between the existing columns and the columns that the statement creates.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
fn compare(sql: &str, found: &[String]) -> Vec<String> {
    let needed = columns(sql);
    let missing = needed.iter().filter(|name| !found.iter().any(|it| it == *name));
    let missing = missing.map(|name| format!("the column `{name}` is missing"));
    let other = found.iter().filter(|name| !needed.contains(&name.as_str()));
    missing.chain(other.map(|name| format!("the column `{name}` is not of this release"))).collect()
}
