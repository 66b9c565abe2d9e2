use idem_runtime::{Error, MemoryStore, idempotent};

struct Event {
    order_id: u32,
}

#[idempotent(key = "order:{event.orderid}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, event: Event) -> Result<u32, Error> {
    Ok(event.order_id)
}

fn main() {}
