//! Settings of the DynamoDB store, and the making of a store from them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use aws_sdk_dynamodb::Client;

use super::{Connections, DynamoInner, DynamoStore, MAX_JOURNAL_BYTES, apart_from};
use crate::clock::{Clock, SystemClock};
use crate::kit::waiting::WaiterTable;
use crate::record::signed_millis;
use crate::store::StoreContext;

/// Settings of a [`DynamoStore`].
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
    /// Name of this application, in front of every key in the table (default: none). Applications that share a table
    /// but must not share operations need different names.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). The name shows who holds a key;
    /// see [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Largest difference between the clocks of two machines that use the table (default: 1 s). Clocks that follow a
    /// time server differ by far less. Use the same value on all machines.
    ///
    /// DynamoDB has no clock that a condition could read, so a record contains the time at which its lease lapses by
    /// the clock of its owner. Other machines take over only after that time *and this skew* have passed by their own
    /// clocks. So a lease that is not renewed blocks its key for the duration of the lease plus up to twice the skew.
    /// If two clocks are farther apart, an attempt can be taken over while its lease still holds. The store logs a
    /// warning if an answer shows that the clock of this machine differs from DynamoDB's clock by more than this skew.
    #[must_use]
    pub fn max_clock_skew(self, max_clock_skew: Duration) -> Self {
        Self { max_clock_skew, ..self }
    }

    /// Time limit of one call of the store, including all requests and tries of the client (default: 3 s). Keep this
    /// limit well below the shortest renewal interval (a third of the lease). After a time-out a write may have taken
    /// effect; the engine repeats the write with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Clock of the store (default: [`SystemClock`]). The times in the records are read from its [`wall`](Clock::wall)
    /// clock. Set another clock only in tests of leases, of retentions, or of clocks that differ.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }

    /// Client that renews leases and makes late writes, on a thread of the library. The default is a client with the
    /// settings of the client given to [`build`](DynamoOptions::build). The two clients share no connection, unless the
    /// client given to `build` was made with an HTTP client.
    ///
    /// If the client given to `build` has an HTTP client, pass a client with another HTTP client here. A request over a
    /// connection waits for the runtime that opened the connection: if a handler blocked that runtime, leases would be
    /// lost.
    #[must_use]
    pub fn upkeep_client(self, upkeep_client: Client) -> Self {
        Self { upkeep_client: Some(upkeep_client), ..self }
    }

    /// Makes a store in `table`. Sends no request: the first call reports a wrong table, wrong credentials or an
    /// unreachable network.
    pub fn build(self, client: Client, table: impl Into<String>) -> DynamoStore {
        let Self { namespace, holder, max_clock_skew, response_timeout, clock, upkeep_client } = self;
        let upkeep_client = upkeep_client.unwrap_or_else(|| apart_from(&client));
        let clock = clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let context = StoreContext::new("dynamodb", clock).system("aws.dynamodb").held_by(&holder);
        let context = Arc::new(context.max_journal_bytes(MAX_JOURNAL_BYTES));
        let (waiting, warned) = (Arc::new(WaiterTable::default()), Arc::new(AtomicBool::new(false)));
        let (table, skew) = (table.into(), signed_millis(max_clock_skew));
        let handle = |client, upkeep| {
            Arc::new_cyclic(|this| DynamoInner {
                this: this.clone(),
                context: Arc::clone(&context),
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
