//! Handlers with every form of body: `?`, an early `return`, recursion, items of their own, raw names, panics and
//! macros.

use std::io;
use std::num::ParseIntError;

use idem_runtime::{Error, current, idempotent};
use serde::{Deserialize, Serialize};

use crate::{App, spawned, twice};

#[derive(Debug, PartialEq)]
enum Failure {
    Parse(ParseIntError),
    Idempotency,
}

impl From<ParseIntError> for Failure {
    fn from(error: ParseIntError) -> Self {
        Self::Parse(error)
    }
}

impl From<Error> for Failure {
    fn from(_: Error) -> Self {
        Self::Idempotency
    }
}

#[idempotent(key = "{text}", ttl = "1h", store = app.store)]
async fn question_mark(app: &App, text: &str) -> Result<u32, Failure> {
    let run = app.run();
    let number: u32 = text.parse()?;
    Ok(run + number)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn early_return(app: &App, id: u32) -> Result<Option<u32>, Failure> {
    if id == 0 {
        return Ok(None);
    }
    let run = app.run();
    for n in 0.. {
        if n == id {
            return Ok(Some(run + n));
        }
    }
    unreachable!()
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn closures_and_blocks(app: &App, id: u32) -> Result<u32, Failure> {
    let add = |n: u32| -> Result<u32, Failure> { Ok(n + "1".parse::<u32>()?) };
    let run = async { add(app.run()) }.await?;
    let both = async move {
        if id == 7 {
            return Ok(run);
        }
        Err(Failure::Idempotency)
    };
    let run = both.await?;
    let value = 'found: {
        if run > 0 {
            break 'found run + id;
        }
        0
    };
    Ok(value)
}

#[idempotent(key = "{n}", ttl = "1h", store = app.store)]
async fn recursive(app: &App, n: u32) -> Result<u32, Error> {
    if n == 0 {
        return Ok(app.run());
    }
    Ok(Box::pin(recursive(app, n - 1)).await? + 1)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn items(app: &App, id: u32) -> Result<u32, Error> {
    #![allow(clippy::items_after_statements)]
    use std::ops::Add as _;
    const SCOPE: u32 = 100;
    struct Local(u32);
    let local = Local(app.run());
    fn double(n: u32) -> u32 {
        2 * n
    }
    Ok(double(local.0).add(SCOPE + id))
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Kind {
    Shipment(u32),
    Result,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Shipment(Kind);

// The body declares items with the names of the types in the signature.
#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn names_of_variants(app: &App, id: u32) -> Result<Shipment, Failure> {
    #[allow(clippy::enum_glob_use)]
    use Kind::*;
    let run = app.run();
    let kind = if id == 0 { Result } else { Shipment(run + id) };
    Ok(self::Shipment(kind))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn items_of_its_own(app: &App, id: u32) -> Result<Shipment, Failure> {
    struct Shipment;
    #[derive(Debug)]
    struct Failure;
    #[allow(dead_code)]
    type Result = u32;
    let run = app.run();
    let local = |id: u32| if id == 0 { Err(Failure) } else { Ok(Shipment) };
    local(id).map(|Shipment| self::Shipment(Kind::Shipment(run + id))).map_err(|Failure| self::Failure::Idempotency)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn unit(app: &App, id: u32) -> Result<(), Error> {
    app.run();
    Ok(())
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn r#match(app: &App, r#type: u32, id: u32) -> Result<(u32, String), Error> {
    let key = current().expect("inside of a handler").key().to_string();
    Ok((app.run() + r#type, key))
}

#[idempotent(key = "{r#type}", ttl = "1h", store = app.store)]
async fn raw_argument(app: &App, r#type: u32) -> Result<u32, Error> {
    Ok(app.run() + r#type)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn never_returns_a_value(app: &App, id: u32) -> io::Result<u32> {
    app.run();
    Err(io::Error::other(id.to_string()))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn panics(app: &App, id: u32) -> Result<u32, Error> {
    app.run();
    panic!("{id}")
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn macro_body(app: &App, id: u32) -> Result<u32, Error> {
    tokio::join!(async { Ok(app.run()) }).0
}

fn outer(app: &App) -> impl Future<Output = Result<u32, Error>> {
    #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
    async fn inner(app: &App, id: u32) -> Result<u32, Error> {
        Ok(app.run() + id)
    }
    inner(app, 7)
}

#[test]
fn handlers_with_every_form_of_body_run() {
    spawned(async {
        let app = App::default();
        assert_eq!(twice(question_mark(&app, "7"), question_mark(&app, "7")).await, 8);
        let failed = question_mark(&app, "x").await.unwrap_err();
        assert_eq!(question_mark(&app, "x").await, Err(failed));
        assert_eq!(twice(early_return(&app, 0), early_return(&app, 0)).await, None);
        assert_eq!(twice(early_return(&app, 3), early_return(&app, 3)).await, Some(7));
        assert_eq!(twice(closures_and_blocks(&app, 7), closures_and_blocks(&app, 7)).await, 13);
        assert_eq!(twice(recursive(&app, 3), recursive(&app, 3)).await, 9);
        assert_eq!(app.runs(), 6);
        assert_eq!(twice(items(&app, 1), items(&app, 1)).await, 115);
        twice(unit(&app, 1), unit(&app, 1)).await;
        let (run, key) = twice(r#match(&app, 1, 2), r#match(&app, 1, 2)).await;
        assert_eq!((run, key.as_str()), (10, "shapes::shapes::bodies::match/2"));
        assert_eq!(twice(raw_argument(&app, 1), raw_argument(&app, 1)).await, 11);
        assert_eq!(never_returns_a_value(&app, 1).await.unwrap_err().to_string(), "1");
        assert_eq!(twice(macro_body(&app, 1), macro_body(&app, 1)).await, 12);
        assert_eq!(twice(outer(&app), outer(&app)).await, 20);
        let call = || names_of_variants(&app, 1);
        assert_eq!(twice(call(), call()).await, Shipment(Kind::Shipment(15)));
        let call = || names_of_variants(&app, 0);
        assert_eq!(twice(call(), call()).await, Shipment(Kind::Result));
        let call = || items_of_its_own(&app, 1);
        assert_eq!(twice(call(), call()).await, Shipment(Kind::Shipment(17)));
    });
}

#[test]
fn a_panic_of_the_body_reaches_the_caller() {
    spawned(async {
        let app = std::sync::Arc::new(App::default());
        for runs in 1..=2 {
            let task = tokio::spawn({
                let app = app.clone();
                async move { panics(&app, 7).await }
            });
            let panic = task.await.unwrap_err().into_panic();
            assert_eq!(panic.downcast_ref::<String>().unwrap(), "7");
            assert_eq!(app.runs(), runs);
        }
    });
}
