use idem_runtime::{Error, MemoryStore, idempotent};

struct Event;

#[idempotent(key = "{id}", ttl = "7d", store = store, fingerprint = event)]
async fn handler(store: &MemoryStore, id: u32, event: Event) -> Result<u32, Error> {
    drop(event);
    Ok(id)
}

fn main() {}
