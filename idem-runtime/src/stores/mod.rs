//! One backend per file; each knows the contract and none of its siblings.

#[cfg(feature = "dynamodb")]
pub(crate) mod dynamo;
#[cfg(feature = "memory")]
pub(crate) mod memory;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
#[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite", feature = "dynamodb"))]
pub(crate) mod waiting;
