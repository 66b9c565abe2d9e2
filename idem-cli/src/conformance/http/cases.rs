//! The file of cases: requests and their expected responses. `docs/http.md` describes it.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Write as _};

use serde::Deserialize;
use serde_json::Value;

/// Set of rules that a server follows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Profile {
    /// The draft of the IETF.
    Ietf,
    /// Stripe's API.
    Stripe,
    /// The Agentic Commerce Protocol.
    Acp,
    /// The Universal Commerce Protocol.
    Ucp,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ietf => "ietf",
            Self::Stripe => "stripe",
            Self::Acp => "acp",
            Self::Ucp => "ucp",
        })
    }
}

/// A file of cases.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// Path of the operation.
    pub(super) path: String,
    /// Path of a second operation.
    pub(super) other_path: String,
    /// Path of the counter of runs.
    pub(super) counter: String,
    /// Body of a request that sets none.
    pub(super) body: Value,
    /// The header lines of each caller.
    pub(super) callers: BTreeMap<String, Vec<String>>,
    pub(super) cases: Vec<Case>,
}

/// Caller of a request that names none.
pub(super) const FIRST: &str = "first";

/// A rule, and the steps that check it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    pub(super) name: String,
    /// The rule in words.
    pub(super) rule: String,
    /// Profiles that have this rule.
    pub(super) profiles: Vec<Profile>,
    pub(super) steps: Vec<Step>,
    /// Expected number of runs of the operations at the end.
    pub(super) runs: OneOf<u64>,
}

/// A request, and its expected response.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    #[serde(default)]
    pub(super) send: Send,
    #[serde(default)]
    pub(super) how: How,
    /// Steps that run while the operation of this request runs.
    #[serde(default)]
    pub(super) while_running: Vec<Step>,
    #[serde(default)]
    pub(super) expect: Expect,
    /// Label of the response, for other steps.
    #[serde(rename = "as")]
    pub(super) label: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Send {
    pub(super) method: Option<String>,
    /// True for a request to the second operation.
    pub(super) other_path: bool,
    pub(super) caller: Option<String>,
    /// Name of a key, sent in the form of the profile. Without `key` and `fields`, no key is sent.
    pub(super) key: Option<String>,
    /// The field lines to send instead, with `{name}` for a key.
    pub(super) fields: Vec<String>,
    /// A text is sent as is, every other value as JSON.
    pub(super) body: Option<Value>,
}

/// Way of sending a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum How {
    /// Over its own connection.
    #[default]
    Alone,
    /// This many requests at the same time, each over its own connection.
    Together(u16),
    /// This many requests at the same time over one connection.
    Pipelined(u16),
    /// Repeatedly while the answer is 409.
    UntilFree,
    /// The client sends half of the body, then hangs up.
    HangUpInBody,
    /// The client sends the whole request, and hangs up once the operation runs.
    HangUpWhileRunning,
    /// The client sends the whole request, and hangs up once the response begins.
    HangUpInResponse,
}

impl How {
    fn hangs_up(self) -> bool {
        matches!(self, Self::HangUpInBody | Self::HangUpWhileRunning | Self::HangUpInResponse)
    }
}

/// Expected response. Parts that are not named may have any value.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Expect {
    pub(super) status: Option<ByProfile>,
    /// Status and body equal an earlier response. If `status` is set too, this applies only to a 2xx response.
    pub(super) same_as: Option<String>,
    /// The body differs from an earlier response.
    pub(super) differs_from: Option<String>,
    /// These fields equal those of `same_as`, in their order.
    pub(super) same_headers: Vec<String>,
    pub(super) headers: BTreeMap<String, Field>,
    /// Required members of the JSON body; `null` accepts any value.
    pub(super) body: Option<Value>,
    /// The response is a problem of RFC 9457, or links to a description of the problem.
    pub(super) explained: bool,
}

/// One value, or several allowed values.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOf<T> {
    One(T),
    Any(Vec<T>),
}

impl<T: PartialEq> OneOf<T> {
    pub(super) fn allows(&self, value: &T) -> bool {
        match self {
            Self::One(one) => one == value,
            Self::Any(any) => any.contains(value),
        }
    }
}

impl<T: fmt::Display> fmt::Display for OneOf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(one) => write!(f, "{one}"),
            Self::Any(any) => {
                let words: Vec<_> = any.iter().map(ToString::to_string).collect();
                f.write_str(&words.join(" or "))
            }
        }
    }
}

/// Expected statuses: for all profiles, or for each profile.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum ByProfile {
    All(OneOf<u16>),
    Each(BTreeMap<Profile, OneOf<u16>>),
}

impl ByProfile {
    pub(super) fn of(&self, profile: Profile) -> Option<&OneOf<u16>> {
        match self {
            Self::All(statuses) => Some(statuses),
            Self::Each(each) => each.get(&profile),
        }
    }
}

/// Expected value of a header field.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Field {
    /// Present or absent.
    Is(bool),
    /// Present once, with this text.
    Text(String),
    /// An integer of at least this value.
    Number { at_least: u64 },
    /// Present this many times.
    Count { count: usize },
    /// Present once, with the key of this name.
    Key { key: String },
}

