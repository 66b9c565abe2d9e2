//! Handlers with every option of the attribute, in each of its forms.

use std::ops::Deref;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use idem_runtime::key::PayloadDigest;
use idem_runtime::{
    Codec, CodecError, Disposition, Error, Json, Mode, ModeSwitch, OnError, OnUndecodable, Policy, Refusal,
    Undecodable, idempotent, observe,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{App, spawned, twice};

const HOUR: Duration = Duration::from_secs(3600);
const POLICY: Policy = Policy::new(HOUR);
static SHARED: LazyLock<Policy> = LazyLock::new(|| POLICY.lease(Duration::from_secs(10)));
static MODE: ModeSwitch = ModeSwitch::new(Mode::Enforce);
static SWITCHED: Policy = POLICY.mode_switch(&MODE);
const ATTEMPTS: u32 = 2;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Failure {
    Lasting(u32),
    Passing(u32),
    Idempotency(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Idempotency(error.to_string())
    }
}

struct Settings {
    policy: Policy,
    ttl: Duration,
}

struct Wrapper(Box<Settings>);

impl Deref for Wrapper {
    type Target = Settings;

    fn deref(&self) -> &Settings {
        &self.0
    }
}

#[idempotent(
    key = "{id}",
    ttl = "1h 30m",
    store = app.store,
    scope = "options",
    lease = "10s",
    in_progress = wait("500ms"),
    on_error = release,
    on_crash = fail,
    max_attempts = 5,
    fingerprint = id,
    missing_key = run,
    on_store_error = run,
    codec = Json,
    on_undecodable = error,
    timeout = "10m",
    max_result_bytes = 64 * 1024,
    mode = enforce,
    policy = POLICY,
    crate = ::idem_runtime,
)]
async fn all(app: &App, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

#[idempotent(
    key = "{id}",
    ttl = settings.ttl,
    lease = settings.ttl / 6,
    in_progress = wait(settings.ttl),
    max_attempts = ATTEMPTS,
    store = app.store
)]
async fn computed(app: &App, settings: &Settings, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", in_progress = reject, store = app.store, policy = settings.policy)]
async fn policy_field(app: &App, settings: Wrapper, id: u32) -> Result<u32, Failure> {
    drop(settings);
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", store = app.store, policy = &policy, ttl = "2h")]
async fn policy_pointer(app: &App, policy: Arc<Policy>, id: u32) -> Result<u32, Failure> {
    drop(policy);
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", store = app.store, policy = SHARED, on_crash = retry, max_attempts = 1)]
async fn policy_static(app: &App, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", store = app.store, policy = SWITCHED)]
async fn switched(app: &App, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, on_error = record)]
async fn recorded(app: &App, id: u32) -> Result<u32, Failure> {
    let _ = id;
    Err(Failure::Lasting(app.run()))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, on_error = release)]
async fn released(app: &App, id: u32) -> Result<u32, Failure> {
    let _ = id;
    Err(Failure::Passing(app.run()))
}

fn decide(failure: &Failure) -> OnError {
    match failure {
        Failure::Lasting(_) => OnError::Record,
        _ => OnError::Release,
    }
}

#[idempotent(key = "{lasting}", ttl = "1h", store = app.store, on_error = decide)]
async fn decided(app: &App, lasting: bool) -> Result<u32, Failure> {
    Err(if lasting { Failure::Lasting(app.run()) } else { Failure::Passing(app.run()) })
}

#[idempotent(key = "{lasting}", ttl = "1h", store = app.store, on_error = |failure| match failure {
    Failure::Lasting(run) if *run > 0 => OnError::Record,
    _ => OnError::Release,
})]
async fn decided_by_closure(app: &App, lasting: bool) -> Result<u32, Failure> {
    Err(if lasting { Failure::Lasting(app.run()) } else { Failure::Passing(app.run()) })
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, fingerprint = (id, text, "constant"))]
async fn fingerprinted(app: &App, id: u32, text: String) -> Result<String, Failure> {
    app.run();
    Ok(text)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, fingerprint = upload, scope = shared("uploads"))]
async fn uploaded(app: &App, id: u32, upload: Vec<u8>) -> Result<Vec<u8>, Failure> {
    app.run();
    Ok(upload)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, fingerprint = PayloadDigest::new(&digest), scope = shared("uploads"))]
async fn digested(app: &App, id: u32, digest: Vec<u8>) -> Result<Vec<u8>, Failure> {
    app.run();
    Ok(digest)
}

#[idempotent(key = id, ttl = "1h", store = app.store, missing_key = run)]
async fn unkeyed(app: &App, id: Option<u32>) -> Result<Option<u32>, Failure> {
    app.run();
    Ok(id)
}

/// JSON codec with another name, so that its results are not results of [`Json`].
struct Tagged;

