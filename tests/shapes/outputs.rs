//! Output types that a handler may have.

use std::error::Error as StdError;
use std::io;

use idem_runtime::{Error, idempotent};
use serde::{Deserialize, Serialize};

use crate::{App, spawned, twice};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Shipment {
    run: u32,
}

type Shipped = Result<Shipment, Error>;
type Fallible<T, E = Error> = Result<T, E>;

trait HasOutput {
    type Output;
}

impl HasOutput for App {
    type Output = Result<u32, Error>;
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn alias(app: &App, id: u32) -> Shipped {
    let _ = id;
    Ok(Shipment { run: app.run() })
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn alias_with_default(app: &App, id: u32) -> Fallible<u32> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn io_result(app: &App, id: u32) -> io::Result<u32> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn anyhow_result(app: &App, id: u32) -> anyhow::Result<u32> {
    let rest: u32 = "0".parse()?;
    Ok(app.run() + id + rest)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn boxed_error(app: &App, id: u32) -> Result<u32, Box<dyn StdError + Send + Sync>> {
    if id == 0 {
        Err("zero")?;
    }
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn projected(app: &App, id: u32) -> <App as HasOutput>::Output {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn collected(app: &App, id: u32) -> Result<Vec<u32>, Error> {
    // The compiler can infer the type of `run` only from the output type of the handler.
    let run = [Ok(app.run()), Ok(id)].into_iter().collect::<Result<_, Error>>()?;
    Ok(run)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn inferred(app: &App, id: u32) -> Result<u64, Error> {
    app.run();
    Ok(id.into())
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn falsy(app: &App, id: u32) -> Result<Option<()>, Error> {
    let _ = (app.run(), id);
    Ok(None)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn static_error(app: &App, id: u32) -> Result<u32, Failure<&'static str>> {
    Ok(app.run() + id)
}

#[derive(Debug)]
#[expect(dead_code)]
enum Failure<T> {
    Own(T),
    Idempotency(Error),
}

impl<T> From<Error> for Failure<T> {
    fn from(error: Error) -> Self {
        Self::Idempotency(error)
    }
}

#[test]
fn every_output_type_is_replayed() {
    spawned(async {
        let app = &App::default();
        assert_eq!(twice(alias(app, 7), alias(app, 7)).await, Shipment { run: 1 });
        assert_eq!(twice(alias_with_default(app, 7), alias_with_default(app, 7)).await, 9);
        assert_eq!(twice(io_result(app, 7), io_result(app, 7)).await, 10);
        assert_eq!(twice(anyhow_result(app, 7), anyhow_result(app, 7)).await, 11);
        assert_eq!(twice(boxed_error(app, 7), boxed_error(app, 7)).await, 12);
        assert_eq!(twice(projected(app, 7), projected(app, 7)).await, 13);
        assert_eq!(twice(collected(app, 7), collected(app, 7)).await, [7, 7]);
        assert_eq!(twice(inferred(app, 7), inferred(app, 7)).await, 7);
        assert_eq!(twice(falsy(app, 7), falsy(app, 7)).await, None);
        assert_eq!(twice(static_error(app, 7), static_error(app, 7)).await, 17);
    });
}
