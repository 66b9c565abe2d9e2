//! The layer for clients (`RetryLayer`), against the layer for servers and against scripted servers.

#[path = "retries/answers.rs"]
mod answers;
#[path = "retries/calls.rs"]
mod calls;
#[path = "retries/keys.rs"]
mod keys;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use idem_runtime::clock::{Clock, Instant, Sleep, SystemClock, Task};
use idem_runtime::http::client::{CallName, ReplyBody, RetryBudget, RetryError, RetryLayer};
use idem_runtime::policy::Backoff;
use idem_runtime::{Error, MemoryStore, idempotent};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};

use crate::rig::*;

/// Clock whose sleeps end immediately. It notes the durations of the sleeps; its readings stand still.
#[derive(Clone, Debug, Default)]
struct Hurried {
    clock: SystemClock,
    wall: Duration,
    pauses: Arc<Mutex<Vec<Duration>>>,
}

impl Hurried {
    /// Returns a clock whose wall clock stands still at this time.
    fn at(wall: Duration) -> Self {
        Self { wall, ..Self::default() }
    }
}

impl Clock for Hurried {
    fn now(&self) -> Instant {
        Instant::new(Duration::ZERO)
    }

    fn wall(&self) -> Duration {
        self.wall
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        self.pauses.lock().unwrap().push(duration);
        Box::pin(async {})
    }

    fn entropy(&self) -> u128 {
        self.clock.entropy()
    }

    fn spawn(&self, task: Task) {
        self.clock.spawn(task);
    }
}

type Small = Full<Bytes>;

/// Sends each request over its own connection, and notes the keys.
fn client(
    address: SocketAddr,
    keys: &Arc<Mutex<Vec<Option<String>>>>,
) -> impl Service<Request<Small>, Response = Response<Incoming>, Error = BoxError, Future: Send + 'static>
+ Clone
+ Send
+ 'static {
    let keys = Arc::clone(keys);
    service_fn(move |request: Request<Small>| {
        let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
        keys.lock().unwrap().push(key);
        async move {
            let mut connection = Connection::open(address, Version::Two).await;
            Ok(connection.send(request.map(Body::new)).await?)
        }
    })
}

fn to(path: &str) -> Request<Small> {
    Request::post(format!("http://till{path}")).body(Small::from("amount=1")).unwrap()
}

/// Server that answers with these statuses, one after the other, and with 200 from then on.
async fn serve_statuses(statuses: &'static [(u16, Option<&'static str>)]) -> SocketAddr {
    let stage = Stage::open();
    let handler = async move || {
        let run = stage.play().await;
        match statuses.get(run - 1) {
            Some((0, _)) => panic!("on purpose"),
            Some((status, None)) => answer(*status, &[], "not yet"),
            Some((status, Some(after))) => answer(*status, &[("retry-after", after)], "not yet"),
            None => answer(200, &[], format!("run {run}")),
        }
    };
    serve(axum::Router::new().fallback(handler)).await
}

async fn play(statuses: &'static [(u16, Option<&'static str>)]) -> (u16, usize, Vec<Duration>) {
    let address = serve_statuses(statuses).await;
    let (clock, keys) = (Hurried::default(), Arc::default());
    let layer = RetryLayer::new().backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(1)));
    let client = layer.clock(clock.clone()).layer(client(address, &keys));
    let status = client.oneshot(to("/pay")).await.map_or(0, |response| response.status().as_u16());
    let keys = keys.lock().unwrap();
    assert!(keys[0].as_ref().is_some_and(|key| key.len() == 36), "{keys:?}");
    assert!(keys.iter().all(|key| *key == keys[0]), "all tries have the same key: {keys:?}");
    let pauses = clock.pauses.lock().unwrap().clone();
    (status, keys.len(), pauses)
}

#[tokio::test]
async fn a_client_retries_a_transient_failure_with_the_same_key() {
    let secs = |all: &[u64]| all.iter().copied().map(Duration::from_secs).collect::<Vec<_>>();
    assert_eq!(play(&[]).await, (200, 1, secs(&[])));
    let (status, tries, pauses) = play(&[(409, Some("3")), (503, Some("2"))]).await;
    assert_eq!((status, tries), (200, 3));
    assert!(
        pauses.iter().zip(secs(&[3, 2])).all(|(pause, asked)| (asked..=asked * 5 / 4).contains(pause)),
        "{pauses:?}"
    );
    let (status, tries, pauses) = play(&[(408, None), (425, None), (429, None), (500, None)]).await;
    assert_eq!((status, tries, pauses.len()), (200, 5, 4));
    for (pause, longest) in pauses.iter().zip([100, 200, 400, 800]) {
        assert!((longest / 2..=longest).contains(&pause.as_millis()), "{pauses:?}");
    }
    // The first try gets no response.
    let (status, tries, _) = play(&[(0, None), (502, None), (504, None)]).await;
    assert_eq!((status, tries), (200, 4));
    // The client does not retry forever.
    assert_eq!(play(&[(503, None); 9]).await.1, 5);
    let (status, tries, _) = play(&[(0, None); 9]).await;
    assert_eq!((status, tries), (0, 5));
}

