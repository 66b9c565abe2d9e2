//! Streams of the example `redis_streams`.

use std::path::Path;
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::streams::StreamRangeReply;
use redis::{AsyncTypedCommands as _, RedisResult};

use crate::fleet::{self, Failure, Headers, Run};
use crate::servers::{Server, ServerProcess};

/// The consumer group.
pub const GROUP: &str = "payments";

/// Returns the name of the stream of the run.
pub fn stream(run: &Run) -> String {
    format!("{}:orders", run.name)
}

/// Returns the name of the stream of messages that are set aside.
pub fn dead_letters(run: &Run) -> String {
    format!("{}:dead", run.name)
}

/// Returns a connection that is made at its first use, and again whenever it is lost.
///
/// # Errors
/// If the URL is wrong.
pub fn connect(url: &str) -> RedisResult<ConnectionManager> {
    let config = ConnectionManagerConfig::new()
        .set_response_timeout(Some(Duration::from_secs(5)))
        .set_connection_timeout(Some(Duration::from_secs(1)))
        .set_number_of_retries(1);
    ConnectionManager::new_lazy_with_config(redis::Client::open(url)?, config)
}

/// Redis, as the example's broker.
pub struct Broker;

impl fleet::Broker for Broker {
    const NAME: &str = "redis_streams";
    const URL: Option<&str> = Some("redis://127.0.0.1:6379");
    const IS_STORE: bool = true;
    const HAS_DELAYS: bool = false;

    fn start(&self, _: &str, folder: &Path) -> Result<Box<dyn Server>, Failure> {
        Ok(Box::new(ServerProcess::redis(folder)?))
    }

    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
        let mut redis = connect(&run.url)?;
        let made: RedisResult<()> = redis.xgroup_create_mkstream(stream(run), GROUP, "0").await.map(drop);
        if let Err(error) = made
            && error.code() != Some("BUSYGROUP")
        {
            return Err(error.into());
        }
        for message in messages {
            redis.xadd(stream(run), "*", &[("event", message)]).await?;
        }
        Ok(())
    }

    async fn dead_letters(&self, run: &Run) -> Result<Vec<Headers>, Failure> {
        let entries: StreamRangeReply = connect(&run.url)?.xrange_all(dead_letters(run)).await?;
        let fields = entries.ids.iter().map(|entry| {
            let names = entry.map.keys();
            names.filter_map(|name| Some((name.clone(), entry.get(name)?))).collect()
        });
        Ok(fields.collect())
    }

    async fn clean_up(&self, run: &Run) -> Result<(), Failure> {
        let mut redis = connect(&run.url)?;
        let mut keys = Vec::new();
        let mut found = redis.scan_match::<_, String>(format!("{}:*", run.name)).await?;
        while let Some(key) = found.next_item().await {
            keys.push(key?);
        }
        drop(found);
        Ok(redis.unlink(keys).await.map(drop)?)
    }
}
