//! Bytes of a record, as Redis and Valkey store them.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::Key;
use idem_runtime::record::format::{self, FLAG_WAITED_FOR, FLAGS_AT, HEADER_BYTES, IDENTITY_END};
use idem_runtime::record::{Admission, Record, State, StoredResult};
use idem_runtime::store::{Reservation, ReserveRequest};

use super::input::Input;

/// Asserts that a record is read as it was written, and that bytes can be read as a record only if the library could
/// have written them.
pub fn record(data: &[u8]) {
    if let Ok(record) = format::decode(&Bytes::copy_from_slice(data)) {
        // Two values that are read as the same record have equal bytes, except for the flag of waiters.
        let mut unmarked = data.to_vec();
        unmarked[FLAGS_AT] &= !FLAG_WAITED_FOR;
        // The store keeps the times, which are no part of the record.
        unmarked[IDENTITY_END..HEADER_BYTES].fill(0);
        // A script that ends an attempt keeps the `on_crash` flag, which has no meaning afterwards.
        let written = format::encode(&record);
        if record.is_pending() {
            assert_eq!(written, unmarked);
        }
        assert_eq!(format::decode(&written.into()).as_ref(), Ok(&record));
        admit(&record, Input(data));
    }

    let mut input = Input(data);
    let record = input.record();
    let written = Bytes::from(format::encode(&record));
    assert_eq!(format::decode(&written).as_ref(), Ok(&record));
    // A result extends to the end of the value. In a state without a result, the length is known.
    if !matches!(record.state.result(), Some(StoredResult::Encoded { .. })) {
        let mut longer = written.to_vec();
        longer.push(input.byte());
        format::decode(&longer.into()).expect_err("a byte too many");
        let cut = usize::from(input.byte()) % written.len();
        format::decode(&written.slice(..cut)).expect_err("cut off");
    }
    admit(&record, input);
}

/// Asserts that a reservation on a readable record gets an answer that fits the record.
fn admit(record: &Record, mut input: Input<'_>) {
    let request = request(&mut input);
    let lapses_in = input.duration();
    match record.admit(&request, lapses_in) {
        Admission::Replace { with, .. } => {
            assert!(!record.is_finished(), "a finished record is replaced");
            assert_ne!(record.state, State::Interrupted, "an interrupted record is replaced");
            assert!(!record.is_pending() || lapses_in.is_zero(), "a live lease is taken over");
            assert_eq!(with.attempt, record.attempt + 1);
            assert!(with.is_pending() && with.owner == request.owner && with.attempts_used <= with.attempt);
        }
        Admission::Answer(Reservation::Finished { record: finished, .. }) => assert_eq!(finished, *record),
        Admission::Answer(Reservation::Granted { .. }) => {
            assert!(record.is_pending() && record.owner == request.owner, "it was nobody's own");
        }
        Admission::Answer(_) => {}
    }
    let _: Duration = record.retention(request.ttl);
}

/// Returns an arbitrary request.
pub(crate) fn request(input: &mut Input<'_>) -> ReserveRequest {
    ReserveRequest::new(Key::new("fuzz", "key").expect("a key"), input.owner(), input.duration(), input.duration())
        .fingerprint(input.fingerprint())
        .on_crash(input.on_crash())
        .max_attempts(NonZeroU32::new(input.byte().into()))
}
