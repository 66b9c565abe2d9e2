//! The protocol by hand over one multiplexed connection of `redis`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_runtime::{Codec, Json, Policy};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo};
use serde::de::DeserializeOwned;

use crate::Receipt;

pub(super) const LEASE: Duration = Policy::DEFAULT_LEASE;
/// Retention of results, also in the policies of the benches' handlers.
pub const TTL: Duration = Duration::from_secs(7 * 86_400);
pub(super) const OWNER_CHECKED_SET: &str = "\
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end \
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) \
    return 1";

/// A connection, and the script that completes a first run. The hand-written side uses the library's keys, so that it
/// can read the library's records.
#[derive(Clone)]
pub struct ByHand {
    connection: MultiplexedConnection,
    script: Arc<str>,
    owners: Arc<AtomicU64>,
}

impl ByHand {
    /// Connects with the client's default socket, or with `TCP_NODELAY`.
    pub async fn connect(url: &str, nodelay: bool) -> Self {
        let info = url.into_connection_info().expect("a valid URL");
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(nodelay));
        let client = Client::open(info).expect("a valid URL");
        // The time limit is long, so that a busy machine slows a bench down and doesn't end it.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.expect("connects");
        let script =
            redis::cmd("SCRIPT").arg("LOAD").arg(OWNER_CHECKED_SET).query_async::<String>(&mut connection).await;
        Self { connection, script: script.expect("loads").into(), owners: Arc::default() }
    }

    async fn reserve(&mut self, key: &str, owner: &str) -> Option<Vec<u8>> {
        let mut set = redis::cmd("SET");
        set.arg(key).arg(owner).arg("NX").arg("GET").arg("PX").arg(millis(LEASE));
        set.query_async(&mut self.connection).await.expect("answers")
    }

    /// Makes a first run: `SET key owner NX GET PX lease`, the handler, and an owner-checked `SET` as a script.
    pub async fn ship(&mut self, order_id: u64) -> Receipt {
        self.run(order_id, || Receipt::of(order_id)).await
    }

    /// Makes a first run with the given handler, whose result can have any type.
    pub async fn run<T: serde::Serialize>(&mut self, order_id: u64, handler: impl FnOnce() -> T) -> T {
        let key = key(order_id);
        let owner = format!("{:016}", self.owners.fetch_add(1, Ordering::Relaxed));
        assert_eq!(self.reserve(&key, &owner).await, None, "another owner holds the key");
        let result = handler();
        let json = serde_json::to_vec(&result).expect("encodes");
        let mut complete = redis::cmd("EVALSHA");
        complete.arg(&*self.script).arg(1).arg(&key).arg(&owner).arg(json).arg(millis(TTL));
        let done: u64 = complete.query_async(&mut self.connection).await.expect("answers");
        assert_eq!(done, 1, "another owner has taken over");
        result
    }

    /// Makes a replay: `GET` of the record, decoded by the library's codec.
    pub async fn replay<T: DeserializeOwned>(&mut self, order_id: u64) -> T {
        let mut get = redis::cmd("GET");
        get.arg(key(order_id));
        let record: Vec<u8> = get.query_async(&mut self.connection).await.expect("answers");
        Json::decode(result(&record)).expect("decodes")
    }

    /// Makes a call of an order that another owner has reserved: `SET key owner NX GET PX lease` returns that owner's
    /// value.
    pub async fn in_progress(&mut self, order_id: u64) -> Vec<u8> {
        self.reserve(&key(order_id), "0000000000000000").await.expect("somebody has it")
    }

    /// Makes a call in the pattern of common blog posts: `SET NX`, then either the handler and `SET`, or `GET`. Returns
    /// whether the handler ran.
    ///
    /// No owner is checked: a handler that goes on after its lease overwrites the result of its successor.
    pub async fn as_in_blogs(&mut self, order_id: u64) -> (bool, Receipt) {
        let key = format!("blog:{order_id}");
        let mut set = redis::cmd("SET");
        set.arg(&key).arg("pending").arg("NX").arg("PX").arg(millis(LEASE));
        let reserved: Option<String> = set.query_async(&mut self.connection).await.expect("answers");
        if reserved.is_some() {
            let receipt = Receipt::of(order_id);
            let json = serde_json::to_vec(&receipt).expect("encodes");
            let mut set = redis::cmd("SET");
            set.arg(&key).arg(json).arg("PX").arg(millis(TTL));
            set.exec_async(&mut self.connection).await.expect("answers");
            return (true, receipt);
        }
        let found: Vec<u8> =
            redis::cmd("GET").arg(&key).query_async(&mut self.connection).await.expect("somebody has it");
        (false, serde_json::from_slice(&found).expect("is finished"))
    }
}

/// Returns the result in a finished record: the bytes after the name of its codec. The other parts of the record are
/// not parsed.
fn result(record: &[u8]) -> &[u8] {
    const NAME: &[u8] = b"\x04json";
    // The search starts at byte 48: owner token and counters come before it and may contain any bytes.
    let at = record.get(48..).and_then(|rest| rest.windows(NAME.len()).position(|it| it == NAME));
    &record[48 + at.expect("finished, as JSON") + NAME.len()..]
}

pub(super) fn key(order_id: u64) -> String {
    format!("idem:1/bench::ship/order:{order_id}")
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).expect("short enough")
}
