//! `postgres://…[?schema=NAME][&pgbouncer=true]`.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{PostgresStore, Store};
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row};

use super::{Access, NO_INDEX_FOR_DECISIONS, NO_INDEX_FOR_PURGES, Place, PlaceFuture, Server, compare, parameters};
use crate::report::{Stop, chain};
use crate::shell;
use crate::tls;

/// Version of the table's layout that this release needs. The comment on the table in PostgreSQL starts with this text.
pub(crate) const VERSION: &str = "idem 1";
/// Default schema of the table of records.
const SCHEMA: &str = "idem";

/// A database, and the schema that contains the table.
pub(crate) struct Database {
    url: String,
    pub(crate) schema: String,
    pub(crate) behind_pgbouncer: bool,
}

impl Database {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let (base, given) = parameters(url);
        let (mut schema, mut behind_pgbouncer) = (SCHEMA.to_owned(), false);
        let mut theirs = Vec::new();
        for (name, value) in given {
            match (name, value) {
                ("schema", "") => return Err("`schema` names no schema".to_owned()),
                ("schema", name) => name.clone_into(&mut schema),
                ("pgbouncer", "true" | "false") => behind_pgbouncer = value == "true",
                ("pgbouncer", _) => return Err("`pgbouncer` is `true` or `false`".to_owned()),
                // The TLS of this store checks every certificate in full, so `verify-full` and `require` mean the same.
                ("sslmode", "verify-full") => theirs.push("sslmode=require".to_owned()),
                _ => theirs.push(format!("{name}={value}")),
            }
        }
        let url = if theirs.is_empty() { base.to_owned() } else { format!("{base}?{}", theirs.join("&")) };
        // The driver's error may contain the URL.
        let form = "write `postgres://[user[:password]@]host[:port][/database]`, with `schema`, `sslmode` or `pgbouncer` \
                    behind a `?`";
        url.parse::<Config>().map_err(|_| form)?;
        Ok(Self { url, schema, behind_pgbouncer })
    }

    fn options(&self, timeout: Duration) -> idem_runtime::postgres::PostgresOptions {
        let options = PostgresStore::options().schema(&self.schema).response_timeout(timeout).pool_size(2);
        if self.behind_pgbouncer { options.behind_pgbouncer() } else { options }
    }

    /// Returns the command line of `psql` that asks `question`. `psql` asks for the password, or reads it from
    /// `~/.pgpass`.
    fn psql(&self, question: &str) -> String {
        let config: Config = self.url.parse().unwrap_or_default();
        let host = |host: &Host| match host {
            Host::Tcp(name) => name.clone(),
            #[cfg(unix)]
            Host::Unix(path) => path.to_string_lossy().into_owned(),
        };
        let hosts = config.get_hosts().iter().map(host).collect::<Vec<_>>().join(",");
        let ports = config.get_ports().iter().map(u16::to_string).collect::<Vec<_>>().join(",");
        let user = config.get_user().unwrap_or_default();
        let given = [("-h", &*hosts), ("-p", &ports), ("-U", user), ("-d", config.get_dbname().unwrap_or_default())];
        let given = given.into_iter().filter(|(_, value)| !value.is_empty());
        let words = given.flat_map(|(option, value)| [option, value]).chain(["-x", "-c", question]);
        let psql = shell::line(["psql"].into_iter().chain(words));
        match config.get_ssl_mode() {
            SslMode::Require => format!("PGSSLMODE=require {psql}"),
            _ => psql,
        }
    }

    /// Opens a plain connection, without the settings of a store.
    pub(crate) async fn connect(&self, timeout: Duration) -> Result<Client, Stop> {
        let unreachable =
            |error: tokio_postgres::Error| Stop::Unreachable(format!("the server can't be reached: {}", chain(&error)));
        let mut config: Config = self.url.parse().map_err(unreachable)?;
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(timeout);
        }
        config.application_name("idem-cli");
        if config.get_ssl_mode() != SslMode::Require {
            config.ssl_mode(SslMode::Disable);
            let (client, connection) = config.connect(NoTls).await.map_err(unreachable)?;
            tokio::spawn(connection);
            return Ok(client);
        }
        tls::provide();
        let tls = tokio_postgres_rustls::MakeRustlsConnect::with_native_certs();
        let no_certificates =
            |_| Stop::Unreachable("the system has no trusted certificates, which TLS needs".to_owned());
        let (tls, _) = tls.map_err(no_certificates)?;
        let (client, connection) = config.connect(tls).await.map_err(unreachable)?;
        tokio::spawn(connection);
        Ok(client)
    }
}

