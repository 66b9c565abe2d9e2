//! Answers of the nodes about their cluster: addresses, views and redirects.

use redis::{Pipeline, Value};

use super::super::failure::{ErrorReply, ExchangeFailure};
use super::super::place::ServerConnection;
use super::slots::SLOTS;

/// Host and port of a node.
pub(super) type Address = (String, u16);

/// The node to which an operation is redirected.
pub(super) struct Redirect {
    pub(super) to: Address,
    /// True if only this operation is redirected, because its slot is still migrating.
    pub(super) asking: bool,
}

impl Redirect {
    /// Reads `MOVED slot host:port` or `ASK slot host:port`. A missing host means the node that answered.
    pub(super) fn read(failure: &ExchangeFailure, from: &str) -> Option<Self> {
        let ExchangeFailure::Refused(ErrorReply { code, message }) = failure else { return None };
        let asking = match &**code {
            "MOVED" => false,
            "ASK" => true,
            _ => return None,
        };
        let (host, port) = message.split_ascii_whitespace().nth(1)?.rsplit_once(':')?;
        let host = if host.is_empty() { from } else { host.trim_start_matches('[').trim_end_matches(']') };
        Some(Self { to: (host.to_owned(), port.parse().ok()?), asking })
    }
}

/// One node's view of the cluster.
pub(super) struct View {
    /// Number of the cluster's configuration; each change of the cluster increments it.
    pub(super) epoch: u64,
    pub(super) ranges: Vec<SlotRange>,
}

/// A range of slots, and the nodes that hold these slots.
pub(super) struct SlotRange {
    pub(super) first: u16,
    pub(super) last: u16,
    /// The primary, then its replicas.
    pub(super) nodes: Vec<Address>,
}

impl View {
    /// Returns the view of the node at `host`; `None` if the node does not answer, or reports that the cluster is not
    /// `ok`.
    pub(super) async fn ask(connection: &ServerConnection, host: &str) -> Option<Self> {
        let mut questions = Pipeline::new();
        questions.cmd("CLUSTER").arg("INFO");
        questions.cmd("CLUSTER").arg("SLOTS");
        let answers = connection.many(&questions).await.ok()?;
        let [info, slots] = <[Value; 2]>::try_from(answers).ok()?;
        Self::read(&text(&info)?, &slots, host)
    }

    fn read(info: &str, slots: &Value, from: &str) -> Option<Self> {
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        if field("cluster_state") != Some("ok") {
            return None;
        }
        let epoch = field("cluster_current_epoch")?.parse().ok()?;
        let Value::Array(slots) = slots else { return None };
        let ranges = slots.iter().map(|range| SlotRange::read(range, from)).collect::<Option<Vec<_>>>()?;
        (!ranges.is_empty()).then_some(Self { epoch, ranges })
    }
}

impl SlotRange {
    /// Reads `[first, last, [host, port, id, …], replica, …]`.
    fn read(range: &Value, from: &str) -> Option<Self> {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), nodes @ ..] = &parts[..] else { return None };
        let slot = |number: &i64| u16::try_from(*number).ok().filter(|slot| *slot < SLOTS);
        let (first, last) = (slot(first)?, slot(last)?);
        let nodes: Vec<Address> = nodes.iter().filter_map(|node| address(node, from)).collect();
        (first <= last && !nodes.is_empty()).then_some(Self { first, last, nodes })
    }
}

/// Returns the address of a node. A missing host means the host of the node that was asked.
fn address(node: &Value, from: &str) -> Option<Address> {
    let Value::Array(parts) = node else { return None };
    let [host, Value::Int(port), ..] = &parts[..] else { return None };
    let host = text(host).filter(|host| !host.is_empty() && host != "?").unwrap_or_else(|| from.to_owned());
    Some((host, u16::try_from(*port).ok().filter(|port| *port > 0)?))
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(text) => Some(String::from_utf8_lossy(text).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_of_cluster_nodes_are_parsed() {
        let read = |code: &str, message: &str| {
            let failure = ExchangeFailure::Refused(ErrorReply { code: code.into(), message: message.into() });
            Redirect::read(&failure, "here").map(|redirect| (redirect.to.0, redirect.to.1, redirect.asking))
        };
        assert_eq!(read("MOVED", "3999 127.0.0.1:6381"), Some(("127.0.0.1".into(), 6381, false)));
        assert_eq!(read("ASK", "3999 [::1]:6381"), Some(("::1".into(), 6381, true)));
        assert_eq!(read("MOVED", "3999 :6381"), Some(("here".into(), 6381, false)));
        assert_eq!(read("CLUSTERDOWN", "Hash slot not served"), None);
        assert_eq!(read("MOVED", "nonsense"), None);
    }

    #[test]
    fn the_view_of_a_node_is_read_only_if_its_cluster_is_healthy() {
        let node = |host: Value, port| Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".to_vec())]);
        let named = |host: &str| Value::BulkString(host.as_bytes().to_vec());
        let range =
            |first, last, nodes: Vec<Value>| Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat());
        let slots = Value::Array(vec![
            range(0, 9, vec![node(named("a"), 1), node(named("b"), 2)]),
            range(10, 16_383, vec![node(Value::Nil, 3)]),
        ]);
        let info = "cluster_state:ok\r\ncluster_current_epoch:7\r\n";
        let view = View::read(info, &slots, "here").unwrap();
        assert_eq!(view.epoch, 7);
        assert_eq!(view.ranges[0].nodes, [("a".to_owned(), 1), ("b".to_owned(), 2)]);
        assert_eq!((view.ranges[1].last, &view.ranges[1].nodes[0]), (16_383, &("here".to_owned(), 3)));
        assert!(View::read(&info.replace("ok", "fail"), &slots, "here").is_none());
        assert!(View::read(info, &Value::Array(vec![range(0, 16_384, vec![node(named("a"), 1)])]), "").is_none());
        assert!(View::read(info, &Value::Array(Vec::new()), "").is_none());
    }
}
