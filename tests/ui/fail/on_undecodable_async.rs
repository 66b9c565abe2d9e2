use idem_runtime::{CodecError, Undecodable, Error, MemoryStore, idempotent};

async fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    Ok(recorded.bytes().to_vec())
}

#[idempotent(key = "{id}", ttl = "7d", store = store, on_undecodable = migrate)]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
