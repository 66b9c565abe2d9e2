use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Result<Shipment, Error> {
    Ok(id)
}

fn main() {}
