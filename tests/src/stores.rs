//! Opens stores by a line of text, so that processes that race can be told theirs.

use std::sync::Arc;

use idem_runtime::{RedisStore, Store};

/// The store that `spec` names:
///
/// - `redis URL PREFIX`
/// - `wrapped URL PREFIX FOLDER`: all wrappers around a Redis, with objects in a folder
///
/// # Panics
/// If it can't be opened.
pub async fn open(spec: &str) -> Arc<dyn Store> {
    let words: Vec<&str> = spec.split(' ').collect();
    match words[..] {
        ["redis", url, prefix] => {
            Arc::new(RedisStore::options().prefix(prefix).connect(url).await.expect("the server is there"))
        }
        #[cfg(feature = "wrappers")]
        ["wrapped", url, prefix, folder] => {
            let store = RedisStore::options().prefix(prefix).connect(url).await.expect("the server is there");
            Arc::new(crate::wrapped::in_folder(store, folder))
        }
        _ => panic!("`{spec}` names no store"),
    }
}
