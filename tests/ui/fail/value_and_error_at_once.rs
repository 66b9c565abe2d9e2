use idem_runtime::{MemoryStore, idempotent};

struct Shipment;

struct ShipError;

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Result<Shipment, ShipError> {
    if id == 0 { Err(ShipError) } else { Ok(Shipment) }
}

fn main() {}
