use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn ship<const N: usize>(store: &MemoryStore, id: [u8; N]) -> Result<usize, Error> {
    Ok(N)
}

fn main() {}
