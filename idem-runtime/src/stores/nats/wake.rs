//! Wakes the duplicates that wait for an attempt in another process.
//!
//! A process that waits for a key subscribes to the subject of its record, as any subscriber of NATS, and so receives
//! what is published there: an end of the attempt also reaches the waiter. No writer does anything for this. A
//! message is published before the stream has stored or refused it, so it is a hint only, after which the waiter reads
//! the record until it has changed.

use std::collections::HashMap;
use std::sync::Arc;

use async_nats::Client;
use futures_util::StreamExt as _;
use tokio::task::AbortHandle;

use super::message::may_end_a_wait;
use crate::kit::waiting::WaiterTable;
use crate::sync::{Mutex, PerProcess, lock};

/// Largest number of subjects to which one runtime subscribes. Waiters of further keys poll.
const MOST: usize = 256;

/// The subscriptions of one runtime, by subject.
#[derive(Default)]
pub(super) struct Watches(Mutex<HashMap<String, SharedSubscription>>);

struct SharedSubscription {
    waiters: usize,
    task: AbortHandle,
}

impl Drop for SharedSubscription {
    fn drop(&mut self) {
        // The drop of the task drops its subscription.
        self.task.abort();
    }
}

/// Share of a waiter in a subscription, which ends with its last waiter.
pub(super) struct Watch<'a> {
    watches: &'a Watches,
    subject: &'a str,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut watched = lock(&self.watches.0);
        if let Some(entry) = watched.get_mut(self.subject) {
            entry.waiters -= 1;
            if entry.waiters == 0 {
                watched.remove(self.subject);
            }
        }
    }
}

impl Watches {
    /// Subscribes to `subject`, so that messages on it wake its waiters. `None` if the waiter has to poll. The server
    /// handles the subscription before any request that is sent after this call.
    pub(super) async fn join<'a>(
        &'a self,
        client: &Client,
        subject: &'a str,
        waiting: &Arc<PerProcess<WaiterTable>>,
    ) -> Option<Watch<'a>> {
        if let Some(watch) = self.join_known(subject) {
            return Some(watch);
        }
        if lock(&self.0).len() >= MOST {
            return None;
        }
        let mut messages = client.subscribe(subject.to_owned()).await.ok()?;
        let (name, waiting) = (subject.to_owned(), Arc::clone(waiting));
        let task = tokio::spawn(async move {
            while let Some(message) = messages.next().await {
                if may_end_a_wait(&message.payload) {
                    waiting.here().wake(&name);
                }
            }
        });
        let mine = SharedSubscription { waiters: 0, task: task.abort_handle() };
        // If another waiter has subscribed meanwhile, the drop of `mine` ends this subscription.
        lock(&self.0).entry(subject.to_owned()).or_insert(mine).waiters += 1;
        Some(Watch { watches: self, subject })
    }

    fn join_known<'a>(&'a self, subject: &'a str) -> Option<Watch<'a>> {
        lock(&self.0).get_mut(subject)?.waiters += 1;
        Some(Watch { watches: self, subject })
    }
}
