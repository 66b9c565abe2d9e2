//! Sends the messages of finished operations where nothing delivers their inputs again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::outbox::{self, Dispatch};
use crate::error::{Error, UnsentReason};
use crate::key::{Key, KeyError};
use crate::metrics::StoreOp;
use crate::record::{Inspection, Release, Reservation, ReserveRequest};
use crate::store::{Filter, Store, StoreError};

/// Scope of the leases under which a resender sends the messages of a record.
const SCOPE: &str = "idem::outbox";

/// Sends messages that are recorded and not marked as sent, in the background.
///
/// A broker delivers the input of a failed delivery again, and that delivery sends the messages. Where nothing delivers
/// again (HTTP, cron), a resender does. It lists the records with unsent messages, and sends those of one record at a
/// time, under a lease of the store for each record, which is not renewed: any number of processes may run a resender,
/// and none of them leads. A resender and a delivery may send the same message, with the same id.
///
/// A list reads the key of every record of the store or of one [scope](Self::scope), because no store has an index of
/// unsent messages: choose the pause accordingly. Redis has no order of its keys, and needs [`scan`](Self::scan).
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::outbox::Resender;
/// # use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
/// # use idem_runtime::{MemoryStore, StoreExt};
/// # struct Printer;
/// # impl Sender for Printer {
/// #     fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> { Box::pin(async { Ok(()) }) }
/// # }
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let store = MemoryStore::new().with_sender(Printer);
/// let resender = Resender::new(&store).every(Duration::from_secs(10));
/// tokio::spawn(async move { resender.run().await });
/// # });
/// ```
#[must_use]
pub struct Resender {
    store: Arc<dyn Store>,
    every: Duration,
    older_than: Duration,
    lease: Duration,
    scope: Option<Box<str>>,
    scan: bool,
}

/// Result of one pass of a [`Resender`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Resent {
    /// Number of records whose messages are all sent now, or set aside.
    pub done: u64,
    /// Number of records with messages that could not be sent; the next pass tries again.
    pub failed: u64,
    /// Number of records whose messages another call is sending, or are all set aside.
    pub skipped: u64,
}

impl Resender {
    /// Makes a resender for the records of `store`, whose handle has a [sender](crate::StoreExt::with_sender).
    pub fn new<S: Store + ?Sized>(store: &S) -> Self {
        let (every, older_than, lease) = (Duration::from_secs(30), Duration::from_secs(30), Duration::from_secs(60));
        Self { store: store.handle(), every, older_than, lease, scope: None, scan: false }
    }

    /// Sets the pause between two passes (default: 30 s).
    pub fn every(self, every: Duration) -> Self {
        Self { every, ..self }
    }

    /// Sets the shortest time since the attempt of a record began (default: 30 s). The call of a younger record is
    /// probably sending its messages itself.
    pub fn older_than(self, older_than: Duration) -> Self {
        Self { older_than, ..self }
    }

    /// Sends only messages of this scope.
    pub fn scope(self, scope: impl Into<Box<str>>) -> Self {
        Self { scope: Some(scope.into()), ..self }
    }

    /// Allows a store without an order of its keys (Redis) to read all of its keys.
    pub fn scan(self) -> Self {
        Self { scan: true, ..self }
    }

    /// Makes one pass after the other, and never returns. An outage of the store is logged, and the next pass tries
    /// again.
    ///
    /// # Cancel safety
    /// Cancel safe. A message that is being sent when the future is dropped may arrive, and is sent again later.
    pub async fn run(&self) {
        loop {
            match self.pass().await {
                Ok(Resent { failed: 0, .. }) => {}
                Ok(Resent { failed, .. }) => {
                    tracing::warn!(failed, "messages of some records could not be sent; the next pass tries again");
                }
                Err(error) => tracing::warn!(%error, "unsent messages could not be listed; the next pass tries again"),
            }
            self.store.context().clock().sleep(self.every).await;
        }
    }

    /// Lists all records with unsent messages once, and sends these messages.
    ///
    /// # Errors
    /// [`StoreError`] if the store can't list its records. Messages that could not be sent are no error.
    ///
    /// # Cancel safety
    /// See [`run`](Self::run).
    pub async fn pass(&self) -> Result<Resent, StoreError> {
        let mut resent = Resent::default();
        let mut filter = Filter::new().unsent();
        (filter.scope, filter.scan) = (self.scope.clone(), self.scan);
        loop {
            let page = self.store.list(&filter).watched(&*self.store, StoreOp::List).await?;
            // Not a part of the filter, which would leave out a record whose age the store does not report.
            let is_old = |found: &Inspection| found.began.is_none_or(|began| began >= self.older_than);
            for (key, _) in page.records.iter().filter(|(_, found)| is_old(found)) {
                match self.send(key).await {
                    Some(Ok(())) => resent.done += 1,
                    Some(Err(error)) => {
                        resent.failed += 1;
                        tracing::debug!(%key, %error, "messages could not be sent again");
                    }
                    None => resent.skipped += 1,
                }
            }
            match page.next {
                Some(next) => filter.after = Some(next),
                None => return Ok(resent),
            }
        }
    }

    /// Sends the messages of one record, under a lease; `None` if there is nothing to send, or another call is sending.
    async fn send(&self, key: &Key) -> Option<Result<(), Error>> {
        let store = &*self.store;
        let request = match lease_key(key) {
            Ok(key) => ReserveRequest::new(key, store.context().new_owner(), self.lease, self.lease),
            Err(error) => return Some(Err(error.into())),
        };
        let pause = self.every;
        let not_read = |attempt, source| {
            let dispatch = Dispatch { store, key, attempt, ran: false, replayable: true, pause };
            Some(Err(dispatch.unsent(None, UnsentReason::NotRead(source))))
        };
        let found = match store.inspect(key).watched(store, StoreOp::Inspect).await {
            Ok(found) => found.filter(|found| outbox::has_unsent(&found.record.state))?,
            Err(source) => return not_read(0, source),
        };
        let attempt = found.attempt();
        let lease = match store.reserve(&request).watched(store, StoreOp::Reserve).await {
            Ok(Reservation::Granted { lease, .. }) => lease,
            Ok(_) => return None,
            Err(source) => return not_read(attempt, source),
        };
        let sent = match store.context().sends(key) {
            // Another resender may have sent them since they were listed, so the record is read again under the lease.
            Some(_sending) => match store.inspect(key).watched(store, StoreOp::Inspect).await {
                Ok(Some(found)) if outbox::has_unsent(&found.record.state) => {
                    let dispatch =
                        Dispatch { store, key, attempt: found.attempt(), ran: false, replayable: true, pause };
                    Some(dispatch.send_recorded(&found).await)
                }
                Ok(_) => None,
                Err(source) => not_read(attempt, source),
            },
            None => None,
        };
        // A lease that is not released lapses.
        let _ = store.release(&lease, Release::NotStarted).watched(store, StoreOp::Release).await;
        sent
    }
}

/// Returns the key of the lease under which the messages of `key` are sent: as long as any key may be, its text is
/// hashed.
fn lease_key(key: &Key) -> Result<Key, KeyError> {
    Key::of_library(SCOPE, crate::key::child_key("", key, SCOPE))
}

impl fmt::Debug for Resender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { every, older_than, scope, scan, .. } = self;
        f.debug_struct("Resender")
            .field("every", every)
            .field("older_than", older_than)
            .field("scope", scope)
            .field("scan", scan)
            .finish_non_exhaustive()
    }
}
