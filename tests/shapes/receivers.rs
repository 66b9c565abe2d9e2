//! Methods with every form of `self`.

use std::pin::Pin;
use std::sync::Arc;

use idem_runtime::{Error, idempotent};

use crate::{App, spawned, twice};

#[derive(Clone)]
struct Service {
    app: Arc<App>,
    tenant: String,
}

impl Service {
    fn new() -> Self {
        Self { app: Arc::default(), tenant: "acme".to_owned() }
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_ref")]
    async fn by_ref(&self, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_mut")]
    async fn by_mut(&mut self, id: u32) -> Result<u32, Error> {
        self.tenant.push('!');
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_value")]
    async fn by_value(self, id: u32) -> Result<u32, Error> {
        let Self { app, tenant } = self;
        drop(tenant);
        Ok(app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_mut_value")]
    async fn by_mut_value(mut self, id: u32) -> Result<u32, Error> {
        self.tenant.clear();
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_arc")]
    async fn by_arc(self: Arc<Self>, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_arc_ref")]
    async fn by_arc_ref(self: &Arc<Self>, id: u32) -> Result<u32, Error> {
        Ok(Arc::clone(self).app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_box")]
    async fn by_box(self: Box<Self>, id: u32) -> Result<u32, Error> {
        let this = *self;
        Ok(this.app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_pin")]
    async fn by_pin(self: Pin<&mut Self>, id: u32) -> Result<u32, Error> {
        Ok(self.get_mut().app.run() + id)
    }

    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::by_pinned_arc")]
    async fn by_pinned_arc(self: Pin<Arc<Self>>, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    #[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = "receivers::associated")]
    async fn associated(app: &App, id: u32) -> Result<u32, Error> {
        Ok(app.run() + id)
    }
}

#[test]
fn every_form_of_self_is_accepted() {
    spawned(async {
        let service = Service::new;

        let it = service();
        assert_eq!(twice(it.by_ref(7), it.by_ref(7)).await, 8);

        let (mut it, mut again) = (service(), None);
        assert_eq!(twice(it.clone().by_mut(7), again.insert(it.clone()).by_mut(7)).await, 8);
        it.by_mut(7).await.unwrap();
        assert_eq!(it.tenant, "acme");

        let it = service();
        assert_eq!(twice(it.clone().by_value(7), it.by_value(7)).await, 8);
        let it = service();
        assert_eq!(twice(it.clone().by_mut_value(7), it.by_mut_value(7)).await, 8);
        let it = Arc::new(service());
        assert_eq!(twice(it.clone().by_arc(7), it.by_arc(7)).await, 8);
        let it = Arc::new(service());
        assert_eq!(twice(it.by_arc_ref(7), it.by_arc_ref(7)).await, 8);
        let it = Box::new(service());
        assert_eq!(twice(it.clone().by_box(7), it.by_box(7)).await, 8);
        let mut it = (service(), None);
        assert_eq!(twice(Pin::new(it.1.insert(it.0.clone())).by_pin(7), Pin::new(&mut it.0).by_pin(7)).await, 8);
        let it = Arc::pin(service());
        assert_eq!(twice(it.clone().by_pinned_arc(7), it.by_pinned_arc(7)).await, 8);
        let app = App::default();
        assert_eq!(twice(Service::associated(&app, 7), Service::associated(&app, 7)).await, 8);
    });
}

trait Handle {
    async fn handle(&self, id: u32) -> Result<u32, Error>;

    fn app(&self) -> &App;

    #[idempotent(key = "{id}", ttl = "1h", store = self.app().store, scope = "receivers::provided")]
    async fn provided(&self, id: u32) -> Result<u32, Error> {
        Ok(self.app().run() + id)
    }
}

impl Handle for Service {
    #[idempotent(key = "{self.tenant}:{id}", ttl = "1h", store = self.app.store, scope = "receivers::handle")]
    async fn handle(&self, id: u32) -> Result<u32, Error> {
        Ok(self.app.run() + id)
    }

    fn app(&self) -> &App {
        &self.app
    }
}

#[test]
fn async_functions_of_traits_are_idempotent() {
    spawned(async {
        let it = Service::new();
        assert_eq!(twice(it.handle(7), it.handle(7)).await, 8);
        assert_eq!(twice(it.provided(7), it.provided(7)).await, 9);
    });
}