impl Place for Database {
    fn kind(&self) -> &'static str {
        "postgres"
    }

    fn look_up(&self, _: Option<&str>, key: &str) -> (String, String) {
        let (schema, quoted) = (self.schema.replace('"', "\"\""), key.replace('\'', "''"));
        let question = format!("SELECT * FROM \"{schema}\".records WHERE key = '{quoted}'");
        (key.to_owned(), self.psql(&question))
    }

    fn without_namespace(&self) -> Option<&'static str> {
        Some("`?schema=NAME` in the URL names the schema of another application")
    }

    fn open(&self, _: Option<String>, timeout: Duration, access: Access) -> PlaceFuture<'_, Arc<dyn Store>> {
        let options = self.options(timeout);
        let options = if access == Access::Read { options.read_only() } else { options };
        Box::pin(async move { Ok(Arc::new(options.connect(&self.url).await?) as _) })
    }

    fn create(&self, partitions: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(async move {
            self.options(timeout).ensure_schema().partitions(partitions.unwrap_or(0)).connect(&self.url).await?;
            let client = self.connect(timeout).await?;
            match other_partitions(&client, &self.schema, partitions).await.map_err(|error| refused(&error))? {
                Some(difference) => Err(Stop::Refused(difference)),
                None => Ok(()),
            }
        })
    }

    fn differences(&self, partitions: Option<u16>, timeout: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        Box::pin(async move {
            let client = self.connect(timeout).await?;
            let differences = async {
                let found = differences(&client, &self.schema).await?;
                let other = other_partitions(&client, &self.schema, partitions).await?;
                Ok(found.map(|found| found.into_iter().chain(other).collect()))
            };
            differences.await.map_err(|error| refused(&error))
        })
    }

    fn server(&self) -> Server<'_> {
        Server::Postgres(self)
    }
}

/// Sends `question` as an unnamed statement, because a pooler would not keep a named statement.
pub(crate) async fn ask(client: &Client, question: &str, texts: &[&str]) -> Result<Vec<Row>, tokio_postgres::Error> {
    let params: Vec<_> = texts.iter().map(|text| (text as &(dyn ToSql + Sync), Type::TEXT)).collect();
    client.query_typed(question, &params).await
}

/// Converts an error of PostgreSQL into the reason why the command stops. PostgreSQL's message names the missing right.
pub(crate) fn refused(error: &tokio_postgres::Error) -> Stop {
    Stop::Unreachable(format!("the server refused a statement: {}", chain(error)))
}

/// Returns the partitions of the table that hold records, each with its storage parameters; empty if the table is
/// plain.
async fn partitions(client: &Client, schema: &str) -> Result<Vec<(String, String)>, tokio_postgres::Error> {
    let question = "SELECT p.relname::text, coalesce(array_to_string(p.reloptions, ','), '') \
                    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                    CROSS JOIN LATERAL pg_partition_tree(c.oid) t JOIN pg_class p ON p.oid = t.relid \
                    WHERE n.nspname = $1 AND c.relname = 'records' AND t.isleaf ORDER BY 1";
    Ok(ask(client, question, &[schema]).await?.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Describes a wrong number of partitions, and refers to the page about changing that number.
async fn other_partitions(
    client: &Client,
    schema: &str,
    wanted: Option<u16>,
) -> Result<Option<String>, tokio_postgres::Error> {
    let said = |count: usize| if count == 0 { "is plain".to_owned() } else { format!("has {count} partitions") };
    let found = partitions(client, schema).await?.len();
    let other = wanted.map(usize::from).filter(|wanted| *wanted != found);
    Ok(other.map(|wanted| {
        let shall = if wanted == 0 { "be plain".to_owned() } else { format!("have {wanted} partitions") };
        format!(
            "the table {}, and shall {shall}: that is not changed in place; docs/operations.md, \"At size\", says how its \
             records are moved",
            said(found)
        )
    }))
}

/// Lists the differences between the table and the table that this release needs; `None` if there is no table.
pub(crate) async fn differences(client: &Client, schema: &str) -> Result<Option<Vec<String>>, tokio_postgres::Error> {
    let question = "SELECT obj_description(c.oid, 'pg_class'), \
                    c.relkind = 'p' OR coalesce(array_to_string(c.reloptions, ',') ~ 'fillfactor', false), \
                    (SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped), \
                    EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = i.indkey[0] \
                            WHERE i.indrelid = c.oid AND i.indisvalid AND a.attname = 'listed_at'), \
                    EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid \
                            AND pg_get_expr(i.indpred, i.indrelid) = 'on_crash_fail') \
                    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                    WHERE n.nspname = $1 AND c.relname = 'records'";
    let rows = ask(client, question, &[schema]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let (comment, has_room): (Option<String>, bool) = (row.get(0), row.get(1));
    let (found, indexed, counted): (Option<Vec<String>>, bool, bool) = (row.get(2), row.get(3), row.get(4));
    let mut differences = compare(&PostgresStore::schema_sql(schema), &found.unwrap_or_default());
    let comment = comment.unwrap_or_default();
    let version = comment.split([' ', ':', ';', ',']).take(2).collect::<Vec<_>>().join(" ");
    if version != VERSION {
        differences.push(format!("its comment names the version `{version}`, not `{VERSION}`"));
    }
    if !indexed {
        differences.push(NO_INDEX_FOR_PURGES.to_owned());
    }
    if !counted {
        differences.push(NO_INDEX_FOR_DECISIONS.to_owned());
    }
    let partitions = partitions(client, schema).await?;
    let without = partitions.iter().filter(|(_, options)| !options.contains("fillfactor"));
    differences.extend(without.map(|(name, _)| format!("the partition `{name}` has no fillfactor")));
    if !has_room {
        differences.push("there is no fillfactor: completions move rows to other pages".to_owned());
    }
    Ok(Some(differences))
}
