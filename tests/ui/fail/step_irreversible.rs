use idem_runtime::{Error, MemoryStore, current, idempotent};

#[idempotent(key = "order:{order}", ttl = "7d", store = store)]
async fn pay(store: &MemoryStore, order: u64) -> Result<u64, Error> {
    current()?.step("wire").irreversible().run(async |_| Ok::<_, Error>(order)).await
}

fn main() {}
