//! Streams of the example `nats_jetstream`.

use std::path::Path;
use std::time::Duration;

use async_nats::jetstream::consumer::{PullConsumer, pull};
use async_nats::jetstream::{self, Context, stream};
use futures::StreamExt as _;

use crate::fleet::{self, BROKER_TIMEOUT, Failure, Headers, Run};
use crate::servers::{Server, ServerProcess};

/// Time for which the stream keeps a message.
pub const MAX_AGE: Duration = Duration::from_secs(3 * 86_400);

/// Returns the consumer of the orders, and creates it unless it exists.
///
/// # Errors
/// The server's error.
pub async fn consumer(jetstream: &Context, run: &Run) -> Result<PullConsumer, Failure> {
    let settings = stream::Config {
        name: run.name.clone(),
        subjects: vec![format!("{}.orders", run.name)],
        max_age: MAX_AGE,
        ..Default::default()
    };
    let stream = jetstream.get_or_create_stream(settings).await?;
    // Without `max_deliver` the server delivers a message until it is settled.
    let settings =
        pull::Config { durable_name: Some("payments".to_owned()), ack_wait: BROKER_TIMEOUT, ..Default::default() };
    Ok(stream.get_or_create_consumer("payments", settings).await?)
}

/// Returns the stream of the messages that are set aside, and creates it unless it exists.
async fn dead_letters(jetstream: &Context, run: &Run) -> Result<stream::Stream, Failure> {
    let (name, subject) = (format!("{}-dead", run.name), format!("{}.dead", run.name));
    Ok(jetstream.get_or_create_stream(stream::Config { name, subjects: vec![subject], ..Default::default() }).await?)
}

async fn connect(run: &Run) -> Result<Context, Failure> {
    Ok(jetstream::new(async_nats::connect(&run.url).await?))
}

/// JetStream, as the example's broker.
pub struct Broker;

impl fleet::Broker for Broker {
    const NAME: &str = "nats_jetstream";
    const URL: Option<&str> = Some("nats://127.0.0.1:4222");

    fn start(&self, _: &str, folder: &Path) -> Result<Box<dyn Server>, Failure> {
        Ok(Box::new(ServerProcess::nats(folder)?))
    }

    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
        let jetstream = connect(run).await?;
        consumer(&jetstream, run).await?;
        dead_letters(&jetstream, run).await?;
        for message in messages {
            jetstream.publish(format!("{}.orders", run.name), message.clone().into()).await?.await?;
        }
        Ok(())
    }

    async fn dead_letters(&self, run: &Run) -> Result<Vec<Headers>, Failure> {
        let consumer = dead_letters(&connect(run).await?, run).await?;
        let consumer = consumer.create_consumer(pull::Config::default()).await?;
        let (mut messages, mut found) = (consumer.fetch().max_messages(1_000).messages().await?, Vec::new());
        while let Some(message) = messages.next().await {
            let message = message?;
            let headers = message.headers.iter().flat_map(async_nats::HeaderMap::iter);
            let texts = headers.filter_map(|(name, values)| Some((name.to_string(), values.first()?.to_string())));
            found.push(texts.collect());
            message.ack().await?;
        }
        Ok(found)
    }

    async fn clean_up(&self, run: &Run) -> Result<(), Failure> {
        let jetstream = connect(run).await?;
        jetstream.delete_stream(&run.name).await?;
        jetstream.delete_stream(format!("{}-dead", run.name)).await?;
        Ok(())
    }
}
