//! Codecs: the bytes that they write, the values that they read, and results that no handler can read any more.

#[path = "codecs/round_trips.rs"]
mod round_trips;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::{Debug, Write};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use idem_runtime::__stored::replay;
use idem_runtime::codec::{CodecName, ResultProblem, check_round_trip};
use idem_runtime::operator::Resolution;
use idem_runtime::policy::StepPolicy;
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::{Finish, Journal, JournaledStep, Reservation, ReserveRequest, Verdict};
use idem_runtime::{
    Codec, CodecError, Disposition, Error, Json, Key, MemoryStore, MessagePack, OnUndecodable, Operation, Outcome,
    Policy, Postcard, Refusal, Store, StoreExt, Undecodable, current, observe,
};
use proptest::prelude::*;
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const TTL: Duration = Duration::from_secs(3600);
const POLICY: Policy = Policy::new(TTL);

// ---- Round trips -----------------------------------------------------------------------------------------------------

fn round_trip<C: Codec, T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) {
    let bytes = C::encode(value).unwrap();
    assert_eq!(C::decode::<T>(&bytes).unwrap(), *value, "{}: {bytes:?}", C::NAME);
    check_round_trip::<C, T>(value).unwrap();
}

/// Bytes that are serialized by `serialize_bytes`. A `Vec<u8>` is serialized as a sequence of numbers.
#[derive(Clone, PartialEq, Debug)]
struct Raw(Vec<u8>);

