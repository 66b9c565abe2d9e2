//! Handlers with a reconciler. The reconciler's future borrows the arguments that the body takes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use idem_runtime::policy::RecoveryPolicy;
use idem_runtime::{Disposition, Error, MemoryStore, Outcome, Policy, Reconciliation, current, idempotent, observe};
use tokio::task::yield_now;

use crate::{App, spawned};

const RECOVERED: RecoveryPolicy = Policy::new(Duration::from_secs(3600)).require_recovery();

/// Error of a call whose effect may have happened.
fn lost<T>() -> Result<T, Error> {
    Err(Error::NoAttempt)
}

/// Reconciler that borrows its arguments and finds the value `found`.
async fn found(app: &App, name: &str, found: u32) -> Result<Reconciliation<u32>, Error> {
    yield_now().await;
    assert_eq!((current()?.number(), name, app.runs()), (2, "order", 1));
    Ok(Reconciliation::Done(found))
}

#[idempotent(
    key = "{name}:{id}", ttl = "1h", store = app.store, on_error = uncertain, on_crash = reconcile(found(app, name, id))
)]
async fn borrows(app: &App, name: &str, id: u32) -> Result<u32, Error> {
    app.run();
    yield_now().await;
    lost()
}

#[idempotent(
    key = "{name}:{id}", store = app.store, policy = RECOVERED, on_error = |_| idem_runtime::OnError::Uncertain,
    on_crash = reconcile(async { Ok(found(&app, &name, id).await?) })
)]
async fn owns(app: Arc<App>, name: String, id: u32) -> Result<u32, Text> {
    app.run();
    drop((app, name));
    lost()?
}

/// Error that is recorded, as the rule for errors demands.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Text(String);

impl From<Error> for Text {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

struct Shop(Arc<App>);

#[async_trait]
trait Ships {
    async fn ship(&self, id: u32) -> Result<u32, Error>;
}

impl Shop {
    async fn find(&self, id: u32) -> Result<Reconciliation<u32>, Error> {
        found(&self.0, "order", id).await
    }

    #[idempotent(
        key = "{id}", ttl = "1h", store = self.0.store, scope = "shop", on_error = uncertain,
        on_crash = reconcile(self.find(id))
    )]
    async fn method(&self, id: u32) -> Result<u32, Error> {
        self.0.run();
        lost()
    }
}

#[async_trait]
impl Ships for Shop {
    #[idempotent(
        key = "{id}", ttl = "1h", store = self.0.store, scope = "ships", on_error = uncertain,
        on_crash = reconcile(self.find(id))
    )]
    async fn ship(&self, id: u32) -> Result<u32, Error> {
        self.0.run();
        lost()
    }
}

#[idempotent(
    key = "{id}", ttl = "1h", store = app.store, scope = "generic", on_error = uncertain,
    on_crash = reconcile(async move { Ok(Reconciliation::Done(u32::try_from(values.len()).expect("few values"))) })
)]
async fn generic<T: Clone + Send + Sync>(app: &App, id: u32, values: &[T]) -> Result<u32, Error> {
    let _ = values;
    app.run();
    lost()
}

#[allow(dead_code, reason = "it must compile")]
#[idempotent(key = "{id}", ttl = "1h", store = store, on_crash = reconcile(std::future::ready(Ok(Reconciliation::NotDone))))]
async fn unit(store: &MemoryStore, id: u32) -> Result<(), Error> {
    let _ = id;
    Ok(())
}

/// Checks two deliveries: the first runs a body and leaves a doubt, and the reconciler of the second delivery settles
/// this doubt.
fn check<E: std::fmt::Debug>(app: &App, [first, second]: [(Result<u32, E>, Outcome); 2]) {
    assert!(first.0.is_err() && first.1.uncertain() && first.1.executed());
    assert!(matches!(first.1.disposition(), Disposition::Retry { .. }));
    assert!(second.1.reconciled() && second.1.recorded());
    assert_eq!((second.0.unwrap(), second.1.disposition(), app.runs()), (7, Disposition::Ack, 1));
    app.runs.store(0, Ordering::SeqCst);
}

#[test]
fn the_reconciler_of_a_handler_of_any_shape_can_use_its_arguments() {
    spawned(async {
        let app = Arc::new(App::default());
        check(&app, [observe(borrows(&app, "order", 7)).await, observe(borrows(&app, "order", 7)).await]);
        let owning = || owns(Arc::clone(&app), "order".to_owned(), 7);
        check(&app, [observe(owning()).await, observe(owning()).await]);
        let shop = Shop(Arc::clone(&app));
        check(&app, [observe(shop.method(7)).await, observe(shop.method(7)).await]);
        check(&app, [observe(shop.ship(7)).await, observe(shop.ship(7)).await]);
        let values = [(); 7];
        check(&app, [observe(generic(&app, 7, &values)).await, observe(generic(&app, 7, &values)).await]);
    });
}
