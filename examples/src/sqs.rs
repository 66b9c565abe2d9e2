//! Queues of the example `sqs`, and the redrive of a message from the dead-letter queue.

use std::collections::HashMap;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::{BehaviorVersion, Config, Credentials, Region, StalledStreamProtectionConfig};
use aws_sdk_sqs::types::{Message, QueueAttributeName, SendMessageBatchRequestEntry};

use crate::PlainHttp;
use crate::fleet::Failure;

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

/// Creates a queue unless it exists, and returns its URL.
///
/// # Errors
/// The server's error.
pub async fn queue(
    sqs: &Client,
    name: &str,
    settings: impl IntoIterator<Item = (QueueAttributeName, String)>,
) -> Result<String, Failure> {
    let settings: HashMap<_, _> = settings.into_iter().collect();
    let created = sqs.create_queue().queue_name(name).set_attributes(Some(settings)).send().await?;
    Ok(created.queue_url.ok_or("a queue without a URL")?)
}

/// Returns the setting that moves a message of a queue to `dead_letters` after `max_receive_count` deliveries.
///
/// # Errors
/// The server's error.
pub async fn redrive_policy(
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

/// Sends `messages` to `queue`.
///
/// # Errors
/// The server's error, also if the server refused only one of the messages.
pub async fn publish(sqs: &Client, queue: &str, messages: &[Vec<u8>]) -> Result<(), Failure> {
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

/// Moves a message through the dead-letter queue back to its own queue, and receives it from there. These steps replace
/// `StartMessageMoveTask`, which the emulator lacks.
///
/// # Errors
/// The server's error, or an error if the message has kept its id.
pub async fn redriven(sqs: &Client, dead_letters: &str, queue: &str, body: &str) -> Result<Message, Failure> {
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
