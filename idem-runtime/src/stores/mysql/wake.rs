//! Wake-ups of duplicates that wait for running attempts.
//!
//! The servers notify no client. An end that this process writes wakes its waiters immediately. For ends that other
//! processes write, the waiters of a runtime poll together: every [`POLL`], one of them reads the records of all waited
//! keys, 64 in one statement, and wakes the waiters whose attempts have ended. A poll whose waiter is dropped is made
//! up for by the next poll.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use super::sql;
use super::statement_pool::StatementPool;
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::kit::work::Link as _;
use crate::record::ReadExtent;
use crate::store::StoreError;
use crate::sync::lock;

/// Time between two polls of a runtime.
const POLL: Duration = Duration::from_millis(50);

/// The keys that the duplicates of one runtime wait for.
#[derive(Default)]
pub(super) struct Polls(Mutex<PollState>);

#[derive(Default)]
struct PollState {
    /// Number of waiters for each key and attempt.
    waited: HashMap<(String, u32), usize>,
    /// Time of the next poll; `None` before the first.
    next: Option<Instant>,
}

/// A waiter in [`Polls`], until it is dropped.
struct PollTicket<'a> {
    polls: &'a Polls,
    of: (String, u32),
}

impl Drop for PollTicket<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.polls.0);
        if let Some(count) = state.waited.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                state.waited.remove(&self.of);
            }
        }
    }
}

impl Polls {
    fn join(&self, key: &str, attempt: u32) -> PollTicket<'_> {
        let of = (key.to_owned(), attempt);
        *lock(&self.0).waited.entry(of.clone()).or_default() += 1;
        PollTicket { polls: self, of }
    }

    /// Returns the waited keys and attempts if a poll is due, and otherwise the time of the next poll.
    fn due(&self, clock: &dyn Clock) -> Result<Vec<(String, u32)>, Instant> {
        let now = clock.now();
        let mut state = lock(&self.0);
        if let Some(next) = state.next.filter(|next| now < *next) {
            return Err(next);
        }
        state.next = Some(now.saturating_add(POLL));
        Ok(state.waited.keys().cloned().collect())
    }

    /// Waits until attempt number `attempt` of `key` may have ended, or `at_most` is over.
    pub(super) async fn wait(
        &self,
        server: &StatementPool,
        key: &str,
        attempt: u32,
        at_most: Duration,
    ) -> Result<(), StoreError> {
        let clock = &**server.database.clock();
        let until = clock.now().saturating_add(at_most);
        let waiter = server.waiters.here().join(key);
        let _waited = self.join(key, attempt);
        let mut woken = pin!(waiter.woken());
        woken.as_mut().enable();
        loop {
            let next = match self.due(clock) {
                Ok(keys) => {
                    if poll(server, &keys, (key, attempt)).await? {
                        return Ok(());
                    }
                    continue;
                }
                Err(next) => next,
            };
            let now = clock.now();
            if now >= until {
                return Ok(());
            }
            if race(woken.as_mut(), clock.sleep(next.min(until).saturating_since(now))).await.is_some() {
                return Ok(());
            }
        }
    }
}

/// Wakes the waiters whose attempts are no longer pending. Returns whether the attempt `own` is one of these.
async fn poll(server: &StatementPool, waited: &[(String, u32)], own: (&str, u32)) -> Result<bool, StoreError> {
    let keys: Vec<_> = waited.iter().map(|(key, _)| vec![key.as_str().into()]).collect();
    let rows = server.read_many(&server.sql.pending_many, &keys).await?;
    let mut pending: HashMap<&[u8], u32> = HashMap::new();
    for row in &rows {
        // A row that can't be read is not pending, so that its waiters learn what is wrong.
        if let (Some(key), Ok(found)) = (row.key(), sql::found(row, ReadExtent::WithoutResult(None))) {
            pending.insert(key, found.record.attempt);
        }
    }
    let mut is_over = false;
    for (key, attempt) in waited {
        if pending.get(key.as_bytes()) != Some(attempt) {
            server.wake(key);
            is_over |= (key.as_str(), *attempt) == own;
        }
    }
    Ok(is_over)
}
