//! Queues of the example `rabbitmq`.
#![allow(clippy::disallowed_methods, reason = "a confirmation may never come")]

use std::path::Path;
use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio::time::timeout;

use crate::fleet::{self, Failure, Headers, Run};
use crate::servers::{Server, ServerProcess};

/// Deliveries after which RabbitMQ gives a message up. The consumer gives the message up earlier, with the reasons.
const BROKER_LIMIT: u32 = 100;
/// Delays of a message that is delivered again, in milliseconds. There is a queue for each delay, because a message
/// expires only at the head of its queue. The queues are made before their first message: a new quorum queue may lose
/// some messages.
const DELAYS: [u32; 6] = [250, 1_000, 4_000, 16_000, 64_000, 256_000];
/// Longest wait for an answer of the server.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest wait for a connection with all its queues; a server that has just started takes its time.
const CONNECT: Duration = Duration::from_secs(30);

/// Waits for an answer of the server, for at most `limit`. `lapin` has no time limits: a call on a connection that is
/// being lost may wait for ever (amqp-rs/lapin#409), and a handler that waits for ever holds up the end of its worker.
async fn answer<T, E>(limit: Duration, call: impl Future<Output = Result<T, E>>) -> Result<T, Failure>
where
    Failure: From<E>,
{
    Ok(timeout(limit, call).await.map_err(|_| format!("the server did not answer within {limit:?}"))??)
}

/// Connects, and creates the queues unless they exist.
///
/// # Errors
/// The server's error, or the end of the wait for its answer.
pub async fn connect(run: &Run) -> Result<(Connection, Channel), Failure> {
    answer(CONNECT, connect_and_declare(run)).await
}

async fn connect_and_declare(run: &Run) -> Result<(Connection, Channel), Failure> {
    let connection = Connection::connect(&run.url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let dead = format!("{}.dead", run.name);
    channel.queue_declare(dead.as_str().into(), QueueDeclareOptions::durable(), FieldTable::default()).await?;
    let mut settings = dead_letters_to(&dead);
    settings.insert("x-delivery-limit".into(), AMQPValue::LongUInt(BROKER_LIMIT));
    channel.queue_declare(run.name.as_str().into(), QueueDeclareOptions::durable(), settings).await?;
    for millis in DELAYS {
        let mut settings = dead_letters_to(&run.name);
        settings.insert("x-message-ttl".into(), AMQPValue::LongUInt(millis));
        let queue = delay_queue(run, millis);
        channel.queue_declare(queue.as_str().into(), QueueDeclareOptions::durable(), settings).await?;
    }
    Ok((connection, channel))
}

/// Returns the name of the queue in which a message waits for `millis`.
fn delay_queue(run: &Run, millis: u32) -> String {
    format!("{}.after-{millis}-ms", run.name)
}

/// Returns the name of the queue in which a message waits for `after` or a little longer, or for the longest delay.
pub fn delay_queue_for(run: &Run, after: Duration) -> String {
    let longer = DELAYS.into_iter().find(|millis| Duration::from_millis((*millis).into()) >= after);
    delay_queue(run, longer.unwrap_or(DELAYS[DELAYS.len() - 1]))
}

/// Returns the settings of a quorum queue whose messages go to `queue` when they expire or are refused.
///
/// A classic queue would lose messages that expire while `queue` is not ready, for example at the start of the server.
/// A quorum queue keeps each message until `queue` has confirmed it.
fn dead_letters_to(queue: &str) -> FieldTable {
    let settings = [
        ("x-queue-type", "quorum"),
        ("x-dead-letter-exchange", ""),
        ("x-dead-letter-routing-key", queue),
        ("x-dead-letter-strategy", "at-least-once"),
        ("x-overflow", "reject-publish"),
    ];
    let mut table = FieldTable::default();
    for (name, value) in settings {
        table.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    table
}

/// Publishes a message, and waits until the server has confirmed it.
///
/// # Errors
/// The server's error. If the server does not take the message, or does not confirm it in time, that is an error, too:
/// a queue that is being recovered may lose the message.
pub async fn send(channel: &Channel, queue: &str, payload: &[u8], properties: BasicProperties) -> Result<(), Failure> {
    let (persistent, options) = (properties.with_delivery_mode(2), BasicPublishOptions::default());
    let published = async { channel.basic_publish("".into(), queue.into(), options, payload, persistent).await?.await };
    let confirmed = answer(ANSWER, published).await?;
    if confirmed.is_nack() { Err("the server did not take a message".into()) } else { Ok(()) }
}

/// Acknowledges a message.
///
/// # Errors
/// If the channel was lost. The server then delivers the message again.
pub async fn acknowledge(message: &Delivery) -> Result<(), Failure> {
    answer(ANSWER, message.ack(BasicAckOptions::default())).await.map(drop)
}

/// Returns a message to its queue, unless the channel was lost, which returns the message, too.
pub async fn hand_back(message: &Delivery) {
    let _ = answer(ANSWER, message.nack(BasicNackOptions { requeue: true, ..Default::default() })).await;
}

/// Closes a connection, for the reason `why`.
///
/// # Errors
/// If the connection was lost.
pub async fn close(connection: &Connection, why: &str) -> Result<(), Failure> {
    answer(ANSWER, connection.close(200, why.into())).await
}

/// RabbitMQ, as the example's broker.
pub struct Broker;

impl fleet::Broker for Broker {
    const NAME: &str = "rabbitmq";
    const URL: Option<&str> = Some("amqp://guest:guest@127.0.0.1:5672");

    fn start(&self, _: &str, folder: &Path) -> Result<Box<dyn Server>, Failure> {
        Ok(Box::new(ServerProcess::rabbitmq(folder)?))
    }

    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
        let (connection, channel) = connect(run).await?;
        for message in messages {
            send(&channel, &run.name, message, BasicProperties::default()).await?;
        }
        close(&connection, "published").await
    }

    async fn dead_letters(&self, run: &Run) -> Result<Vec<Headers>, Failure> {
        let (connection, channel) = connect(run).await?;
        let (queue, mut found) = (format!("{}.dead", run.name), Vec::new());
        while let Some(message) = channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await? {
            let text = |value: &AMQPValue| match value {
                AMQPValue::LongString(text) => Some(text.to_string()),
                _ => None,
            };
            let headers = message.properties.headers().clone().unwrap_or_default();
            found.push(
                headers.inner().iter().filter_map(|(name, value)| Some((name.to_string(), text(value)?))).collect(),
            );
            message.ack(BasicAckOptions::default()).await?;
        }
        close(&connection, "read").await?;
        Ok(found)
    }

    async fn clean_up(&self, run: &Run) -> Result<(), Failure> {
        let (connection, channel) = connect(run).await?;
        let queues = [run.name.clone(), format!("{}.dead", run.name)].into_iter();
        for queue in queues.chain(DELAYS.map(|millis| delay_queue(run, millis))) {
            channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
        close(&connection, "done").await
    }
}
