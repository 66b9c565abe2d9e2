use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store, scope = "handler")]
async fn handler<K>(store: &MemoryStore, id: K) -> Result<u32, Error> {
    drop(id);
    Ok(0)
}

fn main() {}
