//! The file of cases: what is sent, and what has to come back. `docs/http.md` describes it.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Write as _};

use serde::Deserialize;
use serde_json::Value;

/// Whose rules a server follows.
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
    /// Where the operation is.
    pub(super) path: String,
    /// Where another operation is.
    pub(super) other_path: String,
    /// Where the number of runs is.
    pub(super) counter: String,
    /// The body of a request that names none.
    pub(super) body: Value,
    /// The header lines of each caller.
    pub(super) callers: BTreeMap<String, Vec<String>>,
    pub(super) cases: Vec<Case>,
}

/// Who sends a request that names nobody.
pub(super) const FIRST: &str = "first";

/// One rule.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    pub(super) name: String,
    /// What a server has to do.
    pub(super) rule: String,
    /// Whose rule it is.
    pub(super) profiles: Vec<Profile>,
    pub(super) steps: Vec<Step>,
    /// How often the operations have run at the end.
    pub(super) runs: OneOf<u64>,
}

/// A request, and what has to come back.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    #[serde(default)]
    pub(super) send: Send,
    #[serde(default)]
    pub(super) how: How,
    /// Done while the operation runs, which this request starts.
    #[serde(default)]
    pub(super) while_running: Vec<Step>,
    #[serde(default)]
    pub(super) expect: Expect,
    /// What other steps call the response.
    #[serde(rename = "as")]
    pub(super) label: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Send {
    pub(super) method: Option<String>,
    /// To the other operation.
    pub(super) other_path: bool,
    pub(super) caller: Option<String>,
    /// The name of a key, in the form of the profile. Not sent if there is neither this nor `fields`.
    pub(super) key: Option<String>,
    /// The field lines instead, with `{name}` for a key.
    pub(super) fields: Vec<String>,
    /// A text is sent as it is, everything else as JSON.
    pub(super) body: Option<Value>,
}

/// How a request is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum How {
    /// Over a connection of its own.
    #[default]
    Alone,
    /// So many at once, each over a connection of its own.
    Together(u16),
    /// So many at once over one connection.
    Pipelined(u16),
    /// Again and again while it is answered with 409.
    UntilFree,
    /// Half of the body; then the client is gone.
    HangUpInBody,
    /// All of it; the client is gone once the operation runs.
    HangUpWhileRunning,
    /// All of it; the client is gone once the response begins.
    HangUpInResponse,
}

impl How {
    fn hangs_up(self) -> bool {
        matches!(self, Self::HangUpInBody | Self::HangUpWhileRunning | Self::HangUpInResponse)
    }
}

/// What a response has to be. What is not named may be anything.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Expect {
    pub(super) status: Option<ByProfile>,
    /// Status and body are those of an earlier response. With `status` too, this counts for a status of 2xx alone.
    pub(super) same_as: Option<String>,
    /// The body is not that of an earlier response.
    pub(super) differs_from: Option<String>,
    /// These fields are those of `same_as`, in their order.
    pub(super) same_headers: Vec<String>,
    pub(super) headers: BTreeMap<String, Field>,
    /// What the body holds, as JSON; `null` for something, whatever it is.
    pub(super) body: Option<Value>,
    /// A problem of RFC 9457, or a link to one's documentation.
    pub(super) explained: bool,
}

/// One value, or one of several.
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

/// Statuses: for all profiles, or for each.
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

/// What a field has to be.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Field {
    /// There, or not there.
    Is(bool),
    /// This, and there once.
    Text(String),
    /// A whole number.
    Number { at_least: u64 },
    /// So many of them.
    Count { count: usize },
}

impl File {
    /// Reads a file; the error says where it is none.
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
                // A key of some length, so that everything but its text is checked.
                fill(line, "k")?;
            }
            if send.key.is_some() && !send.fields.is_empty() {
                return Err("`key` and `fields` are two ways to say one thing".to_owned());
            }
            if matches!(step.how, How::Together(count) | How::Pipelined(count) if !(2..=1000).contains(&count)) {
                return Err("2 to 1000 requests are sent together".to_owned());
            }
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

/// Whether a request can be sent there.
pub(super) fn is_path(path: &str) -> Result<(), String> {
    let is_fine = path.starts_with('/') && path.bytes().all(|byte| matches!(byte, b'!'..=b'~'));
    is_fine.then_some(()).ok_or_else(|| format!("`{path}` is no path: it starts with / and has no spaces"))
}

/// A line of a header: its name and its value.
pub(super) fn header(line: &str) -> Result<(String, String), String> {
    let parts = line.split_once(':').map(|(name, value)| (name.trim(), value.trim()));
    let is_token =
        |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let parts = parts.filter(|(name, value)| is_token(name) && !value.contains(char::is_control));
    // It may be a credential, so it is not shown.
    let (name, value) = parts.ok_or("a line of a header is written as `Name: value`")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// `template` with the key `<unique>-<name>` for each `{name}`. `{name:255}` has 255 characters.
pub(super) fn fill(template: &str, unique: &str) -> Result<String, String> {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, opened)) = rest.split_once('{') {
        let (inside, after) = opened.split_once('}').ok_or_else(|| format!("`{template}` opens a {{ and leaves it"))?;
        let (name, form) = inside.split_once(':').unwrap_or((inside, ""));
        let key = key(unique, name);
        text.push_str(before);
        match form {
            "" => text.push_str(&key),
            // Padded in the middle, so that such keys differ in their last character.
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

/// The key that a case calls `name`: of its own in every run.
pub(super) fn key(unique: &str, name: &str) -> String {
    format!("{unique}-{name}")
}
