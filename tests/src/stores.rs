//! Opens stores by a line of text, which can be an argument of a racing process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_runtime::{RedisStore, Store, StoreError};

/// Opens the store that `spec` names. Its time limit for answers follows from `lease`: a little less than a beat.
///
/// - `sqlite PATH`
/// - `postgres URL SCHEMA`
/// - `redis URL PREFIX`, of any topology that `RedisStore::connect` accepts
/// - `replicated URL PREFIX`, the same with `min_replicas(1)`
/// - `dynamo ENDPOINT TABLE`, or `dynamo ENDPOINT TABLE SKEW`
/// - `wrapped URL PREFIX FOLDER`: all wrappers around a Redis, with objects in a folder
///
/// # Panics
/// If the store can't be opened.
pub async fn open(spec: &str, lease: Duration) -> Arc<dyn Store> {
    let words: Vec<&str> = spec.split(' ').collect();
    // A time limit below a beat, so that a lease survives an answer that does not come.
    let answer = lease * 3 / 10;
    let redis = RedisStore::options().response_timeout(answer);
    match words[..] {
        ["redis", url, prefix] => {
            let options = redis.namespace(prefix);
            Arc::new(patiently(|| options.clone().connect(url)).await)
        }
        ["replicated", url, prefix] => {
            // Both limits together are as long as the limit of any other answer.
            let options = redis.namespace(prefix).response_timeout(answer / 2).min_replicas(1, answer / 4);
            Arc::new(patiently(|| options.clone().connect(url)).await)
        }
        #[cfg(feature = "sqlite")]
        ["sqlite", path] => {
            let options = idem_runtime::SqliteStore::options().busy_timeout(answer).response_timeout(answer);
            Arc::new(patiently(|| options.clone().open(path)).await)
        }
        #[cfg(feature = "postgres")]
        ["postgres", url, schema] => {
            let options = idem_runtime::PostgresStore::options().schema(schema).response_timeout(answer);
            Arc::new(patiently(|| options.clone().connect(url)).await)
        }
        #[cfg(feature = "dynamodb")]
        ["dynamo", endpoint, table, ref skew @ ..] => {
            let options = crate::dynamo::options().response_timeout(answer);
            let options = match skew.first() {
                Some(skew) => options.max_clock_skew(Duration::from_secs(skew.parse().expect("seconds"))),
                None => options,
            };
            let client = || crate::dynamo::client(&crate::dynamo::Wire::to(endpoint));
            Arc::new(options.upkeep_client(client()).build(client(), table))
        }
        #[cfg(feature = "wrappers")]
        ["wrapped", url, prefix, folder] => {
            let store = redis.namespace(prefix).connect(url).await.expect("the server is there");
            Arc::new(crate::wrapped::in_folder(store, folder))
        }
        _ => panic!("`{spec}` names no store"),
    }
}

/// Repeats `open` for five minutes: a store that is away, or busy with other processes, must not fail a process that
/// starts.
async fn patiently<S, F: Future<Output = Result<S, StoreError>>>(open: impl Fn() -> F) -> S {
    let started = Instant::now();
    loop {
        match open().await {
            Err(error) if error.is_transient() && started.elapsed() < Duration::from_secs(300) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            opened => break opened.expect("the store is there"),
        }
    }
}
