//! A program of docs/start.md, word for word: parcels for the orders of a queue, with records in Redis.
//!
//! ```sh
//! export AMQP_URL=amqp://guest:guest@localhost REDIS_URL=redis://localhost
//! cargo run --example start_redis --features start
//! ```
#![allow(clippy::disallowed_methods, clippy::default_trait_access, reason = "a short program of a user")]

// docs/start.md has the program from here on.
use std::time::Duration;

use anyhow::bail;
use futures::StreamExt as _;
use idem_runtime::{Disposition, RedisStore, current, idempotent, observe};
use lapin::Connection;
use lapin::message::Delivery;
use lapin::options::{BasicNackOptions, BasicRejectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use tokio::time::sleep;

/// Runs once for each order; every duplicate gets the parcel of that run. After five failures no body runs.
#[idempotent(key = "{order}", ttl = "7d", store = store, scope = "ship", max_attempts = 5)]
async fn ship(store: &RedisStore, order: Option<i64>) -> anyhow::Result<String> {
    // The carrier gets the same key on every attempt: the process may die between the call and the record.
    Ok(format!("parcel {}", current()?.child_key("carrier")))
}

async fn deliver(store: RedisStore, message: Delivery) {
    // A message without a number has no key: the call refuses it, and the message is set aside.
    let order = std::str::from_utf8(&message.data).ok().and_then(|text| text.parse().ok());
    let (parcel, outcome) = observe(ship(&store, order)).catch_panics().await;
    println!("order {order:?}: {parcel:?}, {:?}", outcome.disposition());
    let settled = match outcome.disposition() {
        Disposition::Ack => message.ack(Default::default()).await, // The parcel is recorded.
        Disposition::Retry { after } => {
            sleep(after).await;
            message.nack(BasicNackOptions { requeue: true, multiple: false }).await
        }
        Disposition::DeadLetter => message.reject(BasicRejectOptions { requeue: false }).await,
    };
    // If the connection is lost, RabbitMQ delivers the message again, and a recorded parcel is replayed.
    settled.map_err(|error| eprintln!("order {order:?}: {error}")).ok();
}

async fn consume(store: &RedisStore) -> anyhow::Result<()> {
    let connection = Connection::connect(&std::env::var("AMQP_URL")?, Default::default()).await?;
    let (channel, durable) = (connection.create_channel().await?, QueueDeclareOptions::durable());
    let mut settings = FieldTable::default();
    channel.queue_declare("orders.dead".into(), durable, settings.clone()).await?;
    settings.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("".into()));
    settings.insert("x-dead-letter-routing-key".into(), AMQPValue::LongString("orders.dead".into()));
    channel.queue_declare("orders".into(), durable, settings).await?;
    channel.basic_qos(8, Default::default()).await?; // At most eight messages at a time.
    let consumer = channel.basic_consume("orders".into(), "".into(), Default::default(), Default::default());
    let mut messages = consumer.await?;
    while let Some(message) = messages.next().await {
        tokio::spawn(deliver(store.clone(), message?));
    }
    bail!("the consumer was cancelled")
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let store = RedisStore::connect(&std::env::var("REDIS_URL")?).await?;
    loop {
        consume(&store).await.map_err(|error| eprintln!("{error}; connecting again")).ok();
        sleep(Duration::from_secs(1)).await;
    }
}
