//! Helpers for the tests of every store: reservations, results, and calls of a handler that counts its runs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::key::Fingerprint;
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
use idem_runtime::record::{Record, StoredResult, Traceparent};
use idem_runtime::store::{
    Decision, DecisionAnswer, Finish, Holder, Journal, Lease, OwnerToken, Release, Reservation, ReserveRequest,
    Verdict, renew_all,
};
use idem_runtime::{
    Error, Json, Key, OnCrash, Operation, Outcome, Policy, Store, StoreError, StoreErrorKind, current, observe,
};

/// Lease that outlasts any test.
pub const LEASE: Duration = Duration::from_secs(60);
/// Retention of records.
pub const TTL: Duration = Duration::from_secs(3600);
/// Example of a W3C trace context.
pub const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// Policy with [`LEASE`] and [`TTL`].
pub const POLICY: Policy = Policy::new(TTL).lease(LEASE);

/// Key in the scope of tests.
pub fn key(name: &str) -> Key {
    Key::new("test", name).expect("a valid key")
}

/// Reservation of `name` for a new attempt.
pub fn request(store: &impl Store, name: &str) -> ReserveRequest {
    ReserveRequest::new(key(name), store.context().new_owner(), LEASE, TTL)
}

/// Returns the lease in the answer to a reservation. The reservation must have been granted.
pub fn lease_of(answer: Result<Reservation, StoreError>) -> Lease {
    match answer {
        Ok(Reservation::Granted { lease, .. }) => lease,
        other => panic!("{other:?}"),
    }
}

/// Makes the reservation `request`, which must succeed.
pub async fn wins(store: &impl Store, request: &ReserveRequest) -> Lease {
    lease_of(store.reserve(request).await)
}

/// Reserves `name`; the reservation must succeed.
pub async fn reserved(store: &impl Store, name: &str) -> Lease {
    wins(store, &request(store, name)).await
}

/// Result that consists of these bytes.
pub fn stored(bytes: impl Into<Bytes>) -> StoredResult {
    StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: bytes.into() }
}

/// Completion with the result `42`.
pub fn done() -> Finish {
    Finish::Completed(stored("42"))
}

/// Written form of a journal in which step `a` has ended in attempt 1, with the value `1` of the codec `json`.
const JOURNAL: &[u8] = b"\x01\0\x01a\0\0\0\x01\0\x01\x04json\0\0\0\x011";

/// Journal of one step.
pub fn one_step() -> Journal {
    Journal::new(JOURNAL).expect("bytes")
}

/// Returns `record` with this journal.
pub fn with_journal(mut record: Record, journal: Journal) -> Record {
    record.journal = Some(journal);
    record
}

/// Result `{"a":1}` that is stored together with [`one_step`].
pub fn kept() -> StoredResult {
    let bytes = [b"\x01\x03\x04json\0\0\0\0\0\0\0\x07{\"a\":1}", JOURNAL].concat();
    StoredResult::Encoded { codec: CodecName::new(b"idem:steps").expect("a valid name"), bytes: bytes.into() }
}

