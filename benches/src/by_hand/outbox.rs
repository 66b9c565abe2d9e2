//! A table of messages by hand in PostgreSQL, with relays.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_runtime::PostgresStore;
use tokio_postgres::{Client, Statement};

use super::postgres::{COMPLETE, LEASE_MS, RESERVE, TTL_MS, connect, key, owner};
use crate::Receipt;

const SCHEMA: &str = "\
    CREATE TABLE IF NOT EXISTS hand.outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, destination text NOT NULL, \
    key text NOT NULL, body bytea NOT NULL)";
const TAKE: &str = "\
    DELETE FROM hand.outbox WHERE id IN (SELECT id FROM hand.outbox ORDER BY id LIMIT 256 FOR UPDATE SKIP LOCKED) \
    RETURNING body";

/// A connection that ships orders, and writes a message with each of them.
pub struct Publisher {
    client: Client,
    reserve: Statement,
    complete: Statement,
}

impl Publisher {
    /// Opens this many connections, and creates the tables.
    pub async fn connections(url: &str, count: usize) -> Vec<Arc<Self>> {
        let client = connect(url).await;
        let made = client.batch_execute(&[&PostgresStore::schema_sql("hand"), ";", SCHEMA].concat()).await;
        made.expect("makes the tables");
        let complete = format!(
            "WITH done AS ({COMPLETE} RETURNING key) INSERT INTO hand.outbox (destination, key, body) \
             SELECT 'orders.shipped', done.key, $3 FROM done"
        );
        let mut connections = Vec::new();
        for _ in 0..count {
            let client = connect(url).await;
            let prepare = async |text: &str| client.prepare(text).await.expect("prepares");
            let (reserve, complete) = (prepare(RESERVE).await, prepare(&complete).await);
            connections.push(Arc::new(Self { client, reserve, complete }));
        }
        connections
    }

    /// Makes a first run, whose second statement also writes the message.
    pub async fn ship(&self, order_id: u64) -> Receipt {
        let (key, owner) = (key(order_id), owner(order_id));
        let made = self.client.execute(&self.reserve, &[&key, &owner.as_bytes(), &LEASE_MS, &TTL_MS]).await;
        assert_eq!(made.expect("answers"), 1, "another owner holds the key");
        let receipt = Receipt::of(order_id);
        let json = serde_json::to_vec(&receipt).expect("encodes");
        let done = self.client.execute(&self.complete, &[&key, &owner.as_bytes(), &json, &TTL_MS]).await;
        assert_eq!(done.expect("answers"), 1, "another owner has taken over");
        receipt
    }
}

/// A broker that confirms each message immediately, and counts it.
#[derive(Clone, Default)]
pub struct Broker(Arc<AtomicU64>);

impl Broker {
    /// Takes a message. As with a client of a broker, the confirmation comes in a later poll.
    pub async fn publish(&self, body: &[u8]) {
        tokio::task::yield_now().await;
        assert!(!body.is_empty());
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of messages.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A connection that sends messages and deletes them.
pub struct Relay {
    client: Client,
    take: Statement,
}

impl Relay {
    /// Opens the connection. The tables must exist.
    pub async fn connect(url: &str) -> Self {
        let client = connect(url).await;
        let take = client.prepare(TAKE).await.expect("prepares");
        Self { client, take }
    }

    /// Gives each message to `broker`, and deletes it after that. Ends with the connection.
    pub async fn run(mut self, broker: Broker) {
        // An idle relay asks every few milliseconds, as relays do.
        while let Ok(taken) = self.pass(&broker).await {
            if taken == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    async fn pass(&mut self, broker: &Broker) -> Result<usize, tokio_postgres::Error> {
        let transaction = self.client.transaction().await?;
        let taken = transaction.query(&self.take, &[]).await?;
        for row in &taken {
            broker.publish(row.get(0)).await;
        }
        transaction.commit().await?;
        Ok(taken.len())
    }
}
