//! Thread of the library for work that no caller awaits: renewals and late writes.
//!
//! On a runtime of the user this work would depend on all other tasks of that runtime. A handler that blocks the only
//! thread of its runtime would lose its lease, and a runtime that shuts down would drop late writes. A process has one
//! thread for this work, regardless of the number of stores. The thread starts with the first handler, waits most of
//! the time, and ends with the process.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::{Builder, Handle, Runtime};

use super::Task;
use crate::sync::{PerProcess, lock};

/// Runtime of the library's thread. A forked child has no copy of the thread, and starts a thread of its own.
static THREAD: PerProcess<Mutex<Option<Handle>>> = PerProcess::empty();

/// Runs `task` on the thread of the library. If the thread can't be started or no descriptor can be opened, the task
/// runs on the runtime of the caller.
pub(crate) fn spawn(task: Task) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    match runtime() {
        Ok(runtime) => drop(runtime.spawn(task)),
        Err(error) => match Handle::try_current() {
            Ok(runtime) => {
                if !WARNED.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        %error,
                        "the thread `idem-upkeep` can't be started; leases are renewed on the runtimes of the callers"
                    );
                }
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
    let own = Own(Some(runtime));
    std::thread::Builder::new().name("idem-upkeep".to_owned()).spawn(move || own.run())?;
    *thread = Some(handle.clone());
    Ok(handle)
}

/// A runtime whose drop inside of another runtime causes no panic; the drop of a tokio `Runtime` would panic there. The
/// runtime is dropped if the library's thread can't be started.
struct Own(Option<Runtime>);

impl Own {
    fn run(&self) {
        if let Some(runtime) = &self.0 {
            runtime.block_on(std::future::pending::<()>());
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
