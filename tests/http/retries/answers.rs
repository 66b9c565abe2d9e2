//! Answers of a server that the client follows: pauses, dates, directives, and bodies that break off.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use idem_runtime::clock::ManualClock;
use idem_runtime::http::client::{CallKey, RetryBudget, RetryError, RetryLayer, RetryLimit};
use idem_runtime::policy::Backoff;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};

use super::{Hurried, Small, to};
use crate::rig::*;

/// Answer of a server in a script.
#[derive(Debug)]
pub(super) enum Turn {
    /// A whole response: status, fields, text.
    Whole(u16, Vec<(&'static str, &'static str)>, &'static str),
    /// A response whose body breaks off after this text.
    Breaks(u16, &'static str),
    /// A response with this body.
    Body(u16, Body),
    /// No response, but this error.
    Fails(&'static str),
    /// No response and no error: the request hangs.
    Hangs,
}

/// Client whose server follows a script, and answers 200 after its end.
#[derive(Clone, Debug, Default)]
pub(super) struct Script {
    turns: Arc<Mutex<VecDeque<Turn>>>,
    pub(super) keys: Arc<Mutex<Vec<Option<String>>>>,
}

impl Script {
    pub(super) fn of(turns: impl IntoIterator<Item = Turn>) -> Self {
        Self { turns: Arc::new(Mutex::new(turns.into_iter().collect())), keys: Arc::default() }
    }

    pub(super) fn client(
        &self,
    ) -> impl Service<Request<Small>, Response = Response<Body>, Error = BoxError, Future: Send> + Clone + Send + use<>
    {
        let script = self.clone();
        service_fn(move |request: Request<Small>| {
            let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
            script.keys.lock().unwrap().push(key);
            let turn = script.turns.lock().unwrap().pop_front();
            async move {
                match turn {
                    None => Ok(answer(200, &[], "done")),
                    Some(Turn::Whole(status, fields, text)) => Ok(answer(status, &fields, text)),
                    Some(Turn::Breaks(status, text)) => Ok(answer(status, &[], frames([Ok(text), Err("broke off")]))),
                    Some(Turn::Body(status, body)) => Ok(answer(status, &[], body)),
                    Some(Turn::Fails(reason)) => Err(BoxError::from(reason)),
                    Some(Turn::Hangs) => std::future::pending().await,
                }
            }
        })
    }

    /// Number of requests that were sent.
    pub(super) fn tries(&self) -> usize {
        self.keys.lock().unwrap().len()
    }
}

/// First pause of the backoff, in milliseconds.
const FIRST: u64 = 100;

pub(super) fn hurried(clock: &Hurried) -> RetryLayer {
    let backoff = Backoff::new(Duration::from_millis(FIRST), Duration::from_secs(1));
    RetryLayer::new().backoff(backoff).clock(clock.clone())
}

/// Plays `turns`. Returns the last status, the number of tries and the pauses.
async fn play(clock: &Hurried, turns: impl IntoIterator<Item = Turn>) -> (u16, usize, Vec<Duration>) {
    let script = Script::of(turns);
    clock.pauses.lock().unwrap().clear();
    let response = hurried(clock).layer(script.client()).oneshot(to("/pay")).await.unwrap();
    let pauses = clock.pauses.lock().unwrap().clone();
    (response.status().as_u16(), script.tries(), pauses)
}

fn busy(retry_after: &'static str) -> Turn {
    Turn::Whole(503, vec![("retry-after", retry_after)], "later")
}

#[tokio::test]
async fn a_client_that_gets_a_retry_after_of_zero_waits_for_its_backoff() {
    let clock = Hurried::default();
    let (status, tries, pauses) = play(&clock, [busy("0"), busy("0"), busy("0"), busy("0")]).await;
    assert_eq!((status, tries), (200, 5));
    for (pause, longest) in pauses.iter().zip([1, 2, 4, 8].map(|times| times * u128::from(FIRST))) {
        assert!((longest / 2..=longest).contains(&pause.as_millis()), "{pauses:?}");
    }
}

#[tokio::test]
async fn a_client_randomly_lengthens_the_pause_that_a_server_asks_for() {
    let clock = Hurried::default();
    let mut all = std::collections::HashSet::new();
    for _ in 0..50 {
        let (_, _, pauses) = play(&clock, [busy("8")]).await;
        assert!((Duration::from_secs(8)..=Duration::from_secs(10)).contains(&pauses[0]), "{pauses:?}");
        all.insert(pauses[0]);
    }
    assert!(all.len() > 10, "clients with the same `Retry-After` retry at the same time: {all:?}");
}

#[tokio::test]
async fn a_date_in_retry_after_is_a_time_of_the_wall_clock() {
    // The wall clock shows 21 Oct 2015, 07:28:00.
    let clock = Hurried::at(Duration::from_secs(1_445_412_480));
    for (date, seconds) in [
        ("Wed, 21 Oct 2015 07:28:08 GMT", 8),
        // The next two dates have obsolete formats.
        ("Wednesday, 21-Oct-15 07:28:08 GMT", 8),
        ("Wed Oct 21 07:28:08 2015", 8),
    ] {
        let (status, tries, pauses) = play(&clock, [busy(date)]).await;
        assert_eq!((status, tries), (200, 2), "{date}");
        let asked = Duration::from_secs(seconds);
        assert!((asked..=asked * 5 / 4).contains(&pauses[0]), "{date}: {pauses:?}");
        // A 409 with a date says that the first try still runs.
        let conflict = Turn::Whole(409, vec![("retry-after", date)], "runs");
        assert_eq!(play(&clock, [conflict]).await.0, 200, "{date}");
    }
    // A date in the past asks for no pause, so the client uses its backoff.
    let (status, tries, pauses) = play(&clock, [busy("Wed, 21 Oct 2015 07:27:00 GMT")]).await;
    assert_eq!((status, tries), (200, 2));
    assert!((50..=100).contains(&pauses[0].as_millis()), "{pauses:?}");
    // The client is not willing to wait until this date.
    assert_eq!(play(&clock, [busy("Wed, 21 Oct 2015 09:00:00 GMT")]).await, (503, 1, vec![]));
    assert_eq!(play(&clock, [busy("Fri, 31 Dec 9999 23:59:59 GMT")]).await, (503, 1, vec![]));
    // The number of seconds exceeds every integer type.
    assert_eq!(play(&clock, [busy("99999999999999999999999")]).await, (503, 1, vec![]));
    // These texts are no dates: the client uses its backoff, and a 409 is final.
    for text in ["soon", "Wed, 21 Oct 2015 07:28:08", "+5", "-5", "1.5", "Wed, 32 Oct 2015 07:28:08 GMT"] {
        let (status, _, pauses) = play(&clock, [busy(text)]).await;
        assert_eq!((status, pauses.len()), (200, 1), "{text}");
        assert!(pauses[0].as_millis() <= 100, "{text}: {pauses:?}");
        assert_eq!(play(&clock, [Turn::Whole(409, vec![("retry-after", text)], "")]).await.0, 409, "{text}");
    }
    // If a response has two `Retry-After` fields, the client waits for the longer pause.
    let two = vec![("retry-after", "1"), ("retry-after", "8")];
    let (_, _, pauses) = play(&clock, [Turn::Whole(503, two, "")]).await;
    assert!(pauses[0] >= Duration::from_secs(8), "{pauses:?}");
}

#[tokio::test]
async fn the_header_stripe_should_retry_outranks_the_status() {
    let clock = Hurried::default();
    for status in [400, 402, 409, 422, 501] {
        let turn = Turn::Whole(status, vec![("stripe-should-retry", "true")], "");
        assert_eq!(play(&clock, [turn]).await.0, 200, "{status}");
    }
    for status in [408, 409, 429, 500, 503] {
        let turn = Turn::Whole(status, vec![("stripe-should-retry", "false"), ("retry-after", "1")], "");
        assert_eq!(play(&clock, [turn]).await, (status, 1, vec![]), "{status}");
    }
    // The client pauses for as long as the server asks for.
    let turn = Turn::Whole(409, vec![("stripe-should-retry", "true"), ("retry-after", "8")], "");
    assert!(play(&clock, [turn]).await.2[0] >= Duration::from_secs(8));
    // Any other value has no effect.
    assert_eq!(play(&clock, [Turn::Whole(400, vec![("stripe-should-retry", "maybe")], "")]).await.0, 400);
    assert_eq!(play(&clock, [Turn::Whole(500, vec![("stripe-should-retry", "")], "")]).await.0, 200);
}

#[tokio::test]
async fn a_response_body_that_breaks_off_is_retried() {
    for status in [200, 201, 402, 503] {
        let script = Script::of([Turn::Breaks(status, "half of th")]);
        let response = hurried(&Hurried::default()).layer(script.client()).oneshot(to("/pay")).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "done", "{status}");
        let keys = script.keys.lock().unwrap();
        assert!(keys.len() == 2 && keys[0] == keys[1], "{keys:?}");
    }
}

/// Text of a response, read to its end.
async fn text<B>(response: Response<B>) -> Result<String, B::Error>
where
    B: http_body::Body<Data = Bytes>,
{
    let bytes = response.into_body().collect().await?.to_bytes();
    Ok(String::from_utf8(bytes.into()).unwrap())
}

#[tokio::test]
async fn the_part_that_arrived_of_a_broken_response_is_in_the_error() {
    let script = Script::of((0..5).map(|_| Turn::Breaks(201, "half of th")));
    let error = hurried(&Hurried::default()).layer(script.client()).oneshot(to("/pay")).await.unwrap_err();
    assert!(matches!(error, RetryError::BrokenBody { limit: RetryLimit::Tries, .. }), "{error:?}");
    let last = error.last_response().unwrap();
    assert_eq!((last.status().as_u16(), &last.body()[..]), (201, &b"half of th"[..]));
    assert_eq!(error.key().map(CallKey::as_str), script.keys.lock().unwrap()[4].as_deref());
    assert!(error.was_sent());
    let said = error.to_string();
    assert!(said.contains("201") && said.contains("broke off") && said.contains("same key"), "{said}");
}

#[tokio::test]
async fn the_error_of_a_failed_last_try_holds_the_response_of_an_earlier_try() {
    let mut turns = vec![Turn::Whole(409, vec![("retry-after", "1"), ("x-charge", "7")], "still runs")];
    turns.extend((0..4).map(|_| Turn::Fails("connection refused")));
    let script = Script::of(turns);
    let error = hurried(&Hurried::default()).layer(script.client()).oneshot(to("/pay")).await.unwrap_err();
    assert_eq!((script.tries(), error.limit()), (5, Some(RetryLimit::Tries)));
    let last = error.last_response().unwrap();
    assert_eq!(
        (last.status().as_u16(), &last.headers()["x-charge"], &last.body()[..]),
        (409, &"7".parse().unwrap(), &b"still runs"[..])
    );
    assert!(error.to_string().contains("connection refused"), "{error}");
    // If no try got a response, the error holds no response.
    let script = Script::of((0..5).map(|_| Turn::Fails("connection refused")));
    let error = hurried(&Hurried::default()).layer(script.client()).oneshot(to("/pay")).await.unwrap_err();
    assert!(error.last_response().is_none());
}

#[tokio::test]
async fn the_last_response_names_the_limit_that_ended_the_tries() {
    let clock = Hurried::default();
    let limits = async |turns: Vec<Turn>, layer: RetryLayer| {
        let response = layer.layer(Script::of(turns).client()).oneshot(to("/pay")).await.unwrap();
        (response.status().as_u16(), response.extensions().get::<RetryLimit>().copied())
    };
    let busy_for_long = || (0..9).map(|_| busy("1")).collect::<Vec<_>>();
    assert_eq!(limits(busy_for_long(), hurried(&clock)).await, (503, Some(RetryLimit::Tries)));
    assert_eq!(limits(vec![busy("61")], hurried(&clock)).await, (503, Some(RetryLimit::Pause)));
    assert_eq!(limits(vec![busy("60")], hurried(&clock)).await, (200, None));
    let none = hurried(&clock).budget(RetryBudget::new(0, 0));
    assert_eq!(limits(vec![busy("1")], none.clone()).await, (503, Some(RetryLimit::Budget)));
    assert_eq!(limits(vec![Turn::Whole(402, vec![], "")], none).await, (402, None), "a final response has no limit");
    assert_eq!(limits(busy_for_long(), hurried(&clock).max_tries(0)).await, (503, Some(RetryLimit::Tries)));
}

#[tokio::test]
async fn clones_of_a_layer_share_a_budget() {
    let layer = hurried(&Hurried::default()).budget(RetryBudget::new(50, 2));
    let derived = layer.clone().quoted(true);
    let tries = async |layer: &RetryLayer| {
        let script = Script::of((0..9).map(|_| busy("1")));
        let response = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap();
        assert_eq!(response.extensions().get(), Some(&RetryLimit::Budget));
        script.tries()
    };
    assert_eq!(tries(&layer).await, 3, "the reserve allows two retries");
    // When the reserve is used up, every second request gets one retry.
    for _ in 0..3 {
        assert_eq!((tries(&layer.clone()).await, tries(&derived).await), (1, 2));
    }
    // A request that needs no retry spends nothing of the budget, and adds half a retry to it.
    let answered = layer.layer(Script::default().client()).oneshot(to("/pay")).await.unwrap();
    assert!(answered.extensions().get::<RetryLimit>().is_none());
    assert_eq!(tries(&derived).await, 2);
    // Another layer has a budget of its own.
    assert_eq!(tries(&hurried(&Hurried::default()).budget(RetryBudget::new(0, 1))).await, 2);
}

#[tokio::test]
async fn a_response_body_beyond_the_limit_streams() {
    const LIMIT: usize = 8;
    let layer = hurried(&Hurried::default()).max_body_bytes(LIMIT);
    let reply = async |turn: Turn| {
        let script = Script::of([turn]);
        let response = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap();
        assert_eq!((response.status().as_u16(), script.tries()), (201, 1));
        response
    };
    // A body that does not exceed the limit is read whole.
    let response = reply(Turn::Body(201, frames([Ok("1234"), Ok("5678")]))).await;
    assert!(response.body().is_whole());
    assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(8));
    assert_eq!(text(response).await.unwrap(), "12345678");
    // A longer body streams from its beginning.
    let response = reply(Turn::Body(201, frames([Ok("1234"), Ok("5678"), Ok("9"), Ok("10")]))).await;
    assert!(!response.body().is_whole());
    assert_eq!(text(response).await.unwrap(), "12345678910");
    // If a streaming body breaks off, the application gets the error.
    let response = reply(Turn::Body(201, frames([Ok("123456789"), Err("broke off")]))).await;
    assert!(response.extensions().get::<CallKey>().is_some());
    assert!(text(response).await.unwrap_err().to_string().contains("broke off"));
    // Frames without data use up nothing of the limit.
    let empty = std::iter::repeat_n(Ok(""), 10_000).chain([Ok("12345678")]);
    let response = reply(Turn::Body(201, frames(empty.collect::<Vec<_>>()))).await;
    assert!(response.body().is_whole());
    assert_eq!(response.into_body().frame().await.unwrap().unwrap().into_data().unwrap(), "12345678");
    // A body with an announced length beyond the limit streams without being read first.
    let response = reply(Turn::Body(201, Body::from("123456789"))).await;
    assert!(!response.body().is_whole());
    assert_eq!(text(response).await.unwrap(), "123456789");
}

/// Body that sends `text` and stays open.
fn open_body(text: &'static str) -> Body {
    let first = futures::stream::iter([Ok::<_, BoxError>(Bytes::from_static(text.as_bytes()))]);
    Body::from_stream(futures::StreamExt::chain(first, futures::stream::pending()))
}

#[tokio::test]
async fn a_client_passes_on_a_stream_of_events_as_it_comes() {
    let layer = hurried(&Hurried::default());
    for (layer, kind) in [
        (layer.clone(), "text/event-stream"),
        (layer.clone(), "Text/Event-Stream; charset=utf-8"),
        (layer.max_body_bytes(0), "application/json"),
    ] {
        let inner = service_fn(move |_: Request<Small>| async move {
            Ok::<_, BoxError>(answer(200, &[("content-type", kind)], open_body("first")))
        });
        let answered = layer.layer(inner).oneshot(to("/pay")).now_or_never();
        let response = answered.expect("the stream is not read to its end").unwrap();
        assert_eq!(response.into_body().frame().await.unwrap().unwrap().into_data().unwrap(), "first", "{kind}");
    }
}

#[tokio::test]
async fn a_client_that_reads_a_response_keeps_its_trailers() {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    let all = [Frame::data(Bytes::from("text")), Frame::trailers(trailers.clone())].map(Ok::<_, BoxError>);
    let body = Body::new(StreamBody::new(futures::stream::iter(all)));
    let script = Script::of([Turn::Body(200, body)]);
    let response = hurried(&Hurried::default()).layer(script.client()).oneshot(to("/pay")).await.unwrap();
    assert!(response.body().is_whole());
    let reply = Reply::of(response).await.unwrap();
    assert_eq!((reply.text(), reply.trailers.as_ref()), ("text", Some(&trailers)));
}

#[tokio::test]
async fn a_try_that_exceeds_its_time_limit_is_repeated() {
    let layer = hurried(&Hurried::default()).try_timeout(Duration::from_secs(30));
    // The server hangs before its response, or in the middle of the body.
    for turn in [Turn::Hangs, Turn::Body(200, open_body("half"))] {
        let script = Script::of([turn]);
        let response = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap();
        assert_eq!((text(response).await.unwrap(), script.tries()), ("done".to_owned(), 2));
    }
    let turns = (0..4).map(|_| Turn::Hangs).chain([Turn::Body(201, open_body("half"))]);
    let script = Script::of(turns);
    let error = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap_err();
    assert!(matches!(error, RetryError::TimedOut { limit: Some(RetryLimit::Tries), .. }), "{error:?}");
    assert_eq!(error.key().map(CallKey::as_str), script.keys.lock().unwrap()[0].as_deref());
    let last = error.last_response().unwrap();
    assert_eq!((last.status().as_u16(), &last.body()[..]), (201, &b"half"[..]));
}

#[tokio::test]
async fn a_dropped_client_call_sends_no_further_request() {
    let clock = ManualClock::new();
    let script = Script::of([busy("1")]);
    let layer = RetryLayer::new().clock(clock.clone());
    let mut calling = Box::pin(layer.layer(script.client()).oneshot(to("/pay")));
    assert!(futures::poll!(&mut calling).is_pending(), "the pause has begun");
    assert!(clock.next_wake().is_some_and(|pause| pause >= Duration::from_secs(1)));
    drop(calling);
    clock.advance(Duration::from_secs(10));
    assert_eq!(script.tries(), 1);
}

#[tokio::test]
async fn an_inner_client_that_accepts_no_more_requests_ends_the_tries() {
    // The worker of a buffer dies with its service, which panics at the second request.
    let script = Script::of([busy("1")]);
    let inner = script.client();
    let closing = service_fn(move |request: Request<Small>| {
        assert_eq!(script.tries(), 0, "on purpose");
        inner.clone().oneshot(request)
    });
    let client = hurried(&Hurried::default()).layer(tower::buffer::Buffer::new(closing, 1));
    let error = client.oneshot(to("/pay")).await.unwrap_err();
    assert_eq!(error.last_response().map(|it| it.status().as_u16()), Some(503));
    assert!(error.key().is_some() && error.was_sent());
}
