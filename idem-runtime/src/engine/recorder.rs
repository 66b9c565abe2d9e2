//! Which results are kept, and as what.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::end::Ending;
use crate::codec::{Codec, CodecError, CodecName, ResultProblem, Undecodable, known};
use crate::policy::{OnError, OnUndecodable};
use crate::record::{Finish, Release, State, StoredResult};

/// How the results of a handler are kept and replayed; made by [`record_values`], [`record_results`] and
/// [`record_results_if`].
pub trait Recorder<T, E> {
    /// How an attempt that returned `result` ends.
    fn record(&self, result: &Result<T, E>, max_result_bytes: usize) -> Ending;

    /// The result in a finished record. `on_undecodable` says what to do about one that can't be read.
    ///
    /// # Errors
    /// [`ResultProblem`] says why there is none.
    ///
    /// # Panics
    /// If the function in `on_undecodable` does.
    fn replay(&self, state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem>;
}

/// Values are recorded; an error frees the key (`on_error = release`).
pub const fn record_values<C: Codec>() -> RecordValues<C> {
    RecordValues(PhantomData)
}

/// Values and errors are recorded and replayed (`on_error = record`).
pub const fn record_results<C: Codec>() -> RecordResults<C, ()> {
    RecordResults { on_error: (), codec: PhantomData }
}

/// Values are recorded, and errors if `decide` says so.
pub const fn record_results_if<C: Codec, F>(decide: F) -> RecordResults<C, F> {
    RecordResults { on_error: decide, codec: PhantomData }
}

/// See [`record_values`].
pub struct RecordValues<C>(PhantomData<fn() -> C>);

/// See [`record_results`] and [`record_results_if`].
pub struct RecordResults<C, F> {
    on_error: F,
    codec: PhantomData<fn() -> C>,
}

impl<C> fmt::Debug for RecordValues<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecordValues")
    }
}

impl<C, F> fmt::Debug for RecordResults<C, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecordResults")
    }
}

/// Decides what becomes of an error.
pub trait ErrorRule<E> {
    /// The decision for `error`.
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

impl<T, E, C> Recorder<T, E> for RecordValues<C>
where
    T: Serialize + DeserializeOwned,
    C: Codec,
{
    fn record(&self, result: &Result<T, E>, max_result_bytes: usize) -> Ending {
        match result {
            Ok(value) => Ending::Finish(Finish::Completed(payload::<C, T>(value, max_result_bytes))),
            Err(_) => Ending::Release(Release::Returned),
        }
    }

    fn replay(&self, state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem> {
        match state {
            State::Completed(payload) => read::<C, T>(payload, false, on_undecodable).map(Ok),
            _ => Err(ResultProblem::RecordedError),
        }
    }
}

impl<T, E, C, F> Recorder<T, E> for RecordResults<C, F>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned,
    C: Codec,
    F: ErrorRule<E>,
{
    fn record(&self, result: &Result<T, E>, max_result_bytes: usize) -> Ending {
        match result {
            Ok(value) => Ending::Finish(Finish::Completed(payload::<C, T>(value, max_result_bytes))),
            Err(error) => match self.on_error.decide(error) {
                OnError::Release => Ending::Release(Release::Returned),
                OnError::Record => match payload::<C, E>(error, max_result_bytes) {
                    // An error that can't be replayed is not worth ending the operation for.
                    stored @ StoredResult::Encoded { .. } => Ending::Finish(Finish::Failed(stored)),
                    _ => Ending::Release(Release::Returned),
                },
            },
        }
    }

    fn replay(&self, state: &State, on_undecodable: OnUndecodable) -> Result<Result<T, E>, ResultProblem> {
        match state {
            State::Failed(payload) => read::<C, E>(payload, true, on_undecodable).map(Err),
            State::Completed(payload) => read::<C, T>(payload, false, on_undecodable).map(Ok),
            // Only finished records are replayed.
            _ => Err(ResultProblem::Unencodable),
        }
    }
}

fn payload<C: Codec, V: Serialize>(value: &V, max_result_bytes: usize) -> StoredResult {
    match C::encode(value) {
        Ok(bytes) if bytes.len() > max_result_bytes => StoredResult::TooLarge { size: bytes.len() as u64 },
        Ok(bytes) => StoredResult::Encoded { codec: CodecName::of::<C>(), bytes: Bytes::from(bytes) },
        Err(error) => {
            tracing::debug!(codec = C::NAME, %error, "a result could not be encoded");
            StoredResult::Unencodable
        }
    }
}

fn read<C: Codec, V: DeserializeOwned>(
    payload: &StoredResult,
    is_error: bool,
    on_undecodable: OnUndecodable,
) -> Result<V, ResultProblem> {
    let (codec, bytes) = stored(payload)?;
    let decoded = if codec == CodecName::of::<C>() {
        Some(C::decode(bytes))
    } else if C::READS_OTHERS {
        known::decode(codec, bytes)
    } else {
        None
    };
    match decoded {
        Some(Ok(value)) => Ok(value),
        decoded => {
            let problem = decoded.and_then(Result::err);
            let migrated = migrate(codec, bytes, is_error, on_undecodable, problem)?;
            C::decode(&migrated).map_err(|source| ResultProblem::MigratedUndecodable { source })
        }
    }
}

// What follows knows nothing of types, so that it is there once and not once for each handler.

fn stored(payload: &StoredResult) -> Result<(CodecName, &[u8]), ResultProblem> {
    match payload {
        StoredResult::Encoded { codec, bytes } => Ok((*codec, bytes)),
        StoredResult::TooLarge { size } => Err(ResultProblem::TooLarge { size: *size }),
        StoredResult::Unencodable => Err(ResultProblem::Unencodable),
        StoredResult::Unreadable { reason } => Err(ResultProblem::Unreadable { reason: Arc::clone(reason) }),
    }
}

/// Other bytes for those that can't be read: `problem` is what the codec said, if there was one to ask.
#[cold]
fn migrate(
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
