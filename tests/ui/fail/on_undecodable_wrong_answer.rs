use idem_runtime::{Undecodable, Error, MemoryStore, idempotent};

fn migrate(recorded: Undecodable<'_>) -> Vec<u8> {
    recorded.bytes().to_vec()
}

#[idempotent(key = "{id}", ttl = "7d", store = store, on_undecodable = migrate)]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
