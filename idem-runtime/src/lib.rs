//! Idempotent handlers for messages that are delivered at least once.
//!
//! Under [`#[idempotent]`](macro@idempotent) the body of an `async fn` runs once for each key, and every duplicate gets
//! the recorded result.
//!
//! ```
//! use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
//!
//! #[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
//! async fn ship(store: &MemoryStore, order_id: u64) -> Result<String, Error> {
//!     Ok(format!("parcel for order {order_id}"))
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = MemoryStore::new();
//! let (first, outcome) = observe(ship(&store, 42)).await;
//! assert!(outcome.executed());
//! let (duplicate, outcome) = observe(ship(&store, 42)).await;
//! assert!(outcome.replayed());
//! assert_eq!(outcome.disposition(), Disposition::Ack);
//! assert_eq!(first.unwrap(), duplicate.unwrap());
//! # });
//! ```
//!
//! | to | see |
//! |---|---|
//! | protect a handler | [`#[idempotent]`](macro@idempotent) with all its options; [`Operation`] without the macro |
//! | decide about a message | [`observe`], [`Outcome`], [`Disposition`], [`Error`]; for a batch [`observe_all`] |
//! | keep a broker from delivering again while a handler runs | [`Observe::on_beat`](future::Observe::on_beat), [`Observe::delivery_limit`](future::Observe::delivery_limit), [`brokers`] |
//! | make an effect safe to repeat | [`current`], [`Attempt::child_key`], [`Attempt::number`], [`Attempt::confirm_lease`] |
//! | share settings between handlers, or switch the mode of a live consumer | [`Policy`], [`ModeSwitch`] |
//! | keep records | [`MemoryStore`], and behind features [`SqliteStore`], [`RedisStore`], [`PostgresStore`], [`DynamoStore`] |
//! | record inside of your own transaction | [`within`]: `PostgresStore::within`, `MySqlStore::within`, `SqliteStore::within`, `transact` |
//! | return bytes | a `Vec<u8>` or a `Bytes` is recorded unencoded, see [`Json`]; [`PayloadDigest`](key::PayloadDigest) in place of a large payload |
//! | choose the encoding of results | [`Codec`], [`Json`], [`MessagePack`] (feature `msgpack`), [`Postcard`] (feature `postcard`) |
//! | change the return type of a handler | [`OnUndecodable`], [`Undecodable`] |
//! | protect HTTP routes | [`http::IdempotencyLayer`] (features `http`, `axum`) |
//! | send requests that are safe to retry | [`http::client::RetryLayer`] (feature `http-client`) |
//! | protect a typed service of tower | [`tower::OperationLayer`] (feature `tower`) |
//! | compare `ttl` with the broker, or commit offsets in order | [`brokers::Redelivery`], [`brokers::OffsetTracker`] |
//! | wrap a store | [`Cached`], [`Compressed`], [`Offloaded`] (features of these names, in lower case) |
//! | inspect a record, resolve an interrupted operation, or let it run again | [`StoreExt::operator`], [`operator`] |
//! | monitor calls and stores: spans, counters, readiness | `tracing`, [`StoreExt::metrics`], [`StoreExt::health`], [`metrics`], [`KeyDisplay`] |
//! | shut down | [`StoreExt::flush`] |
//! | test your handlers: kills at each await, duplicates in flight | [`testing::explore`], [`testing::Explorer`], [`testing::FaultyStore`] (feature `testing`) |
//! | test leases and retentions | [`ManualClock`](clock::ManualClock), [`MemoryStore::options`], [`MemoryStore::peer`] |
//! | write a store | [`Store`] with [`store`] and [`record`], [`store_conformance!`] (feature `conformance`) |
//!
//! # Guarantees
//!
//! At most one attempt for a key holds a live lease; `Ok` means that the result is recorded; a recorded result never
//! changes within its retention; a late attempt never touches the record of its successor; a failing store is never
//! read as "no record".
//!
//! An effect of the body can still happen twice: a process may crash after the effect and before the result is
//! recorded, or be paused for longer than its lease. [`Attempt::child_key`] returns the same key on every attempt, for
//! APIs that accept idempotency keys. `on_crash = fail` allows one run at most.
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `macros` (default) | the attribute |
//! | `memory` (default) | [`MemoryStore`] |
//! | `redis` | `RedisStore`: Redis 7.0 and newer, Valkey 8 and newer; one server, Sentinel or Cluster |
//! | `redis-tls` | `rediss://` URLs for `RedisStore`: rustls, with the certificates that the system trusts |
//! | `sqlite` | `SqliteStore`: one file, several processes of one host |
//! | `mysql` | `MySqlStore`: MySQL 8.0 and MariaDB 10.6, and newer |
//! | `mysql-tls` | `require_ssl=true` in URLs for `MySqlStore`: rustls, with the certificates that the system trusts |
//! | `postgres` | `PostgresStore`: PostgreSQL 12 and newer |
//! | `postgres-tls` | `sslmode=require` in URLs for `PostgresStore`: rustls, with the certificates that the system trusts |
//! | `dynamodb` | `DynamoStore`: a DynamoDB table, through the client of `aws-sdk-dynamodb` |
//! | `nats` | `NatsStore`: a key-value bucket of JetStream, NATS 2.11 and newer |
//! | `cached` | `Cached`: a cache of finished records in this process, in front of any store |
//! | `compressed` | `Compressed`: large results compressed with zstd, in any store |
//! | `offloaded` | `Offloaded`: large results in an object store, records in any store |
//! | `http` | `http::IdempotencyLayer`: the `Idempotency-Key` header for any tower stack |
//! | `axum` | `http::IdempotencyLayer` in axum: route templates, nested routers, an extractor |
//! | `http-client` | `http::client::RetryLayer`: sends keys with requests, and retries requests that are safe to retry |
//! | `msgpack`, `postcard` | the codecs `MessagePack` and `Postcard` |
//! | `with-tokio-postgres-0_7`, `with-mysql_async-0_37`, `with-sqlx-0_8`, `with-sqlx-0_9`, `with-rusqlite` | `PostgresStore::within`, `MySqlStore::within`, `SqliteStore::within`: records inside of your own transaction. For sqlx, name `postgres` or `mysql`, too |
//! | `with-redis-1`, `with-deadpool-postgres-0_14` | `connect_with`, `connect_over`: stores on clients, connections and pools of your own |
//! | `tower` | `tower::OperationLayer`, for typed services of tower |
//! | `metrics` | exports the values of [`StoreExt::metrics`] through the facade `metrics` 0.24 |
//! | `testing` | `testing::explore`, which kills your handler at each of its awaits, on simulated time |
//! | `conformance` | the suite that every store passes, for authors of stores |
//!
//! A function that takes or returns a type of a driver needs a feature, which is named after the driver and its major
//! version. The next major version of the driver will have a feature of its own. `DynamoStore` takes the client of
//! `aws-sdk-dynamodb` 1, and `Offloaded` an object store of `object_store` 0.14.
//!
//! The library runs on tokio: tokio tasks renew leases and make late writes.
//!
// Each link above leads to its item, or to the table of features if the feature of the item is off.
#![cfg_attr(feature = "sqlite", doc = "[`SqliteStore`]: SqliteStore")]
#![cfg_attr(not(feature = "sqlite"), doc = "[`SqliteStore`]: #features")]
#![cfg_attr(feature = "redis", doc = "[`RedisStore`]: RedisStore")]
#![cfg_attr(not(feature = "redis"), doc = "[`RedisStore`]: #features")]
#![cfg_attr(feature = "mysql", doc = "[`MySqlStore`]: MySqlStore")]
#![cfg_attr(not(feature = "mysql"), doc = "[`MySqlStore`]: #features")]
#![cfg_attr(feature = "postgres", doc = "[`PostgresStore`]: PostgresStore")]
#![cfg_attr(not(feature = "postgres"), doc = "[`PostgresStore`]: #features")]
#![cfg_attr(feature = "dynamodb", doc = "[`DynamoStore`]: DynamoStore")]
#![cfg_attr(not(feature = "dynamodb"), doc = "[`DynamoStore`]: #features")]
#![cfg_attr(feature = "nats", doc = "[`NatsStore`]: NatsStore")]
#![cfg_attr(not(feature = "nats"), doc = "[`NatsStore`]: #features")]
#![cfg_attr(feature = "cached", doc = "[`Cached`]: Cached")]
#![cfg_attr(not(feature = "cached"), doc = "[`Cached`]: #features")]
#![cfg_attr(feature = "compressed", doc = "[`Compressed`]: Compressed")]
#![cfg_attr(not(feature = "compressed"), doc = "[`Compressed`]: #features")]
#![cfg_attr(feature = "offloaded", doc = "[`Offloaded`]: Offloaded")]
#![cfg_attr(not(feature = "offloaded"), doc = "[`Offloaded`]: #features")]
#![cfg_attr(feature = "within", doc = "[`within`]: within")]
#![cfg_attr(not(feature = "within"), doc = "[`within`]: #features")]
#![cfg_attr(feature = "msgpack", doc = "[`MessagePack`]: MessagePack")]
#![cfg_attr(not(feature = "msgpack"), doc = "[`MessagePack`]: #features")]
#![cfg_attr(feature = "postcard", doc = "[`Postcard`]: Postcard")]
#![cfg_attr(not(feature = "postcard"), doc = "[`Postcard`]: #features")]
#![cfg_attr(feature = "http", doc = "[`http::IdempotencyLayer`]: http::IdempotencyLayer")]
#![cfg_attr(not(feature = "http"), doc = "[`http::IdempotencyLayer`]: #features")]
#![cfg_attr(feature = "http-client", doc = "[`http::client::RetryLayer`]: http::client::RetryLayer")]
#![cfg_attr(not(feature = "http-client"), doc = "[`http::client::RetryLayer`]: #features")]
#![cfg_attr(feature = "tower", doc = "[`tower::OperationLayer`]: tower::OperationLayer")]
#![cfg_attr(not(feature = "tower"), doc = "[`tower::OperationLayer`]: #features")]
#![cfg_attr(feature = "testing", doc = "[`testing::explore`]: testing::explore")]
#![cfg_attr(not(feature = "testing"), doc = "[`testing::explore`]: #features")]
#![cfg_attr(feature = "testing", doc = "[`testing::Explorer`]: testing::Explorer")]
#![cfg_attr(not(feature = "testing"), doc = "[`testing::Explorer`]: #features")]
#![cfg_attr(any(feature = "testing", feature = "conformance"), doc = "[`testing::FaultyStore`]: testing::FaultyStore")]
#![cfg_attr(not(any(feature = "testing", feature = "conformance")), doc = "[`testing::FaultyStore`]: #features")]
#![cfg_attr(feature = "conformance", doc = "[`store_conformance!`]: store_conformance!")]
#![cfg_attr(not(feature = "conformance"), doc = "[`store_conformance!`]: #features")]
#![warn(missing_debug_implementations, missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod brokers;
pub mod clock;
pub mod codec;
mod combine;
#[cfg(feature = "conformance")]
pub mod conformance;
mod engine;
pub mod error;
#[cfg(feature = "http")]
pub mod http;
pub mod key;
mod kit;
pub mod metrics;
pub mod policy;
pub mod record;
pub mod store;
mod stores;
mod sync;
#[cfg(any(feature = "testing", feature = "conformance"))]
pub mod testing;
#[cfg(feature = "tower")]
pub mod tower;
#[cfg(feature = "within")]
#[cfg_attr(
    not(any(
        feature = "with-mysql_async-0_37",
        feature = "with-rusqlite",
        feature = "with-sqlx-0_8",
        feature = "with-sqlx-0_9",
        feature = "with-tokio-postgres-0_7"
    )),
    allow(dead_code, unused_imports, reason = "for types of drivers")
)]
pub mod within;

