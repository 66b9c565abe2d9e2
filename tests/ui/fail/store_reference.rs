use idem_runtime::{Error, idempotent};

struct App {
    id: u32,
}

#[idempotent(key = "{id}", ttl = "7d", store = app)]
async fn handler(app: &App, id: u32) -> Result<u32, Error> {
    Ok(app.id + id)
}

fn main() {}
