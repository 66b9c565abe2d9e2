//! Other attributes above and below `#[idempotent]`, and `#[async_trait]` around it.

use std::sync::Arc;

use async_trait::async_trait;
use idem_runtime::{Error, idempotent};
use tracing::instrument;

use crate::{App, spawned, twice, twice_here};

/// Documented.
#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
/// Also below.
#[inline]
#[must_use = "a future does nothing by itself"]
#[expect(clippy::no_effect_underscore_binding, reason = "an expectation is fulfilled inside of the body")]
async fn documented(app: &App, #[allow(unused)] id: u32, #[cfg(any())] absent: u32) -> Result<u32, Error> {
    let _one = 1;
    Ok(app.run())
}

#[instrument(skip(app), fields(double = id * 2), err)]
#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
async fn instrumented_above(app: &App, id: u32) -> Result<u32, Error> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store)]
#[instrument(skip(app), fields(double = id * 2), err)]
async fn instrumented_below(app: &App, id: u32) -> Result<u32, Error> {
    Ok(app.run() + id)
}

#[async_trait]
trait Handle {
    async fn by_ref(&self, id: u32) -> Result<u32, Error>;
    async fn by_mut(&mut self, id: u32) -> Result<u32, Error>;
    async fn by_arc(self: Arc<Self>, id: u32) -> Result<u32, Error>;
    async fn by_box(self: Box<Self>, id: u32) -> Result<u32, Error>;
    async fn by_value(self, id: u32) -> Result<u32, Error>
    where
        Self: Sized;
    async fn patterns(&self, ids: (u32, u32), text: String, _: u32) -> anyhow::Result<String>;
    async fn generic<T: ToString + Send>(&self, id: T) -> Result<String, Error>;
    async fn method_above(&self, id: u32) -> Result<u32, Error>;
    async fn method_below(&self, id: u32) -> Result<u32, Error>;
    async fn associated(app: &App, id: u32) -> Result<u32, Error>
    where
        Self: Sized;

    fn app(&self) -> &App;

    #[idempotent(key = "{id}", ttl = "1h", store = self.app().store, scope = "attributes::provided")]
    async fn provided(&self, id: u32) -> Result<u32, Error>
    where
        Self: Sync,
    {
        Ok(self.app().run() + id)
    }
}

#[derive(Clone)]
struct Service {
    app: Arc<App>,
    tenant: String,
}

#[async_trait]
impl Handle for Service {
    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "attributes::by_ref")]
    async fn by_ref(&self, id: u32) -> Result<u32, Error> {
        let run = || self.app.run();
        Ok(run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "attributes::by_mut")]
    async fn by_mut(&mut self, id: u32) -> Result<u32, Error> {
        self.tenant.push('!');
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "attributes::by_arc")]
    async fn by_arc(self: Arc<Self>, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "attributes::by_box")]
    async fn by_box(self: Box<Self>, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = format!("{}:{}", self.tenant, id), ttl = "1h", store = self.app.store, scope = "attributes::by_value")]
    async fn by_value(mut self, id: u32) -> Result<u32, Error> {
        self.tenant.clear();
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{a}:{b}:{text}", ttl = "1h", store = self.app.store, scope = "attributes::patterns")]
    async fn patterns(&self, (a, b): (u32, u32), mut text: String, _: u32) -> anyhow::Result<String> {
        if text.is_empty() {
            return Err(anyhow::anyhow!("empty"));
        }
        let number: u32 = "1".parse()?;
        text.push_str(&(self.app.run() + a + b + number).to_string());
        Ok(text)
    }

    #[idempotent(key = "{id.to_string()}", ttl = "1h", store = self.app.store, scope = "attributes::generic")]
    async fn generic<T: ToString + Send>(&self, id: T) -> Result<String, Error> {
        Ok(id.to_string() + &self.app.run().to_string())
    }

    #[instrument(skip(self))]
    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "attributes::method_above")]
    async fn method_above(&self, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "attributes::method_below")]
    #[instrument(skip(self))]
    async fn method_below(&self, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = "attributes::associated")]
    async fn associated(app: &App, id: u32) -> Result<u32, Error> {
        Ok(app.run() + id)
    }

    fn app(&self) -> &App {
        &self.app
    }
}

#[async_trait(?Send)]
trait Local {
    async fn local(&self, id: std::rc::Rc<u32>) -> Result<u32, Error>;
}

#[async_trait(?Send)]
impl Local for Service {
    #[idempotent(key = "{id}", ttl = "1h", store = self.app.store, scope = "attributes::local")]
    async fn local(&self, id: std::rc::Rc<u32>) -> Result<u32, Error> {
        Ok(self.app.run() + *id)
    }
}

#[test]
fn other_attributes_on_a_handler_keep_their_effect() {
    spawned(async {
        let app = App::default();
        assert_eq!(twice(documented(&app, 1), documented(&app, 1)).await, 1);
        assert_eq!(twice(instrumented_above(&app, 1), instrumented_above(&app, 1)).await, 3);
        assert_eq!(twice(instrumented_below(&app, 1), instrumented_below(&app, 1)).await, 4);
    });
}

#[test]
fn methods_under_async_trait_are_idempotent() {
    spawned(async {
        let service = || Service { app: Arc::default(), tenant: "acme".to_owned() };
        let it = service();
        assert_eq!(twice(it.by_ref(7), it.by_ref(7)).await, 8);
        assert_eq!(twice(it.clone().by_mut(7), it.clone().by_mut(7)).await, 9);
        let arc = Arc::new(it.clone());
        assert_eq!(twice(arc.clone().by_arc(7), arc.by_arc(7)).await, 10);
        assert_eq!(twice(Box::new(it.clone()).by_box(7), Box::new(it.clone()).by_box(7)).await, 11);
        assert_eq!(twice(it.clone().by_value(7), it.clone().by_value(7)).await, 12);
        let call = || it.patterns((1, 2), "text".to_owned(), 3);
        assert_eq!(twice(call(), call()).await, "text10");
        assert_eq!(twice(it.generic('g'), it.generic('g')).await, "g7");
        assert_eq!(twice(it.method_above(7), it.method_above(7)).await, 15);
        assert_eq!(twice(it.method_below(7), it.method_below(7)).await, 16);
        assert_eq!(twice(Service::associated(&it.app, 7), Service::associated(&it.app, 7)).await, 17);
        assert_eq!(twice(it.provided(7), it.provided(7)).await, 18);
    });
}

#[tokio::test]
async fn a_method_under_async_trait_inside_a_function_is_idempotent() {
    let it = Service { app: Arc::default(), tenant: "acme".to_owned() };
    assert_eq!(twice_here(it.local(7.into()), it.local(7.into())).await, 8);
}
