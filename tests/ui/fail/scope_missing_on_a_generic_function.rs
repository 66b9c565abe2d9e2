use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn ship<'a, T: ToString>(store: &'a MemoryStore, id: u32, order: T) -> Result<String, Error> {
    Ok(order.to_string())
}

fn main() {}
