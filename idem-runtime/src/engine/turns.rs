//! Turns of a batch's items on the keys that they share.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use super::poll_notes::waits;
use crate::clock::Sleep;
use crate::combine::race;
use crate::key::Key;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, lock};

/// Keys on which items of a batch work. Items with the same key take turns, in the order of their arrival.
///
/// Turns are not needed for safety, because the store lets one body run for a key in any case. A turn only spares the
/// later item a refusal. So a call may stop waiting for its turn and ask the store.
#[derive(Clone, Default)]
pub(super) struct Turns(Arc<Mutex<HashMap<Key, Arc<KeyTurns>>>>);

/// State of the turns on one key.
struct KeyTurns {
    /// Item whose call has the turn, or [`NO_ITEM`] if no call has the turn.
    holder: AtomicUsize,
    queue: Arc<AsyncMutex<()>>,
}

const NO_ITEM: usize = usize::MAX;

impl Default for KeyTurns {
    fn default() -> Self {
        Self { holder: AtomicUsize::new(NO_ITEM), queue: Arc::default() }
    }
}

/// Turn of a call on its key. The drop of this value ends the turn.
pub(super) struct Turn {
    key: Arc<KeyTurns>,
    _first: OwnedMutexGuard<()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.key.holder.store(NO_ITEM, Ordering::Relaxed);
    }
}

impl Turns {
    /// Waits until no other item's call has the turn on `key`, or until `limit` is over. Returns the turn, and whether
    /// the call waited. The turn is `None` if the time is over, or if another call of the same item has the turn.
    pub(super) async fn enter(
        &self,
        key: &Key,
        item: usize,
        limit: impl FnOnce() -> Sleep,
    ) -> (Option<Arc<Turn>>, bool) {
        let key = Arc::clone(lock(&self.0).entry(key.clone()).or_default());
        // Two calls of the same item must not wait for each other: the handler may poll only the second call.
        if key.holder.load(Ordering::Relaxed) == item {
            return (None, false);
        }
        let (first, waited) = match Arc::clone(&key.queue).try_lock_owned() {
            Ok(first) => (Some(first), false),
            Err(_) => {
                waits();
                (race(Arc::clone(&key.queue).lock_owned(), limit()).await, true)
            }
        };
        let turn = first.map(|first| {
            key.holder.store(item, Ordering::Relaxed);
            Arc::new(Turn { key, _first: first })
        });
        (turn, waited)
    }
}