impl Codec for Tagged {
    const NAME: &'static str = "tagged";

    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
        Json::encode(value)
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        Json::decode(bytes)
    }
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, codec = Tagged)]
async fn encoded(app: &App, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, codec = C, scope = "options::encoded_by")]
async fn encoded_by<C: Codec>(app: &App, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

/// Earlier release of the handlers below, with another result type.
#[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = shared("migrated"))]
async fn earlier(app: &App, id: u32) -> Result<u32, Failure> {
    Ok(app.run() + id)
}

fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    migrate_to::<String>(recorded)
}

fn migrate_to<T: From<String> + Serialize>(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    Json::encode(&T::from(format!("run {}", recorded.decode::<u32>()?)))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = shared("migrated"), on_undecodable = migrate)]
async fn migrated(app: &App, id: u32) -> Result<String, Failure> {
    Ok(format!("run {}", app.run() + id))
}

mod migrations {
    pub(super) fn error(recorded: super::Undecodable<'_>) -> Result<Vec<u8>, super::CodecError> {
        super::migrate(recorded)
    }
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = shared("migrated"), on_undecodable = migrations::error)]
async fn migrated_by_path(app: &App, id: u32) -> Result<String, Failure> {
    Ok(format!("run {}", app.run() + id))
}

struct Migration<T>(T);

impl<T: From<String> + Serialize + serde::de::DeserializeOwned> Migration<T> {
    fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        migrate_to::<T>(recorded)
    }

    #[idempotent(key = "{id}", ttl = "1h", store = app.store, scope = shared("migrated"), on_undecodable = Self::migrate)]
    async fn method(self, app: &App, id: u32) -> Result<T, Failure> {
        app.run();
        Ok(self.0)
    }

    #[idempotent(key = "{id}", ttl = app.ttl(), store = app.store, scope = shared("migrated"), on_undecodable = migrate_to::<T>)]
    async fn with_computed_ttl(self, app: &App, id: u32) -> Result<T, Failure> {
        app.run();
        Ok(self.0)
    }
}

impl App {
    fn ttl(&self) -> Duration {
        HOUR + Duration::from_secs(self.runs().into())
    }
}

const MIGRATING: Policy = POLICY.on_undecodable(OnUndecodable::Migrate(migrate));

#[idempotent(key = "{id}", store = app.store, scope = shared("migrated"), policy = MIGRATING)]
async fn migrated_by_policy(app: &App, id: u32) -> Result<String, Failure> {
    Ok(format!("run {}", app.run() + id))
}

#[idempotent(key = "{id}", store = app.store, scope = shared("migrated"), policy = MIGRATING, on_undecodable = error)]
async fn not_migrated(app: &App, id: u32) -> Result<String, Failure> {
    Ok(format!("run {}", app.run() + id))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, timeout = "20ms")]
async fn hanging(app: &App, id: u32) -> Result<u32, Error> {
    let _ = (app.run(), id);
    std::future::pending().await
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, timeout = limit / 2, max_result_bytes = usize::from(bytes))]
async fn limited(app: &App, id: u32, limit: Duration, bytes: u8) -> Result<String, Error> {
    app.run();
    Ok(format!("{id}: a text of 22 bytes"))
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, mode = off, policy = POLICY)]
async fn unprotected(app: &App, id: u32) -> Result<u32, Error> {
    Ok(app.run() + id)
}

#[idempotent(key = "{id}", ttl = "1h", store = app.store, mode = shadow)]
async fn watched(app: &App, id: u32) -> Result<u32, Error> {
    Ok(app.run() + id)
}

#[test]
fn times_sizes_and_modes_are_read_from_the_attribute() {
    spawned(async {
        let app = &App::default();
        for runs in 1..=2 {
            assert!(matches!(hanging(app, 7).await, Err(Error::TimedOut { .. })));
            assert_eq!(app.runs(), runs);
        }
        let call = |id, bytes| limited(app, id, HOUR, bytes);
        assert_eq!(twice(call(7, 100), call(7, 0)).await, "7: a text of 22 bytes");
        call(8, 10).await.unwrap();
        assert!(matches!(call(8, 100).await, Err(Error::ResultUnavailable { .. })));
        assert_eq!(app.runs(), 4);

        assert_eq!((unprotected(app, 7).await.unwrap(), unprotected(app, 7).await.unwrap()), (12, 13));
        let (first, _) = observe(watched(app, 7)).await;
        let (second, outcome) = observe(watched(app, 7)).await;
        assert_eq!((first.unwrap(), second.unwrap()), (14, 15));
        assert_eq!(outcome.bypassed(), Some(Refusal::Replay));
    });
}

