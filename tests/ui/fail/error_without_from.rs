use idem_runtime::{MemoryStore, idempotent};

struct ShipError;

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, ShipError> {
    if id == 0 { Err(ShipError) } else { Ok(id) }
}

fn main() {}
