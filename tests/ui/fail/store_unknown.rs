use idem_runtime::{Error, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = app.store)]
async fn handler(id: u32) -> Result<u32, Error> {
    Ok(id)
}

fn main() {}
