//! Wakes the duplicates that wait for an attempt of another process.
//!
//! A waiter marks the pending record; whatever ends the attempt finds the mark and publishes the key. An attempt that
//! nobody waits for publishes nothing.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::stream::Stream;
use redis::Client;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::clock::{Clock, race};
use crate::stores::waiting::Waiting;
use crate::{StoreError, SystemClock};

/// How often a waiter asks if its connection can't subscribe.
const POLL: Duration = Duration::from_millis(50);
/// How often a waiter asks although it is subscribed: a publication can get lost with its connection.
const SAFETY_POLL: Duration = Duration::from_secs(2);
/// The pause before a subscription that broke is made again.
const RESUBSCRIBE: Duration = Duration::from_millis(100);

/// The waiters of one store handle and the subscription that wakes them.
pub(super) struct Wakeups {
    client: Option<Client>,
    channel: String,
    waiting: Arc<Waiting>,
    subscription: OnceLock<Subscription>,
}

struct Subscription {
    /// Whether publications arrive.
    live: watch::Receiver<bool>,
    task: AbortHandle,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Wakeups {
    /// Subscribes with connections of `client`.
    pub(super) fn new(client: Client) -> Self {
        Self { client: Some(client), ..Self::polling() }
    }

    /// Asks again and again.
    pub(super) fn polling() -> Self {
        Self { client: None, channel: String::new(), waiting: Arc::default(), subscription: OnceLock::new() }
    }

    pub(super) fn on(self, channel: String) -> Self {
        Self { channel, ..self }
    }

    /// Where the ends of attempts are published.
    pub(super) fn channel(&self) -> &str {
        &self.channel
    }

    /// Waits until `key` is published, at most `at_most`. `mark` marks the record and says whether there is something
    /// to wait for; it is awaited once the subscription is there, so that the publication can't be missed.
    pub(super) async fn wait(
        &self,
        key: &str,
        at_most: Duration,
        clock: &dyn Clock,
        mark: impl Future<Output = Result<bool, StoreError>>,
    ) -> Result<(), StoreError> {
        let waiter = self.waiting.join(key);
        let mut woken = pin!(waiter.woken());
        woken.as_mut().enable();
        let subscribed = self.subscribe(clock).await;
        if mark.await? {
            let interval = if subscribed { SAFETY_POLL } else { POLL };
            race(woken, clock.sleep(at_most.min(interval))).await;
        }
        Ok(())
    }

    /// Makes sure that publications arrive, if they can.
    async fn subscribe(&self, clock: &dyn Clock) -> bool {
        let Some(client) = &self.client else { return false };
        let subscription = self.subscription.get_or_init(|| {
            let (sender, live) = watch::channel(false);
            let listening = listen(client.clone(), self.channel.clone(), Arc::clone(&self.waiting), sender);
            Subscription { live, task: tokio::spawn(listening).abort_handle() }
        });
        let mut live = subscription.live.clone();
        let subscribed = race(live.wait_for(|live| *live), clock.sleep(POLL)).await;
        matches!(subscribed, Some(Ok(_)))
    }
}

/// Hands publications on to the waiters, over a connection of its own that is made anew whenever it breaks.
async fn listen(client: Client, channel: String, waiting: Arc<Waiting>, live: watch::Sender<bool>) {
    let clock = SystemClock::default();
    loop {
        if let Ok(mut connection) = client.get_async_pubsub().await
            && connection.subscribe(&channel).await.is_ok()
        {
            live.send_replace(true);
            let mut messages = pin!(connection.into_on_message());
            while let Some(message) = poll_fn(|cx| messages.as_mut().poll_next(cx)).await {
                waiting.wake(&String::from_utf8_lossy(message.get_payload_bytes()));
            }
            live.send_replace(false);
            // Whatever was published meanwhile is lost: everybody asks again.
            waiting.wake_all();
        }
        clock.sleep(RESUBSCRIBE).await;
    }
}
