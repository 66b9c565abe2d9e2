use idem_runtime::within::OpenTransaction;

/// Stands for the transaction of a driver, or of a release of a driver, that no enabled feature names.
struct Transaction;

async fn pay(tx: &OpenTransaction<Transaction>) {
    let _ = tx;
}

fn main() {}
