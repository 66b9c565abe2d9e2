//! Settings, and opening a store.

use std::sync::Arc;
use std::time::Duration;

use redis::Client;
#[cfg(feature = "with-redis-1")]
use redis::aio::ConnectionLike;

use super::access::Core;
use super::cluster::{Cluster, NodeNames, first};
#[cfg(feature = "with-redis-1")]
use super::connection::UserConnection;
use super::connections::{ConnectPlan, Connections, ServerLocation};
use super::failure::{misconfigured, not_connected};
use super::limits::Limits;
use super::place::{ServerConnection, ServerPlace};
use super::requirements::{CheckedServer, prepare};
use super::store::{RedisInner, RedisStore};
use super::terms::{ExchangeTerms, Replicas};
use super::url::UrlServers;
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
    /// server but must not share operations need different names. Child keys contain the name, too.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). The name shows who holds a key;
    /// see [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Time limit of one exchange with the server (default: 2 s). Keep this limit well below the shortest renewal
    /// interval (a third of the lease). After a time-out a write may have taken effect; the engine repeats the write
    /// with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Acknowledges a reservation, a renewal, a result or a release only after `count` replicas have confirmed the
    /// write, by `WAIT` (default: waits for no replica).
    ///
    /// If a primary fails, every write that no replica has is lost, and an operation that was already acknowledged runs
    /// again. If fewer than `count` replicas confirm a write in the time `within`, the call fails with
    /// [`StoreErrorKind::Unconfirmed`](crate::StoreErrorKind::Unconfirmed), no body runs, and a result is
    /// [`Unrecorded`](crate::Error::Unrecorded). A replay, too, is answered only after the replicas have confirmed the
    /// result. The price: while replicas are missing, the store reserves, records and replays nothing.
    ///
    /// Only a `count` of *all* replicas of a primary makes failovers lossless: with fewer, a lagging replica may be
    /// promoted. A replica confirms a write that it holds in memory: if the replica has no persistence and restarts, it
    /// loses the write that it has confirmed.
    ///
    /// Confirmed writes have their own connection. Concurrent operations share one `WAIT`. An operation may also have
    /// to wait for the exchange ahead of it, so a call takes up to `response_timeout` plus twice `within`. Keep this
    /// sum below the shortest renewal interval.
    #[must_use]
    pub fn min_replicas(self, count: usize, within: Duration) -> Self {
        Self { replicas: (count > 0).then_some(Replicas { count, within }), ..self }
    }

    /// Connects to the server at `url`; see [`RedisStore::connect`].
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    pub async fn connect(self, url: &str) -> Result<RedisStore, StoreError> {
        match UrlServers::read(url)? {
            UrlServers::One(client) => self.connect_client(client).await,
            UrlServers::Sentinels { sentinels, name, primary } => {
                self.connect_sentinels(sentinels, &name, &primary).await
            }
            UrlServers::Cluster(nodes) => self.connect_cluster(nodes).await,
        }
    }

    /// Connects with your own client, which provides the address, the credentials and the certificates.
    ///
    /// The type is the `Client` of version 1 of the crate `redis` (feature `with-redis-1`).
    ///
    /// # Errors
    /// The errors of [`RedisStore::connect`].
    #[cfg(feature = "with-redis-1")]
    pub async fn connect_with(self, client: Client) -> Result<RedisStore, StoreError> {
        self.connect_client(client).await
    }

    async fn connect_client(self, client: Client) -> Result<RedisStore, StoreError> {
        let client = Box::new(client);
        self.connect_one(ServerLocation::at(client.clone()), ConnectPlan::At(client)).await
    }

    /// Connects to the primary called `name` through your own clients for its sentinels, and to the new primary after a
    /// failover. Credentials, database and certificates come from `primary`; its address is ignored.
    ///
    /// The type is the `Client` of version 1 of the crate `redis` (feature `with-redis-1`).
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

    /// Connects to a cluster through your own clients for some of its nodes, which name all other nodes. Credentials
    /// and certificates come from the first client.
    ///
    /// The type is the `Client` of version 1 of the crate `redis` (feature `with-redis-1`).
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
        // All nodes are tried concurrently, so that a node that hangs does not delay the other nodes.
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
        let connections = Connections::of_cluster(cluster, &terms);
        Ok(self.open(ConnectPlan::Cluster(named), connections, terms, limits))
    }

    /// Uses your own connection, for example an existing `ConnectionManager`. The connection must be multiplexed
    /// (its clones share one connection), and must reconnect on its own.
    ///
    /// The type is a connection of version 1 of the crate `redis` (feature `with-redis-1`).
    ///
    /// Such a connection can't subscribe, so a duplicate that waits for a running attempt polls every 50 ms. With
    /// [`connect_with`](RedisOptions::connect_with) a publication wakes the duplicate. Such a connection can't wait for
    /// replicas either: `WAIT` would block all other users of the connection.
    ///
    /// Renewals share this one connection with all other commands: megabytes of results, or your own blocking commands,
    /// delay the renewals. The runtime that opened the connection reads and writes it; if that runtime is blocked or
    /// gone, leases are lost. A forked process can't use the connection. The other methods of these options open the
    /// store's own connections, which have none of these limits.
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
        let connections = plan.open(&terms, false);
        Ok(self.open(plan, connections, terms, limits))
    }

    async fn connect_one(self, found: ServerLocation, plan: ConnectPlan) -> Result<RedisStore, StoreError> {
        provide_cryptography();
        let clock = clock();
        let connection = ServerConnection::ours(found.place.clone(), Arc::clone(&clock), self.response_timeout);
        connection.try_open().await.map_err(|error| not_connected(&error))?;
        let (prepared, limits) = self.prepare(&connection, false).await?;
        let terms = self.terms(&clock, prepared, false);
        let connections = ServerLocation { plain: Some(connection), ..found }.open(&terms, false);
        Ok(self.open(plan, connections, terms, limits))
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
        connections: Connections,
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
        RedisStore(RedisInner::new(Arc::new(core), connections))
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
