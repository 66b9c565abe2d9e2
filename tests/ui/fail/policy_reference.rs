use idem_runtime::{Error, MemoryStore, idempotent};

struct App {
    policy: u32,
}

#[idempotent(key = "{id}", store = store, policy = app.policy)]
async fn handler(app: &App, store: &MemoryStore, id: u32) -> Result<u32, Error> {
    Ok(app.policy + id)
}

fn main() {}
