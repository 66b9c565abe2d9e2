//! `mysql://…/DATABASE[?table=NAME][&require_ssl=true]`.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::mysql::MySqlOptions;
use idem_runtime::{MySqlStore, Store};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Opts, OptsBuilder};

use super::{Access, NO_INDEX_FOR_DECISIONS, NO_INDEX_FOR_PURGES, Place, PlaceFuture, Server, compare, parameters};
use crate::report::Stop;
use crate::{shell, tls};

/// Default name of the table of records.
pub(crate) const TABLE: &str = "idem_records";
/// Version of the table's layout that this release needs. The comment on the table starts with this text.
pub(crate) const VERSION: &str = "idem 1";

/// A database, and the name of the table in this database.
pub(crate) struct Database {
    url: String,
    pub(crate) table: String,
}

impl Database {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let (base, given) = parameters(url);
        let mut table = TABLE.to_owned();
        let mut theirs = Vec::new();
        for (name, value) in given {
            match (name, value) {
                ("table", name) => name.clone_into(&mut table),
                _ => theirs.push(format!("{name}={value}")),
            }
        }
        if table.is_empty() || !table.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err("the name of a table has letters, digits and `_`".to_owned());
        }
        let url = if theirs.is_empty() { base.to_owned() } else { format!("{base}?{}", theirs.join("&")) };
        // The driver's error may contain the URL.
        let form = "write `mysql://[user[:password]@]host[:port]/database`, with `table` or `require_ssl` behind a `?`";
        let opts = Opts::from_url(&url).map_err(|_| form)?;
        if opts.db_name().is_none_or(str::is_empty) {
            return Err(form.to_owned());
        }
        Ok(Self { url, table })
    }

    fn options(&self, timeout: Duration) -> MySqlOptions {
        MySqlStore::options().table(&self.table).response_timeout(timeout).pool_size(2)
    }

    /// Opens a plain connection, without the settings of a store.
    pub(crate) async fn connect(&self, timeout: Duration) -> Result<Conn, Stop> {
        let unreachable = |text: &str| Stop::Unreachable(format!("the server can't be reached: {text}"));
        let opts = Opts::from_url(&self.url).map_err(|_| unreachable("the URL can't be used"))?;
        let ssl = opts.ssl_opts().cloned().map(|ssl| {
            tls::provide();
            let roots = rustls_native_certs::load_native_certs().certs;
            let roots = roots.into_iter().map(|root| root.to_vec().into()).collect();
            ssl.with_root_certs(roots).with_disable_built_in_roots(true)
        });
        let is_encrypted = ssl.is_some();
        let opts = OptsBuilder::from_opts(opts).prefer_socket(false).ssl_opts(ssl);
        match tokio::time::timeout(timeout, Conn::new(opts)).await {
            Ok(Ok(conn)) => Ok(conn),
            // MariaDB does not tell that it takes only encrypted connections.
            Ok(Err(Error::Server(error))) if matches!(error.code, 1045 | 3159) && !is_encrypted => Err(unreachable(
                &format!("{error}; if it takes only encrypted connections, add `?require_ssl=true` to the URL"),
            )),
            Ok(Err(error)) => Err(unreachable(&error.to_string())),
            Err(_) => Err(unreachable("no answer in time")),
        }
    }

    /// Returns the command line of `mysql` that asks `question`, and for the password.
    fn mysql(&self, question: &str) -> String {
        let opts = Opts::from_url(&self.url).unwrap_or_default();
        let (host, port) = (opts.ip_or_hostname().to_owned(), opts.tcp_port().to_string());
        let (user, database) = (opts.user().unwrap_or_default(), opts.db_name().unwrap_or_default());
        let given = [("-h", &*host), ("-P", &*port), ("-u", user), ("-D", database)];
        let given = given.into_iter().filter(|(_, value)| !value.is_empty());
        let words = given.flat_map(|(option, value)| [option, value]).chain(["-p", "-E", "-e", question]);
        shell::line(["mysql", "--skip-binary-as-hex"].into_iter().chain(words))
    }

    /// Returns the differences between the table and the table that this release needs; `None` if there is no table.
    pub(crate) async fn differences(&self, conn: &mut Conn) -> Result<Option<Vec<String>>, Error> {
        let of_table = "WHERE table_schema = database() AND table_name = ?";
        let comment = format!("SELECT table_comment FROM information_schema.tables {of_table}");
        let Some(comment) = conn.exec_first::<String, _, _>(comment, (&self.table,)).await? else { return Ok(None) };
        let columns =
            format!("SELECT column_name FROM information_schema.columns {of_table} ORDER BY ordinal_position");
        let found: Vec<String> = conn.exec(columns, (&self.table,)).await?;
        let indexed = format!("SELECT column_name FROM information_schema.statistics {of_table} AND seq_in_index = 1");
        let indexed: Vec<String> = conn.exec(indexed, (&self.table,)).await?;
        let needed = MySqlStore::schema_sql(&self.table);
        let needed = needed.lines().filter_map(|line| line.strip_prefix("    `")?.split_once('`'));
        let needed: Vec<_> = needed.map(|(name, _)| format!("    {name}")).collect();
        let mut differences = compare(&format!("CREATE TABLE\n{}", needed.join("\n")), &found);
        let version = comment.split([' ', ':', ';', ',']).take(2).collect::<Vec<_>>().join(" ");
        if version != VERSION {
            differences.push(format!("its comment names the version `{version}`, not `{VERSION}`"));
        }
        for (column, missing) in [("listed_at", NO_INDEX_FOR_PURGES), ("on_crash_fail", NO_INDEX_FOR_DECISIONS)] {
            if !indexed.iter().any(|it| it == column) {
                differences.push(missing.to_owned());
            }
        }
        Ok(Some(differences))
    }
}

