//! What `#[idempotent]` generates calls of. Not a public interface: it changes with the attribute, without notice.
//!
//! Everything is a method of a trait with one blanket implementation over a second trait, which carries the message. The
//! compiler reports a missing method once, with that message, at the token the attribute put the name of the method on,
//! and asks nothing of the calls that follow. A bound on a function would be reported again at every later call.

use std::any::type_name;
use std::fmt::Display;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::codec::Codec;
use crate::engine::{
    ErrorRule, RecordResults, RecordValues, Recorder, record_results, record_results_if, record_values,
};
use crate::error::Error;
use crate::key::{Key, KeyBuilder, KeyError, KeyPart, is_scope};
use crate::policy::OnError;
use crate::store::Store;

pub use std::option::Option::{None, Some};
pub use std::time::Duration;
pub use std::{column, concat, file, line, module_path};

pub use crate::codec::Json;
pub use crate::engine::Operation;
pub use crate::key::Scope;
pub use crate::policy::{InProgress, MissingKey, Mode, OnCrash, OnStoreError, OnUndecodable, Policy};
#[cfg(feature = "macros")]
pub use idem_macros::a_function_in_an_impl_or_a_trait_needs_a_scope_of_its_own;

/// The traits whose methods append a [`Part`]. Globs bring them in without names, and without a word if one is unused.
pub mod parts {
    pub use super::{DisplayOption as _, DisplayPart as _, NoPart as _, OwnPart as _};
}

/// The traits whose methods ask about types.
pub mod types {
    pub use super::{
        ErrorIsRecorded as _, IsCodec as _, Records as _, ReturnsResult as _, TakesError as _, ValueIsRecorded as _,
    };
}

// ---- The scope -----------------------------------------------------------------------------------------------------

/// The scope of one handler, for a `static`.
#[track_caller]
pub const fn scope(name: &'static str, shared: bool) -> Scope {
    Scope::of_handler(name, shared)
}

/// A scope that a macro has written, checked while the caller is compiled.
///
/// # Panics
/// If it can't be one.
pub const fn scope_name(name: &'static str) -> &'static str {
    assert!(is_scope(name), "a scope has 1 to 200 bytes, without `/` and control characters");
    name
}

/// Takes a function for its name.
pub fn function<F>(_: F) {}

/// A key of a handler whose values are recorded.
pub fn key_of_values<T, E>(scope: &'static Scope, _: Returning<Result<T, E>>) -> KeyBuilder<'static> {
    KeyBuilder::of_results(scope, type_name::<T>())
}

/// A key of a handler whose errors are recorded as well.
pub fn key_of_results<T, E>(scope: &'static Scope, _: Returning<Result<T, E>>) -> KeyBuilder<'static> {
    KeyBuilder::of_results(scope, type_name::<Result<T, E>>())
}

// ---- The key -------------------------------------------------------------------------------------------------------

/// A value in a key. What it is decides which of the four traits below has the method for it: the first one whose
/// receiver matches, from three references down to none.
#[derive(Debug)]
pub struct Part<'a, T: ?Sized>(pub &'a T);

/// A [`KeyPart`].
pub trait OwnPart {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>);
}

impl<T: KeyPart + ?Sized> OwnPart for &&&Part<'_, T> {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>) {
        key.part(self.0, next);
    }
}

/// An `Option` of something that can be displayed.
pub trait DisplayOption {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>);
}

impl<T: Display> DisplayOption for &&Part<'_, Option<T>> {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>) {
        display(key, self.0.as_ref(), next);
    }
}

impl<T: Display> DisplayOption for &&Part<'_, &Option<T>> {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>) {
        display(key, self.0.as_ref(), next);
    }
}

fn display<T: Display>(key: &mut KeyBuilder, value: Option<&T>, next: Option<char>) {
    match value {
        Some(value) => key.display_part(value, next),
        None => key.missing_part(),
    }
}

/// Something that can be displayed.
pub trait DisplayPart {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>);
}

impl<T: Display + ?Sized> DisplayPart for &Part<'_, T> {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>) {
        key.display_part(&self.0, next);
    }
}

/// Anything else: asks for the [`KeyPart`] that is missing, so that the compiler says it in the words of that trait.
pub trait NoPart<T: ?Sized> {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>)
    where
        T: KeyPart;
}

impl<T: ?Sized> NoPart<T> for Part<'_, T> {
    fn idem_append(&self, key: &mut KeyBuilder, next: Option<char>)
    where
        T: KeyPart,
    {
        key.part(self.0, next);
    }
}

// ---- The operation -------------------------------------------------------------------------------------------------

/// What `idem_operation` of a store or of a transaction makes.
pub trait Operate: Sized {
    #[must_use]
    fn with_fingerprint<F: Serialize + ?Sized>(self, payload: &F) -> Self;
}

