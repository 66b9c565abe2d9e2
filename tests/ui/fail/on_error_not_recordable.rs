use idem_runtime::{Error, MemoryStore, idempotent};

struct Failure;

impl From<Error> for Failure {
    fn from(_: Error) -> Self {
        Self
    }
}

#[idempotent(key = "{id}", ttl = "7d", store = store, on_error = record)]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Failure> {
    Ok(id)
}

fn main() {}
