//! One backend per file; each knows the contract and none of its siblings.

#[cfg(feature = "dynamodb")]
pub(crate) mod dynamo;
#[cfg(feature = "memory")]
pub(crate) mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite", feature = "dynamodb"))]
pub(crate) mod waiting;
