//! A transfer over HTTP that happens exactly once: the record of its key is written in the transaction that moves the
//! money.
//!
//! ```sh
//! cargo run --example axum_within --features axum
//! curl -s -i localhost:8081/transfers -H 'Idempotency-Key: t-1' -H 'Content-Type: application/json' \
//!   -d '{"from":"alice","to":"bob","cents":500}'   # as often as you like
//! curl -s localhost:8081/accounts                  # {"alice":9500,"bob":10500}
//! ```
//!
//! After any crash, the database has both the record and the transfer, or neither. The price: the handler is a function
//! that returns a value, so a duplicate gets the recorded value and not a recorded HTTP response. A duplicate waits
//! while the transaction of the first request locks the database.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use idem_runtime::http::IdempotencyKey;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{SqliteStore, idempotent};
use rusqlite::{Connection, Transaction};
use serde::{Deserialize, Serialize};

type AnyError = Box<dyn Error + Send + Sync>;

#[derive(Serialize, Deserialize)]
struct Transfer {
    from: String,
    to: String,
    cents: i64,
}

/// Outcome of a transfer. A refusal is a value and not an error, so it is recorded, and every duplicate gets it.
#[derive(Serialize, Deserialize)]
enum Answer {
    Transferred { balance: i64 },
    NotEnough,
}

#[idempotent(
    key = "{transfer.from}:{key}",
    ttl = "7d",
    store = SqliteStore::within(tx),
    scope = "transfer",
    fingerprint = transfer
)]
async fn transfer(tx: &OpenTransaction<Transaction<'_>>, key: &str, transfer: &Transfer) -> Result<Answer, AnyError> {
    let Transfer { from, to, cents } = transfer;
    let take = "UPDATE accounts SET cents = cents - ?2 WHERE name = ?1 AND cents >= ?2 AND ?2 > 0";
    if tx.execute(take, (from, cents))? == 0 {
        return Ok(Answer::NotEnough);
    }
    tx.execute("UPDATE accounts SET cents = cents + ?2 WHERE name = ?1", (to, cents))?;
    let balance = tx.query_row("SELECT cents FROM accounts WHERE name = ?1", [from], |row| row.get(0))?;
    Ok(Answer::Transferred { balance })
}

async fn transfers(
    State(file): State<PathBuf>,
    IdempotencyKey(key): IdempotencyKey,
    Json(asked): Json<Transfer>,
) -> Result<Json<Answer>, (StatusCode, String)> {
    // A connection of SQLite belongs to one thread. The thread continues if the client hangs up.
    let runtime = tokio::runtime::Handle::current();
    let working = tokio::task::spawn_blocking(move || {
        runtime.block_on(async {
            let mut connection = Connection::open(file)?;
            let work = async |tx: &OpenTransaction<Transaction<'_>>| transfer(tx, &key, &asked).await;
            SqliteStore::transact(&mut connection, work).await.0
        })
    });
    match working.await {
        Ok(Ok(answer)) => Ok(Json(answer)),
        Ok(Err(error)) => Err((status(&*error), format!("{error}\n"))),
        Err(_) => Err((StatusCode::INTERNAL_SERVER_ERROR, String::new())),
    }
}

fn status(error: &(dyn Error + 'static)) -> StatusCode {
    match error.downcast_ref() {
        Some(idem_runtime::Error::FingerprintMismatch { .. }) => StatusCode::UNPROCESSABLE_ENTITY,
        Some(idem_runtime::Error::InProgress { .. }) => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn accounts(State(file): State<PathBuf>) -> Result<Json<BTreeMap<String, i64>>, StatusCode> {
    let read = || {
        let connection = Connection::open(file)?;
        let mut accounts = connection.prepare("SELECT name, cents FROM accounts")?;
        let rows = accounts.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect::<rusqlite::Result<_>>()
    };
    read().map(Json).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8081".to_owned());
    let file = arguments.next().map(PathBuf::from);
    let file = file.unwrap_or_else(|| std::env::temp_dir().join("idem-axum-within.db"));
    Connection::open(&file)?.execute_batch(
        "CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, cents INTEGER NOT NULL);
         INSERT OR IGNORE INTO accounts VALUES ('alice', 10000), ('bob', 10000);",
    )?;
    let app = Router::new().route("/transfers", post(transfers)).route("/accounts", get(accounts)).with_state(file);
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("Listening on {}. See the top of examples/axum_within.rs for what to send.", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}
