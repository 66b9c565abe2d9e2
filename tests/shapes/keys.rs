//! Parts of a key, and its stored form.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;

use idem_runtime::key::KeyBuilder;
use idem_runtime::{Error, KeyPart, current, idempotent};

use crate::{App, spawned};

/// Example of a user's type that has only a `Display`.
struct OrderId(u32);

impl fmt::Display for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o-{}", self.0)
    }
}

/// Example of a user's type that defines its own key part; its `Display` is for people.
struct Tenant(&'static str);

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tenant {}", self.0)
    }
}

impl KeyPart for Tenant {
    fn append(&self, builder: &mut KeyBuilder, next: Option<char>) {
        builder.part(self.0, next);
    }
}

struct Order {
    id: OrderId,
    parent: Option<OrderId>,
    tenant: Tenant,
    note: Option<String>,
    lines: Vec<&'static str>,
}

fn order() -> Order {
    Order {
        id: OrderId(7),
        parent: Some(OrderId(6)),
        tenant: Tenant("a:b"),
        note: Some("n".to_owned()),
        lines: vec!["l"],
    }
}

impl Order {
    fn parent(&self) -> Option<&OrderId> {
        self.parent.as_ref()
    }
}

/// Defines functions that return the text of their key.
macro_rules! keys {
    ($($name:ident($($arg:ident: $ty:ty),*): $key:expr;)*) => {$(
        #[idempotent(key = $key, ttl = "1h", store = app.store, scope = shared("keys"))]
        async fn $name(app: &App, $($arg: $ty),*) -> Result<String, Error> {
            let _ = app;
            $(let _ = $arg;)*
            Ok(current().expect("inside of a handler").key().text().to_owned())
        }
    )*};
}

keys! {
    text(a: &str, b: String): "x{a}:{b}y";
    numbers(a: u8, b: i128, c: NonZeroU64, yes: bool, colon: char): "{a}:{b}:{c}:{yes}:{colon}";
    pointers(a: Box<u8>, b: Arc<str>, c: Rc<String>, cow: Cow<'_, str>, refs: &&u8): "{a}:{b}:{c}:{cow}:{refs}";
    bytes(a: &[u8], b: Vec<u8>): "{a}:{b}";
    fields(order: &Order): "{order.id}:{order.parent}:{order.tenant}:{order.note}:{order.lines[0]}";
    methods(order: Order): "{order.parent()}|{order.lines.len()}|{order.note.as_deref().unwrap_or(\"-\")}|{&order.parent}";
    expressions(n: u32): "{if n > 1 { \"many\" } else { \"one\" }}/{n * 2}/{[n; 2][0]}/{crate::shapes::keys::double(n)}/{u32::MAX}";
    braces(n: u32): "{{{n}}}";
    tuple(order: &Order, n: u32): (order.tenant, order.id, n, "c:d");
    lone(order: &Order): order.id;
    call(n: u32): double(n);
    maybe(note: Option<&str>): note;
    formatted(n: u32): format!("{n}:{n}");
    block(n: u32): { let mut m = n; m += 1; m };
    float(n: f64): "{n}";
    awaited(n: u32): "{load(n).await?}";
}

async fn load(n: u32) -> Result<u32, Error> {
    tokio::task::yield_now().await;
    Ok(n + 1)
}

fn double(n: u32) -> u32 {
    2 * n
}

// Runs on the current thread, because some of the arguments are not `Send`.
#[tokio::test]
async fn the_text_of_a_stored_key_shows_the_parts_of_the_key() {
    let app = &App::default();
    let order = order();
    let cases = [
        (text(app, "a:b", "c".into()).await, "xa%3Ab:cy"),
        (text(app, "a", "b:y%".into()).await, "xa:b:%79%25y"),
        (numbers(app, 1, -2, NonZeroU64::MAX, true, ':').await, "1:-2:18446744073709551615:true::"),
        (pointers(app, 1.into(), "b".into(), Rc::default(), "d".into(), &&5).await, ""),
        (pointers(app, 1.into(), "b".into(), Rc::new("c".into()), "d".into(), &&5).await, "1:b:c:d:5"),
        (bytes(app, b"a", b"b".to_vec()).await, "a:b"),
        (fields(app, &order).await, "o-7:o-6:a%3Ab:n:l"),
        (expressions(app, 2).await, "many/4/2/4/4294967295"),
        (braces(app, 2).await, "{2}"),
        (tuple(app, &order, 3).await, "a%3Ab:o-7:3:c:d"),
        (lone(app, &order).await, "o-7"),
        (call(app, 2).await, "4"),
        (maybe(app, Some("note")).await, "note"),
        (formatted(app, 1).await, "1:1"),
        (block(app, 1).await, "2"),
        (float(app, 1.5).await, "1.5"),
        (awaited(app, 1).await, "2"),
        (methods(app, order).await, "o-6|1|n|o-6"),
    ];
    for (key, expected) in cases {
        match key {
            Ok(key) => assert_eq!(key, expected),
            Err(Error::MissingKey { .. }) => assert_eq!(expected, "", "the key is missing"),
            Err(error) => panic!("{expected}: {error}"),
        }
    }
}

#[test]
fn a_key_with_a_missing_part_is_rejected_as_missing() {
    spawned(async {
        let app = &App::default();
        let missing = |result: Result<String, Error>| matches!(result, Err(Error::MissingKey { .. }));
        assert!(missing(maybe(app, None).await));
        assert!(missing(maybe(app, Some("")).await));
        assert!(missing(text(app, "a", String::new()).await));
        assert!(missing(fields(app, &Order { parent: None, ..order() }).await));
        assert!(missing(fields(app, &Order { note: None, ..order() }).await));
        assert!(missing(methods(app, Order { parent: None, ..order() }).await));
        assert!(matches!(bytes(app, b"\xff", vec![1]).await, Err(Error::InvalidKey { .. })));
    });
}
