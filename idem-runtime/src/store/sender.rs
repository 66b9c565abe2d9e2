//! The sender of messages that leave after their record.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::record::messages::OutgoingMessage;

/// Future of [`Sender::send`].
pub type SendFuture<'a> = Pin<Box<dyn Future<Output = Result<(), SendError>> + Send + 'a>>;

/// Publishes the messages that handlers push to their [outbox](crate::Attempt::outbox).
///
/// [`StoreExt::with_sender`](super::StoreExt::with_sender) gives the sender to a store handle. The library sends the
/// messages of a record one after the other, in the order in which they were pushed, and then marks them as sent. A
/// process that dies in between sends them again, with the same ids: hand the [id](OutgoingMessage::id) to the broker,
/// which then recognises the repetition within its window, and let consumers recognise it after that.
///
/// ```
/// use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};
/// # struct Client;
/// # struct Refused;
/// # impl Client {
/// #     async fn publish(&self, _: &str, _: &str, _: &[u8]) -> Result<(), std::io::Error> { Ok(()) }
/// # }
///
/// struct MySender(Client);
///
/// impl Sender for MySender {
///     fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
///         Box::pin(async move {
///             // Returns once the broker has confirmed the message.
///             self.0.publish(message.destination(), message.id(), message.body()).await?;
///             Ok(())
///         })
///     }
/// }
/// ```
pub trait Sender: Send + Sync + 'static {
    /// Sends one message. Returns `Ok` only after the broker has confirmed that it keeps the message: it is then marked
    /// as sent, and nothing sends it again on purpose.
    ///
    /// # Errors
    /// [`SendError`] if the broker has not confirmed the message, which may have arrived nevertheless.
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a>;

    /// Returns the time limit of one message (default: 10 s). After that time the message counts as not confirmed.
    fn timeout(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// Returns the number of [refusals](SendError::refused) after which a message is set aside (default: 5).
    fn max_refusals(&self) -> u32 {
        5
    }
}

/// Makes senders of pointers to senders, so that a program can choose its broker when it starts.
macro_rules! through {
    ($($pointer:ident),*) => {$(
        impl<S: Sender + ?Sized> Sender for $pointer<S> {
            fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
                (**self).send(message)
            }

            fn timeout(&self) -> Duration {
                (**self).timeout()
            }

            fn max_refusals(&self) -> u32 {
                (**self).max_refusals()
            }
        }
    )*};
}

through!(Arc, Box);

/// Reason why a broker has not confirmed a message.
///
/// Every error of a client converts into a failure that may pass; [`SendError::refused`] makes the other kind. So this
/// type does not implement [`Error`] itself.
pub struct SendError {
    refused: bool,
    source: Box<dyn Error + Send + Sync>,
}

impl SendError {
    /// Makes the error of a message that the broker refuses, and will refuse again: it is too large, for example, or
    /// its destination does not exist. After [`Sender::max_refusals`] the message is set aside, and later messages
    /// no longer wait for it.
    pub fn refused(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { refused: true, source: source.into() }
    }

    /// Returns whether the broker refuses the message.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Returns the error of the client.
    pub fn into_source(self) -> Box<dyn Error + Send + Sync> {
        self.source
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for SendError {
    fn from(source: E) -> Self {
        Self { refused: false, source: source.into() }
    }
}

impl fmt::Debug for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendError").field("refused", &self.refused).field("source", &self.source).finish()
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}
