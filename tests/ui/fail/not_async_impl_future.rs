use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
fn handler(store: &MemoryStore, id: u32) -> impl Future<Output = Result<u32, Error>> {
    async move { Ok(id) }
}

fn main() {}
