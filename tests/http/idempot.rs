//! The suites of idempot-js: the tests of its adapters, and its feature file about the IETF draft.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use http::Method;
use http::header::HeaderName;
use idem_runtime::http::{Caller, IdempotencyLayer, request_key, response_of};
use idem_runtime::record::State;
use idem_runtime::store::{Filter, OwnerToken, ReserveRequest};
use idem_runtime::{InProgress, Key, MemoryStore, Store, StoreErrorKind, StoreExt};
use idem_tests::{Fault, FaultyStore, StoreCall};
use serde_json::Value;

use crate::rig::*;
use crate::scenarios::{Suite, documented};

const MARKER: HeaderName = HeaderName::from_static("x-idempotent-replayed");

#[tokio::test]
async fn tests_of_idempot_adapters_hold_except_for_documented_differences() {
    let suite = Suite {
        text: include_str!("data/idempot.json"),
        marker: MARKER,
        problem_base: "urn:idempotency:",
        in_progress: InProgress::Reject,
        section: "Adapters of idempot-js",
    };
    let running = "A request with this idempotency key is running";
    let other = "This idempotency key was used with another request";
    suite
        .run(&[
            ("detects concurrent processing with 409", "2: body_contains_any [\"already being processed\"]", running),
            ("detects different key with same fingerprint returns 409", "2: status 409", "200"),
            (
                "detects different key with same fingerprint returns 409",
                "2: body_contains_any [\"different key\"]",
                r#"{"caller":"caller","id":2}"#,
            ),
            (
                "detects same key with different payload returns 422",
                "2: body_contains_any [\"different payload\"]",
                other,
            ),
            ("rejects keys containing commas", "1: body_contains_any [\"comma\"]", "The idempotency key is not valid"),
        ])
        .await;
}

/// Sentence of the feature file: its words with `_` for each quoted text and number, and these texts and numbers.
struct Sentence {
    words: String,
    values: Vec<String>,
}

impl Sentence {
    fn read(line: &str) -> Self {
        let (mut words, mut values) = (String::new(), Vec::new());
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            let (value, after) = match first {
                '"' | '\'' => rest[1..].split_once(first).expect("the end of a text"),
                '0'..='9' => rest.split_at(rest.find(|at: char| !at.is_ascii_digit()).unwrap_or(rest.len())),
                _ => {
                    words.push(first);
                    rest = &rest[first.len_utf8()..];
                    continue;
                }
            };
            words.push('_');
            values.push(value.to_owned());
            rest = after;
        }
        Self { words, values }
    }
}

/// Server and client of one scenario.
struct Till {
    address: SocketAddr,
    store: FaultyStore,
    stage: Stage,
    key: Option<String>,
    reply: Option<Reply>,
    method: Method,
}

