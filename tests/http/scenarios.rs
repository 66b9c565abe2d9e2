//! Scenarios of other libraries as data: each step is a request and the response that the other library expects. A
//! difference between this expectation and the layer's answer is deliberate if the table of `docs/http.md` lists the
//! scenario.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use http::header::HeaderName;
use http::{Method, Request, Response};
use idem_runtime::clock::ManualClock;
use idem_runtime::http::{Caller, IdempotencyLayer, JsonMembers, request_key};
use idem_runtime::store::{OwnerToken, ReserveRequest};
use idem_runtime::{Error, InProgress, MemoryStore, MissingKey, Operation, Store, StoreErrorKind};
use idem_tests::{Fault, FaultyStore, StoreCall};
use serde_json::{Value, json};

use crate::rig::*;

/// Scenarios, and the settings of the layer that they run with.
pub(crate) struct Suite {
    pub(crate) text: &'static str,
    pub(crate) marker: HeaderName,
    pub(crate) problem_base: &'static str,
    pub(crate) in_progress: InProgress,
    /// Section of `docs/http.md` with the table of deliberate differences.
    pub(crate) section: &'static str,
}

impl Suite {
    /// Runs every scenario, and asserts that the layer differs exactly as `expected` and the documented table say. Each
    /// element of `expected` is a scenario, a step with its expectation, and the layer's own answer.
    pub(crate) async fn run(&self, expected: &[(&str, &str, &str)]) {
        let suite: Value = serde_json::from_str(self.text).unwrap();
        let (mut differences, mut unequal) = (BTreeSet::new(), BTreeSet::new());
        for scenario in suite["scenarios"].as_array().unwrap() {
            let id = scenario["id"].as_str().unwrap();
            if scenario["not_run"].is_string() {
                unequal.insert(id.to_owned());
                continue;
            }
            let unmet = Shop::open(self, &scenario["config"]).await.play(scenario).await;
            differences.extend(unmet.into_iter().map(|(expectation, here)| (id.to_owned(), expectation, here)));
        }
        let own =
            |(id, expectation, here): &(&str, &str, &str)| (id.to_string(), expectation.to_string(), here.to_string());
        assert_eq!(
            differences,
            expected.iter().map(own).collect(),
            "the differences of the layer are not the expected ones"
        );
        unequal.extend(differences.into_iter().map(|(id, ..)| id));
        assert_eq!(
            documented(self.section),
            unequal,
            "rows of {:?} in docs/http.md, and the differences",
            self.section
        );
    }
}

/// Returns the texts in backticks in the first column of the table in this section of `docs/http.md`.
pub(crate) fn documented(section: &str) -> BTreeSet<String> {
    let page = include_str!("../../docs/http.md");
    let (_, rest) = page.split_once(&format!("\n### {section}\n")).expect("the section");
    let rows = rest.lines().take_while(|line| !line.starts_with('#')).filter_map(|line| line.strip_prefix("| `"));
    rows.flat_map(|row| row.split(" | ").next().expect("a cell").split('`').step_by(2).map(str::to_owned)).collect()
}

/// Server of one scenario.
struct Shop {
    address: SocketAddr,
    store: FaultyStore,
    clock: ManualClock,
    lease: Duration,
    /// Stage of handlers that end when the scenario lets them end. `open` is the stage of all other handlers.
    held: Stage,
    open: Stage,
}

/// Scope of the layer's keys. With a fixed scope, the path of a request is no part of a key.
const SCOPE: &str = "suite";

fn millis(value: &Value) -> Option<Duration> {
    value.as_u64().map(Duration::from_millis)
}

/// Lets store calls fail. For each kind of call, `faults` holds `always`, or the number of first calls that fail.
fn set_faults(store: &FaultyStore, faults: &Value) {
    for (name, call) in [("reserve", StoreCall::Reserve), ("finish", StoreCall::Finish), ("renew", StoreCall::Renew)] {
        let fault = Fault::Before(StoreErrorKind::Unavailable);
        match &faults[name] {
            Value::Null => {}
            Value::Number(times) => (0..times.as_u64().unwrap()).for_each(|_| store.next(call, fault)),
            always => {
                assert_eq!(always, "always");
                store.always(call, fault);
            }
        }
    }
}

