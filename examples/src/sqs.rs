//! Queues of the example `sqs`, and the redrive of a message from the dead-letter queue.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::{BehaviorVersion, Config, Credentials, Region, StalledStreamProtectionConfig};
use aws_sdk_sqs::types::{Message, QueueAttributeName, SendMessageBatchRequestEntry};

use crate::PlainHttp;
use crate::fleet::{self, BROKER_TIMEOUT, Failure, Headers, Run};
use crate::servers::{ProxiedServer, Server, ServerProcess};

/// Creates a client of the emulator at `url`. With AWS, use a client of `aws_config::load_defaults` instead.
pub fn client(url: &str) -> Client {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .region(Region::new("eu-central-1"))
        .endpoint_url(url)
        .credentials_provider(Credentials::new("test", "test", None, None, "example"))
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .http_client(PlainHttp);
    Client::from_conf(config.build())
}

/// Queues of a run.
#[derive(Clone)]
pub struct Queues {
    /// Client of the server.
    pub client: Client,
    /// URL of the queue of orders.
    pub orders: String,
    /// URL of the dead-letter queue.
    pub dead_letters: String,
}

impl Queues {
    /// Time for which the queue of orders keeps a message.
    pub const RETENTION: Duration = Duration::from_secs(4 * 86_400);
    /// Time for which the dead-letter queue keeps a message.
    pub const DEAD_LETTER_RETENTION: Duration = Duration::from_secs(14 * 86_400);
    /// Deliveries after which SQS itself gives a message up. The consumer gives the message up earlier, with the
    /// reasons.
    const MAX_RECEIVE_COUNT: u32 = 100;

    /// Creates the queues of the run unless they exist.
    ///
    /// # Errors
    /// The server's error.
    pub async fn of(run: &Run) -> Result<Self, Failure> {
        let client = client(&run.url);
        let retention = |time: Duration| (QueueAttributeName::MessageRetentionPeriod, time.as_secs().to_string());
        let dead_letters =
            queue(&client, &format!("{}-dead", run.name), [retention(Self::DEAD_LETTER_RETENTION)]).await?;
        let settings = [
            retention(Self::RETENTION),
            (QueueAttributeName::VisibilityTimeout, BROKER_TIMEOUT.as_secs().to_string()),
            redrive_policy(&client, &dead_letters, Self::MAX_RECEIVE_COUNT).await?,
        ];
        let orders = queue(&client, &run.name, settings).await?;
        Ok(Self { client, orders, dead_letters })
    }

    /// Moves a message through the dead-letter queue back to its own queue, and receives it from there. These steps
    /// replace `StartMessageMoveTask`, which the emulator lacks.
    ///
    /// # Errors
    /// The server's error, or an error if the message has kept its id.
    pub async fn redriven(&self, body: &str) -> Result<Message, Failure> {
        let Self { client: sqs, orders: queue, dead_letters } = self;
        sqs.send_message().queue_url(dead_letters).message_body(body).send().await?;
        let before = find(sqs, dead_letters, body).await?;
        sqs.send_message().queue_url(queue).set_message_body(before.body).send().await?;
        sqs.delete_message().queue_url(dead_letters).set_receipt_handle(before.receipt_handle).send().await?;
        let message = find(sqs, queue, body).await?;
        let (id_before, id) = (before.message_id.unwrap_or_default(), message.message_id().unwrap_or_default());
        if id == id_before {
            return Err(format!("message {id} still has its id").into());
        }
        eprintln!("message {id_before} was redriven as {id}");
        Ok(message)
    }
}

/// SQS, as the example's broker. `redrive` checks the end of the run.
pub struct Broker<R> {
    /// Check of a redriven message.
    pub redrive: R,
}

impl<R: AsyncFn(&Run) -> Result<(), Failure>> fleet::Broker for Broker<R> {
    const NAME: &str = "sqs";
    const URL: Option<&str> = Some("http://127.0.0.1:4566");

