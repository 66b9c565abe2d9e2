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
//! | protect a handler | [`#[idempotent]`](macro@idempotent) with all its options; [`run`] without the macro |
//! | know what to do with a message | [`observe`], [`Outcome`], [`Disposition`], [`Error`] |
//! | make an effect safe to repeat | [`current`], [`Attempt::child_key`], [`Attempt::number`], [`Attempt::confirm_lease`] |
//! | share settings between handlers, or switch the mode of a live consumer | [`Policy`], [`ModeSwitch`] |
//! | keep records | [`MemoryStore`], and behind features `SqliteStore`, `RedisStore`, `PostgresStore`, `DynamoStore` |
//! | record inside of a transaction of yours | `PostgresStore::within`, `SqliteStore::within` |
//! | encode results otherwise | [`Codec`], [`Json`], `MessagePack` (feature `msgpack`), `Postcard` (feature `postcard`) |
//! | change what a handler returns | [`OnUndecodable`], [`Undecodable`] |
//! | wrap a store | `Cached`, `Compressed`, `Offloaded` (features of these names, in lower case) |
//! | look at a record, or let an interrupted operation run again | [`Store::inspect`], [`Store::reopen`] |
//! | shut down | [`Heartbeats::flush`] |
//! | test your handlers: killed at each await, with duplicates in flight | `testing` (feature `testing`) |
//! | test time | [`ManualClock`], [`MemoryStore::options`], [`MemoryStore::peer`] |
//! | write a store | [`Store`], [`record`], `conformance` (feature `conformance`) |
//!
//! # What is guaranteed
//!
//! At most one attempt for a key holds a live lease; `Ok` means that the result is recorded; a recorded result never
//! changes within its retention; a late attempt never touches the record of its successor; a failing store is never read
//! as "no record".
//!
//! An effect of the body can still happen twice: a process may die after the effect and before its record, or be paused
//! for longer than its lease. [`Attempt::child_key`] is the same on every attempt, for APIs with idempotency keys of their
//! own; `on_crash = fail` allows one run at most.
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `macros` (default) | the attribute |
//! | `memory` (default) | [`MemoryStore`] |
//! | `redis` | `RedisStore`: Redis 7.0 and newer, Valkey 8 and newer; one server, Sentinel or Cluster |
//! | `redis-tls` | `rediss://` URLs: rustls, with the certificates that the system trusts |
//! | `sqlite` | `SqliteStore`: one file, several processes of one host |
//! | `postgres` | `PostgresStore`: PostgreSQL 12 and newer |
//! | `postgres-tls` | `sslmode=require` in its URLs: rustls, with the certificates that the system trusts |
//! | `sqlx` | `PostgresStore::within_sqlx`: records inside of a transaction of `sqlx` 0.8 |
//! | `dynamodb` | `DynamoStore`: a DynamoDB table, through the client of `aws-sdk-dynamodb` |
//! | `cached` | `Cached`: finished records kept in this process, in front of any store |
//! | `compressed` | `Compressed`: large results compressed with zstd, in any store |
//! | `offloaded` | `Offloaded`: large results in an object store, their records in any store |
//! | `msgpack`, `postcard` | the codecs `MessagePack` and `Postcard` |
//! | `testing` | `testing::explore`, which kills your handler at each of its awaits, on simulated time |
//! | `conformance` | the suite that every store passes, for authors of stores |
//!
//! The runtime is tokio's: leases are renewed and late writes are made by its tasks.
#![warn(missing_docs)]

mod clock;
mod codec;
#[cfg(feature = "conformance")]
pub mod conformance;
mod engine;
mod error;
mod future;
mod key;
mod kit;
mod policy;
pub mod record;
mod store;
mod stores;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod within;

pub use clock::{Clock, Instant, ManualClock, Sleep, SystemClock, Task};
#[cfg(feature = "msgpack")]
pub use codec::MessagePack;
#[cfg(feature = "postcard")]
pub use codec::Postcard;
pub use codec::{Codec, CodecError, CodecName, Json, ResultProblem, Undecodable};
pub use engine::{
    Attempt, CatchPanics, Ending, ErrorRule, Observe, Operation, Outcome, RecordResults, RecordValues, Recorder,
    Refusal, current, observe, record_results, record_results_if, record_values, run,
};
pub use error::{Disposition, Error, Mismatch};
#[cfg(feature = "macros")]
pub use idem_macros::idempotent;
pub use key::{Fingerprint, FingerprintError, Key, KeyBuilder, KeyError, KeyPart, KeyProblem, Scope, Site};
pub use policy::{
    Backoff, Doubt, InProgress, Migrate, MissingKey, Mode, ModeSwitch, OnCrash, OnError, OnStoreError, OnUndecodable,
    Policy, PolicyProblem, Uncertain,
};
pub use record::{
    Admission, Finish, Inspection, Lease, OwnerToken, Record, Release, Reservation, ReserveRequest, State,
    StoredResult, Verdict,
};
pub use store::{Answers, Heartbeats, Store, StoreError, StoreErrorKind, StoreFuture, renew_all};
#[cfg(feature = "cached")]
pub use stores::cached::{Cached, CachedOptions};
#[cfg(feature = "compressed")]
pub use stores::compressed::{Compressed, CompressedOptions};
#[cfg(feature = "dynamodb")]
pub use stores::dynamo::{DynamoOptions, DynamoStore};
#[cfg(feature = "memory")]
pub use stores::memory::{MemoryOptions, MemoryStore};
#[cfg(feature = "offloaded")]
pub use stores::offloaded::{Offloaded, OffloadedOptions};
#[cfg(feature = "sqlx")]
pub use stores::postgres::InSqlx;
#[cfg(feature = "postgres")]
pub use stores::postgres::{InPostgres, PostgresOptions, PostgresStore};
#[cfg(feature = "redis")]
pub use stores::redis::{RedisOptions, RedisStore};
#[cfg(feature = "sqlite")]
pub use stores::sqlite::{InSqlite, SqliteOptions, SqliteStore, Synchronous};

#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub use within::{OperationWithin, Transaction, Within, run_within};

/// How stores read rows and items, without a server: for tests of what anybody may have written there.
#[cfg(all(feature = "conformance", any(feature = "sqlite", feature = "postgres", feature = "dynamodb")))]
#[doc(hidden)]
pub mod __stored {
    #[cfg(feature = "dynamodb")]
    pub use crate::stores::dynamo::read_item;
    #[cfg(feature = "postgres")]
    pub use crate::stores::postgres::{Cells, read_row};
    #[cfg(feature = "sqlite")]
    pub use crate::stores::sqlite::meet_row;
}

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;
