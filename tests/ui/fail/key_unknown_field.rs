use idem_runtime::{Error, MemoryStore, idempotent};

struct Event {
    id: u32,
}

#[idempotent(key = "order:{event.order_id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, event: Event) -> Result<u32, Error> {
    Ok(event.id)
}

fn main() {}
