//! Messages that leave after the record of their operation is written, and their stored form.
//!
//! Bytes of a list of messages in version 1. Integers are big-endian. A text or a body is its length (4 bytes), then
//! its bytes.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | version: 1 |
//! | then, for each message | destination, id |
//! | then | 1 if a key follows, key |
//! | then | number of headers (2 bytes), name and value of each header |
//! | then | body |
//! | then | number of refusals (4 bytes), 1 if the message is set aside |

use std::fmt;

use bytes::{Buf, BufMut, Bytes};

/// Version of the lists that this release writes.
const VERSION: u8 = 1;

/// A message that a handler publishes: bytes for a destination, with headers.
///
/// A handler pushes it to the [outbox](crate::Attempt::outbox) of its attempt. The message is recorded together with
/// the result, and sent after that. It has no type: another version of the program can send what this one has recorded.
///
/// ```
/// use idem_runtime::outbox::OutgoingMessage;
///
/// let message = OutgoingMessage::new("paid").key(42).header("content-type", "text/plain");
/// assert_eq!(message.body().as_ref(), b"paid");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct OutgoingMessage {
    destination: Box<str>,
    id: Box<str>,
    key: Option<Box<str>>,
    headers: Vec<(Box<str>, Box<str>)>,
    body: Bytes,
}

impl OutgoingMessage {
    /// Makes a message with this body.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Self { destination: "".into(), id: "".into(), key: None, headers: Vec::new(), body: body.into() }
    }

    /// Sets the key that brokers use for the order or the partition of messages (default: no key).
    #[must_use]
    pub fn key(self, key: impl fmt::Display) -> Self {
        Self { key: Some(key.to_string().into()), ..self }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Returns the message as a sender gets it: for `destination`, with an `id`. The outbox does this; a test of a
    /// sender does it itself.
    #[must_use]
    pub fn addressed(self, destination: &str, id: impl Into<Box<str>>) -> Self {
        Self { destination: destination.into(), id: id.into(), ..self }
    }

    /// Topic, subject, queue or exchange of the message.
    pub fn destination(&self) -> &str {
        &self.destination
    }

    /// Id of the message: a UUID that is the same each time the message is sent. The id is empty before the message is
    /// pushed.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Key for the order or the partition of messages, if the message has one.
    pub fn partition_key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Names and values of the headers, in the order in which they were added.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.headers.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Body of the message.
    pub fn body(&self) -> &Bytes {
        &self.body
    }
}

/// Writes the size of the body, never the content: payloads must not reach logs.
impl fmt::Debug for OutgoingMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OutgoingMessage({} for {}, {} bytes)", self.id, self.destination, self.body.len())
    }
}

/// A recorded message that is not marked as sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnsentMessage {
    /// The message.
    pub(crate) message: OutgoingMessage,
    /// Number of times that the broker has refused the message.
    pub(crate) refusals: u32,
    /// True if the message is not sent any more, because the broker has refused it too often.
    pub(crate) set_aside: bool,
}

impl UnsentMessage {
    /// Returns the message.
    pub fn message(&self) -> &OutgoingMessage {
        &self.message
    }

    /// Returns the number of times that the broker has refused the message.
    pub fn refusals(&self) -> u32 {
        self.refusals
    }

    /// Returns whether the message is set aside: the broker has refused it too often, and an operator decides.
    pub fn is_set_aside(&self) -> bool {
        self.set_aside
    }
}

/// Messages of a finished operation that are not marked as sent, in the order in which they were pushed. The record
/// holds them beside the result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnsentMessages(Box<[UnsentMessage]>);

impl UnsentMessages {
    /// Makes the list; `None` if it is empty.
    pub(crate) fn new(messages: Vec<UnsentMessage>) -> Option<Self> {
        (!messages.is_empty()).then(|| Self(messages.into()))
    }

    /// Makes the list of messages that were pushed and never sent; `None` if it is empty.
    pub(crate) fn pushed(messages: &[OutgoingMessage]) -> Option<Self> {
        let unsent =
            |message: &OutgoingMessage| UnsentMessage { message: message.clone(), refusals: 0, set_aside: false };
        Self::new(messages.iter().map(unsent).collect())
    }

    /// Messages in the order in which they were pushed.
    pub fn messages(&self) -> &[UnsentMessage] {
        &self.0
    }

    /// Returns the messages that are in `left` too, with the refusals of both; `None` if no message is left.
    pub(crate) fn without_sent(&self, left: Option<&Self>) -> Option<Self> {
        let kept = self.0.iter().filter_map(|unsent| {
            let other = left?.0.iter().find(|other| other.message.id == unsent.message.id)?;
            Some(UnsentMessage {
                message: unsent.message.clone(),
                refusals: unsent.refusals.max(other.refusals),
                set_aside: unsent.set_aside || other.set_aside,
            })
        });
        Self::new(kept.collect())
    }

    /// Returns the same messages, each of which is set aside.
    #[cfg(feature = "conformance")]
    pub(crate) fn set_aside(self) -> Self {
        Self(self.0.into_iter().map(|unsent| UnsentMessage { set_aside: true, ..unsent }).collect())
    }

