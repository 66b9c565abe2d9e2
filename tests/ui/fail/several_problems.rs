use idem_runtime::{MemoryStore, idempotent};

#[idempotent(
    key = "{tenant}{id}",
    tll = "7d",
    store = store,
    store = other,
    lease = "1ms",
    on_error = "record",
    in_progress = wait,
    on_crash = fial,
)]
fn handler(store: &MemoryStore, id: u32) {
    drop(id)
}

fn main() {}
