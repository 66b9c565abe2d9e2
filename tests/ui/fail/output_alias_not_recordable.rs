use idem_runtime::{Error, MemoryStore, idempotent};

struct Shipment {
    id: u32,
}

type Shipped = Result<Shipment, Error>;

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Shipped {
    Ok(Shipment { id })
}

fn main() {}
