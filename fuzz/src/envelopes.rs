//! Results in envelopes: compressed, or moved to an object.

use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::clock::ManualClock;
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, OwnerToken, Reservation, ReserveRequest, Verdict};
use idem_runtime::{Compressed, Key, MemoryStore, Offloaded, Store, StoreErrorKind};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

use super::input::Input;

/// Path of the object that holds a result outside of its record.
const PATH: &str = "idem/object";

/// Asserts that a wrapped result is unwrapped unchanged. Other bytes must give an unavailable result: never an error
/// that could let the body run again, and never another result.
pub fn envelopes(data: &[u8]) {
    let mut input = Input(data);
    let objects = Arc::new(InMemory::new());
    // The clock stands still, so a call that waits is never answered.
    let inner = MemoryStore::options().clock(ManualClock::new()).build();
    let (offload, above) = (input.flag(), input.byte().into());
    let around = |inner: &MemoryStore| match offload {
        true => Offloaded::options().above(above).wrap(inner.clone(), objects.clone()).handle(),
        false => Compressed::options().above(above).wrap(inner.clone()).handle(),
    };
    let wrapped = around(&inner);
    match input.flag() {
        true => {
            let codec = input.codec();
            // The wrapper writes this result.
            let times = 1 + usize::from(input.byte());
            let (at, mask) = (u16::from_be_bytes(input.array()), input.byte());
            let bytes = Bytes::from(input.rest().repeat(times));
            let payload = StoredResult::Encoded { codec, bytes: bytes.clone() };
            finish(&*wrapped, payload.clone());
            assert_eq!(replay(&*wrapped), payload);

            // The wrapper detects damage in every byte after the form and the name of the codec. No record protects the
            // bytes of the form and the name.
            let StoredResult::Encoded { codec, bytes: mut written } = replay(&inner) else { panic!("it was stored") };
            let header = 3 + usize::from(written.get(2).copied().unwrap_or_default());
            if written != bytes && written[1] != 0 && mask != 0 {
                let mut damaged = written.to_vec();
                damaged[header + usize::from(at) % (written.len() - header)] ^= mask;
                written = damaged.into();
                let inner = MemoryStore::options().clock(ManualClock::new()).build();
                finish(&inner, StoredResult::Encoded { codec, bytes: written });
                match replay(&*around(&inner)) {
                    StoredResult::Encoded { bytes: read, .. } => assert_eq!(read, bytes),
                    other => assert!(matches!(other, StoredResult::Unreadable { .. }), "{other:?}"),
                }
            }
        }
        false => {
            // Another program may have left this envelope.
            let codec = if offload { "idem:object" } else { "idem:zstd" };
            let codec = CodecName::new(codec.as_bytes()).expect("a name");
            let bytes = match input.below(3) {
                0 => Bytes::copy_from_slice(input.rest()),
                _ => envelope(&mut input, &objects),
            };
            finish(&inner, StoredResult::Encoded { codec, bytes });
            match replay(&*wrapped) {
                StoredResult::Encoded { .. } => {}
                StoredResult::Unreadable { reason } => assert!(!reason.is_empty()),
                other => panic!("{other:?} was never recorded"),
            }
        }
    }
}

/// Builds an envelope and an object for it. Each part of the envelope may be right or wrong.
fn envelope(input: &mut Input<'_>, objects: &InMemory) -> Bytes {
    let form = input.below(4);
    let name = if input.below(8) == 0 { input.bytes() } else { b"json" };
    let size = input.integer().cast_unsigned();
    let path = if input.below(8) == 0 { input.text() } else { PATH.to_owned() };
    let digest = if input.flag() { SHA_OF_NOTHING } else { [input.byte(); 32] };
    let content = input.rest();
    let mut out = vec![1, form, u8::try_from(name.len()).unwrap_or(u8::MAX)];
    out.extend_from_slice(name);
    out.extend_from_slice(&size.to_be_bytes());
    match form {
        // The header of this zstd frame states the size in the envelope.
        1 => {
            out.extend_from_slice(&[0x28, 0xb5, 0x2f, 0xfd, 0xe0]);
            out.extend_from_slice(&size.to_le_bytes());
            out.extend_from_slice(content);
        }
        2 => {
            now(objects.put(&Path::from(PATH), PutPayload::from(content.to_vec()))).expect("puts");
            out.extend_from_slice(&digest);
            out.extend_from_slice(path.as_bytes());
        }
        _ => out.extend_from_slice(content),
    }
    out.into()
}

/// Digest of the empty text, so that some envelopes have the right digest.
const SHA_OF_NOTHING: [u8; 32] = [
    0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14, 0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24, 0x27, 0xae, 0x41,
    0xe4, 0x64, 0x9b, 0x93, 0x4c, 0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55,
];

fn request(owner: u8) -> ReserveRequest {
    ReserveRequest::new(
        Key::new("fuzz", "key").expect("a key"),
        OwnerToken::from_bytes([owner; OwnerToken::BYTES]),
        Duration::from_secs(30),
        Duration::from_secs(3600),
    )
    .max_attempts(NonZeroU32::new(1))
}

fn finish(store: &dyn Store, payload: StoredResult) {
    let Ok(Reservation::Granted { lease, .. }) = now(store.reserve(&request(1))) else { panic!("not reserved") };
    assert_eq!(now(store.finish(&lease, &Finish::Completed(payload))).expect("finishes"), Verdict::Applied);
}

/// Returns the result that both a duplicate and an operator get.
fn replay(store: &dyn Store) -> StoredResult {
    let Ok(Reservation::Finished { record, .. }) = now(store.reserve(&request(2))) else {
        panic!("a finished record is replayed")
    };
    let payload = record.state.result().expect("is finished").clone();
    match now(store.inspect(&request(2).key)) {
        Ok(inspection) => assert_eq!(inspection.expect("is there").record, record),
        Err(error) => {
            assert!(matches!(payload, StoredResult::Unreadable { .. }));
            assert!(matches!(error.kind(), StoreErrorKind::Misconfigured | StoreErrorKind::Unavailable), "{error}");
        }
    }
    payload
}

/// Returns the output of `future`, which must be ready in its first poll.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("it waits, and for what?"),
    }
}
