use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}{name}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32, name: &str) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
