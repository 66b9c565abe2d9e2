//! The file of cases: requests and their expected responses. `docs/http.md` describes this file.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Write as _};

use serde::Deserialize;
use serde_json::Value;

/// Set of rules that a server follows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, clap::ValueEnum)]
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
    /// Path of the operation that most steps call.
    pub(super) path: String,
    /// Path of the second operation, for steps that need two operations.
    pub(super) other_path: String,
    /// Path of the counter, which shows how often the operations have run.
    pub(super) counter: String,
    /// Body of each request whose step sets no body.
    pub(super) body: Value,
    /// Header lines with the credentials of each caller, by the name of the caller.
    pub(super) callers: BTreeMap<String, Vec<String>>,
    /// Published texts (standards, manuals) that the cases quote, by name. The values, such as addresses, are for
    /// readers of the file.
    pub(super) sources: BTreeMap<String, Value>,
    pub(super) cases: Vec<Case>,
}

/// Name of the caller who sends a request without a `caller`.
pub(super) const FIRST: &str = "first";

/// A rule, and the steps that check it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    /// Stable name of the case, to which other programs can refer. The id of a removed case is never used again.
    pub(super) id: String,
    pub(super) name: String,
    /// The rule in words.
    pub(super) rule: String,
    /// Quoted sentences that ask for the rule, with the profiles to which they apply. A profile without such a sentence
    /// does not have the rule.
    pub(super) grounds: Vec<Ground>,
    pub(super) steps: Vec<Step>,
    /// Expected number of runs of the operations at the end.
    pub(super) runs: OneOf<u64>,
}

impl Case {
    /// Returns the sentence that asks for the rule in `profile`; `None` if the profile does not have the rule.
    pub(super) fn ground(&self, profile: Profile) -> Option<&Ground> {
        self.grounds.iter().find(|ground| ground.profiles.contains(&profile))
    }

    fn profiles(&self) -> impl Iterator<Item = Profile> {
        self.grounds.iter().flat_map(|ground| ground.profiles.iter().copied())
    }

    /// Checks the case except for its steps.
    fn check(&self) -> Result<(), &'static str> {
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if self.name.is_empty() || !self.name.chars().all(is_name) {
            return Err("a name is made of a-z, 0-9 and _");
        }
        let is_id = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if self.id.is_empty() || !self.id.chars().all(is_id) {
            return Err("an id is made of letters, digits and -");
        }
        if self.steps.is_empty() || self.profiles().next().is_none() {
            return Err("it has no steps, or no profiles");
        }
        if self.grounds.iter().any(|it| it.sentence.trim().is_empty() || it.source.trim().is_empty()) {
            return Err("a ground has a sentence and its source");
        }
        let mut seen = HashSet::new();
        match self.profiles().all(|profile| seen.insert(profile)) {
            true => Ok(()),
            false => Err("a profile has one ground"),
        }
    }
}

/// Sentence that asks for a rule.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ground {
    /// Profiles to which the sentence applies.
    profiles: Vec<Profile>,
    pub(super) level: Level,
    /// Text and section that hold the sentence.
    pub(super) source: String,
    pub(super) sentence: String,
}

/// Weight of a rule in a profile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// A server that breaks the rule fails.
    Required,
    /// The quoted sentence leaves the choice to the server. A server that breaks the rule gets advice, and
    /// does not fail.
    Advised,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Required => "required",
            Self::Advised => "advised",
        })
    }
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
    /// Query of the request's URL.
    pub(super) query: Option<String>,
    pub(super) caller: Option<String>,
    /// Header lines in addition to the key and to the credentials of the caller.
    pub(super) headers: Vec<String>,
    /// Key that the request sends: the name of a key, or a text in which a key replaces `{name}`. The profile decides
    /// whether the key is sent in quotes. Without `key` and `fields`, no key is sent.
    pub(super) key: Option<String>,
    /// Field lines that the request sends instead of `key`, as written, except that a key replaces `{name}`.
    pub(super) fields: Vec<String>,
    /// Body of the request: a text is sent as is, every other value as JSON.
    pub(super) body: Option<Value>,
}

