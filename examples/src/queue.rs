//! A miniature message broker.
#![allow(clippy::disallowed_methods, reason = "a broker waits in real time, and nothing tests it")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::Event;

/// Time after which a broker of the examples redelivers a message that was not acknowledged.
const VISIBILITY_TIMEOUT: Duration = Duration::from_millis(300);
/// Time until a message is redelivered after its handler failed.
const RETRY: Duration = Duration::from_millis(50);
const POLL: Duration = Duration::from_millis(5);

/// Due time of a message, and the number of its delivery.
type Receipt = (Instant, u64);

/// A queue that delivers at least once: a message that is not acknowledged in time is delivered again.
///
/// As with SQS, an acknowledgement is valid only for the latest delivery.
#[derive(Debug)]
pub struct Queue(Mutex<Messages>);

#[derive(Debug)]
struct Messages {
    by_time: BTreeMap<Receipt, Arc<Event>>,
    last: u64,
}

/// A delivered message.
#[derive(Debug)]
pub struct Message {
    /// The order event that the message contains.
    pub event: Arc<Event>,
    receipt: Receipt,
}

impl Queue {
    /// Creates a queue that delivers a message for each event, all of them due immediately.
    pub fn new<'a>(events: impl IntoIterator<Item = &'a Event>) -> Self {
        let now = Instant::now();
        let by_time: BTreeMap<_, _> =
            (0..).map(|at| (now, at)).zip(events.into_iter().cloned().map(Arc::new)).collect();
        Self(Mutex::new(Messages { last: by_time.len() as u64, by_time }))
    }

    /// Returns the next message, or `None` once all messages are acknowledged.
    pub async fn receive(&self) -> Option<Message> {
        loop {
            if let Poll::Ready(message) = self.messages().take() {
                return message;
            }
            sleep(POLL).await;
        }
    }

    /// Removes the message from the queue, because it has been handled.
    pub fn ack(&self, message: &Message) {
        self.messages().by_time.remove(&message.receipt);
    }

    /// Returns the message to the queue, which delivers it again after `after`, or after a short time if `after` is
    /// `None`.
    pub fn nack(&self, message: &Message, after: Option<Duration>) {
        let mut messages = self.messages();
        if let Some(event) = messages.by_time.remove(&message.receipt) {
            messages.push(after.unwrap_or(RETRY), event);
        }
    }

    fn messages(&self) -> MutexGuard<'_, Messages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Messages {
    /// Takes the message that has been due for the longest time, or returns `None` if the queue is empty. The answer is
    /// pending while no message is due.
    fn take(&mut self) -> Poll<Option<Message>> {
        match self.by_time.first_key_value() {
            Some(((due, _), _)) if *due > Instant::now() => Poll::Pending,
            _ => Poll::Ready(self.by_time.pop_first().map(|(_, event)| {
                let receipt = self.push(VISIBILITY_TIMEOUT, Arc::clone(&event));
                Message { event, receipt }
            })),
        }
    }

    fn push(&mut self, after: Duration, event: Arc<Event>) -> Receipt {
        self.last += 1;
        let receipt = (Instant::now() + after, self.last);
        self.by_time.insert(receipt, event);
        receipt
    }
}