    fn start(&self, _: &str, folder: &Path) -> Result<Box<dyn Server>, Failure> {
        Ok(Box::new(ProxiedServer::new(ServerProcess::ministack(folder)?)?))
    }

    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
        let Queues { client, orders, .. } = Queues::of(run).await?;
        publish(&client, &orders, messages).await
    }

    async fn dead_letters(&self, run: &Run) -> Result<Vec<Headers>, Failure> {
        let Queues { client: sqs, dead_letters, .. } = Queues::of(run).await?;
        let mut found = Vec::new();
        loop {
            let receive = sqs.receive_message().queue_url(&dead_letters).max_number_of_messages(10);
            let messages = receive.message_attribute_names("All").send().await?.messages.unwrap_or_default();
            if messages.is_empty() {
                return Ok(found);
            }
            for message in messages {
                let attributes = message.message_attributes.iter().flatten();
                let texts = attributes.filter_map(|(name, text)| Some((name.clone(), text.string_value.clone()?)));
                found.push(texts.collect());
            }
        }
    }

    async fn clean_up(&self, run: &Run) -> Result<(), Failure> {
        let redriven = (self.redrive)(run).await;
        let Queues { client, orders, dead_letters } = Queues::of(run).await?;
        for queue in [orders, dead_letters] {
            client.delete_queue().queue_url(queue).send().await?;
        }
        redriven
    }
}

/// Creates a queue unless it exists, and returns its URL.
async fn queue(
    sqs: &Client,
    name: &str,
    settings: impl IntoIterator<Item = (QueueAttributeName, String)>,
) -> Result<String, Failure> {
    let settings: HashMap<_, _> = settings.into_iter().collect();
    let created = sqs.create_queue().queue_name(name).set_attributes(Some(settings)).send().await?;
    Ok(created.queue_url.ok_or("a queue without a URL")?)
}

/// Returns the setting that moves a message of a queue to `dead_letters` after `max_receive_count` deliveries.
async fn redrive_policy(
    sqs: &Client,
    dead_letters: &str,
    max_receive_count: u32,
) -> Result<(QueueAttributeName, String), Failure> {
    let arn = QueueAttributeName::QueueArn;
    let known = sqs.get_queue_attributes().queue_url(dead_letters).attribute_names(arn.clone()).send().await?;
    let arn = known.attributes().and_then(|known| known.get(&arn)).ok_or("a queue without a name")?;
    let policy = format!(r#"{{"deadLetterTargetArn":"{arn}","maxReceiveCount":"{max_receive_count}"}}"#);
    Ok((QueueAttributeName::RedrivePolicy, policy))
}

/// Sends `messages` to `queue`. Returns an error if the server refuses a message.
async fn publish(sqs: &Client, queue: &str, messages: &[Vec<u8>]) -> Result<(), Failure> {
    for messages in messages.chunks(10) {
        let entry = |(id, message): (usize, &Vec<u8>)| {
            let body = String::from_utf8_lossy(message);
            SendMessageBatchRequestEntry::builder().id(id.to_string()).message_body(body).build()
        };
        let entries = messages.iter().enumerate().map(entry).collect::<Result<_, _>>()?;
        let sent = sqs.send_message_batch().queue_url(queue).set_entries(Some(entries)).send().await?;
        if let Some(failed) = sent.failed().first() {
            return Err(format!("a message was not taken: {}", failed.code()).into());
        }
    }
    Ok(())
}

async fn find(sqs: &Client, queue: &str, body: &str) -> Result<Message, Failure> {
    for _ in 0..10 {
        let received = sqs.receive_message().queue_url(queue).max_number_of_messages(10).wait_time_seconds(1);
        let received = received.send().await?.messages.unwrap_or_default();
        if let Some(message) = received.into_iter().find(|message| message.body() == Some(body)) {
            return Ok(message);
        }
    }
    Err(format!("a message is not in {queue}").into())
}
