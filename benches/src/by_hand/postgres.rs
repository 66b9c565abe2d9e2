//! The protocol by hand in SQL, prepared.

use std::sync::Arc;

use idem_runtime::PostgresStore;
use serde::Serialize;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Statement};

use super::SqlByHand;
use crate::Receipt;

pub(super) const LEASE_MS: i64 = 30_000;
pub(super) const TTL_MS: i64 = 7 * 86_400_000;
pub(super) const RESERVE: &str = "\
    INSERT INTO hand.records (key, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, \
    first_seen_at, began_at, lapses_at, expires_at, listed_at) VALUES ($1, $2, 1, 'pending', 1, 1, false, $3::int8, $4::int8, \
    now(), now(), now() + $3 * interval '1 ms', now() + ($3 + $4) * interval '1 ms', now() + $4 * interval '1 ms') \
    ON CONFLICT (key) DO NOTHING";
pub(super) const COMPLETE: &str = "\
    UPDATE hand.records SET state = 'completed', lease_ms = NULL, ttl_ms = NULL, codec = 'json', result = $3, \
    expires_at = now() + $4::int8 * interval '1 ms' WHERE key = $1 AND owner = $2 AND state = 'pending'";
const RESERVE_MANY: &str = "\
    INSERT INTO hand.records (key, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, \
    first_seen_at, began_at, lapses_at, expires_at, listed_at) SELECT key, owner, 1, 'pending', 1, 1, false, $3::int8, \
    $4::int8, now(), now(), now() + $3 * interval '1 ms', now() + ($3 + $4) * interval '1 ms', \
    now() + $4 * interval '1 ms' FROM unnest($1::text[], $2::bytea[]) AS u (key, owner) ON CONFLICT (key) DO NOTHING";
const COMPLETE_MANY: &str = "\
    UPDATE hand.records AS r SET state = 'completed', lease_ms = NULL, ttl_ms = NULL, codec = 'json', result = u.result, \
    expires_at = now() + $4::int8 * interval '1 ms' FROM unnest($1::text[], $2::bytea[], $3::bytea[]) \
    AS u (key, owner, result) WHERE r.key = u.key AND r.owner = u.owner AND r.state = 'pending'";
const REPLAY: &str = "SELECT result FROM idem.records WHERE key = $1";
const REPLAY_WHOLE: &str = "\
    SELECT format, state, owner, attempt, attempts_used, fingerprint, on_crash_fail, lease_ms, ttl_ms, codec, result, \
    result_bytes, lapses_at, expires_at > statement_timestamp(), began_at, traceparent, decided_by, decided_reason, begun \
    FROM idem.records WHERE key = $1";
const BLOG_SCHEMA: &str = "\
    CREATE TABLE IF NOT EXISTS blog (key text PRIMARY KEY, status text NOT NULL, result jsonb, \
    created_at timestamptz NOT NULL DEFAULT now())";
const BLOG_RESERVE: &str = "INSERT INTO blog (key, status) VALUES ($1, 'pending') ON CONFLICT (key) DO NOTHING";
const BLOG_COMPLETE: &str = "UPDATE blog SET status = 'done', result = $2::text::jsonb WHERE key = $1";
const BLOG_REPLAY: &str = "SELECT result::text FROM blog WHERE key = $1 AND status = 'done'";

/// A connection and its prepared statements. First runs by hand have their own table; replays by hand read the
/// library's records.
pub struct ByHand {
    client: Client,
    reserve: Statement,
    complete: Statement,
    replay: Statement,
    replay_whole: Statement,
    blog: [Statement; 3],
}

impl ByHand {
    /// Opens this many connections, and creates the table of the first runs. The library's table must exist.
    pub async fn connections(url: &str, count: usize) -> Vec<Arc<Self>> {
        let client = connect(url).await;
        let made = client.batch_execute(&[&PostgresStore::schema_sql("hand"), ";", BLOG_SCHEMA].concat()).await;
        made.expect("makes the tables");
        let mut connections = Vec::new();
        for _ in 0..count {
            connections.push(Arc::new(Self::connect(url).await));
        }
        connections
    }

    async fn connect(url: &str) -> Self {
        let client = connect(url).await;
        let prepare = async |text| client.prepare(text).await.expect("prepares");
        let (reserve, complete) = (prepare(RESERVE).await, prepare(COMPLETE).await);
        let (replay, replay_whole) = (prepare(REPLAY).await, prepare(REPLAY_WHOLE).await);
        let blog = [prepare(BLOG_RESERVE).await, prepare(BLOG_COMPLETE).await, prepare(BLOG_REPLAY).await];
        Self { client, reserve, complete, replay, replay_whole, blog }
    }

    /// Makes a replay like the library's: reads all columns that decide whether the record may be replayed, and decodes
    /// the result.
    pub async fn replay_whole(&self, order_id: u64) -> Receipt {
        let row = self.client.query_one(&self.replay_whole, &[&key(order_id)]).await.expect("answers");
        let (state, is_kept): (&str, bool) = (row.get(1), row.get(13));
        assert!(state == "completed" && is_kept, "{state}");
        serde_json::from_slice(row.get(10)).expect("decodes")
    }