impl Till {
    async fn open() -> Self {
        let store = FaultyStore::new(&MemoryStore::new());
        let layer = IdempotencyLayer::new(&store, POLICY, Caller::single()).scope("api").replay_marker(MARKER);
        let stage = Stage::open();
        let orders = stage.clone();
        let handler = async move || {
            orders.play().await;
            answer(200, &[("content-type", "application/json")], r#"{"result":"success"}"#)
        };
        let address = serve_handler(layer, handler).await;
        Self { address, store, stage, key: None, reply: None, method: Method::POST }
    }

    /// Executes a line of the feature file. Returns the layer's own answer if the line expects another one.
    async fn play(&mut self, line: &str) -> Option<String> {
        let Sentence { words, values } = Sentence::read(line);
        match words.as_str() {
            // The server of each scenario has this endpoint and its own store.
            "a POST endpoint at _ that creates an order"
            | "a PATCH endpoint at _ that creates an order"
            | "the SQLite store is clean" => None,
            "an empty Idempotency-Key header" => self.take_key(String::new()),
            "an Idempotency-Key of _ characters" => self.take_key("k".repeat(values[0].parse().unwrap())),
            "an Idempotency-Key _" => self.take_key(values[0].clone()),
            "the key _ is currently being processed" => {
                let (owner, lease) = (OwnerToken::from_bytes([7; 16]), Duration::from_secs(60));
                let request = ReserveRequest::new(self.record_key(&values[0]), owner, lease, 60 * lease);
                self.store.reserve(&request).await.unwrap();
                None
            }
            "the idempotency store is unavailable" => {
                self.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
                None
            }
            _ if words.starts_with("I ") => self.send(&words, values.get(1)).await,
            _ if words.starts_with("the response") => self.compare_reply(&words, &values),
            _ => self.compare_record(&words, &values).await,
        }
    }

    fn take_key(&mut self, key: String) -> Option<String> {
        self.key = Some(key);
        None
    }

    async fn send(&mut self, words: &str, body: Option<&String>) -> Option<String> {
        let method = words.split(' ').find(|word| word.chars().all(|at| at.is_ascii_uppercase()) && *word != "I");
        self.method = Method::from_bytes(method.expect("a method").as_bytes()).unwrap();
        let mut request = request(self.method.clone(), "/api");
        if let Some(key) = self.key.as_ref().filter(|_| !words.ends_with("without an Idempotency-Key header")) {
            request = request.header("idempotency-key", key);
        }
        let body = Body::from(body.cloned().unwrap_or_default());
        self.reply = Some(send(self.address, request.body(body).unwrap()).await);
        None
    }

    fn reply(&self) -> &Reply {
        self.reply.as_ref().expect("a response")
    }

    fn member(&self, name: &str) -> Value {
        serde_json::from_slice::<Value>(&self.reply().body).unwrap_or_default()[name].take()
    }

    /// Status of the response, and the name of the problem if the layer has refused the request.
    fn shown(&self) -> String {
        let reply = self.reply();
        let problem = self.member("type");
        let name = problem.as_str().and_then(|it| it.rsplit(':').next()).unwrap_or_default();
        format!("{} {name}", reply.status.as_str()).trim_end().to_owned()
    }

    fn record_key(&self, key: &str) -> Key {
        request_key(Some("api"), self.method.as_str(), "", "", key).unwrap()
    }

    fn compare_reply(&self, words: &str, values: &[String]) -> Option<String> {
        let (reply, value) = (self.reply(), |index: usize| values[index].as_str());
        let is_met = match words {
            "the response status should be _" => value(0) == reply.status.as_str(),
            "the response content-type should be _" => reply.header("content-type") == Some(value(0)),
            "the response should have header _ with value _" => reply.header(value(0)) == Some(value(1)),
            "the response body should contain _" => reply.text().contains(value(0)),
            "the response body instance field should match pattern _" => {
                self.member("instance").as_str().is_some_and(|it| it.starts_with(value(0)))
            }
            "the response retryable field should be true" => self.member("retryable") == true,
            "the response retryable field should be false" => self.member("retryable") == false,
            "the response idempotency_key field should be _" => self.member("idempotency_key") == value(0),
            _ => panic!("`{words}` is no sentence of the feature file"),
        };
        (!is_met).then(|| self.shown())
    }

    async fn compare_record(&self, words: &str, values: &[String]) -> Option<String> {
        let key = self.record_key(self.key.as_deref().unwrap_or("none"));
        let found = self.store.inspect(&key).await.unwrap();
        let record = found.map(|found| found.record);
        let response = match record.as_ref().map(|record| &record.state) {
            Some(State::Completed(result)) => response_of(result).map(|(response, _)| response),
            _ => None,
        };
        let (status, body) = response.map(|it| (it.status().to_string(), it.into_body())).unwrap_or_default();
        let is_met = match words {
            "_ orders should exist in the database" => values[0] == self.stage.begun().to_string(),
            "an idempotency record should exist with key _" => record.is_some(),
            "the idempotency record status should be _" => values[0] == "complete" && !body.is_empty(),
            "the idempotency record response status should be _" => status.starts_with(&values[0]),
            "the idempotency record response body should contain _" => {
                std::str::from_utf8(&body).unwrap().contains(&values[0])
            }
            "_ idempotency records should exist with key _" => {
                self.store.operator().list(&Filter::new()).await.unwrap().records.len().to_string() == values[0]
            }
            _ => panic!("`{words}` is no sentence of the feature file"),
        };
        (!is_met).then(|| format!("{record:?}"))
    }
}

/// Name and lines of each scenario. Each scenario begins with the lines of the file's background.
fn scenarios() -> Vec<(&'static str, Vec<&'static str>)> {
    let (_, feature) = include_str!("data/idempot.feature").split_once("Background:").unwrap();
    let mut parts = feature.split("Scenario:").map(|part| {
        let mut lines = part.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        (lines.next().unwrap(), lines.collect::<Vec<_>>())
    });
    let (first, rest) = parts.next().unwrap();
    let background: Vec<_> = [first].into_iter().chain(rest).collect();
    parts.map(|(name, lines)| (name, [background.clone(), lines].concat())).collect()
}

#[tokio::test]
async fn the_feature_file_of_idempot_holds_except_for_documented_differences() {
    let scenarios = scenarios();
    assert_eq!(scenarios.len(), 49);
    let mut differences = BTreeMap::new();
    for (name, lines) in scenarios {
        let mut till = Till::open().await;
        for line in lines {
            let (keyword, sentence) = line.split_once(' ').unwrap();
            assert!(["Given", "When", "Then", "And"].contains(&keyword), "{name}: {line}");
            if let Some(here) = till.play(sentence).await {
                *differences.entry((sentence.to_owned(), here)).or_insert(0) += 1;
                // The next lines describe a response with the expected status, which this response does not have.
                if sentence.starts_with("the response status") {
                    break;
                }
            }
        }
    }
    let own = |(sentence, here, times): (&str, &str, i32)| ((sentence.to_owned(), here.to_owned()), times);
    let expected: BTreeMap<_, _> = [
        ("the response status should be 409", "200", 6),
        ("the response body should contain \"section-2.1\"", "400 missing-key", 1),
        ("the response body should contain \"section-2.1\"", "400 invalid-key", 3),
        ("the response body should contain \"section-2.2\"", "422 fingerprint-mismatch", 2),
        ("the response body should contain \"section-2.6\"", "409 in-progress", 2),
        ("the response body should contain \"processed\"", "409 in-progress", 1),
        ("the response body should contain \"idempotency_key\"", "400 invalid-key", 1),
        ("the response body should contain \"idempotency_key\"", "422 fingerprint-mismatch", 1),
        ("the response idempotency_key field should be \"abc123456789012345678\"", "422 fingerprint-mismatch", 1),
    ]
    .into_iter()
    .map(own)
    .collect();
    assert_eq!(differences, expected, "the differences of the layer are not the expected ones");
    let unequal = differences.into_keys().map(|(sentence, _)| sentence).collect();
    assert_eq!(documented("Feature file of idempot-js"), unequal, "rows in docs/http.md, and the differences");
}
