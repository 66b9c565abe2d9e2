//! Checks of a NATS server and its stream.

use std::time::Duration;

use serde_json::Value;

use super::Findings;
use crate::report::Stop;
use crate::store::Place as _;
use crate::store::nats::Bucket;

pub(crate) async fn examine(bucket: &Bucket, timeout: Duration, findings: &mut Findings) -> Result<(), Stop> {
    let described = bucket.describe(timeout).await?;
    let server = bucket.client().await?.server_info();
    findings.ok("version", format!("NATS {}", server.version));
    findings.ok("max_payload", format!("messages of up to {} bytes", server.max_payload));
    let stream = format!("KV_{}", bucket.name);
    if described["error"]["err_code"] == 10059 {
        findings.error(
            "stream",
            format!("there is no stream `{stream}`"),
            "every call fails",
            "`idem schema migrate`, or create what `idem schema print nats` prints",
        );
        return Ok(());
    }
    match bucket.differences(None, timeout).await? {
        Some(found) if !found.is_empty() => findings.error(
            "stream",
            found.join("; "),
            "the store refuses the stream, because the stream could lose or change records",
            "`nats stream edit`, or create what `idem schema print nats` prints",
        ),
        _ => findings.ok("stream", "no setting that could lose or change a record"),
    }
    let config = &described["config"];
    protection(config, &stream, findings);
    replicas(&described, &stream, findings);
    room(&described, findings);
    findings.unknown(
        "sync_interval",
        "only an administrator sees it; by default a write is on the disk two minutes later",
        "for payments, set `sync_interval: always` in the configuration of each server",
    );
    Ok(())
}

/// Checks whether another program could remove records.
fn protection(config: &Value, stream: &str, findings: &mut Findings) {
    let is_on = |name: &str| config[name].as_bool().unwrap_or_default();
    if is_on("deny_delete") && !is_on("allow_rollup_hdrs") {
        return findings.ok("protection", "no message can be deleted by its number or by a header");
    }
    findings.warning(
        "protection",
        "`deny_delete` is off, or `allow_rollup_hdrs` is on",
        "a program with the right to publish can remove records, and their operations run again",
        &format!("`nats stream edit {stream} --no-allow-rollup --deny-delete`"),
    );
}

fn replicas(described: &Value, stream: &str, findings: &mut Findings) {
    let wanted = described["config"]["num_replicas"].as_u64().unwrap_or(1);
    if wanted < 3 {
        return findings.warning(
            "replicas",
            format!("{wanted}"),
            "the records are lost with the disk of one server, and their operations run again",
            &format!("in a cluster: `nats stream edit {stream} --replicas 3`"),
        );
    }
    let others = described["cluster"]["replicas"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_behind = |it: &&Value| !it["current"].as_bool().unwrap_or_default() || it["offline"].as_bool() == Some(true);
    let behind: Vec<_> = others.iter().filter(is_behind).filter_map(|it| it["name"].as_str()).collect();
    match behind.is_empty() {
        true => findings.ok("replicas", format!("{wanted}, all current")),
        false => findings.warning(
            "replicas",
            format!("{wanted}, of which these are away or behind: {}", behind.join(", ")),
            "if another server fails, the stream accepts no write until one of them is back",
            "`nats server report jetstream`",
        ),
    }
}

/// Checks how much of a limit is used: a full stream refuses every write that takes more room.
fn room(described: &Value, findings: &mut Findings) {
    let limits = [("max_bytes", "bytes"), ("max_msgs", "messages")];
    for (limit, used) in limits {
        let most =
            described["config"][limit].as_i64().and_then(|most| u64::try_from(most).ok()).filter(|most| *most > 0);
        let used = described["state"][used].as_u64().unwrap_or_default();
        if let Some(most) = most
            && used / 4 >= most / 5
        {
            return findings.warning(
                "room",
                format!("{used} of `{limit}` {most} are used"),
                "a full stream refuses new keys and most results: operations run again",
                &format!("raise `{limit}`, or shorten retentions"),
            );
        }
    }
    findings.ok("room", "the stream is not near a limit of its own");
}
