//! Capacity units of DynamoDB, as its answers report them.

use std::sync::{Arc, Mutex, PoisonError};

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use idem_runtime::{Key, Store};
use serde_json::Value;

use super::{Measured, Meter, Unit};
use crate::report::Stop;
use crate::store::dynamodb::unreachable;

const UNITS: [Unit; 3] = [
    Unit { name: "write units", price: Some(("write_units", 1e6)) },
    Unit { name: "read units", price: Some(("read_units", 1e6)) },
    Unit { name: "calls", price: None },
];

/// Sums of the units in the answers so far.
#[derive(Clone, Default, Debug)]
pub(crate) struct Tally(Arc<Mutex<Counts>>);

#[derive(Clone, Default, Debug)]
struct Counts {
    writes: f64,
    reads: f64,
    calls: f64,
    /// Number of answers that lack the units that they should report.
    silent: u64,
}

impl Tally {
    /// Counts the answer to the operation `target`.
    pub(crate) fn add(&self, target: &str, body: &[u8]) {
        let operation = target.rsplit('.').next().unwrap_or_default();
        let Ok(answer) = serde_json::from_slice::<Value>(body) else { return };
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.calls += 1.0;
        let is_read = matches!(operation, "GetItem" | "Scan" | "Query");
        let refused = answer["__type"].as_str().is_some_and(|it| it.ends_with("ConditionalCheckFailedException"));
        let units = match answer["ConsumedCapacity"]["CapacityUnits"].as_f64() {
            Some(units) => units,
            // A refused write is billed by the size of the item that it found, but its answer does not report the
            // units.
            None if refused => write_units(
                answer["Item"]
                    .as_object()
                    .map_or(0, |item| item.iter().map(|(name, value)| name.len() + size_of_json(value)).sum()),
            ),
            None => {
                counts.silent += 1;
                0.0
            }
        };
        *if is_read { &mut counts.reads } else { &mut counts.writes } += units;
    }
}

/// Returns the write units of an item of this size: one for each started KB.
#[allow(clippy::cast_precision_loss, reason = "an item has 400 KB at most")]
fn write_units(bytes: usize) -> f64 {
    bytes.div_ceil(1024).max(1) as f64
}

/// Returns the size of a value as DynamoDB counts it. Supports the types that records have.
fn size_of_json(value: &Value) -> usize {
    let text = |name: &str| value[name].as_str();
    match (text("S"), text("N"), text("B")) {
        (Some(text), ..) => text.len(),
        (_, Some(number), _) => size_of_number(number),
        (.., Some(base64)) => base64.trim_end_matches('=').len() * 3 / 4,
        _ => 1,
    }
}

/// Returns the size of a number: one byte for two significant digits, and one more.
fn size_of_number(number: &str) -> usize {
    let digits: String = number.chars().filter(char::is_ascii_digit).collect();
    let significant = digits.trim_start_matches('0').trim_end_matches('0').len();
    significant.div_ceil(2) + 1 + usize::from(number.starts_with('-'))
}

fn size_of(value: &AttributeValue) -> usize {
    match value {
        AttributeValue::S(text) => text.len(),
        AttributeValue::N(number) => size_of_number(number),
        AttributeValue::B(bytes) => Blob::as_ref(bytes).len(),
        _ => 1,
    }
}

/// A table, and the units that its answers report.
pub(crate) struct Capacity {
    pub(crate) store: Arc<dyn Store>,
    /// A client whose calls are not counted.
    pub(crate) client: Client,
    pub(crate) table: String,
    pub(crate) namespace: String,
    pub(crate) tally: Tally,
}

impl Meter for Capacity {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    fn units(&self) -> &'static [Unit] {
        &UNITS
    }

    fn records(&self) -> usize {
        5
    }

    fn count(&self) -> Measured<'_, Vec<f64>> {
        let counts = self.tally.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Box::pin(std::future::ready(match counts.silent {
            0 => Ok(vec![counts.writes, counts.reads, counts.calls]),
            _ => Err(Stop::Refused("the server does not tell the capacity that its answers cost".to_owned())),
        }))
    }

    fn stored<'a>(&'a self, key: &'a Key) -> Measured<'a, f64> {
        Box::pin(async move {
            let name = AttributeValue::S(format!("{}{}", self.namespace, key.as_str()));
            let asked = self.client.get_item().table_name(&self.table).key("key", name).consistent_read(true).send();
            let item = asked.await.map_err(|error| unreachable(&error))?.item.unwrap_or_default();
            // DynamoDB adds 100 bytes to the attributes of each item.
            let bytes: usize = item.iter().map(|(name, value)| name.len() + size_of(value)).sum::<usize>() + 100;
            Ok(f64::from(u32::try_from(bytes).unwrap_or(u32::MAX)))
        })
    }

    fn notes(&self) -> &'static [&'static str] {
        &[
            "write units are what answers report; of refused writes, whose answers report none, one for each KB begun of the \
             item that they met",
            "expired items are deleted for nothing, and stored for some days more; backups, streams and replicas cost extra",
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_size_that_dynamodb_counts() {
        for (number, bytes) in [("0", 1), ("7", 2), ("-7", 3), ("1764000000000", 3), ("1764000000123", 8), ("12300", 3)]
        {
            assert_eq!(size_of_number(number), bytes, "{number}");
        }
        let of = |json: &str| size_of_json(&serde_json::from_str(json).unwrap());
        assert_eq!((of(r#"{"S":"äb"}"#), of(r#"{"B":"AAECAw=="}"#), of(r#"{"BOOL":true}"#)), (3, 4, 1));
        assert_eq!(format!("{:?}", [0, 1, 1024, 1025].map(write_units)), "[1.0, 1.0, 1.0, 2.0]");
    }

    #[test]
    fn answers_are_counted_by_what_they_say() {
        let tally = Tally::default();
        tally.add("DynamoDB_20120810.PutItem", br#"{"ConsumedCapacity":{"CapacityUnits":3.0}}"#);
        tally.add("DynamoDB_20120810.GetItem", br#"{"ConsumedCapacity":{"CapacityUnits":0.5}}"#);
        let large = format!(
            r#"{{"__type":"a#ConditionalCheckFailedException","Item":{{"r":{{"S":"{}"}}}}}}"#,
            "x".repeat(1024)
        );
        tally.add("DynamoDB_20120810.UpdateItem", large.as_bytes());
        tally.add("DynamoDB_20120810.PutItem", br#"{"__type":"ConditionalCheckFailedException"}"#);
        let counts = tally.0.lock().unwrap().clone();
        assert_eq!((counts.writes, counts.reads, counts.calls, counts.silent), (6.0, 0.5, 4.0, 0));
        tally.add("DynamoDB_20120810.PutItem", b"{}");
        assert_eq!(tally.0.lock().unwrap().silent, 1);
    }
}
