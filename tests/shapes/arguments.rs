//! Handlers whose arguments are patterns, are unused, or are moved.

use std::rc::Rc;
use std::sync::Arc;

use futures::FutureExt as _;
use idem_runtime::{Error, Key, MemoryStore, Store as _, idempotent};

use crate::{App, spawned, twice, twice_here};

#[derive(Clone)]
struct Event {
    id: u32,
    lines: Vec<String>,
}

#[derive(Clone, Copy)]
struct Pair(u32, u32);

fn event() -> Event {
    Event { id: 42, lines: vec!["a".to_owned()] }
}

#[idempotent(key = "{a}:{b}:{id}:{first}", ttl = "1h", store = app.store)]
async fn patterns(
    app: &App,
    Pair(a, b): Pair,
    Event { id, ref lines }: Event,
    [first, ..]: [u8; 3],
    _: &str,
) -> Result<(u32, usize), Error> {
    Ok((app.run() + a + b + id + u32::from(first), lines.len()))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn mutable(app: &App, mut id: u32, mut lines: Vec<u32>) -> Result<u32, Error> {
    id += 1;
    lines.push(id);
    Ok(app.run() + lines.iter().sum::<u32>())
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn unused(app: &App, id: u32, _unused: String) -> Result<u32, Error> {
    Ok(app.run())
}

// The body consumes the arguments from which the key, the fingerprint and the store were borrowed.
#[idempotent(key = "{event.id}:{event.lines[0]}", ttl = "1h", store = app.store, fingerprint = (event.id, event.lines))]
async fn moved(app: Arc<App>, event: Event) -> Result<(u32, Vec<String>), Error> {
    let Event { lines, .. } = event;
    let run = app.run();
    drop(app);
    Ok((run, lines))
}

#[idempotent(key = (tenant, event.id, event.lines[0]), ttl = "1h", store = store)]
async fn moved_store(store: MemoryStore, tenant: String, event: Event) -> Result<String, Error> {
    drop(store);
    drop(event);
    Ok(tenant)
}

// Neither the key nor the store is held across an await, so they needn't be `Send`.
#[idempotent(key = "{Rc::new(id)}:{std::cell::RefCell::new(id).borrow()}", ttl = "1h", store = *Rc::new(&app.store))]
async fn not_send_while_evaluated(app: &App, id: u32) -> Result<u32, Error> {
    tokio::task::yield_now().await;
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn not_send(app: &App, id: Rc<str>) -> Result<String, Error> {
    let id = Rc::clone(&id);
    tokio::task::yield_now().await;
    Ok(format!("{id} {}", app.run()))
}

/// Argument whose drop notes whether the key is still held at that moment.
struct Guard<'a> {
    key: &'a str,
    held: &'a std::sync::Mutex<Vec<bool>>,
    app: &'a App,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let key = Key::new("shapes::arguments::guards", self.key).expect("a valid key");
        let found = self.app.store.inspect(&key).now_or_never().expect("memory answers immediately");
        // If the key has no record, the call has not reserved it yet, and the guard notes the key as held.
        let held = found.expect("an answer").is_none_or(|found| found.record.is_pending());
        self.held.lock().unwrap().push(held);
    }
}

impl<'a> Guard<'a> {
    fn many<const N: usize>(key: &'a str, held: &'a std::sync::Mutex<Vec<bool>>, app: &'a App) -> [Self; N] {
        [(); N].map(|()| Self { key, held, app })
    }
}

struct Two<'a>(Guard<'a>, Guard<'a>);

#[idempotent(key = "{first.key}", ttl = "1h", store = first.app.store, scope = shared("shapes::arguments::guards"))]
async fn guards(
    first: Guard<'_>,
    _second: Guard<'_>,
    _: Guard<'_>,
    (_fourth, _): (Guard<'_>, Guard<'_>),
    Two(sixth, _seventh): Two<'_>,
    [_eighth, ..]: [Guard<'_>; 1],
) -> Result<u32, Error> {
    drop(sixth);
    tokio::task::yield_now().await;
    Ok(1)
}

struct Shop;

#[async_trait::async_trait]
trait Guards {
    async fn guards(&self, first: Guard<'_>, second: Guard<'_>, pair: (Guard<'_>, Guard<'_>)) -> Result<u32, Error>;
}

#[async_trait::async_trait]
impl Guards for Shop {
    #[idempotent(key = "{first.key}", ttl = "1h", store = first.app.store, scope = shared("shapes::arguments::guards"))]
    async fn guards(
        &self,
        first: Guard<'_>,
        _second: Guard<'_>,
        (_third, _): (Guard<'_>, Guard<'_>),
    ) -> Result<u32, Error> {
        Ok(1)
    }
}

/// The body owns all of its arguments, also unused ones, and drops them before the key is freed.
#[tokio::test]
#[expect(clippy::many_single_char_names, reason = "one for each form of an argument")]
async fn arguments_are_dropped_before_the_key_is_freed() {
    let (app, held) = (App::default(), std::sync::Mutex::default());
    let [a, b, c, d, e, f, g, h] = Guard::many("returned", &held, &app);
    assert_eq!(guards(a, b, c, (d, e), Two(f, g), [h]).await.unwrap(), 1);
    assert_eq!(std::mem::take(&mut *held.lock().unwrap()), [true; 8]);

    let [a, b, c, d, e, f, g, h] = Guard::many("dropped", &held, &app);
    let mut call = Box::pin(guards(a, b, c, (d, e), Two(f, g), [h]));
    assert!((&mut call).now_or_never().is_none());
    drop(call);
    assert_eq!(std::mem::take(&mut *held.lock().unwrap()), [true; 8]);

    let [a, b, c, d] = Guard::many("boxed", &held, &app);
    assert_eq!(Shop.guards(a, b, (c, d)).await.unwrap(), 1);
    // `#[async_trait]` drops unnamed arguments before the call begins, so the test expects no fixed number of drops.
    let held = std::mem::take(&mut *held.lock().unwrap());
    assert!(held.iter().all(|held| *held), "{held:?}");
}

#[test]
fn every_pattern_of_a_handler_argument_is_accepted() {
    spawned(async {
        let app = App::default();
        let call = || patterns(&app, Pair(1, 2), event(), [3, 4, 5], "");
        assert_eq!(twice(call(), call()).await, (49, 1));
        assert_eq!(twice(mutable(&app, 1, vec![5]), mutable(&app, 1, vec![])).await, 9);
        let call = || unused(&app, 1, String::new());
        assert_eq!(twice(call(), call()).await, 3);
        let app = Arc::new(app);
        let call = || moved(app.clone(), event());
        assert_eq!(twice(call(), call()).await, (4, vec!["a".to_owned()]));
        let store = MemoryStore::new();
        // The clone is a handle of the same store.
        let call = || moved_store(store.clone(), "acme".to_owned(), event());
        assert_eq!(twice(call(), call()).await, "acme");
    });
}

#[test]
fn a_call_is_send_if_the_body_of_its_handler_is_send() {
    spawned(async {
        let app = App::default();
        assert_eq!(twice(not_send_while_evaluated(&app, 7), not_send_while_evaluated(&app, 7)).await, 8);
    });
}

#[tokio::test]
async fn a_call_is_not_send_if_its_body_is_not() {
    let app = App::default();
    assert_eq!(twice_here(not_send(&app, Rc::from("rc")), not_send(&app, Rc::from("rc"))).await, "rc 1");
}
