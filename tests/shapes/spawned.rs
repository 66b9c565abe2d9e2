//! Handlers with each error type that the documentation names, run in spawned tasks.

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use idem_runtime::{Error, idempotent, observe};
use tokio::task::yield_now;

use crate::{App, spawned, twice};

/// Error type of a user.
#[derive(Debug)]
enum ShipError {
    Idempotency(#[expect(dead_code)] String),
}

impl From<Error> for ShipError {
    fn from(error: Error) -> Self {
        Self::Idempotency(error.to_string())
    }
}

/// Error with a trait object inside.
#[derive(Debug)]
struct Caused(#[expect(dead_code)] Box<dyn StdError + Send + Sync>);

impl From<Error> for Caused {
    fn from(error: Error) -> Self {
        Self(error.into())
    }
}

macro_rules! errors {
    ($($name:ident: $error:ty;)*) => {$(
        mod $name {
            use super::*;

            type Aliased = Result<u32, $error>;

            #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
            async fn borrowing(app: &App, id: u32) -> Result<u32, $error> {
                yield_now().await;
                Ok(app.run() + id)
            }

            #[idempotent(key = "{id}", ttl = "1h", store = app.store, fingerprint = id, in_progress = wait("1s"))]
            async fn owning(app: Arc<App>, id: u32) -> Aliased {
                yield_now().await;
                if id == 0 {
                    Err(Error::NoAttempt)?;
                }
                Ok(app.run() + id)
            }

            #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
            async fn nested(app: Arc<App>, id: u32) -> Result<u32, $error> {
                let inner = borrowing(&app, id + 1).await?;
                let boxed: Pin<Box<dyn Future<Output = Result<u32, $error>> + Send>> = Box::pin(owning(app.clone(), inner));
                Ok(boxed.await? + observe(owning(app, id)).await.0?)
            }

            #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
            fn boxed<'a>(app: &'a App, id: u32) -> Pin<Box<dyn Future<Output = Result<u32, $error>> + Send + 'a>> {
                Box::pin(async move {
                    yield_now().await;
                    Ok(app.run() + id)
                })
            }

            #[tracing::instrument(skip(app))]
            #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
            async fn instrumented(app: Arc<App>, id: u32) -> Result<u32, $error> {
                yield_now().await;
                Ok(app.run() + id)
            }

            #[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = concat!("spawned::generic ", stringify!($name)))]
            async fn generic<T: Send + 'static>(app: Arc<App>, id: u32, value: T) -> Result<u32, $error> {
                yield_now().await;
                drop(value);
                Ok(app.run() + id)
            }

            struct Service(Arc<App>);

            impl Service {
                #[idempotent(key = "{id}", ttl = "1h", store = self.0.store, scope = concat!("spawned::by_ref ", stringify!($name)))]
                async fn by_ref(&self, id: u32) -> Result<u32, $error> {
                    yield_now().await;
                    Ok(self.0.run() + id)
                }
            }

            #[async_trait]
            trait Handle {
                async fn handle(&self, id: u32) -> Result<u32, $error>;
            }

            #[async_trait]
            impl Handle for Service {
                #[idempotent(key = "{id}", ttl = "1h", store = self.0.store, scope = concat!("spawned::handle ", stringify!($name)))]
                async fn handle(&self, id: u32) -> Result<u32, $error> {
                    yield_now().await;
                    Ok(self.0.run() + id)
                }
            }

            #[test]
            fn handlers_run_in_spawned_tasks() {
                spawned(async {
                    let app = Arc::new(App::default());
                    assert_eq!(twice(borrowing(&app, 7), borrowing(&app, 7)).await, 8);
                    assert_eq!(twice(boxed(&app, 7), boxed(&app, 7)).await, 9);

                    let call = || tokio::spawn(owning(app.clone(), 7));
                    assert_eq!((call().await.unwrap().unwrap(), call().await.unwrap().unwrap()), (10, 10));
                    let call = || tokio::spawn(observe(instrumented(app.clone(), 7)));
                    assert!(call().await.unwrap().1.executed() && call().await.unwrap().1.replayed());
                    let call = || tokio::spawn(generic(app.clone(), 7, "value"));
                    assert_eq!((call().await.unwrap().unwrap(), call().await.unwrap().unwrap()), (12, 12));
                    let call = || tokio::spawn(nested(app.clone(), 8));
                    let first = call().await.unwrap().unwrap();
                    assert_eq!(call().await.unwrap().unwrap(), first);
                    let call = || {
                        let app = app.clone();
                        tokio::spawn(async move { (borrowing(&app, 1).await, boxed(&app, 1).await, app) })
                    };
                    call().await.unwrap().0.unwrap();
                    call().await.unwrap().1.unwrap();

                    let service = Arc::new(Service(app));
                    let call = || {
                        let service = service.clone();
                        tokio::spawn(async move {
                            tokio::select! {
                                result = service.by_ref(7) => result,
                                result = std::future::pending() => result,
                            }
                        })
                    };
                    assert_eq!(call().await.unwrap().unwrap(), call().await.unwrap().unwrap());
                    let call = || {
                        let service = service.clone();
                        tokio::spawn(async move { service.handle(7).await })
                    };
                    assert_eq!(call().await.unwrap().unwrap(), call().await.unwrap().unwrap());
                });
            }
        }
    )*};
}

errors! {
    own: ShipError;
    caused: Caused;
    plain: Error;
    io: std::io::Error;
    anyhow: anyhow::Error;
    boxed: Box<dyn StdError + Send + Sync>;
    boxed_static: Box<dyn StdError + Send + Sync + 'static>;
}
