//! A thread of the library's own, for the work that no caller waits for: renewals and late writes.
//!
//! On a runtime of the user's they would depend on whatever else runs there: a handler that blocks the only thread of its
//! runtime would lose its lease, and a runtime that ends would take late writes with it. There is one thread in a process,
//! whatever the number of stores. It starts with the first handler, waits for most of its life, and ends with the process.

use std::io;
use std::sync::Mutex;

use tokio::runtime::{Builder, Handle};

use super::Task;
use crate::sync::{PerProcess, lock};

/// The runtime of the thread. The child of a `fork()` has no threads but the one that forked, and starts another thread.
static THREAD: PerProcess<Mutex<Option<Handle>>> = PerProcess::empty();

/// Runs `task` on the thread of the library.
pub(crate) fn spawn(task: Task) {
    match runtime() {
        Ok(runtime) => drop(runtime.spawn(task)),
        Err(error) => match Handle::try_current() {
            Ok(runtime) => {
                tracing::warn!(%error, "the thread `idem-upkeep` can't be started; using the runtime of the caller");
                runtime.spawn(task);
            }
            Err(_) => {
                tracing::error!(%error, "the thread `idem-upkeep` can't be started; leases are not renewed");
            }
        },
    }
}

fn runtime() -> io::Result<Handle> {
    let mut thread = lock(THREAD.here());
    if let Some(runtime) = &*thread {
        return Ok(runtime.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("idem-upkeep".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    *thread = Some(handle.clone());
    Ok(handle)
}
