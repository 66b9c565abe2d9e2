//! Size of a handler's future, plain and annotated, alone and calling other handlers.
//!
//! No time is measured: the compiler determines the sizes, which are the same in every run.

use idem_benches::is_wanted;
use idem_runtime::{Error, MemoryStore, idempotent};

/// Number of bytes that a body holds across an `await`, as real handlers hold buffers and messages.
const BYTES: usize = 512;

async fn work(buffer: &[u8; BYTES]) -> u64 {
    tokio::task::yield_now().await;
    buffer.iter().copied().map(u64::from).sum()
}

mod plain {
    use super::{BYTES, Error, work};

    pub(crate) async fn one(id: u64) -> Result<u64, Error> {
        let buffer = [1; BYTES];
        Ok(work(&buffer).await + id)
    }

    pub(crate) async fn two(id: u64) -> Result<u64, Error> {
        let buffer = [1; BYTES];
        Ok(work(&buffer).await + one(id).await?)
    }

    pub(crate) async fn three(id: u64) -> Result<u64, Error> {
        let buffer = [1; BYTES];
        Ok(work(&buffer).await + two(id).await?)
    }
}

mod annotated {
    use super::{BYTES, Error, MemoryStore, idempotent, work};

    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    pub(crate) async fn one(store: &MemoryStore, id: u64) -> Result<u64, Error> {
        let buffer = [1; BYTES];
        Ok(work(&buffer).await + id)
    }

    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    pub(crate) async fn two(store: &MemoryStore, id: u64) -> Result<u64, Error> {
        let buffer = [1; BYTES];
        Ok(work(&buffer).await + one(store, id).await?)
    }

    #[idempotent(key = "{id}", ttl = "7d", store = store)]
    pub(crate) async fn three(store: &MemoryStore, id: u64) -> Result<u64, Error> {
        let buffer = [1; BYTES];
        Ok(work(&buffer).await + two(store, id).await?)
    }
}

fn main() {
    let store = MemoryStore::new();
    let plain = [size_of_val(&plain::one(1)), size_of_val(&plain::two(1)), size_of_val(&plain::three(1))];
    let annotated = [
        size_of_val(&annotated::one(&store, 1)),
        size_of_val(&annotated::two(&store, 1)),
        size_of_val(&annotated::three(&store, 1)),
    ];
    println!("\n### Future size\n");
    println!(
        "| handler that holds {BYTES} bytes | plain, bytes | annotated, bytes | the attribute's share | of one level |"
    );
    println!("|---|---|---|---|---|");
    let mut below = 0;
    for (i, name) in ["alone", "calls another", "calls one that calls another"].into_iter().enumerate() {
        let share = annotated[i] - plain[i];
        if is_wanted(name) {
            println!("| {name} | {} | {} | {share} | **{}** |", plain[i], annotated[i], share - below);
        }
        below = share;
    }
}