impl Serialize for Raw {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl<'de> Visitor<'de> for Bytes {
            type Value = Vec<u8>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u8>, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = seq.next_element()? {
                    bytes.push(byte);
                }
                Ok(bytes)
            }
        }
        deserializer.deserialize_byte_buf(Bytes).map(Self)
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Unit;

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Newtype(i64);

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Variant {
    Nothing,
    One(u64),
    Two(i8, String),
    Named { flag: bool, inner: Box<Option<Variant>> },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Order {
    id: u64,
    total: f64,
    note: Option<String>,
    positions: Vec<(String, u32)>,
    tags: BTreeMap<String, Variant>,
    by_number: BTreeMap<i32, char>,
    raw: Raw,
    unit: (),
    marker: Unit,
    newtype: Newtype,
    ratio: f32,
}

fn order() -> Order {
    Order {
        id: 42,
        total: 19.99,
        note: None,
        positions: vec![("tea".to_owned(), 2), (String::new(), 0)],
        tags: BTreeMap::from([
            ("a".to_owned(), Variant::Nothing),
            ("b".to_owned(), Variant::One(300)),
            ("c".to_owned(), Variant::Two(-1, "x".to_owned())),
            ("d".to_owned(), Variant::Named { flag: true, inner: Box::new(Some(Variant::One(0))) }),
        ]),
        by_number: BTreeMap::from([(-7, 'é'), (0, '\0')]),
        raw: Raw(vec![0, 127, 128, 255]),
        unit: (),
        marker: Unit,
        newtype: Newtype(-1),
        ratio: 0.1,
    }
}

/// Runs `$body` once for each codec, with `$codec` as its type.
macro_rules! for_each_codec {
    ($codec:ident => $body:block) => {{
        {
            type $codec = Json;
            $body
        }
        {
            type $codec = MessagePack;
            $body
        }
        {
            type $codec = Postcard;
            $body
        }
    }};
}

#[test]
fn every_codec_decodes_the_value_that_it_encoded() {
    for_each_codec!(C => {
        // For every kind of value, the test uses empty, zero, extreme and long values.
        round_trip::<C, _>(&order());
        round_trip::<C, _>(&());
        round_trip::<C, _>(&Unit);
        round_trip::<C, _>(&0_u8);
        round_trip::<C, _>(&0_i64);
        round_trip::<C, _>(&0.0_f64);
        round_trip::<C, _>(&false);
        round_trip::<C, _>(&true);
        round_trip::<C, _>(&'\0');
        round_trip::<C, _>(&String::new());
        round_trip::<C, _>(&Vec::<u8>::new());
        round_trip::<C, _>(&Vec::<String>::new());
        round_trip::<C, _>(&BTreeMap::<String, u8>::new());
        round_trip::<C, _>(&None::<u8>);
        round_trip::<C, _>(&Some(0_u8));
        round_trip::<C, _>(&Some(String::new()));
        round_trip::<C, _>(&Some(false));
        round_trip::<C, _>(&[(); 0]);
        round_trip::<C, _>(&((), (), ((),)));
        round_trip::<C, _>(&vec![(); 1000]);
        round_trip::<C, _>(&vec![Vec::<u8>::new(); 300_000]);
        round_trip::<C, _>(&Raw(vec![]));
        round_trip::<C, _>(&Raw((0..=255).collect()));
        round_trip::<C, _>(&(u8::MAX, u16::MAX, u32::MAX, u64::MAX, u128::MAX, usize::MAX));
        round_trip::<C, _>(&(i8::MIN, i16::MIN, i32::MIN, i64::MIN, i128::MIN, isize::MIN));
        round_trip::<C, _>(&(i8::MAX, i16::MAX, i32::MAX, i64::MAX, i128::MAX, isize::MAX));
        round_trip::<C, _>(&[f64::MAX, f64::MIN, f64::MIN_POSITIVE, f64::EPSILON, -0.0, 5e-324, 0.1 + 0.2]);
        round_trip::<C, _>(&[f32::MAX, f32::MIN, f32::MIN_POSITIVE, -0.0]);
        round_trip::<C, _>(&"\0\"\\\u{7f}é\u{1f600}\u{10ffff}".to_owned());
        round_trip::<C, _>(&"x".repeat(100_000));
        round_trip::<C, _>(&vec![Variant::Nothing; 70_000]);
        round_trip::<C, Result<u8, String>>(&Err("no".to_owned()));
    });
    // JSON can't express infinite numbers.
    for float in [f64::INFINITY, f64::NEG_INFINITY] {
        round_trip::<MessagePack, _>(&float);
        round_trip::<Postcard, _>(&float);
    }
    round_trip::<MessagePack, _>(&BTreeMap::from([((1, true), 2)]));
    round_trip::<Postcard, _>(&BTreeMap::from([((1, true), 2)]));
    round_trip::<Postcard, _>(&(Some(()), Some(None::<u8>)));
}

fn variant() -> impl Strategy<Value = Variant> {
    let leaf = prop_oneof![
        Just(Variant::Nothing),
        any::<u64>().prop_map(Variant::One),
        (any::<i8>(), ".{0,8}").prop_map(|(number, text)| Variant::Two(number, text)),
    ];
    leaf.prop_recursive(4, 8, 1, |inner| {
        (any::<bool>(), proptest::option::of(inner))
            .prop_map(|(flag, inner)| Variant::Named { flag, inner: Box::new(inner) })
    })
}

fn any_order() -> impl Strategy<Value = Order> {
    use proptest::collection::{btree_map, vec};
    let first = (any::<u64>(), any::<f64>(), proptest::option::of(".*"), vec((".{0,4}", any::<u32>()), 0..4));
    let second = (btree_map(".{0,4}", variant(), 0..4), btree_map(any::<i32>(), any::<char>(), 0..4));
    let third = (vec(any::<u8>(), 0..20), any::<i64>(), any::<f32>());
    (first, second, third).prop_map(|((id, total, note, positions), (tags, by_number), (raw, newtype, ratio))| Order {
        id,
        total,
        note,
        positions,
        tags,
        by_number,
        raw: Raw(raw),
        unit: (),
        marker: Unit,
        newtype: Newtype(newtype),
        ratio,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn every_random_value_is_decoded_as_it_was_encoded(order in any_order()) {
        for_each_codec!(C => { round_trip::<C, _>(&order) });
    }
}

// ---- Pinned bytes -----------------------------------------------------------------------------------------------------

/// Bytes that release 0.1.0 writes. These bytes never change: a codec that writes other bytes needs another name.
struct Golden {
    lines: BTreeMap<String, String>,
    written: String,
}

impl Golden {
    fn new(file: &str) -> Self {
        let lines = file.lines().map(|line| line.split_once(' ').expect("a name, and bytes in hexadecimal"));
        Self { lines: lines.map(|(name, hex)| (name.to_owned(), hex.to_owned())).collect(), written: String::new() }
    }

    fn pin<C: Codec, T: Serialize + DeserializeOwned + PartialEq + Debug>(&mut self, name: &str, value: &T) {
        let bytes = C::encode(value).unwrap();
        let mut hex = String::new();
        for byte in &bytes {
            write!(hex, "{byte:02x}").unwrap();
        }
        let hex = if hex.is_empty() { "nothing" } else { &hex };
        writeln!(self.written, "{name} {hex}").unwrap();
        let Some(pinned) = self.lines.remove(name) else { return };
        let pinned = if pinned == "nothing" { "" } else { &pinned };
        let bytes = (0..pinned.len()).step_by(2).map(|at| u8::from_str_radix(&pinned[at..at + 2], 16).unwrap());
        let pinned: Vec<_> = bytes.collect();
        assert_eq!(C::decode::<T>(&pinned).unwrap(), *value, "{}: {name} is read as something else", C::NAME);
    }

    fn pin_all<C: Codec>(mut self, file: &str) {
        self.pin::<C, _>("order", &order());
        self.pin::<C, _>("unsigned", &(u8::MAX, u16::MAX, u32::MAX, u64::MAX, u128::MAX));
        self.pin::<C, _>("lowest", &(i8::MIN, i16::MIN, i32::MIN, i64::MIN, i128::MIN));
        self.pin::<C, _>("highest", &(i8::MAX, i16::MAX, i32::MAX, i64::MAX, i128::MAX));
        self.pin::<C, _>("zero", &(0_u8, 0_u16, 0_u32, 0_u64, 0_i8, 0_i16, 0_i32, 0_i64));
        self.pin::<C, _>("floats", &(19.99, -0.0, f64::MAX, f64::MIN_POSITIVE, 0.1_f32));
        self.pin::<C, _>("texts", &(String::new(), "é\u{1f600}\"\\\0".to_owned()));
        self.pin::<C, _>("bytes", &(Raw(vec![]), Raw(vec![0, 128, 255]), vec![0_u8, 128, 255]));
        self.pin::<C, _>("options", &(None::<u8>, Some(0_u8), Some(String::new()), Some(vec![None, Some(1)])));
        self.pin::<C, _>("maps", &(BTreeMap::<String, u8>::new(), BTreeMap::from([(-1, true), (300, false)])));
        self.pin::<C, _>("unit", &());
        self.pin::<C, _>("unit-struct", &Unit);
        self.pin::<C, _>("empty", &Vec::<String>::new());
        self.pin::<C, _>("false", &false);
        self.pin::<C, Result<(), Variant>>("error", &Err(Variant::One(1)));
        assert!(self.lines.is_empty(), "{}: no longer written: {:?}", C::NAME, self.lines.keys());
        assert_eq!(
            self.written,
            file,
            "{} writes other bytes than the file has. It now writes:\n{}",
            C::NAME,
            self.written
        );
    }
}

#[test]
fn every_codec_writes_the_bytes_of_its_golden_file() {
    fn pin<C: Codec>(file: &str) {
        Golden::new(file).pin_all::<C>(file);
    }
    assert_eq!([Json::NAME, MessagePack::NAME, Postcard::NAME], ["json", "msgpack", "postcard"]);
    pin::<Json>(include_str!("golden/codec-json.txt"));
    pin::<MessagePack>(include_str!("golden/codec-msgpack.txt"));
    pin::<Postcard>(include_str!("golden/codec-postcard.txt"));
}

/// Runs a handler whose steps leave each kind of entry in the journal, first without and then with inputs. Returns the
/// journal of its unfinished operation.
async fn unfinished_journal() -> Journal {
    /// JSON has no keys like these.
    fn no_json() -> BTreeMap<Vec<u8>, u8> {
        BTreeMap::from([(vec![1], 1)])
    }
    let store = MemoryStore::new();
    let operation = Operation::new(&store, Key::new("pay", "42"), POLICY);
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().max_value_bytes(20));
        let lost = async || Err::<u8, _>(Error::NoAttempt);
        for with_inputs in [false, true] {
            let step = |name: &'static str| {
                let step = attempt.step((name, with_inputs));
                if with_inputs { step.fingerprint(&("inputs", 7)) } else { step }
            };
            step("stored").run(async |_| Ok::<_, Error>("a value".to_owned())).await?;
            step("too large").run(async |_| Ok::<_, Error>("x".repeat(300))).await?;
            step("unencodable").run(async |_| Ok::<_, Error>(no_json())).await?;
            let _ = step("begun").fail().uncertain_errors().run(async |_| lost().await).await;
            let _ = step("undone").fail().run(async |_| lost().await).await;
        }
        lost().await
    };
    operation.run(body).await.unwrap_err();
    let found = store.operator().inspect(&"pay/42".parse().unwrap()).await.unwrap().expect("a record");
    found.record.journal.expect("a journal")
}

/// Returns the stored value of an operation whose policy keeps its journal.
async fn kept_journal() -> StoredResult {
    let store = MemoryStore::new();
    let body = async {
        current()?.set_step_policy(StepPolicy::new().keep());
        current()?.step("charge").fingerprint(&7).run(async |_| Ok::<_, Error>(17)).await
    };
    assert_eq!(Operation::new(&store, Key::new("pay", "42"), POLICY).run(body).await.unwrap(), 17);
    let found = store.inspect(&"pay/42".parse().unwrap()).await.unwrap().expect("a record");
    found.record.state.result().expect("a result").clone()
}

/// Returns name, state, value and inputs of each step.
fn told(steps: &[JournaledStep]) -> Vec<String> {
    let value = |step: &JournaledStep| match step.value() {
        Some(StoredResult::Encoded { codec, bytes }) => format!("{} {bytes:?}", codec.as_str()),
        other => format!("{other:?}"),
    };
    let said = |step: &JournaledStep| {
        format!("{} {} {} {} {}", step.name(), step.attempt(), step.state(), value(step), step.inputs().is_some())
    };
    steps.iter().map(said).collect()
}

