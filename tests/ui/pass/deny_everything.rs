//! A library under strict lints: the generated code causes no report.
#![deny(warnings, missing_docs, unreachable_pub, unused, nonstandard_style, future_incompatible, let_underscore, keyword_idents)]
#![deny(unused_qualifications, unused_results, unused_lifetimes, single_use_lifetimes, elided_lifetimes_in_paths)]
#![deny(variant_size_differences, trivial_casts, trivial_numeric_casts, non_ascii_idents, missing_debug_implementations)]
#![forbid(unsafe_code, unused_imports, unused_variables, unused_mut, unreachable_code, dead_code, unused_must_use)]

use idem_runtime::{Error, MemoryStore, idempotent};

/// A handler.
#[idempotent(key = "{id}:{name}", ttl = "7d", store = store, fingerprint = name, max_attempts = 3, lease = "1m")]
pub async fn handler(store: &MemoryStore, mut id: u32, name: &str) -> Result<u32, Error> {
    if name.is_empty() {
        return Ok(0);
    }
    id += 1;
    Ok(id)
}

fn main() {
    drop(handler(&MemoryStore::new(), 1, "name"));
}
