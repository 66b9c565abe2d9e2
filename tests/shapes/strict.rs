//! Module of a user under the strictest lints, in which the attribute must cause no reports. Lints are set to `forbid`
//! where possible, because then an `allow` in generated code is an error.

#![deny(warnings, clippy::all, clippy::pedantic, clippy::nursery)]
#![deny(missing_docs, unreachable_pub, single_use_lifetimes, let_underscore_drop)]
#![deny(elided_lifetimes_in_paths, explicit_outlives_requirements, trivial_casts, unused_results, unused_lifetimes)]
#![deny(clippy::shadow_unrelated, clippy::unwrap_used, clippy::default_trait_access, clippy::absolute_paths)]
#![deny(unused)]
#![forbid(
    unsafe_code,
    unreachable_code,
    unused_imports,
    unused_variables,
    unused_parens,
    unused_braces,
    unused_qualifications
)]

use idem_runtime::{Error, MemoryStore, Store as _, idempotent};

use super::lints;
use super::lints::Service as Clean;
use crate::{App, spawned, twice};

/// An event.
#[derive(Debug, Clone)]
struct Event<'a> {
    id: &'a str,
    amount: Option<u64>,
}

/// A service.
#[derive(Debug, Default)]
struct Service {
    store: MemoryStore,
}

impl Service {
    #[idempotent(
        key = "{event.id}:{event.amount}",
        ttl = "7d",
        store = self.store,
        lease = "10s",
        in_progress = wait("1s"),
        fingerprint = (event.id, event.amount),
        max_attempts = 3,
        scope = "strict::charge"
    )]
    async fn charge(&self, app: &App, event: Event<'_>) -> Result<u64, Error> {
        if app.runs() > 10 {
            return Ok(0);
        }
        let amount = event.amount.unwrap_or_default();
        Ok(u64::from(app.run()) + amount)
    }
}

#[idempotent(key = (event.id, event.amount), ttl = "7d", store = app.store, scope = "strict")]
async fn free(app: &App, event: &Event<'_>) -> Result<(), Error> {
    let _ = app.run();
    drop(event.clone());
    Ok(())
}

#[idempotent(key = "{id}", ttl = "7d", store = app.store)]
async fn todo(app: &App, id: u32) -> Result<u32, Error> {
    let _ = id;
    let _ = app.run();
    panic!("not yet")
}

#[test]
fn handlers_under_strict_lints_run() {
    spawned(async {
        let (app, service) = (App::default(), Service::default());
        let event = Event { id: "a", amount: Some(1) };
        let call = || service.charge(&app, event.clone());
        assert_eq!(twice(call(), call()).await, 2);
        twice(free(&app, &event), free(&app, &event)).await;
        drop(todo(&app, 1));
    });
}

#[test]
fn handlers_under_every_lint_run() {
    spawned(async {
        let (store, service) = (MemoryStore::new(), Clean::default());
        let (event, other) = (lints::Event::new(1), lints::Event::new(2));
        assert_eq!(twice(lints::options(&store, event.clone()), lints::options(&store, event.clone())).await, 1);
        assert_eq!(twice(lints::records(store.handle(), &event), lints::records(store.handle(), &event)).await, 1);
        let unused = String::new;
        let first = lints::arguments(&store, other.clone(), unused(), 0, (2, 0));
        let second = lints::arguments(&store, other.clone(), unused(), 0, (2, 0));
        assert_eq!(twice(first, second).await, 4);
        twice(service.charge(1), service.charge(1)).await;
        assert_eq!(twice(service.show(1), service.show(1)).await, "1");
        assert_eq!(twice(lints::ruled(&store, &event), lints::ruled(&store, &event)).await, 1);
    });
}
