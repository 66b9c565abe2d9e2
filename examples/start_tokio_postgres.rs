//! A program of docs/start.md, word for word: payments from RabbitMQ, each in one transaction with its record, by
//! tokio-postgres.
//!
//! ```sh
//! export AMQP_URL=amqp://guest:guest@localhost DATABASE_URL=postgres://shop@localhost/shop
//! cargo run --example start_tokio_postgres --features start
//! ```
#![allow(clippy::disallowed_methods, clippy::default_trait_access, reason = "a short program of a user")]

// docs/start.md has the program from here on.
use std::time::Duration;

use anyhow::bail;
use deadpool_postgres::{Config, Pool, Runtime};
use futures::StreamExt as _;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{Disposition, PostgresStore, idempotent, observe};
use lapin::Connection;
use lapin::message::Delivery;
use lapin::options::{BasicNackOptions, BasicRejectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use tokio::time::sleep;
use tokio_postgres::{NoTls, Transaction};

/// Runs once for each order: its rows and its record are committed together. After five failures no body runs.
#[idempotent(key = "{order}", ttl = "30d", store = PostgresStore::within(tx), scope = "pay", max_attempts = 5)]
async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: Option<i64>) -> anyhow::Result<()> {
    tx.execute("INSERT INTO payments (order_id) VALUES ($1)", &[&order]).await?;
    Ok(())
}

async fn deliver(pool: Pool, message: Delivery) {
    // A message without a number has no key: the call refuses it, and the message is set aside.
    let order = std::str::from_utf8(&message.data).ok().and_then(|text| text.parse().ok());
    // The connection is taken inside of `observe`, so that its failure is observed, too.
    let call = async { PostgresStore::transact(&mut **pool.get().await?, async |tx| pay(tx, order).await).await.0 };
    let (paid, outcome) = observe(call).catch_panics().await;
    println!("order {order:?}: {paid:?}, {:?}", outcome.disposition());
    let settled = match outcome.disposition() {
        Disposition::Ack => message.ack(Default::default()).await, // The payment is committed.
        Disposition::Retry { after } => {
            sleep(after).await;
            message.nack(BasicNackOptions { requeue: true, multiple: false }).await
        }
        Disposition::DeadLetter => message.reject(BasicRejectOptions { requeue: false }).await,
    };
    // If the connection is lost, RabbitMQ delivers the message again, and a committed payment is replayed.
    settled.map_err(|error| eprintln!("order {order:?}: {error}")).ok();
}

async fn consume(pool: &Pool) -> anyhow::Result<()> {
    let connection = Connection::connect(&std::env::var("AMQP_URL")?, Default::default()).await?;
    let (channel, durable) = (connection.create_channel().await?, QueueDeclareOptions::durable());
    let mut settings = FieldTable::default();
    channel.queue_declare("payments.dead".into(), durable, settings.clone()).await?;
    settings.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("".into()));
    settings.insert("x-dead-letter-routing-key".into(), AMQPValue::LongString("payments.dead".into()));
    channel.queue_declare("payments".into(), durable, settings).await?;
    channel.basic_qos(8, Default::default()).await?; // At most eight messages at a time.
    let consumer = channel.basic_consume("payments".into(), "".into(), Default::default(), Default::default());
    let mut messages = consumer.await?;
    while let Some(message) = messages.next().await {
        tokio::spawn(deliver(pool.clone(), message?));
    }
    bail!("the consumer was cancelled")
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = Config { url: Some(std::env::var("DATABASE_URL")?), ..Config::default() };
    let pool = config.create_pool(Some(Runtime::Tokio1), NoTls)?;
    loop {
        consume(&pool).await.map_err(|error| eprintln!("{error}; connecting again")).ok();
        sleep(Duration::from_secs(1)).await;
    }
}
