//! Opens stores by a line of text, so that processes that race can be told theirs.

use std::sync::Arc;
#[cfg(feature = "postgres")]
use std::time::Duration;

use idem_runtime::{RedisStore, Store};

/// The store that `spec` names:
///
/// - `redis URL PREFIX`
/// - `postgres URL SCHEMA`
///
/// # Panics
/// If it can't be opened.
pub async fn open(spec: &str) -> Arc<dyn Store> {
    let words: Vec<&str> = spec.split(' ').collect();
    match words[..] {
        ["redis", url, prefix] => {
            Arc::new(RedisStore::options().prefix(prefix).connect(url).await.expect("the server is there"))
        }
        #[cfg(feature = "postgres")]
        ["postgres", url, schema] => {
            let options = idem_runtime::PostgresStore::options().schema(schema);
            // Whoever starts while the server restarts tries again.
            loop {
                match options.clone().connect(url).await {
                    Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(20)).await,
                    opened => break Arc::new(opened.expect("the server is there")),
                }
            }
        }
        _ => panic!("`{spec}` names no store"),
    }
}
