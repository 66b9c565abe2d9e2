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

#[cfg(all(test, any(feature = "kafka", feature = "sqs")))]
mod tests {
    use std::time::Duration;

    use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
    use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, StoreExt as _, current};

    /// Sends each message twice, as after the death of a process that has not marked the message as sent.
    struct Twice<S>(S);

    impl<S: Sender> Sender for Twice<S> {
        fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
            Box::pin(async move {
                self.0.send(message).await?;
                self.0.send(message).await
            })
        }
    }

    /// Publishes one message, twice.
    async fn publish_twice(sender: impl Sender, destination: &str) -> Result<(), Error> {
        let store = MemoryStore::new().with_sender(Twice(sender));
        let policy = Policy::new(Duration::from_secs(60));
        let message = OutgoingMessage::new("paid").key(42).header("type", "OrderPaid");
        let body = async { current()?.outbox().push(destination, message) };
        Operation::new(&store, Key::new("pay", "42"), policy).run(body).await
    }

    #[cfg(feature = "kafka")]
    #[tokio::test]
    async fn kafka_gets_the_id_as_a_header_of_each_copy() {
        use rdkafka::Message as _;
        use rdkafka::consumer::{Consumer as _, StreamConsumer};
        use rdkafka::message::Headers as _;
        use rdkafka::mocking::MockCluster;

        let mock = MockCluster::new(1).unwrap();
        mock.create_topic("paid", 1, 1).unwrap();
        let mut config = crate::kafka::config(&mock.bootstrap_servers());
        publish_twice(super::KafkaSender::new(&config).unwrap(), "paid").await.unwrap();
        config.set("group.id", "test").set("auto.offset.reset", "earliest");
        let consumer: StreamConsumer = config.create().unwrap();
        consumer.subscribe(&["paid"]).unwrap();
        let mut ids = Vec::new();
        for _ in 0..2 {
            let message = consumer.recv().await.unwrap();
            assert_eq!((message.key(), message.payload()), (Some(&b"42"[..]), Some(&b"paid"[..])));
            let headers = message.headers().unwrap().iter();
            let headers: Vec<_> = headers.map(|it| (it.key, String::from_utf8_lossy(it.value.unwrap()))).collect();
            let [("message-id", id), ("type", kind)] = &headers[..] else { panic!("{headers:?}") };
            assert_eq!(kind, "OrderPaid");
            ids.push(id.to_string());
        }
        assert!(ids[0] == ids[1] && !ids[0].is_empty(), "{ids:?}");
    }

    #[cfg(feature = "sqs")]
    #[tokio::test]
    async fn a_fifo_queue_drops_the_second_copy() {
        use aws_sdk_sqs::types::QueueAttributeName;

        use crate::servers::{Server as _, ServerProcess};

        let folder = std::env::temp_dir().join(format!("idem-senders-{}", std::process::id()));
        let server = ServerProcess::ministack(&folder).unwrap();
        let sqs = crate::sqs::client(&server.url());
        let queue = sqs.create_queue().queue_name("paid.fifo").attributes(QueueAttributeName::FifoQueue, "true");
        let queue = queue.send().await.unwrap().queue_url.unwrap();
        publish_twice(super::SqsFifoSender::new(sqs.clone()), &queue).await.unwrap();
        let receive = sqs.receive_message().queue_url(&queue).max_number_of_messages(10);
        let receive = receive.message_attribute_names("All").send().await.unwrap();
        let [message] = receive.messages() else { panic!("{receive:?}") };
        assert_eq!(message.body(), Some("paid"));
        assert_eq!(message.message_attributes().unwrap()["type"].string_value(), Some("OrderPaid"));
        drop(server);
        let _ = std::fs::remove_dir_all(&folder);
    }
}
