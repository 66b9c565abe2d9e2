use idem_runtime::{Error, MemoryStore, idempotent};

trait Ship {
    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    async fn ship(store: &MemoryStore, id: u32) -> Result<u32, Error> {
        Ok(id)
    }
}

struct Orders;

impl Ship for Orders {
    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    async fn ship(store: &MemoryStore, id: u32) -> Result<u32, Error> {
        Ok(id)
    }
}

fn main() {}
