//! Records in one Redis or Valkey server, in a cluster, or in the primary that sentinels name.
//!
//! A record is one string in the [format](crate::record::format) that all byte stores share.
//! `SET key record NX GET PX retention` reserves a key or returns its record in one round trip. The server's clock is
//! the only clock: a reservation and each renewal set the expiry of the key to the full retention, so the age of a
//! lease is the full retention minus the remaining retention. A reservation of an absent key needs no script, and
//! neither does a completion if the server has `SET … IFEQ` and the record is unchanged since its reservation. Every
//! other change of a record is a script. The scripts by which an attempt changes its record check the owner token; all
//! of these scripts except the release also check the attempt's number.
//!
//! Layers, from the top. A file imports from the layers below its own:
//!
//! | layer | files |
//! |---|---|
//! | settings and opening; the store and its operations | `options`, `store`; `reservation`, `renewal`, `inspection`, `operator`, `access` |
//! | the servers of a store, as one runtime sees them | `connections`, `wake`, `route`, `cluster` |
//! | one server, and the operations that share an exchange with it | `requirements`, `node`, `batch` |
//! | one connection, which is reopened when it breaks | `place`, `sentinel`, `connection`, `stream` |
//! | data | `op`, `command`, `write`, `terms`, `scripts`, `rights`, `url`, `limits`, `failure`, `task` |

mod access;
mod batch;
mod cluster;
mod command;
mod connection;
mod connections;
mod failure;
mod inspection;
mod limits;
mod node;
mod op;
mod operator;
mod options;
mod place;
mod renewal;
mod requirements;
mod reservation;
pub mod rights;
mod route;
mod scripts;
mod sentinel;
mod store;
mod stream;
mod task;
mod terms;
mod url;
mod wake;
mod write;

pub use self::options::RedisOptions;
pub use self::store::RedisStore;
use crate::store::StoreError;

impl RedisStore {
    /// Connects to the servers that `url` names. For more settings see [`RedisOptions`].
    ///
    /// - One server: `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS (feature `redis-tls`),
    ///   `redis+unix:///path` for a socket.
    /// - The primary that sentinels name: `redis-sentinel://[user:password@]host[:port][,host…]/name[/database]`; the
    ///   hosts are the sentinels. The login is for the primary; the login for the sentinels is
    ///   `?sentinel_user=…&sentinel_password=…`. Name all sentinels: to open a connection, the store asks all of them
    ///   and uses the answer of the sentinel that knows the latest failover. After a failover the store connects to the
    ///   new primary.
    /// - A cluster: `redis-cluster://[user:password@]host[:port][,host…]`; the hosts are some of its nodes.
    ///
    /// The URLs for sentinels and clusters take `?tls=true` (feature `redis-tls`) and `protocol=resp3`. Write a
    /// character that has a meaning in URLs as `%XX`.
    ///
    /// # Errors
    /// [`Misconfigured`] for an invalid URL, a refused login, a server that is too old or not Redis, a replica, a name
    /// that no sentinel watches, or a topology other than the URL's; [`Unavailable`] if no server answers, or the
    /// cluster is down.
    ///
    /// [`Misconfigured`]: crate::StoreErrorKind::Misconfigured
    /// [`Unavailable`]: crate::StoreErrorKind::Unavailable
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Returns the default settings, to be changed before connecting.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }
}
