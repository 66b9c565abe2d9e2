//! Sender for Kafka.

use std::time::Duration;

use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

/// Header of a message with its id.
const ID: &str = "message-id";

/// Publishes to the topic that a message names. The key of the message decides on its partition, and the id becomes the
/// header `message-id`. Kafka recognises only the repetitions of one producer, so consumers recognise others by this
/// header.
pub struct KafkaSender {
    producer: FutureProducer,
}

impl KafkaSender {
    /// Makes a sender. `config` names the servers.
    ///
    /// # Errors
    /// If the configuration is wrong.
    pub fn new(config: &ClientConfig) -> Result<Self, KafkaError> {
        let mut config = config.clone();
        // librdkafka gives a message up a little before the sender's time limit of 10 s.
        config.set("acks", "all").set("enable.idempotence", "true").set("message.timeout.ms", "8000");
        Ok(Self { producer: config.create()? })
    }
}

impl Sender for KafkaSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let mut headers = OwnedHeaders::new().insert(Header { key: ID, value: Some(message.id()) });
            for (key, value) in message.headers() {
                headers = headers.insert(Header { key, value: Some(value) });
            }
            let mut record = FutureRecord::<str, [u8]>::to(message.destination()).payload(message.body());
            if let Some(key) = message.partition_key() {
                record = record.key(key);
            }
            match self.producer.send(record.headers(headers), Duration::ZERO).await {
                Ok(_) => Ok(()),
                Err((error, _)) if is_refusal(&error) => Err(SendError::refused(error)),
                Err((error, _)) => Err(error.into()),
            }
        })
    }
}

fn is_refusal(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{InvalidTopic, MessageSizeTooLarge, UnknownTopicOrPartition};
    let code = error.rdkafka_error_code();
    matches!(code, Some(MessageSizeTooLarge | InvalidTopic | UnknownTopicOrPartition))
}
