use idem_runtime::{MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32) -> Option<u32> {
    Some(id)
}

fn main() {}