#[tokio::test]
async fn journals_and_kept_journals_have_the_bytes_of_their_golden_file() {
    let hex = |bytes: &[u8]| bytes.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    let journal = unfinished_journal().await;
    let StoredResult::Encoded { codec, bytes } = kept_journal().await else { panic!("a stored result") };
    let written = format!("journal {}\n{} {}\n", hex(journal.bytes()), codec.as_str(), hex(&bytes));
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        std::fs::write(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/journal-v1.txt"), &written)
            .unwrap();
    }
    let golden = include_str!("golden/journal-v1.txt");
    assert_eq!(written, golden, "a released format never changes: give a new format a new version");

    // The pinned bytes are read: each kind of entry, without and with inputs.
    let pinned: Vec<Vec<u8>> = golden
        .lines()
        .map(|line| {
            let text = line.split_once(' ').expect("a name, and bytes in hexadecimal").1;
            (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
        })
        .collect();
    let steps = Journal::new(pinned[0].clone()).unwrap().steps().unwrap();
    let expected = [false, true].map(|inputs| {
        [
            format!("stored[{inputs}] 1 ended json b\"\\\"a value\\\"\" {inputs}"),
            format!("too large[{inputs}] 1 ended Some(TooLarge(302 bytes)) {inputs}"),
            format!("unencodable[{inputs}] 1 ended Some(Unencodable) {inputs}"),
            format!("begun[{inputs}] 1 in doubt None {inputs}"),
            format!("undone[{inputs}] 1 undone None {inputs}"),
        ]
    });
    assert_eq!(told(&steps), expected.concat());

    // A record with the pinned value is replayed, and its steps are found.
    let store = MemoryStore::new();
    let key: Key = "pay/kept".parse().unwrap();
    let request = ReserveRequest::new(key.clone(), store.context().new_owner(), TTL, TTL);
    let Reservation::Granted { lease, .. } = store.reserve(&request).await.unwrap() else { panic!("granted") };
    let finish = Finish::Completed(StoredResult::Encoded { codec, bytes: pinned[1].clone().into() });
    assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
    let never = async || -> Result<u32, Error> { panic!("the operation has finished") };
    assert_eq!(Operation::new(&store, Ok(key.clone()), POLICY).run(never()).await.unwrap(), 17);
    let found = store.operator().inspect(&key).await.unwrap().expect("a record");
    assert_eq!(told(&found.steps().unwrap()), ["charge 1 ended json b\"17\" true"]);
}

// ---- A type that changes -----------------------------------------------------------------------------------------------

#[test]
fn codecs_with_field_names_accept_added_and_removed_fields() {
    #[derive(Serialize)]
    struct Before {
        a: u32,
        b: String,
        gone: bool,
    }
    #[derive(Deserialize, PartialEq, Debug)]
    struct Now {
        b: String,
        #[serde(default)]
        new: Vec<u8>,
        a: Option<u32>,
        optional: Option<u8>,
    }
    fn check<C: Codec>() {
        let before = C::encode(&Before { a: 1, b: "x".to_owned(), gone: true }).unwrap();
        let now = Now { b: "x".to_owned(), new: vec![], a: Some(1), optional: None };
        assert_eq!(C::decode::<Now>(&before).unwrap(), now);
    }
    check::<Json>();
    check::<MessagePack>();
}

/// Returns Postcard's error for a value that is written as an `A` and read as a `B`.
fn read_as<A: Serialize, B: DeserializeOwned + Debug>(written: &A) -> String {
    Postcard::decode::<B>(&Postcard::encode(written).unwrap()).unwrap_err().to_string()
}

#[test]
fn postcard_refuses_bytes_of_a_value_of_another_type() {
    const OTHER: &str = "it was written as a value of another type";
    // The values are written with the types of module `then`, and read with the types of module `now`.
    mod then {
        use super::*;
        #[derive(Serialize)]
        pub(crate) struct Order {
            pub(crate) net: u32,
            pub(crate) gross: u32,
        }
        #[derive(Serialize)]
        pub(crate) struct Meters(pub(crate) u32);
        #[derive(Serialize)]
        pub(crate) enum Stage {
            Open,
            Paid(u8),
            Sent { at: u8 },
        }
    }
    mod now {
        use super::*;
        #[derive(Deserialize, Debug)]
        pub(crate) struct Order {
            #[expect(dead_code, reason = "never read")]
            gross: u32,
            #[expect(dead_code, reason = "never read")]
            net: u32,
        }
        #[derive(Deserialize, Debug)]
        #[serde(rename = "Order")]
        pub(crate) struct Same {
            pub(crate) net: u32,
            pub(crate) gross: u32,
        }
        #[derive(Deserialize, Debug)]
        pub(crate) struct Feet(#[expect(dead_code, reason = "never read")] u32);
        #[derive(Deserialize, Debug)]
        pub(crate) enum Stage {
            Draft,
            Paid(u8),
            Sent {
                #[expect(dead_code, reason = "never read")]
                by: u8,
            },
        }
    }
    // The two types of each pair differ in the order of fields, a unit of measure, names of variants or fields of
    // variants. Without the type's shape, values of both types would have the same bytes.
    assert_eq!(read_as::<_, now::Order>(&then::Order { net: 1, gross: 2 }), OTHER);
    assert_eq!(read_as::<_, now::Feet>(&then::Meters(7)), OTHER);
    assert_eq!(read_as::<_, now::Stage>(&then::Stage::Open), OTHER);
    assert_eq!(read_as::<_, now::Stage>(&then::Stage::Sent { at: 1 }), OTHER);
    let paid = Postcard::encode(&then::Stage::Paid(1)).unwrap();
    assert!(matches!(Postcard::decode(&paid).unwrap(), now::Stage::Paid(1) | now::Stage::Draft));
    // A type with another name reads the value if it declares the old name.
    let order = Postcard::encode(&then::Order { net: 1, gross: 2 }).unwrap();
    assert!(matches!(Postcard::decode(&order).unwrap(), now::Same { net: 1, gross: 2 }));
    // Values of these pairs of standard types have the same bytes. Only the shape distinguishes the types.
    assert_eq!(read_as::<_, u64>(&1_u32), OTHER);
    assert_eq!(read_as::<_, i32>(&2_u32), OTHER);
    assert_eq!(read_as::<_, Vec<u8>>(&"text"), OTHER);
    assert_eq!(read_as::<_, bool>(&1_u8), OTHER);
    assert_eq!(read_as::<_, (u8, u8)>(&[1_u8, 2].map(|_| false)), OTHER);
    assert_eq!(read_as::<_, (Vec<u8>, Vec<u8>)>(&(vec![1_u16], vec![2_u8])), OTHER);
    assert_eq!(read_as::<_, BTreeMap<u8, u8>>(&vec![(1_u8, 2_u8)]), OTHER);
    assert_eq!(read_as::<_, Option<u8>>(&Some(1_i8)), OTHER);
    assert_eq!(read_as::<_, ()>(&Unit), OTHER);
}

#[test]
fn postcard_says_why_it_cannot_read_the_bytes() {
    assert_eq!(read_as::<_, (u8, u8)>(&(1_u8, 2_u8, 3_u8)), "the value ends 1 bytes before the end");
    assert_eq!(read_as::<_, (u8, u8, u8)>(&(1_u8, 2_u8)), "the bytes end early, after byte 2");
    assert_eq!(read_as::<_, bool>(&2_u8), "a value does not fit its type, after byte 1");
    assert_eq!(read_as::<_, Option<u8>>(&(7_u8, 1_u8)), "a value does not fit its type, after byte 1");
    assert_eq!(read_as::<_, Variant>(&9_u32), "a value does not fit its type, after byte 1");
    assert_eq!(read_as::<_, u16>(&70_000_u32), "a value does not fit its type, after byte 3");
    assert_eq!(read_as::<_, String>(&vec![0xff_u8]), "a text is not UTF-8, after byte 2");
    assert_eq!(
        read_as::<_, serde_json::Value>(&()),
        "Postcard can't decode a type that asks for the kind of a value, after byte 0"
    );
    assert_eq!(Postcard::decode::<()>(b"1234567").unwrap_err().to_string(), "the bytes end early");
}

#[test]
fn postcard_writes_nothing_that_it_would_misread() {
    #[derive(Serialize, Deserialize, Clone)]
    struct Sparse {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        a: Option<u8>,
        b: Option<u8>,
    }
    #[derive(Serialize, Deserialize, Clone)]
    enum Outer {
        Named {
            #[serde(default, skip_serializing_if = "Option::is_none")]
            a: Option<u8>,
        },
        New(Sparse),
    }
    #[derive(Serialize)]
    struct Flat {
        #[serde(flatten)]
        inner: Sparse,
    }
    fn refused<T: Serialize>(value: &T) {
        assert!(Postcard::encode(value).is_err());
        assert!(MessagePack::encode(value).is_ok());
    }
    // Without the check, these bytes would be read as `a: Some(0)` without `b`.
    let sparse = Sparse { a: None, b: Some(0) };
    refused(&sparse);
    refused(&Some(&sparse));
    refused(&vec![sparse.clone()]);
    refused(&(1, [&sparse], ()));
    refused(&BTreeMap::from([(1, &sparse)]));
    refused(&Outer::Named { a: None });
    refused(&Outer::New(sparse.clone()));
    refused(&Flat { inner: Sparse { a: Some(1), b: None } });
    let full = Postcard::encode(&Outer::New(Sparse { a: Some(1), b: None })).unwrap();
    assert!(matches!(Postcard::decode(&full).unwrap(), Outer::New(Sparse { a: Some(1), b: None })));
}

// ---- Bytes that no codec wrote ----------------------------------------------------------------------------------------------------------

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Tree {
    Leaf,
    Node(Box<Tree>),
    Named { tree: Box<Tree> },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct List {
    next: Option<Box<List>>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Many(Vec<Many>);

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Keyed(BTreeMap<u8, Keyed>);

#[derive(PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Number(u64),
    List(Vec<Untagged>),
    Map(BTreeMap<String, Untagged>),
}

/// Deserializes any value by skipping it.
#[derive(Debug)]
struct Ignoring;

impl<'de> Deserialize<'de> for Ignoring {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// Decodes the bytes as types of every kind; no call may panic. Returns the number of values that were decoded.
fn decode_as_everything<C: Codec>(bytes: &[u8]) -> usize {
    fn is_ok<C: Codec, T: DeserializeOwned>(bytes: &[u8]) -> usize {
        C::decode::<T>(bytes).is_ok().into()
    }
    is_ok::<C, Order>(bytes)
        + is_ok::<C, Tree>(bytes)
        + is_ok::<C, List>(bytes)
        + is_ok::<C, Many>(bytes)
        + is_ok::<C, Keyed>(bytes)
        + is_ok::<C, Untagged>(bytes)
        + is_ok::<C, Ignoring>(bytes)
        + is_ok::<C, serde_json::Value>(bytes)
        + is_ok::<C, Vec<()>>(bytes)
        + is_ok::<C, Vec<Vec<()>>>(bytes)
        + is_ok::<C, std::collections::BTreeSet<()>>(bytes)
        + is_ok::<C, BTreeMap<(), bool>>(bytes)
        + is_ok::<C, Vec<[u64; 16]>>(bytes)
        + is_ok::<C, std::collections::HashMap<u64, Vec<u64>>>(bytes)
        + is_ok::<C, (String, Raw, u128, char, f64)>(bytes)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn random_bytes_cause_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        for_each_codec!(C => { decode_as_everything::<C>(&bytes); });
    }

    #[test]
    fn damaged_bytes_cause_no_panic(order in any_order(), at in any::<prop::sample::Index>(), mask in 1..=u8::MAX) {
        for_each_codec!(C => {
            let mut bytes = C::encode(&order).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
            decode_as_everything::<C>(&bytes);
            assert!(C::decode::<Order>(&bytes[..at]).is_err(), "cut off");
        });
    }
}

#[test]
fn bytes_after_a_value_are_an_error() {
    for_each_codec!(C => {
        for more in 0..=u8::MAX {
            let mut bytes = C::encode(&order()).unwrap();
            // JSON allows white space after a value.
            if C::NAME == "json" && more.is_ascii_whitespace() {
                continue;
            }
            bytes.push(more);
            assert!(C::decode::<Order>(&bytes).is_err(), "{} {more}", C::NAME);
            let mut bytes = C::encode(&Variant::Nothing).unwrap();
            bytes.push(more);
            assert!(C::decode::<Variant>(&bytes).is_err(), "{} {more}", C::NAME);
            let mut bytes = C::encode(&()).unwrap();
            bytes.push(more);
            assert!(C::decode::<()>(&bytes).is_err(), "{} {more}", C::NAME);
        }
    });
}

#[test]
fn endlessly_nested_bytes_are_an_error() {
    fn deep<C: Codec, T: DeserializeOwned + Debug>(level: &[u8]) {
        let bytes = level.repeat(1_000_000);
        let error = C::decode::<T>(&bytes).unwrap_err().to_string();
        assert!(C::NAME == "json" || error.starts_with("it is nested too deeply"), "{error}");
    }
    let everything = || {
        deep::<Json, Tree>(br#"{"Node":"#);
        deep::<Json, List>(br#"{"next":"#);
        deep::<Json, Many>(b"[");
        deep::<Json, Untagged>(b"[");
        deep::<MessagePack, Tree>(b"\x81\xa4Node");
        deep::<MessagePack, Tree>(b"\x81\x01");
        deep::<MessagePack, Tree>(b"\x81\xa5Named\x81\xa4tree");
        deep::<MessagePack, List>(b"\x81\xa4next");
        deep::<MessagePack, List>(b"\x91");
        deep::<MessagePack, Many>(b"\x91");
        deep::<MessagePack, Keyed>(b"\x81\x01");
        deep::<MessagePack, Untagged>(b"\x91");
        // `Ignoring` skips the nested value instead of reading it.
        deep::<MessagePack, Ignoring>(b"\x91");
        deep::<Postcard, Tree>(b"\x01");
        deep::<Postcard, Tree>(b"\x02");
        deep::<Postcard, List>(b"\x01");
        deep::<Postcard, Many>(b"\x01");
        deep::<Postcard, Keyed>(b"\x01\x01");
    };
    // The stack of 1 MiB is half of the stack of a runtime's thread.
    std::thread::Builder::new().stack_size(1 << 20).spawn(everything).unwrap().join().unwrap();

    // Values are decoded if their nesting is as deep as that of real types.
    let mut tree = Tree::Leaf;
    for _ in 0..30 {
        tree = Tree::Named { tree: Box::new(Tree::Node(Box::new(tree))) };
    }
    for_each_codec!(C => { round_trip::<C, _>(&tree) });
}

#[test]
fn a_false_length_in_encoded_bytes_reserves_no_memory() {
    // The bytes claim the largest possible length, and end with eight bytes in the place of the shape's hash.
    let most = [&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01][..], &[0; 8]].concat();
    assert_eq!(decode_as_everything::<Postcard>(&most), 0);
    let error = Postcard::decode::<Vec<()>>(&most).unwrap_err().to_string();
    assert_eq!(error, "it claims to have more elements than it can hold, after byte 10");
    // A thousand lists claim 65,535 elements each: one such list is within the limit, and all together exceed it.
    let lists = [&[0xe8, 0x07][..], &[0xff, 0xff, 0x03].repeat(1000), &[0; 8]].concat();
    assert!(Postcard::decode::<Vec<Vec<()>>>(&lists).is_err());
    for marker in [0xc6, 0xc9, 0xdb, 0xdd, 0xdf] {
        let claim = [marker, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(decode_as_everything::<MessagePack>(&claim), 0);
        assert_eq!(decode_as_everything::<MessagePack>(&claim.repeat(100)), 0);
    }
}

#[test]
fn errors_of_codecs_quote_no_result() {
    #[derive(Debug, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Fields {
        card: String,
    }
    fn check<C: Codec, T: DeserializeOwned + Debug>(value: &impl Serialize) {
        let error = C::decode::<T>(&C::encode(value).unwrap()).unwrap_err();
        let mut said = format!("{error} {error:?}");
        let mut source = error.source();
        while let Some(error) = source {
            said = format!("{said} {error} {error:?}");
            source = error.source();
        }
        assert!(!said.contains("4111"), "{}: {said}", C::NAME);
    }
    let card = "4111 1111".to_owned();
    for_each_codec!(C => {
        check::<C, (u32, u32)>(&card);
        check::<C, (Variant, u64)>(&card);
        check::<C, Vec<bool>>(&vec![41_111_111_u64]);
        check::<C, u8>(&41_111_111_u64);
        check::<C, Fields>(&BTreeMap::from([(card.clone(), card.clone())]));
        check::<C, serde_json::Number>(&card);
        check::<C, std::net::IpAddr>(&card);
        check::<C, (char, String)>(&card);
    });
}

// ---- Through the engine ------------------------------------------------------------------------------------------------

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Failure {
    Declined(u32),
    #[serde(skip)]
    Idempotency(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Idempotency(error.to_string())
    }
}

/// Store and the key of one operation, with the number of runs.
#[derive(Default)]
struct World {
    store: MemoryStore,
    runs: AtomicU32,
}

impl World {
    fn operation(&self, policy: Policy) -> Operation {
        Operation::new(&self.store, Key::new("test", "k"), policy)
    }

    #[allow(clippy::unused_async, reason = "bodies need not wait")]
    async fn body<T, E>(&self, result: Result<T, E>) -> Result<T, E> {
        self.runs.fetch_add(1, Ordering::SeqCst);
        result
    }

    async fn value<C: Codec, T>(&self, policy: Policy, value: T) -> (Result<T, Error>, Outcome)
    where
        T: Serialize + DeserializeOwned,
    {
        observe(self.operation(policy).codec::<C>().run(self.body(Ok(value)))).await
    }

    async fn result<C: Codec, T, E>(&self, policy: Policy, result: Result<T, E>) -> (Result<T, E>, Outcome)
    where
        T: Serialize + DeserializeOwned,
        E: Serialize + DeserializeOwned + From<Error>,
    {
        observe(self.operation(policy).codec::<C>().record_errors().run(self.body(result))).await
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    async fn record(&self) -> Record {
        self.store.inspect(&Key::new("test", "k").unwrap()).await.unwrap().expect("a record").record
    }

    /// Makes a call that finds a recorded result which the handler can't read. Checks the outcome and the record, and
    /// returns the error.
    async fn unavailable<C: Codec, T: Serialize + DeserializeOwned + Debug>(&self, policy: Policy, value: T) -> Error {
        let before = self.record().await;
        let (result, outcome) = self.value::<C, T>(policy, value).await;
        let error = result.unwrap_err();
        assert!(!outcome.executed() && !outcome.replayed(), "{outcome:?}");
        assert_eq!(outcome.refusal(), Some(Refusal::ResultUnavailable));
        // A result of another version of the handler leads to retries until the deployment is corrected.
        let kept = matches!(outcome.disposition(), Disposition::Retry { .. });
        assert_eq!((kept, outcome.misconfigured()), (error.is_misconfigured(), error.is_misconfigured()));
        assert!(kept || outcome.disposition() == Disposition::DeadLetter, "a failure is not acknowledged");
        assert_eq!(self.record().await, before, "a record is not rewritten");
        assert_eq!(self.runs(), 1);
        error
    }
}

fn reason(error: Error) -> ResultProblem {
    match error {
        Error::ResultUnavailable { problem: reason, .. } => reason,
        error => panic!("{error:?}"),
    }
}

/// JSON under the codec name `own`, as an example of a user's codec.
struct Own;

impl Codec for Own {
    const NAME: &'static str = "own";

    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
        Json::encode(value)
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        Json::decode(bytes)
    }
}

/// Codec of a user that replaces a codec of the library, and reads the old results.
struct Successor;

impl Codec for Successor {
    const NAME: &'static str = "successor";
    const READS_OTHERS: bool = true;

    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
        Json::encode(value)
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        Json::decode(bytes)
    }
}

async fn written_and_read<W: Codec, R: Codec>() {
    async fn value<W: Codec, R: Codec, T>(value: T)
    where
        T: Serialize + DeserializeOwned + PartialEq + Debug + Clone,
    {
        let world = World::default();
        let (first, outcome) = world.value::<W, T>(POLICY, value.clone()).await;
        assert_eq!(first.unwrap(), value);
        assert!(outcome.executed() && outcome.result_stored(), "{outcome:?}");
        let before = world.record().await;
        let (duplicate, outcome) = world.value::<R, T>(POLICY, value.clone()).await;
        assert_eq!(duplicate.unwrap(), value, "{} to {}", W::NAME, R::NAME);
        assert!(outcome.replayed() && !outcome.executed() && outcome.result_stored(), "{outcome:?}");
        assert_eq!((outcome.disposition(), outcome.attempt(), world.runs()), (Disposition::Ack, Some(1), 1));
        assert_eq!(world.record().await, before, "a record is not rewritten");
        let State::Completed(StoredResult::Encoded { codec, .. }) = before.state else { panic!("{before:?}") };
        assert_eq!(codec.as_str(), W::NAME);
    }
    value::<W, R, _>(order()).await;
    value::<W, R, _>(()).await;
    value::<W, R, _>(0).await;
    value::<W, R, _>(false).await;
    value::<W, R, _>(String::new()).await;
    value::<W, R, _>(Vec::<u8>::new()).await;
    value::<W, R, _>(None::<u8>).await;

    let world = World::default();
    let failure = || Err::<u8, _>(Failure::Declined(7));
    assert_eq!(world.result::<W, _, _>(POLICY, failure()).await.0, failure());
    let (duplicate, outcome) = world.result::<R, _, _>(POLICY, failure()).await;
    assert_eq!(duplicate, failure());
    assert!(outcome.replayed() && !outcome.executed(), "{outcome:?}");
    assert_eq!((outcome.disposition(), world.runs()), (Disposition::DeadLetter, 1));
}

#[tokio::test]
async fn every_codec_reads_the_results_of_every_other() {
    for_each_codec!(W => {
        for_each_codec!(R => { written_and_read::<W, R>().await });
        written_and_read::<W, Successor>().await;
    });
    written_and_read::<Own, Own>().await;
}

#[tokio::test]
async fn a_users_codec_reads_other_codecs_only_with_reads_others() {
    let world = World::default();
    world.value::<Json, _>(POLICY, 7).await.0.unwrap();
    let reason = reason(world.unavailable::<Own, _>(POLICY, 7).await);
    let ResultProblem::OtherCodec { codec, .. } = &reason else { panic!("{reason:?}") };
    assert_eq!(codec, "json");

    let world = World::default();
    world.value::<Own, _>(POLICY, 7).await.0.unwrap();
    let error = world.unavailable::<Json, _>(POLICY, 7).await;
    let said = error.to_string();
    assert!(said.contains("codec `own` wrote it; `on_undecodable` can name a function"), "{said}");
    assert!(matches!(self::reason(error), ResultProblem::OtherCodec { .. }));
}

// ---- Bytes -------------------------------------------------------------------------------------------------------------

/// Returns the codec and the bytes that a handler with the codec `C` records for `value`. The result is then replayed
/// to a handler of every codec.
async fn recorded<C: Codec, T>(value: T) -> (String, Vec<u8>)
where
    T: Serialize + DeserializeOwned + PartialEq + Debug + Clone,
{
    let world = World::default();
    assert_eq!(world.value::<C, T>(POLICY, value.clone()).await.0.unwrap(), value);
    let (replayed, outcome) = world.value::<C, T>(POLICY, value.clone()).await;
    assert_eq!(replayed.unwrap(), value);
    assert!(outcome.replayed(), "{outcome:?}");
    if ["json", "msgpack", "postcard"].contains(&C::NAME) {
        for_each_codec!(R => { assert_eq!(world.value::<R, T>(POLICY, value.clone()).await.0.unwrap(), value) });
        assert_eq!(world.value::<Successor, T>(POLICY, value.clone()).await.0.unwrap(), value);
    }
    assert_eq!(world.runs(), 1);
    match world.record().await.state {
        State::Completed(StoredResult::Encoded { codec, bytes }) => (codec.as_str().to_owned(), bytes.to_vec()),
        state => panic!("{state:?}"),
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Pdf(Vec<u8>);

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Bytes(Vec<u8>),
    Mixed(Vec<Content>),
    Number(i64),
}

#[tokio::test]
async fn results_of_plain_bytes_are_recorded_unchanged() {
    let every: Vec<u8> = (0..=255).collect();
    for bytes in [every, vec![0], b"null".to_vec(), b"[1,2]".to_vec(), vec![255; 20_000]] {
        let expected = ("bytes".to_owned(), bytes.clone());
        assert_eq!(recorded::<Json, Vec<u8>>(bytes.clone()).await, expected);
        assert_eq!(recorded::<Json, Box<[u8]>>(bytes.clone().into()).await, expected);
        assert_eq!(recorded::<Json, VecDeque<u8>>(bytes.clone().into()).await, expected);
        assert_eq!(recorded::<Json, Bytes>(bytes.clone().into()).await, expected);
        assert_eq!(recorded::<Json, Raw>(Raw(bytes.clone())).await, expected);
        assert_eq!(recorded::<Json, Pdf>(Pdf(bytes.clone())).await, expected);
        assert_eq!(recorded::<Json, Option<Bytes>>(Some(bytes.clone().into())).await, expected);
        assert_eq!(recorded::<Json, Option<Pdf>>(Some(Pdf(bytes.clone()))).await, expected);
        assert_eq!(recorded::<Json, Content>(Content::Bytes(bytes.clone())).await, expected);
        // Only the JSON codec of the library records plain bytes; other codecs, also a user's codec, encode bytes like
        // any other value.
        assert_eq!(recorded::<MessagePack, Bytes>(bytes.clone().into()).await.0, "msgpack");
        assert_eq!(recorded::<Postcard, Vec<u8>>(bytes.clone()).await.0, "postcard");
        assert_eq!(recorded::<Successor, Vec<u8>>(bytes.clone()).await.0, "successor");
        let own = recorded::<Own, Vec<u8>>(bytes.clone()).await;
        assert_eq!(own, ("own".to_owned(), serde_json::to_vec(&bytes).unwrap()));
    }
}

#[tokio::test]
async fn only_results_of_plain_bytes_are_not_recorded_as_json() {
    async fn is_json<T: Serialize + DeserializeOwned + PartialEq + Debug + Clone>(value: T) {
        let expected = ("json".to_owned(), serde_json::to_vec(&value).unwrap());
        assert_eq!(recorded::<Json, T>(value).await, expected);
    }
    is_json(Vec::<u8>::new()).await;
    is_json(Bytes::new()).await;
    is_json(Some(Vec::<u8>::new())).await;
    is_json(None::<Vec<u8>>).await;
    is_json(7_u8).await;
    is_json((1_u8, 2_u8)).await;
    is_json([1_u8; 32]).await;
    is_json(vec![1_u16, 2]).await;
    is_json(vec![1_i8, 2]).await;
    is_json(vec![Some(1_u8), None]).await;
    is_json(vec![vec![1_u8]]).await;
    is_json("bytes".to_owned()).await;
    is_json(BTreeMap::from([(1_u8, 2_u8)])).await;
    is_json(Ok::<Vec<u8>, String>(vec![1])).await;
    is_json((Pdf(vec![1, 2]), Raw(vec![3]))).await;
    is_json(serde_json::json!([1, 2, 3])).await;
    // In these lists some elements are bytes, and other elements are not.
    for at in 0..4 {
        let mut numbers = [const { Byte(Some(1)) }; 4].to_vec();
        numbers[at] = Byte(None);
        is_json(numbers).await;
    }
}

/// Element that serializes as a byte or as the text "none".
#[derive(Clone, PartialEq, Debug)]
struct Byte(Option<u8>);

impl Serialize for Byte {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(byte) => serializer.serialize_u8(byte),
            None => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for Byte {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde_json::Value::deserialize(deserializer).map(|value| Self(value.as_u64().and_then(|it| it.try_into().ok())))
    }
}

/// A type reads recorded bytes in the same way as a JSON array of the same numbers.
#[test]
fn recorded_bytes_are_read_like_a_json_array_of_numbers() {
    // Reads the bytes from a recorded JSON array and from recorded raw bytes, which must give the same value.
    fn read<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
        let [array, raw] =
            [("json", serde_json::to_vec(bytes).unwrap()), ("bytes", bytes.to_vec())].map(|(name, bytes)| {
                let codec = CodecName::new(name.as_bytes()).unwrap();
                let state = State::Completed(StoredResult::Encoded { codec, bytes: bytes.into() });
                (replay(&state, OnUndecodable::Error) as Result<Result<T, ()>, _>).map(Result::unwrap)
            });
        match (array, raw) {
            (Ok(array), Ok(raw)) => {
                assert_eq!(array, raw);
                Some(raw)
            }
            (Err(ResultProblem::Undecodable { .. }), Err(ResultProblem::Undecodable { source, .. })) => {
                assert_eq!(source.to_string(), "the bytes do not fit the type", "the error quotes no bytes");
                None
            }
            (array, raw) => panic!("{array:?}, and {raw:?}"),
        }
    }
    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct Fields {
        a: u8,
        b: i64,
        c: f32,
    }
    for bytes in [&[1, 2, 3][..], &[0], &[200, 0, 255], &[], b"abc", b"\"abc\"", b"[1]"] {
        assert_eq!(read::<Vec<u8>>(bytes).as_deref(), Some(bytes));
        assert_eq!(read::<Bytes>(bytes).as_deref(), Some(bytes));
        assert_eq!(read::<Option<Pdf>>(bytes), Some(Some(Pdf(bytes.to_vec()))));
        assert!(read::<Raw>(bytes).is_some() && read::<BTreeSet<u8>>(bytes).is_some());
        assert!(read::<Vec<u64>>(bytes).is_some() && read::<Vec<f32>>(bytes).is_some());
        assert!(read::<serde_json::Value>(bytes).is_some_and(|it| it.is_array()));
        assert_eq!(read::<Content>(bytes), Some(Content::Bytes(bytes.to_vec())));
        assert_eq!(read::<Vec<i8>>(bytes).is_some(), bytes.iter().all(u8::is_ascii));
        assert_eq!(read::<Fields>(bytes).is_some(), bytes.len() == 3);
        assert_eq!(read::<(u8, i64, f64)>(bytes).is_some(), bytes.len() == 3);
        assert_eq!(read::<[u8; 3]>(bytes).is_some(), bytes.len() == 3);
        assert!(read::<Unit>(bytes).is_none() && read::<()>(bytes).is_none());
        assert!(read::<String>(bytes).is_none() && read::<u8>(bytes).is_none() && read::<bool>(bytes).is_none());
        assert!(read::<Variant>(bytes).is_none() && read::<BTreeMap<u8, u8>>(bytes).is_none());
        assert!(read::<Vec<Vec<u8>>>(bytes).is_none_or(|it| it.is_empty()));
    }
}

#[tokio::test]
async fn recorded_bytes_obey_the_size_limit_migrations_and_the_codec_check() {
    fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        Json::encode(&String::from_utf8(recorded.decode::<Vec<u8>>()?)?)
    }
    // `max_result_bytes` limits the recorded bytes, and not the longer JSON form.
    let world = World::default();
    world.value::<Json, _>(POLICY.max_result_bytes(100), vec![200_u8; 100]).await.0.unwrap();
    assert_eq!(world.value::<Json, _>(POLICY, vec![0_u8]).await.0.unwrap(), [200; 100]);
    let world = World::default();
    world.value::<Json, _>(POLICY.max_result_bytes(100), vec![200_u8; 101]).await.0.unwrap();
    let reason = self::reason(world.unavailable::<Json, _>(POLICY, vec![0_u8]).await);
    assert!(matches!(reason, ResultProblem::TooLarge { size: 101, .. }), "{reason:?}");

    // A user's codec without `READS_OTHERS` reads no results of the codec `bytes`.
    let world = World::default();
    world.value::<Json, _>(POLICY, vec![7_u8]).await.0.unwrap();
    let reason = self::reason(world.unavailable::<Own, _>(POLICY, vec![7_u8]).await);
    let ResultProblem::OtherCodec { codec, .. } = &reason else { panic!("{reason:?}") };
    assert_eq!(codec, "bytes");

    // A migration function also gets results that are recorded as bytes. A result of bytes that an operator supplies is
    // recorded as bytes.
    let world = World::default();
    world.value::<Json, _>(POLICY, b"label".to_vec()).await.0.unwrap();
    let (migrated, outcome) = world.value::<Json, _>(migrating(migrate), String::new()).await;
    assert_eq!(migrated.unwrap(), "label");
    assert!(outcome.replayed());
    let given = |codec: &[u8], bytes: &'static [u8]| {
        let codec = CodecName::new(codec).unwrap();
        Resolution::from(Finish::Completed(StoredResult::Encoded { codec, bytes: Bytes::from_static(bytes) }))
    };
    assert_eq!(Resolution::completed(&b"label".to_vec()).unwrap(), given(b"bytes", b"label"));
    assert_eq!(Resolution::completed_by::<Own, _>(&vec![7_u8]).unwrap(), given(b"own", b"[7]"));
}

// ---- Migration ---------------------------------------------------------------------------------------------------------

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Before {
    parcel_number: u64,
    weight: String,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Now {
    parcel: String,
    grams: u32,
}

const BEFORE: fn() -> Before = || Before { parcel_number: 7, weight: "1200".to_owned() };
const NOW: fn() -> Now = || Now { parcel: "P7".to_owned(), grams: 1200 };

fn migrate_to<C: Codec>(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    assert!(!recorded.is_error());
    let before: Before = recorded.decode()?;
    C::encode(&Now { parcel: format!("P{}", before.parcel_number), grams: before.weight.parse()? })
}

fn must_not_be_asked(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    panic!("asked about {recorded:?}")
}

const fn migrating(migrate: idem_runtime::policy::Migrate) -> Policy {
    POLICY.on_undecodable(OnUndecodable::Migrate(migrate))
}

#[tokio::test]
async fn old_results_are_migrated_at_each_replay() {
    async fn check<W: Codec, R: Codec>() {
        let world = World::default();
        world.value::<W, _>(POLICY, BEFORE()).await.0.unwrap();
        let before = world.record().await;
        world.unavailable::<R, _>(POLICY, NOW()).await;
        for _ in 0..2 {
            let (result, outcome) = world.value::<R, _>(migrating(migrate_to::<R>), NOW()).await;
            assert_eq!(result.unwrap(), NOW(), "{} to {}", W::NAME, R::NAME);
            assert!(outcome.replayed() && outcome.recorded() && !outcome.executed(), "{outcome:?}");
            assert_eq!((outcome.disposition(), outcome.attempt(), world.runs()), (Disposition::Ack, Some(1), 1));
            assert_eq!(world.record().await, before, "a record is not rewritten");
        }
        // A handler with the old type still reads the result.
        assert_eq!(world.value::<W, _>(migrating(must_not_be_asked), BEFORE()).await.0.unwrap(), BEFORE());
    }
    for_each_codec!(W => {
        for_each_codec!(R => { check::<W, R>().await });
        check::<W, Own>().await;
    });
}

#[tokio::test]
async fn results_of_an_unknown_codec_are_migrated() {
    fn from_own(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        assert_eq!(recorded.codec(), "own");
        assert!(recorded.decode::<u32>().unwrap_err().to_string().contains("codec `own` wrote it"));
        Postcard::encode(&Own::decode::<u32>(recorded.bytes())?)
    }
    let world = World::default();
    world.value::<Own, _>(POLICY, 7_u32).await.0.unwrap();
    let (result, outcome) = world.value::<Postcard, _>(migrating(from_own), 8_u32).await;
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.replayed());
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn a_failed_migration_is_an_error_and_runs_no_body() {
    fn fails(_: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        Err("parcels have no numbers any more".into())
    }
    fn useless(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        Json::encode(&recorded.bytes())
    }
    let world = World::default();
    world.value::<Json, _>(POLICY, BEFORE()).await.0.unwrap();

    let error = world.unavailable::<Json, _>(migrating(fails), NOW()).await;
    assert!(error.to_string().contains("`on_undecodable` could not migrate it"), "{error}");
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "parcels have no numbers any more");
    assert!(matches!(reason(error), ResultProblem::MigrationFailed { .. }));

    let error = world.unavailable::<Json, _>(migrating(useless), NOW()).await;
    assert!(error.to_string().contains("the output of `on_undecodable` does not decode"), "{error}");
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("at line 1"));
    assert!(matches!(reason(error), ResultProblem::MigratedUndecodable { .. }));

    // The handler's codec decodes the output of the migration, whichever codec wrote the record.
    let error = world.unavailable::<Postcard, _>(migrating(migrate_to::<Json>), NOW()).await;
    assert!(matches!(reason(error), ResultProblem::MigratedUndecodable { .. }));
}

