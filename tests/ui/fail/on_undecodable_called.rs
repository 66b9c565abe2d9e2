use idem_runtime::{CodecError, Error, MemoryStore, idempotent};

fn migrate() -> Result<Vec<u8>, CodecError> {
    Ok(Vec::new())
}

#[idempotent(key = "{id}", ttl = "7d", store = store, on_undecodable = migrate())]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
