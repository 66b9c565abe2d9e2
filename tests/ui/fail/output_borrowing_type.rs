use idem_runtime::{Error, MemoryStore, idempotent};

#[derive(serde::Serialize, serde::Deserialize)]
struct Name<'a> {
    text: &'a str,
}

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler<'a>(store: &MemoryStore, id: u32, text: &'a str) -> Result<Name<'a>, Error> {
    Ok(Name { text })
}

fn main() {}
