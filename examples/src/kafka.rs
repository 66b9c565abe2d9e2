//! Topics of the example `kafka`, on a cluster or on a mock broker in this process.
#![allow(clippy::disallowed_methods, reason = "a topic has no end")]

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{DefaultProducerContext, FutureProducer, FutureRecord};
use tokio::time::timeout;

use crate::fleet::{self, Failure, Headers, Run};
use crate::servers::Server;

const PARTITIONS: i32 = 4;
/// Time without a message after which the end of a topic is reached.
const END: Duration = Duration::from_secs(5);

fn topics(name: &str) -> [String; 3] {
    ["orders", "retry", "dead"].map(|topic| format!("{name}-{topic}"))
}

/// Returns the configuration of a librdkafka client for the server at `url`.
pub fn config(url: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", url).set("reconnect.backoff.max.ms", "1000");
    config
}

/// A mock broker in this process.
struct Mock(MockCluster<'static, DefaultProducerContext>);

impl Server for Mock {
    fn url(&self) -> String {
        self.0.bootstrap_servers()
    }

    fn kill(&mut self) -> std::io::Result<()> {
        self.0.broker_down(-1).map_err(std::io::Error::other)
    }

    fn start(&mut self) -> std::io::Result<()> {
        self.0.broker_up(-1).map_err(std::io::Error::other)
    }
}

/// Kafka, as the example's broker.
#[derive(Default)]
pub struct Broker {
    /// True if the broker is the mock, which does not support the requests to create and delete topics.
    is_mock: Cell<bool>,
}

impl fleet::Broker for Broker {
    const NAME: &str = "kafka";
    const URL: Option<&str> = None;

    fn start(&self, name: &str, _: &Path) -> Result<Box<dyn Server>, Failure> {
        let mock = MockCluster::new(1)?;
        for topic in topics(name) {
            mock.create_topic(&topic, PARTITIONS, 1)?;
        }
        self.is_mock.set(true);
        Ok(Box::new(Mock(mock)))
    }

    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
        if !self.is_mock.get() {
            let topics = topics(&run.name);
            let topics = topics.each_ref().map(|topic| NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(-1)));
            let admin: AdminClient<DefaultClientContext> = config(&run.url).create()?;
            // Results of single topics are ignored: in a repeated call all topics exist already.
            admin.create_topics(&topics, &AdminOptions::new()).await?;
        }
        let (producer, topic): (FutureProducer, _) = (config(&run.url).create()?, format!("{}-orders", run.name));
        for message in messages {
            let record = FutureRecord::<(), _>::to(&topic).payload(message);
            producer.send(record, Duration::from_secs(5)).await.map_err(|(error, _)| error)?;
        }
        Ok(())
    }

    async fn dead_letters(&self, run: &Run) -> Result<Vec<Headers>, Failure> {
        let mut config = config(&run.url);
        config.set("group.id", format!("{}-audit", run.name)).set("auto.offset.reset", "earliest");
        let consumer: StreamConsumer = config.create()?;
        consumer.subscribe(&[&topics(&run.name)[2]])?;
        let mut found = Vec::new();
        // The group needs some seconds until it gives this consumer its partitions.
        let mut patience = END * 3;
        while let Ok(message) = timeout(patience, consumer.recv()).await {
            let message = message?;
            let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
            let texts = headers.filter_map(|header| {
                Some((header.key.to_owned(), String::from_utf8_lossy(header.value?).into_owned()))
            });
            found.push(texts.collect());
            patience = END;
        }
        Ok(found)
    }

    async fn clean_up(&self, run: &Run) -> Result<(), Failure> {
        if !self.is_mock.get() {
            let topics = topics(&run.name);
            let admin: AdminClient<DefaultClientContext> = config(&run.url).create()?;
            admin.delete_topics(&topics.each_ref().map(String::as_str), &AdminOptions::new()).await?;
        }
        Ok(())
    }
}
