use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: Option<MemoryStore>, id: u32) -> Result<u32, Error> {
    drop(store);
    Ok(id)
}

fn main() {}
