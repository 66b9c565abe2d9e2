//! Settings, opening a store, and the requirements on the server.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use redis::Client;
#[cfg(feature = "with-redis-1")]
use redis::aio::ConnectionLike;

use super::cluster::{Cluster, NodeNames, first};
#[cfg(feature = "with-redis-1")]
use super::connection::UserConnection;
use super::connections::{ConnectPlan, Connections, ServerLocation};
use super::failure::{misconfigured, not_connected};
use super::limits::Limits;
use super::place::{ServerConnection, ServerPlace};
use super::requirements::{CheckedServer, prepare};
use super::store::{Core, RedisInner, RedisStore};
use super::terms::{ExchangeTerms, Replicas};
use crate::clock::{Clock, SystemClock};
use crate::store::{StoreContext, StoreError};
use crate::sync::PerProcess;

/// Settings of a [`RedisStore`].
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::RedisStore;
/// let store = RedisStore::options()
///     .namespace("shop:")
///     .response_timeout(Duration::from_millis(500))
///     .connect("redis://localhost")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RedisOptions {
    namespace: String,
    holder: String,
    response_timeout: Duration,
    replicas: Option<Replicas>,
}

impl Default for RedisOptions {
    fn default() -> Self {
        let response_timeout = Duration::from_secs(2);
        Self { namespace: "idem:".to_owned(), holder: String::new(), response_timeout, replicas: None }
    }
}

impl RedisOptions {
    /// Name of this application, in front of every key in the server (default: `idem:`). Applications that share a
    /// server but must not share operations need different names. The name enters child keys, too.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). Shows who holds a key; see
    /// [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Time limit of one exchange with the server (default: 2 s). Keep it well below the shortest beat (a third of the
    /// lease). After a time-out the write may have taken effect; it is repeated with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Counts a reservation, a renewal, a result or a release only once `count` replicas also have it, by `WAIT`
    /// (default: waits for no replica).
    ///
    /// A primary that fails takes with it every write that no replica has: an acknowledged operation runs again.
    /// `min_replicas` withholds that acknowledgement. If fewer than `count` replicas confirm a write `within` that
    /// time, the call fails with [`StoreErrorKind::Unconfirmed`](crate::StoreErrorKind::Unconfirmed), no body runs, and
    /// a result is [`Unrecorded`](crate::Error::Unrecorded). A replay, too, is answered only from a result that the
    /// replicas have. The price: while replicas are missing, the store reserves, records and replays nothing.
    ///
    /// Only a `count` of *all* replicas of a primary makes failovers lossless: with fewer, a lagging replica may be
    /// promoted. A replica confirms what it holds in memory, so the confirmation of a replica that restarts without
    /// persistence is void.
    ///
    /// Confirmed writes have their own connection. Concurrent operations share one wait. An operation may also have to
    /// wait for the exchange ahead of it, so a call takes up to `response_timeout` plus twice `within`. Keep that below
    /// the shortest beat.
    #[must_use]
    pub fn min_replicas(self, count: usize, within: Duration) -> Self {
        Self { replicas: (count > 0).then_some(Replicas { count, within }), ..self }
    }

    /// Connects to the server at `url`; see [`RedisStore::connect`].
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    pub async fn connect(self, url: &str) -> Result<RedisStore, StoreError> {
        match url.split_once("://") {
            Some(("redis-sentinel", rest)) => {
                let url = UrlList::read(rest, &["tls", "protocol", "sentinel_user", "sentinel_password"]);
                let url = url.map_err(|problem| unreadable(&problem, SENTINEL_FORM))?;
                let (name, database) = url.path.split_once('/').unwrap_or((url.path, "0"));
                let sentinels = url.clients(&url.sentinel_login(), 26_379, "0", SENTINEL_FORM)?;
                let primary = url.clients(url.login, 6379, database, SENTINEL_FORM)?.swap_remove(0);
                if name.is_empty() {
                    return Err(unreadable("the name of the primary is missing", SENTINEL_FORM));
                }
                self.connect_sentinels(sentinels, name, &primary).await
            }
            Some(("redis-cluster", rest)) => {
                let url = UrlList::read(rest, &["tls", "protocol"]);
                let url = url.map_err(|problem| unreadable(&problem, CLUSTER_FORM))?;
                if !matches!(url.path, "" | "0") {
                    return Err(unreadable("a cluster has no databases", CLUSTER_FORM));
                }
                self.connect_cluster(url.clients(url.login, 6379, "0", CLUSTER_FORM)?).await
            }
            _ => self.connect_client(client(url, "redis://[user:password@]host[:port][/database]")?).await,
        }
    }

