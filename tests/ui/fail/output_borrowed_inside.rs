use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, id: u32, text: &'static str) -> Result<Vec<(u32, &'static str)>, Error> {
    Ok(vec![(id, text)])
}

fn main() {}