impl Shop {
    async fn open(suite: &Suite, config: &Value) -> Self {
        let clock = ManualClock::new();
        let has_faults = config["faults"].is_object();
        // The pauses before the engine's retries take real time.
        let inner = match has_faults {
            true => MemoryStore::new(),
            false => MemoryStore::options().clock(clock.clone()).build(),
        };
        let store = FaultyStore::new(&inner);
        set_faults(&store, &config["faults"]);
        let is_required = config["require_key_for_mutations"] == true || config["required"] == true;
        let lease = millis(&config["lease_ttl_ms"]);
        let lease = lease.unwrap_or(Duration::from_millis(if has_faults { 200 } else { 60_000 }));
        let mut policy = POLICY.lease(lease).in_progress(suite.in_progress).missing_key(MissingKey::Run);
        policy = millis(&config["wait_timeout_ms"]).map_or(policy, |wait| policy.in_progress(InProgress::Wait(wait)));
        if let Some(bytes) = config["max_body_bytes"].as_u64() {
            policy = policy.max_result_bytes(usize::try_from(bytes).unwrap());
        }
        let caller = Caller::by(|head| Some(head.headers.get("x-caller")?.to_str().ok()?.to_owned()));
        let mut layer = IdempotencyLayer::new(&store, policy, caller)
            .scope(SCOPE)
            .required(move |_| is_required)
            .replay_marker(suite.marker.clone())
            .problem_base(suite.problem_base);
        if let Some(members) = config["excluded_members"].as_array() {
            layer = layer.fingerprint_members(JsonMembers::without(members.iter().map(|it| it.as_str().unwrap())));
        }
        let (held, open) = (Stage::closed(), Stage::open());
        let stages = (held.clone(), open.clone());
        let handler = async move |request: Request<Body>| respond(&stages.0, &stages.1, request).await;
        Self { address: serve_handler(layer, handler).await, store, clock, lease, held, open }
    }

    fn runs(&self) -> usize {
        self.held.begun() + self.open.begun()
    }

    /// Plays a scenario. Returns each expectation that the layer does not fulfil, with the layer's own answer.
    async fn play(&self, scenario: &Value) -> Vec<(String, String)> {
        if let Some(count) = scenario["parallel_count"].as_u64() {
            return self.play_together(scenario, count).await;
        }
        if let Some(steps) = scenario["sequence"].as_array() {
            return self.play_sequence(steps).await;
        }
        let single = [json!({ "request": scenario["request"], "expect": scenario["expect"] })];
        let steps = scenario["steps"].as_array().map_or(&single[..], Vec::as_slice);
        let (mut unmet, mut first) = (Vec::new(), None);
        for (number, step) in (1..).zip(steps) {
            if let Some(wait) = millis(&step["wait_ms"]) {
                self.clock.advance(wait);
            } else if step["simulate"] == "process_crash_after_claim" {
                self.reserve(&step["request"]).await;
            } else if step["inject_corrupt_record"].is_object() {
                self.record_nonsense(&step["inject_corrupt_record"]["effective_key_for"]).await;
            } else {
                let before = self.runs();
                let reply = send(self.address, request_of(&step["request"])).await;
                let seen = Seen { runs: self.runs() - before, first: first.as_ref().unwrap_or(&reply), reply: &reply };
                unmet.extend(self.unmet(number, &step["expect"], &seen));
                first.get_or_insert(reply);
            }
        }
        unmet
    }

    async fn play_together(&self, scenario: &Value, count: u64) -> Vec<(String, String)> {
        let sending = (0..count).map(|_| send(self.address, request_of(&scenario["request"])));
        let replies = futures::future::join_all(sending).await;
        let replays = replies.iter().filter(|reply| reply.headers.contains_key("idempotency-replayed")).count();
        let is_equal = |reply: &Reply| (reply.status, &reply.body) == (replies[0].status, &replies[0].body);
        let here = json!({
            "total_handler_calls": self.runs(),
            "all_responses_identical": replies.iter().all(is_equal),
            "replayed_count": replays,
        });
        let expected = scenario["expect"].as_object().unwrap();
        let unmet = expected.iter().filter(|(name, expected)| here[name.as_str()] != **expected);
        unmet.map(|(name, expected)| (format!("{name} {expected}"), here[name.as_str()].to_string())).collect()
    }

    /// Sends the second request while the handler of the first one runs.
    async fn play_sequence(&self, steps: &[Value]) -> Vec<(String, String)> {
        let [first, second] = steps else { panic!("{steps:?}") };
        let mut held = request_of(&first["request"]);
        held.headers_mut().insert("x-held", "true".parse().unwrap());
        let running = tokio::spawn(send(self.address, held));
        self.held.entered().await;
        let before = self.runs();
        let waiting = tokio::spawn(send(self.address, request_of(&second["request"])));
        until("the duplicate waits", || self.store.count(StoreCall::Wait) > 0).await;
        if second["expect"]["status"] == 423 {
            until("the wait ends", || {
                self.clock.advance(Duration::from_millis(100));
                waiting.is_finished()
            })
            .await;
        }
        self.held.go();
        let (first, reply) = (running.await.unwrap(), waiting.await.unwrap());
        let seen = Seen { reply: &reply, runs: self.runs() - before, first: &first };
        self.unmet(2, &second["expect"], &seen)
    }

    fn key_of(request: &Value, key: &str) -> idem_runtime::Key {
        let method = request["method"].as_str().unwrap();
        request_key(Some(SCOPE), method, "", caller_of(request), key).unwrap()
    }

    /// Reserves the key of a request, and leaves the record pending, as a process does that dies.
    async fn reserve(&self, request: &Value) {
        let key = Self::key_of(request, request["headers"]["Idempotency-Key"].as_str().unwrap());
        let day = Duration::from_secs(24 * 3600);
        self.store.reserve(&ReserveRequest::new(key, OwnerToken::from_bytes([7; 16]), self.lease, day)).await.unwrap();
    }

