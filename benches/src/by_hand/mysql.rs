//! The protocol by hand in SQL for MySQL and MariaDB, prepared.

use std::sync::Arc;

use idem_runtime::MySqlStore;
use mysql_async::prelude::Queryable as _;
use mysql_async::{Conn, Opts, OptsBuilder, params};
use serde::Serialize;
use tokio::sync::Mutex;

use super::SqlByHand;
use super::postgres::{LEASE_MS, TTL_MS, key, owner};

/// The server's time in microseconds since 1970.
pub const NOW: &str = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))";
const RESERVE: &str = "\
    INSERT INTO hand_records (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, \
    first_seen_at, began_at, lapses_at, expires_at, listed_at) VALUES (:key, :owner, 1, 'pending', 1, 1, 0, :lease, :ttl, \
    NOW, NOW, NOW + :lease * 1000, NOW + (:lease + :ttl) * 1000, NOW + :ttl * 1000) ON DUPLICATE KEY UPDATE `key` = `key`";
const COMPLETE: &str = "\
    UPDATE hand_records SET state = 'completed', lease_ms = NULL, ttl_ms = NULL, codec = 'json', result = :result, \
    expires_at = NOW + :ttl * 1000 WHERE `key` = :key AND owner = :owner AND state = 'pending'";
const REPLAY: &str = "SELECT result FROM idem_records WHERE `key` = :key";

/// A connection and its prepared statements. First runs by hand have their own table; replays by hand read the
/// library's records.
pub struct ByHand {
    connection: Mutex<Conn>,
    reserve: String,
    complete: String,
}

impl ByHand {
    /// Opens this many connections, and creates the table of the first runs. The library's table must exist.
    pub async fn connections(url: &str, count: usize) -> Vec<Arc<Self>> {
        let mut first = connect(url).await;
        first.query_drop(MySqlStore::schema_sql("hand_records")).await.expect("makes the table");
        let mut connections = Vec::new();
        for _ in 0..count {
            let [reserve, complete] = [RESERVE, COMPLETE].map(|statement| statement.replace("NOW", NOW));
            connections.push(Arc::new(Self { connection: Mutex::new(connect(url).await), reserve, complete }));
        }
        connections
    }
}

impl SqlByHand for ByHand {
    async fn run<T: Serialize + Send>(&self, order_id: u64, handler: impl FnOnce() -> T + Send) -> T {
        assert_eq!(self.reserve(order_id).await, 1, "another owner holds the key");
        let result = handler();
        let json = serde_json::to_vec(&result).expect("encodes");
        let complete =
            params! { "key" => key(order_id), "owner" => owner(order_id), "result" => json, "ttl" => TTL_MS };
        let mut connection = self.connection.lock().await;
        connection.exec_drop(&*self.complete, complete).await.expect("answers");
        assert_eq!(connection.affected_rows(), 1, "another owner has taken over");
        result
    }

    async fn reserve(&self, order_id: u64) -> u64 {
        let reserve =
            params! { "key" => key(order_id), "owner" => owner(order_id), "lease" => LEASE_MS, "ttl" => TTL_MS };
        let mut connection = self.connection.lock().await;
        connection.exec_drop(&*self.reserve, reserve).await.expect("answers");
        connection.affected_rows()
    }

    async fn replay(&self, order_id: u64) -> Vec<u8> {
        let mut connection = self.connection.lock().await;
        let result = connection.exec_first(REPLAY, params! { "key" => key(order_id) }).await;
        result.expect("answers").expect("is finished")
    }
}

async fn connect(url: &str) -> Conn {
    // Over TCP, as the store: the driver would change to the server's Unix socket on this machine.
    let opts = OptsBuilder::from_opts(Opts::from_url(url).expect("a valid URL")).prefer_socket(false);
    Conn::new(opts).await.expect("connects")
}
