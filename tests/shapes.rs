//! Functions of every shape under `#[idempotent]`: the first call runs the body, the second replays its result.

mod shapes {
    mod arguments;
    mod attributes;
    mod bodies;
    mod generics;
    mod keys;
    mod lints;
    mod made_by_macros;
    mod names;
    mod options;
    mod outputs;
    mod receivers;
    mod reconciling;
    mod spawned;
    mod stores;
    mod strict;
    #[cfg(all(feature = "dynamodb", feature = "postgres", feature = "sqlite", feature = "wrappers"))]
    mod surface;
}

use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};

use idem_runtime::{MemoryStore, observe};

/// Application that the handlers use.
#[derive(Debug, Default)]
struct App {
    store: MemoryStore,
    runs: AtomicU32,
}

impl App {
    /// Counts a run of a body and returns its number, which becomes a part of the result.
    fn run(&self) -> u32 {
        self.runs.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }
}

/// Runs a test as a spawned task, so that every call that it awaits must be `Send`.
fn spawned(test: impl Future<Output = ()> + Send + 'static) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    if let Err(failed) = runtime.block_on(runtime.spawn(test)) {
        std::panic::resume_unwind(failed.into_panic());
    }
}

/// Awaits two calls: the first must run the body, and the second must replay the first one's result.
///
/// Most tests call their handlers through this function, which also checks that the calls are `Send`.
async fn twice<T: PartialEq + Debug, E: Debug>(
    first: impl Future<Output = Result<T, E>> + Send,
    second: impl Future<Output = Result<T, E>> + Send,
) -> T {
    assert!(tokio::task::try_id().is_some(), "a shape is called outside of `spawned`");
    twice_here(first, second).await
}

/// Does the same as [`twice`], for calls that are not `Send` because of their arguments.
async fn twice_here<T: PartialEq + Debug, E: Debug>(
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
