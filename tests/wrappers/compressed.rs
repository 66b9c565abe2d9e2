//! `Compressed`: the results that it compresses, and the results that it can or can't read back.

use idem_runtime::codec::{CodecName, ResultProblem};
use idem_runtime::record::{Record, StoredResult};
use idem_runtime::store::{Finish, JournalError, Verdict};
use idem_runtime::{Compressed, Error, Store as _, StoreErrorKind, StoreExt as _};
use idem_tests::{Fault, StoreCall};

use super::{POLICY, World, bytes_of, codec_of, completed, hex, kept, key, noise, payload, reason_of, stored, unhex};

const GOLDEN: &str = include_str!("../golden/envelope-zstd-v1.txt");

fn envelope(bytes: &[u8]) -> Finish {
    Finish::Completed(StoredResult::Encoded {
        codec: CodecName::new(b"idem:zstd").unwrap(),
        bytes: bytes.to_vec().into(),
    })
}

/// Stores these bytes as an envelope of the wrapper, and reads the result through the wrapper.
async fn read(world: &World, name: &str, bytes: &[u8]) -> StoredResult {
    let lease = world.reserved(&world.store, name).await;
    assert_eq!(world.store.finish(&lease, &envelope(bytes)).await.unwrap(), Verdict::Applied);
    let store = Compressed::new(world.store.clone());
    let met = payload(&world.replay(&store, name).await).clone();
    assert_eq!(kept(&store, name).await, met, "`reserve` and `inspect` agree");
    met
}

/// Envelope in version 1 of the format.
fn sealed(form: u8, codec: &str, size: u64, rest: &[u8]) -> Vec<u8> {
    let len = u8::try_from(codec.len()).unwrap();
    [&[1, form, len][..], codec.as_bytes(), &size.to_be_bytes(), rest].concat()
}

async fn compressed(bytes: &[u8]) -> Vec<u8> {
    let world = World::new();
    let store = Compressed::options().above(0).wrap(world.store.clone());
    world.finished(&store, "k", bytes).await;
    bytes_of(&kept(&world.store, "k").await)
}

#[tokio::test]
async fn the_envelope_of_a_wrapped_result_is_pinned() {
    let text = "{\"carrier\":\"Hinterland Parcel\"},".repeat(20);
    let world = World::new();
    let store = Compressed::options().above(0).wrap(world.store.clone());
    world.finished(&store, "compressed", text.as_bytes()).await;
    let escaped = envelope(b"of somebody else");
    let lease = world.reserved(&store, "as it was").await;
    assert_eq!(store.finish(&lease, &escaped).await.unwrap(), Verdict::Applied);

    let written = format!(
        "as-it-was {}\ncompressed {}\n",
        hex(&bytes_of(&kept(&world.store, "as it was").await)),
        hex(&bytes_of(&kept(&world.store, "compressed").await))
    );
    let [pinned_as_it_was, pinned_compressed] = GOLDEN.lines().collect::<Vec<_>>()[..] else { panic!("two lines") };
    let [as_it_was, frame] = written.lines().collect::<Vec<_>>()[..] else { panic!("two lines") };
    assert_eq!(as_it_was, pinned_as_it_was, "a released envelope never changes: give a new envelope a new version");
    // The frame depends on the version of zstd, so the test compares only the header, which the library writes.
    let header = "compressed ".len() + 2 * (3 + 4 + 8);
    assert_eq!(frame[..header], pinned_compressed[..header], "a released envelope never changes");

    let golden = |line: &str| unhex(line.split_once(' ').unwrap().1);
    assert_eq!(read(&world, "1", &golden(pinned_compressed)).await, stored(text.as_bytes()));
    assert_eq!(Finish::Completed(read(&world, "2", &golden(pinned_as_it_was)).await), escaped);
}

