//! Topics of the example `kafka`, on a cluster or on a mock broker in this process.

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use crate::fleet::{self, Failure};

const PARTITIONS: i32 = 4;

/// A mock broker.
pub type Mock = MockCluster<'static, DefaultProducerContext>;

fn topics(name: &str) -> [String; 3] {
    ["orders", "retry", "dead"].map(|topic| format!("{name}-{topic}"))
}

/// Returns the configuration of a librdkafka client for the server at `url`.
pub fn config(url: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", url);
    config
}

/// Starts the mock broker for this process and its workers, with the topics; `None` if the command line names a server.
///
/// # Errors
/// If the mock can't be created.
pub fn mock() -> Result<Option<Mock>, Failure> {
    if !fleet::needs_server() {
        return Ok(None);
    }
    let mock = MockCluster::new(1)?;
    for topic in topics(&fleet::run_name()) {
        mock.create_topic(&topic, PARTITIONS, 1)?;
    }
    Ok(Some(mock))
}

/// Creates the topics of the run `name` unless they exist.
///
/// # Errors
/// If the server does not answer.
pub async fn make_topics(url: &str, name: &str) -> Result<(), Failure> {
    // The mock broker has these topics already, and does not support the request to create them.
    if !fleet::needs_server() {
        let topics = topics(name);
        let topics = topics.each_ref().map(|topic| NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(-1)));
        let admin: AdminClient<DefaultClientContext> = config(url).create()?;
        // Results of single topics are ignored: in a repeated call all topics exist already.
        admin.create_topics(&topics, &AdminOptions::new()).await?;
    }
    Ok(())
}

/// Removes the topics of the run `name`.
///
/// # Errors
/// If the server does not answer.
pub async fn remove_topics(url: &str, name: &str) -> Result<(), Failure> {
    if !fleet::needs_server() {
        let topics = topics(name);
        let admin: AdminClient<DefaultClientContext> = config(url).create()?;
        admin.delete_topics(&topics.each_ref().map(String::as_str), &AdminOptions::new()).await?;
    }
    Ok(())
}
