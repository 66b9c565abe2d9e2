//! Wakes the duplicates that wait for an attempt in another process.
//!
//! A waiter marks the pending record. The script that ends the attempt finds the mark and publishes the key. An attempt
//! without waiters publishes nothing.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::stream::Stream;
use redis::{Client, RedisError};
use tokio::sync::watch;

use super::cluster::Cluster;
use super::connection::Place as _;
use super::place::ServerPlace;
use super::task::OwnedTask;
use crate::clock::{Clock, SystemClock};
use crate::combine::race;
use crate::kit::waiting::WaiterTable;
use crate::store::StoreError;

/// Polling interval of a waiter whose connection can't subscribe.
const POLL: Duration = Duration::from_millis(50);
/// Polling interval of a waiter that is subscribed: a publication can get lost with its connection.
const SAFETY_POLL: Duration = Duration::from_secs(2);
/// Time limit of a subscription. If the server hangs, the store subscribes again, at the same server or at another one.
const SUBSCRIBE: Duration = Duration::from_secs(5);
/// Pause before a broken subscription is made again. The pause doubles up to [`LONGEST_PAUSE`] while subscribing fails.
const RESUBSCRIBE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Source of the publications that wake waiters.
#[derive(Clone)]
pub(super) enum PublicationSource {
    One(ServerPlace),
    /// Any node of the cluster: every node receives the publications of all nodes.
    Cluster(Arc<Cluster>),
}

impl PublicationSource {
    /// Returns a client to subscribe with, and the version of the server's address.
    async fn client(&self) -> Result<(Client, u64), RedisError> {
        match self {
            Self::One(place) => place.client().await,
            Self::Cluster(cluster) => {
                let client = cluster.some_client();
                client.map(|client| (client, 0)).ok_or((redis::ErrorKind::Io, "no node is known").into())
            }
        }
    }

    /// Waits until the server has moved to another address than the address of `version`. In a cluster, waits forever:
    /// every node receives all publications.
    async fn moved(&self, version: u64) {
        match self {
            Self::One(place) => place.moved(version).await,
            Self::Cluster(_) => std::future::pending().await,
        }
    }
}

/// The waiters of one runtime and the subscription that wakes them.
pub(super) struct Wakeups {
    source: Option<PublicationSource>,
    channel: String,
    waiting: Arc<WaiterTable>,
    subscription: OnceLock<Subscription>,
}

struct Subscription {
    /// True while the subscription works, so that publications arrive.
    live: watch::Receiver<bool>,
    _task: OwnedTask,
}

impl Wakeups {
    /// Creates the wake-ups of one runtime: a publication on `channel` wakes its waiters. Without a `source` of
    /// publications, the waiters poll.
    pub(super) fn new(source: Option<PublicationSource>, channel: &str) -> Self {
        let (waiting, subscription) = (Arc::default(), OnceLock::new());
        Self { source, channel: channel.to_owned(), waiting, subscription }
    }

    /// Waits until `key` is published, `at_most` is over, or the polling interval is over. `mark` marks the record and
    /// returns whether there is an attempt to wait for. `mark` runs after the subscription, so that the publication
    /// can't be missed.
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

    /// Starts the subscription at first use, and waits up to [`POLL`] for the server to confirm it. Returns whether
    /// publications arrive.
    async fn subscribe(&self, clock: &dyn Clock) -> bool {
        let Some(source) = &self.source else { return false };
        let subscription = self.subscription.get_or_init(|| {
            let (sender, live) = watch::channel(false);
            let listening = listen(source.clone(), self.channel.clone(), Arc::clone(&self.waiting), sender);
            Subscription { live, _task: OwnedTask(tokio::spawn(listening).abort_handle()) }
        });
        let mut live = subscription.live.clone();
        let subscribed = race(live.wait_for(|live| *live), clock.sleep(POLL)).await;
        matches!(subscribed, Some(Ok(_)))
    }
}

/// Wakes the waiters of published keys. Subscribes over a separate connection, which is reopened when it breaks.
async fn listen(source: PublicationSource, channel: String, waiting: Arc<WaiterTable>, live: watch::Sender<bool>) {
    let clock = SystemClock::default();
    let mut pause = RESUBSCRIBE;
    loop {
        let subscribed = async {
            let (client, version) = source.client().await?;
            let mut connection = client.get_async_pubsub().await?;
            connection.subscribe(&channel).await?;
            Ok::<_, RedisError>((connection, version))
        };
        if let Some(Ok((connection, version))) = race(subscribed, clock.sleep(SUBSCRIBE)).await {
            live.send_replace(true);
            let mut messages = pin!(connection.into_on_message());
            let hear = async {
                while let Some(message) = poll_fn(|cx| messages.as_mut().poll_next(cx)).await {
                    waiting.wake(&String::from_utf8_lossy(message.get_payload_bytes()));
                }
            };
            race(hear, pin!(source.moved(version))).await;
            live.send_replace(false);
            // Publications between two subscriptions are lost, so every waiter reads its record again.
            waiting.wake_all();
            pause = RESUBSCRIBE;
        } else {
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        clock.sleep(pause).await;
    }
}