/// Returns the error for a statement that the server refused.
pub(crate) fn refused(error: &Error) -> Stop {
    Stop::Unreachable(format!("the server refused: {error}"))
}

impl Place for Database {
    fn kind(&self) -> &'static str {
        "mysql"
    }

    fn look_up(&self, _: Option<&str>, key: &str) -> (String, String) {
        let quoted = key.replace('\\', "\\\\").replace('\'', "''");
        let question = format!("SELECT * FROM `{}` WHERE `key` = '{quoted}'", self.table);
        (key.to_owned(), self.mysql(&question))
    }

    fn without_namespace(&self) -> Option<&'static str> {
        Some("`?table=NAME` in the URL names the table of another application")
    }

    fn open(&self, _: Option<String>, timeout: Duration, access: Access) -> PlaceFuture<'_, Arc<dyn Store>> {
        let options = self.options(timeout);
        let options = if access == Access::Read { options.read_only() } else { options };
        Box::pin(async move { Ok(Arc::new(options.connect(&self.url).await?) as _) })
    }

    fn create(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(async move {
            self.options(timeout).ensure_schema().connect(&self.url).await?;
            Ok(())
        })
    }

    fn differences(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        Box::pin(async move {
            let mut conn = self.connect(timeout).await?;
            Self::differences(self, &mut conn).await.map_err(|error| refused(&error))
        })
    }

    fn server(&self) -> Server<'_> {
        Server::MySql(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mysql_urls_are_parsed_and_give_a_command_without_the_password() {
        let parsed =
            Database::parse("mysql://bob:secret@db:3307/shop?table=shop_idem&require_ssl=true").expect("a URL");
        assert_eq!((&*parsed.url, &*parsed.table), ("mysql://bob:secret@db:3307/shop?require_ssl=true", "shop_idem"));
        let (_, command) = parsed.look_up(None, "1/pay/it's");
        assert!(command.contains("-h db -P 3307 -u bob -D shop"), "{command}");
        assert!(!command.contains("secret"), "{command}");
        for wrong in ["mysql://db", "mysql://db/", "mysql://db/shop?table=a-b", "mysql://db/shop?unknown=1"] {
            assert!(Database::parse(wrong).is_err(), "{wrong}");
        }
    }
}
