//! The connection of one runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{
    Client, ConnectOptions, Event, HeaderMap, Message, Request, RequestErrorKind, ServerAddr, ServerError,
};
use bytes::Bytes;
use futures_util::future::{Either, select};
use tokio::sync::{OnceCell, watch};

use super::failure::{misconfigured, not_connected, too_large, unavailable};
use super::wake::Watches;
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::kit::lookup;
use crate::kit::waiting::WaiterTable;
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::{Mutex, PerProcess, lock};

/// Pause between two looks at a broken connection, if no event of the driver ends the pause.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Time within which a server that answers no request has to give a sign of life.
const SILENCE: Duration = Duration::from_secs(1);
/// Interval at which the driver asks an idle server for a sign of life. A connection without an answer to three such
/// questions is opened anew.
const PING_EVERY: Duration = Duration::from_secs(5);
/// Shortest and longest pause between two tries to open a broken connection.
const RECONNECT: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(500)];

/// Everything that a connection needs: addresses and settings of the driver.
#[derive(Clone)]
pub(super) struct ConnectPlan {
    pub(super) servers: Vec<ServerAddr>,
    pub(super) options: ConnectOptions,
}

/// Events of a connection.
#[derive(Debug, Default)]
struct Events {
    /// Number of events so far, for those who wait for the next one.
    count: watch::Sender<u64>,
    /// Number of times that the connection broke.
    breaks: AtomicU64,
    /// Text of the latest error with which the server refused a subject or a login.
    refusal: Mutex<String>,
}

impl Events {
    fn note(&self, event: &Event, waiting: &WaiterTable) {
        match event {
            Event::Disconnected | Event::Closed => {
                self.breaks.fetch_add(1, Ordering::Relaxed);
            }
            Event::Connected => {
                // A refusal belongs to the earlier connection: the rights of the login may have changed.
                lock(&self.refusal).clear();
                // Messages between the two connections were lost, so every waiter reads its record again.
                waiting.wake_all();
            }
            Event::ServerError(ServerError::Other(text)) => lock(&self.refusal).clone_from(text),
            Event::ServerError(error) => *lock(&self.refusal) = error.to_string(),
            Event::ClientError(error) => *lock(&self.refusal) = error.to_string(),
            _ => return,
        }
        self.count.send_modify(|count| *count += 1);
    }

    /// Returns the refusal that names `subject`, if there is one.
    fn refusal_of(&self, subject: &str) -> Option<StoreError> {
        let refusal = lock(&self.refusal);
        let names_it = refusal.to_ascii_lowercase().contains("permissions violation")
            && refusal.split('"').any(|quoted| quoted == subject);
        names_it.then(|| misconfigured(format!("the login may not publish on a subject of the store: {refusal}")))
    }
}

/// Effect of a request that gets no answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// Nothing was written.
    Read,
    /// The write may have taken effect.
    Write,
}

impl Ask {
    fn unanswered(self, message: &str) -> StoreError {
        let kind = if self == Self::Write { StoreErrorKind::Unconfirmed } else { StoreErrorKind::Unavailable };
        StoreError::new(kind, message)
    }
}

/// The connection of one runtime, opened at its first use.
#[derive(Default)]
pub(super) struct Link {
    client: OnceCell<Client>,
    events: Arc<Events>,
    /// Value of `Events::breaks` of the connection that is asked for a sign of life, or has given none, plus one.
    probed: Arc<AtomicU64>,
    /// Number of connections that the driver had opened at the latest call of [`was_replaced`](Self::was_replaced).
    opened: AtomicU64,
    pub(super) watches: Watches,
}

