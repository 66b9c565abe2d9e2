//! Tools that the test binaries share.

#![allow(clippy::missing_panics_doc, clippy::disallowed_methods)] // Tests panic, and wait for real servers.

pub mod brokers;
pub mod calls;
pub mod chance;
pub mod clock;
pub mod cluster;
#[cfg(feature = "dynamodb")]
pub mod dynamo;
pub mod log;
#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "nats")]
pub mod nats;
pub mod natural;
pub mod polls;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod proxy;
pub mod race;
mod reopen;
pub mod server;
#[cfg(feature = "sqlite")]
pub mod sqlite;
pub mod stores;
pub mod tls;
#[cfg(feature = "wrappers")]
pub mod wrapped;

use std::sync::atomic::{AtomicU64, Ordering};

pub use self::reopen::{Reopen, decided, forget_damaged};
pub use idem_runtime::testing::{Fault, FaultyStore, StoreCall};

/// Returns the statement of docs/operations.md about journals, for the table with this name.
pub fn statement_about_journals(table: &str) -> String {
    let section = include_str!("../../docs/operations.md").split_once("### Journals of steps").expect("the section").1;
    let block = section.split_once("```sql\n").and_then(|(_, rest)| rest.split_once("\n```")).expect("a statement").0;
    assert!(block.contains("FROM idem.records\n"), "{block}");
    block.replace("idem.records", table)
}

/// Yields to other tasks `polls` times.
pub async fn yields(polls: u32) {
    for _ in 0..polls {
        tokio::task::yield_now().await;
    }
}

/// Returns a text that no stored record begins with. Each call returns another text.
pub fn nonsense() -> String {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    format!("not a record, {}", CALLS.fetch_add(1, Ordering::Relaxed))
}

/// Yields until every task of this single-threaded runtime waits.
pub async fn settle() {
    yields(200).await;
}

/// Compiles and runs the code of the README, with stores in memory.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// Compiles and runs the code of the guide, with stores in memory.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
pub struct Guide;

/// Compiles and runs the code of the page about HTTP.
#[cfg(all(doctest, feature = "http", feature = "sqlite"))]
#[doc = include_str!("../../docs/http.md")]
pub struct HttpPage;

/// Compiles and runs the code of the page about brokers, with stores in memory.
#[cfg(doctest)]
#[doc = include_str!("../../docs/brokers.md")]
pub struct Brokers;

/// Compiles the code of the page about operation.
#[cfg(all(doctest, feature = "http"))]
#[doc = include_str!("../../docs/operations.md")]
pub struct Operations;

/// Compiles the code of the page for contributors.
#[cfg(doctest)]
#[doc = include_str!("../../CONTRIBUTING.md")]
pub struct Contributing;

/// Compiles and runs the code of the page about metrics.
#[cfg(all(doctest, feature = "metrics"))]
#[doc = include_str!("../../docs/metrics.md")]
pub struct Metrics;

/// Compiles the code of the page about natural idempotency.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../../docs/natural.md")]
pub struct Natural;

/// Compiles the code of the page about the outbox.
#[cfg(doctest)]
#[doc = include_str!("../../docs/outbox.md")]
pub struct Outbox;

/// Compiles the code of the page about steps.
#[cfg(doctest)]
#[doc = include_str!("../../docs/steps.md")]
pub struct Steps;
