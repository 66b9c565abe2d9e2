//! The crate `idempotent` on Redis, as a child process of the bench `peers`. The argument is the server's port.

use std::time::Duration;

use idempotent::entry::{CachedResponse, ExistingEntry, IdempotencyEntry, Metadata};
use idempotent::fingerprint::{DefaultFingerprintStrategy, FingerprintStrategy};
use idempotent::key::IdempotencyKey;
use idempotent::store::valkey::ValkeyStore;
use idempotent::store::{IdempotencyStore, InsertResult};
use peers::{Peer, Receipt, Work, serve};

const TTL: Duration = Duration::from_secs(7 * 86_400);

struct Idempotent(ValkeyStore);

impl Idempotent {
    /// A handler as in the crate's documentation.
    async fn ship(&self, order_id: u64) -> (bool, Receipt) {
        let key = IdempotencyKey::new(format!("bench:order:{order_id}")).expect("a valid key");
        let fingerprint = DefaultFingerprintStrategy.compute("ship", &order_id.to_le_bytes());
        let entry = IdempotencyEntry::new(fingerprint, TTL);
        match self.0.try_insert(&key, entry.clone()).await.expect("answers") {
            InsertResult::Claimed { fencing_token } => {
                let receipt = Receipt::of(order_id);
                let body = serde_json::to_vec(&receipt).expect("encodes").into();
                let response = CachedResponse { status_code: 200, metadata: Metadata::default(), body };
                self.0.complete(&key, entry.complete(response), fencing_token).await.expect("completes");
                (true, receipt)
            }
            InsertResult::Exists(ExistingEntry::Completed(found)) => {
                assert!(found.fingerprint_matches(fingerprint), "another request");
                (false, serde_json::from_slice(&found.into_response().body).expect("decodes"))
            }
            InsertResult::Exists(ExistingEntry::Processing(_)) => panic!("{order_id} is running"),
        }
    }
}

impl Peer for Idempotent {
    async fn call(&self, work: Work, order_id: u64) {
        let (ran, receipt) = self.ship(order_id).await;
        assert!(ran == (work == Work::First) && receipt.order_id == order_id);
    }
}

fn main() {
    let port = std::env::args().nth(1).expect("a port");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a valid URL");
    let store = runtime.block_on(ValkeyStore::new(client)).expect("connects");
    serve(&runtime, Idempotent(store));
}
