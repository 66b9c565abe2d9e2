//! Recording and replay of results: which results are recorded, and in which form.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ending::AttemptEnd;
use crate::codec::{self, Codec, CodecError, CodecName, ResultProblem, RoundTripError, Undecodable};
use crate::policy::{OnError, OnUndecodable};
use crate::record::{Finish, Release, State, StoredResult};

/// Records and replays the results of a handler.
pub trait Recorder<T, E> {
    /// Returns the end of an attempt whose body returned `result`. The end leaves out a result larger than
    /// `max_result_bytes`.
    fn record(&self, result: &Result<T, E>, max_result_bytes: usize) -> AttemptEnd;

    /// Returns the result in a finished record. `on_undecodable` sets the reaction to a result that can't be decoded.
    ///
    /// # Errors
    /// [`ResultProblem`] with the reason why there is no result.
    ///
    /// # Panics
    /// If the function in `on_undecodable` panics.
    fn replay(&self, state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem>;

    /// Checks that a duplicate will get a result equal to the recorded `result`.
    ///
    /// # Errors
    /// [`RoundTripError`] with the difference between the two results.
    fn check(&self, result: &Result<T, E>) -> Result<(), RoundTripError>;
}

/// Recorder of values. An error frees the key (`on_error = release`). With `UNCERTAIN`, an error leaves the effect of
/// the body in doubt (`on_error = uncertain`).
pub struct RecordValues<C, const UNCERTAIN: bool = false>(PhantomData<fn() -> C>);

/// Recorder of values, and of the errors that the [`ErrorRule`] `F` selects (`on_error = record`).
pub struct RecordResults<C, F> {
    on_error: F,
    codec: PhantomData<fn() -> C>,
}

impl<C: Codec, const UNCERTAIN: bool> RecordValues<C, UNCERTAIN> {
    pub(crate) const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<C: Codec, F> RecordResults<C, F> {
    pub(crate) const fn new(on_error: F) -> Self {
        Self { on_error, codec: PhantomData }
    }
}

impl<C, const UNCERTAIN: bool> fmt::Debug for RecordValues<C, UNCERTAIN> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecordValues")
    }
}

impl<C, F> fmt::Debug for RecordResults<C, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecordResults")
    }
}

/// Rule that selects the errors to record.
pub trait ErrorRule<E> {
    /// Returns the decision for `error`.
    fn decide(&self, error: &E) -> OnError;
}

impl<E> ErrorRule<E> for () {
    fn decide(&self, _: &E) -> OnError {
        OnError::Record
    }
}

impl<E, F: Fn(&E) -> OnError> ErrorRule<E> for F {
    fn decide(&self, error: &E) -> OnError {
        self(error)
    }
}

