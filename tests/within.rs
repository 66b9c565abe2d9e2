//! Records inside of the user's own transaction: with the effect or not at all.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Child, Command};
use std::task::Poll;
use std::time::Duration;

use idem_runtime::{
    Disposition, Error, InProgress, Json, Key, OnCrash, Outcome, Policy, PostgresStore, SqliteStore, State, Store,
    StoreErrorKind, Within, current, idempotent, observe, record_results, record_values, run_within,
};
use idem_tests::postgres::Postgres;
use idem_tests::race;
use rusqlite::{Connection, TransactionBehavior};
use tokio_postgres::{Client, IsolationLevel, NoTls};

const POLICY: Policy = Policy::new(Duration::from_secs(3600));

/// Polls once.
async fn poll_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

// ---- PostgreSQL ------------------------------------------------------------------------------------------------------

/// A database of its own, with a table for effects.
struct Bank {
    url: String,
    store: PostgresStore,
}

impl Bank {
    async fn open() -> Self {
        let url = Postgres::shared().database().await;
        let store = PostgresStore::options().connect(&url).await;
        let store = match store {
            Ok(store) => store,
            Err(error) => panic!("{error:?}"),
        };
        let bank = Self { url, store };
        bank.client().await.batch_execute("CREATE TABLE effects (n int)").await.unwrap();
        bank
    }

    async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    async fn effects(&self) -> i64 {
        self.client().await.query_one("SELECT count(*) FROM effects", &[]).await.unwrap().get(0)
    }

    async fn state(&self, name: &str) -> Option<State> {
        let found = self.store.inspect(&Key::new("pay", name).unwrap()).await.unwrap();
        found.map(|inspection| inspection.record.state)
    }
}
