//! Sender for NATS JetStream.

use async_nats::jetstream::Context;
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::{HeaderMap, HeaderName, HeaderValue};
use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};

/// Publishes to the subject that a message names. The id becomes the header `Nats-Msg-Id`: within the
/// `duplicate_window` of the stream (default: 2 minutes) the server drops a message whose id it has seen.
#[derive(Clone)]
pub struct JetStreamSender {
    context: Context,
}

impl JetStreamSender {
    /// Makes a sender with this context, whose client connects again after a lost connection.
    pub fn new(context: Context) -> Self {
        Self { context }
    }

    /// Publishes a message, and waits until a stream has stored the message or has recognised its id.
    ///
    /// # Errors
    /// If no stream has confirmed the message, which may be stored nevertheless.
    pub async fn publish(
        &self,
        subject: &str,
        id: &str,
        body: &[u8],
        headers: impl Iterator<Item = (&str, &str)>,
    ) -> Result<(), SendError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: HeaderName = name.parse().map_err(SendError::refused)?;
            let value: HeaderValue = value.parse().map_err(SendError::refused)?;
            map.insert(name, value);
        }
        let message = PublishMessage::build().headers(map).message_id(id).payload(body.to_vec().into());
        let confirmation = match self.context.send_publish(subject.to_owned(), message).await {
            Ok(confirmation) => confirmation,
            Err(error) if error.kind() == PublishErrorKind::MaxPayloadExceeded => {
                return Err(SendError::refused(error));
            }
            Err(error) => return Err(error.into()),
        };
        // A subject without a stream is no refusal: a server that has just started does not know its streams yet.
        confirmation.await?;
        Ok(())
    }
}

impl Sender for JetStreamSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(self.publish(message.destination(), message.id(), message.body(), message.headers()))
    }
}
