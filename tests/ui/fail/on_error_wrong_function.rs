use idem_runtime::{Error, MemoryStore, idempotent};

#[derive(serde::Serialize, serde::Deserialize)]
struct Failure;

impl From<Error> for Failure {
    fn from(_: Error) -> Self {
        Self
    }
}

fn decide(_: Failure) -> bool {
    true
}

#[idempotent(key = "{id}", ttl = "7d", store = store, on_error = decide)]
async fn handler(store: &MemoryStore, id: u32) -> Result<u32, Failure> {
    Ok(id)
}

fn main() {}
