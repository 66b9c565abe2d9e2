//! Opens stores by a line of text, so that processes that race can be told theirs.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{RedisStore, Store};

/// The store that `spec` names:
///
/// - `redis URL PREFIX`: of any topology that `RedisStore::connect` knows
/// - `replicated URL PREFIX`: the same, with `min_replicas(1)`
///
/// # Panics
/// If it can't be opened.
pub async fn open(spec: &str) -> Arc<dyn Store> {
    let words: Vec<&str> = spec.split(' ').collect();
    match words[..] {
        ["redis", url, prefix] => {
            Arc::new(RedisStore::options().prefix(prefix).connect(url).await.expect("the server is there"))
        }
        ["replicated", url, prefix] => {
            let options = RedisStore::options().prefix(prefix).min_replicas(1, Duration::from_secs(1));
            Arc::new(options.connect(url).await.expect("the server is there"))
        }
        _ => panic!("`{spec}` names no store"),
    }
}
