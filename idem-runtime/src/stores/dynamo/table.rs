//! How a store is opened, and its table.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::http::HttpResponse;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType, TableDescription, TableStatus,
    TimeToLiveSpecification, TimeToLiveStatus,
};

use super::answer::{self, Tries};
use super::{Connections, DynamoStore, Shared, apart_from, item};
use crate::clock::{Clock, SystemClock};
use crate::future::race;
use crate::kit::waiting::Waiting;
use crate::record::signed_millis;
use crate::store::{Heartbeats, StoreError, StoreErrorKind};

/// How long a new table may take to become usable.
const LONGEST_CREATION: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(200);

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
    max_clock_skew: Duration,
    response_timeout: Duration,
    clock: Option<Arc<dyn Clock>>,
    upkeep_client: Option<Client>,
}

impl Default for DynamoOptions {
    fn default() -> Self {
        Self {
            namespace: String::new(),
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
        let Self { namespace, max_clock_skew, response_timeout, clock, upkeep_client } = self;
        let upkeep_client = upkeep_client.unwrap_or_else(|| apart_from(&client));
        let heartbeats = Arc::new(Heartbeats::new(clock.unwrap_or_else(|| Arc::new(SystemClock::default()))));
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

impl Shared {
    /// See [`DynamoStore::ensure_table`].
    pub(super) async fn ensure_table(&self) -> Result<(), StoreError> {
        let creation = async {
            self.create().await?;
            self.await_active().await?;
            self.enable_purge().await
        };
        let late = || Err(StoreError::new(StoreErrorKind::Unconfirmed, "the table did not become usable in time"));
        race(creation, self.heartbeats.clock().sleep(LONGEST_CREATION)).await.unwrap_or_else(late)
    }

    async fn create(&self) -> Result<(), StoreError> {
        let key = AttributeDefinition::builder().attribute_name(item::KEY).attribute_type(ScalarAttributeType::S);
        let hash = KeySchemaElement::builder().attribute_name(item::KEY).key_type(KeyType::Hash);
        let request = self
            .client
            .client()
            .create_table()
            .table_name(&self.table)
            .billing_mode(BillingMode::PayPerRequest)
            .attribute_definitions(key.build().map_err(unmade)?)
            .key_schema(hash.build().map_err(unmade)?);
        match request.send().await {
            Ok(_) => Ok(()),
            // It exists, or another process is creating it now.
            Err(error) if error.code() == Some("ResourceInUseException") => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }

    async fn await_active(&self) -> Result<(), StoreError> {
        loop {
            match self.client.client().describe_table().table_name(&self.table).send().await {
                Ok(answer) => {
                    let table = answer.table().ok_or_else(|| {
                        StoreError::new(
                            StoreErrorKind::Unconfirmed,
                            "an answer came that is not DynamoDB's: no table in it",
                        )
                    })?;
                    check(table)?;
                    if table.table_status() == Some(&TableStatus::Active) {
                        return Ok(());
                    }
                }
                // Reported for a moment while the table is being created.
                Err(error) if error.code() == Some("ResourceNotFoundException") => {}
                Err(error) => return Err(failed(&error)),
            }
            self.heartbeats.clock().sleep(PAUSE).await;
        }
    }

    async fn enable_purge(&self) -> Result<(), StoreError> {
        let described = self.client.client().describe_time_to_live().table_name(&self.table).send().await;
        let described = described.map_err(|error| failed(&error))?;
        if let Some(ttl) = described.time_to_live_description()
            && matches!(ttl.time_to_live_status(), Some(TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling))
        {
            return match ttl.attribute_name() {
                Some(item::PURGE_AT) => Ok(()),
                other => {
                    let message = format!("the TTL attribute of the table is {other:?}, not `{}`", item::PURGE_AT);
                    Err(StoreError::new(StoreErrorKind::Misconfigured, message))
                }
            };
        }
        let ttl = TimeToLiveSpecification::builder().enabled(true).attribute_name(item::PURGE_AT);
        let request = self.client.client().update_time_to_live().table_name(&self.table);
        match request.time_to_live_specification(ttl.build().map_err(unmade)?).send().await {
            Ok(_) => Ok(()),
            // Another process has enabled it meanwhile.
            Err(error) if error.message().is_some_and(|said| said.contains("already enabled")) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }
}

/// Refuses a table with other keys.
fn check(table: &TableDescription) -> Result<(), StoreError> {
    let keys = table.key_schema();
    let fits = keys.len() == 1
        && keys[0].attribute_name() == item::KEY
        && table
            .attribute_definitions()
            .iter()
            .any(|it| it.attribute_name() == item::KEY && it.attribute_type() == &ScalarAttributeType::S);
    if fits {
        return Ok(());
    }
    let message = format!("the table needs a partition key `{}` of type S and no sort key", item::KEY);
    Err(StoreError::new(StoreErrorKind::Misconfigured, message))
}

fn unmade(error: aws_sdk_dynamodb::error::BuildError) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, "the request can't be made").with_source(error)
}

fn failed<E>(error: &SdkError<E, HttpResponse>) -> StoreError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    answer::failed(error, &Tries::default())
}