impl Operate for Operation {
    fn with_fingerprint<F: Serialize + ?Sized>(self, payload: &F) -> Self {
        self.fingerprint(payload)
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl<C: crate::within::Transaction> Operate for crate::within::OperationWithin<C> {
    fn with_fingerprint<F: Serialize + ?Sized>(self, payload: &F) -> Self {
        self.fingerprint(payload)
    }
}

// ---- The store and the policy --------------------------------------------------------------------------------------

/// A [`Store`], found by the method call behind whatever derefs to it, and not moved.
pub trait OperationOn {
    fn idem_operation(&self, key: Result<Key, KeyError>, policy: Policy) -> Operation;
}

impl<S: Store + ?Sized> OperationOn for S {
    fn idem_operation(&self, key: Result<Key, KeyError>, policy: Policy) -> Operation {
        Operation::new(self, key, policy)
    }
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a `Policy`",
    label = "not an `idem_runtime::Policy`",
    note = "write an expression that is or derefs to an `idem_runtime::Policy`, for example `policy = app.policy`"
)]
pub trait IsPolicy {
    fn policy(&self) -> Policy;
}

impl IsPolicy for Policy {
    fn policy(&self) -> Policy {
        *self
    }
}

/// A [`Policy`], found by the method call behind whatever derefs to it, and not moved.
pub trait PolicyOf {
    fn idem_policy(&self) -> Policy;
}

impl<P: IsPolicy + ?Sized> PolicyOf for P {
    fn idem_policy(&self) -> Policy {
        self.policy()
    }
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be fingerprinted",
    label = "needs `Serialize`",
    note = "derive it: `#[derive(serde::Serialize)]`, or fingerprint the parts that matter: `fingerprint = (event.id, event.amount)`"
)]
pub trait IsPayload {
    fn fingerprint<O: Operate>(&self, operation: O) -> O;
}

impl<F: Serialize + ?Sized> IsPayload for F {
    fn fingerprint<O: Operate>(&self, operation: O) -> O {
        operation.with_fingerprint(self)
    }
}

/// A payload, found by the method call behind whatever derefs to it, and not moved.
pub trait FingerprintOf {
    fn idem_fingerprint<O: Operate>(&self, operation: O) -> O;
}

impl<F: IsPayload + ?Sized> FingerprintOf for F {
    fn idem_fingerprint<O: Operate>(&self, operation: O) -> O {
        self.fingerprint(operation)
    }
}

/// `max_attempts`, checked while the caller is compiled.
///
/// # Panics
/// If `count` is zero.
pub const fn at_least_one(count: u32) -> u32 {
    assert!(count > 0, "with no attempts the body could never run; give at least 1, or leave `max_attempts` out");
    count
}

// ---- The result ----------------------------------------------------------------------------------------------------

/// A value of any type in a place that is never reached: it fixes the type of the body.
///
/// # Panics
/// Always.
pub fn never<T>() -> T {
    unreachable!("the attribute puts this behind `if false`")
}

/// A type to ask questions about. A function pointer, as the compiler would show the definition of a type of our own in
/// every message about it.
pub type Returning<T> = fn() -> T;

pub const fn returning<T>() -> Returning<T> {
    never::<T>
}

#[diagnostic::on_unimplemented(
    message = "`{C}` is not a `Codec`",
    label = "not an `idem_runtime::Codec`",
    note = "name a type that implements `idem_runtime::Codec`, or leave `codec` out to record JSON"
)]
pub trait CodecWanted<C> {}

impl<C: Codec> CodecWanted<C> for Returning<C> {}

pub trait IsCodec<C> {
    fn idem_codec(self) -> Returning<C>;
}

impl<C> IsCodec<C> for Returning<C>
where
    Returning<C>: CodecWanted<C>,
{
    fn idem_codec(self) -> Self {
        self
    }
}

#[diagnostic::on_unimplemented(
    message = "an `#[idempotent]` function returns a `Result`, not `{O}`",
    label = "not a `Result`",
    note = "return `Result<T, E>`, with an error type that implements `From<idem_runtime::Error>`"
)]
pub trait ResultWanted<O> {
    type Value;
    type Error;
}

impl<T, E> ResultWanted<Result<T, E>> for Returning<Result<T, E>> {
    type Value = T;
    type Error = E;
}

pub trait ReturnsResult<O> {
    type Value;
    type Error;
    fn idem_result(self) -> Returning<Result<Self::Value, Self::Error>>;
}

impl<O> ReturnsResult<O> for Returning<O>
where
    Returning<O>: ResultWanted<O>,
{
    type Value = <Self as ResultWanted<O>>::Value;
    type Error = <Self as ResultWanted<O>>::Error;

    fn idem_result(self) -> Returning<Result<Self::Value, Self::Error>> {
        returning()
    }
}

#[diagnostic::on_unimplemented(
    message = "`{T}` can't be recorded and replayed",
    label = "needs `Serialize` and `DeserializeOwned`",
    note = "derive both: `#[derive(serde::Serialize, serde::Deserialize)]`"
)]
pub trait ValueWanted<T> {}

impl<T: Serialize + DeserializeOwned, E> ValueWanted<T> for Returning<Result<T, E>> {}

pub trait ValueIsRecorded<T> {
    #[must_use]
    fn idem_value(self) -> Self;
}

