//! Opens a connection and makes sure that the server behind it can do the work.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Client, Cmd, ErrorKind, RedisError, ServerErrorKind, Value};

use super::connection::Connection;
use super::dispatch::{Dispatch, Scripts};
use super::wake::Wakeups;
use super::{RedisStore, Script, Shared, failed};
use crate::clock::SystemClock;
use crate::{Heartbeats, StoreError, StoreErrorKind};

/// Settings for a [`RedisStore`].
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::RedisStore;
/// let store = RedisStore::options()
///     .prefix("shop:")
///     .response_timeout(Duration::from_millis(500))
///     .connect("redis://localhost")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RedisOptions {
    prefix: String,
    response_timeout: Duration,
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self { prefix: "idem:".to_owned(), response_timeout: Duration::from_secs(2) }
    }
}

impl RedisOptions {
    /// What every key in the server begins with; `idem:` where nothing is said. Applications that share a server and
    /// must not share operations need different ones.
    #[must_use]
    pub fn prefix(self, prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), ..self }
    }

    /// How long one exchange with the server may take; 2 s where nothing is said. Keep it well below the shortest beat
    /// (a third of the lease). After it the write may have landed, and is repeated with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Connects to the server at `url`; see [`RedisStore::connect`].
    ///
    /// # Errors
    /// As [`RedisStore::connect`].
    pub async fn connect(self, url: &str) -> Result<RedisStore, StoreError> {
        if url.starts_with("rediss://") && cfg!(not(feature = "redis-tls")) {
            return Err(misconfigured("`rediss://` needs the feature `redis-tls` of idem-runtime".to_owned()));
        }
        // The error of `redis` may quote the URL, and the URL may hold a password.
        let client = Client::open(url).map_err(|error| {
            let detail = error
                .detail()
                .filter(|_| !url.contains('@'))
                .unwrap_or("write `redis://[user:password@]host[:port][/database]`");
            misconfigured(format!("the Redis URL can't be used: {detail}"))
        })?;
        self.connect_with(client).await
    }

    /// Connects with the user's own client: its address, credentials and certificates.
    ///
    /// # Errors
    /// As [`RedisStore::connect`].
    pub async fn connect_with(self, client: Client) -> Result<RedisStore, StoreError> {
        // Where the application has chosen a provider of cryptography, this changes nothing; where nobody has, TLS would
        // panic.
        #[cfg(feature = "redis-tls")]
        let _ = rustls::crypto::ring::default_provider().install_default();
        let clock = Arc::new(SystemClock::default());
        let unusable = |error: RedisError| not_connected(&error);
        let connection = Connection::ours(&client, clock.clone(), self.response_timeout).map_err(unusable)?;
        connection.try_open().await.map_err(unusable)?;
        self.open(connection, clock, Wakeups::new(client)).await
    }

    /// Uses the user's own connection, for example a `ConnectionManager` that is there already. It must be
    /// multiplexed, so that clones share it, and reconnect by itself.
    ///
    /// Such a connection can't subscribe to anything, so a duplicate that waits for a running attempt asks every 50 ms.
    /// With [`connect_with`](RedisOptions::connect_with) it is woken.
    ///
    /// # Errors
    /// As [`RedisStore::connect`].
    pub async fn with_connection<C>(self, connection: C) -> Result<RedisStore, StoreError>
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let clock = Arc::new(SystemClock::default());
        let connection = Connection::theirs(connection, clock.clone(), self.response_timeout);
        self.open(connection, clock, Wakeups::polling()).await
    }

    async fn open(
        self,
        connection: Connection,
        clock: Arc<SystemClock>,
        wakeups: Wakeups,
    ) -> Result<RedisStore, StoreError> {
        let Self { prefix, response_timeout } = self;
        let scripts = prepare(&connection).await?;
        let wakeups = wakeups.on(format!("{prefix}wake"));
        let dispatch = Dispatch::new(connection, clock.clone(), scripts, wakeups.channel(), response_timeout);
        Ok(RedisStore(Arc::new_cyclic(|this| Shared {
            this: this.clone(),
            heartbeats: Heartbeats::new(clock),
            dispatch,
            wakeups,
            prefix: prefix.into(),
            held: Mutex::default(),
        })))
    }
}

/// Checks the server and loads the scripts.
async fn prepare(connection: &Connection) -> Result<Scripts, StoreError> {
    let mut info = Cmd::new();
    info.arg("INFO");
    let info = match connection.one(&info).await.map_err(failed)? {
        Value::BulkString(info) => String::from_utf8_lossy(&info).into_owned(),
        Value::VerbatimString { text, .. } => text,
        _ => return Err(misconfigured("the server does not answer `INFO` as Redis does".to_owned())),
    };
    Server::read(&info).check()?;
    let mut scripts = Scripts::SOURCES.map(|source| Script { source, sha: String::new() });
    for script in &mut scripts {
        let mut load = Cmd::new();
        load.arg("SCRIPT").arg("LOAD").arg(script.source);
        script.sha = match connection.one(&load).await.map_err(failed)? {
            Value::BulkString(sha) => String::from_utf8_lossy(&sha).into_owned(),
            Value::SimpleString(sha) => sha,
            _ => return Err(misconfigured("the server does not load scripts as Redis does".to_owned())),
        };
    }
    Ok(Scripts::new(scripts))
}

