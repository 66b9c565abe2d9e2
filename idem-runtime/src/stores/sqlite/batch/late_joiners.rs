//! Operations that join a transaction after its batch is done.

use std::time::Duration;

use super::queue::{BATCH, Op, Queue};

/// Smallest number of answered callers for whose next operations the writer waits.
const COMPANY: usize = 4;
/// Largest number of batches in a row that the writer commits without a wait, after it has waited in vain.
const LONGEST_SKIP: u32 = 64;

/// The callers that the last batch has answered. Most of these callers soon send their next operation, one by one.
/// Without a wait, each commit would contain only the few operations that have already arrived. So the writer waits a
/// little before the commit of a batch, and adds the operations that arrive meanwhile. A lone call is not delayed.
pub(super) struct LateJoiners<'a> {
    queue: &'a Queue,
    /// Number of operations that the last batch answered.
    answered: usize,
    /// Number of operations that already waited when the last batch was answered.
    waited: usize,
    /// Number of coming batches that the writer commits without a wait, because too few answered callers have returned.
    skip: u32,
    next_skip: u32,
}

impl<'a> LateJoiners<'a> {
    pub(super) fn of(queue: &'a Queue) -> Self {
        Self { queue, answered: 0, waited: 0, skip: 0, next_skip: 1 }
    }

    /// Adds waiting operations to a batch whose operations are done. Waits up to `at_most` for the operations of the
    /// answered callers.
    pub(super) fn join(&self, batch: &mut Vec<Op>, at_most: Duration) {
        if self.answered >= COMPANY && self.skip == 0 {
            self.queue.gather(batch, (self.waited + self.answered).min(BATCH), at_most);
        }
    }

    /// Notes that `done` operations are answered.
    pub(super) fn were_answered(&mut self, done: usize) {
        if self.skip > 0 {
            self.skip -= 1;
        } else if self.answered >= COMPANY {
            if done.saturating_sub(self.waited) >= self.answered / 4 {
                self.next_skip = 1;
            } else {
                self.skip = self.next_skip;
                self.next_skip = (self.next_skip * 2).min(LONGEST_SKIP);
            }
        }
        (self.answered, self.waited) = (done, self.queue.len());
    }
}
