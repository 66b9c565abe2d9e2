use std::rc::Rc;

use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "{id}", ttl = "7d", store = store)]
async fn handler(store: MemoryStore, id: u32) -> Result<u32, Error> {
    let id = Rc::new(id);
    std::future::ready(()).await;
    Ok(*id)
}

fn send<F: Send>(_: F) {}

fn main() {
    send(handler(MemoryStore::new(), 1));
}
