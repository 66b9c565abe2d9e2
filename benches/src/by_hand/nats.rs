//! The protocol by hand on JetStream: two publications that name the sequence number of the last message, and a direct
//! read.

use std::sync::Arc;

use async_nats::jetstream::stream::{Config, DiscardPolicy, Stream};
use async_nats::jetstream::{self, Context};
use async_nats::{HeaderMap, HeaderValue};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Receipt;

/// A stream of its own, with the settings of the library's stream.
#[derive(Clone)]
pub struct ByHand {
    context: Arc<Context>,
    stream: Arc<Stream>,
    /// True if the messages have the retention and the size of the library's: the limit of what it can reach.
    is_limit: bool,
}

/// Bytes of the library's record in front of a result.
const RECORD: usize = 100;

impl ByHand {
    /// Connects, and creates the stream.
    pub async fn connect(url: &str) -> Self {
        let context = jetstream::new(async_nats::connect(url).await.expect("connects"));
        let stream = context.get_or_create_stream(Config {
            name: "HAND".to_owned(),
            subjects: vec!["hand.>".to_owned()],
            max_messages_per_subject: 1,
            discard: DiscardPolicy::New,
            allow_direct: true,
            ..Config::default()
        });
        let stream = Arc::new(stream.await.expect("makes the stream"));
        Self { stream, context: Arc::new(context), is_limit: false }
    }

    /// Connects, and creates a stream whose messages have a retention each.
    pub async fn limit(url: &str) -> Self {
        let client = async_nats::connect(url).await.expect("connects");
        let settings = r#"{"name":"LIMIT","subjects":["limit.>"],"storage":"file","retention":"limits","discard":"new",
            "max_msgs_per_subject":1,"allow_direct":true,"allow_msg_ttl":true,"num_replicas":1}"#;
        client.request("$JS.API.STREAM.CREATE.LIMIT", settings.into()).await.expect("answers");
        let context = jetstream::new(client);
        let stream = Arc::new(context.get_stream("LIMIT").await.expect("makes the stream"));
        Self { stream, context: Arc::new(context), is_limit: true }
    }

    fn subject(&self, order_id: u64) -> String {
        format!("{}.bench.order.{order_id}", if self.is_limit { "limit" } else { "hand" })
    }

    /// Publishes `body` in place of message number `expected`; `None` if another message is the last.
    async fn put(&self, order_id: u64, expected: u64, mut body: Vec<u8>) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", HeaderValue::from(expected));
        if self.is_limit {
            headers.insert("Nats-TTL", "604800s");
            body.resize(body.len() + RECORD, b' ');
        }
        let published = self.context.publish_with_headers(self.subject(order_id), headers, body.into()).await;
        Some(published.expect("is sent").await.ok()?.sequence)
    }

    /// Makes a first run: a pending message, the handler, and its result in place of the pending message.
    pub async fn ship(&self, order_id: u64) -> Receipt {
        self.run(order_id, || Receipt::of(order_id)).await
    }

    /// Makes a first run with the given handler, whose result can have any type.
    pub async fn run<T: Serialize>(&self, order_id: u64, handler: impl FnOnce() -> T) -> T {
        let pending = self.put(order_id, 0, b"pending: 0123456789abcdef".to_vec()).await.expect("a new order");
        let result = handler();
        let json = serde_json::to_vec(&result).expect("encodes");
        self.put(order_id, pending, json).await.expect("still ours");
        result
    }

    /// Reads the result of an order.
    pub async fn replay<T: DeserializeOwned>(&self, order_id: u64) -> T {
        serde_json::from_slice(&self.read(order_id).await).expect("decodes")
    }

    /// Tries to reserve an order, and reads the message that is in the way.
    pub async fn in_progress(&self, order_id: u64) -> Vec<u8> {
        assert_eq!(self.put(order_id, 0, b"pending: fedcba9876543210".to_vec()).await, None, "the order is taken");
        self.read(order_id).await
    }

    async fn read(&self, order_id: u64) -> Vec<u8> {
        self.stream.direct_get_last_for_subject(self.subject(order_id)).await.expect("a message").payload.to_vec()
    }
}

/// Returns the bytes that the streams of the server's account take.
pub async fn stored_bytes(url: &str) -> u64 {
    let context = jetstream::new(async_nats::connect(url).await.expect("connects"));
    context.query_account().await.expect("answers").storage
}
