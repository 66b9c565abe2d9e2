//! Clauses of the store contract about results: a recorded result is read back unchanged.

use bytes::Bytes;

use super::case::{Case, completed, stored};
use crate::codec::CodecName;
use crate::record::{Finish, Record, Release, Reservation, ReserveRequest, State, StoredResult, Verdict};

/// Finishes an attempt of a new key, and checks the result in every read of the record.
async fn survives(case: &Case, name: &str, finish: &Finish) {
    let key = case.key(name);
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, finish).await, Verdict::Applied, "{name}");
    let record = Record::after(&lease, finish.state());
    for _ in 0..4 {
        // `assert_eq!` would print only the sizes of the payloads.
        let answer = case.reserve(&case.request(&key)).await.aged(None);
        assert!(
            answer == Reservation::finished(record.clone()),
            "{name}: should be {record:?}, was answered {answer:?}{}",
            bytes(&answer)
        );
        assert_eq!(case.recorded(&key).await.record, record, "{name}: inspected");
    }
}

/// Returns the first bytes of the replayed result as text, for the message of a failed test.
fn bytes(answer: &Reservation) -> String {
    let Reservation::Finished { record, .. } = answer else { return String::new() };
    match &record.state {
        State::Completed(StoredResult::Encoded { bytes, .. }) | State::Failed(StoredResult::Encoded { bytes, .. }) => {
            format!(" {:?}", bytes.slice(..bytes.len().min(64)))
        }
        _ => String::new(),
    }
}

pub(super) async fn completed_is_replayed(case: &Case) {
    survives(case, "first attempt", &completed("{\"parcel\":42}")).await;

    let key = case.key("third attempt");
    for attempt in 1..=2 {
        let lease = case.reserved(&case.request(&key), attempt, "a free key").await;
        assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    }
    let lease = case.reserved(&case.request(&key), 3, "a released key").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished.clone(), "the third attempt's result").await;
    // A repeated reservation of the owner also gets the result.
    case.is_answered(
        &ReserveRequest { owner: lease.owner, ..case.request(&key) },
        finished,
        "reserved again by its own owner",
    )
    .await;
}

pub(super) async fn failed_is_replayed(case: &Case) {
    survives(case, "error", &Finish::Failed(stored("\"card declined\""))).await;
}

pub(super) async fn every_payload_survives(case: &Case) {
    let every_byte: Vec<u8> = (0..=u8::MAX).chain((0..=u8::MAX).rev()).collect();
    let results: [(&str, &[u8]); 10] = [
        ("nothing", b""),
        ("zero", b"0"),
        ("null", b"null"),
        ("false", b"false"),
        ("empty text", b"\"\""),
        ("empty list", b"[]"),
        ("line breaks", b"\r\n\t \n"),
        ("NUL", b"\0"),
        ("not UTF-8", b"\xff\xfe\x80"),
        ("every byte", &every_byte),
    ];
    for (name, bytes) in results {
        survives(case, name, &Finish::Completed(stored(bytes))).await;
        survives(case, &format!("{name}, failed"), &Finish::Failed(stored(bytes))).await;
    }
    for (name, payload) in [
        ("too large", StoredResult::TooLarge { size: 1_000_000 }),
        ("far too large", StoredResult::TooLarge { size: u64::MAX }),
        ("too large, of size 0", StoredResult::TooLarge { size: 0 }),
        ("unencodable", StoredResult::Unencodable),
    ] {
        survives(case, name, &Finish::Completed(payload.clone())).await;
        survives(case, &format!("{name}, failed"), &Finish::Failed(payload)).await;
    }
}

pub(super) async fn large_result_survives(case: &Case) {
    // These bytes neither repeat nor compress (xorshift64, Marsaglia 2003).
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_be_bytes()[0]
    })
    .take(case.subject.largest_result)
    .collect();
    survives(case, "large", &Finish::Completed(stored(bytes))).await;
}

pub(super) async fn codec_name_survives(case: &Case) {
    for name in ["c", "json", "exactly-15-long", "with space/:.%"] {
        let codec = CodecName::new(name.as_bytes()).expect("a valid name");
        let payload = StoredResult::Encoded { codec, bytes: Bytes::from_static(b"json") };
        survives(case, name, &Finish::Completed(payload)).await;
    }
}
