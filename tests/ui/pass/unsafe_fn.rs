//! The attribute keeps `unsafe`, in the signature and in the body.
#![deny(warnings, unsafe_op_in_unsafe_fn)]

use idem_runtime::{Error, MemoryStore, idempotent};

struct Handler(MemoryStore);

impl Handler {
    /// # Safety
    /// The function has no safety requirement.
    #[idempotent(key = "{id}:{unsafe { number() }}", ttl = "7d", store = self.0, scope = "handle")]
    async unsafe fn handle(&self, id: u32) -> Result<u32, Error> {
        // SAFETY: the called function has no safety requirement.
        Ok(id + unsafe { number() })
    }
}

unsafe fn number() -> u32 {
    7
}

fn main() {
    let handler = Handler(MemoryStore::new());
    // SAFETY: the called function has no safety requirement.
    drop(unsafe { handler.handle(1) });
}
