//! The contract for clients, which the draft of the IETF asks servers to publish.

use std::fmt::{self, Write as _};

use serde_json::{Value, json};

use super::field::MAX_KEY_BYTES;
use super::problem::ProblemKind;
use super::profile::Equality;
use super::settings::Settings;
use crate::policy::{InProgress, MissingKey};

/// The facts that clients of a layer need; see [`IdempotencyLayer::describe`](super::IdempotencyLayer::describe).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Description {
    /// Text for people, in Markdown.
    pub text: String,
    /// A part of an `OpenAPI` 3 operation, as JSON: `parameters`, `responses`, and the lifetime of keys in seconds as
    /// `x-idempotency-ttl`.
    pub openapi: String,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Lists the problems that a layer with these settings can answer with, and their statuses.
fn problems(settings: &Settings) -> Vec<(ProblemKind, u16)> {
    let can_happen = |kind: &ProblemKind| match kind {
        ProblemKind::MissingKey => {
            settings.required.is_some()
                || settings.profile.requires_key
                || settings.policy.missing_key == MissingKey::Reject
        }
        ProblemKind::Unauthenticated | ProblemKind::Forbidden | ProblemKind::CallerBusy => settings.caller.0.is_some(),
        ProblemKind::InvalidHost => settings.separate_hosts,
        ProblemKind::Interrupted => settings.policy.on_crash == crate::policy::OnCrash::Fail,
        ProblemKind::AttemptsExhausted => settings.policy.max_attempts.is_some(),
        _ => true,
    };
    let status = |kind: ProblemKind| match kind {
        ProblemKind::FingerprintMismatch => settings.profile.mismatch.as_u16(),
        kind => kind.status().as_u16(),
    };
    let all = ProblemKind::ALL.into_iter().filter(can_happen);
    all.map(|kind| (kind, status(kind))).collect()
}

impl Description {
    pub(super) fn of(settings: &Settings) -> Self {
        let Settings { header, marker, profile, policy, .. } = settings;
        let is_required = profile.requires_key || policy.missing_key == MissingKey::Reject;
        // The phrases of the text that depend on the settings.
        let need = match &settings.required {
            Some(_) => "needed by some operations",
            None if is_required => "required",
            None => "optional",
        };
        let methods: Vec<_> = settings.methods().iter().map(ToString::to_string).collect();
        let reads = match (profile.reads, &settings.covers) {
            ([], _) | (_, Some(_)) => String::new(),
            (reads, None) => format!(" It has no effect on {}, which only read.", reads.join(", ")),
        };
        let same = match profile.equality {
            Equality::Bytes => "A retry repeats path, query and body byte for byte.",
            Equality::Json => "A retry repeats path and body; the body is compared as JSON.",
        };
        let headers: Vec<_> = settings.fingerprint_headers.iter().map(|name| format!("`{name}`")).collect();
        let headers = match &headers[..] {
            [] => String::new(),
            names => format!(" So are these headers: {}.", names.join(", ")),
        };
        let running = match policy.in_progress {
            InProgress::Wait(limit) => format!("waits for it, up to {}", words(limit.as_secs())),
            InProgress::Reject => "is refused with 409 and `Retry-After`".to_owned(),
        };
        let owner = match settings.caller.0 {
            Some(_) => "Keys belong to the caller that the credentials name.",
            None => "All clients share their keys.",
        };
        let hosts = if settings.separate_hosts { " Each host has keys of its own." } else { "" };
        let echo = if profile.echoes_key { " Every response repeats the field of the key." } else { "" };
        // One table row for each problem that can happen.
        let problems = problems(settings);
        let mut rows = String::new();
        for (kind, status) in &problems {
            let (base, name) = (&settings.problem_base, kind.name());
            let _ = writeln!(rows, "| {status} | `{base}{name}` | {}. {} |", kind.title(), kind.detail());
        }
        let seconds = policy.ttl.as_secs();
        let min = profile.min_key_chars;
        let text = format!(
            "# Idempotency\n\n\
             `{header}` is {need} on {}.{reads} Its value is a string of {min} to {MAX_KEY_BYTES} printable ASCII characters, \
             quoted (`\"8e03978e-40d5-43e8-bc93-6894a57f9324\"`) or bare; both are the same key. Make a new one for each \
             operation, a UUID for example. {owner}{hosts}\n\n\
             A key is remembered for {} after its operation has ended. Until then a request with the same key gets the \
             response of the first one, marked with `{marker}: true`. After that it is a new operation.{echo}\n\n\
             {same}{headers} The same key with another request is refused. A duplicate of a request that still runs \
             {running}.\n\n\
             | status | type | meaning |\n|---|---|---|\n{rows}",
            methods.join(", "),
            words(seconds),
        );
        // Problems with the same status share one entry of the OpenAPI document.
        let mut responses = serde_json::Map::new();
        for (kind, status) in &problems {
            let entry = responses.entry(status.to_string()).or_insert_with(|| json!({ "description": "" }));
            let said = entry["description"].as_str().unwrap_or_default();
            let said = if said.is_empty() { kind.title().to_owned() } else { format!("{said}; or: {}", kind.title()) };
            entry["description"] = Value::String(said);
            if matches!(
                kind,
                ProblemKind::InProgress
                    | ProblemKind::Busy
                    | ProblemKind::CallerBusy
                    | ProblemKind::StoreUnavailable
                    | ProblemKind::Unrecorded
            ) {
                entry["headers"] = json!({
                    "Retry-After": { "description": "Seconds.", "schema": { "type": "integer", "minimum": 1 } }
                });
            }
        }
        let openapi = json!({
            "x-idempotency-ttl": seconds,
            "parameters": [{
                "name": header.as_str(),
                "in": "header",
                "required": is_required && settings.required.is_none(),
                "description": format!("Names the operation. Remembered for {} after it has ended.", words(seconds)),
                "schema": { "type": "string", "minLength": min, "maxLength": MAX_KEY_BYTES },
            }],
            "responses": responses,
            "components": { "headers": { marker.as_str(): {
                "description": "The response is that of an earlier request with the same key.",
                "schema": { "type": "boolean", "const": true },
            }}},
        });
        Self { text, openapi: format!("{openapi:#}") }
    }
}

/// Writes `seconds` in the largest unit that gives a whole number.
fn words(seconds: u64) -> String {
    for (unit, name) in [(86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")] {
        if seconds >= unit && seconds.is_multiple_of(unit) {
            let count = seconds / unit;
            return format!("{count} {name}{}", if count == 1 { "" } else { "s" });
        }
    }
    format!("{seconds} seconds")
}
