//! Recorded results, and bytes that are not results.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;

use bytes::Bytes;
use idem_runtime::__stored::replay;
use idem_runtime::codec::ResultProblem;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::{Codec, Json, MessagePack, OnUndecodable, Postcard};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::input::Input;

#[derive(PartialEq, Debug, Serialize, Deserialize)]
struct Order {
    id: u64,
    total: f64,
    note: Option<String>,
    positions: Vec<(String, u32)>,
    tags: BTreeMap<String, Tree>,
    by_number: BTreeMap<i32, char>,
    large: (u128, i128),
    done: bool,
    unit: (),
}

#[derive(PartialEq, Debug, Serialize, Deserialize)]
enum Tree {
    Leaf,
    Node(Box<Tree>),
    Two(i8, String),
    Named { flag: bool, inner: Vec<Tree> },
}

#[derive(PartialEq, Debug, Serialize, Deserialize)]
struct List {
    next: Option<Box<List>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Number(i64),
    Text(String),
    List(Vec<Untagged>),
    Map(BTreeMap<String, Untagged>),
}

/// Asserts that a decoded value is unchanged after it is encoded and decoded again. Bytes that can't be decoded must
/// give an error.
pub fn codecs(data: &[u8]) {
    let mut input = Input(data);
    match input.below(4) {
        0 => with_codec::<Json>(input.rest()),
        1 => with_codec::<MessagePack>(input.rest()),
        2 => with_codec::<Postcard>(input.rest()),
        _ => replayed(input),
    }
}

fn with_codec<C: Codec>(data: &[u8]) {
    stays::<C, Order>(data);
    stays::<C, Tree>(data);
    stays::<C, List>(data);
    stays::<C, Vec<String>>(data);
    stays::<C, Vec<()>>(data);
    stays::<C, Vec<Vec<u8>>>(data);
    stays::<C, Result<(u8, i64), String>>(data);
    stays::<C, (f64, char, Option<bool>)>(data);
    // The encoding of these types differs from the bytes that were decoded, so the test checks only that no decoding
    // panics.
    let _ = C::decode::<Untagged>(data);
    let _ = C::decode::<serde_json::Value>(data);
    let _ = C::decode::<Vec<[u64; 16]>>(data);
    let _ = C::decode::<HashMap<u64, Vec<u64>>>(data);
    let _ = C::decode::<BTreeMap<(), f32>>(data);
    let _ = C::decode::<Ignored>(data);
}

/// Skips any value.
struct Ignored;

impl<'de> Deserialize<'de> for Ignored {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

fn stays<C: Codec, T: Serialize + DeserializeOwned + Debug>(data: &[u8]) {
    let Ok(value) = C::decode::<T>(data) else { return };
    let written = C::encode(&value).expect("what was read can be written");
    let again = match C::decode::<T>(&written) {
        Ok(again) => again,
        Err(error) => panic!("{}: {value:?} is read once only: {error}", C::NAME),
    };
    // The encoded bytes are compared, because a NaN does not equal itself.
    assert_eq!(C::encode(&again).expect("writes"), written, "{}: {value:?} became {again:?}", C::NAME);
    let mut longer = written;
    longer.push(b'x');
    C::decode::<T>(&longer).expect_err("a byte too many");
}

/// Asserts that a finished record with any result is replayed as a result or as a typed error.
fn replayed(mut input: Input<'_>) {
    let fails = input.flag();
    let payload = match input.flag() {
        true => input.payload(),
        false => StoredResult::Encoded { codec: input.codec(), bytes: Bytes::copy_from_slice(input.rest()) },
    };
    let state = if fails { State::Failed(payload) } else { State::Completed(payload) };
    let result: Result<Result<Order, String>, ResultProblem> = replay(&state, OnUndecodable::Error);
    match result {
        Ok(result) => assert_eq!(result.is_err(), fails, "a value became an error, or the reverse"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