#[tokio::test]
async fn a_client_does_not_retry_a_permanent_failure() {
    for answer in [
        &[(400, None)][..],
        &[(402, None)],
        // A 409 without `Retry-After` means that the operation is interrupted, or that another client caused the
        // conflict.
        &[(409, None)],
        &[(409, Some("soon"))],
        &[(410, Some("1"))],
        &[(422, Some("1"))],
        &[(501, None)],
        // The pause is longer than the client is willing to wait.
        &[(503, Some("3600"))],
    ] {
        assert_eq!(play(answer.to_vec().leak()).await, (answer[0].0, 1, vec![]), "{answer:?}");
    }
}

#[tokio::test]
async fn a_client_does_not_retry_a_request_without_a_key() {
    let address = serve_statuses(&[(503, None), (503, None)]).await;
    let keys = Arc::default();
    let client = RetryLayer::new().clock(Hurried::default()).layer(client(address, &keys));
    let get = Request::get("http://till/pay").body(Small::default()).unwrap();
    assert_eq!(client.clone().oneshot(get).await.unwrap().status(), 503);
    assert_eq!(*keys.lock().unwrap(), [None]);
    // The layer keeps a key that the caller has set.
    let mut own = to("/pay");
    own.headers_mut().insert("idempotency-key", "mine".parse().unwrap());
    assert_eq!(client.oneshot(own).await.unwrap().status(), 200);
    assert_eq!(keys.lock().unwrap()[1..], [Some("mine".to_owned()), Some("mine".to_owned())]);
}

#[tokio::test]
async fn a_client_can_quote_its_keys_and_gives_each_request_its_own_key() {
    let (address, stage) = serve_counter(layer()).await;
    let keys = Arc::default();
    let client = RetryLayer::new().quoted(true).layer(client(address, &keys));
    for _ in 0..2 {
        assert_eq!(client.clone().oneshot(to("/pay")).await.unwrap().status(), StatusCode::OK);
    }
    let keys = keys.lock().unwrap();
    assert!(keys[0] != keys[1] && keys.iter().flatten().all(|key| key.len() == 38 && key.starts_with('"')), "{keys:?}");
    assert_eq!(stage.begun(), 2);
}

#[tokio::test]
async fn client_and_server_layer_together_run_a_handler_once() {
    let stage = Stage::closed();
    let address = serve_stage(layer(), &stage).await;
    let keys = Arc::default();
    // The first try hangs up while the handler runs; the next tries get "in progress".
    let inner = client(address, &keys);
    let tries = Arc::new(Mutex::new(0));
    let (seen, running) = (Arc::clone(&tries), stage.clone());
    let inner = service_fn(move |request: Request<Small>| {
        let mut inner = inner.clone();
        let (seen, running) = (Arc::clone(&seen), running.clone());
        async move {
            let this = {
                let mut tries = seen.lock().unwrap();
                *tries += 1;
                *tries
            };
            let asking = tokio::spawn(inner.call(request));
            match this {
                1 => {
                    running.entered().await;
                    asking.abort();
                    Err(BoxError::from("hung up"))
                }
                2 => {
                    let answer = asking.await?;
                    running.go();
                    answer
                }
                _ => asking.await?,
            }
        }
    });
    let layer = RetryLayer::new().max_tries(1000).budget(RetryBudget::unlimited()).clock(Hurried::default());
    let answer = layer.layer(inner).oneshot(to("/pay")).await.unwrap();
    let reply = Reply::of(answer).await.unwrap();
    assert_eq!((reply.text(), reply.is_replay(), stage.begun()), ("run 1", true, 1));
    assert!(*tries.lock().unwrap() >= 3);
}

#[tokio::test]
async fn a_request_that_a_handler_sends_has_the_same_key_in_every_attempt() {
    #[idempotent(key = "{order}", ttl = "1h", store = store, scope = "http test: order")]
    async fn order<S>(
        store: &MemoryStore,
        client: S,
        order: u32,
        name: Option<&str>,
        fails: bool,
    ) -> Result<String, Error>
    where
        S: Service<Request<Small>, Response = Response<ReplyBody<Incoming>>, Error = RetryError<BoxError>>,
    {
        let mut request = to("/pay");
        if let Some(name) = name {
            request.extensions_mut().insert(CallName::new(name.to_owned()));
        }
        let text = match client.oneshot(request).await {
            Ok(response) => Reply::of(response).await.expect("a body").text().to_owned(),
            Err(error) => error.to_string(),
        };
        if fails { Err(Error::NoAttempt) } else { Ok(text) }
    }

    let (address, stage) = serve_counter(layer()).await;
    let (store, keys) = (MemoryStore::new(), Arc::default());
    let client = RetryLayer::new().layer(client(address, &keys));
    order(&store, client.clone(), 1, Some("charge"), true).await.unwrap_err();
    assert_eq!(order(&store, client.clone(), 1, Some("charge"), false).await.unwrap(), "run 1");
    assert_eq!(order(&store, client.clone(), 2, Some("charge"), false).await.unwrap(), "run 2");
    assert_eq!(order(&store, client.clone(), 3, Some("refund"), true).await.unwrap_err().key(), None);
    assert_eq!(stage.begun(), 3);
    // A call without a name is not sent.
    let said = order(&store, client.clone(), 4, None, false).await.unwrap();
    assert!(said.contains("POST /pay") && said.contains("CallName") && said.contains("nothing was sent"), "{said}");
    assert_eq!((stage.begun(), keys.lock().unwrap().len()), (3, 4));
}
