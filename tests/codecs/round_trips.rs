//! Results that decode to another value than the encoded one: a debug build reports such a result at the first call.

#![allow(clippy::option_option, reason = "`Some(None)` is what JSON loses")]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;
use idem_runtime::codec::check_round_trip;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::{Codec, CodecError, Error, Json, MessagePack, OnUndecodable, Policy, Postcard, Undecodable};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{POLICY, World};

const SECRET: &str = "4111 1111 1111 1111";

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Short(u8),
    Long(u64),
    Named { id: u32 },
    Pair(u8, u8),
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Tagged {
    Unit,
    One(Option<Option<u8>>),
    Two(u8, Option<f64>),
    Fields { note: Option<()> },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Receipt {
    card: String,
    lines: Vec<Option<Option<u32>>>,
}

/// Returns the panic message of the first call, if it panics, and whether a duplicate gets the same value.
async fn first_and_duplicate<C: Codec, T>(policy: Policy, value: &T) -> (Option<String>, Result<bool, Error>)
where
    T: Serialize + DeserializeOwned + PartialEq + Clone,
{
    let world = World::default();
    let first = AssertUnwindSafe(world.value::<C, T>(policy, value.clone())).catch_unwind().await;
    let said = first.err().map(|panic| *panic.downcast::<String>().expect("a text"));
    let duplicate = world.value::<C, T>(policy, value.clone()).await.0.map(|replayed| replayed == *value);
    assert_eq!(world.runs(), 1, "the result is recorded before anything is compared");
    (said, duplicate)
}

/// Checks that the first call of a debug build panics if and only if a duplicate would get another value.
async fn rule<C: Codec, T>(value: T)
where
    T: Serialize + DeserializeOwned + PartialEq + Clone + Debug,
{
    let (said, duplicate) = first_and_duplicate::<C, T>(POLICY, &value).await;
    let is_same = matches!(duplicate, Ok(true));
    let is_written = C::encode(&value).is_ok();
    assert_eq!(said.is_none(), is_same || !is_written, "{} of {value:?}: {said:?}, {duplicate:?}", C::NAME);
    assert_eq!(check_round_trip::<C, T>(&value).is_ok(), is_same, "{} of {value:?}", C::NAME);
    if let Some(said) = said {
        assert!(said.contains(C::NAME) && said.contains(std::any::type_name::<T>()), "{said}");
        assert!(!said.contains(SECRET), "{said}");
    }
}

async fn rule_of_every_codec<T>(value: T)
where
    T: Serialize + DeserializeOwned + PartialEq + Clone + Debug,
{
    rule::<Json, T>(value.clone()).await;
    rule::<MessagePack, T>(value.clone()).await;
    rule::<Postcard, T>(value).await;
}

#[tokio::test]
async fn a_debug_build_panics_if_a_duplicate_would_get_another_value() {
    for nested in [None, Some(None), Some(Some(7_u8))] {
        rule_of_every_codec(nested).await;
        rule_of_every_codec(Tagged::One(nested)).await;
        rule_of_every_codec(BTreeMap::from([(1, nested), (2, None)])).await;
        rule_of_every_codec(vec![None, nested]).await;
        let lines = vec![Some(None), nested.map(|inner| inner.map(u32::from))];
        rule_of_every_codec(Receipt { card: SECRET.to_owned(), lines }).await;
    }
    rule_of_every_codec(Some(())).await;
    rule_of_every_codec(()).await;
    rule_of_every_codec(Tagged::Unit).await;
    rule_of_every_codec(Tagged::Two(1, Some(0.1))).await;
    rule_of_every_codec(Tagged::Fields { note: Some(()) }).await;
    for untagged in
        [Untagged::Short(7), Untagged::Long(7), Untagged::Long(700), Untagged::Named { id: 7 }, Untagged::Pair(1, 2)]
    {
        rule_of_every_codec(untagged).await;
    }
    for float in [0.0, -0.0, 0.1, f64::MIN_POSITIVE, f64::MAX, 5e-324, 1e23] {
        rule_of_every_codec(float).await;
        rule_of_every_codec(Some(float)).await;
    }
    rule_of_every_codec(0.1_f32).await;
    rule_of_every_codec(f64::INFINITY).await;
    rule_of_every_codec(Some(f64::NEG_INFINITY)).await;
    rule_of_every_codec(Tagged::Two(1, Some(f64::INFINITY))).await;
}

#[tokio::test]
async fn maps_and_sets_with_a_random_order_count_as_equal() {
    for _ in 0..20 {
        rule_of_every_codec((0..50).map(|n| format!("{n}")).collect::<HashSet<_>>()).await;
        rule_of_every_codec((0..50_u32).map(|n| (n, vec![n])).collect::<HashMap<_, _>>()).await;
    }
}

#[tokio::test]
async fn the_report_of_a_result_that_reads_back_differently_names_its_field_and_no_value() {
    let receipt = Receipt { card: SECRET.to_owned(), lines: vec![Some(None)] };
    let (said, _) = first_and_duplicate::<Json, _>(POLICY, &receipt).await;
    let said = said.expect("a difference");
    assert!(said.contains("`lines`: `Some` is read back as `None`"), "{said}");
    let (said, _) = first_and_duplicate::<Json, _>(POLICY, &Untagged::Long(7)).await;
    assert!(said.expect("a difference").contains("a u64 is read back as a u8"));
    let (said, _) = first_and_duplicate::<Json, _>(POLICY, &Tagged::Two(1, Some(f64::NAN))).await;
    assert!(said.expect("a difference").contains("`Two`: `Some` is read back as `None`"));
}

#[tokio::test]
async fn recorded_errors_are_compared_with_their_decoded_values() {
    #[derive(Debug, Serialize, Deserialize)]
    struct Declined {
        reason: Option<Option<String>>,
    }
    impl From<Error> for Declined {
        fn from(error: Error) -> Self {
            panic!("{error}");
        }
    }
    let world = World::default();
    let declined = || Err::<u8, _>(Declined { reason: Some(None) });
    let first = AssertUnwindSafe(world.result::<Json, u8, Declined>(POLICY, declined())).catch_unwind().await;
    let said = *first.unwrap_err().downcast::<String>().unwrap();
    assert!(said.contains("`reason`: `Some` is read back as `None`") && said.contains("Declined"), "{said}");
    let (replayed, outcome) = world.result::<Json, u8, Declined>(POLICY, declined()).await;
    assert!(outcome.replayed() && replayed.unwrap_err().reason.is_none());
}

/// Codec whose `decode` always fails.
struct OneWay;

impl Codec for OneWay {
    const NAME: &'static str = "one-way";

    fn encode<T: Serialize>(_: &T) -> Result<Vec<u8>, CodecError> {
        Ok(vec![1])
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        match bytes {
            [1] => Err(SECRET.into()),
            _ => Json::decode(bytes),
        }
    }
}

#[tokio::test]
async fn a_result_that_its_codec_cannot_read_back_is_refused_unless_it_is_migrated() {
    #[allow(clippy::unnecessary_wraps, reason = "the signature of a migration")]
    fn migrate(_: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        Ok(b"7".to_vec())
    }
    let (said, duplicate) = first_and_duplicate::<OneWay, u8>(POLICY, &7).await;
    assert!(said.unwrap().contains("the codec `one-way` can't read back this `u8`"));
    assert!(matches!(duplicate, Err(Error::ResultUnavailable { .. })));
    let migrating = POLICY.on_undecodable(OnUndecodable::Migrate(migrate));
    let (said, duplicate) = first_and_duplicate::<OneWay, u8>(migrating, &7).await;
    assert_eq!((said, duplicate.unwrap()), (None, true));
}

#[tokio::test]
async fn values_that_can_not_be_compared_are_not_reported() {
    /// Value that serializes as a different text each time.
    #[derive(Clone, PartialEq, Debug, Deserialize)]
    struct Restless(String);
    impl Serialize for Restless {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            static TIMES: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            serializer.collect_str(&TIMES.fetch_add(1, std::sync::atomic::Ordering::SeqCst))
        }
    }
    let (said, _) = first_and_duplicate::<Json, _>(POLICY, &Restless(String::new())).await;
    assert_eq!(said, None);
    // The check compares no values of this length.
    let long = vec![Some(None::<u64>); 64 * 1024];
    let (said, duplicate) = first_and_duplicate::<Json, _>(POLICY.max_result_bytes(1 << 20), &long).await;
    assert_eq!((said, duplicate.unwrap()), (None, false));
    assert!(!check_round_trip::<Json, _>(&long).unwrap_err().is_unavailable());
}

#[tokio::test]
async fn the_result_of_a_call_that_records_nothing_is_not_compared() {
    let world = World::default();
    let released = world.value::<Json, Option<Option<u8>>>(POLICY.max_result_bytes(1), Some(None)).await.0;
    assert_eq!(released.unwrap(), Some(None), "the caller gets a result that is too large to be recorded");
    let completed = world.record().await.state;
    assert!(matches!(completed, State::Completed(StoredResult::TooLarge { .. })), "{completed:?}");
}
