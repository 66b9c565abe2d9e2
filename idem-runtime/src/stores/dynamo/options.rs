//! Settings, and opening a store.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use aws_sdk_dynamodb::Client;

use super::{Connections, DynamoStore, Shared, apart_from};
use crate::clock::{Clock, SystemClock};
use crate::kit::waiting::Waiting;
use crate::record::signed_millis;
use crate::store::Heartbeats;

/// Settings for a [`DynamoStore`].
///
/// ```no_run
/// # fn open(client: aws_sdk_dynamodb::Client) {
/// # use std::time::Duration;
/// use idem_runtime::DynamoStore;
/// let store = DynamoStore::options()
///     .namespace("shop:")
///     .max_clock_skew(Duration::from_secs(5))
///     .build(client, "idempotency");
/// # }
/// ```
#[derive(Clone)]
pub struct DynamoOptions {
    namespace: String,
    holder: String,
    max_clock_skew: Duration,
    response_timeout: Duration,
    clock: Option<Arc<dyn Clock>>,
    upkeep_client: Option<Client>,
}

impl Default for DynamoOptions {
    fn default() -> Self {
        Self {
            namespace: String::new(),
            holder: String::new(),
            max_clock_skew: Duration::from_secs(1),
            response_timeout: Duration::from_secs(3),
            clock: None,
            upkeep_client: None,
        }
    }
}

impl fmt::Debug for DynamoOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoOptions")
            .field("namespace", &self.namespace)
            .field("max_clock_skew", &self.max_clock_skew)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

impl DynamoOptions {
    /// The name of this application, in front of every key in the table (default: none). Applications that share a table but
    /// must not share operations need different names.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// The name of this handle in its records, beside host and process (default: none): who holds a key. See
    /// [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// How far apart the clocks of two machines that use the table may be (default: 1 s). Machines that follow a time
    /// server stay far below that. Use the same value on all of them.
    ///
    /// DynamoDB has no clock that a condition could read, so a record says when its lease lapses by the clock of its owner.
    /// Others take over only once that time *and this skew* have passed by their own clocks: a lease that is not renewed
    /// blocks its key for its own length and up to twice the skew. If two clocks are farther apart, an attempt can be taken
    /// over while its lease still holds. The store logs a warning if the clock here is seen to be farther off DynamoDB's
    /// own.
    #[must_use]
    pub fn max_clock_skew(self, max_clock_skew: Duration) -> Self {
        Self { max_clock_skew, ..self }
    }

    /// The time limit of one call of the store, all requests and tries of the client included (default: 3 s). Keep it well
    /// below the shortest beat (a third of the lease). After a time-out the write may have taken effect; it is repeated
    /// with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// What measures time (default: [`SystemClock`]). Its [`wall`](Clock::wall) dates records: for tests of leases,
    /// retentions and clocks that differ.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }

    /// The client that renews leases and makes late writes, on a thread of the library (default: one with the settings of
    /// the store's own client, which shares no connection with it unless that was given an HTTP client).
    ///
    /// If it was, pass a client with an HTTP client of its own. Requests over a connection wait for the runtime that opened
    /// it, and leases would be lost if a handler blocks that runtime.
    #[must_use]
    pub fn upkeep_client(self, upkeep_client: Client) -> Self {
        Self { upkeep_client: Some(upkeep_client), ..self }
    }

    /// A store in `table`. Nothing is sent: the first call reports a wrong table, wrong credentials or no network.
    pub fn build(self, client: Client, table: impl Into<String>) -> DynamoStore {
        let Self { namespace, holder, max_clock_skew, response_timeout, clock, upkeep_client } = self;
        let upkeep_client = upkeep_client.unwrap_or_else(|| apart_from(&client));
        let clock = clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let heartbeats = Arc::new(Heartbeats::new(clock).held_by(&holder));
        let (waiting, warned) = (Arc::new(Waiting::default()), Arc::new(AtomicBool::new(false)));
        let (table, skew) = (table.into(), signed_millis(max_clock_skew));
        let handle = |client, upkeep| {
            Arc::new_cyclic(|this| Shared {
                this: this.clone(),
                heartbeats: Arc::clone(&heartbeats),
                client: Connections::new(client),
                upkeep,
                table: table.clone(),
                namespace: namespace.clone(),
                skew,
                response_timeout,
                waiting: Arc::clone(&waiting),
                warned: Arc::clone(&warned),
            })
        };
        DynamoStore(handle(client, Some(handle(upkeep_client, None))))
    }
}
