//! A task that ends with its owner.

use tokio::task::AbortHandle;

/// A task that ends with its owner.
pub(super) struct OwnedTask(pub(super) AbortHandle);

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
