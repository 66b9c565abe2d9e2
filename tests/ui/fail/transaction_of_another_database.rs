use idem_runtime::within::OpenTransaction;
use idem_runtime::{Error, PostgresStore, idempotent};

#[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
async fn pay(tx: &OpenTransaction<rusqlite::Transaction<'_>>, order: i64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