#[tokio::test]
async fn results_above_the_threshold_are_compressed() {
    let world = World::new();
    let store = Compressed::options().above(1000).max_bytes(5000).wrap(world.store.clone());
    for (name, bytes, codec) in [
        ("at the threshold", vec![b'x'; 1000], "json"),
        ("above it", vec![b'x'; 1001], "idem:zstd"),
        ("at the bound", vec![b'x'; 5000], "idem:zstd"),
        ("above the bound", vec![b'x'; 5001], "json"),
        ("does not get smaller", noise(2000), "json"),
    ] {
        let record = world.finished(&store, name, &bytes).await;
        let kept = kept(&world.store, name).await;
        assert_eq!(codec_of(&kept), codec, "{name}");
        assert!(bytes_of(&kept).len() <= bytes.len(), "{name}");
        assert_eq!(world.replay(&store, name).await, record, "{name}");
    }
    let default = Compressed::new(world.store.clone());
    for (len, codec) in [(1024, "json"), (1025, "idem:zstd")] {
        let name = len.to_string();
        world.finished(&default, &name, &vec![b'x'; len]).await;
        assert_eq!(codec_of(&kept(&world.store, &name).await), codec);
    }
}

#[tokio::test]
async fn compressed_results_of_every_level_are_read() {
    let parcel =
        |n: u64| format!("{{\"parcel\":{},\"city\":\"{}\"}},", n * 7919 % 10_007, "xyzzy".repeat((n % 7) as usize));
    let text: Vec<u8> = (0..5000).flat_map(|n| parcel(n).into_bytes()).collect();
    let world = World::new();
    let reader = Compressed::new(world.store.clone());
    let mut sizes = Vec::new();
    for level in [i32::MIN, -5, 0, 1, 3, 9, 19, 22, i32::MAX] {
        let store = Compressed::options().level(level).wrap(world.store.clone());
        let name = level.to_string();
        let record = world.finished(&store, &name, &text).await;
        assert_eq!(world.replay(&reader, &name).await, record, "level {level}");
        sizes.push(bytes_of(&kept(&world.store, &name).await).len());
    }
    assert!(sizes[6] < sizes[3], "a higher level is used: {sizes:?}");
}

/// The limit applies to the size that the envelope declares, and to the size that its frame declares.
#[tokio::test]
async fn no_result_larger_than_the_size_limit_is_decompressed() {
    let world = World::new();
    let bomb = compressed(&vec![0; 60 << 20]).await;
    let (header, frame) = bomb.split_at(3 + 4 + 8);
    assert_eq!(header, sealed(1, "json", 60 << 20, b""));
    assert!(frame.len() < 10_000, "60 MiB in {} bytes", frame.len());
    let whole = read(&world, "within the bound", &bomb).await;
    assert!(whole == stored(&vec![0; 60 << 20]));

    let narrow = Compressed::options().max_bytes(1 << 20).wrap(world.store.clone());
    let beyond = world.replay(&narrow, "within the bound").await;
    assert!(reason_of(payload(&beyond)).contains("more than the 1048576 that may be decompressed"), "{beyond:?}");

    for (name, size) in [("claims everything", u64::MAX), ("claims too much", (64 << 20) + 1)] {
        let reason = read(&world, name, &sealed(1, "json", size, frame)).await;
        assert!(reason_of(&reason).contains("more than the 67108864 that may be decompressed"), "{name}: {reason:?}");
    }
    // The content does not have the declared size, or the bytes are not exactly one frame.
    let small = compressed(&[b'x'; 1000]).await.split_off(3 + 4 + 8);
    for (name, size, rest) in [
        ("holds more", 1000, frame.to_vec()),
        ("holds less", 60 << 20, small.clone()),
        ("one byte less", 999, small.clone()),
        ("one byte more", 1001, small.clone()),
        ("two frames", 1000, [&small[..], &small].concat()),
        ("two frames, both claimed", 2000, [&small[..], &small].concat()),
        ("a frame and something", 1000, [&small[..], b"x"].concat()),
        ("no frame", 1000, Vec::new()),
    ] {
        let unreadable = read(&world, name, &sealed(1, "json", size, &rest)).await;
        assert_eq!(reason_of(&unreadable), "its compressed form is damaged", "{name}");
    }
}