impl Link {
    /// Opens the connection, unless it is open. The driver opens a broken connection again.
    pub(super) async fn client(
        &self,
        plan: &ConnectPlan,
        waiting: &Arc<PerProcess<WaiterTable>>,
        clock: &dyn Clock,
        until: Instant,
    ) -> Result<&Client, StoreError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let hosts = plan.servers.iter().map(ServerAddr::host);
        lookup::check(hosts).map_err(|error| unavailable(format!("the host of NATS can't be looked up: {error}")))?;
        let left = until.saturating_since(clock.now());
        let open = async {
            let (events, waiting) = (Arc::clone(&self.events), Arc::clone(waiting));
            let options = plan
                .options
                .clone()
                // The driver numbers its inboxes by a generator whose state a forked child inherits. Two children would
                // receive each other's answers, and take an acknowledgement or a record of another key for their own.
                .custom_inbox_prefix(format!("_INBOX.{:032x}", clock.entropy()))
                .connection_timeout(left)
                .ping_interval(PING_EVERY)
                .reconnect_delay_callback(|tries| {
                    let doublings = u32::try_from(tries.min(10)).unwrap_or(10);
                    (RECONNECT[0] * (1 << doublings)).min(RECONNECT[1])
                })
                .event_callback(move |event| {
                    events.note(&event, waiting.here());
                    std::future::ready(())
                });
            options.connect(plan.servers.clone()).await.map_err(|error| not_connected(&error))
        };
        match race(Box::pin(self.client.get_or_try_init(|| open)), clock.sleep(left)).await {
            Some(opened) => opened,
            None => Err(unavailable("NATS did not accept a connection in time")),
        }
    }

    /// Returns whether the driver has opened the connection again since the latest call.
    pub(super) fn was_replaced(&self, client: &Client) -> bool {
        let opened = client.statistics().connects.load(Ordering::Relaxed);
        self.opened.fetch_max(opened, Ordering::Relaxed).max(1) < opened
    }

    /// Waits until the connection works.
    pub(super) async fn connected(&self, client: &Client, clock: &dyn Clock, until: Instant) -> Result<(), StoreError> {
        if client.connection_state() == State::Connected {
            return Ok(());
        }
        let mut count = self.events.count.subscribe();
        while client.connection_state() != State::Connected {
            let left = until.saturating_since(clock.now());
            if left.is_zero() {
                let why = lock(&self.events.refusal).clone();
                let why = if why.is_empty() { why } else { format!(": {why}") };
                return Err(unavailable(format!("the connection to NATS is broken, and can't be opened again{why}")));
            }
            race(Box::pin(count.changed()), clock.sleep(left.min(LOOK_EVERY))).await;
        }
        Ok(())
    }

    /// Sends a request, and returns its answer if it arrives before `until`.
    pub(super) async fn ask(
        &self,
        client: &Client,
        clock: &dyn Clock,
        until: Instant,
        kind: Ask,
        request: (&str, Option<HeaderMap>, Bytes),
    ) -> Result<Message, StoreError> {
        // A request that is queued while the connection is broken would be sent once it works again, maybe much later.
        self.connected(client, clock, until).await?;
        let (subject, headers, payload) = request;
        let size = payload.len();
        let mut count = self.events.count.subscribe();
        let breaks = self.events.breaks.load(Ordering::Relaxed);
        let heard = client.statistics().in_messages.load(Ordering::Relaxed);
        let asked = Request::new().payload(payload).timeout(None);
        let asked = match headers {
            Some(headers) => asked.headers(headers),
            None => asked,
        };
        let asked = std::pin::pin!(client.send_request(subject.to_owned(), asked));
        let interrupted = std::pin::pin!(async {
            loop {
                if count.changed().await.is_err() {
                    return kind.unanswered("the connection to NATS is closed");
                }
                if self.events.breaks.load(Ordering::Relaxed) != breaks {
                    return kind.unanswered("the connection to NATS broke before the answer");
                }
                if let Some(refusal) = self.events.refusal_of(subject) {
                    return refusal;
                }
            }
        });
        let answered = select(asked, race_of(interrupted, clock.sleep(until.saturating_since(clock.now()))));
        match answered.await {
            Either::Left((Ok(answer), _)) => Ok(answer),
            Either::Left((Err(error), _)) => Err(match error.kind() {
                // No server has a stream that listens on the subject, so no stream has stored the message.
                RequestErrorKind::NoResponders => unavailable(
                    "no stream answers: JetStream is off or out of resources, the bucket is missing, or its stream has \
                     no leader",
                ),
                RequestErrorKind::MaxPayloadExceeded => too_large(size, client.max_payload()),
                RequestErrorKind::InvalidSubject => misconfigured("the subject of the record is not valid"),
                RequestErrorKind::TimedOut | RequestErrorKind::Other => {
                    kind.unanswered("the connection to NATS was closed before the answer")
                }
            }),
            Either::Right((Some(failed), _)) => Err(failed),
            Either::Right((None, _)) => {
                if client.statistics().in_messages.load(Ordering::Relaxed) == heard {
                    self.probe(client, breaks, clock.sleep(SILENCE));
                }
                Err(kind.unanswered("NATS did not answer in time"))
            }
        }
    }

    /// Number of times that the connection broke.
    pub(super) fn breaks(&self) -> u64 {
        self.events.breaks.load(Ordering::Relaxed)
    }

    /// Waits until the connection has broken, if it has broken `breaks` times so far.
    pub(super) async fn broken(&self, breaks: u64) {
        let mut count = self.events.count.subscribe();
        while self.breaks() == breaks && count.changed().await.is_ok() {}
    }

    /// Waits until the server refuses a message on `subject`.
    pub(super) async fn refused(&self, subject: &str) -> StoreError {
        let mut count = self.events.count.subscribe();
        loop {
            if let Some(refusal) = self.events.refusal_of(subject) {
                return refusal;
            }
            if count.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Asks the server for a sign of life, and opens the connection anew if there is none within `patience`. Nothing
    /// has arrived while a request waited for its answer: the server may be slow, or the route of the connection may
    /// have changed, so that the connection would stay silent forever. Each connection has one such question at a time.
    fn probe(&self, client: &Client, breaks: u64, patience: crate::clock::Sleep) {
        if self.probed.fetch_max(breaks + 1, Ordering::Relaxed) > breaks {
            return;
        }
        let (client, probed, events) = (client.clone(), Arc::clone(&self.probed), Arc::clone(&self.events));
        tokio::spawn(async move {
            // No subscriber listens on the subject: the server says so, or refuses the message. A subject of the
            // store would not do: its stream may be what is slow.
            let mut count = events.count.subscribe();
            let question = Request::new().timeout(None);
            let answered = client.send_request(format!("{}.probe", client.new_inbox()), question);
            let answered = select(Box::pin(answered), Box::pin(count.changed()));
            if race(answered, patience).await.is_some() {
                let _ = probed.compare_exchange(breaks + 1, breaks, Ordering::Relaxed, Ordering::Relaxed);
            } else {
                client.force_reconnect().await.ok();
            }
        });
    }
}

/// Returns the output of `future`, or `None` once `limit` is ready.
fn race_of<F: Future + Unpin>(
    future: F,
    limit: crate::clock::Sleep,
) -> impl Future<Output = Option<F::Output>> + Unpin {
    Box::pin(race(future, limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_ends_with_its_connection() {
        let (events, waiting) = (Events::default(), WaiterTable::default());
        let refusal = r#"Permissions Violation for Publish to "$KV.b.1.s.t""#.to_owned();
        events.note(&Event::ServerError(ServerError::Other(refusal)), &waiting);
        assert!(events.refusal_of("$KV.b.1.s.t").is_some());
        assert!(events.refusal_of("$KV.b.1.s").is_none(), "another subject");
        events.note(&Event::Connected, &waiting);
        assert!(events.refusal_of("$KV.b.1.s.t").is_none());
    }
}
