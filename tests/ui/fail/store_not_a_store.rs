use idem_runtime::{Error, idempotent};

struct App {
    name: String,
}

#[idempotent(key = "{id}", ttl = "7d", store = app.name)]
async fn handler(app: &App, id: u32) -> Result<u32, Error> {
    Ok(id + app.name.len() as u32)
}

fn main() {}