#[tokio::test]
async fn a_damaged_byte_of_an_envelope_is_noticed_at_every_position() {
    let world = World::new();
    let text = b"{\"tracking\":\"HP-2031-0000-4711-8842-XZ\"}".repeat(30);
    let whole = compressed(&text).await;
    for len in 0..whole.len() {
        let unreadable = read(&world, &format!("cut at {len}"), &whole[..len]).await;
        assert!(matches!(unreadable, StoredResult::Unreadable { .. }), "cut at {len}: {unreadable:?}");
    }
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut altered = whole.clone();
            altered[at] ^= 1 << bit;
            match read(&world, &format!("altered at {at}.{bit}"), &altered).await {
                StoredResult::Unreadable { .. } => {}
                // A damaged codec name leads to an error about another codec, and never to another result.
                StoredResult::Encoded { codec, bytes } => {
                    assert!((3..7).contains(&at) || bytes[..] == text[..], "altered at {at}.{bit}");
                    assert!(codec.as_str() != "json" || bytes[..] == text[..], "altered at {at}.{bit}");
                }
                other => panic!("altered at {at}.{bit}: {other:?}"),
            }
        }
    }
    let later = read(&world, "later", &[&[2], &whole[1..]].concat()).await;
    assert_eq!(reason_of(&later), "its envelope has version 2, this release reads up to 1");
    for (name, envelope) in [("an object", sealed(2, "json", 3, b"[1]")), ("unknown", sealed(9, "json", 3, b"[1]"))] {
        assert_eq!(reason_of(&read(&world, name, &envelope).await), "its compressed form is damaged", "{name}");
    }
}

#[tokio::test]
async fn a_damaged_result_never_runs_again() {
    let text = b"\"x\"".repeat(1000);
    let whole = compressed(&text).await;
    for (damaged, why) in [
        (whole[..whole.len() - 1].to_vec(), "damaged"),
        (sealed(1, "json", u64::MAX, &whole[15..]), "that may be decompressed"),
        (vec![], "envelope is damaged"),
    ] {
        let world = World::new();
        let lease = world.reserved(&world.store, "call").await;
        assert_eq!(world.store.finish(&lease, &envelope(&damaged)).await.unwrap(), Verdict::Applied);
        let store = Compressed::new(world.store.clone());
        world.has_no_result(&store, why).await;
        let found = store.operator().inspect(&key("call")).await.unwrap().expect("a record");
        assert_eq!(found.steps(), Err(JournalError::UnreadableResult), "the result may have had a journal");
        assert_eq!(world.runs(), 0);
    }
}

#[tokio::test]
async fn a_repeated_finish_of_a_compressed_result_is_applied() {
    let world = World::new();
    let store = Compressed::new(world.store.clone());
    let lease = world.reserved(&store, "k").await;
    let finish = completed(&vec![b'x'; 100_000]);
    world.store.next(StoreCall::Finish, Fault::After);
    assert!(store.finish(&lease, &finish).await.unwrap_err().may_have_landed());
    let first = bytes_of(&kept(&world.store, "k").await);
    for _ in 0..3 {
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
    }
    assert_eq!(bytes_of(&kept(&world.store, "k").await), first);
    assert_eq!(world.replay(&store, "k").await, Record::after(&lease, finish.state()));
    assert_eq!(compressed(&vec![b'x'; 100_000]).await, first, "another process writes the same");
}

/// If the result is too large for the store even when compressed, the caller gets the store's error. The completion is
/// then recorded without the result.
#[tokio::test]
async fn an_error_of_the_store_about_a_too_large_result_is_passed_on() {
    let world = World::new();
    let store = Compressed::new(world.store.clone());
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    let result = "x".repeat(100_000);
    let (first, outcome) = world.call(&store, POLICY, &result).await;
    assert_eq!(first.unwrap(), result);
    assert!(outcome.recorded() && !outcome.result_stored());
    let (second, _) = world.call(&store, POLICY, &result).await;
    let Err(Error::ResultUnavailable { problem: ResultProblem::TooLarge { size: 100_002, .. }, .. }) = second else {
        panic!("the claimed size must be that of the result: {second:?}")
    };
    assert_eq!(world.runs(), 1);
}

#[test]
fn concurrent_threads_compress_independently() {
    let texts: Vec<Vec<u8>> = (0..8_usize).map(|n| format!("thread {n} ").repeat(500 + n * 100).into_bytes()).collect();
    let memory = idem_runtime::MemoryStore::new();
    std::thread::scope(|scope| {
        for (n, text) in texts.iter().enumerate() {
            let memory = &memory;
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let world = World::new();
                    for i in 0..50 {
                        let level = 1 + i % 5;
                        let store = Compressed::options().level(level).wrap(memory.clone());
                        let name = format!("{n}:{i}");
                        let record = world.finished(&store, &name, text).await;
                        assert_eq!(world.replay(&store, &name).await, record);
                        assert!(store.inspect(&key(&name)).await.unwrap().is_some());
                    }
                });
            });
        }
    });
}