/// Futures that [`observe`] and [`observe_all`] return.
pub mod future {
    pub use crate::engine::{CatchPanics, NoBeat, Observe, ObserveAll, OnBeat, Reconciler};
}

/// Steps of a handler: parts whose values are journaled, so that the next attempt does not run them again. See
/// [`Attempt::step`].
pub mod step {
    pub use crate::engine::{
        Always, AskDoubt, FailOnDoubt, Irreversible, Never, Reaction, ReconcileOnDoubt, RerunOnDoubt, RetriedStep,
        Step, StepBuilder, StepDoubt, StepName, UncertainIf,
    };
    pub use crate::error::StepProblem;
}

/// Messages that leave with the record of their operation. See [`Attempt::outbox`].
pub mod outbox {
    pub use crate::engine::{Outbox, Resender, Resent};
    pub use crate::error::{OutboxProblem, UnsentReason};
    pub use crate::record::messages::{OutgoingMessage, UnsentMessage, UnsentMessages};
    pub use crate::store::sender::{SendError, SendFuture, Sender};
}

/// Actions of an operator on a record: to inspect, resolve, reopen or forget it, and to break its lease.
pub mod operator {
    pub use crate::record::journaled_step::StepResolution;
    pub use crate::store::operator::{Operator, OperatorError, Resolution};
}