#[tokio::test]
async fn a_migration_that_panics_leaves_the_record_unchanged() {
    let world = World::default();
    world.value::<Json, _>(POLICY, BEFORE()).await.0.unwrap();
    let before = world.record().await;
    for _ in 0..2 {
        let call = world.value::<Json, _>(migrating(must_not_be_asked), NOW());
        let panic = AssertUnwindSafe(call).catch_unwind().await.unwrap_err();
        let said = panic.downcast_ref::<String>().unwrap();
        assert_eq!(said, r#"asked about Undecodable { codec: "json", bytes: 35 bytes, is_error: false }"#);
        assert_eq!(world.record().await, before);
    }
    let (result, outcome) = world.value::<Json, _>(migrating(migrate_to::<Json>), NOW()).await;
    assert_eq!(result.unwrap(), NOW());
    assert!(outcome.replayed());
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn recorded_errors_are_migrated_as_errors() {
    #[derive(Serialize, Deserialize)]
    struct OldFailure {
        code: u32,
    }
    impl From<Error> for OldFailure {
        fn from(_: Error) -> Self {
            Self { code: 0 }
        }
    }
    fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        match recorded.is_error() {
            true => MessagePack::encode(&Failure::Declined(recorded.decode::<OldFailure>()?.code)),
            false => migrate_to::<MessagePack>(recorded),
        }
    }
    let world = World::default();
    let old = world.result::<Json, Before, _>(POLICY, Err(OldFailure { code: 51 })).await.0;
    assert_eq!(old.err().unwrap().code, 51);
    let (result, outcome) = world.result::<MessagePack, _, Failure>(migrating(migrate), Ok(NOW())).await;
    assert_eq!(result, Err(Failure::Declined(51)));
    assert!(outcome.replayed() && !outcome.executed(), "{outcome:?}");
    assert_eq!((outcome.disposition(), world.runs()), (Disposition::DeadLetter, 1));
    // A handler without `record_errors` can't read a recorded error, and does not call the migration.
    let reason = reason(world.unavailable::<MessagePack, _>(migrating(must_not_be_asked), NOW()).await);
    assert!(matches!(reason, ResultProblem::RecordedError), "{reason:?}");

    let world = World::default();
    assert!(world.result::<Json, _, OldFailure>(POLICY, Ok(BEFORE())).await.0.is_ok());
    let (result, outcome) = world.result::<MessagePack, _, Failure>(migrating(migrate), Ok(NOW())).await;
    assert_eq!(result, Ok(NOW()));
    assert!(outcome.replayed());
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn a_missing_result_is_not_migrated() {
    struct Mute;
    impl Codec for Mute {
        const NAME: &'static str = "mute";
        fn encode<T: Serialize>(_: &T) -> Result<Vec<u8>, CodecError> {
            Err("can't".into())
        }
        fn decode<T: DeserializeOwned>(_: &[u8]) -> Result<T, CodecError> {
            Err("can't".into())
        }
    }
    let policy = migrating(must_not_be_asked);
    let world = World::default();
    world.value::<Json, _>(policy.max_result_bytes(1), BEFORE()).await.0.unwrap();
    let reason = self::reason(world.unavailable::<Json, _>(policy, BEFORE()).await);
    assert!(matches!(reason, ResultProblem::TooLarge { .. }), "{reason:?}");

    let world = World::default();
    world.value::<Mute, _>(policy, BEFORE()).await.0.unwrap();
    let reason = self::reason(world.unavailable::<Json, _>(policy, BEFORE()).await);
    assert!(matches!(reason, ResultProblem::Unencodable), "{reason:?}");

    let state = State::Completed(StoredResult::Unreadable { reason: "gone".into() });
    let on_undecodable = OnUndecodable::Migrate(must_not_be_asked);
    let replay = replay(&state, on_undecodable) as Result<Result<u8, ()>, _>;
    assert!(matches!(replay, Err(ResultProblem::Unreadable { .. })), "{replay:?}");
}

#[tokio::test]
async fn a_waiting_duplicate_migrates_the_result_of_the_previous_release() {
    // The duplicate waits for an attempt of the previous release.
    let world = World::default();
    let wait = idem_runtime::InProgress::Wait(Duration::from_secs(60));
    let (end, ended) = futures::channel::oneshot::channel::<()>();
    let running = world.operation(POLICY).run(async {
        ended.await.unwrap();
        world.body(Ok::<_, Error>(BEFORE())).await
    });
    let waiting = world.value::<Json, _>(migrating(migrate_to::<Json>).in_progress(wait), NOW());
    let finish = async {
        idem_tests::settle().await;
        end.send(()).unwrap();
    };
    let (first, (second, outcome), ()) = futures::join!(running, waiting, finish);
    assert_eq!((first.unwrap(), second.unwrap()), (BEFORE(), NOW()));
    assert!(outcome.waited() && outcome.replayed());
    assert_eq!(world.runs(), 1);
}

#[test]
fn debug_output_of_a_migration_shows_no_result() {
    let recorded = Undecodable::error("json", br#"{"card":"4111 1111"}"#);
    assert_eq!(format!("{recorded:?}"), r#"Undecodable { codec: "json", bytes: 20 bytes, is_error: true }"#);
    let recorded = Undecodable::value("json", b"7");
    assert_eq!((recorded.decode::<u8>().unwrap(), recorded.bytes(), recorded.codec()), (7, &b"7"[..], "json"));
    assert!(Undecodable::value("", b"7").decode::<u8>().is_err());
}

#[test]
fn a_policy_takes_at_most_136_bytes() {
    assert!(size_of::<Policy>() <= 136, "{}", size_of::<Policy>());
    assert_eq!(size_of::<OnUndecodable>(), size_of::<usize>());
}
