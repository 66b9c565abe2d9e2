//! Functions of every shape under `#[idempotent]`: the first call runs the body, the second replays its result.

mod shapes {
    mod arguments;
    mod attributes;
    mod bodies;
    mod generics;
    mod keys;
    mod made_by_macros;
    mod names;
    mod options;
    mod outputs;
    mod receivers;
    mod stores;
    mod strict;
}

use std::sync::atomic::{AtomicU32, Ordering};

use idem_runtime::{MemoryStore, observe};

/// What handlers work with.
#[derive(Debug, Default)]
struct App {
    store: MemoryStore,
    runs: AtomicU32,
}

impl App {
    /// Called by every body: the number of the run, which a replay gives again.
    fn run(&self) -> u32 {
        self.runs.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }
}

/// Awaits two calls: the first is to run the body, the second to replay what the first returned.
async fn twice<T: PartialEq + std::fmt::Debug, E: std::fmt::Debug>(
    first: impl Future<Output = Result<T, E>>,
    second: impl Future<Output = Result<T, E>>,
) -> T {
    let (first, outcome) = observe(first).await;
    assert!(outcome.executed(), "{outcome:?}");
    let (second, outcome) = observe(second).await;
    assert!(outcome.replayed(), "{outcome:?}");
    let first = first.expect("the body returns a value");
    assert_eq!(second.expect("a value is replayed"), first);
    first
}