/// Records in the memory of this process.
#[cfg(feature = "memory")]
pub mod memory {
    pub use crate::stores::memory::{MemoryOptions, MemoryStore};
}

/// Records in Redis or Valkey.
#[cfg(feature = "redis")]
pub mod redis {
    #[doc(hidden)]
    pub use crate::stores::redis::rights;
    pub use crate::stores::redis::{RedisOptions, RedisStore};
}

/// Records in a file of SQLite.
#[cfg(feature = "sqlite")]
pub mod sqlite {
    #[cfg(feature = "with-rusqlite")]
    pub use crate::stores::sqlite::InSqlite;
    pub use crate::stores::sqlite::{SqliteOptions, SqliteStore, Synchronous};
}

/// Records in a table of MySQL or MariaDB.
#[cfg(feature = "mysql")]
pub mod mysql {
    pub use crate::stores::mysql::{InMySql, MySqlOptions, MySqlStore, MySqlTransaction, Transaction};
}

/// Records in a table of PostgreSQL.
#[cfg(feature = "postgres")]
pub mod postgres {
    pub use crate::stores::postgres::{InPostgres, PostgresOptions, PostgresStore, Transaction};
}

/// Records in a table of DynamoDB.
#[cfg(feature = "dynamodb")]
pub mod dynamodb {
    pub use crate::stores::dynamo::{DynamoOptions, DynamoStore};
}