/// Servers that speak the protocol without being Redis.
const OTHERS: [&str; 4] = ["dragonfly", "kvrocks", "garnet", "keydb"];

/// What `INFO` says of the server.
#[derive(Debug, PartialEq, Eq)]
struct Server<'a> {
    name: &'a str,
    version: &'a str,
    role: &'a str,
    cluster: bool,
    maxmemory_policy: &'a str,
    maxmemory: &'a str,
}

impl<'a> Server<'a> {
    fn read(info: &'a str) -> Self {
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map_or("", str::trim);
        // Others speak the protocol and claim a version of Redis; they give themselves away by a version of their own.
        let other =
            OTHERS.iter().map(|name| (*name, field(&format!("{name}_version")))).find(|(_, own)| !own.is_empty());
        let (name, version) = match (field("server_name"), other) {
            (_, Some(other)) => other,
            ("valkey", None) => ("Valkey", field("valkey_version")),
            ("" | "redis", None) => ("Redis", field("redis_version")),
            (name, None) => (name, field("redis_version")),
        };
        Self {
            name,
            version,
            role: field("role"),
            cluster: field("redis_mode") == "cluster",
            maxmemory_policy: field("maxmemory_policy"),
            maxmemory: field("maxmemory_human"),
        }
    }

    fn check(&self) -> Result<(), StoreError> {
        let Self { name, version, .. } = self;
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok()).unwrap_or_default();
        let least = match *name {
            "Redis" => 7,
            "Valkey" => 8,
            _ => u32::MAX,
        };
        if major < least {
            return Err(misconfigured(format!(
                "the server is {name} {version}; Redis 7.0 or newer or Valkey 8 or newer is needed"
            )));
        }
        if self.cluster {
            return Err(misconfigured(
                "the server is a node of a cluster; `RedisStore` needs a single server".to_owned(),
            ));
        }
        if self.role != "master" {
            return Err(misconfigured(format!(
                "the server is a read-only replica (role `{}`); connect to the primary",
                self.role
            )));
        }
        if !matches!(self.maxmemory_policy, "noeviction" | "") {
            tracing::warn!(
                maxmemory_policy = self.maxmemory_policy,
                maxmemory = self.maxmemory,
                "the server may evict records before their retention ends, and an evicted operation runs again; \
                 set `maxmemory-policy noeviction`"
            );
        }
        Ok(())
    }
}

fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

fn not_connected(error: &RedisError) -> StoreError {
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => {
            misconfigured(format!("the server refused the login: {error}"))
        }
        ErrorKind::InvalidClientConfig | ErrorKind::Client => {
            misconfigured(format!("the connection can't be made: {error}"))
        }
        _ => match error.code() {
            Some("NOAUTH" | "WRONGPASS") => misconfigured(format!("the server refused the login: {error}")),
            _ => StoreError::new(StoreErrorKind::Unavailable, "the server can't be reached").with_source(error.clone()),
        },
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sha)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(lines: &[&str]) -> String {
        let base =
            ["# Server", "role:master", "redis_mode:standalone", "maxmemory_policy:noeviction", "gcc_version:12.2.0"];
        base.iter().chain(lines).flat_map(|line| [line, "\r\n"]).collect()
    }

    fn check(lines: &[&str]) -> Result<(), String> {
        Server::read(&info(lines)).check().map_err(|error| error.to_string())
    }

    #[test]
    fn servers_that_can_do_the_work_are_accepted() {
        assert_eq!(check(&["redis_version:7.0.15"]), Ok(()));
        assert_eq!(check(&["redis_version:8.4.0"]), Ok(()));
        assert_eq!(check(&["redis_version:7.2.4", "server_name:valkey", "valkey_version:8.0.1"]), Ok(()));
    }

    #[test]
    fn anything_else_is_named_and_refused() {
        let refused = |lines: &[&str], words: &str| {
            let error = check(lines).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(&["redis_version:6.2.14"], "Redis 6.2.14");
        refused(&["redis_version:7.2.4", "server_name:valkey", "valkey_version:7.2.5"], "Valkey 7.2.5");
        refused(&["redis_version:7.4.0", "dragonfly_version:df-v1.2"], "dragonfly df-v1.2");
        refused(&["redis_version:7.0.0", "kvrocks_version:2.9.0"], "kvrocks 2.9.0");
        refused(&[], "Redis ");
    }

    #[test]
    fn replicas_and_cluster_nodes_are_refused() {
        let refused = |from: &str, to: &str, words: &str| {
            let text = info(&["redis_version:7.0.15"]).replace(from, to);
            let error = Server::read(&text).check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused("role:master", "role:slave", "read-only replica");
        refused("redis_mode:standalone", "redis_mode:cluster", "cluster");
    }
}
