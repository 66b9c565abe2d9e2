//! Checks of a DynamoDB table.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_sdk_dynamodb::error::ProvideErrorMetadata;
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};

use super::Findings;
use crate::report::Stop;
use crate::store::dynamodb::{TTL, Table, differences, in_time, unreachable};

/// The default of `DynamoOptions::max_clock_skew`, in seconds.
const MAX_CLOCK_SKEW: i128 = 1;

pub(crate) async fn examine(table: &Table, timeout: Duration, findings: &mut Findings) -> Result<(), Stop> {
    let (client, date) = table.client()?;
    // If the credentials lack the right to describe the table, all further checks still run.
    let described = in_time(timeout, client.describe_table().table_name(&table.name).send()).await?;
    let described = match described {
        Ok(described) => Some(described),
        Err(error) if error.code() == Some("ResourceNotFoundException") => {
            findings.error(
                "table",
                format!("there is no table `{}`", table.name),
                "every call fails",
                "`idem schema migrate` for a first step; in production what `idem schema print dynamodb` prints",
            );
            return Ok(());
        }
        Err(error) if error.code().is_some_and(|code| code.contains("AccessDenied")) => {
            findings.unknown("table", "these credentials may not describe it", "allow `dynamodb:DescribeTable`");
            None
        }
        Err(error) => return Err(unreachable(&error)),
    };
    if let Some(described) = described.as_ref().and_then(|it| it.table()) {
        let found = differences(described);
        match found.is_empty() {
            true => findings.ok("table", "partition key `key` of type S, no sort key"),
            false => findings.error(
                "table",
                found.join("; "),
                "every call fails",
                "make another table from what `idem schema print dynamodb` prints",
            ),
        }
        match described.deletion_protection_enabled() {
            Some(true) => findings.ok("deletion protection", "on"),
            _ => findings.warning(
                "deletion protection",
                "off",
                "if the table is deleted, all records are forgotten, and their operations run again",
                &format!("`{}`", table.aws(&["update-table", "--deletion-protection-enabled"])),
            ),
        }
    }
    clock(date.get().as_deref(), findings);
    // The store removes no expired record, so DynamoDB has to remove them by its TTL.
    let ttl = in_time(timeout, client.describe_time_to_live().table_name(&table.name).send()).await?;
    let ttl = match ttl {
        Ok(ttl) => ttl,
        Err(error) if error.code().is_some_and(|code| code.contains("AccessDenied")) => {
            findings.unknown("ttl", "these credentials may not ask", "allow `dynamodb:DescribeTimeToLive`");
            return Ok(());
        }
        Err(error) => return Err(unreachable(&error)),
    };
    let ttl = ttl.time_to_live_description();
    let status = ttl.and_then(|it| it.time_to_live_status()).map_or("DISABLED", |status| status.as_str());
    match (status, ttl.and_then(|it| it.attribute_name())) {
        ("ENABLED" | "ENABLING", Some(TTL)) => findings.ok("ttl", "attribute `purge_at`"),
        ("ENABLED" | "ENABLING", other) => findings.error(
            "ttl",
            format!("attribute `{}`", other.unwrap_or_default()),
            "expired records are never removed, and others might be",
            "disable it, and enable it for `purge_at`",
        ),
        _ => findings.error(
            "ttl",
            "off",
            "expired records are never removed, and the table grows for ever",
            &format!(
                "`{}`",
                table.aws(&[
                    "update-time-to-live",
                    "--time-to-live-specification",
                    "Enabled=true,AttributeName=purge_at"
                ])
            ),
        ),
    }
    Ok(())
}

/// Compares this machine's clock with the `Date` of DynamoDB's answer. A `Date` has whole seconds.
fn clock(date: Option<&str>, findings: &mut Findings) {
    let theirs = date.and_then(|date| DateTime::from_str(date, DateTimeFormat::HttpDate).ok());
    let ours = SystemTime::now().duration_since(UNIX_EPOCH).map(|now| i128::from(now.as_secs()));
    let (Some(theirs), Ok(ours)) = (theirs, ours) else {
        findings.unknown("clock", "the answers have no `Date`", "make sure that all machines follow a time server");
        return;
    };
    let off = ours - i128::from(theirs.secs());
    // The check tolerates one more second, because the answer took time, and `Date` has no fractions of a second.
    match off.abs() > MAX_CLOCK_SKEW + 1 {
        true => findings.error(
            "clock",
            format!("{} s {} DynamoDB's", off.abs(), if off > 0 { "ahead of" } else { "behind" }),
            "the clocks of the machines measure leases: a live lease may be taken over, or may hold for too long",
            "let this machine follow a time server; otherwise raise `DynamoOptions::max_clock_skew` everywhere",
        ),
        false => findings.ok("clock", "within a second or two of DynamoDB's"),
    }
}
