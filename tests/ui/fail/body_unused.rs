#![deny(warnings)]

use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32, unused: u32, text: &str) -> Result<u32, Error> {
    let nothing = 0;
    Ok(id)
}

fn main() {
    drop(handler(&MemoryStore::new(), 1, 2, ""));
}
