//! Type, const and lifetime parameters, where clauses and `impl Trait`.

use std::borrow::Cow;
use std::fmt::{self, Display};

use idem_runtime::{Error, KeyPart, Store, idempotent};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{App, twice};

#[idempotent(key = "{id}", ttl = "1h", store = app.store, fingerprint = value)]
async fn parameters<K, T>(app: &App, id: K, value: T) -> Result<(u32, T), Error>
where
    K: Display,
    T: Serialize + DeserializeOwned,
{
    Ok((app.run(), value))
}

#[idempotent(key = "{id}", ttl = "1h", store = store)]
async fn store_parameter<S: Store, K: KeyPart>(app: &App, store: &S, id: K) -> Result<u32, Error> {
    drop(id);
    Ok(app.run())
}

#[idempotent(key = "{N}:{id}", ttl = "1h", store = app.store, max_attempts = N)]
async fn constant<const N: u32>(app: &App, id: [u8; 2]) -> Result<u32, Error> {
    Ok(app.run() + N + u32::from(id[0]))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn lifetimes<'a, 'b: 'a>(app: &'a App, id: &'b str) -> Result<Cow<'a, str>, Error> {
    app.run();
    let longer: &'a str = id;
    Ok(Cow::Borrowed(longer))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn impl_arguments(app: &App, id: impl Display, done: impl AsyncFnOnce(u32) -> u32) -> Result<u32, Error> {
    Ok(done(app.run()).await)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn impl_output(app: &App, id: u32) -> Result<impl Serialize + DeserializeOwned + PartialEq + fmt::Debug, Error> {
    Ok(vec![app.run(), id])
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn dynamic(app: &App, id: &dyn Display, store: &dyn Store) -> Result<u32, Error> {
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

    #[idempotent(key = "{self.name}:{id}", ttl = "1h", store = self.app.store, fingerprint = self.name)]
    async fn handle(&self, id: Self::Value) -> Result<Self::Value, Self::Error> {
        Ok(self.app.run() + id)
    }
}

#[tokio::test]
async fn associated_types() {
    let app = &App::default();
    let queue = Queue { app, name: "q".to_owned() };
    assert_eq!(twice(queue.handle(7), queue.handle(7)).await, 8);
    // One function, one scope, whatever its parameters.
    let queue = Queue { app, name: 'r' };
    assert_eq!(twice(queue.handle(7), queue.handle(7)).await, 9);
}

#[tokio::test]
async fn every_parameter() {
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
}
