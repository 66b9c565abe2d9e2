//! Options of a policy that have a fixed set of values: one enum for each option.

use std::time::Duration;

use crate::codec::{CodecError, Undecodable};

/// Reaction of a duplicate while another attempt holds the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum InProgress {
    /// Returns [`Error::InProgress`](crate::Error::InProgress) immediately.
    #[default]
    Reject,
    /// Waits for the running attempt, for at most this long. After the wait the duplicate replays the result of the
    /// attempt, or competes for the key if the attempt failed. A temporary failure of the store does not end the wait.
    Wait(Duration),
}

/// Reaction of the next delivery to an attempt that crashed before it recorded an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnCrash {
    /// Takes over once the lease has lapsed, and runs the body again: the effect happens at least once.
    #[default]
    Retry,
    /// Returns [`Error::Interrupted`](crate::Error::Interrupted) until an operator decides: the effect happens at most
    /// once.
    Fail,
}

/// Reaction to a key that is `None`, empty or blank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum MissingKey {
    /// Returns [`Error::MissingKey`](crate::Error::MissingKey).
    #[default]
    Reject,
    /// Runs the body unprotected, without a store call.
    Run,
}

/// Reaction to a store that can't reserve the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnStoreError {
    /// Returns [`Error::Store`](crate::Error::Store); the body doesn't run.
    #[default]
    Fail,
    /// Runs the body unprotected, and the [`Outcome`](crate::Outcome) reports the failure of the store. If the store
    /// fails while a call waits for another attempt, the call runs the body when its wait is over. In a transaction
    /// that can only be rolled back ([`Aborted`](crate::StoreErrorKind::Aborted)) the body never runs.
    Run,
}

/// Handling of an error that the body returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnError {
    /// The key is freed: the next delivery runs the body again.
    #[default]
    Release,
    /// The error is stored and replayed to every duplicate.
    Record,
    /// The effect may have happened: no body runs for the key before the doubt is settled, by the
    /// [reconciler](crate::Reconciliation) of the handler or by an operator. Duplicates get
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    Uncertain,
}

/// Function that converts a recorded result of an older type into bytes that the handler's codec can decode; see
/// [`OnUndecodable::Migrate`].
pub type Migrate = fn(Undecodable<'_>) -> Result<Vec<u8>, CodecError>;

/// Reaction to a recorded result that does not decode as the function's return type, or whose codec is not available
/// here. No variant runs the body again.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::{Codec, CodecError, Error, Json, MemoryStore, Undecodable, idempotent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize)]
/// struct Shipment {
///     parcel: String,
/// }
///
/// /// What the release before this one returned.
/// #[derive(Serialize, Deserialize)]
/// struct OldShipment {
///     parcel_number: u64,
/// }
///
/// fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
///     let old: OldShipment = recorded.decode()?;
///     Json::encode(&Shipment { parcel: format!("P{}", old.parcel_number) })
/// }
///
/// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = shared("ship"), on_undecodable = migrate)]
/// async fn ship(store: &MemoryStore, order: u64) -> Result<Shipment, Error> {
///     Ok(Shipment { parcel: format!("P{order}") })
/// }
/// # #[idempotent(key = "{order}", ttl = "7d", store = store, scope = shared("ship"))]
/// # async fn ship_before(store: &MemoryStore, order: u64) -> Result<OldShipment, Error> {
/// #     Ok(OldShipment { parcel_number: order })
/// # }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let store = MemoryStore::new();
/// # ship_before(&store, 41).await.unwrap();
/// // Order 41 was shipped by the release before.
/// assert_eq!(ship(&store, 41).await.unwrap(), Shipment { parcel: "P41".to_owned() });
/// # });
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum OnUndecodable {
    /// Returns [`Error::ResultUnavailable`](crate::Error::ResultUnavailable).
    #[default]
    Error,
    /// Calls the function, and replays the result in the bytes that it returns. If the call or the decoding fails, the
    /// duplicate gets [`Error::ResultUnavailable`](crate::Error::ResultUnavailable). The record is not changed, so the
    /// function is called at each replay. A panic of the function becomes a panic of the call and has no other effect.
    Migrate(Migrate),
}
