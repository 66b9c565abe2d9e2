//! The contract that a layer publishes: its description in terms of `OpenAPI`.
//!
//! `data/openapi-3.0.json` and `openapi-3.1.json` are the schemas of `OpenAPI` (<https://spec.openapis.org>, Apache
//! License 2.0). A document with the contract must fit them.

use std::time::Duration;

use http::HeaderName;
use idem_runtime::http::{Caller, IdempotencyLayer, JsonMembers, Profile};
use idem_runtime::{InProgress, MemoryStore, MissingKey, OnCrash, Policy};
use serde_json::{Value, json};

use crate::rig::*;

fn layer_of(policy: Policy, caller: Caller) -> IdempotencyLayer {
    IdempotencyLayer::new(&MemoryStore::new(), policy, caller)
}

/// Layers with different contracts.
fn layers() -> Vec<IdempotencyLayer> {
    let waits = POLICY.in_progress(InProgress::Wait(Duration::from_secs(5))).on_crash(OnCrash::Fail).max_attempts(3);
    let mut layers: Vec<_> = [Profile::ietf(), Profile::stripe(), Profile::acp(), Profile::ucp()]
        .map(|profile| layer_of(POLICY, Caller::by(|_| Some("a"))).profile(profile))
        .into();
    layers.push(layer_of(waits, Caller::single()).problem_base("https://api.example.com/problems/"));
    let odd = layer().header(HeaderName::from_static("x!key")).replay_marker(HeaderName::from_static("x-replayed"));
    layers.push(odd.on_problem(|_, _| ()).separate_hosts(true));
    layers
}

fn contract(layer: &IdempotencyLayer) -> Value {
    serde_json::from_str(&layer.describe().openapi).unwrap()
}

/// Returns the defects of a document with this contract.
fn defects(version: &str, contract: &Value) -> Vec<String> {
    let schema = match &version[..3] {
        "3.0" => include_str!("data/openapi-3.0.json"),
        _ => include_str!("data/openapi-3.1.json"),
    };
    let schema = serde_json::from_str(schema).unwrap();
    let document = json!({
        "openapi": version,
        "info": { "title": "Payments", "version": "1" },
        "paths": { "/payments": { "post": contract["operation"] } },
        "components": contract["components"],
    });
    let validator = jsonschema::validator_for(&schema).unwrap();
    validator.iter_errors(&document).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[test]
fn a_contract_is_valid_in_both_versions_of_openapi() {
    for layer in layers() {
        let contract = contract(&layer);
        for version in ["3.0.3", "3.1.0"] {
            assert_eq!(defects(version, &contract), [""; 0], "{version}: {contract:#}");
        }
    }
    // The schemas of `OpenAPI` detect a defect.
    let mut wrong = contract(&layer());
    wrong["components"]["headers"]["IdempotentReplayed"]["schema"]["const"] = true.into();
    assert_ne!(defects("3.0.3", &wrong), [""; 0]);
    wrong["operation"]["parameters"] = json!([{ "name": "x" }]);
    assert_ne!(defects("3.1.0", &wrong), [""; 0]);
}

/// Calls `visit` with each reference in `value`.
fn references(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                match value {
                    Value::String(to) if name == "$ref" => visit(to),
                    value => references(value, visit),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, visit)),
        _ => {}
    }
}

#[test]
fn every_response_refers_to_the_headers_of_the_layer() {
    for layer in layers() {
        let contract = contract(&layer);
        let responses = contract["operation"]["responses"].as_object().unwrap();
        assert!(responses.contains_key("2XX") && responses.len() > 8);
        for (status, response) in responses {
            let mut names = Vec::new();
            references(&response["headers"], &mut |to| names.push(to.to_owned()));
            for header in ["IdempotentReplayed", "IdempotencyRecorded", "IdempotencyReplayable"] {
                let header = format!("#/components/headers/{header}");
                assert!(names.contains(&header), "{status} does not refer to {header}: {response:#}");
            }
        }
        let mut count = 0;
        references(&contract, &mut |to| {
            count += 1;
            assert!(contract.pointer(&to[1..]).is_some(), "{to} is not there");
        });
        assert!(count > 16);
    }
}