/// Number of a step's requests, their connections, and the moment at which the client hangs up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum How {
    /// One request, over its own connection.
    #[default]
    Alone,
    /// This many requests at the same time, each over its own connection.
    Together(u16),
    /// This many requests at the same time over one connection.
    Pipelined(u16),
    /// One request, which is repeated until its response is not 409.
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
    /// Label of an earlier response that has the same status and body. If `status` is set too, only a 2xx response must
    /// be the same.
    pub(super) same_as: Option<String>,
    /// Label of an earlier response that has another body. Applies only to a 2xx response.
    pub(super) differs_from: Option<String>,
    /// Names of fields whose values, in their order, equal the values in the response `same_as`.
    pub(super) same_headers: Vec<String>,
    pub(super) headers: BTreeMap<String, Field>,
    /// Required members of the JSON body; `null` accepts any value.
    pub(super) body: Option<Value>,
    /// Explanation that the response must contain unless its status is 2xx.
    pub(super) explained: Option<Explanation>,
}

/// Kind of explanation that a refusal must contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Explanation {
    /// A link to documentation: `Link`, a problem of RFC 9457, or a URL in the body.
    Link,
    /// A body that is not blank, or a link.
    Text,
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
    /// Present if true, absent if false.
    Is(bool),
    /// Present once, with this text.
    Text(String),
    /// Absent, or present with another text than `not`.
    Other { not: String },
    /// An integer of at least this value.
    Number { at_least: u64 },
    /// Present this many times.
    Count { count: usize },
    /// Present once. The value is the idempotency key of the request with this `key`, without quotation marks, even in
    /// the profile `ietf`, whose requests send the key in quotation marks.
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
        let (mut names, mut ids) = (HashSet::new(), HashSet::new());
        for case in &file.cases {
            let wrong = |what: &str| format!("case `{}`: {what}", case.name);
            case.check().map_err(wrong)?;
            if !names.insert(&case.name) {
                return Err(wrong("there are two of this name"));
            }
            if !ids.insert(&case.id) {
                return Err(wrong(&format!("there are two with the id `{}`", case.id)));
            }
            let is_listed = |ground: &Ground| file.sources.keys().any(|name| ground.source.starts_with(&**name));
            if let Some(ground) = case.grounds.iter().find(|ground| !is_listed(ground)) {
                return Err(wrong(&format!("`{}` is none of the `sources`", ground.source)));
            }
            file.check_steps(case, &case.steps, &mut HashSet::new()).map_err(|what| wrong(&what))?;
        }
        match names.is_empty() {
            true => Err("it has no cases".to_owned()),
            false => Ok(file),
        }
    }

    fn check_steps(&self, case: &Case, steps: &[Step], labels: &mut HashSet<String>) -> Result<(), String> {
        for step in steps {
            // The request is checked first, so that a mistake in the file does not look like a mistake of the server.
            let caller = step.send.caller.as_deref().unwrap_or(FIRST);
            if !self.callers.contains_key(caller) {
                return Err(format!("there is no caller `{caller}`"));
            }
            step.send.check()?;
            if matches!(step.how, How::Together(count) | How::Pipelined(count) if !(2..=1000).contains(&count)) {
                return Err("2 to 1000 requests are sent together".to_owned());
            }
            // The expectations are checked next: a client that hangs up, for example, gets no response.
            let expect = &step.expect;
            if step.how.hangs_up() && (step.label.is_some() || !expect.is_empty()) {
                return Err("a client that hangs up gets no response to expect or to name".to_owned());
            }
            if !step.while_running.is_empty() && step.how != How::Alone {
                return Err("`while_running` needs a single request".to_owned());
            }
            if let Some(status) = &expect.status
                && let Some(profile) = case.profiles().find(|profile| status.of(*profile).is_none())
            {
                return Err(format!("no status is named for the profile {profile}"));
            }
            if !expect.same_headers.is_empty() && expect.same_as.is_none() {
                return Err("`same_headers` needs `same_as`".to_owned());
            }
            // The steps in `while_running` run first, so their labels exist when this response arrives.
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

impl Send {
    /// Checks that the request can be sent.
    fn check(&self) -> Result<(), String> {
        if let Some(method) =
            self.method.as_ref().filter(|it| it.is_empty() || !it.chars().all(|c| c.is_ascii_uppercase()))
        {
            return Err(format!("`{method}` is no method"));
        }
        if let Some(query) = &self.query {
            is_path(&format!("/?{query}")).map_err(|_| format!("`{query}` is no query"))?;
        }
        for line in &self.headers {
            header(line)?;
        }
        if self.fields.iter().chain(&self.key).any(|line| line.contains(char::is_control)) {
            return Err("a key goes over one line".to_owned());
        }
        for line in self.fields.iter().chain(&self.key) {
            fill(line, 0)?;
        }
        match self.key.is_some() && !self.fields.is_empty() {
            true => Err("`key` and `fields` exclude each other".to_owned()),
            false => Ok(()),
        }
    }
}

impl Expect {
    fn is_empty(&self) -> bool {
        self.status.is_none()
            && self.same_as.is_none()
            && self.differs_from.is_none()
            && self.headers.is_empty()
            && self.body.is_none()
            && self.explained.is_none()
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

/// Replaces each `{name}` in `template` by a key. `{name:255}` gives a key of 255 characters.
pub(super) fn fill(template: &str, unique: u128) -> Result<String, String> {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, opened)) = rest.split_once('{') {
        let (inside, after) = opened.split_once('}').ok_or_else(|| format!("`{template}` opens a {{ and leaves it"))?;
        let (name, form) = inside.split_once(':').unwrap_or((inside, ""));
        text.push_str(before);
        match form {
            "" => text.push_str(&uuid(unique, name)),
            // The padding is in the middle, so that keys of this length differ in their last characters.
            length => match length.parse::<usize>() {
                Ok(length @ 64..=100_000) => {
                    let shared = uuid(unique, "");
                    let padding = "x".repeat(length.saturating_sub(shared.len() + 1 + name.len()));
                    let _ = write!(text, "{shared}{padding}-{name}");
                }
                _ => return Err(format!("`{inside}` is neither a name nor name:LENGTH with 64 or more")),
            },
        }
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

/// Returns the text of the key that a request names as `key`: the key for this name, or the text with a key
/// for each `{name}`.
pub(super) fn key_text(key: &str, unique: u128) -> Result<String, String> {
    match key.contains('{') {
        true => fill(key, unique),
        false => Ok(uuid(unique, key)),
    }
}

/// Returns the key that a case calls `name`: a UUID, because some servers accept only UUIDs. The keys differ in each
/// run of a case.
fn uuid(unique: u128, name: &str) -> String {
    // The hash (FNV-1a) of the name makes the keys of different names in a case differ.
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let random = unique ^ u128::from(hash);
    // Version 4, and the variant of RFC 9562.
    let bits = (random & !(0xf << 76 | 0b11 << 62)) | 0x4 << 76 | 0b10 << 62;
    let digits = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT_IN: &str = include_str!("../../../cases/http.json");

    #[test]
    fn each_built_in_case_has_its_own_id_and_quotes_a_listed_source() {
        let file = File::parse(BUILT_IN).expect("the built-in cases");
        let mut ids = HashSet::new();
        for case in &file.cases {
            assert!(ids.insert(&case.id), "{} has the id of another case", case.name);
            assert!(!case.grounds.is_empty(), "{} has no ground", case.name);
            for ground in &case.grounds {
                assert!(!ground.sentence.is_empty(), "{} has no sentence", case.name);
                let is_listed = file.sources.keys().any(|name| ground.source.starts_with(&**name));
                assert!(is_listed, "{} quotes `{}`, which is not listed", case.name, ground.source);
                // A rule that only this project asks for (a source `idem…`) must not be required of any other server.
                let is_choice = ground.source.starts_with("idem");
                assert!(!is_choice || ground.level == Level::Advised, "{} requires a choice of idem", case.name);
            }
        }
        assert!(ids.len() > 40, "{} cases are too few: the check reads nothing", ids.len());
    }

    #[test]
    fn keys_are_uuids_and_each_name_in_a_case_has_its_own_key() {
        let (mut keys, names) = (HashSet::new(), ["", "a", "b", "A", "ab"]);
        for unique in [0, u128::MAX, 7] {
            for name in names {
                let key = key_text(&format!("{{{name}}}"), unique).expect("a template");
                let parts: Vec<_> = key.split('-').map(str::len).collect();
                assert_eq!(parts, [8, 4, 4, 4, 12], "{key}");
                assert!(key[14..].starts_with('4') && key[19..].starts_with(['8', '9', 'a', 'b']), "{key}");
                assert!(keys.insert(key), "two names have one key");
            }
        }
        assert_eq!(key_text("a", 7), fill("{a}", 7));
        let long = fill("{a:255}", 7).expect("a template");
        assert_eq!((long.len(), long.ends_with("x-a")), (255, true));
    }
}
