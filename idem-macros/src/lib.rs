//! The `#[idempotent]` attribute of `idem-runtime`, which re-exports it. It reads tokens and writes tokens: *parse*,
//! *validate*, *expand*. All code that runs is in the runtime.

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
/// The signature does not change. The function returns a `Result<T, E>`, under any alias, whose value can be recorded
/// (`T: Serialize + DeserializeOwned`) and whose error can say why there is no result (`E: From<idem_runtime::Error>`, as
/// `anyhow::Error`, `std::io::Error` and boxed errors have it).
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
/// It stands on free functions and methods with every form of `self`, in traits and `impl`s, under `#[async_trait]`,
/// and above or below attributes such as `#[tracing::instrument]`. The expressions in it see the names that the body
/// sees at its beginning: the arguments, `self`, statics. They are evaluated before the body runs and only borrow, so
/// the body may move the arguments. The body owns all of them, whether or not it mentions them: they are dropped before the key is
/// freed. Only what a pattern gives no name to (`..`) is dropped later.
///
/// # Options
///
/// | option | value | default |
/// |---|---|---|
/// | [`key`](#key) | what names the operation | required |
/// | [`ttl`](#ttl) | how long a finished record is remembered | required without `policy` |
/// | [`store`](#store) | where records are kept | required |
/// | [`scope`](#scope) | `"name"`, `shared("name")`: the name of the handler inside the key space | module path and function name; required for methods and generic functions |
/// | [`lease`](#lease) | how long a crashed attempt holds its key | `"30s"` |
/// | [`timeout`](#timeout) | for how long the body may run | `"1h"` |
/// | [`in_progress`](#in_progress) | `reject`, `wait("10s")`: a duplicate of a running attempt | `reject` |
/// | [`on_error`](#on_error) | `release`, `record`, a function: what becomes of an `Err` | `release` |
/// | [`on_crash`](#on_crash) | `retry`, `fail`: what a lapsed lease means | `retry` |
/// | [`max_attempts`](#max_attempts) | how often the body may start | unlimited |
/// | [`fingerprint`](#fingerprint) | what must be the same in a duplicate | none |
/// | [`missing_key`](#missing_key) | `reject`, `run`: a key that is `None`, empty or blank | `reject` |
/// | [`on_store_error`](#on_store_error) | `fail`, `run`: a store that does not answer | `fail` |
/// | [`codec`](#codec) | how results are encoded | `Json` |
/// | [`on_undecodable`](#on_undecodable) | `error`, a function: a recorded result that can't be read any more | `error` |
/// | [`max_result_bytes`](#max_result_bytes) | the largest result that is recorded | 262144 (256 KiB) |
/// | [`mode`](#mode) | `enforce`, `shadow`, `off`: whether the library acts or only watches | `enforce` |
/// | [`policy`](#policy) | options shared between handlers, or decided at run time | none |
/// | [`crate`](#crate) | the path to `idem_runtime` | `::idem_runtime` |
///
/// Durations are written `"500ms"`, `"30s"`, `"15m"`, `"24h"`, `"7d"` or `"1h 30m"` and checked by the compiler; any
/// expression of type `Duration` will do, too.
///
/// ## `key`
///
/// A template, `key = "order:{event.order_id}:{event.line()}"`. Each pair of braces holds an expression; `{{` and `}}` are
/// braces. Text, numbers and every type with `Display` or `idem_runtime::KeyPart` can stand in a key. What separates two
/// values is escaped in them, so that different values never make the same key.
///
/// A tuple of expressions, `key = (tenant, event.order_id)`, joins its parts as the template `"{tenant}:{event.order_id}"`
/// does. Any other expression is a key of one part: `key = message.header("Idempotency-Key")`.
///
/// A part that is `None`, empty or blank makes the whole key [missing](#missing_key). A value is blank if it holds
/// nothing but white space (no-break spaces included), control characters and characters of no width.
///
/// ## `ttl`
///
/// How long the record of a finished operation is remembered, counted from its completion: longer than the broker may
/// deliver the message again. `ttl = "7d"`, or `ttl = app.retention`.
///
/// ## `store`
///
/// Anything that is, derefs to, or shares a `Store`: `store = app.store`, `store = self.store`, `store = STORE` for a
/// `static STORE: LazyLock<MemoryStore>`, a reference, an `Arc`, a `Box<dyn Store>`.
///
/// ## `scope`
///
/// The same key under two scopes is two operations. The default, module path and function name, changes when the function
/// moves or is renamed, and with it the keys; `scope = "ship_order"` stays. It is a string literal, or `concat!(..)` or
/// `stringify!(..)` of literals in a macro of yours.
///
/// Only a plain function has a default. Functions of one name in one module would share it, and no record says whose result it
/// holds: a function in an `impl` or a `trait` has to name its scope. So has a generic function (`impl Trait` arguments make it
/// one). All its instantiations share that scope, and so do all types that use a default method of a trait: if they do different
/// things, their difference belongs into the key.
///
/// In one process a scope belongs to one function, and a second one is refused when it is called (`Error::InvalidKey`). So is a
/// generic function that returns another type than before, as it would replay a result of that type. Handlers that replay each
/// other's results on purpose all say so, `scope = shared("ship_order")`:
///
/// ```
/// use idem_runtime::{Error, MemoryStore, idempotent};
///
/// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = shared("ship"))]
/// async fn ship(store: &MemoryStore, order: u64) -> Result<String, Error> {
///     Ok(format!("parcel for order {order}"))
/// }
///
/// // The same operation, asked for in another way.
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
/// How long a pending record is honoured without a renewal. It is renewed every third of it while the body runs, however
/// long that takes; it is the time for which a crashed process keeps its keys. At least `"100ms"`.
///
/// ## `timeout`
///
/// For how long the body may run. Beyond it the body is cancelled, the key is freed, and the caller gets
/// `Error::TimedOut`; with `on_crash = fail` the operation counts as interrupted. A body that hangs holds its key no
/// longer than this, although its lease is renewed: `timeout = "10m"`, longer than the body ever needs. A body that
/// blocks its thread can't be cancelled; its lease is no longer renewed, and lapses.
///
/// ## `in_progress`
///
/// What a duplicate gets while another attempt runs: `Error::InProgress` at once (`reject`), or the result of that attempt
/// (`wait("10s")`), and `Error::InProgress` if it takes longer.
///
/// ## `on_error`
///
/// `release` frees the key, and the next delivery runs the body again. `record` stores the error as a result and replays it;
/// it needs `E: Serialize + DeserializeOwned`. An error is never recorded if the library has refused a call of the same body for
/// the moment (`InProgress`, `Store`, `confirm_lease`, …): the body may have failed for that alone. A function decides for each
/// other error:
///
/// ```
/// use idem_runtime::{Error, MemoryStore, OnError, idempotent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize)]
/// enum ChargeError {
///     Declined,
///     Unavailable,
///     Idempotency(String),
/// }
///
/// impl From<Error> for ChargeError {
///     fn from(error: Error) -> Self {
///         Self::Idempotency(error.to_string())
///     }
/// }
///
/// // A card that was declined is not charged again; a bank that was away is asked again.
/// fn is_final(error: &ChargeError) -> OnError {
///     match error {
///         ChargeError::Declined => OnError::Record,
///         _ => OnError::Release,
///     }
/// }
///
/// #[idempotent(key = "{order}", ttl = "1d", store = store, on_error = is_final)]
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
/// ## `on_crash`
///
/// `retry`: when a lease has lapsed, the next delivery takes over and runs the body again (at least once). `fail`: a
/// body that started and did not return is not started again; callers get `Error::Interrupted` until an operator
/// decides (at most once).
///
/// ## `max_attempts`
///
/// Beyond so many attempts callers get `Error::AttemptsExhausted` without a run of the body. An integer or a constant.
///
/// ## `fingerprint`
///
/// An expression that is hashed into the record: `fingerprint = event`, or `fingerprint = (event.amount,
/// event.currency)`. The same key with another fingerprint is a misuse: `Error::FingerprintMismatch`. Needs
/// `Serialize`. The order of an array counts; the order of a `HashMap` or a `HashSet` does not.
///
/// If a digest of a large payload is there already, it stands for the payload, alone or as a part: `fingerprint =
/// (upload.name, PayloadDigest::new(&upload.sha256))`, with `idem_runtime::key::PayloadDigest`.
///
/// ## `missing_key`
///
/// `reject`: `Error::MissingKey`. `run`: the body runs without protection, and the store is not asked.
///
/// ## `on_store_error`
///
/// `fail`: `Error::Store` when the key can't be reserved. `run`: the body runs without protection; the outcome says so.
///
/// ## `codec`
///
/// A type that implements `Codec`, which turns results into bytes and back: `Json`, `MessagePack` and `Postcard` (each
/// with a feature of its own), or yours. A record carries the name of its codec. A handler with one of the library's
/// codecs also reads results of the others, so the codec can be changed while there are records.
///
/// A result that is bytes and nothing else, a `Vec<u8>` or a `Bytes`, is recorded as it is, not as JSON.
///
/// ## `on_undecodable`
///
/// What a duplicate gets if the recorded result doesn't decode as the function's return type, or was written by a codec
/// that is not available. The body never runs again. `error`: `Error::ResultUnavailable`. A function
/// `fn(Undecodable<'_>) -> Result<Vec<u8>, CodecError>` makes new bytes from the recorded ones, for the codec that the
/// handler has now, and they are replayed. The record itself stays as it is.
///
/// ```
/// use idem_runtime::{Codec, CodecError, Error, Json, MemoryStore, Undecodable, idempotent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Receipt {
///     // It was a field `amount` in euros before.
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
/// With `on_error = record` the function is asked about recorded errors as well; `Undecodable::is_error` tells them apart.
///
/// ## `max_result_bytes`
///
/// The largest encoded result that is recorded, in bytes: `max_result_bytes = 64 * 1024`. A larger one is still
/// returned to its caller, and the operation is completed without it: duplicates get `Error::ResultUnavailable`, never
/// another run.
///
/// ## `mode`
///
/// `enforce`: duplicates are suppressed. `shadow`: everything is recorded and compared, and the outcome says what would
/// have been suppressed, but the body always runs: to try the library on live traffic. `off`: the body runs, and the
/// store is not asked. To change the mode while the process runs, give a [`policy`](#policy) with a `ModeSwitch`.
///
/// ## `policy`
///
/// An expression that is or derefs to a `Policy`; options beside it override it. A policy also holds settings that have
/// no option of their own, such as a mode that is switched at run time.
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
/// Where `idem_runtime` is, if it is renamed or re-exported: `crate = my_company::idempotency`.
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
/// # What it expands to
///
/// One call of `idem_runtime::run`, which anybody can write by hand: the store, the key, a `const` policy and the body as
/// an `async` block.
#[proc_macro_attribute]
pub fn idempotent(args: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    attribute(args.into(), &item.into()).into()
}

/// Names the annotated function without a path. In an `impl` or a `trait` there is no such name, and the compiler's
/// message then shows the name of this macro, which says what is missing.
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
    fn odd_input_is_answered() {
        // Each token left out, doubled, or the last one.
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
    fn odd_items_are_kept() {
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
    fn a_boxed_future_keeps_its_frame() {
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
