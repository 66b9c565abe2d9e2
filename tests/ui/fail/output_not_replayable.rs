use idem_runtime::{Error, MemoryStore, idempotent};

#[derive(serde::Serialize)]
struct Shipment {
    id: u32,
}

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Result<Vec<Shipment>, Error> {
    Ok(vec![Shipment { id }])
}

fn main() {}
