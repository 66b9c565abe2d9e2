//! The sender of the store: messages that leave after their record, in the stream that holds the records.

use std::sync::Weak;

use super::NatsInner;
use super::access::WriteOutcome;
use super::failure::unavailable;
use super::message::{LastMessage, expect_none};
use super::outbox::PublishedMessage;
use crate::record::messages::OutgoingMessage;
use crate::store::StoreErrorKind;
use crate::store::sender::{SendError, SendFuture, Sender};

/// Publishes messages in the stream of a store.
#[derive(Debug)]
pub(super) struct NatsSender(pub(super) Weak<NatsInner>);

impl NatsSender {
    async fn publish(&self, message: &OutgoingMessage) -> Result<(), SendError> {
        let store = self.0.upgrade().ok_or_else(|| unavailable("the store is closed"))?;
        let access = store.access()?;
        let PublishedMessage { subject, mut headers, body } =
            store.core.outbox.publishes(message, store.core.max_message).map_err(SendError::refused)?;
        expect_none(&mut headers);
        match access.publish(&subject, headers, body).await {
            Ok(WriteOutcome::Done(_)) => Ok(()),
            // The stream has the message, or another copy of this request is under way.
            Ok(WriteOutcome::Refused) => match access.get(&subject).await? {
                LastMessage::Record(_) => Ok(()),
                LastMessage::Absent(_) => Err(unavailable("another request publishes the message").into()),
            },
            Err(error) if error.kind() == StoreErrorKind::TooLarge => Err(SendError::refused(error)),
            Err(error) => Err(error.into()),
        }
    }
}

impl Sender for NatsSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(self.publish(message))
    }
}