    /// Connects with your own client: its address, credentials and certificates.
    ///
    /// The type is the client of redis 1 (feature `with-redis-1`).
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    #[cfg(feature = "with-redis-1")]
    pub async fn connect_with(self, client: Client) -> Result<RedisStore, StoreError> {
        self.connect_client(client).await
    }

    async fn connect_client(self, client: Client) -> Result<RedisStore, StoreError> {
        let client = Box::new(client);
        let found = ServerLocation { place: ServerPlace::At(client.clone()), watching: Vec::new(), plain: None };
        self.connect_one(found, ConnectPlan::At(client)).await
    }

    /// Connects to the primary called `name` through your own clients for its sentinels, and follows it after a
    /// failover. Credentials, database and certificates come from `primary`; its address is ignored.
    ///
    /// The type is the client of redis 1 (feature `with-redis-1`).
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    #[cfg(feature = "with-redis-1")]
    pub async fn connect_sentinels_with(
        self,
        sentinels: impl IntoIterator<Item = Client>,
        name: &str,
        primary: &Client,
    ) -> Result<RedisStore, StoreError> {
        self.connect_sentinels(sentinels, name, primary).await
    }

    async fn connect_sentinels(
        self,
        sentinels: impl IntoIterator<Item = Client>,
        name: &str,
        primary: &Client,
    ) -> Result<RedisStore, StoreError> {
        provide_cryptography();
        let template = primary.get_connection_info();
        let sentinels: Vec<Client> = sentinels.into_iter().collect();
        if sentinels.is_empty() {
            return Err(misconfigured("the list of sentinels is empty".to_owned()));
        }
        let found = ServerLocation::by_sentinels(&sentinels, name, template, &clock(), self.response_timeout);
        let (name, template) = (name.to_owned(), Box::new(template.clone()));
        self.connect_one(found, ConnectPlan::Sentinels { sentinels, name, template }).await
    }

    /// Connects to a cluster through your own clients for some of its nodes, which name the others. Credentials and
    /// certificates come from the first client.
    ///
    /// The type is the client of redis 1 (feature `with-redis-1`).
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    #[cfg(feature = "with-redis-1")]
    pub async fn connect_cluster_with(self, nodes: impl IntoIterator<Item = Client>) -> Result<RedisStore, StoreError> {
        self.connect_cluster(nodes).await
    }

    async fn connect_cluster(self, nodes: impl IntoIterator<Item = Client>) -> Result<RedisStore, StoreError> {
        provide_cryptography();
        let clock = clock();
        let nodes: Vec<Client> = nodes.into_iter().collect();
        let Some(first_node) = nodes.first().cloned() else {
            return Err(misconfigured("the list of cluster nodes is empty".to_owned()));
        };
        // Concurrently, so that a node that hangs does not delay the others.
        let tries: Vec<_> = nodes
            .iter()
            .map(|node| {
                Box::pin(async {
                    let connection = ServerConnection::ours(
                        ServerPlace::At(Box::new(node.clone())),
                        Arc::clone(&clock),
                        self.response_timeout,
                    );
                    connection.try_open().await.map_err(|error| not_connected(&error))?;
                    self.prepare(&connection, true).await
                })
            })
            .collect();
        let (prepared, _) = first(tries).await.0?;
        let terms = self.terms(&clock, prepared, true);
        let named = Arc::new(NodeNames::new(&first_node, nodes));
        let cluster = Cluster::new(&named, terms.clone(), false);
        cluster.ask().await;
        let limits = cluster.prepare(&self.namespace).await?;
        cluster.keep_asking();
        let line = Connections::of_cluster(cluster, &terms);
        Ok(self.open(ConnectPlan::Cluster(named), line, terms, limits))
    }

