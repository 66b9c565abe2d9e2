//! Messages of handlers on subjects of the bucket's stream.
//!
//! The stream keeps one message on each subject, so a message is published on a subject of its own: its destination,
//! then its id. Its write expects that the subject has no message, and so a repetition stores nothing.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;

use super::failure::misconfigured;
use super::message::{header_bytes, headers_of_message};
use crate::record::messages::OutgoingMessage;
use crate::record::{Finish, Record, State};
use crate::store::StoreError;

/// Largest number of messages in a batch with their record. A server takes 1000 messages in a batch.
const MOST: usize = 999;
/// Length of the longest destination, in bytes. A line of the server (4096 bytes by default) also holds the id and the
/// reply subject.
const MAX_DESTINATION_BYTES: usize = 1024;

/// Subjects of messages in the stream.
#[derive(Clone, Debug)]
struct OutboxSubjects {
    /// The subjects as the stream names them: `orders.>`.
    filter: String,
    /// Retention of the messages.
    kept: Duration,
}

impl OutboxSubjects {
    fn holds(&self, destination: &str) -> bool {
        let Some(prefix) = self.filter.strip_suffix(".>") else { return false };
        destination.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

/// All subjects of messages in the stream; empty unless the program has named some.
#[derive(Clone, Debug, Default)]
pub(super) struct Outbox(Vec<OutboxSubjects>);

/// A message as it is published.
#[derive(Debug)]
pub(super) struct PublishedMessage {
    pub(super) subject: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl PublishedMessage {
    /// Size of the message as the limits of server and stream count it, in bytes.
    fn bytes(&self) -> usize {
        header_bytes(&self.headers) + self.body.len()
    }
}

impl Outbox {
    pub(super) fn add(&mut self, filter: String, kept: Duration) {
        self.0.push(OutboxSubjects { filter, kept });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Subjects for the settings of the stream.
    pub(super) fn filters(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|subjects| &*subjects.filter)
    }

    /// Checks the names of the subjects.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        let is_sound = |filter: &str| {
            let prefix = filter.strip_suffix(".>");
            prefix.is_some_and(|prefix| is_subject(prefix) && !prefix.starts_with(['$', '_']))
        };
        match self.filters().find(|filter| !is_sound(filter)) {
            Some(filter) => Err(misconfigured(format!(
                "`{filter}` can't be subjects of an outbox: write one or more names and `>`, such as `orders.>`"
            ))),
            None => Ok(()),
        }
    }

    /// Returns `message` as it is published in the stream. The error is the reason why the stream can't hold it.
    pub(super) fn publishes(&self, message: &OutgoingMessage, max_message: usize) -> Result<PublishedMessage, String> {
        let destination = message.destination();
        let found = self.0.iter().find(|subjects| subjects.holds(destination));
        let Some(OutboxSubjects { kept, .. }) = found.filter(|_| is_subject(destination)) else {
            return Err(format!(
                "`{destination}` is no subject of the store's outbox: {}",
                self.filters().collect::<Vec<_>>().join(", ")
            ));
        };
        let subject = format!("{destination}.{}", message.id());
        let headers = headers_of_message(message, *kept)?;
        let published = PublishedMessage { subject, headers, body: message.body().clone() };
        match published.bytes() {
            bytes if bytes > max_message => {
                Err(format!("the message has {bytes} bytes, and the stream takes {max_message}"))
            }
            _ => Ok(published),
        }
    }

    /// Returns the finished `record` without its messages, and the messages as they are published. `None` if the record
    /// has no messages, or if the stream can't hold one of them: then the record keeps all of them.
    pub(super) fn parts(&self, record: &Record, max_message: usize) -> Option<(Record, Vec<PublishedMessage>)> {
        let State::Completed(result) = &record.state else { return None };
        let (result, messages) = result.messages()?.ok()?;
        if messages.messages().len() > MOST {
            return None;
        }
        let published: Result<Vec<_>, _> =
            messages.messages().iter().map(|unsent| self.publishes(unsent.message(), max_message)).collect();
        Some((Record { state: Finish::Completed(result).state(), ..record.clone() }, published.ok()?))
    }
}

/// Returns whether a message may be published on `subject`, by its syntax.
fn is_subject(subject: &str) -> bool {
    let is_token = |token: &str| {
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'*' | b'>'))
    };
    subject.len() <= MAX_DESTINATION_BYTES && subject.split('.').all(is_token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outbox() -> Outbox {
        let mut outbox = Outbox::default();
        outbox.add("orders.>".to_owned(), Duration::from_secs(60));
        outbox
    }

    fn published(destination: &str, message: OutgoingMessage) -> Result<PublishedMessage, String> {
        outbox().publishes(&message.addressed(destination, "an-id"), 1000)
    }

    #[test]
    fn a_message_has_a_subject_of_its_own() {
        for destination in ["orders", "orders.paid", "orders.paid.eu"] {
            let message = published(destination, OutgoingMessage::new("b").key(7).header("Type", "x")).unwrap();
            assert_eq!(message.subject, format!("{destination}.an-id"));
            let header = |name| message.headers.get(name).map(async_nats::HeaderValue::as_str);
            assert_eq!(header("Nats-TTL"), Some("60"));
            assert_eq!(header("Idem-Message-Id"), Some("an-id"));
            assert_eq!(header("Idem-Message-Key"), Some("7"));
            assert_eq!(header("Type"), Some("x"));
        }
    }

    #[test]
    fn a_message_that_the_stream_can_not_hold_is_refused() {
        for destination in
            ["order", "ordersx", "x.orders", "orders..x", "orders.*", "orders.>", "orders. ", "orders.a b"]
        {
            assert!(published(destination, OutgoingMessage::new("")).is_err(), "{destination}");
        }
        for (name, value) in
            [("Nats-Rollup", "all"), ("nats-ttl", "1s"), ("Idem-Message-Id", "x"), ("a b", ""), ("a", "\r\n")]
        {
            assert!(published("orders", OutgoingMessage::new("").header(name, value)).is_err(), "{name}");
        }
        assert!(
            published("orders", OutgoingMessage::new(vec![0; 1000])).unwrap_err().contains("the stream takes 1000")
        );
    }

    #[test]
    fn subjects_of_an_outbox_are_names_and_a_wildcard_at_the_end() {
        for (filter, is_sound) in [
            ("orders.>", true),
            ("shop.eu.orders.>", true),
            ("orders", false),
            (">", false),
            ("*.>", false),
            (".>", false),
            ("$KV.b.>", false),
            ("_INBOX.>", false),
            ("a b.>", false),
        ] {
            let mut outbox = Outbox::default();
            outbox.add(filter.to_owned(), Duration::from_secs(1));
            assert_eq!(outbox.check().is_ok(), is_sound, "{filter}");
        }
    }
}
