use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: String) -> Result<u32, Error> {
    drop(id);
    Ok(id.len() as u32)
}

fn main() {}