    /// Uses your own connection, for example an existing `ConnectionManager`. The connection must be multiplexed, so
    /// that clones share it, and reconnect on its own.
    ///
    /// The type is a connection of redis 1 (feature `with-redis-1`).
    ///
    /// Such a connection can't subscribe, so a duplicate that waits for a running attempt polls every 50 ms. With
    /// [`connect_with`](RedisOptions::connect_with) it is woken. Such a connection can't wait for replicas either:
    /// `WAIT` would block all other users of the connection.
    ///
    /// There is only this one connection, so renewals share it with all other commands: megabytes of results, or your
    /// own blocking commands, delay them. The runtime that opened the connection reads and writes it; if that runtime
    /// is blocked or gone, leases are lost. A forked process can't use the connection. The other ways to connect have
    /// none of these limits.
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    #[cfg(feature = "with-redis-1")]
    pub async fn connect_over<C>(self, connection: C) -> Result<RedisStore, StoreError>
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        if self.replicas.is_some() {
            return Err(misconfigured(
                "`min_replicas` can't use your connection, which `WAIT` would block: use `connect` or `connect_with`"
                    .to_owned(),
            ));
        }
        let clock = clock();
        let theirs = UserConnection::new(connection, &clock);
        let connection = ServerConnection::theirs(theirs.clone(), Arc::clone(&clock), self.response_timeout);
        let (prepared, limits) = self.prepare(&connection, false).await?;
        let terms = self.terms(&clock, prepared, false);
        let plan = ConnectPlan::Theirs(theirs);
        let line = plan.line(&terms, false);
        Ok(self.open(plan, line, terms, limits))
    }

    async fn connect_one(self, found: ServerLocation, plan: ConnectPlan) -> Result<RedisStore, StoreError> {
        provide_cryptography();
        let clock = clock();
        let connection = ServerConnection::ours(found.place.clone(), Arc::clone(&clock), self.response_timeout);
        connection.try_open().await.map_err(|error| not_connected(&error))?;
        let (prepared, limits) = self.prepare(&connection, false).await?;
        let terms = self.terms(&clock, prepared, false);
        let line = ServerLocation { plain: Some(connection), ..found }.line(&terms, false);
        Ok(self.open(plan, line, terms, limits))
    }

    async fn prepare(
        &self,
        connection: &ServerConnection,
        cluster: bool,
    ) -> Result<(CheckedServer, Limits), StoreError> {
        prepare(connection, cluster, &self.namespace, self.replicas.is_some()).await
    }

    fn terms(&self, clock: &Arc<dyn Clock>, prepared: CheckedServer, one_key: bool) -> ExchangeTerms {
        let CheckedServer { scripts, compares } = prepared;
        ExchangeTerms {
            clock: Arc::clone(clock),
            timeout: self.response_timeout,
            replicas: self.replicas,
            channel: format!("{}wake", self.namespace).into(),
            scripts: Arc::new(scripts),
            one_key,
            compares,
        }
    }

    fn open(
        self,
        plan: ConnectPlan,
        line: Connections,
        terms: ExchangeTerms,
        limits: impl Into<Arc<Limits>>,
    ) -> RedisStore {
        let core = Core {
            context: Arc::new(
                StoreContext::new("redis", Arc::clone(&terms.clock)).system("redis").held_by(&self.holder),
            ),
            plan,
            terms,
            prefix: self.namespace.into(),
            limits: limits.into(),
            held: PerProcess::default(),
        };
        RedisStore(RedisInner::new(Arc::new(core), line))
    }
}

