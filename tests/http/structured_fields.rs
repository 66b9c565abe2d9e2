//! Keys as items of structured fields (RFC 9651): the vectors of `structured-field-tests`.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;

use axum::Router;
use axum::routing::post as on_post;
use idem_runtime::http::IdempotencyKey;
use serde_json::Value;

use crate::rig::*;

/// Kind of a vector. The table in `docs/http.md` lists the kinds that the layer reads in another way than the suite
/// expects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Class {
    /// A string, whose text is the key.
    Text,
    /// A string that is invalid for the suite and for the layer.
    BrokenText,
    /// A string that is empty, or that has only blanks.
    BlankText,
    /// An item of any type with more than 255 characters.
    Long,
    /// An item that is written on two lines.
    TwoLines,
    /// Text without quotes that the layer uses unchanged as a key, even if the text is no valid item.
    Bare,
    /// Text without quotes that is no key: it is empty, or has a blank, an unprintable character or one of `",;\`.
    NotBare,
}

struct Vector {
    name: String,
    raw: Vec<String>,
    /// Text that the suite expects if the vector is a string; `None` for any other type of item.
    text: Option<String>,
    must_fail: bool,
}

impl Vector {
    fn read(line: &str) -> Self {
        let vector: Value = serde_json::from_str(line).unwrap();
        let name = format!("{}: {}", vector["file"].as_str().unwrap(), vector["name"].as_str().unwrap());
        let raw = vector["raw"].as_array().unwrap().iter().map(|line| line.as_str().unwrap().to_owned()).collect();
        let text = vector["expected"][0].as_str().map(str::to_owned);
        Self { name, raw, text, must_fail: vector["must_fail"] == true }
    }

    fn class(&self) -> Class {
        let [line] = &self.raw[..] else { return Class::TwoLines };
        let line = line.trim_matches([' ', '\t']);
        let is_plain = |at: char| at.is_ascii_graphic() && !"\",;\\".contains(at);
        match &self.text {
            _ if self.must_fail && line.starts_with('"') => Class::BrokenText,
            Some(text) if text.trim().is_empty() => Class::BlankText,
            Some(text) if text.len() > 255 => Class::Long,
            Some(_) => Class::Text,
            None if line.is_empty() || !line.chars().all(is_plain) => Class::NotBare,
            None if line.len() > 255 => Class::Long,
            None => Class::Bare,
        }
    }

    /// Returns the key that the layer reads; `None` if the layer refuses the field.
    fn key(&self) -> Option<&str> {
        match self.class() {
            Class::Text => self.text.as_deref(),
            Class::Bare => Some(self.raw[0].trim_matches([' ', '\t'])),
            _ => None,
        }
    }
}

fn suite() -> Vec<Vector> {
    let lines = include_str!("data/structured_field_items.txt").lines().filter(|line| !line.starts_with('#'));
    lines.map(Vector::read).collect()
}

/// Serves a handler that answers with the key that it gets.
async fn serve_key(stage: &Stage) -> SocketAddr {
    let stage = stage.clone();
    let handler = async move |key: IdempotencyKey| {
        stage.play().await;
        key.0
    };
    serve(Router::new().route("/pay", on_post(handler)).layer(layer())).await
}

/// Sends the field lines as they stand. Returns the status, the body, and whether the response is a replay.
async fn ask<S: AsRef<str>>(address: SocketAddr, lines: &[S]) -> (u16, String, bool) {
    let fields: Vec<_> = lines.iter().map(|line| format!("idempotency-key: {}", line.as_ref())).collect();
    let head = format!("POST /pay HTTP/1.1\r\nhost: till\r\n{}\r\n", fields.join("\r\n"));
    let request = format!("{head}content-length: 0\r\nconnection: close\r\n\r\n");
    let reply = send_raw(address, &request).await;
    let (head, body) = reply.split_once("\r\n\r\n").expect("a response");
    let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
    (status, body.to_owned(), head.contains("idempotent-replayed: true"))
}

/// Writes `text` as a string of a structured field.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[test]
fn the_table_of_the_page_about_http_covers_each_vector_of_the_suite() {
    let mut counts = BTreeMap::new();
    for vector in suite() {
        *counts.entry(vector.class()).or_insert(0) += 1;
    }
    let expected = [
        (Class::Text, 97),
        (Class::BrokenText, 169),
        (Class::BlankText, 3),
        (Class::Long, 5),
        (Class::TwoLines, 2),
        (Class::Bare, 459),
        (Class::NotBare, 105),
    ];
    assert_eq!(counts, expected.into());
}

#[tokio::test]
async fn structured_field_items_of_the_suite_are_keys_or_are_refused() {
    let stage = Stage::open();
    let address = serve_key(&stage).await;
    let mut keys = HashSet::new();
    for vector in suite() {
        let (status, body, is_replay) = ask(address, &vector.raw).await;
        let Some(key) = vector.key() else {
            assert_eq!(status, 400, "{}", vector.name);
            continue;
        };
        let is_known = !keys.insert(key.to_owned());
        assert_eq!((status, body.as_str(), is_replay), (200, key, is_known), "{}", vector.name);
    }
    assert_eq!(stage.begun(), keys.len());
}

#[tokio::test]
async fn all_spellings_of_a_structured_field_string_are_one_key() {
    let stage = Stage::open();
    let address = serve_key(&stage).await;
    let vectors = suite();
    let keys: HashSet<_> = vectors.iter().filter_map(Vector::key).collect();
    for key in &keys {
        let quoted = quoted(key);
        assert_eq!(ask(address, &[&quoted]).await, (200, (*key).to_owned(), false), "{key}");
        assert_eq!(ask(address, &[format!("{quoted};v=1")]).await, (200, (*key).to_owned(), true), "{key}");
    }
    for vector in vectors.iter().filter(|vector| vector.key().is_some()) {
        let (status, body, is_replay) = ask(address, &vector.raw).await;
        assert_eq!((status, Some(&*body), is_replay), (200, vector.key(), true), "{}", vector.name);
    }
    assert_eq!(stage.begun(), keys.len());
}
