//! The contract for clients. The draft of the IETF asks servers to publish this contract.

use std::fmt::{self, Write as _};

use http::header;
use serde_json::{Map, Value, json};

use super::field::MAX_KEY_BYTES;
use super::problem::{Problem, ProblemKind};
use super::profile::Equality;
use super::settings::Settings;
use crate::policy::{InProgress, MissingKey};

/// The facts that clients of a layer need; see [`IdempotencyLayer::describe`](super::IdempotencyLayer::describe).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Description {
    /// Text for people, in Markdown.
    pub text: String,
    /// A part of a document of `OpenAPI` 3.0 or 3.1, as JSON. `operation` has the `parameters` and `responses` of an
    /// operation behind the layer, and the lifetime of keys as a duration of ISO 8601 (`x-idempotency-key-lifetime`).
    /// `components` has the headers and parameters to which `operation` refers; add them to the components of your
    /// document.
    ///
    /// Each response refers to the headers of the layer. The response `2XX` describes the handler's own responses. Each
    /// problem has an example, unless [`on_problem`](super::IdempotencyLayer::on_problem) is set.
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
        ProblemKind::Unresolved => settings.reconcile.is_some(),
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
        let problems = problems(settings);
        let (operation, components) = (operation(settings, &problems), components(settings));
        let openapi = json!({ "operation": operation, "components": components });
        Self { text: text(settings, &problems), openapi: format!("{openapi:#}") }
    }
}

/// Returns whether every covered request needs a key.
fn is_required(settings: &Settings) -> bool {
    let Settings { required, profile, policy, .. } = settings;
    required.is_none() && (profile.requires_key || policy.missing_key == MissingKey::Reject)
}

/// Writes the contract for people.
fn text(settings: &Settings, problems: &[(ProblemKind, u16)]) -> String {
    let Settings { header, marker, profile, policy, .. } = settings;
    let need = match &settings.required {
        Some(_) => "needed by some operations",
        None if is_required(settings) => "required",
        None => "optional",
    };
    let methods: Vec<_> = settings.methods().iter().map(ToString::to_string).collect();
    let reads = match (profile.reads, &settings.covers) {
        ([], _) | (_, Some(_)) => String::new(),
        (reads, None) => format!(" It has no effect on {}, which only read.", reads.join(", ")),
    };
    let running = match policy.in_progress {
        InProgress::Wait(limit) => format!("waits for it, up to {}", words(limit.as_secs())),
        InProgress::Reject => "is refused with 409 and `Retry-After`".to_owned(),
    };
    let owner = match settings.caller.0 {
        Some(_) => "Keys belong to the caller that the credentials name.",
        None => "All clients share their keys.",
    };
    let format = if settings.key_format.is_some() { " The service checks its form." } else { "" };
    let hosts = if settings.separate_hosts { " Each host has keys of its own." } else { "" };
    let echo = if profile.echoes_key { " Every response repeats the field of the key." } else { "" };
    // The table has a row for each problem that can happen.
    let mut rows = String::new();
    for (kind, status) in problems {
        let (base, name) = (&settings.problem_base, kind.name());
        let _ = writeln!(rows, "| {status} | `{base}{name}` | {}. {} |", kind.title(), kind.detail());
    }
    format!(
        "# Idempotency\n\n\
         `{header}` is {need} on {}.{reads} Its value is a string of {} to {MAX_KEY_BYTES} printable ASCII characters, \
         quoted (`\"8e03978e-40d5-43e8-bc93-6894a57f9324\"`) or bare; both are the same key.{format} Make a new one for each \
         operation, a UUID for example. {owner}{hosts}\n\n\
         A key is remembered for {} after its operation has ended. Until then a request with the same key gets the \
         response of the first one, marked with `{marker}: true`. After that it is a new operation.{echo}\n\n\
         {} The same key with another request is refused. A duplicate of a request that still runs {running}.\n\n\
         | status | type | meaning |\n|---|---|---|\n{rows}",
        methods.join(", "),
        profile.min_key_chars,
        words(policy.ttl.as_secs()),
        same(settings),
    )
}

/// Writes the parts of a request that a retry repeats.
fn same(settings: &Settings) -> String {
    let (target, headers) = match (settings.profile.equality, &settings.fingerprint_headers[..]) {
        (Equality::Json, _) => ("path", String::new()),
        (Equality::Bytes, []) => ("path, query", String::new()),
        (Equality::Bytes, names) => {
            let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            ("path, query", format!(" It repeats these headers: {}.", names.join(", ")))
        }
    };
    match &settings.fingerprint_members {
        Some(members) => format!("A retry repeats {target}, and {}, compared as JSON.{headers}", members.words()),
        None if settings.compares_json() => format!("A retry repeats {target} and body; the body is compared as JSON."),
        None => format!("A retry repeats {target} and body byte for byte.{headers}"),
    }
}