impl File {
    /// Reads a file of cases. The error names the place of the mistake.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let file: Self = serde_json::from_str(text).map_err(|error| format!("not a file of cases: {error}"))?;
        for path in [&file.path, &file.other_path, &file.counter] {
            is_path(path)?;
        }
        for line in file.callers.values().flatten() {
            header(line)?;
        }
        let mut names = HashSet::new();
        for case in &file.cases {
            let wrong = |what: &str| Err(format!("case `{}`: {what}", case.name));
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            if case.name.is_empty() || !case.name.chars().all(is_name) {
                return wrong("a name is made of a-z, 0-9 and _");
            }
            if !names.insert(&case.name) {
                return wrong("there are two of this name");
            }
            if case.steps.is_empty() || case.profiles.is_empty() {
                return wrong("it has no steps, or no profiles");
            }
            file.check_steps(case, &case.steps, &mut HashSet::new())
                .map_err(|what| format!("case `{}`: {what}", case.name))?;
        }
        match names.is_empty() {
            true => Err("it has no cases".to_owned()),
            false => Ok(file),
        }
    }

    fn check_steps(&self, case: &Case, steps: &[Step], labels: &mut HashSet<String>) -> Result<(), String> {
        for step in steps {
            // First the request: a mistake in the file should not look like a mistake of the server.
            let send = &step.send;
            let caller = send.caller.as_deref().unwrap_or(FIRST);
            if !self.callers.contains_key(caller) {
                return Err(format!("there is no caller `{caller}`"));
            }
            if let Some(method) =
                send.method.as_ref().filter(|it| it.is_empty() || !it.chars().all(|c| c.is_ascii_uppercase()))
            {
                return Err(format!("`{method}` is no method"));
            }
            if send.fields.iter().chain(&send.key).any(|line| line.contains(char::is_control)) {
                return Err("a key goes over one line".to_owned());
            }
            for line in &send.fields {
                // A short key: the check covers everything but the key's text.
                fill(line, "k")?;
            }
            if send.key.is_some() && !send.fields.is_empty() {
                return Err("`key` and `fields` are two ways to say one thing".to_owned());
            }
            if matches!(step.how, How::Together(count) | How::Pipelined(count) if !(2..=1000).contains(&count)) {
                return Err("2 to 1000 requests are sent together".to_owned());
            }
            // Then the expectations: a client that hangs up gets no response, for example.
            let expect = &step.expect;
            if step.how.hangs_up() && (step.label.is_some() || !expect.is_empty()) {
                return Err("a client that hangs up gets no response to expect or to name".to_owned());
            }
            if !step.while_running.is_empty() && step.how != How::Alone {
                return Err("`while_running` stands beside a single request".to_owned());
            }
            if let Some(status) = &expect.status
                && let Some(profile) = case.profiles.iter().find(|profile| status.of(**profile).is_none())
            {
                return Err(format!("no status is named for the profile {profile}"));
            }
            if !expect.same_headers.is_empty() && expect.same_as.is_none() {
                return Err("`same_headers` needs `same_as`".to_owned());
            }
            // Inner steps run first, so their labels exist when this response arrives.
            self.check_steps(case, &step.while_running, labels)?;
            for label in expect.same_as.iter().chain(&expect.differs_from) {
                if !labels.contains(label) {
                    return Err(format!("no earlier response is called `{label}`"));
                }
            }
            labels.extend(step.label.clone());
        }
        Ok(())
    }
}

impl Expect {
    fn is_empty(&self) -> bool {
        self.status.is_none()
            && self.same_as.is_none()
            && self.differs_from.is_none()
            && self.headers.is_empty()
            && self.body.is_none()
            && !self.explained
    }
}

/// Checks that a request can use `path`.
pub(super) fn is_path(path: &str) -> Result<(), String> {
    let is_fine = path.starts_with('/') && path.bytes().all(|byte| matches!(byte, b'!'..=b'~'));
    is_fine.then_some(()).ok_or_else(|| format!("`{path}` is no path: it starts with / and has no spaces"))
}

/// Parses a header line: its name and its value.
pub(super) fn header(line: &str) -> Result<(String, String), String> {
    let parts = line.split_once(':').map(|(name, value)| (name.trim(), value.trim()));
    let is_token =
        |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let parts = parts.filter(|(name, value)| is_token(name) && !value.contains(char::is_control));
    // The line may hold a credential, so the error does not show it.
    let (name, value) = parts.ok_or("a line of a header is written as `Name: value`")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Replaces each `{name}` in `template` by the key `<unique>-<name>`. `{name:255}` gives a key of 255 characters.
pub(super) fn fill(template: &str, unique: &str) -> Result<String, String> {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, opened)) = rest.split_once('{') {
        let (inside, after) = opened.split_once('}').ok_or_else(|| format!("`{template}` opens a {{ and leaves it"))?;
        let (name, form) = inside.split_once(':').unwrap_or((inside, ""));
        let key = key(unique, name);
        text.push_str(before);
        match form {
            "" => text.push_str(&key),
            // Padded in the middle, so that such keys differ in their last characters.
            length => match length.parse::<usize>() {
                Ok(length @ 64..=100_000) => {
                    let padding = "x".repeat(length.saturating_sub(key.len()));
                    let _ = write!(text, "{unique}{padding}-{name}");
                }
                _ => return Err(format!("`{inside}` is neither a name nor name:LENGTH with 64 or more")),
            },
        }
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

/// Returns the key for the `name` in a case. Each run has its own keys.
pub(super) fn key(unique: &str, name: &str) -> String {
    format!("{unique}-{name}")
}
