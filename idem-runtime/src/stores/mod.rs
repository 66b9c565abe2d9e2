//! The stores, with one folder for each store, and the wrappers around any store. A store depends on the contract and
//! the kit, but on no other store.

#[cfg(feature = "cached")]
pub(crate) mod cached;
#[cfg(feature = "compressed")]
pub(crate) mod compressed;
#[cfg(feature = "dynamodb")]
pub(crate) mod dynamo;
#[cfg(feature = "memory")]
pub(crate) mod memory;
#[cfg(feature = "mysql")]
#[cfg_attr(
    not(any(feature = "with-mysql_async-0_37", feature = "with-sqlx-0_8", feature = "with-sqlx-0_9")),
    allow(dead_code, reason = "for types of drivers")
)]
pub(crate) mod mysql;
#[cfg(feature = "nats")]
pub(crate) mod nats;
#[cfg(feature = "offloaded")]
pub(crate) mod offloaded;
#[cfg(feature = "postgres")]
#[cfg_attr(
    not(all(feature = "with-deadpool-postgres-0_14", feature = "with-tokio-postgres-0_7")),
    allow(dead_code, unreachable_pub, reason = "for types of drivers")
)]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
#[cfg_attr(not(feature = "with-redis-1"), allow(dead_code, unreachable_pub, reason = "for types of drivers"))]
pub(crate) mod redis;
#[cfg(feature = "sqlite")]
#[cfg_attr(not(feature = "with-rusqlite"), allow(dead_code, unreachable_pub, reason = "for types of drivers"))]
pub(crate) mod sqlite;
#[cfg(any(feature = "cached", feature = "compressed", feature = "offloaded"))]
pub(crate) mod wrapper;
