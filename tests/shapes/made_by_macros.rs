//! Handlers that a `macro_rules!` writes, and handlers that name the runtime by another path.

use idem_runtime::key::KeyProblem;
use idem_runtime::{Error, idempotent};

use crate::{App, spawned, twice};

/// Example of a company's crate, which re-exports the runtime.
pub(super) mod company {
    pub(crate) mod reexports {
        pub(crate) use idem_runtime as idempotency;
    }

    /// Macro of the company's crate, which names the runtime by a path through that crate.
    macro_rules! handler {
        ($name:ident($app:ident, $arg:ident), $key:literal, $ttl:expr, $codec:ty, $on_error:ident, $body:block) => {
            #[idem_runtime::idempotent(
                                        key = $key,
                                        ttl = $ttl,
                                        store = $app.store,
                                        codec = $codec,
                                        on_error = $on_error,
                                        crate = $crate::shapes::made_by_macros::company::reexports::idempotency
                                    )]
            async fn $name(
                $app: &$crate::App,
                $arg: u32,
            ) -> std::result::Result<u32, $crate::shapes::made_by_macros::anyhow_like::Error> {
                let run = $app.run();
                let rest: u32 = $body;
                Ok(run + rest)
            }
        };
    }
    pub(super) use handler;
}

mod anyhow_like {
    use serde::{Deserialize, Serialize};

    #[derive(Debug, Serialize, Deserialize)]
    pub(super) struct Error;

    impl From<super::Error> for Error {
        fn from(_: super::Error) -> Self {
            Self
        }
    }
}

company::handler!(made(app, id), "{id}:{app.runs() / 1000}", "1h", idem_runtime::Json, record, { id + 1 });

macro_rules! with_arguments {
    ($name:ident($($arg:ident: $ty:ty),*) -> $output:ty, key = $key:expr, ttl = $ttl:literal, $body:expr) => {
        #[idempotent(key = $key, ttl = $ttl, store = $crate::shapes::made_by_macros::shared())]
        async fn $name($($arg: $ty),*) -> $output {
            $body
        }
    };
}

with_arguments!(by_expr(app: &App, id: u32) -> Result<u32, Error>, key = "order:{id}", ttl = "1h", Ok(app.run() + id));
with_arguments!(by_tuple(app: &App, id: u32) -> Result<u32, Error>, key = (id, app.runs() / 1000), ttl = "1h", Ok(app.run() + id));

macro_rules! with_fragments {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($app:ident: $ty:ty, $pattern:pat_param) -> $output:ty, $store:expr, $body:block) => {
        #[idempotent(key = "{id}", ttl = "1h", store = $store)]
        $(#[$meta])*
        $vis async fn $name($app: $ty, $pattern: u32, id: u32) -> $output $body
    };
}

with_fragments!(
    /// Documented.
    #[inline]
    pub(super) fn by_fragments(app: &App, _) -> Result<u32, Error>, app.store, {
        if app.runs() > 100 {
            return Ok(0);
        }
        Ok(app.run())
    }
);

macro_rules! protected {
    ($item:item) => {
        #[idempotent(key = "order:{7 + 1}", ttl = "1h", store = $crate::shapes::made_by_macros::shared())]
        $item
    };
}

protected! {
    async fn by_item(app: &App, _id: u32) -> Result<u32, Error> {
        Ok(app.run())
    }
}

pub(super) fn shared() -> idem_runtime::MemoryStore {
    static STORE: std::sync::LazyLock<idem_runtime::MemoryStore> = std::sync::LazyLock::new(Default::default);
    STORE.clone()
}

mod renamed {
    use crate::shapes::made_by_macros::company::reexports::idempotency as idem;
    use idem::{Error, idempotent};

    #[idempotent(key = "{id}", ttl = "1h", store = app.store, crate = idem)]
    pub(super) async fn by_alias(app: &crate::App, id: u32) -> Result<u32, Error> {
        Ok(app.run() + id)
    }

