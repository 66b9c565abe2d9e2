//! Senders of the messages in an outbox, one for each broker, to be copied into a program.
//!
//! Each sender waits until its broker has confirmed a message, and hands the id of the message to the broker.

#[cfg(feature = "nats")]
mod jetstream;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "sqs")]
mod sqs;

#[cfg(feature = "nats")]
pub use jetstream::JetStreamSender;
#[cfg(feature = "kafka")]
pub use kafka::KafkaSender;
#[cfg(feature = "rabbitmq")]
pub use rabbitmq::RabbitMqSender;
#[cfg(feature = "sqs")]
pub use sqs::SqsFifoSender;
