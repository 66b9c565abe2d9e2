use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store, scope = "idem::steps")]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