#[tokio::test]
async fn an_example_in_a_contract_is_the_body_that_clients_get() {
    for profile in [Profile::ietf(), Profile::acp()] {
        let layer = layer().profile(profile).problem_base("https://api.example.com/problems/");
        let responses = contract(&layer)["operation"]["responses"].clone();
        let (address, _) = serve_counter(layer).await;
        let key = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        send(address, post(key, "{}")).await;
        let reply = send(address, post(key, "[]")).await;
        let content = &responses["422"]["content"][reply.header("content-type").unwrap()];
        let told: Value = serde_json::from_slice(&reply.body).unwrap();
        let example = &content["examples"]["fingerprint-mismatch"]["value"];
        for (member, value) in example.as_object().unwrap() {
            assert_eq!(told[member], *value, "{member}");
        }
    }
}

#[test]
fn a_contract_describes_the_settings_of_its_layer() {
    let policy = POLICY.ttl(Duration::from_secs(3 * 86_400)).max_attempts(3);
    let layer = layer_of(policy, Caller::single())
        .fingerprint_headers([HeaderName::from_static("x-account")])
        .problem_base("https://api.example.com/problems/");
    let said = layer.describe();
    for part in [
        "`idempotency-key` is required on POST, PATCH",
        "1 to 255 printable",
        "remembered for 3 days",
        "`idempotent-replayed: true`",
        "these headers: `x-account`",
        "| 409 | `https://api.example.com/problems/in-progress` |",
        "| 409 | `https://api.example.com/problems/attempts-exhausted` |",
    ] {
        assert!(said.text.contains(part), "{part}: {}", said.text);
    }
    // The layer distinguishes no callers, and no attempt is ever interrupted.
    assert!(!said.text.contains("unauthenticated") && !said.text.contains("problems/interrupted"), "{}", said.text);
    let contract = contract(&layer);
    let (operation, components) = (&contract["operation"], &contract["components"]);
    assert_eq!(operation["x-idempotency-key-lifetime"], "P3D");
    let parameter = &components["parameters"]["IdempotencyKey"];
    assert_eq!((&parameter["name"], &parameter["required"]), (&"idempotency-key".into(), &true.into()));
    assert_eq!(parameter["schema"]["maxLength"], 255);
    assert!(operation["responses"]["409"]["headers"]["Retry-After"].is_object());
    let statuses: Vec<_> = operation["responses"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(statuses, ["2XX", "400", "408", "409", "410", "413", "422", "500", "503", "504"]);
}

#[test]
fn lifetimes_in_a_contract_are_durations_of_iso_8601() {
    for (seconds, lifetime) in [(90, "PT90S"), (120, "PT2M"), (3600, "PT1H"), (129_600, "PT36H"), (604_800, "P7D")] {
        let layer = layer_of(Policy::new(Duration::from_secs(seconds)), Caller::single());
        assert_eq!(contract(&layer)["operation"]["x-idempotency-key-lifetime"], lifetime);
    }
}

#[test]
fn a_contract_names_no_setting_that_the_profile_ignores() {
    let policy = POLICY.missing_key(MissingKey::Run);
    let layer = layer_of(policy, Caller::single())
        .fingerprint_headers([HeaderName::from_static("x-account")])
        .profile(Profile::acp());
    let text = layer.describe().text;
    assert!(!text.contains("x-account") && !text.contains("query"), "{text}");
    assert!(text.contains("is required on") && text.contains("missing-key"), "{text}");
    assert_eq!(contract(&layer)["components"]["parameters"]["IdempotencyKey"]["required"], true);
    // The contract names settings that have an effect.
    let chosen = layer.clone().fingerprint_members(JsonMembers::without(["sent_at"])).key_format(|_| true);
    let text = chosen.describe().text;
    assert!(text.contains("its body without these members: `sent_at`, compared as JSON"), "{text}");
    assert!(text.contains("checks its form"), "{text}");
    // A setting of the layer outranks its profile.
    let layer = layer.required(|_| false);
    assert_eq!(contract(&layer)["components"]["parameters"]["IdempotencyKey"]["required"], false);
    // The profile `ucp` fails closed, and has its own status for another payload.
    let ucp = layer_of(POLICY, Caller::single()).profile(Profile::ucp());
    assert!(contract(&ucp)["operation"]["responses"].get("422").is_none());
    assert!(ucp.describe().text.contains("22 to 255 printable"));
}
