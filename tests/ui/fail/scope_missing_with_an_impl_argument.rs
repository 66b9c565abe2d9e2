use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn ship(store: &MemoryStore, id: u32, order: &[impl ToString]) -> Result<String, Error> {
    Ok(order[0].to_string())
}

fn main() {}
