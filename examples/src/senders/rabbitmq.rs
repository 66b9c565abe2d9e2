//! Sender for RabbitMQ.

use std::sync::Arc;

use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::sync::Mutex;

/// Publishes to the queue that a message names, through the default exchange. The id becomes the property `message_id`.
/// RabbitMQ drops no duplicates: consumers recognise them by this property.
#[derive(Clone)]
pub struct RabbitMqSender {
    url: Arc<str>,
    link: Arc<Mutex<Link>>,
}

/// The connection, and its channels without an unconfirmed message.
#[derive(Default)]
struct Link {
    connection: Option<Connection>,
    idle: Vec<Channel>,
}

impl RabbitMqSender {
    /// Makes a sender that connects to `url` before its first message, and again after a lost connection.
    pub fn new(url: &str) -> Self {
        Self { url: url.into(), link: Arc::default() }
    }

    /// Publishes a persistent message, and waits until its queue has confirmed the message.
    ///
    /// # Errors
    /// If the queue does not exist: this message is refused. Or if the queue has not confirmed the message, which may
    /// have arrived nevertheless.
    pub async fn publish(
        &self,
        queue: &str,
        id: &str,
        body: &[u8],
        headers: impl Iterator<Item = (&str, &str)>,
    ) -> Result<(), SendError> {
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert(name.into(), AMQPValue::LongString(LongString::from(value)));
        }
        let properties =
            BasicProperties::default().with_message_id(id.into()).with_delivery_mode(2).with_headers(table);
        // Without `mandatory`, RabbitMQ confirms a message that it has dropped because no queue takes it.
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let channel = self.channel().await?;
        let confirmation = channel.basic_publish("".into(), queue.into(), options, body, properties).await?.await?;
        self.link.lock().await.idle.push(channel);
        match confirmation {
            Confirmation::Ack(None) => Ok(()),
            Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)) => {
                Err(SendError::refused(format!("no queue takes the message: {}", returned.reply_text)))
            }
            Confirmation::Nack(None) => Err("the queue did not take the message".into()),
            Confirmation::NotRequested => Err("the channel does not confirm messages".into()),
        }
    }

    /// Takes a channel without an unconfirmed message. With several unconfirmed messages on one channel, `lapin` may
    /// hand a returned message to the publisher of another one.
    async fn channel(&self) -> Result<Channel, lapin::Error> {
        let mut link = self.link.lock().await;
        while let Some(channel) = link.idle.pop() {
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let connection = match link.connection.take() {
            Some(connection) if connection.status().connected() => connection,
            _ => Connection::connect(&self.url, ConnectionProperties::default()).await?,
        };
        let channel = link.connection.insert(connection).create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }
}

impl Sender for RabbitMqSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(self.publish(message.destination(), message.id(), message.body(), message.headers()))
    }
}