/// Builds the members of an Operation Object.
fn operation(settings: &Settings, problems: &[(ProblemKind, u16)]) -> Value {
    let mut headers = Map::new();
    headers.insert(settings.marker.to_string(), reference("headers", "IdempotentReplayed"));
    headers.insert("Idempotency-Recorded".to_owned(), reference("headers", "IdempotencyRecorded"));
    headers.insert("Idempotency-Replayable".to_owned(), reference("headers", "IdempotencyReplayable"));
    if settings.profile.echoes_key {
        headers.insert(settings.header.to_string(), reference("headers", "IdempotencyKey"));
    }
    let mut responses = Map::new();
    responses.insert("2XX".to_owned(), json!({ "description": "The handler's response.", "headers": headers }));
    // Problems with the same status share one response.
    for (kind, status) in problems {
        let response = responses.entry(status.to_string());
        let response = response.or_insert_with(|| json!({ "description": "", "headers": headers }));
        let said = response["description"].as_str().unwrap_or_default();
        let said = if said.is_empty() { kind.title().to_owned() } else { format!("{said}; or: {}", kind.title()) };
        response["description"] = Value::String(said);
        if has_retry_after(*kind) {
            response["headers"]["Retry-After"] = reference("headers", "RetryAfter");
        }
        // With a hook, the body of a problem is unknown, so the problem gets no example.
        if settings.on_problem.is_none()
            && let Some((content_type, body)) = example(settings, *kind, *status)
        {
            response["content"][content_type]["examples"][kind.name()] = json!({ "value": body });
        }
    }
    json!({
        "x-idempotency-key-lifetime": lifetime(settings.policy.ttl.as_secs()),
        "parameters": [reference("parameters", "IdempotencyKey")],
        "responses": responses,
    })
}

/// Builds the members of a Components Object that the operation refers to.
fn components(settings: &Settings) -> Value {
    let Settings { header, profile, policy, .. } = settings;
    let flag = |description: &str, value: &str| json!({ "description": description, "schema": { "type": "string", "enum": [value] } });
    let lifetime = words(policy.ttl.as_secs());
    let mut headers = json!({
        "IdempotentReplayed": flag("The response is that of an earlier request with the same key.", "true"),
        "IdempotencyRecorded": flag("The operation ran, and its response is not recorded.", "false"),
        "IdempotencyReplayable": flag("The operation is recorded, and this response is not: duplicates get 410.", "false"),
        "RetryAfter": { "description": "Seconds.", "schema": { "type": "integer", "minimum": 1 } },
    });
    if profile.echoes_key {
        headers["IdempotencyKey"] =
            json!({ "description": "The key of the request, as it was sent.", "schema": { "type": "string" } });
    }
    let parameter = json!({
        "name": header.as_str(),
        "in": "header",
        "required": is_required(settings),
        "description": format!("Names the operation. Remembered for {lifetime} after it has ended."),
        "schema": { "type": "string", "minLength": profile.min_key_chars, "maxLength": MAX_KEY_BYTES },
    });
    json!({ "parameters": { "IdempotencyKey": parameter }, "headers": headers })
}

fn reference(kind: &str, name: &str) -> Value {
    json!({ "$ref": format!("#/components/{kind}/{name}") })
}

fn has_retry_after(kind: ProblemKind) -> bool {
    use ProblemKind::{Busy, CallerBusy, InProgress, StoreUnavailable, TimedOut, Unrecorded, Unsent};
    matches!(kind, InProgress | Busy | CallerBusy | StoreUnavailable | TimedOut | Unrecorded | Unsent)
}

/// Returns the content type and the body of a problem.
fn example(settings: &Settings, kind: ProblemKind, status: u16) -> Option<(String, Value)> {
    let problem = Problem::new(kind).at(status.try_into().ok()?, &settings.problem_base);
    let response = (settings.profile.problem)(&problem);
    let content_type = response.headers().get(header::CONTENT_TYPE)?.to_str().ok()?.to_owned();
    Some((content_type, serde_json::from_slice(response.body()).ok()?))
}

/// Writes `seconds` as a duration of ISO 8601.
fn lifetime(seconds: u64) -> String {
    for (unit, before, after) in [(86_400, "P", "D"), (3600, "PT", "H"), (60, "PT", "M")] {
        if seconds >= unit && seconds.is_multiple_of(unit) {
            return format!("{before}{}{after}", seconds / unit);
        }
    }
    format!("PT{seconds}S")
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
