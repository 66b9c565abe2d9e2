//! The `#[idempotent]` attribute of `idem-runtime`, which re-exports it. The attribute reads tokens and writes tokens:
//! *parse*, *validate*, *expand*. All code that runs at run time is in `idem-runtime`.

mod duration;
mod expand;
mod fallback;
mod function;
mod nearest;
mod parse;
mod problems;
mod template;
mod validate;

use proc_macro2::TokenStream;
use syn::parse::{ParseStream, Parser};

use crate::function::Function;
use crate::problems::Problems;
use crate::validate::Call;

/// Runs the body of an `async fn` once for each key, and replays its recorded result to every duplicate.
///
/// The signature does not change. The function returns a `Result<T, E>`, under any alias. The value can be recorded
/// (`T: Serialize + DeserializeOwned`), and the error can hold the reason why there is no result (`E:
/// From<idem_runtime::Error>`, which `anyhow::Error`, `std::io::Error` and boxed errors implement).
///
/// ```
/// use idem_runtime::{Error, MemoryStore, idempotent};
///
/// struct App {
///     idempotency: MemoryStore,
/// }
///
/// struct OrderPaid {
///     order_id: u64,
/// }
///
/// #[idempotent(key = "order:{event.order_id}", ttl = "7d", store = app.idempotency)]
/// async fn ship_order(app: &App, event: &OrderPaid) -> Result<String, Error> {
///     println!("this is printed once");
///     Ok(format!("parcel for order {}", event.order_id))
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Error> {
/// let app = App { idempotency: MemoryStore::new() };
/// let event = OrderPaid { order_id: 42 };
/// let first = ship_order(&app, &event).await?;
/// let duplicate = ship_order(&app, &event).await?;
/// assert_eq!(first, duplicate);
/// # Ok(())
/// # }
/// ```
///
/// The attribute works on free functions and on methods with every form of `self`, in traits and `impl`s, under
/// `#[async_trait]`, and above or below attributes such as `#[tracing::instrument]`. The expressions in the attribute
/// see the names that the body sees at its beginning: the arguments, `self`, statics. These expressions are evaluated
/// before the body runs, and only borrow, so the body may move the arguments. The body owns all arguments, even
/// arguments that it does not mention, so all are dropped before the key is freed. Only values that a pattern leaves
/// unnamed (`..`) are dropped later.
///
/// # Options
///
/// | option | value | default |
/// |---|---|---|
/// | [`key`](#key) | the name of the operation | required |
/// | [`ttl`](#ttl) | time that a finished record is kept (its retention) | required without `policy` |
/// | [`store`](#store) | the store that keeps the records | required |
/// | [`scope`](#scope) | `"name"`, `shared("name")`: the name of the handler inside the key space | module path and function name; required for methods and generic functions |
/// | [`lease`](#lease) | time that a crashed attempt holds its key | `"30s"` |
/// | [`timeout`](#timeout) | longest run of the body | `"1h"` |
/// | [`in_progress`](#in_progress) | `reject`, `wait("10s")`: a duplicate of a running attempt | `reject` |
/// | [`on_error`](#on_error) | `release`, `record`, `uncertain`, a function: the meaning of an `Err` | `release` |
/// | [`error_ttl`](#error_ttl) | time that a recorded error is kept | `ttl` |
/// | [`on_crash`](#on_crash) | `retry`, `fail`, `reconcile(…)`: the effect of a lapsed lease | `retry` |
/// | [`max_attempts`](#max_attempts) | largest number of starts of the body | unlimited |
/// | [`fingerprint`](#fingerprint) | the payload, which must be the same in a duplicate | none |
/// | [`missing_key`](#missing_key) | `reject`, `run`: a key that is `None`, empty or blank | `reject` |
/// | [`on_store_error`](#on_store_error) | `fail`, `run`: a store that does not answer | `fail` |
/// | [`codec`](#codec) | encoding of results | `Json` |
/// | [`on_undecodable`](#on_undecodable) | `error`, a function: a recorded result that no longer decodes | `error` |
/// | [`max_result_bytes`](#max_result_bytes) | size of the largest result that is recorded | 262144 (256 KiB) |
/// | [`mode`](#mode) | `enforce`, `shadow`, `off`: whether the library acts or only watches | `enforce` |
/// | [`policy`](#policy) | options shared between handlers, or decided at run time | none |
/// | [`crate`](#crate) | the path to `idem_runtime` | `::idem_runtime` |
///
/// Durations are written `"500ms"`, `"30s"`, `"15m"`, `"24h"`, `"7d"` or `"1h 30m"`, and the macro checks them at
/// compile time. Any expression of type `Duration` is accepted too.
///
/// ## `key`
///
/// A template, `key = "order:{event.order_id}:{event.line()}"`. Each pair of braces contains an expression; `{{` and
/// `}}` are literal braces. Text, numbers and every type with `Display` or `idem_runtime::KeyPart` can be part of a
/// key. Inside each value, the separator that follows the value is escaped, so different values never make the same
/// key.
///
/// A tuple of expressions, `key = (tenant, event.order_id)`, is the same as the template `"{tenant}:{event.order_id}"`.
/// Any other expression is a key of one part: `key = message.header("Idempotency-Key")`.
///
/// A part that is `None`, empty or blank makes the whole key [missing](#missing_key). A value is blank if it contains
/// only white space (including no-break spaces), control characters and characters of no width.
///
/// ## `ttl`
///
/// Retention of a finished record, counted from the completion of the operation. The `ttl` must be longer than the time
/// for which the broker may deliver the message again. `ttl = "7d"`, or `ttl = app.retention`.
///
/// ## `store`
///
/// Any value that is, derefs to, or shares a `Store`: `store = app.store`, `store = self.store`, `store = STORE` for a
/// `static STORE: LazyLock<MemoryStore>`, a reference, an `Arc`, a `Box<dyn Store>`.
///
/// ## `scope`
///
/// The same key under two scopes names two operations. The default scope is the module path and function name: if the
/// function moves or is renamed, its keys change. A written scope, `scope = "ship_order"`, stays the same. The scope is
/// a string literal, or `concat!(..)` or `stringify!(..)` of literals in a macro of yours. Scopes that begin with
/// `idem::` belong to the library, and do not compile.
///
/// Only a plain function has a default scope. A function in an `impl` or a `trait` has to name its scope, because
/// functions with the same name in one module would share a default scope, and would replay each other's results. A
/// generic function (`impl Trait` arguments make a function generic) has to name its scope too. All instantiations of a
/// generic function share its scope, and so do all types that use a default method of a trait. If two instantiations
/// have different effects, put the difference into the key.
///
/// In one process, only one function may use a scope. A second function with the same scope is refused when it is
/// called (`Error::InvalidKey`). A call of a generic function with another return type than an earlier call is refused
/// in the same way, because the call might replay a result of the earlier type. If several handlers share their results
/// on purpose, each of these handlers declares `scope = shared("ship_order")`:
///
/// ```
/// use idem_runtime::{Error, MemoryStore, idempotent};
///
/// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = shared("ship"))]
/// async fn ship(store: &MemoryStore, order: u64) -> Result<String, Error> {
///     Ok(format!("parcel for order {order}"))
/// }
///
/// // The same operation, requested in another way.
/// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = shared("ship"))]
/// async fn ship_express(store: &MemoryStore, order: u64, courier: &str) -> Result<String, Error> {
///     Ok(format!("parcel for order {order}, by {courier}"))
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Error> {
/// # let store = MemoryStore::new();
/// assert_eq!(ship(&store, 7).await?, "parcel for order 7");
/// assert_eq!(ship_express(&store, 7, "bike").await?, "parcel for order 7");
/// # Ok(())
/// # }
/// ```
///
/// ## `lease`
///
/// Time for which a pending record blocks other attempts if its lease is not renewed. While the body runs, the lease is
/// renewed after every third of this time. A crashed process keeps its keys for this time. At least `"100ms"`.
///
/// ## `timeout`
///
/// Longest run of the body. After this time the body is cancelled, the key is freed, and the caller gets
/// `Error::TimedOut`; with `on_crash = fail` the operation becomes interrupted. A body that hangs thus holds its key no
/// longer than this time, although its lease is renewed. Choose a time that is longer than the body ever needs:
/// `timeout = "10m"`. A body that blocks its thread can't be cancelled; after this time its lease is no longer renewed,
/// and lapses.
///
/// ## `in_progress`
///
/// The answer to a duplicate while another attempt runs. `reject`: `Error::InProgress`, immediately. `wait("10s")`: the
/// result of that attempt, or `Error::InProgress` if the attempt takes longer.
///
/// ## `on_error`
///
/// `release` frees the key, and the next delivery runs the body again. `record` stores the error as a result and
/// replays it; it needs `E: Serialize + DeserializeOwned`. `uncertain` says that the effect may have happened, as after
/// a time-out: no body runs again before the [reconciler](#on_crash) or an operator has settled the doubt. An error is
/// never recorded if the library temporarily refused a call inside the same body (`InProgress`, `Store`,
/// `confirm_lease`, …): the refusal alone may have caused the error. A function decides for each error:
///
/// ```
/// use idem_runtime::{Error, MemoryStore, OnError, idempotent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize)]
/// enum ChargeError {
///     Declined,
///     Unavailable,
///     TimedOut,
///     Idempotency(String),
/// }
///
/// impl From<Error> for ChargeError {
///     fn from(error: Error) -> Self {
///         Self::Idempotency(error.to_string())
///     }
/// }
///
/// // A declined card is not charged again; a bank that was unavailable is called again. After a time-out the card may
/// // have been charged.
/// fn judge(error: &ChargeError) -> OnError {
///     match error {
///         ChargeError::Declined => OnError::Record,
///         ChargeError::TimedOut => OnError::Uncertain,
///         _ => OnError::Release,
///     }
/// }
///
/// #[idempotent(key = "{order}", ttl = "1d", store = store, on_error = judge)]
/// async fn charge(store: &MemoryStore, order: u64, answer: ChargeError) -> Result<(), ChargeError> {
///     Err(answer)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let store = MemoryStore::new();
/// assert_eq!(charge(&store, 1, ChargeError::Unavailable).await, Err(ChargeError::Unavailable));
/// assert_eq!(charge(&store, 1, ChargeError::Declined).await, Err(ChargeError::Declined));
/// // The body does not run any more.
/// assert_eq!(charge(&store, 1, ChargeError::Unavailable).await, Err(ChargeError::Declined));
/// # }
/// ```
///
/// ## `error_ttl`
///
/// Time for which an error that `on_error` records is kept, counted from its completion (default: `ttl`).
///
/// ## `on_crash`
///
/// `retry`: when a lease has lapsed, the next delivery takes over and runs the body again (at least once). `fail`:
/// after a body that started and did not return, no further body starts. Callers get `Error::Interrupted` until an
/// operator resolves the record (at most once).
///
/// `reconcile(find_charge(app, order))`: as `fail`, but the next delivery asks the outside world. The value in the
/// parentheses is a future of a `Result<Reconciliation<T>, E>`, usually the call of an `async fn` with arguments of the
/// handler. The future is polled only when the effect of an earlier attempt is in doubt, under the lease of the new
/// attempt and before the body; `idem_runtime::Reconciliation` has an example.
///
/// ## `max_attempts`
///
/// After this number of attempts callers get `Error::AttemptsExhausted` without a run of the body. An integer or a
/// constant.
///
/// ## `fingerprint`
///
/// An expression that is hashed into the record: `fingerprint = event`, or
/// `fingerprint = (event.amount, event.currency)`. The same key with another fingerprint is a misuse:
/// `Error::FingerprintMismatch`. The expression must implement `Serialize`. The fingerprint depends on the order of an
/// array, but not on the order of a `HashMap` or a `HashSet`.
///
/// An existing digest of a large payload can replace the payload, alone or as a part:
/// `fingerprint = (upload.name, PayloadDigest::new(&upload.sha256))`, with `idem_runtime::key::PayloadDigest`.
///
/// ## `missing_key`
///
/// `reject`: `Error::MissingKey`. `run`: the body runs without protection, and no store call is made.
///
/// ## `on_store_error`
///
/// `fail`: `Error::Store` when the key can't be reserved. `run`: the body runs without protection, and the outcome
/// shows this.
///
/// ## `codec`
///
/// A type that implements `Codec`, which turns results into bytes and back: `Json`, `MessagePack`, `Postcard` (each
/// codec has a feature), or your own codec. A record contains the name of its codec. A handler with one of the
/// library's codecs also reads results of the library's other codecs, so you can change the codec while records exist.
///
/// A result that consists of bytes only, a `Vec<u8>` or a `Bytes`, is recorded as these bytes, not as JSON.
///
/// ## `on_undecodable`
///
/// The answer to a duplicate if the recorded result doesn't decode as the function's return type, or was written by a
/// codec that is not available. The body never runs again. `error`: `Error::ResultUnavailable`. A function
/// `fn(Undecodable<'_>) -> Result<Vec<u8>, CodecError>` turns the recorded bytes into bytes of the handler's current
/// codec, and the library replays the converted result. The record itself stays unchanged.
///
/// ```
/// use idem_runtime::{Codec, CodecError, Error, Json, MemoryStore, Undecodable, idempotent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Receipt {
///     // Earlier this was a field `amount` in euros.
///     cents: u64,
/// }
///
/// fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
///     #[derive(Deserialize)]
///     struct Before {
///         amount: u64,
///     }
///     let Before { amount } = recorded.decode()?;
///     Json::encode(&Receipt { cents: amount * 100 })
/// }
///
/// #[idempotent(key = "{order}", ttl = "30d", store = store, on_undecodable = migrate)]
/// async fn charge(store: &MemoryStore, order: u64) -> Result<Receipt, Error> {
///     Ok(Receipt { cents: 4200 })
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// # assert_eq!(charge(&MemoryStore::new(), 7).await.unwrap().cents, 4200);
/// # }
/// ```
///
/// With `on_error = record` the library calls the function for recorded errors as well; `Undecodable::is_error`
/// distinguishes recorded errors from results.
///
/// ## `max_result_bytes`
///
/// Size of the largest encoded result that is recorded, in bytes: `max_result_bytes = 64 * 1024`. A larger result is
/// still returned to its caller, but the operation is recorded without the result: duplicates get
/// `Error::ResultUnavailable`, and the body never runs again.
///
/// ## `mode`
///
/// `enforce`: duplicates are suppressed. `shadow`: the library still reserves, records and compares, and the outcome
/// shows whether `enforce` would have suppressed the call, but the body always runs; use this mode to try the library
/// on live traffic. `off`: the body runs without a store call. To change the mode while the process runs, give a
/// [`policy`](#policy) with a `ModeSwitch`.
///
/// ## `policy`
///
/// An expression that is, or derefs to, a `Policy`. Other options of the attribute override its settings. A policy also
/// holds settings that have no option, such as a mode that is switched at run time.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::{Error, MemoryStore, OnCrash, Policy, idempotent};
///
/// const PAYMENTS: Policy = Policy::new(Duration::from_secs(30 * 86_400)).on_crash(OnCrash::Fail).max_attempts(5);
///
/// #[idempotent(key = "{order}", store = store, policy = PAYMENTS, lease = "1m")]
/// async fn charge(store: &MemoryStore, order: u64) -> Result<u64, Error> {
///     Ok(order)
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// # assert_eq!(charge(&MemoryStore::new(), 7).await.unwrap(), 7);
/// # }
/// ```
///
/// ## `crate`
///
/// Path to `idem_runtime`, if it is renamed or re-exported: `crate = my_company::idempotency`.
///
/// ```
/// mod my_company {
///     pub use idem_runtime as idempotency;
/// }
/// use my_company::idempotency::{Error, MemoryStore, idempotent};
///
/// #[idempotent(key = "{id}", ttl = "1d", store = store, crate = my_company::idempotency)]
/// async fn handle(store: &MemoryStore, id: u64) -> Result<u64, Error> {
///     Ok(id)
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// # assert_eq!(handle(&MemoryStore::new(), 7).await.unwrap(), 7);
/// # }
/// ```
///
/// # Expansion
///
/// The expansion makes an operation of the store, the key and a `const` policy, and runs the body in it as an `async`
/// block. `idem_runtime::Operation::run` does the same without the attribute.
#[proc_macro_attribute]
pub fn idempotent(args: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    attribute(args.into(), &item.into()).into()
}

/// Expands to code that names the annotated function without a path. In an `impl` or a `trait` no such name exists, and
/// the compiler's message then shows the name of this macro, which states the problem.
#[doc(hidden)]
#[proc_macro]
pub fn a_function_in_an_impl_or_a_trait_needs_a_scope_of_its_own(
    function: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    expand::named(&function.into()).into()
}

fn attribute(args: TokenStream, item: &TokenStream) -> TokenStream {
    match syn::parse2(item.clone()) {
        Ok(function) => match call(args, &function) {
            Ok(call) => expand::expand(&call, &function),
            Err(problems) => fallback::keep(&function, &problems),
        },
        Err(problem) => fallback::keep_item(item, &problem),
    }
}

fn call(args: TokenStream, function: &Function) -> syn::Result<Call> {
    let mut problems = Problems::default();
    let args = (|input: ParseStream<'_>| Ok(parse::args(input, &mut problems))).parse2(args)?;
    let call = validate::call(args, function, &mut problems);
    problems.check(call)
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use super::*;

    const ARGS: &str = r#"key = "order:{event.id}:{a[0]}", ttl = "7d", store = app.store, scope = "s", lease = "10s",
        in_progress = wait("1s"), on_error = |e| decide(e), on_crash = fail, max_attempts = 3,
        fingerprint = (event.id, a), missing_key = run, on_store_error = run, codec = Json<u8>,
        on_undecodable = old::migrate::<u8>, timeout = "10m", max_result_bytes = 1 << 10, mode = shadow, policy = P,
        crate = ::idem_runtime"#;
    const ITEM: &str = r"#[doc = r#type] pub(crate) async unsafe fn r#ship<'a, T: Copy, const N: usize>(
        &'a mut self, (x, mut y): (T, T), #[cfg(a)] app: &App, event: impl Event) -> Result<[T; N], E>
        where T: Into<u8> { #![allow(x)] let z = x?; return Ok(z) }";

    fn expand(args: TokenStream, item: &TokenStream) -> String {
        let tokens = attribute(args, item);
        let file = syn::parse2::<syn::File>(tokens.clone());
        assert!(file.is_ok(), "not Rust: {tokens}");
        tokens.to_string()
    }

    fn tokens(source: &str) -> TokenStream {
        TokenStream::from_str(source).unwrap()
    }

    #[test]
    fn a_call_of_the_runtime_is_generated() {
        let expanded = expand(tokens(ARGS), &tokens(ITEM));
        assert!(!expanded.contains("compile_error"), "{expanded}");
        assert!(expanded.contains(". on (__idem_operation) . run (async move {"), "{expanded}");
    }

    #[test]
    fn damaged_options_cause_no_panic() {
        // Removes each token, doubles each token, and cuts the input before each token.
        let all: Vec<_> = tokens(ARGS).into_iter().collect();
        for at in 0..all.len() {
            let (before, after) = (&all[..at], &all[at + 1..]);
            for middle in [vec![], vec![all[at].clone(); 2]] {
                let args = before.iter().cloned().chain(middle).chain(after.iter().cloned()).collect();
                expand(args, &tokens(ITEM));
            }
            expand(before.iter().cloned().collect(), &tokens(ITEM));
        }
    }

    #[test]
    fn an_item_that_the_attribute_can_not_protect_is_emitted_unchanged() {
        let items = [
            "struct S;",
            "impl S { async fn f() -> Result<(), E> { Ok(()) } }",
            "trait T { async fn f(); }",
            "mod m { fn f() {} }",
            "const F: fn() = f;",
            "fn f() -> Pin<Box<dyn Future<Output = R> + Send>> { Box::new(1) }",
            "fn f() -> Pin<Box<u8>> { Box::pin(async {}) }",
            "",
        ];
        for item in items {
            let expanded = expand(tokens(ARGS), &tokens(item));
            assert!(expanded.contains("compile_error"), "{expanded}");
        }
        let method = attribute(tokens(ARGS), &tokens("async fn f(&self) -> Result<(), E>;")).to_string();
        assert!(method.contains("needs a body") && method.contains("async fn f (& self)"), "{method}");
    }

    #[test]
    fn the_code_of_async_trait_around_a_boxed_body_is_kept() {
        let item = "fn f<'a>(&'a self, __arg1: (u8, u8)) -> Pin<Box<dyn Future<Output = Result<u8, E>> + Send + 'a>> {
            Box::pin(async move {
                if let Some(__ret) = None::<Result<u8, E>> { return __ret; }
                let __self = self;
                let (a, b) = __arg1;
                let __ret: Result<u8, E> = { __self.f(a + b) };
                __ret
            })
        }";
        let args = r#"key = "{self.id}:{a}", ttl = "7d", store = self.store, scope = "f""#;
        let expanded = expand(tokens(args), &tokens(item));
        assert!(expanded.contains("let __ret : Result < u8 , E > = { use"), "{expanded}");
        assert!(expanded.contains("(__self . store) . idem_operation"), "{expanded}");
        assert!(expanded.contains("& (__self . id)"), "{expanded}");
    }
}