impl<T, E> ValueIsRecorded<T> for Returning<Result<T, E>>
where
    Returning<Result<T, E>>: ValueWanted<T>,
{
    fn idem_value(self) -> Self {
        self
    }
}

#[diagnostic::on_unimplemented(
    message = "`{E}` can't be made from an `idem_runtime::Error`",
    label = "needs `From<idem_runtime::Error>`",
    note = "implement `From<idem_runtime::Error>` for an error type of your own; `anyhow::Error`, `std::io::Error` and `Box<dyn Error + Send + Sync>` have it"
)]
pub trait ErrorWanted<E> {}

impl<T, E: From<Error>> ErrorWanted<E> for Returning<Result<T, E>> {}

pub trait TakesError<E> {
    #[must_use]
    fn idem_error(self) -> Self;
}

impl<T, E> TakesError<E> for Returning<Result<T, E>>
where
    Returning<Result<T, E>>: ErrorWanted<E>,
{
    fn idem_error(self) -> Self {
        self
    }
}

#[diagnostic::on_unimplemented(
    message = "`{E}` can't be recorded and replayed",
    label = "needs `Serialize` and `DeserializeOwned` of the error",
    note = "derive both: `#[derive(serde::Serialize, serde::Deserialize)]`, or write `on_error = release`"
)]
pub trait RecordedErrorWanted<E> {}

impl<T, E: Serialize + DeserializeOwned> RecordedErrorWanted<E> for Returning<Result<T, E>> {}

pub trait ErrorIsRecorded<E> {
    #[must_use]
    fn idem_recorded_error(self) -> Self;
}

impl<T, E> ErrorIsRecorded<E> for Returning<Result<T, E>>
where
    Returning<Result<T, E>>: RecordedErrorWanted<E>,
{
    fn idem_recorded_error(self) -> Self {
        self
    }
}

/// How results are recorded: the value of `on_error`.
pub trait Records<T, E> {
    fn values<C: Codec>(self, codec: Returning<C>) -> Handler<T, E, RecordValues<C>>;
    fn results<C: Codec>(self, codec: Returning<C>) -> Handler<T, E, RecordResults<C, ()>>;
    fn results_if<C: Codec, F: Fn(&E) -> OnError>(
        self,
        codec: Returning<C>,
        decide: F,
    ) -> Handler<T, E, RecordResults<C, Rule<E, F>>>;
}

impl<T, E> Records<T, E> for Returning<Result<T, E>> {
    fn values<C: Codec>(self, _: Returning<C>) -> Handler<T, E, RecordValues<C>> {
        Handler { recorder: record_values(), result: PhantomData }
    }

    fn results<C: Codec>(self, _: Returning<C>) -> Handler<T, E, RecordResults<C, ()>> {
        Handler { recorder: record_results(), result: PhantomData }
    }

    fn results_if<C: Codec, F: Fn(&E) -> OnError>(
        self,
        _: Returning<C>,
        decide: F,
    ) -> Handler<T, E, RecordResults<C, Rule<E, F>>> {
        let rule = Rule { decide, call: |decide, error| decide(error) };
        Handler { recorder: record_results_if(rule), result: PhantomData }
    }
}

/// What `on_error` decides. That it can is known from here on, and not asked again.
#[derive(Debug)]
pub struct Rule<E, F> {
    decide: F,
    call: fn(&F, &E) -> OnError,
}

impl<E, F> ErrorRule<E> for Rule<E, F> {
    fn decide(&self, error: &E) -> OnError {
        (self.call)(&self.decide, error)
    }
}

/// The end of the questions: all that [`crate::run`] wants to know about the types.
#[derive(Debug)]
pub struct Handler<T, E, R> {
    recorder: R,
    result: PhantomData<Returning<Result<T, E>>>,
}

impl<T, E, R> Handler<T, E, R> {
    pub fn on<O: Operate>(self, operation: O) -> Protected<O, T, E, R> {
        Protected { operation, handler: self }
    }
}

/// A handler and what it runs on.
///
/// Each kind of operation has a function of its own that makes the future of the call. The future of a trait's method would be
/// a projection, whose bounds the compiler proves again when it asks whether a future around it is `Send`. By then it has
/// forgotten which lifetimes are equal: no `Box<dyn Error>` would equal another one, and no such handler could be spawned. The
/// future of a function is only looked into.
#[derive(Debug)]
pub struct Protected<O, T, E, R> {
    operation: O,
    handler: Handler<T, E, R>,
}

impl<T, E: From<Error>, R: Recorder<T, E>> Protected<Operation, T, E, R> {
    pub fn run<B: Future<Output = Result<T, E>>>(self, body: B) -> impl Future<Output = Result<T, E>> {
        crate::engine::run(self.operation, self.handler.recorder, body)
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl<C, T, E, R> Protected<crate::within::OperationWithin<C>, T, E, R>
where
    C: crate::within::Transaction,
    E: From<Error>,
    R: Recorder<T, E>,
{
    pub fn run<B: Future<Output = Result<T, E>>>(self, body: B) -> impl Future<Output = Result<T, E>> {
        crate::within::run_within(self.operation, self.handler.recorder, body)
    }
}
