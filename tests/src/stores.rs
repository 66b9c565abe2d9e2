//! Opens the store that a line of text names. A racer gets this line as an argument.

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_runtime::{RedisStore, Store, StoreError};

/// Opens the store that `spec` names. The store's time limit for answers is a little shorter than a third of `lease`.
///
/// - `sqlite PATH`
/// - `mysql URL TABLE`
/// - `postgres URL SCHEMA`
/// - `redis URL PREFIX`, of any topology that `RedisStore::connect` accepts
/// - `replicated URL PREFIX`, like `redis` with `min_replicas(1)`
/// - `dynamo ENDPOINT TABLE`, or `dynamo ENDPOINT TABLE SKEW`
/// - `nats URL BUCKET`, or `nats URL,URL,URL BUCKET REPLICAS`; subjects of an outbox may follow the number of replicas
/// - `wrapped URL PREFIX FOLDER`: all wrappers around a Redis, with objects in a folder
///
/// # Panics
/// If the store can't be opened.
pub async fn open(spec: &str, lease: Duration) -> Arc<dyn Store> {
    let words: Vec<&str> = spec.split(' ').collect();
    // The time limit is below the interval of renewals, so that a lease survives one lost answer.
    let answer = lease * 3 / 10;
    let redis = RedisStore::options().response_timeout(answer);
    match words[..] {
        ["redis", url, prefix] => {
            let options = redis.namespace(prefix);
            Arc::new(patiently(|| options.clone().connect(url)).await)
        }
        ["replicated", url, prefix] => {
            // A write waits for its answer and then for a replica, so both time limits together are shorter than
            // `answer`.
            let options = redis.namespace(prefix).response_timeout(answer / 2).min_replicas(1, answer / 4);
            Arc::new(patiently(|| options.clone().connect(url)).await)
        }
        #[cfg(feature = "sqlite")]
        ["sqlite", path] => {
            let options = idem_runtime::SqliteStore::options().busy_timeout(answer).response_timeout(answer);
            Arc::new(patiently(|| options.clone().open(path)).await)
        }
        #[cfg(feature = "mysql")]
        ["mysql", url, table] => {
            let options = idem_runtime::MySqlStore::options().table(table).response_timeout(answer);
            Arc::new(patiently(|| options.clone().connect(url)).await)
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
        #[cfg(feature = "nats")]
        ["nats", url, bucket, ref more @ ..] => {
            let mut options = idem_runtime::NatsStore::options().bucket(bucket).response_timeout(answer);
            if let Some(replicas) = more.first() {
                options = options.num_replicas(replicas.parse().expect("a number"));
            }
            if let Some(subjects) = more.get(1) {
                options = options.outbox(*subjects, Duration::from_secs(86_400));
            }
            Arc::new(patiently(|| options.clone().connect(url)).await)
        }
        #[cfg(feature = "wrappers")]
        ["wrapped", url, prefix, folder] => {
            let store = redis.namespace(prefix).connect(url).await.expect("the server answers");
            Arc::new(crate::wrapped::in_folder(store, folder))
        }
        _ => panic!("`{spec}` names no store"),
    }
}

/// Repeats `open` for up to five minutes, because a starting process must tolerate a store that is away or busy.
async fn patiently<S, F: Future<Output = Result<S, StoreError>>>(open: impl Fn() -> F) -> S {
    let started = Instant::now();
    loop {
        match open().await {
            Err(error) if error.is_transient() && started.elapsed() < Duration::from_secs(300) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            opened => break opened.expect("the store can be opened"),
        }
    }
}