    /// Records a result under the key of a request. The result is no response.
    async fn record_nonsense(&self, request: &Value) {
        let key = Self::key_of(request, request["idempotency_key"].as_str().unwrap());
        let operation = Operation::new(&self.store, Ok(key), POLICY);
        operation.run(async { Ok::<_, Error>(7) }).await.unwrap();
    }

    fn unmet(&self, step: usize, expected: &Value, seen: &Seen<'_>) -> Vec<(String, String)> {
        let Some(expected) = expected.as_object() else { return Vec::new() };
        let unmet = expected.iter().flat_map(|(name, expected)| self.compare(name, expected, seen));
        unmet.map(|(expectation, here)| (format!("{step}: {expectation}"), here)).collect()
    }

    /// Compares one member of an expectation with the answer.
    fn compare(&self, name: &str, expected: &Value, seen: &Seen<'_>) -> Vec<(String, String)> {
        let Seen { reply, runs, first } = seen;
        let header = |name: &str| reply.header(name).unwrap_or("none").to_owned();
        let texts = || expected.as_array().unwrap().iter().map(|text| text.as_str().unwrap());
        let text = || expected.as_str().unwrap();
        let one = |is_met: bool, here: String| match is_met {
            true => Vec::new(),
            false => vec![(format!("{name} {expected}"), here)],
        };
        match name {
            "handler_called" => one(*expected == (*runs > 0), (*runs > 0).to_string()),
            "status" => one(*expected == reply.status.as_u16(), reply.status.as_str().to_owned()),
            "problem_type" => {
                let problem: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
                one(problem["type"] == *expected, problem["type"].as_str().unwrap_or("none").to_owned())
            }
            "body_contains" => one(reply.text().contains(text()), reply.text().to_owned()),
            "body_contains_any" => {
                let body = reply.text().to_lowercase();
                one(texts().any(|text| body.contains(text)), title_of(reply))
            }
            "body_same_as_first" => one((reply.body == first.body) == *expected, reply.text().to_owned()),
            "headers_present_any" => one(texts().any(|name| reply.headers.contains_key(name)), "none".to_owned()),
            "headers_absent" => {
                let found = texts().filter(|name| reply.headers.contains_key(*name));
                found.map(|found| (format!("{name} {found}"), header(found))).collect()
            }
            "headers_present" => {
                let fields = expected.as_object().unwrap().iter().map(|(name, value)| (name, value.as_str().unwrap()));
                let other = fields.filter(|(name, value)| header(name) != *value);
                other.map(|(field, value)| (format!("{name} {field}: {value}"), header(field))).collect()
            }
            // The layer has metrics and a log, and no events with these names.
            "emits_event" => one(false, "none".to_owned()),
            "store_calls" => {
                let calls = self.store.count(StoreCall::Reserve);
                one(expected["reserve"] == calls, calls.to_string())
            }
            _ => panic!("`{name}` is no expectation"),
        }
    }
}

/// Response to a step, the number of its runs, and the response to the first step.
struct Seen<'a> {
    reply: &'a Reply,
    runs: usize,
    first: &'a Reply,
}

/// Title of the problem if the layer refused the request; otherwise the body of the response.
fn title_of(reply: &Reply) -> String {
    let problem: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
    problem["title"].as_str().unwrap_or(reply.text()).to_owned()
}

fn caller_of(request: &Value) -> &str {
    request["caller_identity"].as_str().unwrap_or("caller")
}

fn request_of(step: &Value) -> Request<Body> {
    let method = Method::from_bytes(step["method"].as_str().unwrap().as_bytes()).unwrap();
    let mut request = request(method, step["path"].as_str().unwrap())
        .header("x-caller", caller_of(step))
        .header("x-answer", step["handler_response"].to_string());
    for (name, value) in step["headers"].as_object().into_iter().flatten() {
        request = request.header(name, value.as_str().unwrap());
    }
    request.body(Body::from(step["body"].as_str().unwrap_or_default().to_owned())).unwrap()
}

/// Handler of every scenario. The request has the wanted answer in a field.
async fn respond(held: &Stage, open: &Stage, request: Request<Body>) -> Response<Body> {
    let headers = request.into_parts().0.headers;
    let stage = if headers.contains_key("x-held") { held } else { open };
    let run = stage.play().await;
    let field = |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap());
    let wanted: Value = serde_json::from_str(field("x-answer")).unwrap();
    let body = json!({ "id": run, "caller": field("x-caller") }).to_string();
    let status = wanted["status"].as_u64().map_or(201, |status| u16::try_from(status).unwrap());
    let mut response = match wanted["body_bytes"].as_u64() {
        // This response has no `Content-Length`.
        Some(bytes) => answer(status, &[], frames((0..bytes).map(|_| Ok("x")))),
        None => answer(status, &[("content-type", "application/json")], body),
    };
    for (name, value) in wanted["headers"].as_object().into_iter().flatten() {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        response.headers_mut().append(name, value.as_str().unwrap().parse().unwrap());
    }
    response
}
