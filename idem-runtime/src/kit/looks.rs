//! Repeated reads of a record that other attempts keep changing.

use std::time::Duration;

use crate::clock::Clock;
use crate::store::{StoreError, StoreErrorKind};

/// Number of reads of a record after which an operation gives up. Only a write of another attempt, or a lock of another
/// session, causes a further read, so the loop would end without this limit, too. The limit guards against bugs and
/// faulty servers.
pub(crate) const LOOKS: u32 = 20;
/// The longest pause between two reads of the record. All pauses together take about a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(64);

/// Pauses before read number `look` of the record, counted from zero. Returns whether there was a pause: reads 0 and 1
/// have none, because a record may well change once between two reads.
pub(crate) async fn pause_before(look: u32, clock: &dyn Clock) -> bool {
    let Some(doublings) = look.checked_sub(2) else { return false };
    clock.sleep(Duration::from_millis(1 << doublings.min(6)).min(LONGEST_PAUSE)).await;
    true
}

/// Returns the error after the last read. `obstacle` describes why each read was in vain.
pub(crate) fn looked_in_vain(kind: StoreErrorKind, obstacle: &str) -> StoreError {
    StoreError::new(kind, format!("the record {obstacle}; gave up after {LOOKS} looks"))
}
