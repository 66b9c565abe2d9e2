//! Wakes the duplicates that wait for an attempt in another process.
//!
//! A waiter marks the row. The statement that ends the attempt finds the mark and notifies. An attempt without waiters
//! sends no notification, so its commit does not take the lock that all commits with `NOTIFY` share.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{AsyncMessage, Config, NoTls, Socket};

use super::sessions::{Tls, hosts};
use super::sql;
use crate::clock::Clock;
use crate::combine::race;
use crate::kit::lookup;
use crate::kit::waiting::WaiterTable;
use crate::store::StoreError;

/// Polling interval of a waiter that can't listen.
const POLL: Duration = Duration::from_millis(50);
/// Polling interval of a waiter that listens: a notification can get lost with its connection.
const SAFETY_POLL: Duration = Duration::from_secs(2);
/// Pause before a broken connection is opened again.
const RECONNECT: Duration = Duration::from_millis(100);

/// The settings of a connection that listens.
#[derive(Clone)]
pub(super) struct Listener {
    pub(super) config: Config,
    pub(super) tls: Tls,
}

/// Result of marking the row of a running attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mark {
    /// The attempt has ended: there is nothing to wait for.
    Over,
    /// The row is marked: the end of the attempt will cause a notification.
    Made,
    /// The attempt is running, but its end will cause no notification: another session has locked the row, or there is
    /// no listener.
    Refused,
}

/// The waiters of one runtime and the connection that wakes them.
pub(super) struct Wakeups {
    listener: Option<Arc<Listener>>,
    channel: String,
    clock: Arc<dyn Clock>,
    runtime: Handle,
    waiting: Arc<WaiterTable>,
    listening: OnceLock<ListenTask>,
}

struct ListenTask {
    /// True if notifications arrive.
    live: watch::Receiver<bool>,
    task: AbortHandle,
}

impl Drop for ListenTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Wakeups {
    /// Makes the wake-ups of one runtime. Without a listener, waiters poll.
    pub(super) fn new(listener: Option<Listener>, channel: String, clock: Arc<dyn Clock>) -> Self {
        Self {
            listener: listener.map(Arc::new),
            channel,
            clock,
            runtime: Handle::current(),
            waiting: Arc::default(),
            listening: OnceLock::new(),
        }
    }

    /// Returns whether waiters get notifications, so that a waiter has to mark its row.
    pub(super) fn listens(&self) -> bool {
        self.listener.is_some()
    }

    /// Waits until a notification names `key`, `at_most` is over, or the polling interval is over. `mark` marks the
    /// row. `mark` runs only after the store listens, so that no notification can be missed.
    pub(super) async fn wait(
        &self,
        key: &str,
        at_most: Duration,
        mark: impl Future<Output = Result<Mark, StoreError>>,
    ) -> Result<(), StoreError> {
        let waiter = self.waiting.join(key);
        let mut woken = pin!(waiter.woken());
        woken.as_mut().enable();
        let listening = self.listen().await;
        let interval = match mark.await? {
            Mark::Over => return Ok(()),
            Mark::Made if listening => SAFETY_POLL,
            _ => POLL,
        };
        race(woken, self.clock.sleep(at_most.min(interval))).await;
        Ok(())
    }

    /// Starts to listen at first use, and waits up to [`POLL`] for the connection. Returns whether notifications
    /// arrive.
    async fn listen(&self) -> bool {
        let Some(listener) = &self.listener else { return false };
        let listening = self.listening.get_or_init(|| {
            let (sender, live) = watch::channel(false);
            let (listener, waiting) = (Arc::clone(listener), Arc::clone(&self.waiting));
            let listen = listen(listener, self.channel.clone(), waiting, Arc::clone(&self.clock), sender);
            ListenTask { live, task: self.runtime.spawn(listen).abort_handle() }
        });
        let mut live = listening.live.clone();
        let live = race(live.wait_for(|live| *live), self.clock.sleep(POLL)).await;
        matches!(live, Some(Ok(_)))
    }
}

/// Wakes the waiters of notified keys. Listens over a separate connection, which is reopened when it breaks.
async fn listen(
    listener: Arc<Listener>,
    channel: String,
    waiting: Arc<WaiterTable>,
    clock: Arc<dyn Clock>,
    live: watch::Sender<bool>,
) {
    loop {
        match &listener.tls {
            Tls::Off => hear(&listener.config, NoTls, &channel, &waiting, &live).await,
            #[cfg(feature = "postgres-tls")]
            Tls::On(tls) => hear(&listener.config, tls.clone(), &channel, &waiting, &live).await,
        }
        if live.send_replace(false) {
            // Notifications between two connections are lost, so every waiter reads its record again.
            waiting.wake_all();
        }
        clock.sleep(RECONNECT).await;
    }
}

/// Listens until the connection breaks.
async fn hear<T>(config: &Config, tls: T, channel: &str, waiting: &WaiterTable, live: &watch::Sender<bool>)
where
    T: MakeTlsConnect<Socket>,
{
    if lookup::check(hosts(config)).is_err() {
        return;
    }
    let Ok((client, mut connection)) = config.connect(tls).await else { return };
    let carry = async {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(notification) = message {
                waiting.wake(notification.payload());
            }
        }
    };
    let text = sql::listen(channel);
    let (mut carry, mut listened) = (pin!(carry), pin!(client.batch_execute(&text)));
    let mut is_live = false;
    // The connection makes progress only while it is polled, so this future polls both the `LISTEN` statement and the
    // connection.
    poll_fn(|cx| {
        if !is_live && let Poll::Ready(done) = listened.as_mut().poll(cx) {
            if done.is_err() {
                return Poll::Ready(());
            }
            is_live = true;
            live.send_replace(true);
        }
        carry.as_mut().poll(cx)
    })
    .await;
}
