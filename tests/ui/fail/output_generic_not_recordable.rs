use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store, scope = "handler")]
async fn handler<T>(store: &MemoryStore, id: u32, value: T) -> Result<T, Error> {
    Ok(value)
}

fn main() {}
