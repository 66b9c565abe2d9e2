use idem_runtime::{Error, MemoryStore, idempotent};

struct Bincode;

#[idempotent(key = "{id}", ttl = "7d", store = store, codec = Bincode)]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
