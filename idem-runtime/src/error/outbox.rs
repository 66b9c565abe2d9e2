//! Reasons why a message was not accepted, or not sent.

use std::fmt;

use crate::codec::CodecError;
use crate::store::StoreError;

/// Reason why a message was not accepted; see [`Error::Outbox`](crate::Error::Outbox). It was not sent.
#[derive(Debug)]
#[non_exhaustive]
pub enum OutboxProblem {
    /// The store handle has no [sender](crate::StoreExt::with_sender).
    NoSender,
    /// The attempt runs in the user's transaction, which has no [sender](crate::within::Within::sender_of), or whose
    /// commit the library does not see.
    InTransaction,
    /// The message was pushed inside of a step of the same attempt: the next attempt does not run a step that has
    /// ended, and would not push.
    InStep,
    /// The body has returned: its messages are recorded, or given up.
    AttemptEnded,
    /// The destination is empty.
    NoDestination,
    /// The body of the message does not encode.
    Unencodable(CodecError),
    /// The messages of the attempt would be too large for its record.
    #[non_exhaustive]
    TooLarge {
        /// Size that the messages would have in the record, in bytes.
        bytes: usize,
        /// Largest size of the messages of one attempt, in bytes.
        max: usize,
    },
    /// The message has more than 65 535 headers.
    TooManyHeaders,
}

impl OutboxProblem {
    /// Returns whether the deployment is wrong, as opposed to the message.
    pub(crate) fn is_misconfiguration(&self) -> bool {
        matches!(self, Self::NoSender | Self::InTransaction | Self::InStep | Self::NoDestination)
    }
}

impl fmt::Display for OutboxProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSender => f.write_str("the store handle has no sender: call `with_sender` where the store is opened"),
            Self::InTransaction => f.write_str(
                "the attempt runs in your transaction: begin it by `transact`, which sends after the commit, and name a store \
                 that has a sender: `within(tx).sender_of(&store)`",
            ),
            Self::InStep => f.write_str("it was pushed inside of a step or of another idempotent call, which the next attempt may not run: push it after that"),
            Self::AttemptEnded => f.write_str("the body has returned, and its messages are recorded or given up"),
            Self::NoDestination => f.write_str("the destination is empty: name a topic, subject, queue or exchange"),
            Self::Unencodable(_) => f.write_str("its body does not encode"),
            Self::TooLarge { bytes, max } => write!(
                f,
                "the messages of the attempt would have {bytes} bytes, and a record holds {max}: keep large content elsewhere, and \
                 send its place"
            ),
            Self::TooManyHeaders => f.write_str("it has more than 65535 headers"),
        }
    }
}

/// Reason why messages are not marked as sent; see [`Error::Unsent`](crate::Error::Unsent).
#[derive(Debug)]
#[non_exhaustive]
pub enum UnsentReason {
    /// The store handle has no [sender](crate::StoreExt::with_sender).
    NoSender,
    /// The sender returned an error for the first unsent message.
    #[non_exhaustive]
    NotConfirmed {
        /// Destination of the message.
        destination: Box<str>,
        /// True if the broker refuses the message; false if the failure may pass.
        refused: bool,
        /// Error of the sender.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The sender did not answer within its [time limit](crate::outbox::Sender::timeout).
    #[non_exhaustive]
    TimedOut {
        /// Destination of the message.
        destination: Box<str>,
    },
    /// The messages are sent, and the store has not confirmed that they are marked as sent.
    NotMarked(StoreError),
    /// Another call is sending them, in this process, or in the process that recorded them just now.
    Sending,
    /// The store did not return the record. Nothing was sent.
    NotRead(StoreError),
    /// The record has changed meanwhile, by an operator for example.
    RecordChanged,
    /// The recorded messages can't be read.
    #[non_exhaustive]
    Unreadable {
        /// Description of the damage, without the content.
        reason: Box<str>,
    },
}

impl fmt::Display for UnsentReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSender => {
                f.write_str("the store handle has no sender: call `with_sender` where the store is opened")
            }
            Self::NotConfirmed { destination, refused: false, .. } => {
                write!(f, "the broker has not confirmed a message for `{destination}`")
            }
            Self::NotConfirmed { destination, .. } => write!(f, "the broker refuses a message for `{destination}`"),
            Self::TimedOut { destination } => {
                write!(f, "the broker has not answered in time about a message for `{destination}`")
            }
            Self::NotMarked(_) => {
                f.write_str("they were sent, and the store has not confirmed that they are marked as sent")
            }
            Self::Sending => f.write_str("another call is sending them"),
            Self::NotRead(_) => f.write_str("the store did not return the record, and nothing was sent"),
            Self::RecordChanged => f.write_str("the record has changed meanwhile"),
            Self::Unreadable { reason } => write!(f, "they can't be read: {reason}"),
        }
    }
}
