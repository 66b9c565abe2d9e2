//! Names that could clash with generated code.

#![allow(dead_code, unused_macros, unused_imports, unreachable_pub, nonstandard_style, clippy::upper_case_acronyms)]

use crate::{App, spawned, twice};

mod shadowed {
    //! Items with names from the prelude, the standard library and the runtime. Generated code must use the original
    //! items, not these.

    pub struct Result;
    pub struct Option;
    pub struct String;
    pub struct Vec;
    pub struct Box;
    pub struct Duration;
    pub struct Policy;
    pub struct Scope;
    pub struct SCOPE;
    pub struct KeyBuilder;
    pub struct Operation;
    pub struct Handler;
    pub struct Send;
    pub struct From;
    pub struct Future;
    pub struct u64;
    pub struct u32_;
    pub fn Ok() {}
    pub fn Err() {}
    pub fn Some() {}
    pub fn None() {}
    pub mod core {}
    pub mod std {}
    pub mod alloc {}
    pub mod tokio {}
    pub mod idem_runtime {}
    pub mod __private {}

    macro_rules! concat {
        ($($t:tt)*) => {
            compile_error!("not this one")
        };
    }
    macro_rules! module_path {
        ($($t:tt)*) => {
            compile_error!("not this one")
        };
    }
    use {concat as file, concat as line, concat as column, concat as format};

    type Output<T> = ::core::result::Result<T, ::idem_runtime::Error>;

    #[::idem_runtime::idempotent(key = "{id}:{id}", ttl = "1h", store = app.store, in_progress = wait("1s"), max_attempts = 3)]
    pub async fn handler(app: &crate::App, id: u32) -> Output<u32> {
        ::core::result::Result::Ok(app.run() + id)
    }
}

use idem_runtime::{Error, MemoryStore, idempotent};

// The user's arguments and locals have the names of the generated code's locals.
#[idempotent(key = "{key}:{part}:{operation}", ttl = ttl, store = store, policy = policy, fingerprint = fingerprint)]
async fn locals(
    app: &App,
    (key, part, operation): (u32, u32, u32),
    store: MemoryStore,
    (policy, ttl): (idem_runtime::Policy, std::time::Duration),
    fingerprint: &str,
    (handler, codec): (u32, u32),
) -> Result<u32, Error> {
    let result = key + part + operation + handler + codec;
    let scope = u32::from(fingerprint.is_empty());
    drop((store, policy, ttl));
    Ok(app.run() + result + scope)
}

// A constant with the name of a local in the generated code could turn `let NAME = …` from a binding into a comparison
// with the constant.
mod constants {
    use idem_runtime::{Error, idempotent};

    const key: u32 = 1;
    const part: u32 = 2;
    const policy: u32 = 3;
    static operation: u32 = 4;
    static handler: u32 = 5;
    const codec: u32 = 6;
    const SCOPE: u32 = 7;

    #[idempotent(key = "{key}:{part}:{SCOPE}", ttl = "1h", store = app.store)]
    pub async fn constants(app: &crate::App) -> Result<u32, Error> {
        Ok(app.run() + key + part + policy + operation + handler + codec + SCOPE)
    }
}

// The methods of a user's traits have the names of the runtime's methods.
trait Nosy {
    fn text(&self, _: &str) {}
    fn build(&self) {}
    fn run(&self) {}
    fn handle(&self) {}
    fn append(&self) {}
    fn fingerprint(&self) {}
    fn values(&self) {}
}

impl<T: ?Sized> Nosy for T {}

#[idempotent(key = "a{id}", ttl = "1h", store = app.store, fingerprint = id)]
async fn methods(app: &App, id: u32) -> Result<u32, Error> {
    Ok(App::run(app) + id)
}

// The argument has the name of its own function.
#[idempotent(key = "{named}", ttl = "1h", store = app.store)]
async fn named(app: &App, named: u32) -> Result<u32, Error> {
    Ok(app.run() + named)
}

#[idempotent(key = "{r#type}", ttl = "1h", store = app.store)]
async fn r#type(app: &App, r#type: u32) -> Result<u32, Error> {
    Ok(app.run() + r#type)
}

#[deprecated = "call another one"]
#[must_use = "says whether it ran"]
#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
#[inline]
async fn deprecated(app: &App, id: u32) -> Result<u32, Error> {
    Ok(app.run() + id)
}

struct Outside<'a>(&'a App);

impl Outside<'_> {
    async fn named(&self, id: u32) -> Result<u32, Error> {
        // The function is inside of a method. The attribute must not take the function for a method.
        #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
        async fn inside(app: &App, id: u32) -> Result<u32, Error> {
            Ok(app.run() + id)
        }
        inside(self.0, id).await
    }
}

#[test]
fn an_argument_may_have_the_name_of_its_function() {
    #[idempotent(key = "{id}", ttl = "1h", store = app.store)]
    async fn nested(app: &App, nested: (), id: u32) -> Result<u32, Error> {
        let () = nested;
        Ok(app.run() + id)
    }

    spawned(async {
        let app = &App::default();
        assert_eq!(twice(named(app, 7), named(app, 7)).await, 8);
        assert_eq!(twice(r#type(app, 7), r#type(app, 7)).await, 9);
        #[expect(deprecated)]
        let calls = (deprecated(app, 7), deprecated(app, 7));
        assert_eq!(twice(calls.0, calls.1).await, 10);
        let outside = Outside(app);
        assert_eq!(twice(outside.named(7), outside.named(7)).await, 11);
        assert_eq!(twice(nested(app, (), 7), nested(app, (), 7)).await, 12);
    });
}

#[test]
fn names_of_the_user_do_not_clash_with_generated_code() {
    spawned(async {
        let app = &App::default();
        assert_eq!(twice(shadowed::handler(app, 7), shadowed::handler(app, 7)).await, 8);
        let hour = std::time::Duration::from_secs(3600);
        let policy = idem_runtime::Policy::new(hour);
        let store = MemoryStore::new();
        let call = || locals(app, (1, 2, 3), store.clone(), (policy, hour), "", (5, 6));
        assert_eq!(twice(call(), call()).await, 20);
        assert_eq!(twice(constants::constants(app), constants::constants(app)).await, 31);
        assert_eq!(twice(methods(app, 7), methods(app, 7)).await, 11);
    });
}
