//! The stores, one folder each, and the wrappers around any store. A store knows the contract and the kit, and no other store.

#[cfg(feature = "cached")]
pub(crate) mod cached;
#[cfg(feature = "compressed")]
pub(crate) mod compressed;
#[cfg(feature = "dynamodb")]
pub(crate) mod dynamo;
#[cfg(any(feature = "compressed", feature = "offloaded"))]
pub(crate) mod envelope;
#[cfg(feature = "memory")]
pub(crate) mod memory;
#[cfg(feature = "offloaded")]
pub(crate) mod offloaded;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
#[cfg(any(feature = "cached", feature = "compressed", feature = "offloaded"))]
pub(crate) mod wrapper;
