//! The answer to duplicates whose key an open transaction of a user holds.

use std::time::Duration;

use crate::key::Key;
use crate::record::Reservation;
use crate::store::TagCounts;

/// Shortest time after which a duplicate asks again for a key that an open transaction of the user holds. Most such
/// transactions are short, but nothing limits them. The time doubles with each duplicate of the key in this process, up
/// to 6.4 s.
const HELD_BY_ANOTHER: Duration = Duration::from_millis(100);
/// For each key, by its hash: number of calls in this process that found the key held by a transaction.
pub(crate) static MEETINGS: TagCounts = TagCounts::new();
/// Returns the answer to a duplicate whose key an open transaction of the user holds.
pub(crate) fn held_by_another(key: &Key, attempt: u32) -> Reservation {
    let doublings = MEETINGS.again(key.seed()).saturating_sub(1).min(6);
    Reservation::InProgress { attempt, lapses_in: HELD_BY_ANOTHER * (1 << doublings) }
}
