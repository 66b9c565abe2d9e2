//! Opens stores by a line of text, so that processes that race can be told theirs.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{RedisOptions, RedisStore, Store};

/// How long hurried stores wait for an answer.
const HURRIED: Duration = Duration::from_secs(1);

/// The store that `spec` names:
///
/// - `sqlite PATH`
/// - `postgres URL SCHEMA`
/// - `redis URL PREFIX`, of any topology that `RedisStore::connect` knows
/// - `replicated URL PREFIX`, the same with `min_replicas(1)`
/// - `dynamo ENDPOINT TABLE`, or `dynamo ENDPOINT TABLE SKEW`
/// - `hurried …`: any of those, with a second for each answer
/// - `wrapped URL PREFIX FOLDER`: all wrappers around a Redis, with objects in a folder
///
/// # Panics
/// If it can't be opened.
pub async fn open(spec: &str) -> Arc<dyn Store> {
    let mut words: Vec<&str> = spec.split(' ').collect();
    let hurried = words[0] == "hurried";
    if hurried {
        words.remove(0);
    }
    let redis = match hurried {
        true => RedisStore::options().response_timeout(HURRIED),
        false => RedisStore::options(),
    };
    match words[..] {
        ["redis", url, prefix] => Arc::new(redis.prefix(prefix).connect(url).await.expect("the server is there")),
        ["replicated", url, prefix] => {
            let options = redis.prefix(prefix).min_replicas(1, Duration::from_secs(1));
            Arc::new(patiently(options, url).await)
        }
        #[cfg(feature = "sqlite")]
        ["sqlite", path] => {
            let options = idem_runtime::SqliteStore::options();
            let options = if hurried { options.busy_timeout(HURRIED) } else { options };
            Arc::new(options.open(path).await.expect("the file can be opened"))
        }
        #[cfg(feature = "postgres")]
        ["postgres", url, schema] => {
            let options = idem_runtime::PostgresStore::options().schema(schema);
            let options = if hurried { options.response_timeout(HURRIED) } else { options };
            // Whoever starts while the server restarts tries again.
            loop {
                match options.clone().connect(url).await {
                    Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(20)).await,
                    opened => break Arc::new(opened.expect("the server is there")),
                }
            }
        }
        #[cfg(feature = "dynamodb")]
        ["dynamo", endpoint, table, ref skew @ ..] => {
            let options = crate::dynamo::options();
            let options = if hurried { options.call_timeout(HURRIED) } else { options };
            let options = match skew.first() {
                Some(skew) => options.max_clock_skew(Duration::from_secs(skew.parse().expect("seconds"))),
                None => options,
            };
            Arc::new(options.open(crate::dynamo::client(&crate::dynamo::Wire::to(endpoint)), table))
        }
        #[cfg(feature = "wrappers")]
        ["wrapped", url, prefix, folder] => {
            let store = RedisStore::options().prefix(prefix).connect(url).await.expect("the server is there");
            Arc::new(crate::wrapped::in_folder(store, folder))
        }
        _ => panic!("`{spec}` names no store"),
    }
}

/// A process may start while a failover is under way, and has a minute then.
async fn patiently(options: RedisOptions, url: &str) -> RedisStore {
    for _ in 0..600 {
        match options.clone().connect(url).await {
            Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(100)).await,
            connected => return connected.expect("the server is there"),
        }
    }
    panic!("no server at `{url}`");
}
