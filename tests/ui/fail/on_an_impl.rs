use idem_runtime::{Error, MemoryStore, idempotent};

struct Handler(MemoryStore);

#[idempotent(key = "{id}", ttl = "7d", store = self.0)]
impl Handler {
    async fn handle(&self, id: u32) -> Result<u32, Error> {
        Ok(id)
    }
}

fn main() {
    drop(Handler(MemoryStore::new()).handle(1));
}
