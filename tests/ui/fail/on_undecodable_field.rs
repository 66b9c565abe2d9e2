use idem_runtime::{Error, MemoryStore, idempotent};

struct Shipping;

impl Shipping {
    #[idempotent(key = "{id}", ttl = "7d", store = store, scope = "handler", on_undecodable = self.migrate)]
    async fn handler(&self, store: &MemoryStore, id: u32) -> Result<u32, Error> {
        Ok(id)
    }
}

fn main() {}