/// Writes records whose stored form is pinned: of attempts with every kind of end, of pending ones, and with a journal.
///
/// # Panics
/// If the store refuses a write.
pub async fn write_pinned_records(store: &impl Store) {
    // Records have fixed values, so that only their times differ between runs.
    let fixed = |name: &str, fingerprint: Option<u8>, on_crash| {
        request(store, name)
            .owner(OwnerToken::from_bytes(*b"0123456789abcdef"))
            .fingerprint(fingerprint.map(|byte| Fingerprint::from_bytes([byte; 32])))
            .on_crash(on_crash)
            .holder(Holder::new(if fingerprint.is_some() { "host/7/name" } else { "" }))
            .traceparent(TRACEPARENT.parse::<Traceparent>().ok().filter(|_| fingerprint.is_some()))
    };
    let result = stored(&br#"{"a":1}"#[..]);
    // Records of attempts with every kind of end. One record was interrupted and has an operator's note.
    let finishes = [
        ("completed", Some(0x5a), Finish::Completed(result.clone())),
        ("failed", None, Finish::Failed(result)),
        ("too-large", None, Finish::Completed(StoredResult::TooLarge { size: 300_000 })),
        ("unencodable", None, Finish::Completed(StoredResult::Unencodable)),
        ("completed-kept-journal", None, Finish::Completed(kept())),
    ];
    for (name, fingerprint, finish) in finishes {
        let lease = wins(store, &fixed(name, fingerprint, OnCrash::Fail)).await;
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
    }
    for (name, release) in
        [("released", Release::Returned), ("not-started", Release::NotStarted), ("interrupted", Release::Interrupted)]
    {
        let lease = wins(store, &fixed(name, None, OnCrash::Retry)).await;
        assert_eq!(store.release(&lease, release).await.unwrap(), Verdict::Applied);
        if release == Release::Interrupted {
            let found = store.inspect(&lease.key).await.unwrap().expect("a record");
            let noted = Decision::break_lease(&lease.key, &found).by("alice").reason("INC-7");
            assert_eq!(store.decide(&noted).await.unwrap(), DecisionAnswer::Applied);
        }
    }
    // Pending records. The record with the name `second-attempt` was released once and reserved again.
    wins(store, &fixed("pending", None, OnCrash::Retry)).await;
    wins(store, &fixed("pending-fail-fingerprint", Some(0x5a), OnCrash::Fail)).await;
    let lease = wins(store, &fixed("second-attempt", None, OnCrash::Retry)).await;
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let again = fixed("second-attempt", None, OnCrash::Retry);
    wins(store, &again.owner(OwnerToken::from_bytes(*b"fedcba9876543210"))).await;
    // Unfinished records with a journal.
    for (name, end) in [
        ("pending-journal", None),
        ("released-journal", Some(Release::Returned)),
        ("interrupted-journal", Some(Release::Interrupted)),
    ] {
        let lease = wins(store, &fixed(name, Some(0x5a), OnCrash::Fail)).await;
        assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
        if let Some(release) = end {
            assert_eq!(store.release(&lease, release).await.unwrap(), Verdict::Applied);
        }
    }
}

/// Asserts that the record of `name`, in format 2, is an error that names this format, and that no body runs.
pub async fn is_of_a_later_format(store: &impl Store, name: &str) {
    let words = "has format 2, this release reads up to 1";
    let found = store.inspect(&key(name)).await.expect("answers").expect("a record");
    assert!(found.damage.as_ref().is_some_and(|why| why.contains(words)), "{:?}", found.damage);
    let runs = AtomicU32::new(0);
    match call(store, name, &runs).await.0 {
        Err(Error::Store { source, .. }) => {
            assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{source}");
            assert!(source.to_string().contains(words), "{source}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(runs.into_inner(), 0, "a body ran");
}

/// Makes one call of a handler that counts its runs, and returns the count.
pub async fn call(store: &impl Store, name: &str, runs: &AtomicU32) -> (Result<u32, Error>, Outcome) {
    call_with(store, name, POLICY, runs).await
}

/// Makes one call with this policy, of a handler that counts its runs.
pub async fn call_with(
    store: &impl Store,
    name: &str,
    policy: Policy,
    runs: &AtomicU32,
) -> (Result<u32, Error>, Outcome) {
    let body = async { Ok(runs.fetch_add(1, Ordering::SeqCst) + 1) };
    observe(Operation::new(store, Ok(key(name)), policy).run(body)).await
}

/// Sender to a broker that confirms each message immediately.
pub struct Confirming;

impl Sender for Confirming {
    fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async { Ok(()) })
    }
}

/// Makes a call of the key `name` whose body pushes one message. `store` has a [sender](Confirming).
///
/// # Panics
/// If the call fails.
pub async fn publish(store: &impl Store, name: &str) -> Outcome {
    let body = async {
        current()?.outbox().push("orders", OutgoingMessage::new(b"paid".to_vec()))?;
        Ok::<_, Error>(())
    };
    let (result, outcome) = observe(Operation::new(store, Key::new("test", name), POLICY).run(body)).await;
    result.expect("sent and marked");
    outcome
}

/// Checks that a journal of `largest` bytes fits with all other parts of a record at their largest, through all states
/// of the record.
///
/// # Panics
/// If a state refuses or changes the journal.
pub async fn takes_its_largest_journal(store: &impl Store, largest: usize) {
    let key = Key::new("test", "k".repeat(Key::MAX_BYTES - "1/test/".len())).unwrap();
    let holder = "h".repeat(Holder::MAX_BYTES);
    let request = || {
        ReserveRequest::new(key.clone(), store.context().new_owner(), LEASE, TTL)
            .fingerprint(Some(Fingerprint::from_bytes([1; 32])))
            .on_crash(OnCrash::Fail)
            .holder(Holder::new(&holder))
            .traceparent(TRACEPARENT.parse::<Traceparent>().ok())
    };
    let journal = Journal::new(vec![1; largest]).unwrap();
    let mut lease = wins(store, &request()).await;
    assert_eq!(store.begin(&lease).await.unwrap(), Verdict::Applied);
    assert_eq!(store.append(&lease, &journal).await.unwrap(), Verdict::Applied);
    assert_eq!(renew_all(store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    for release in [Release::Returned, Release::Interrupted] {
        assert_eq!(store.release(&lease, release).await.unwrap(), Verdict::Applied);
        let found = store.inspect(&key).await.unwrap().expect("a record");
        assert_eq!(found.record, with_journal(Record::after(&lease, release.state()), journal.clone()));
        let reopen = Decision::reopen(&key, &found).by("b".repeat(200)).reason("r".repeat(1000));
        assert_eq!(store.decide(&reopen).await.unwrap(), DecisionAnswer::Applied);
        let Reservation::Granted { lease: next, journal: Some(given), .. } = store.reserve(&request()).await.unwrap()
        else {
            panic!("the next attempt continues the journal")
        };
        assert!(given == journal, "{given:?}");
        lease = next;
    }
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}
