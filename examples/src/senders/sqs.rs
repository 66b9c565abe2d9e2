//! Sender for FIFO queues of SQS.

use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::DisplayErrorContext;
use aws_sdk_sqs::operation::send_message::SendMessageError;
use aws_sdk_sqs::types::MessageAttributeValue;
use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};

/// Publishes to the FIFO queue whose URL a message names. The id becomes the deduplication id: within 5 minutes SQS
/// drops a message whose id it has seen. The key becomes the group, in which SQS keeps the order.
pub struct SqsFifoSender {
    client: Client,
}

impl SqsFifoSender {
    /// Makes a sender with this client.
    pub fn new(client: Client) -> Self {
        Self { client }
    }
}

impl Sender for SqsFifoSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let body = std::str::from_utf8(message.body()).map_err(SendError::refused)?;
            let group = message.partition_key().unwrap_or(message.id());
            let mut send = self.client.send_message().queue_url(message.destination()).message_body(body);
            send = send.message_deduplication_id(message.id()).message_group_id(group);
            for (name, value) in message.headers() {
                let value = MessageAttributeValue::builder().data_type("String").string_value(value).build()?;
                send = send.message_attributes(name, value);
            }
            match send.send().await {
                Ok(_) => Ok(()),
                Err(error) => {
                    let is_refusal = error.as_service_error().is_some_and(is_refusal);
                    // The text of the client's error leaves out its causes.
                    let text = DisplayErrorContext(error).to_string();
                    if is_refusal { Err(SendError::refused(text)) } else { Err(text.into()) }
                }
            }
        })
    }
}

fn is_refusal(error: &SendMessageError) -> bool {
    matches!(error, SendMessageError::InvalidMessageContents(_) | SendMessageError::QueueDoesNotExist(_))
}
