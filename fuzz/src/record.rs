//! The bytes of a record, as Redis and Valkey keep them.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::record::format::{self, FLAG_WAITED_FOR, FLAGS_AT};
use idem_runtime::{Key, Meeting, Payload, Record, Reservation, Reserve, State};

use super::input::Input;

/// What is read is what was written, and nothing else is read.
pub fn record(data: &[u8]) {
    if let Ok(record) = format::decode(&Bytes::copy_from_slice(data)) {
        // There is one way to write each record, but for the mark of those who wait.
        let mut unmarked = data.to_vec();
        unmarked[FLAGS_AT] &= !FLAG_WAITED_FOR;
        // An `on_crash` that no longer counts is left behind where a script ends an attempt.
        let written = format::encode(&record);
        if record.is_pending() {
            assert_eq!(written, unmarked);
        }
        assert_eq!(format::decode(&written.into()).as_ref(), Ok(&record));
        meet(&record, Input(data));
    }

    let mut input = Input(data);
    let record = input.record();
    let written = Bytes::from(format::encode(&record));
    assert_eq!(format::decode(&written).as_ref(), Ok(&record));
    // The end of a result is the end of the value; of everything else it is known.
    if !matches!(record.state.payload(), Some(Payload::Stored { .. })) {
        let mut longer = written.to_vec();
        longer.push(input.byte());
        format::decode(&longer.into()).expect_err("a byte too many");
        let cut = usize::from(input.byte()) % written.len();
        format::decode(&written.slice(..cut)).expect_err("cut off");
    }
    meet(&record, input);
}

/// Whatever was read, a reservation of it has an answer that agrees with it.
fn meet(record: &Record, mut input: Input<'_>) {
    let request = request(&mut input);
    let lapses_in = input.duration();
    match record.meet(&request, lapses_in) {
        Meeting::Replace { with, .. } => {
            assert!(!record.is_finished(), "a finished record is replaced");
            assert_ne!(record.state, State::Interrupted, "an interrupted record is replaced");
            assert!(!record.is_pending() || lapses_in.is_zero(), "a live lease is taken over");
            assert_eq!(with.attempt, record.attempt + 1);
            assert!(with.is_pending() && with.owner == request.owner && with.starts <= with.attempt);
        }
        Meeting::Answer(Reservation::Finished(finished)) => assert_eq!(finished, *record),
        Meeting::Answer(Reservation::Reserved { .. }) => {
            assert!(record.is_pending() && record.owner == request.owner, "it was nobody's own");
        }
        Meeting::Answer(_) => {}
    }
    let _: Duration = record.retention(request.ttl);
}

/// What somebody may ask for.
pub(crate) fn request(input: &mut Input<'_>) -> Reserve {
    Reserve {
        key: Key::new("fuzz", "key").expect("a key"),
        owner: input.owner(),
        lease: input.duration(),
        ttl: input.duration(),
        fingerprint: input.fingerprint(),
        on_crash: input.on_crash(),
        max_attempts: NonZeroU32::new(input.byte().into()),
    }
}
