//! Type, const and lifetime parameters, where clauses and `impl Trait`.

use std::borrow::Cow;
use std::fmt::{self, Display};

use idem_runtime::key::KeyProblem;
use idem_runtime::{Error, KeyPart, Store, idempotent};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{App, spawned, twice};

#[idempotent(key = "{id}", ttl = "1h", store = app.store, fingerprint = value, scope = shared("generics::parameters"))]
async fn parameters<K, T>(app: &App, id: K, value: T) -> Result<(u32, T), Error>
where
    K: Display,
    T: Serialize + DeserializeOwned,
{
    Ok((app.run(), value))
}

#[idempotent(key = "{id}", ttl = "1h", store = store, scope = "generics::store_parameter")]
async fn store_parameter<S: Store, K: KeyPart>(app: &App, store: &S, id: K) -> Result<u32, Error> {
    drop(id);
    Ok(app.run())
}

#[idempotent(key = "{N}:{id}", ttl = "1h", store = app.store, max_attempts = N, scope = "generics::constant")]
async fn constant<const N: u32>(app: &App, id: [u8; 2]) -> Result<u32, Error> {
    Ok(app.run() + N + u32::from(id[0]))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn lifetimes<'a, 'b: 'a>(app: &'a App, id: &'b str) -> Result<Cow<'a, str>, Error> {
    app.run();
    let longer: &'a str = id;
    Ok(Cow::Borrowed(longer))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = "generics::impl_arguments")]
async fn impl_arguments(app: &App, id: impl Display, done: impl AsyncFnOnce(u32) -> u32) -> Result<u32, Error> {
    Ok(done(app.run()).await)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn impl_output(app: &App, id: u32) -> Result<impl Serialize + DeserializeOwned + PartialEq + fmt::Debug, Error> {
    Ok(vec![app.run(), id])
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn dynamic(app: &App, id: &(dyn Display + Sync), store: &dyn Store) -> Result<u32, Error> {
    let _ = store;
    Ok(app.run())
}

struct Queue<'a, T> {
    app: &'a App,
    name: T,
}

trait Handle {
    type Value;
    type Error;

    async fn handle(&self, id: Self::Value) -> Result<Self::Value, Self::Error>;
}

impl<T> Handle for Queue<'_, T>
where
    T: Serialize + DeserializeOwned + Display,
{
    type Value = u32;
    type Error = Error;

    #[idempotent(key = "{self.name}:{id}", ttl = "1h", store = self.app.store, fingerprint = self.name, scope = "generics::handle")]
    async fn handle(&self, id: Self::Value) -> Result<Self::Value, Self::Error> {
        Ok(self.app.run() + id)
    }
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = "generics::one_result")]
async fn one_result<T: Serialize + DeserializeOwned, E: From<Error>>(app: &App, id: u32, value: T) -> Result<T, E> {
    let _ = id;
    app.run();
    Ok(value)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, on_error = record, scope = "generics::one_error")]
async fn one_error<E>(app: &App, id: u32) -> Result<u32, E>
where
    E: From<Error> + Serialize + DeserializeOwned,
{
    Ok(app.run() + id)
}

#[derive(Debug, Serialize, serde::Deserialize)]
struct Failure<const N: usize>(String);

impl<const N: usize> From<Error> for Failure<N> {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

impl<T> Queue<'_, T>
where
    T: Serialize + DeserializeOwned + Clone,
{
    #[idempotent(key = "{id}", ttl = "1h", store = self.app.store, scope = "generics::last")]
    async fn last(&self, id: u32) -> Result<T, Error> {
        let _ = id;
        self.app.run();
        Ok(self.name.clone())
    }
}

#[test]
fn a_generic_function_has_one_result_type_unless_its_scope_is_shared() {
    spawned(async {
        let app = &App::default();
        let call = |value: &str| one_result::<_, Error>(app, 7, value.to_owned());
        assert_eq!(twice(call("a"), call("b")).await, "a");
        // The calls with a `String` and with a `u32` have the same key, `7`.
        let refused = one_result::<_, Error>(app, 7, 7_u32).await.unwrap_err();
        assert!(refused.is_misconfigured(), "no message is to blame: {refused}");
        let Error::InvalidKey { problem: KeyProblem::SharedByResults { other, this, .. }, .. } = &refused else {
            panic!("{refused:?}")
        };
        assert_eq!((*other, *this), (std::any::type_name::<String>(), "u32"));
        // `one_result` does not record errors, so another error type is accepted.
        assert_eq!(one_result::<_, Failure<1>>(app, 7, String::new()).await.unwrap(), "a");
        assert_eq!(app.runs(), 1);

        // `one_error` records errors, so another error type is refused.
        assert_eq!(twice(one_error::<Failure<1>>(app, 7), one_error::<Failure<1>>(app, 7)).await, 9);
        let refused = one_error::<Failure<2>>(app, 7).await.unwrap_err();
        assert!(refused.0.contains("under the same scope"), "{refused:?}");

        // The attribute of a method can't see the type parameters of its `impl` block.
        let (text, number) = (Queue { app, name: "q".to_owned() }, Queue { app, name: 7 });
        assert_eq!(twice(text.last(7), text.last(7)).await, "q");
        assert!(matches!(number.last(7).await, Err(Error::InvalidKey { .. })));
        assert_eq!(app.runs(), 3);
    });
}

#[test]
fn results_of_associated_types_are_replayed() {
    spawned(async {
        let app = &App::default();
        let queue = Queue { app, name: "q".to_owned() };
        assert_eq!(twice(queue.handle(7), queue.handle(7)).await, 8);
        // A method has one scope, whatever the type parameters of its `impl` block are.
        let queue = Queue { app, name: 'r' };
        assert_eq!(twice(queue.handle(7), queue.handle(7)).await, 9);
    });
}

#[test]
fn every_kind_of_generic_parameter_is_accepted() {
    spawned(async {
        let app = App::default();
        assert_eq!(twice(parameters(&app, 'k', true), parameters(&app, 'k', true)).await, (1, true));
        assert_eq!(twice(parameters(&app, "s", 7), parameters(&app, "s", 7)).await, (2, 7));
        let call = || store_parameter(&app, &app.store, Some("id"));
        assert_eq!(twice(call(), call()).await, 3);
        assert_eq!(twice(constant::<5>(&app, *b"\0a"), constant::<5>(&app, *b"\0a")).await, 9);
        assert_eq!(twice(lifetimes(&app, "id"), lifetimes(&app, "id")).await, "id");
        let call = |by| impl_arguments(&app, 1, async move |run| run + by);
        assert_eq!(twice(call(10), call(20)).await, 16);
        twice(impl_output(&app, 1), impl_output(&app, 1)).await;
        let call = || dynamic(&app, &1.5, &app.store);
        assert_eq!(twice(call(), call()).await, 8);
    });
}
