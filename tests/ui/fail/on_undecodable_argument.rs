use idem_runtime::policy::Migrate;
use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store, on_undecodable = migrate)]
async fn handler(store: &MemoryStore, migrate: Migrate, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
