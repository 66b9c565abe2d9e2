//! A small server that follows the rules of a profile, with a switch for each mistake.
#![allow(clippy::disallowed_methods)] // Operations take their time.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use serde_json::{Value, json};

macro_rules! mistakes {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Mistake of a server.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub(crate) enum Mistake {
            $($(#[$doc])* $name,)*
        }

        impl Mistake {
            /// All mistakes.
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

mistakes! {
    /// The mistake: the server records nothing.
    RunsAgain,
    /// The mistake: the server writes the record only after it has sent the response.
    RecordsLate,
    /// The mistake: a response with the status 201 is replayed with the status 200.
    StatusLost,
    /// The mistake: a replay has no body.
    BodyLost,
    /// The mistake: equal payloads of quick operations are treated as one operation, even under different keys.
    KeyFromPayload,
    /// The mistake: keys are compared without regard to case.
    CaseIgnored,
    /// The mistake: the server compares only the first 200 characters of a key.
    KeysCutShort,
    /// The mistake: the server accepts keys of any length.
    LongAccepted,
    /// The mistake: the server accepts short keys, which can be guessed.
    ShortAccepted,
    /// The mistake: an empty field is treated as a key.
    EmptyAccepted,
    /// The mistake: `""` is treated as a key.
    QuotedEmptyAccepted,
    /// The mistake: no key is required although the profile requires one.
    KeyNotRequired,
    /// The mistake: a key is required although the profile requires none.
    KeyRequired,
    /// The mistake: all requests without a key share one key.
    NoKeyIsAKey,
    /// The mistake: the server refuses a key that contains an escaped quotation mark.
    EscapesRefused,
    /// The mistake: `"k"` and `k` are treated as two keys.
    QuotesKept,
    /// The mistake: `"k"` and `"k";v=1` are treated as two keys.
    ParametersKept,
    /// The mistake: the server uses a malformed field as a key, unchanged.
    MalformedAccepted,
    /// The mistake: a field that is not a String of RFC 8941 is ignored.
    MalformedIgnored,
    /// The mistake: the server accepts only UUIDs in quotation marks as keys.
    OnlyUuids,
    /// The mistake: of several field lines the server uses the first, and ignores the others.
    FirstLineCounts,
    /// The mistake: of a list of keys the server uses the first, and ignores the others.
    FirstOfListCounts,
    /// The mistake: payloads are not compared.
    PayloadIgnored,
    /// The mistake: a request with another payload is refused, but its payload replaces the recorded one.
    PayloadOverwrites,
    /// The mistake: while a request runs, another payload under its key is refused like a duplicate.
    PayloadComparedLate,
    /// The mistake: a request with another payload runs if the first request is still running.
    OtherPayloadRuns,
    /// The mistake: all routes share their keys, and the route is not part of the payload.
    RouteIgnored,
    /// The mistake: all methods share their keys.
    MethodIgnored,
    /// The mistake: the query is not part of the payload.
    QueryIgnored,
    /// The mistake: the language that the client accepts is part of the payload.
    LanguageCompared,
    /// The mistake: the server ignores the key of a PUT.
    PutUnprotected,
    /// The mistake: bodies are compared by their bytes although the profile compares JSON.
    BytesCompared,
    /// The mistake: numbers in bodies are compared as text, so `1` differs from `1.0`.
    NumbersAsWritten,
    /// The mistake: bodies are compared as JSON although the profile compares bytes.
    JsonCompared,
    /// The mistake: a member with the value `null` is treated as an absent member.
    NullIsAbsent,
    /// The mistake: arrays in bodies are compared without regard to the order of their elements.
    ArraysAreSets,
    /// The mistake: a duplicate of a running request runs the operation again.
    RunningIsFree,
    /// The mistake: a duplicate of a running request waits for the response instead of being refused.
    RunningIsAwaited,
    /// The mistake: a response with the status 409 has no `Retry-After`.
    NoRetryAfter,
    /// The mistake: the refusal of a duplicate of a running request has the code of another problem.
    RunningHasAnotherCode,
    /// The mistake: the refusal of a request without a key has the code of another problem.
    MissingKeyHasAnotherCode,
    /// The mistake: the refusal of a request without a key has no link.
    MissingKeyHasNoLink,
    /// The mistake: the refusal of another payload has no link.
    PayloadHasNoLink,
    /// The mistake: the refusal of a duplicate of a running request has no body.
    RunningHasNoBody,
    /// The mistake: the server reads first and writes later, so two requests may both find no record.
    ReadThenWrite,
    /// The mistake: the server looks for a record only at the first request of each connection.
    LooksOncePerConnection,
    /// The mistake: the server reserves the key before the body has arrived.
    ReservesBeforeBody,
    /// The mistake: when the client hangs up, the server cancels the operation and frees the key.
    CancelledWithClient,
    /// The mistake: the server records a response only after the client has received it.
    RecordsTheDelivered,
    /// The mistake: the server does not record a large response.
    LargeForgotten,
    /// The mistake: all callers share their keys.
    CallerIgnored,
    /// The mistake: the token identifies the caller, so a new token makes a new caller.
    TokenIsTheCaller,
    /// The mistake: all requests without credentials are treated as requests of one caller.
    NobodyIsSomebody,
    /// The mistake: the refusal of a request without credentials is recorded.
    RefusalIsRecorded,
    /// The mistake: a request without credentials gets a recorded response if it sends the key of that response.
    NobodyGetsReplays,
    /// The mistake: the server records only successful responses.
    ErrorsForgotten,
    /// The mistake: the server does not record a response with a 5xx status, so a retry runs again.
    ServerErrorForgotten,
    /// The mistake: the server records a response with a 5xx status, so a retry gets the error again.
    ServerErrorRecorded,
    /// The mistake: the responses do not repeat the key.
    KeyNotRepeated,
    /// The mistake: refusals do not repeat the key.
    KeyNotRepeatedInRefusals,
    /// The mistake: a replay has no header field that marks it as a replay.
    NotMarked,
    /// The mistake: every response is marked as a replay.
    AllMarked,
    /// The mistake: of the headers, the server records only the content type.
    HeadersLost,
    /// The mistake: of several header fields with one name, the server records only one.
    HeadersCollapsed,
    /// The mistake: the server records a cookie, and replays it.
    CookieReplayed,
    /// The mistake: a refusal has only a status, and no body.
    BareRefusals,
}

/// A response in its recorded form.
#[derive(Clone, Debug)]
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Bytes,
}

#[derive(Debug)]
struct Record {
    /// Payload of the first request; `None` until its body has arrived.
    payload: Option<String>,
    /// Recorded response; `None` while the operation runs.
    answer: Option<Answer>,
}

#[derive(Debug)]
pub(crate) struct Server {
    profile: &'static str,
    mistakes: &'static [Mistake],
    runs: AtomicU64,
    records: Mutex<HashMap<String, Record>>,
    connections: Mutex<HashSet<SocketAddr>>,
}

/// Reason for refusing a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refusal {
    Key,
    Payload,
    Running,
    Caller,
}

/// Starts a server that runs until the test ends.
pub(crate) async fn serve(profile: &'static str, mistakes: &'static [Mistake]) -> SocketAddr {
    listen(app(profile, mistakes)).await
}

/// Starts a server without a mistake that closes each connection after a response.
pub(crate) async fn serve_and_close(profile: &'static str) -> SocketAddr {
    let close = async |mut response: Response| {
        response.headers_mut().insert("connection", HeaderValue::from_static("close"));
        response
    };
    listen(app(profile, &[]).layer(axum::middleware::map_response(close))).await
}

fn app(profile: &'static str, mistakes: &'static [Mistake]) -> Router {
    let (records, connections) = (Mutex::default(), Mutex::default());
    let server = Arc::new(Server { profile, mistakes, runs: AtomicU64::new(0), records, connections });
    Router::new().fallback(handle).with_state(server)
}

async fn listen(app: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

async fn handle(
    State(server): State<Arc<Server>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
) -> Response {
    if request.uri().path() == "/count" {
        let count = json!({ "runs": server.runs.load(Ordering::SeqCst) });
        return Response::new(Body::from(count.to_string()));
    }
    let key = request.headers().get("idempotency-key").cloned();
    let (mut response, is_refusal) = match server.pay(peer, request).await {
        Ok(response) => (response, false),
        Err(refusal) => (server.refuse(refusal), true),
    };
    let is_forgotten =
        server.has(Mistake::KeyNotRepeated) || (is_refusal && server.has(Mistake::KeyNotRepeatedInRefusals));
    if let Some(key) = key.filter(|_| server.profile == "acp" && !is_forgotten) {
        response.headers_mut().insert("idempotency-key", key);
    }
    response
}

impl Server {
    fn has(&self, mistake: Mistake) -> bool {
        self.mistakes.contains(&mistake)
    }

    async fn pay(self: &Arc<Self>, peer: SocketAddr, request: Request) -> Result<Response, Refusal> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        let key = self.key(&head.headers)?;
        // Each caller has its own keys, so the server identifies the caller before it uses the key.
        let caller = match (self.caller(&head.headers), &key) {
            (Some(caller), _) => caller,
            (None, _) if self.has(Mistake::NobodyIsSomebody) => "nobody".to_owned(),
            (None, Some(key)) if self.has(Mistake::NobodyGetsReplays) => {
                let known = self.find(&format!("alice {} {key}", head.method));
                return known.map(|answer| self.replay(answer)).ok_or(Refusal::Caller);
            }
            (None, Some(key)) if self.has(Mistake::RefusalIsRecorded) => {
                let answer = Answer { status: 401, headers: Vec::new(), body: Bytes::new() };
                let record = Record { payload: None, answer: Some(answer) };
                self.records.lock().unwrap().insert(format!("alice {} {key}", head.method), record);
                return Err(Refusal::Caller);
            }
            _ => return Err(Refusal::Caller),
        };
        // The profile decides whether a key is required.
        let key = match key {
            Some(key) => Some(key),
            None if self.has(Mistake::NoKeyIsAKey) => Some("none".to_owned()),
            None if (self.profile == "stripe" || self.has(Mistake::KeyNotRequired))
                && !self.has(Mistake::KeyRequired) =>
            {
                None
            }
            None => return Err(Refusal::Key),
        };
        let caller = if self.has(Mistake::CallerIgnored) { "all" } else { &caller };
        let route = if self.profile == "acp" && !self.has(Mistake::RouteIgnored) { &*path } else { "" };
        let method = if self.has(Mistake::MethodIgnored) { "" } else { head.method.as_str() };
        // The identity of the operation: caller, method, route and key, unless a mistake leaves out a part.
        let mut id = key.map(|key| format!("{caller} {method} {route}{key}"));
        if head.method == Method::PUT && self.has(Mistake::PutUnprotected) {
            id = None;
        }
        let mut is_reserved = false;
        if let Some(id) = &id
            && self.has(Mistake::ReservesBeforeBody)
        {
            let mut records = self.records.lock().unwrap();
            let record = records.get(id);
            is_reserved = record.is_none();
            if record.is_some_and(|record| record.answer.is_none()) {
                return Err(Refusal::Running);
            }
            if is_reserved {
                records.insert(id.clone(), Record { payload: None, answer: None });
            }
        }
        // A correct server reserves the key only after the body has arrived.
        let body = body.collect().await.map_err(|_| Refusal::Key)?.to_bytes();
        let payload = self.payload(&head, &body);
        if self.has(Mistake::KeyFromPayload) && !payload.contains("takes_ms") {
            id = Some(payload.clone());
        }
        // The operation runs unprotected if the request has no key, or if `LooksOncePerConnection` skips the
        // search for a record.
        let is_first = self.connections.lock().unwrap().insert(peer);
        let Some(id) = id.filter(|_| is_first || !self.has(Mistake::LooksOncePerConnection)) else {
            return Ok(self.respond(self.operate(&path, &body).await));
        };
        if is_reserved {
            self.records.lock().unwrap().get_mut(&id).unwrap().payload = Some(payload);
        } else if let Some(answer) = self.reserve(&id, payload).await? {
            return Ok(self.replay(answer));
        }
        // A correct server runs the operation in its own task, so a hang-up does not cancel it.
        let running = Arc::clone(self).run(id.clone(), path, body);
        let mut guard = Forget { server: Arc::clone(self), id: Some(id) };
        let answer = match self.has(Mistake::CancelledWithClient) {
            true => running.await,
            false if self.has(Mistake::RecordsTheDelivered) => tokio::spawn(running).await.unwrap(),
            false => {
                // From here on, a hang-up of the client no longer removes the record.
                guard.id = None;
                tokio::spawn(running).await.unwrap()
            }
        };
        if self.has(Mistake::RecordsTheDelivered) {
            let answer_once_delivered = self.recorded(&answer);
            return Ok(self
                .respond(answer)
                .map(|body| Body::new(Guarded { body, guard, answer: answer_once_delivered })));
        }
        guard.id = None;
        Ok(self.respond(answer))
    }

    /// Returns the recorded response, or `None` if this request now holds the key.
    async fn reserve(&self, id: &str, payload: String) -> Result<Option<Answer>, Refusal> {
        loop {
            if self.has(Mistake::ReadThenWrite) {
                let is_known = self.records.lock().unwrap().contains_key(id);
                tokio::time::sleep(Duration::from_millis(50)).await;
                if !is_known {
                    let record = Record { payload: Some(payload), answer: None };
                    self.records.lock().unwrap().insert(id.to_owned(), record);
                    return Ok(None);
                }
            }
            {
                let mut records = self.records.lock().unwrap();
                let Some(record) = records.get_mut(id) else {
                    records.insert(id.to_owned(), Record { payload: Some(payload), answer: None });
                    return Ok(None);
                };
                let differs = record.payload.as_ref().is_some_and(|known| *known != payload);
                match &record.answer {
                    _ if differs && self.has(Mistake::PayloadOverwrites) => {
                        record.payload = Some(payload);
                        return Err(Refusal::Payload);
                    }
                    None if self.has(Mistake::RunningIsFree) => return Ok(None),
                    None if differs && self.has(Mistake::OtherPayloadRuns) => return Ok(None),
                    None if self.has(Mistake::PayloadComparedLate) => return Err(Refusal::Running),
                    _ if differs => return Err(Refusal::Payload),
                    Some(answer) => return Ok(Some(answer.clone())),
                    None if self.has(Mistake::RunningIsAwaited) => {}
                    None => return Err(Refusal::Running),
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn run(self: Arc<Self>, id: String, path: String, body: Bytes) -> Answer {
        let answer = self.operate(&path, &body).await;
        let is_kept = match answer.status {
            _ if self.has(Mistake::RunsAgain) => false,
            status if self.has(Mistake::ErrorsForgotten) => status < 300,
            500.. if self.has(Mistake::ServerErrorRecorded) => true,
            500.. => self.profile == "stripe" && !self.has(Mistake::ServerErrorForgotten),
            _ => !(self.has(Mistake::LargeForgotten) && answer.body.len() > 1_000_000),
        };
        let recorded = is_kept.then(|| self.recorded(&answer));
        if self.has(Mistake::RecordsLate) {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(500)).await;
                self.record(&id, recorded);
            });
        } else if !self.has(Mistake::RecordsTheDelivered) {
            self.record(&id, recorded);
        }
        answer
    }

    fn record(&self, id: &str, answer: Option<Answer>) {
        let mut records = self.records.lock().unwrap();
        match (answer, records.get_mut(id)) {
            (Some(answer), Some(record)) => record.answer = Some(answer),
            _ => drop(records.remove(id)),
        }
    }

    fn find(&self, id: &str) -> Option<Answer> {
        self.records.lock().unwrap().get(id)?.answer.clone()
    }

    /// Runs the operation that the body describes.
    async fn operate(&self, path: &str, body: &[u8]) -> Answer {
        let run = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
        let asked: Value = serde_json::from_slice(body).unwrap_or_default();
        let number = |name: &str| asked[name].as_u64().unwrap_or_default();
        tokio::time::sleep(Duration::from_millis(number("takes_ms"))).await;
        let text = "x".repeat(number("bytes").try_into().unwrap());
        let headers = vec![
            ("content-type", "application/json".to_owned()),
            ("location", format!("{path}/{run}")),
            ("link", format!("<{path}/{run}>; rel=\"self\"")),
            ("link", "</contract>; rel=\"describedby\"".to_owned()),
            ("cache-control", "no-store".to_owned()),
            ("set-cookie", format!("last={run}")),
        ];
        let status = asked["status"].as_u64().map_or(201, |status| status.try_into().unwrap());
        Answer { status, headers, body: format!(r#"{{"path":"{path}","run":{run},"text":"{text}"}}"#).into() }
    }

    fn recorded(&self, answer: &Answer) -> Answer {
        let mut answer = answer.clone();
        let mut links = 0;
        answer.headers.retain(|(name, _)| {
            links += u8::from(*name == "link");
            match *name {
                "set-cookie" => self.has(Mistake::CookieReplayed),
                "link" if self.has(Mistake::HeadersCollapsed) => links == 1,
                "content-type" => true,
                _ => !self.has(Mistake::HeadersLost),
            }
        });
        if self.has(Mistake::StatusLost) {
            answer.status = 200;
        }
        if self.has(Mistake::BodyLost) {
            answer.body = Bytes::new();
        }
        answer
    }

    fn respond(&self, mut answer: Answer) -> Response {
        if self.has(Mistake::AllMarked) {
            answer.headers.push(("idempotent-replayed", "true".to_owned()));
        }
        response(answer)
    }

    fn replay(&self, mut answer: Answer) -> Response {
        if !self.has(Mistake::NotMarked) {
            answer.headers.push(("idempotent-replayed", "true".to_owned()));
        }
        response(answer)
    }

    fn refuse(&self, refusal: Refusal) -> Response {
        let status = match (refusal, self.profile) {
            (Refusal::Caller, _) => 401,
            (Refusal::Payload, "ietf" | "acp") => 422,
            (Refusal::Key, _) | (Refusal::Payload, "stripe") => 400,
            (Refusal::Running | Refusal::Payload, _) => 409,
        };
        let code = match refusal {
            Refusal::Running if !self.has(Mistake::RunningHasAnotherCode) => "idempotency_in_flight",
            Refusal::Key if !self.has(Mistake::MissingKeyHasAnotherCode) => "idempotency_key_required",
            _ => "idempotency_conflict",
        };
        let has_no_link = match refusal {
            Refusal::Key => self.has(Mistake::MissingKeyHasNoLink),
            Refusal::Payload => self.has(Mistake::PayloadHasNoLink),
            Refusal::Running | Refusal::Caller => false,
        };
        let (content_type, body) = match self.profile {
            _ if has_no_link => ("application/json", json!({ "error": "Refused" })),
            "ietf" => ("application/problem+json", json!({ "title": "Refused", "type": code })),
            "stripe" => ("application/json", json!({ "error": { "type": "idempotency_error", "message": "Refused" } })),
            "acp" => ("application/json", json!({ "type": "invalid_request", "code": code, "message": "Refused" })),
            _ => ("application/json", json!({ "code": code, "content": "Refused" })),
        };
        let mut answer =
            Answer { status, headers: vec![("content-type", content_type.to_owned())], body: body.to_string().into() };
        if refusal == Refusal::Running && !self.has(Mistake::NoRetryAfter) {
            answer.headers.push(("retry-after", "1".to_owned()));
        }
        if self.has(Mistake::BareRefusals) || (refusal == Refusal::Running && self.has(Mistake::RunningHasNoBody)) {
            answer = Answer { headers: Vec::new(), body: Bytes::new(), ..answer };
        }
        response(answer)
    }

    fn caller(&self, headers: &HeaderMap) -> Option<String> {
        let token = headers.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")?;
        match token {
            _ if self.has(Mistake::TokenIsTheCaller) => Some(token.to_owned()),
            "alice-1" | "alice-2" => Some("alice".to_owned()),
            "bob-1" => Some("bob".to_owned()),
            _ => None,
        }
    }

    fn key(&self, headers: &HeaderMap) -> Result<Option<String>, Refusal> {
        let mut lines = headers.get_all("idempotency-key").iter().map(|it| String::from_utf8_lossy(it.as_bytes()));
        let Some(line) = lines.next() else { return Ok(None) };
        if lines.next().is_some() && !self.has(Mistake::FirstLineCounts) {
            return Err(Refusal::Key);
        }
        let line = match line.split_once(", ") {
            Some((first, _)) if self.has(Mistake::FirstOfListCounts) => first,
            _ => line.trim(),
        };
        if self.has(Mistake::MalformedIgnored) && line.strip_prefix('"').and_then(|rest| self.quoted(rest)).is_none() {
            return Ok(None);
        }
        if self.has(Mistake::OnlyUuids) && !is_quoted_uuid(line) {
            return Err(Refusal::Key);
        }
        let read = match line.strip_prefix('"') {
            Some(rest) => self.quoted(rest),
            None => line
                .bytes()
                .all(|byte| matches!(byte, b'!'..=b'~') && !b"\",;\\".contains(&byte))
                .then(|| line.to_owned()),
        };
        let mut key = match read {
            Some(_) if self.has(Mistake::QuotesKept) => line.to_owned(),
            Some(_) if self.has(Mistake::ParametersKept) && line.contains(';') => line.to_owned(),
            Some(key) => key,
            None if self.has(Mistake::MalformedAccepted) => line.to_owned(),
            None => return Err(Refusal::Key),
        };
        let is_accepted = match key.len() {
            0 if line.is_empty() => self.has(Mistake::EmptyAccepted),
            0 => self.has(Mistake::QuotedEmptyAccepted),
            1..22 => self.profile != "ucp" || self.has(Mistake::ShortAccepted),
            256.. => self.has(Mistake::LongAccepted),
            _ => true,
        };
        if self.has(Mistake::CaseIgnored) {
            key.make_ascii_lowercase();
        }
        if self.has(Mistake::KeysCutShort) {
            key.truncate(200);
        }
        is_accepted.then_some(Some(key)).ok_or(Refusal::Key)
    }

    /// Reads a quoted key whose opening quote has been read.
    fn quoted(&self, rest: &str) -> Option<String> {
        let (mut key, mut rest) = (String::new(), rest.chars());
        loop {
            match rest.next()? {
                '"' => {
                    let after = rest.as_str();
                    return (after.is_empty() || after.starts_with(';')).then_some(key);
                }
                '\\' => {
                    let next = rest.next().filter(|c| matches!(c, '"' | '\\'))?;
                    key.push(Some(next).filter(|_| !self.has(Mistake::EscapesRefused))?);
                }
                c @ ' '..='~' => key.push(c),
                _ => return None,
            }
        }
    }

    /// Returns the text by which payloads are compared.
    fn payload(&self, head: &Parts, body: &[u8]) -> String {
        let path = if self.profile == "acp" || self.has(Mistake::RouteIgnored) { "" } else { head.uri.path() };
        let query = head.uri.query().filter(|_| self.profile != "acp" && !self.has(Mistake::QueryIgnored));
        let language = head.headers.get("accept-language").filter(|_| self.has(Mistake::LanguageCompared));
        let target = format!("{path} {query:?} {language:?}");
        let is_json = match self.profile {
            "acp" => !self.has(Mistake::BytesCompared),
            _ => self.has(Mistake::JsonCompared),
        };
        match serde_json::from_slice::<Value>(body) {
            _ if self.has(Mistake::PayloadIgnored) => String::new(),
            Ok(value) if is_json => format!("{target} {}", self.canonical(value)),
            _ => format!("{target} {}", String::from_utf8_lossy(body)),
        }
    }

    fn canonical(&self, value: Value) -> Value {
        match value {
            Value::Object(members) => {
                let kept =
                    members.into_iter().filter(|(_, value)| !(value.is_null() && self.has(Mistake::NullIsAbsent)));
                Value::Object(kept.map(|(name, value)| (name, self.canonical(value))).collect())
            }
            Value::Array(elements) => {
                let mut elements: Vec<_> = elements.into_iter().map(|value| self.canonical(value)).collect();
                if self.has(Mistake::ArraysAreSets) {
                    elements.sort_by_key(ToString::to_string);
                }
                Value::Array(elements)
            }
            Value::Number(number) if !self.has(Mistake::NumbersAsWritten) => json!(number.as_f64()),
            value => value,
        }
    }
}

/// Returns whether the field line is a UUID in quotes.
fn is_quoted_uuid(line: &str) -> bool {
    let inner = line.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    inner.is_some_and(|text| {
        let parts: Vec<_> = text.split('-').map(str::len).collect();
        parts == [8, 4, 4, 4, 12] && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
    })
}

fn response(answer: Answer) -> Response {
    let mut response = Response::builder().status(StatusCode::from_u16(answer.status).unwrap());
    for (name, value) in answer.headers {
        response = response.header(name, value);
    }
    response.body(Body::from(answer.body)).unwrap()
}

/// Guard whose drop removes a record.
#[derive(Debug)]
struct Forget {
    server: Arc<Server>,
    id: Option<String>,
}

impl Drop for Forget {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.server.records.lock().unwrap().remove(&id);
        }
    }
}

/// Body of a response, which is recorded once this body has been read to its end.
struct Guarded {
    body: Body,
    guard: Forget,
    answer: Answer,
}

impl http_body::Body for Guarded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None))
            && let Some(id) = self.guard.id.take()
        {
            self.guard.server.record(&id, Some(self.answer.clone()));
        }
        frame
    }
}
