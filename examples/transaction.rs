//! Makes a change in your own database happen exactly once.
//!
//! The record is written in the transaction of the handler's own rows: both are committed, or neither.
//! `cargo run --example transaction --features transaction` makes payments from an account, with deliveries that fail,
//! die before their commit, and repeat.

use std::error::Error;
use std::process::ExitCode;

use idem_examples::Claims;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{Disposition, SqliteStore, idempotent};
use rusqlite::{Connection, Transaction, TransactionBehavior};

type AnyError = Box<dyn Error + Send + Sync>;

/// The handler: withdraws a payment of 25 from the account. `tx` is both the store and the database.
#[idempotent(key = "payment:{payment}", ttl = "7d", store = SqliteStore::within(tx), scope = "pay")]
async fn pay(tx: &OpenTransaction<Transaction<'_>>, payment: u32, fails: bool) -> Result<i64, AnyError> {
    tx.execute("UPDATE accounts SET balance = balance - 25 WHERE name = 'ada'", [])?;
    if fails {
        return Err("the bank's rules refuse it".into());
    }
    Ok(balance(tx)?)
}

fn balance(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("SELECT balance FROM accounts WHERE name = 'ada'", [], |row| row.get(0))
}

async fn run(claims: &mut Claims) -> Result<(), AnyError> {
    let mut connection = Connection::open_in_memory()?;
    connection.execute_batch("CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER)")?;
    connection.execute("INSERT INTO accounts VALUES ('ada', 100)", [])?;

    // `transact` begins a transaction, commits it after `Ok`, and rolls it back after an error.
    let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| pay(tx, 1, true).await).await;
    claims.check("a handler that fails changes nothing", paid.is_err() && balance(&connection)? == 100);
    claims.check("its message comes back", matches!(outcome.disposition(), Disposition::Retry { .. }));

    // The steps of `transact`, one by one. The transaction is dropped before its commit, as if the process had died,
    // and SQLite rolls its writes back.
    let tx = OpenTransaction::new(connection.transaction_with_behavior(TransactionBehavior::Immediate)?);
    pay(&tx, 1, false).await?;
    drop(tx);
    claims.check("a crash before the commit changes nothing", balance(&connection)? == 100);

    let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| pay(tx, 1, false).await).await;
    claims.check("the next delivery pays, with no lease to wait for", paid? == 75 && balance(&connection)? == 75);
    claims.check("its message is done", outcome.executed() && outcome.disposition() == Disposition::Ack);

    let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| pay(tx, 1, false).await).await;
    claims.check("a duplicate gets the same result", paid? == 75 && outcome.replayed());
    claims.check("and pays nothing", balance(&connection)? == 75);
    Ok(())
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let mut claims = Claims::default();
    let result = runtime.block_on(run(&mut claims));
    claims.exit_code(&result)
}