    /// Returns the same messages, each of which is to be sent.
    pub(crate) fn to_resend(&self) -> Self {
        let again = |unsent: &UnsentMessage| UnsentMessage { refusals: 0, set_aside: false, ..unsent.clone() };
        Self(self.0.iter().map(again).collect())
    }

    /// Number of messages.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Returns whether a message is to be sent.
    pub(crate) fn has_sendable(&self) -> bool {
        self.0.iter().any(|unsent| !unsent.set_aside)
    }

    pub(crate) fn write(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        for UnsentMessage { message, refusals, set_aside } in &self.0 {
            write_message(&mut out, message);
            out.put_u32(*refusals);
            out.put_u8(u8::from(*set_aside));
        }
        out
    }

    /// Reads a list. The error is the reason why the list can't be read.
    pub(crate) fn read(mut rest: Bytes) -> Result<Self, String> {
        match rest.try_get_u8() {
            Ok(VERSION) => {}
            Ok(later @ VERSION..) => {
                return Err(format!("its messages have version {later}, this release reads version {VERSION}"));
            }
            _ => return Err(DAMAGED.to_owned()),
        }
        let mut messages = Vec::new();
        while !rest.is_empty() {
            messages.push(read_unsent(&mut rest).ok_or(DAMAGED)?);
        }
        Self::new(messages).ok_or_else(|| DAMAGED.to_owned())
    }
}

const DAMAGED: &str = "its messages are damaged";

fn write_message(out: &mut Vec<u8>, message: &OutgoingMessage) {
    let OutgoingMessage { destination, id, key, headers, body } = message;
    put(out, destination.as_bytes());
    put(out, id.as_bytes());
    out.put_u8(u8::from(key.is_some()));
    if let Some(key) = key {
        put(out, key.as_bytes());
    }
    // `push` accepts no more headers than this.
    out.put_u16(u16::try_from(headers.len()).unwrap_or(u16::MAX));
    for (name, value) in headers {
        put(out, name.as_bytes());
        put(out, value.as_bytes());
    }
    put(out, body);
}

/// Returns the size of a message in a list.
pub(crate) fn written_bytes(message: &OutgoingMessage) -> usize {
    let OutgoingMessage { destination, id, key, headers, body } = message;
    let field = |bytes: usize| 4 + bytes;
    let headers: usize = headers.iter().map(|(name, value)| field(name.len()) + field(value.len())).sum();
    let key = 1 + key.as_ref().map_or(0, |key| field(key.len()));
    // The number of headers, and after the body the number of refusals and whether the message is set aside.
    field(destination.len()) + field(id.len()) + key + 2 + headers + field(body.len()) + 4 + 1
}

/// Writes a length and the bytes. `push` accepts no longer text.
fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.put_u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    out.extend_from_slice(bytes);
}

fn read_unsent(rest: &mut Bytes) -> Option<UnsentMessage> {
    let destination = text(rest)?;
    let id = text(rest)?;
    let key = match rest.try_get_u8().ok()? {
        0 => None,
        1 => Some(text(rest)?),
        _ => return None,
    };
    let mut headers = Vec::new();
    for _ in 0..rest.try_get_u16().ok()? {
        headers.push((text(rest)?, text(rest)?));
    }
    let body = field(rest)?;
    let refusals = rest.try_get_u32().ok()?;
    let set_aside = match rest.try_get_u8().ok()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    Some(UnsentMessage { message: OutgoingMessage { destination, id, key, headers, body }, refusals, set_aside })
}

fn field(rest: &mut Bytes) -> Option<Bytes> {
    let length = usize::try_from(rest.try_get_u32().ok()?).ok()?;
    (rest.len() >= length).then(|| rest.split_to(length))
}

fn text(rest: &mut Bytes) -> Option<Box<str>> {
    std::str::from_utf8(&field(rest)?).ok().map(Box::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> UnsentMessages {
        let paid = OutgoingMessage::new("paid").key(42).header("type", "OrderPaid").header("", "");
        let first = paid.addressed("orders.paid", "an-id".to_owned());
        let second = OutgoingMessage::new(vec![0, 255]).addressed("mail", "another".to_owned());
        let mut messages = UnsentMessages::pushed(&[first, second]).unwrap().0;
        messages[1].refusals = 7;
        messages[1].set_aside = true;
        UnsentMessages(messages)
    }

    #[test]
    fn messages_are_read_back_as_written() {
        let list = list();
        assert_eq!(UnsentMessages::read(list.write().into()), Ok(list.clone()));
        let bytes: usize = list.0.iter().map(|unsent| written_bytes(&unsent.message)).sum();
        assert_eq!(list.write().len(), 1 + bytes);
    }

    #[test]
    fn damaged_messages_are_an_error() {
        let written = list().write();
        let whole = written_bytes(&list().0[0].message) + 1;
        for cut in 0..written.len() {
            // A list that ends after a whole message is a shorter list.
            assert_eq!(UnsentMessages::read(written[..cut].to_vec().into()).is_ok(), cut == whole, "{cut}");
        }
        let mut later = written.clone();
        later[0] = 2;
        assert!(UnsentMessages::read(later.into()).unwrap_err().contains("version 2"));
    }
}
