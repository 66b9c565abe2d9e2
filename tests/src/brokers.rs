//! Brokers that tests send to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};

/// A broker that is away at first, and counts the messages that arrive afterwards.
#[derive(Clone, Default, Debug)]
pub struct AwayBroker(Arc<(AtomicBool, AtomicU32)>);

impl AwayBroker {
    /// Lets the broker come back.
    pub fn returns(&self) {
        self.0.0.store(true, Ordering::SeqCst);
    }

    /// Number of messages that have arrived.
    pub fn arrived(&self) -> u32 {
        self.0.1.load(Ordering::SeqCst)
    }
}

impl Sender for AwayBroker {
    fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            if !self.0.0.load(Ordering::SeqCst) {
                return Err("the broker is away".into());
            }
            self.0.1.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
    }
}
