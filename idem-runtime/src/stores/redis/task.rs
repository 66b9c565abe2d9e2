//! A task that is aborted when its owner is dropped.

use tokio::task::AbortHandle;

/// Handle of a task, which is aborted when the handle is dropped.
pub(super) struct OwnedTask(pub(super) AbortHandle);

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
