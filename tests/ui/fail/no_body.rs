use idem_runtime::{Error, MemoryStore, idempotent};

trait Handle {
    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    async fn handle(&self, store: &MemoryStore, id: u32) -> Result<u32, Error>;
}

fn main() {}
