use idem_runtime::{Error, MemoryStore, idempotent};

struct Orders {
    store: MemoryStore,
}

impl Orders {
    #[idempotent(key = "{id}", ttl = "7d", store = orders.store)]
    async fn ship(orders: &Self, id: u32) -> Result<u32, Error> {
        Ok(id)
    }
}

fn main() {}
