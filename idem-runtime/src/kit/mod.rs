//! Code that several stores of the library use. A store imports only these modules of the crate: `kit`, `store`,
//! `record`, `key`, `policy`, `clock`, `combine` and `sync`.

#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod held;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres"))]
pub(crate) mod lanes;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres", feature = "dynamodb", feature = "nats"))]
pub(crate) mod looks;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres", feature = "nats"))]
pub(crate) mod lookup;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres"))]
#[cfg_attr(
    not(any(feature = "redis", feature = "postgres")),
    allow(dead_code, reason = "the driver for MySQL shows no stream")
)]
pub(crate) mod metered;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres", feature = "nats"))]
pub(crate) mod per_runtime;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres", feature = "sqlite", feature = "nats"))]
pub(crate) mod replays;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod rows;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod tables;
#[cfg(any(
    feature = "redis",
    feature = "mysql",
    feature = "postgres",
    feature = "sqlite",
    feature = "dynamodb",
    feature = "nats"
))]
pub(crate) mod waiting;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod work;
