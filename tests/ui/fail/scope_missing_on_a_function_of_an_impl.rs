use idem_runtime::{Error, MemoryStore, idempotent};

struct Orders;

impl Orders {
    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    async fn ship(store: &MemoryStore, id: u32) -> Result<u32, Error> {
        Ok(id)
    }
}

fn main() {}