impl<T, E, C, const UNCERTAIN: bool> Recorder<T, E> for RecordValues<C, UNCERTAIN>
where
    T: Serialize + DeserializeOwned,
    C: Codec,
{
    fn record(&self, result: &Result<T, E>, max_result_bytes: usize) -> AttemptEnd {
        match result {
            Ok(value) => AttemptEnd::Finish(Finish::Completed(payload::<C, T>(value, max_result_bytes))),
            Err(_) if UNCERTAIN => AttemptEnd::Release(Release::Interrupted),
            Err(_) => AttemptEnd::Release(Release::Returned),
        }
    }

    fn replay(&self, state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem> {
        match state {
            State::Completed(payload) => read::<C, T>(payload, false, on_undecodable).map(Ok),
            _ => Err(ResultProblem::RecordedError),
        }
    }

    fn check(&self, result: &Result<T, E>) -> Result<(), RoundTripError> {
        result.as_ref().map_or(Ok(()), codec::check_round_trip::<C, T>)
    }
}

impl<T, E, C, F> Recorder<T, E> for RecordResults<C, F>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned,
    C: Codec,
    F: ErrorRule<E>,
{
    fn record(&self, result: &Result<T, E>, max_result_bytes: usize) -> AttemptEnd {
        match result {
            Ok(value) => AttemptEnd::Finish(Finish::Completed(payload::<C, T>(value, max_result_bytes))),
            Err(error) => match self.on_error.decide(error) {
                OnError::Release => AttemptEnd::Release(Release::Returned),
                OnError::Uncertain => AttemptEnd::Release(Release::Interrupted),
                OnError::Record => match payload::<C, E>(error, max_result_bytes) {
                    // An error ends the operation only if duplicates can replay it. An error that can't be stored frees
                    // the key instead.
                    stored @ StoredResult::Encoded { .. } => AttemptEnd::Finish(Finish::Failed(stored)),
                    _ => AttemptEnd::Release(Release::Returned),
                },
            },
        }
    }

    fn replay(&self, state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem> {
        match state {
            State::Failed(payload) => read::<C, E>(payload, true, on_undecodable).map(Err),
            State::Completed(payload) => read::<C, T>(payload, false, on_undecodable).map(Ok),
            // Unreachable in practice, because only finished records are replayed.
            _ => Err(ResultProblem::Unencodable),
        }
    }

    fn check(&self, result: &Result<T, E>) -> Result<(), RoundTripError> {
        result.as_ref().map_or_else(codec::check_round_trip::<C, E>, codec::check_round_trip::<C, T>)
    }
}

pub(super) fn payload<C: Codec, V: Serialize>(value: &V, max_result_bytes: usize) -> StoredResult {
    match codec::write::<C, V>(value) {
        Ok((_, bytes)) if bytes.len() > max_result_bytes => StoredResult::TooLarge { size: bytes.len() as u64 },
        Ok((codec, bytes)) => StoredResult::Encoded { codec, bytes: Bytes::from(bytes) },
        Err(error) => {
            tracing::debug!(codec = C::NAME, %error, "a result could not be encoded");
            StoredResult::Unencodable
        }
    }
}

pub(super) fn read<C: Codec, V: DeserializeOwned>(
    payload: &StoredResult,
    is_error: bool,
    on_undecodable: OnUndecodable,
) -> Result<V, ResultProblem> {
    let (payload, _) = payload.parts();
    let (name, bytes) = encoded(&payload)?;
    match codec::read::<C, V>(name, bytes) {
        Some(Ok(value)) => Ok(value),
        decoded => {
            let problem = decoded.and_then(Result::err);
            let migrated = migrate(name, bytes, is_error, on_undecodable, problem)?;
            C::decode(&migrated).map_err(|source| ResultProblem::MigratedUndecodable { source })
        }
    }
}

/// Returns the result in a finished record of a handler that records errors.
///
/// # Errors
/// [`ResultProblem`] with the reason why there is no result.
#[cfg(feature = "conformance")]
pub fn replay<T, E>(state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned,
{
    RecordResults::<crate::codec::Json, ()>::new(()).replay(state, on_undecodable)
}

// The functions below do not depend on the handler's types, so they are compiled once.

/// Returns codec and bytes of a stored result, or the reason why no result is stored.
pub(crate) fn encoded(payload: &StoredResult) -> Result<(CodecName, &Bytes), ResultProblem> {
    match payload {
        StoredResult::Encoded { codec, bytes } => Ok((*codec, bytes)),
        StoredResult::TooLarge { size } => Err(ResultProblem::TooLarge { size: *size }),
        StoredResult::Unencodable => Err(ResultProblem::Unencodable),
        StoredResult::Unreadable { reason } => Err(ResultProblem::Unreadable { reason: Arc::clone(reason) }),
        // Only lists leave results out, and a list is never the source of a replay.
        StoredResult::LeftOut { .. } => Err(ResultProblem::Unreadable { reason: "it was left out".into() }),
    }
}

/// Calls the migration for bytes that can't be decoded. `problem` is the codec's error; `None` if the codec is not
/// available.
#[cold]
pub(crate) fn migrate(
    codec: CodecName,
    bytes: &[u8],
    is_error: bool,
    on_undecodable: OnUndecodable,
    problem: Option<CodecError>,
) -> Result<Vec<u8>, ResultProblem> {
    match (on_undecodable, problem) {
        (OnUndecodable::Migrate(migrate), _) => {
            let recorded = Undecodable::new(codec.as_str(), bytes, is_error);
            migrate(recorded).map_err(|source| ResultProblem::MigrationFailed { source })
        }
        (OnUndecodable::Error, Some(source)) => Err(ResultProblem::Undecodable { source }),
        (OnUndecodable::Error, None) => Err(ResultProblem::OtherCodec { codec: codec.as_str().to_owned() }),
    }
}
