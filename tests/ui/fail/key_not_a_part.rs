use idem_runtime::{Error, MemoryStore, idempotent};

struct Customer {
    _name: String,
}

#[idempotent(key = "{customer}:{id}", ttl = "7d", store = store)]
async fn handler(store: &MemoryStore, customer: Customer, id: u32) -> Result<u32, Error> {
    drop(customer);
    Ok(id)
}

fn main() {}