fn clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock::default())
}

/// Installs a cryptography provider unless the application has chosen one: without any provider, TLS would panic.
fn provide_cryptography() {
    #[cfg(feature = "redis-tls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
}

const SENTINEL_FORM: &str = "redis-sentinel://[user:password@]host[:port][,host…]/name[/database][?tls=true]\
                             [&sentinel_user=…][&sentinel_password=…]";
const CLUSTER_FORM: &str = "redis-cluster://[user:password@]host[:port][,host…][?tls=true]";

fn unreadable(problem: &str, form: &str) -> StoreError {
    misconfigured(format!("the Redis URL can't be used: {problem}; write `{form}`"))
}

/// Makes the client that `url` describes.
fn client(url: &str, form: &str) -> Result<Client, StoreError> {
    if url.starts_with("rediss://") && cfg!(not(feature = "redis-tls")) {
        return Err(misconfigured("TLS (`rediss://`) needs the feature `redis-tls` of idem-runtime".to_owned()));
    }
    // The error of `redis` may quote the URL, and the URL may hold a password.
    Client::open(url).map_err(|error| match error.detail().filter(|_| !url.contains('@')) {
        Some(detail) => misconfigured(format!("the Redis URL can't be used: {detail}")),
        None => misconfigured(format!("the Redis URL can't be used: write `{form}`")),
    })
}

/// The parts of a URL that names several servers, as written.
struct UrlList<'a> {
    login: &'a str,
    hosts: Vec<&'a str>,
    path: &'a str,
    query: Vec<(&'a str, &'a str)>,
}

impl<'a> UrlList<'a> {
    /// Reads the part after `://`. `known` are the allowed parameters.
    fn read(rest: &'a str, known: &[&str]) -> Result<Self, String> {
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (servers, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = servers.rsplit_once('@').unwrap_or(("", servers));
        let hosts: Vec<&str> = hosts.split(',').collect();
        if hosts.iter().any(|host| host.is_empty()) {
            return Err("a host is missing".to_owned());
        }
        let query = query.split('&').filter(|parameter| !parameter.is_empty());
        let query: Vec<_> = query.map(|parameter| parameter.split_once('=').unwrap_or((parameter, ""))).collect();
        if query.iter().any(|(name, _)| !known.contains(name)) {
            return Err(format!("its parameters can only be `{}`", known.join("`, `")));
        }
        let several = Self { login, hosts, path, query };
        match several.parameter("tls") {
            None | Some("true" | "false") => Ok(several),
            Some(_) => Err("`tls` is `true` or `false`".to_owned()),
        }
    }

    fn parameter(&self, name: &str) -> Option<&'a str> {
        self.query.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn sentinel_login(&self) -> String {
        let (user, password) = (self.parameter("sentinel_user"), self.parameter("sentinel_password"));
        password.map(|password| format!("{}:{password}", user.unwrap_or_default())).unwrap_or_default()
    }

    /// Makes a client for each server, with this login.
    fn clients(&self, login: &str, port: u16, database: &str, form: &str) -> Result<Vec<Client>, StoreError> {
        let one = |host: &&str| {
            let scheme = if self.parameter("tls") == Some("true") { "rediss" } else { "redis" };
            let mut url = format!("{scheme}://");
            if !login.is_empty() {
                let _ = write!(url, "{login}@");
            }
            url.push_str(host);
            // An IPv6 address is in brackets and contains colons.
            if !host.rsplit(']').next().unwrap_or(host).contains(':') {
                let _ = write!(url, ":{port}");
            }
            let _ = write!(url, "/{database}");
            if let Some(protocol) = self.parameter("protocol") {
                let _ = write!(url, "?protocol={protocol}");
            }
            client(&url, form)
        };
        self.hosts.iter().map(one).collect()
    }
}
