//! Creates the table.

use std::time::Duration;

use aws_sdk_dynamodb::config::http::HttpResponse;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType, TableDescription, TableStatus,
    TimeToLiveSpecification, TimeToLiveStatus,
};

use super::tries::Tries;
use super::{DynamoInner, failure, item};
use crate::combine::race;
use crate::store::{StoreError, StoreErrorKind};

/// Longest time that a new table may take to become usable.
const LONGEST_CREATION: Duration = Duration::from_secs(120);
/// Pause between two checks whether the table is usable.
const PAUSE: Duration = Duration::from_millis(200);

impl DynamoInner {
    /// Creates the table and enables its TTL; see [`ensure_table`](super::DynamoStore::ensure_table).
    pub(super) async fn ensure_table(&self) -> Result<(), StoreError> {
        let creation = async {
            self.create().await?;
            self.await_active().await?;
            self.enable_purge().await
        };
        let late = || Err(StoreError::new(StoreErrorKind::Unconfirmed, "the table did not become usable in time"));
        race(creation, self.context.clock().sleep(LONGEST_CREATION)).await.unwrap_or_else(late)
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
            // The table exists, or another process is creating it now.
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
                            "the answer is not DynamoDB's: it describes no table",
                        )
                    })?;
                    check(table)?;
                    if table.table_status() == Some(&TableStatus::Active) {
                        return Ok(());
                    }
                }
                // DynamoDB may report a table as missing while it is being created.
                Err(error) if error.code() == Some("ResourceNotFoundException") => {}
                Err(error) => return Err(failed(&error)),
            }
            self.context.clock().sleep(PAUSE).await;
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
            // Another process has enabled the TTL meanwhile.
            Err(error) if error.message().is_some_and(|said| said.contains("already enabled")) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }
}

/// Refuses a table whose primary key is not the partition key `key` alone.
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
    failure::failed(error, &Tries::default())
}