#[test]
fn results_that_an_earlier_release_recorded_are_migrated() {
    spawned(async {
        let app = &App::default();
        assert_eq!(earlier(app, 7).await, Ok(8));
        assert_eq!(migrated(app, 7).await.unwrap(), "run 8");
        assert_eq!(migrated_by_path(app, 7).await.unwrap(), "run 8");
        assert_eq!(Migration(String::new()).method(app, 7).await.unwrap(), "run 8");
        assert_eq!(Migration(String::new()).with_computed_ttl(app, 7).await.unwrap(), "run 8");
        assert_eq!(migrated_by_policy(app, 7).await.unwrap(), "run 8");
        assert!(matches!(not_migrated(app, 7).await, Err(Failure::Idempotency(_))));
        assert_eq!(app.runs(), 1);
    });
}

#[test]
fn every_form_of_an_attribute_option_is_accepted() {
    spawned(async {
        let app = &App::default();
        assert_eq!(twice(all(app, 7), all(app, 7)).await, 8);
        let settings = || Settings { policy: POLICY, ttl: HOUR };
        assert_eq!(twice(computed(app, &settings(), 7), computed(app, &settings(), 7)).await, 9);
        let call = || policy_field(app, Wrapper(Box::new(settings())), 7);
        assert_eq!(twice(call(), call()).await, 10);
        let call = || policy_pointer(app, Arc::new(POLICY), 7);
        assert_eq!(twice(call(), call()).await, 11);
        assert_eq!(twice(policy_static(app, 7), policy_static(app, 7)).await, 12);
        assert_eq!(twice(encoded(app, 7), encoded(app, 7)).await, 13);
        assert_eq!(twice(encoded_by::<Json>(app, 7), encoded_by::<Json>(app, 7)).await, 14);
    });
}

#[test]
fn the_mode_of_a_handler_is_switched_at_run_time() {
    spawned(async {
        let app = &App::default();
        assert_eq!(twice(switched(app, 7), switched(app, 7)).await, 8);
        MODE.set(Mode::Off);
        assert_eq!(switched(app, 7).await, Ok(9));
        MODE.set(Mode::Enforce);
        assert_eq!(switched(app, 7).await, Ok(8));
    });
}

#[test]
fn on_error_decides_whether_an_error_is_recorded_or_frees_the_key() {
    spawned(async {
        let app = &App::default();
        assert_eq!(recorded(app, 7).await, Err(Failure::Lasting(1)));
        assert_eq!(recorded(app, 7).await, Err(Failure::Lasting(1)));
        assert_eq!(released(app, 7).await, Err(Failure::Passing(2)));
        assert_eq!(released(app, 7).await, Err(Failure::Passing(3)));
        assert_eq!(decided(app, true).await, Err(Failure::Lasting(4)));
        assert_eq!(decided(app, true).await, Err(Failure::Lasting(4)));
        assert_eq!(decided(app, false).await, Err(Failure::Passing(5)));
        assert_eq!(decided(app, false).await, Err(Failure::Passing(6)));
        assert_eq!(decided_by_closure(app, true).await, Err(Failure::Lasting(7)));
        assert_eq!(decided_by_closure(app, true).await, Err(Failure::Lasting(7)));
        assert_eq!(decided_by_closure(app, false).await, Err(Failure::Passing(8)));
        assert_eq!(decided_by_closure(app, false).await, Err(Failure::Passing(9)));
    });
}

#[test]
fn a_digest_stands_for_a_payload_and_not_for_its_own_bytes() {
    spawned(async {
        let (app, bytes) = (&App::default(), |byte: u8| vec![byte; 32]);
        let call = |id, byte| digested(app, id, bytes(byte));
        assert_eq!(twice(call(1, 7), call(1, 7)).await, bytes(7));
        let runs = app.runs();
        let said = |result: Result<_, Failure>| match result {
            Err(Failure::Idempotency(said)) => said,
            result => panic!("{result:?}"),
        };
        assert!(said(call(1, 8).await).contains("fingerprint"));
        assert!(said(uploaded(app, 1, bytes(7)).await).contains("fingerprint"));
        assert_eq!(app.runs(), runs);
        uploaded(app, 2, bytes(7)).await.unwrap();
        assert!(said(call(2, 7).await).contains("fingerprint"));
        let short = said(digested(app, 3, vec![7; 15]).await);
        assert!(short.contains("the fingerprint can't be computed; the body did not run"), "{short}");
        assert_eq!(app.runs(), runs + 1);
    });
}

#[test]
fn another_payload_is_an_error_and_a_missing_key_runs_under_missing_key_run() {
    spawned(async {
        let app = &App::default();
        let call = |text: &str| fingerprinted(app, 7, text.to_owned());
        assert_eq!(twice(call("a"), call("a")).await, "a");
        let (result, outcome) = observe(call("b")).await;
        assert!(matches!(result, Err(Failure::Idempotency(_))), "{result:?}");
        assert!(matches!(outcome.disposition(), Disposition::DeadLetter), "{outcome:?}");
        for runs in 2..4 {
            assert_eq!(unkeyed(app, None).await, Ok(None));
            assert_eq!(app.runs(), runs);
        }
    });
}
