use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = seconds, store = store)]
async fn handler(store: &MemoryStore, seconds: u64, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