    #[idempotent(key = "{id}", ttl = "1h", store = app.store, crate = super::company::reexports::idempotency)]
    pub(super) async fn by_super(app: &crate::App, id: u32) -> Result<u32, Error> {
        Ok(app.run() + id)
    }

    #[idempotent(key = "{id}", ttl = "1h", store = app.store, crate = crate::shapes::made_by_macros::company::reexports::idempotency)]
    pub(super) async fn by_crate(app: &crate::App, id: u32) -> Result<u32, Error> {
        Ok(app.run() + id)
    }
}

struct Orders<'a>(&'a App);
struct Refunds<'a>(&'a App);

macro_rules! handlers {
    ($($name:ident)*) => {$(
        impl $name<'_> {
            #[idempotent(key = "{id}", ttl = "1h", store = self.0.store, scope = "made_by_macros::handle")]
            async fn handle(&self, id: u32) -> Result<u32, Error> {
                Ok(self.0.run() + id)
            }

            #[idempotent(key = "{id}", ttl = "1h", store = self.0.store, scope = concat!(stringify!($name), "::of its own"))]
            async fn own(&self, id: u32) -> Result<u32, Error> {
                Ok(self.0.run() + id)
            }

            #[idempotent(key = "{id}", ttl = "1h", store = self.0.store, scope = shared("made_by_macros::shared"))]
            async fn shared(&self, id: u32) -> Result<u32, Error> {
                Ok(self.0.run() + id)
            }
        }
    )*};
}

handlers!(Orders Refunds);

macro_rules! nested {
    ($($name:ident)*) => {$(
        async fn $name(app: &App) -> Result<u32, Error> {
            #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
            async fn nested(app: &App, id: u32) -> Result<u32, Error> {
                Ok(app.run() + id)
            }
            nested(app, 7).await
        }
    )*};
}

nested!(first second);

#[test]
fn two_handlers_with_one_scope_are_refused() {
    spawned(async {
        let app = &App::default();
        let (orders, refunds) = (Orders(app), Refunds(app));
        assert_eq!(twice(orders.handle(7), orders.handle(7)).await, 8);
        // Two methods with the same name conflict if they share a module and a line, here the line of the macro call.
        assert!(
            matches!(refunds.handle(7).await, Err(Error::InvalidKey { .. })),
            "a refund is not the replay of an order"
        );
        // Two functions of one name in different modules conflict, too.
        assert_eq!(twice(first(app), first(app)).await, 9);
        let refused = second(app).await.unwrap_err();
        assert!(matches!(&refused, Error::InvalidKey { problem: KeyProblem::SharedScope { .. }, .. }), "{refused:?}");
        assert!(refused.to_string().contains("made_by_macros.rs"), "{refused}");

        assert_eq!(twice(orders.own(7), orders.own(7)).await, 10);
        assert_eq!(twice(refunds.own(7), refunds.own(7)).await, 11);
        assert_eq!(orders.shared(7).await.unwrap(), 12);
        assert_eq!(
            refunds.shared(7).await.unwrap(),
            12,
            "two handlers that declare their scope as shared may use one record"
        );
    });
}

#[test]
fn handlers_made_by_macros_or_with_other_paths_to_the_runtime_run() {
    spawned(async {
        let app = &App::default();
        assert_eq!(twice(made(app, 7), made(app, 7)).await, 9);
        assert_eq!(twice(by_expr(app, 7), by_expr(app, 7)).await, 9);
        assert_eq!(twice(by_tuple(app, 7), by_tuple(app, 7)).await, 10);
        assert_eq!(twice(by_fragments(app, 1, 7), by_fragments(app, 1, 7)).await, 4);
        assert_eq!(twice(by_item(app, 7), by_item(app, 7)).await, 5);
        assert_eq!(twice(renamed::by_alias(app, 7), renamed::by_alias(app, 7)).await, 13);
        assert_eq!(twice(renamed::by_super(app, 7), renamed::by_super(app, 7)).await, 14);
        assert_eq!(twice(renamed::by_crate(app, 7), renamed::by_crate(app, 7)).await, 15);
    });
}