    /// Makes a call in the pattern of common blog posts: `INSERT … ON CONFLICT DO NOTHING`, then either the handler and
    /// `UPDATE`, or `SELECT`. Returns whether the handler ran. The pattern has no lease and no owner: a crash between
    /// the statements blocks the key forever.
    pub async fn as_in_blogs(&self, order_id: u64) -> (bool, Receipt) {
        let [reserve, complete, replay] = &self.blog;
        let key = order_id.to_string();
        if self.client.execute(reserve, &[&key]).await.expect("answers") == 1 {
            let receipt = Receipt::of(order_id);
            let json = serde_json::to_string(&receipt).expect("encodes");
            self.client.execute(complete, &[&key, &json]).await.expect("answers");
            return (true, receipt);
        }
        let row = self.client.query_one(replay, &[&key]).await.expect("is finished");
        (false, serde_json::from_str(row.get(0)).expect("decodes"))
    }
}

impl SqlByHand for ByHand {
    async fn run<T: Serialize + Send>(&self, order_id: u64, handler: impl FnOnce() -> T + Send) -> T {
        assert_eq!(self.reserve(order_id).await, 1, "another owner holds the key");
        let result = handler();
        let json = serde_json::to_vec(&result).expect("encodes");
        let owner = owner(order_id);
        let done = self.client.execute(&self.complete, &[&key(order_id), &owner.as_bytes(), &json, &TTL_MS]).await;
        assert_eq!(done.expect("answers"), 1, "another owner has taken over");
        result
    }

    async fn reserve(&self, order_id: u64) -> u64 {
        let (key, owner) = (key(order_id), owner(order_id));
        let made = self.client.execute(&self.reserve, &[&key, &owner.as_bytes(), &LEASE_MS, &TTL_MS]).await;
        made.expect("answers")
    }

    async fn replay(&self, order_id: u64) -> Vec<u8> {
        let rows = self.client.query(&self.replay, &[&key(order_id)]).await.expect("answers");
        assert_eq!(rows.len(), 1);
        rows[0].get(0)
    }
}

/// A hand-written client with minimal work: one statement reserves or completes all orders that have gathered while the
/// statement before it was in flight, and returns no records. Reservations and completions have a connection each. This
/// is a limit for many tasks only: with few tasks, one statement at a time is faster, because each commit serves more
/// orders.
#[derive(Clone)]
pub struct Gathered {
    reserve: UnboundedSender<Gathering>,
    complete: UnboundedSender<Gathering>,
}

/// An order, its result (empty in a reservation), and the channel to the task that waits.
struct Gathering {
    order_id: u64,
    json: Vec<u8>,
    done: oneshot::Sender<()>,
}

impl Gathered {
    /// Opens the connections. The table of [`ByHand::connections`] must exist.
    pub async fn connect(url: &str) -> Self {
        let (reserve, reserves) = mpsc::unbounded_channel();
        let (complete, completions) = mpsc::unbounded_channel();
        tokio::spawn(send_gathered(connect(url).await, RESERVE_MANY, false, reserves));
        tokio::spawn(send_gathered(connect(url).await, COMPLETE_MANY, true, completions));
        Self { reserve, complete }
    }

    /// Makes a first run of the order.
    pub async fn ship(&self, order_id: u64) -> Receipt {
        ask(&self.reserve, order_id, Vec::new()).await;
        let receipt = Receipt::of(order_id);
        ask(&self.complete, order_id, serde_json::to_vec(&receipt).expect("encodes")).await;
        receipt
    }
}

async fn ask(lane: &UnboundedSender<Gathering>, order_id: u64, json: Vec<u8>) {
    let (done, answer) = oneshot::channel();
    assert!(lane.send(Gathering { order_id, json, done }).is_ok(), "the connection is open");
    answer.await.expect("answers");
}

/// Runs `text` for all orders that have gathered, until all senders are gone.
async fn send_gathered(client: Client, text: &str, has_results: bool, mut gathered: UnboundedReceiver<Gathering>) {
    let statement = client.prepare(text).await.expect("prepares");
    let mut batch = Vec::new();
    while gathered.recv_many(&mut batch, 256).await > 0 {
        let keys: Vec<_> = batch.iter().map(|it| key(it.order_id)).collect();
        let owners: Vec<_> = batch.iter().map(|it| owner(it.order_id).into_bytes()).collect();
        let results: Vec<_> = batch.iter().map(|it| it.json.as_slice()).collect();
        let third: &(dyn ToSql + Sync) = if has_results { &results } else { &LEASE_MS };
        let changed = client.execute(&statement, &[&keys, &owners, third, &TTL_MS]).await.expect("answers");
        assert_eq!(changed, batch.len() as u64, "another owner holds a key");
        for waiting in batch.drain(..) {
            waiting.done.send(()).expect("a task waits");
        }
        // Tasks that were just answered run first, so that the next statement includes their next orders.
        tokio::task::yield_now().await;
    }
}

pub(super) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connects");
    tokio::spawn(async move { connection.await.ok() });
    client
}

pub(super) fn key(order_id: u64) -> String {
    format!("1/bench::ship/order:{order_id}")
}

pub(super) fn owner(order_id: u64) -> String {
    format!("{order_id:016}")
}
