//! Opens stores by a line of text, so that processes that race can be told theirs.

use std::sync::Arc;

use idem_runtime::{RedisStore, Store};

/// The store that `spec` names:
///
/// - `redis URL PREFIX`
/// - `sqlite PATH`
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
        #[cfg(feature = "sqlite")]
        ["sqlite", path] => Arc::new(idem_runtime::SqliteStore::open(path).await.expect("the file can be opened")),
        #[cfg(feature = "postgres")]
        ["postgres", url, schema] => {
            let options = idem_runtime::PostgresStore::options().schema(schema);
            Arc::new(options.connect(url).await.expect("the server is there"))
        }
        _ => panic!("`{spec}` names no store"),
    }
}