/// Records in a key-value bucket of NATS JetStream.
#[cfg(feature = "nats")]
pub mod nats {
    pub use crate::stores::nats::{NatsOptions, NatsStore};
}

/// A cache of finished records in this process, in front of any store.
#[cfg(feature = "cached")]
pub mod cached {
    pub use crate::stores::cached::{Cached, CachedOptions};
}

/// Compression of large results, in any store.
#[cfg(feature = "compressed")]
pub mod compressed {
    pub use crate::stores::compressed::{Compressed, CompressedOptions};
}

/// Large results in an object store, with records in any store.
#[cfg(feature = "offloaded")]
pub mod offloaded {
    pub use crate::stores::offloaded::{Offloaded, OffloadedOptions};
}

#[cfg(feature = "cached")]
#[doc(inline)]
pub use cached::Cached;
#[cfg(feature = "msgpack")]
#[doc(inline)]
pub use codec::MessagePack;
#[cfg(feature = "postcard")]
#[doc(inline)]
pub use codec::Postcard;
#[doc(inline)]
pub use codec::{Codec, CodecError, Json, Undecodable};
#[cfg(feature = "compressed")]
#[doc(inline)]
pub use compressed::Compressed;
#[cfg(feature = "dynamodb")]
#[doc(inline)]
pub use dynamodb::DynamoStore;
pub use engine::{Attempt, Operation, Outcome, Reconciliation, Refusal, current, observe, observe_all};
#[doc(inline)]
pub use error::{Disposition, Error};
#[cfg(feature = "macros")]
pub use idem_macros::idempotent;
#[doc(inline)]
pub use key::{Key, KeyDisplay, KeyPart};
#[cfg(feature = "memory")]
#[doc(inline)]
pub use memory::MemoryStore;
#[cfg(feature = "mysql")]
#[doc(inline)]
pub use mysql::MySqlStore;
#[cfg(feature = "nats")]
#[doc(inline)]
pub use nats::NatsStore;
#[cfg(feature = "offloaded")]
#[doc(inline)]
pub use offloaded::Offloaded;
#[doc(inline)]
pub use policy::{InProgress, MissingKey, Mode, ModeSwitch, OnCrash, OnError, OnStoreError, OnUndecodable, Policy};
#[cfg(feature = "postgres")]
#[doc(inline)]
pub use postgres::PostgresStore;
#[cfg(feature = "redis")]
#[doc(inline)]
pub use redis::RedisStore;
#[cfg(feature = "sqlite")]
#[doc(inline)]
pub use sqlite::SqliteStore;
#[doc(inline)]
pub use store::{Store, StoreError, StoreErrorKind, StoreExt};

/// Functions that decode rows, items, results and request bodies without a server. Fuzzers and tests pass arbitrary
/// content to them.
#[cfg(feature = "conformance")]
#[doc(hidden)]
pub mod __stored {
    pub use crate::engine::replay;
    #[cfg(feature = "http")]
    pub use crate::http::json_fingerprint;
    #[cfg(feature = "dynamodb")]
    pub use crate::stores::dynamo::read_item;
    #[cfg(feature = "mysql")]
    pub use crate::stores::mysql::read_row as read_mysql_row;
    #[cfg(feature = "nats")]
    pub use crate::stores::nats::stored::{StreamMessage, read_answer, read_subject};
    #[cfg(feature = "postgres")]
    pub use crate::stores::postgres::{Cells, read_row};
    #[cfg(feature = "sqlite")]
    pub use crate::stores::sqlite::meet_row;
}

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;
