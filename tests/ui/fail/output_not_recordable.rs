use idem_runtime::{Error, MemoryStore, idempotent};

struct Shipment {
    id: u32,
}

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Result<Shipment, Error> {
    Ok(Shipment { id })
}

fn main() {}
