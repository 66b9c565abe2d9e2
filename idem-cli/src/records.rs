//! The commands for one record, and `purge`.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::ValueEnum;
use idem_runtime::codec::CodecName;
use idem_runtime::operator::{Operator, StepResolution};
use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::{Filter, Finish, Inspection, Revision, Standing, UnsentMessage, UnsentMessages};
use idem_runtime::{Key, OnCrash, Store, StoreExt};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::advice::advice;
use crate::report::{Output, STATUSES, Stop, confirm, content, described, human, line, millis, printable};
use crate::response;
use crate::scan;
use crate::shape::{self, Model};
use crate::shell::quoted;
use crate::steps::{self, StepChange};
use crate::store::StoreArguments;

/// Size in bytes of the largest result that the command reads from a file: far more than a policy allows by default
/// (256 KiB).
const MAX_RESULT_BYTES: u64 = 256 << 20;

/// Shows the record of a key.
///
/// The key may be written as an error or a log shows it, or as the store holds it.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Show {
    /// The key, as `<scope>/<text>`
    key: String,
    /// Also shows the recorded result, or the values of the steps with `--steps`, which may hold confidential data
    #[arg(long)]
    result: bool,
    /// Also shows each step of an unfinished operation: its name, attempt, state and inputs, and the size of its value
    #[arg(long)]
    steps: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Author of a change, and the confirmation.
#[derive(clap::Args)]
struct Change {
    /// Revision that `idem show` printed; the decision is refused if the record has changed since (default: the
    /// revision shown before the question)
    #[arg(long, value_name = "REVISION")]
    seen: Option<Revision>,
    /// Reason for the decision
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Person who decides (default: the name of the user)
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Does not ask for confirmation; needs `--seen`
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Records the end of an operation that was interrupted, has lapsed or ended without a result; duplicates get this end.
///
/// Refused while an attempt is running. Refused if a result is recorded, unless `--replace` states that it is wrong.
/// Refused if the result has another shape than good results of the same scope; `--shape` prints that shape.
///
/// With `--step`, records the end of a step in doubt, and allows the next delivery to run again.
#[derive(clap::Args)]
#[command(after_help = STATUSES, group = clap::ArgGroup::new("end").required(true))]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(crate) struct Resolve {
    /// The key, as `<scope>/<text>`
    key: String,
    /// The operation completed with the result in this file (`-`: standard input), in the form of the handler's codec
    #[arg(long, value_name = "FILE", group = "end")]
    completed: Option<PathBuf>,
    /// The operation completed with the HTTP response in this file (`-`: standard input), as `curl -i` prints it; for
    /// requests to the HTTP layer
    #[arg(long, value_name = "FILE", group = "end", conflicts_with = "codec")]
    http_response: Option<PathBuf>,
    /// The operation failed permanently with the error in this file, for handlers that record errors
    #[arg(long, value_name = "FILE", group = "end")]
    failed: Option<PathBuf>,
    /// The operation completed (or failed permanently, with `=failed`), and its result is unknown
    #[arg(long, value_name = "END", group = "end", num_args = 0..=1, require_equals = true, default_missing_value = "completed")]
    without_result: Option<OperationEnd>,
    /// Prints the shape of a good result (names and types of its fields, no values), and decides nothing
    #[arg(long, group = "end")]
    shape: bool,
    /// Name of a step in doubt, as `idem show --steps` prints it; the end is the end of this step, and `--completed`
    /// gives its value as JSON
    #[arg(long, value_name = "NAME", conflicts_with_all = ["http_response", "failed", "shape", "codec", "like", "other_shape", "replace"])]
    step: Option<String>,
    /// The effect of the step did not happen, and the next attempt runs the step
    #[arg(long, group = "end", requires = "step")]
    not_done: bool,
    /// Codec of the handler; JSON is checked, other codecs are not
    #[arg(long, value_name = "NAME", default_value = "json")]
    codec: String,
    /// Key of a record with a good result, whose shape the new result must have (default: other records of the scope,
    /// or else the recorded result; in Redis, NATS and DynamoDB only the recorded result)
    #[arg(long, value_name = "KEY")]
    like: Option<String>,
    /// Records a result whose shape differs from the shape of good results
    #[arg(long, conflicts_with = "shape")]
    other_shape: bool,
    /// Replaces the recorded result, which was wrong; the handler does not run in between
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    change: Change,
}

/// End that an operator records for an operation whose result is unknown.
#[derive(Clone, Copy, ValueEnum)]
enum OperationEnd {
    Completed,
    Failed,
}

/// Allows the next delivery to run again.
///
/// Refused while an attempt is running, and after the operation has finished: `idem discard` removes a recorded result.
/// The steps that have ended keep their values, and a step in doubt stays in doubt, unless an option removes steps.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Reopen {
    /// The key, as `<scope>/<text>`
    key: String,
    /// Removes this step and the steps that `idem show --steps` prints after it: their effects happen again
    #[arg(long, value_name = "STEP", conflicts_with = "drop_steps")]
    from: Option<String>,
    /// Removes all steps: their effects happen again
    #[arg(long)]
    drop_steps: bool,
    #[command(flatten)]
    change: Change,
}

/// Removes the recorded result of a finished operation, and allows the next delivery to run again.
///
/// Refused unless the operation has finished. `idem resolve --replace` corrects a wrong result without another run.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Discard {
    /// The key, as `<scope>/<text>`
    key: String,
    #[command(flatten)]
    change: Change,
}

/// Removes a record with its result: the next delivery runs as the first one.
///
/// Refused while an attempt is running. With `--prefix`, removes all records whose keys start with this prefix;
/// `--dry-run` only lists these records.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Forget {
    /// The key, as `<scope>/<text>`
    #[arg(required_unless_present = "prefix")]
    key: Option<String>,
    /// Prefix of the keys, as `<scope>/` or `<scope>/<text>`; running attempts and damaged records are left alone
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["key", "seen"])]
    prefix: Option<String>,
    /// Lists the records that would be removed, and removes none
    #[arg(long, requires = "prefix")]
    dry_run: bool,
    /// Allows a scan of the whole store in Redis, NATS and DynamoDB, to find the keys with a prefix
    #[arg(long, requires = "prefix")]
    scan: bool,
    #[command(flatten)]
    change: Change,
}

/// Ends the lease of a holder that is certainly gone.
///
/// Under `on_crash = retry` the next delivery runs; under `fail` the key becomes interrupted. If the holder is alive
/// after all, its body runs concurrently with the next attempt until its next renewal is refused.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Release {
    /// The key, as `<scope>/<text>`
    key: String,
    /// Confirms that the process is gone
    #[arg(long, required = true)]
    break_lease: bool,
    #[command(flatten)]
    change: Change,
}

/// Removes records whose retention has ended, and no others.
///
/// May be interrupted and repeated. Redis, NATS and DynamoDB remove such records on their own.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Purge {
    /// Number of records that one step examines
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: u32,
    /// Maximum number of removed records (default: no limit)
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Has no effect: `purge` never asks for confirmation, because an expired record counts as absent
    #[arg(long = "yes")]
    _yes: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

impl Resolve {
    pub(crate) fn json(&self) -> bool {
        self.change.json
    }
}

impl Reopen {
    pub(crate) fn json(&self) -> bool {
        self.change.json
    }
}

impl Discard {
    pub(crate) fn json(&self) -> bool {
        self.change.json
    }
}

impl Forget {
    pub(crate) fn json(&self) -> bool {
        self.change.json
    }
}

/// Decisions about messages.
#[derive(clap::Subcommand)]
pub(crate) enum Outbox {
    /// Lets messages that were set aside be sent again, by the next delivery or by a resender.
    #[command(after_help = STATUSES)]
    Resend(OutboxArguments),
    /// Gives up the messages that are not marked as sent.
    #[command(after_help = STATUSES)]
    Drop(OutboxArguments),
}

#[derive(clap::Args)]
pub(crate) struct OutboxArguments {
    /// The key, as `<scope>/<text>`
    key: String,
    #[command(flatten)]
    change: Change,
}

impl Outbox {
    pub(crate) fn json(&self) -> bool {
        let (Self::Resend(it) | Self::Drop(it)) = self;
        it.change.json
    }
}

impl Release {
    pub(crate) fn json(&self) -> bool {
        self.change.json
    }
}

/// Parses the key that was typed.
pub(crate) fn key<S: Store + ?Sized>(operator: &Operator<'_, S>, shown: &str) -> Result<Key, Stop> {
    operator.key(shown).map_err(|error| {
        Stop::Usage(format!(
            "`{shown}` is no key: {error}; write `<scope>/<text>`, as errors and logs show it (`idem key` makes one)"
        ))
    })
}

pub(crate) async fn show(arguments: &Show) -> Result<ExitCode, Stop> {
    let store = arguments.store.open_to_read().await?;
    let operator = store.operator();
    let key = key(&operator, &arguments.key)?;
    let Some(found) = operator.inspect(&key).await? else { return Err(nothing(&key, store.name())) };
    let mut object = object(&key, store.name(), &found);
    let mut text = text(&key, store.name(), &found);
    steps::add_to(&mut object, &found, arguments.steps, arguments.result);
    if arguments.steps {
        text.push_str(&steps::lines(&found, arguments.result));
    }
    if arguments.result
        && let Some(StoredResult::Encoded { bytes, .. }) = found.record.state.result()
    {
        match found.record.state.result().and_then(|result| response::shown(result, content)) {
            Some((response, fields)) => {
                let _ = write!(text, "\n{response}");
                object["result"]["http"] = fields;
            }
            None => {
                let (name, value) = content(bytes);
                let _ = write!(text, "\n{}{value}", if name == "hex" { "(hex) " } else { "" });
                object["result"][name] = value.into();
            }
        }
    }
    Output { json: arguments.json }.line(&object, &text)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn nothing(key: &Key, store: &str) -> Stop {
    Stop::Nothing(format!(
        "key `{key}` in {store}: there is no record; it has expired, was forgotten, or is in another namespace"
    ))
}

/// Returns the record as JSON, without the result.
pub(crate) fn object(key: &Key, store: &str, found: &Inspection) -> Value {
    let Inspection { record, expires_in, lapses_in, .. } = found;
    let mut object = json!({
        "key": key.to_string(),
        "scope": key.scope(),
        "stored": key.as_str(),
        "store": store,
        "state": state(found),
        "standing": found.standing().name(),
        "damage": found.damage,
        "attempt": record.attempt,
        "attempts_used": record.attempts_used,
        "revision": found.revision().to_string(),
        "expires_in_ms": Some(*expires_in).filter(|left| *left < Duration::MAX || found.damage.is_none()).map(millis),
        "first_seen_ms": found.first_seen.map(millis),
        "began_ms": found.began.map(millis),
        "holder": found.holder().map(|holder| holder.to_string()),
        "traceparent": found.traceparent().map(|trace| trace.as_str().to_owned()),
        "decided_by": found.decided_by(),
        "decided_reason": found.decided_reason(),
        "reconciliations": found.reconciliations(),
        "fingerprint": record.fingerprint.map(|print| print.short().to_string()),
    });
    // Only a pending record has a lease.
    if let State::Pending { lease, ttl, on_crash, begun } = &record.state {
        object["begun"] = (*begun).into();
        object["lapses_in_ms"] = lapses_in.map(millis).into();
        object["lease_ms"] = millis(*lease).into();
        object["ttl_ms"] = millis(*ttl).into();
        object["on_crash"] = format!("{on_crash:?}").to_lowercase().into();
    }
    if let Some(result) = record.state.result() {
        // The object shows only the kind and the size of the result, because the content may be confidential.
        object["result"] = match result {
            StoredResult::Encoded { codec, bytes } => {
                json!({ "is": "encoded", "codec": codec.as_str(), "bytes": bytes.len() })
            }
            StoredResult::LeftOut { codec, size } => {
                json!({ "is": "encoded", "codec": codec.as_str(), "bytes": size })
            }
            StoredResult::TooLarge { size } => json!({ "is": "too_large", "bytes": size }),
            StoredResult::Unreadable { reason } => json!({ "is": "unreadable", "reason": &**reason }),
            _ => json!({ "is": "unknown" }),
        };
    }
    if let Some(unsent) = found.unsent_messages() {
        // Bodies and headers may be confidential.
        let about = |it: &UnsentMessage| {
            json!({
                "destination": it.message().destination(), "id": it.message().id(), "bytes": it.message().body().len(),
                "refusals": it.refusals(), "set_aside": it.is_set_aside(),
            })
        };
        object["unsent"] = unsent.messages().iter().map(about).collect();
    }
    object
}

/// Returns the messages that are not marked as sent, for a person.
fn messages(unsent: &UnsentMessages) -> String {
    let about = |it: &UnsentMessage| {
        let refused = match (it.is_set_aside(), it.refusals()) {
            (true, refusals) => format!(", set aside after {refusals} refusals"),
            (false, 0) => String::new(),
            (false, refusals) => format!(", refused {refusals} times"),
        };
        format!(
            "{} ({} bytes for `{}`{refused})",
            it.message().id(),
            it.message().body().len(),
            it.message().destination()
        )
    };
    unsent.messages().iter().map(about).collect::<Vec<_>>().join("; ")
}

/// Returns how often the reconciler of the handler was asked, and how its latest question ended; `None` if the
/// reconciler was not asked, or the operation has finished.
pub(crate) fn questions(found: &Inspection) -> Option<String> {
    let last = match found.standing() {
        Standing::Running => "the latest attempt has asked".to_owned(),
        Standing::Lapsed => "the last question was cut off".to_owned(),
        Standing::Interrupted => {
            let ago = found.began.map_or(String::new(), |began| format!(" {} ago", human(began)));
            format!("the last one{ago} did not settle it")
        }
        _ => return None,
    };
    let times = match found.reconciliations() {
        0 => return None,
        1 => "once".to_owned(),
        times => format!("{times} times"),
    };
    Some(format!("reconciler asked {times}, {last}"))
}

/// Returns the name of the recorded state.
fn state(found: &Inspection) -> &'static str {
    match found.damage {
        Some(_) => Standing::Damaged.name(),
        None => found.record.state.name(),
    }
}

/// Returns the record as text for a person, with the possible next steps.
fn text(key: &Key, store: &str, found: &Inspection) -> String {
    facts(key, store, found).iter().map(|(name, value)| line(name, value)).collect::<Vec<_>>().concat()
}

/// Name and value of a line about a record.
pub(crate) type Fact = (&'static str, String);

/// Returns the facts about a record for a person, and last the possible next steps.
pub(crate) fn facts(key: &Key, store: &str, found: &Inspection) -> Vec<Fact> {
    match &found.damage {
        Some(why) => facts_of_damage(key, store, found, why),
        None => facts_of_record(key, store, found),
    }
}

fn facts_of_damage(key: &Key, store: &str, found: &Inspection, why: &str) -> Vec<Fact> {
    let what_now = "every delivery fails until you decide: find out whether its handler is running and whether the effect \
                    happened; `idem forget` removes the record, and the next delivery runs as the first one";
    vec![
        ("key", key.to_string()),
        ("store", store.to_owned()),
        ("state", format!("{}: {why}", state(found))),
        ("revision", found.revision().to_string()),
        ("what now", what_now.to_owned()),
    ]
}

fn facts_of_record(key: &Key, store: &str, found: &Inspection) -> Vec<Fact> {
    let Inspection { record, expires_in, lapses_in, .. } = found;
    let mut facts = Vec::new();
    let mut line = |name, value: &str| facts.push((name, value.to_owned()));
    let ago = |time: Duration| format!("{} ago", human(time));
    let lapsed = found.standing() == Standing::Lapsed;
    line("key", &key.to_string());
    line("store", store);
    line("state", &format!("{}{}", record.state.name(), if lapsed { ", its lease has lapsed" } else { "" }));
    let counted = match record.attempts_used == record.attempt {
        true => String::new(),
        false => format!(" ({} counted against max_attempts)", record.attempts_used),
    };
    line("attempt", &format!("{}{counted}", record.attempt));
    line("revision", &found.revision().to_string());
    // The following lines of output are printed only if the record contains their values.
    if let Some(holder) = found.holder() {
        let process = holder.process().map_or(String::new(), |process| format!(", process {process}"));
        let name = holder.name().map_or(String::new(), |name| format!(", {name}"));
        line(if record.is_pending() { "holder" } else { "held by" }, &format!("{}{process}{name}", holder.host()));
    }
    if let Some(first) = found.first_seen {
        line("first seen", &ago(first));
    }
    if let Some(began) = found.began {
        line("began", &ago(began));
    }
    if let (State::Pending { lease, on_crash, begun, .. }, Some(left)) = (&record.state, lapses_in) {
        let left = if lapsed { String::new() } else { format!(", lapses in {} unless renewed", human(*left)) };
        line("lease", &format!("{}{left}", human(*lease)));
        line("on crash", &format!("{on_crash:?}").to_lowercase());
        let begun = match (begun, on_crash) {
            (true, _) => "yes",
            (false, OnCrash::Fail) => "no: the body has done nothing",
            (false, _) => "not marked: the body may have begun",
        };
        line("begun", begun);
    }
    if let Some(result) = record.state.result() {
        line("result", &described(result));
    }
    if let Some(print) = record.fingerprint {
        line("fingerprint", &print.short().to_string());
    }
    if let Some(trace) = found.traceparent() {
        line("trace", trace.trace_id());
    }
    if let Some(questions) = questions(found) {
        line("in doubt", &questions);
    } else if found.decided_by().is_some() || found.decided_reason().is_some() {
        let by = found.decided_by().unwrap_or("unknown");
        let reason = found.decided_reason().map_or(String::new(), |reason| format!(": {reason}"));
        line("decided by", &format!("{by}{reason}"));
    }
    if let Some(steps) = steps::summary(found) {
        line("steps", &steps);
    }
    if let Some(unsent) = found.unsent_messages() {
        line("unsent", &messages(&unsent));
    }
    line("expires in", &human(*expires_in));
    line("what now", &advice(record, lapses_in.unwrap_or(Duration::MAX)));
    facts
}

/// Decision about a record.
pub(crate) enum Act {
    Resolve(Finish, String),
    Replace(Finish, String),
    Reopen,
    ReopenWith(StepChange),
    Discard,
    Forget,
    BreakLease,
    ResendMessages,
    DropMessages,
}

impl Act {
    /// Returns the question before the decision, and the message after the decision.
    pub(crate) fn words(&self, key: &Key, found: &Inspection, attempt: u32) -> (String, String) {
        let about = match found.damage {
            Some(_) => format!("`{key}`, which is damaged"),
            None => format!("`{key}`, attempt {attempt}"),
        };
        let recorded = found.record.state.result().map(|result| {
            let end = found.record.state.name();
            format!("that it {end} (result: {})", described(result))
        });
        let unsent = found.unsent_messages().filter(|_| matches!(self, Self::Discard | Self::Forget));
        let unsent = unsent.map_or(String::new(), |unsent| {
            format!(" and its messages that are not sent ({})", unsent.messages().len())
        });
        let given_up = recorded.map_or(String::new(), |recorded| format!(", and give up {recorded}{unsent}"));
        match self {
            Self::Replace(_, end) => (
                format!("Resolve {about} as {end}{given_up}"),
                format!("resolved {about} as {end}, in place of what was recorded; duplicates are told so"),
            ),
            Self::Discard => (
                format!("Let {about} run again{given_up}"),
                format!("discarded what {about} has recorded; the next delivery runs again"),
            ),
            Self::Resolve(_, end) => {
                (format!("Resolve {about} as {end}"), format!("resolved {about} as {end}; duplicates are told so"))
            }
            Self::Reopen => (format!("Reopen {about}"), format!("reopened {about}; the next delivery runs again")),
            Self::ReopenWith(StepChange { what, .. }) => {
                (format!("Reopen {about}{what}"), format!("reopened {about}{what}; the next delivery runs again"))
            }
            Self::Forget if found.damage.is_some() => (
                format!("Forget {about}, whether its handler is running or has completed"),
                format!("forgot `{key}`, which was damaged; the next delivery runs as the first one"),
            ),
            Self::Forget => (
                format!("Forget {about}{given_up}"),
                format!("forgot {about}; a duplicate that still comes runs as the first one"),
            ),
            Self::BreakLease => (
                format!("End the lease of {about}"),
                format!("ended the lease of {about}; what follows is what follows a crash"),
            ),
            Self::ResendMessages => (
                format!("Send the unsent messages of {about} again"),
                format!("the next delivery of {about}, or a resender, sends its messages"),
            ),
            Self::DropMessages => (
                format!("Give up the unsent messages of {about}"),
                format!("gave up the unsent messages of {about}; nothing sends them any more"),
            ),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Resolve(..) => "resolve",
            Self::Replace(..) => "replace",
            Self::Reopen => "reopen",
            Self::ReopenWith(change) => change.name,
            Self::Discard => "discard",
            Self::Forget => "forget",
            Self::BreakLease => "break_lease",
            Self::ResendMessages => "resend_messages",
            Self::DropMessages => "drop_messages",
        }
    }

    /// Makes the decision about the record that the person has seen.
    pub(crate) async fn apply<S: Store + ?Sized>(
        self,
        operator: &Operator<'_, S>,
        key: &Key,
        seen: Revision,
        store: &str,
    ) -> Result<(), Stop> {
        match self {
            Self::Resolve(finish, _) => operator.resolve(key, seen, finish.into()).await?,
            Self::Replace(finish, _) => operator.replace(key, seen, finish.into()).await?,
            Self::Reopen => operator.reopen(key, seen).await?,
            Self::ReopenWith(change) => operator.reopen_with(key, seen, change.into_journal()).await?,
            Self::Discard => operator.discard(key, seen).await?,
            Self::BreakLease => operator.break_lease(key, seen).await?,
            Self::ResendMessages => operator.resend_messages(key, seen).await?,
            Self::DropMessages => operator.drop_messages(key, seen).await?,
            Self::Forget => {
                if !operator.forget(key, seen).await? {
                    return Err(nothing(key, store));
                }
            }
        }
        Ok(())
    }
}

pub(crate) async fn resolve(arguments: &Resolve) -> Result<ExitCode, Stop> {
    let Resolve { key, completed, http_response, failed, without_result, codec, replace, change, .. } = arguments;
    if arguments.shape {
        return print_shape(arguments).await;
    }
    if let Some(step) = &arguments.step {
        return resolve_step(arguments, step).await;
    }
    // The result is read before the person is asked to confirm, so that a wrong file is reported before the question.
    let (finish, end) = match (completed, http_response, failed, without_result) {
        (_, Some(file), ..) => {
            let result = response::read(&bytes_of(file)?).map_err(|problem| wrong(file, &problem))?;
            let end = format!("completed with {}", described(&result));
            (Finish::Completed(result), end)
        }
        (Some(file), ..) => {
            let result = read(file, codec)?;
            let end = format!("completed with {}", described(&result));
            (Finish::Completed(result), end)
        }
        (.., Some(file), _) => {
            let result = read(file, codec)?;
            let end = format!("failed with {}", described(&result));
            (Finish::Failed(result), end)
        }
        (.., Some(OperationEnd::Failed)) => {
            (Finish::Failed(StoredResult::Unencodable), "failed, its error unknown".to_owned())
        }
        _ => (Finish::Completed(StoredResult::Unencodable), "completed, its result unknown".to_owned()),
    };
    let act = if *replace { Act::Replace } else { Act::Resolve };
    let comparison = Comparison { like: arguments.like.as_deref(), other_shape: arguments.other_shape };
    decide(change, key, |_, _, _| Ok(act(finish, end)), comparison).await
}

/// Records the end of a step in doubt.
async fn resolve_step(arguments: &Resolve, step: &str) -> Result<ExitCode, Stop> {
    let Resolve { key, completed, without_result, change, .. } = arguments;
    let (resolution, end) = match (completed, without_result) {
        (Some(file), _) => {
            let value = read(file, "json")?;
            let end = format!("ended with {}", described(&value));
            (StepResolution::from(value), end)
        }
        (_, Some(OperationEnd::Failed)) => {
            return Err(Stop::Usage(
                "a step does not end with an error; `--not-done` lets the next attempt run the step".to_owned(),
            ));
        }
        (_, Some(OperationEnd::Completed)) => {
            (StepResolution::done_without_value(), "ended, its value unknown".to_owned())
        }
        (None, None) => (StepResolution::not_done(), "not done".to_owned()),
    };
    let act = |operator: &Operator<'_, _>, key: &Key, found: &Inspection| {
        StepChange::resolve(operator, key, found, step, &resolution, &end).map(Act::ReopenWith)
    };
    decide(change, key, act, Comparison::default()).await
}

/// Options of the comparison of a new result with good results.
#[derive(Clone, Copy, Default)]
struct Comparison<'a> {
    /// Key of a record with a good result.
    like: Option<&'a str>,
    /// True if a result is recorded even if its shape differs.
    other_shape: bool,
}

/// Returns the model of good results for `key`; `None` if no good result is known. Redis and DynamoDB list no records
/// without a scan.
async fn model_of<S: Store + ?Sized>(
    operator: &Operator<'_, S>,
    key: &Key,
    found: &Inspection,
    completed: bool,
    (like, kind): (Option<&str>, &str),
) -> Result<Option<Model>, Stop> {
    match like {
        Some(like) => Ok(Some(shape::model_like(operator, &self::key(operator, like)?).await?)),
        None => shape::model(operator, key, found, completed, scan::check_scan(kind, false).is_ok()).await,
    }
}

/// Prints the shape of a good result for the key.
async fn print_shape(arguments: &Resolve) -> Result<ExitCode, Stop> {
    let store = arguments.change.store.open_to_read().await?;
    let operator = store.operator();
    let key = key(&operator, &arguments.key)?;
    let Some(found) = operator.inspect(&key).await? else { return Err(nothing(&key, store.name())) };
    let completed = !matches!(found.record.state, State::Failed(_));
    let about = (arguments.like.as_deref(), store.name());
    let Some(model) = model_of(&operator, &key, &found, completed, about).await? else {
        return Err(Stop::Nothing(format!("key `{key}` in {}: {NO_MODEL}", store.name())));
    };
    let from: Vec<_> = model.from.iter().map(Key::to_string).collect();
    let object = json!({
        "key": key.to_string(), "store": store.name(), "action": "shape", "codec": model.codec(),
        "shape": model.shape(), "from": from,
    });
    Output { json: arguments.change.json }.line(&object, &printable(&model.to_string()))?;
    Ok(ExitCode::SUCCESS)
}

/// Text in place of a shape if no good result is known.
const NO_MODEL: &str = "no good result is known to compare with; `--like KEY` names a record that has one";

pub(crate) async fn reopen(arguments: &Reopen) -> Result<ExitCode, Stop> {
    let act = |operator: &Operator<'_, _>, key: &Key, found: &Inspection| match &arguments.from {
        Some(step) => StepChange::from(operator, key, found, step).map(Act::ReopenWith),
        None if arguments.drop_steps => Ok(Act::ReopenWith(StepChange::without_steps(found))),
        None => Ok(Act::Reopen),
    };
    decide(&arguments.change, &arguments.key, act, Comparison::default()).await
}

pub(crate) async fn discard(arguments: &Discard) -> Result<ExitCode, Stop> {
    decide(&arguments.change, &arguments.key, |_, _, _| Ok(Act::Discard), Comparison::default()).await
}

pub(crate) async fn forget(arguments: &Forget) -> Result<ExitCode, Stop> {
    match (&arguments.key, &arguments.prefix) {
        (_, Some(prefix)) => forget_all(arguments, prefix).await,
        (key, None) => {
            let key = key.as_deref().unwrap_or_default();
            decide(&arguments.change, key, |_, _, _| Ok(Act::Forget), Comparison::default()).await
        }
    }
}

pub(crate) async fn outbox(arguments: &Outbox) -> Result<ExitCode, Stop> {
    let (arguments, act) = match arguments {
        Outbox::Resend(it) => (it, Act::ResendMessages),
        Outbox::Drop(it) => (it, Act::DropMessages),
    };
    // Messages that can't be read are shown as the damage of the result, and can be given up.
    let is_unreadable =
        |found: &Inspection| matches!(found.record.state.result(), Some(StoredResult::Unreadable { .. }));
    let act = move |_: &Operator<'_, _>, key: &Key, found: &Inspection| match found.unsent_messages() {
        Some(_) => Ok(act),
        None if is_unreadable(found) => Ok(act),
        None => Err(Stop::Nothing(format!("`{key}` has no messages that are not marked as sent"))),
    };
    decide(&arguments.change, &arguments.key, act, Comparison::default()).await
}

pub(crate) async fn release(arguments: &Release) -> Result<ExitCode, Stop> {
    debug_assert!(arguments.break_lease, "required");
    decide(&arguments.change, &arguments.key, |_, _, _| Ok(Act::BreakLease), Comparison::default()).await
}

/// Removes, or lists, all records whose key starts with `prefix`.
async fn forget_all(arguments: &Forget, prefix: &str) -> Result<ExitCode, Stop> {
    let Forget { change, dry_run, scan, .. } = arguments;
    let Some((scope, _)) = prefix.split_once('/') else {
        return Err(Stop::Usage(format!("`{prefix}` is no prefix: write `<scope>/` or `<scope>/<text>`")));
    };
    let place = change.store.place()?;
    scan::check_scan(place.kind(), *scan)?;
    let store = match dry_run {
        true => change.store.open_to_read().await?,
        false => change.store.open().await?,
    };
    let operator = store.operator().by(change.by.clone().unwrap_or_else(user)).reason(&change.reason);
    let mut filter = Filter::new().scope(scope).limit(Filter::MAX_LIMIT);
    filter.scan = *scan;
    // All records are collected before the first decision, so that each decision names the revision that was listed.
    let mut found = Vec::new();
    scan::each(&operator, filter, |key, inspection| {
        if key.to_string().starts_with(prefix) {
            found.push((key.clone(), inspection.revision()));
        }
        Ok(true)
    })
    .await?;
    if found.is_empty() {
        return Err(Stop::Nothing(format!("no key in {} begins with `{prefix}`", store.name())));
    }
    let output = Output { json: change.json };
    let said = |key: &Key, attempt: u32, action: &str, said: &str| {
        let object = json!({ "key": key.to_string(), "store": store.name(), "action": action, "attempt": attempt });
        output.line(&object, &format!("{said:<13}{key}, attempt {attempt}"))
    };
    if *dry_run {
        for (key, seen) in &found {
            said(key, seen.attempt(), "would_forget", seen.standing().name())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let count = found.len();
    // The question shows the first ten records, so that the person notices a wrong prefix.
    let mut some = String::new();
    for (key, seen) in found.iter().take(10) {
        let _ = writeln!(some, "{key}, attempt {}, {}", seen.attempt(), seen.standing());
    }
    some.push_str(if count > 10 { "… (`--dry-run` lists all)\n" } else { "" });
    let results =
        found.iter().filter(|(_, seen)| matches!(seen.standing(), Standing::Completed | Standing::Failed)).count();
    let lost = format!("Forget {count} records that begin with `{prefix}`, and give up the results of {results}");
    confirm(change.yes, &some, &lost)?;
    let mut refused = 0;
    for (key, seen) in found {
        let attempt = seen.attempt();
        // The handler of a damaged record may be running, so a person has to decide about each damaged record.
        if seen.standing() == Standing::Damaged {
            refused += 1;
            said(&key, attempt, "refused", "left")?;
            continue;
        }
        match operator.forget(&key, seen).await {
            Ok(true) => said(&key, attempt, "forget", "forgotten")?,
            // The record has expired, or another process removed it first.
            Ok(false) => {}
            Err(error) => match Stop::from(error) {
                Stop::Refused(_) => {
                    refused += 1;
                    said(&key, attempt, "refused", "left")?;
                }
                stop => return Err(stop),
            },
        }
    }
    match refused {
        0 => Ok(ExitCode::SUCCESS),
        refused => {
            let left = "are running, are damaged or have changed, and were not removed";
            Err(Stop::Refused(format!("{refused} of {count} records {left}")))
        }
    }
}

/// Makes the decision that `act` returns for the record of the key.
async fn decide(
    change: &Change,
    shown: &str,
    act: impl FnOnce(&Operator<'_, Arc<dyn Store>>, &Key, &Inspection) -> Result<Act, Stop>,
    comparison: Comparison<'_>,
) -> Result<ExitCode, Stop> {
    let store = change.store.open().await?;
    let operator = store.operator().by(change.by.clone().unwrap_or_else(user)).reason(&change.reason);
    let key = key(&operator, shown)?;
    let Some(found) = operator.inspect(&key).await? else { return Err(nothing(&key, store.name())) };
    let seen = match change.seen {
        Some(seen) => seen,
        None if change.yes => {
            let shown = key.to_string();
            return Err(Stop::Usage(format!(
                "no revision shows which record you have seen; nothing was changed; add `--seen` with the revision that \
                 `idem show {}` prints",
                quoted(&shown)
            )));
        }
        // Without `--seen`, the decision names the revision that the question shows.
        None => found.revision(),
    };
    let attempt = seen.attempt();
    let act = act(&operator, &key, &found)?;
    let (question, done) = act.words(&key, &found, attempt);
    let mut about = text(&key, store.name(), &found);
    if let Act::Resolve(finish, _) | Act::Replace(finish, _) = &act {
        about.push_str(&checked(&operator, store.name(), &key, &found, finish, comparison).await?);
    }
    confirm(change.yes, &about, &question)?;
    let name = act.name();
    act.apply(&operator, &key, seen, store.name()).await?;
    let object = json!({ "key": key.to_string(), "store": store.name(), "action": name, "attempt": attempt });
    Output { json: change.json }.line(&object, &done)?;
    Ok(ExitCode::SUCCESS)
}

/// Compares the result that is to be recorded with good results. Returns the lines of this comparison, for the
/// question.
async fn checked<S: Store + ?Sized>(
    operator: &Operator<'_, S>,
    store: &str,
    key: &Key,
    found: &Inspection,
    finish: &Finish,
    comparison: Comparison<'_>,
) -> Result<String, Stop> {
    if !matches!(finish.result(), StoredResult::Encoded { .. }) {
        return Ok(String::new());
    }
    let about = (comparison.like, store);
    let Some(model) = model_of(operator, key, found, shape::completes(finish), about).await? else {
        return Ok(line("good result", NO_MODEL));
    };
    let mut lines = line("good result", &model.to_string());
    let differences = model.differences(finish.result());
    match differences.is_empty() {
        true => {}
        false if comparison.other_shape => lines.push_str(&line("differs", &differences.join("; "))),
        false => {
            let found = differences.join("; ");
            return Err(Stop::Refused(format!(
                "key `{key}` in {store}: the result has not the shape of a good result: {found}; nothing was changed; a good \
                 result is {model}; correct the file, or add `--other-shape` if the handler decodes it"
            )));
        }
    }
    Ok(lines)
}

/// Returns the name of the current user.
pub(crate) fn user() -> String {
    ["USER", "LOGNAME", "USERNAME"].iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default()
}

fn wrong(path: &Path, problem: &str) -> Stop {
    Stop::Usage(format!("the result in `{}` can't be recorded: {problem}", path.display()))
}

/// Returns the result with these bytes, in the form of `codec`. The error names the position of a problem but never the
/// content, which may be customer data.
pub(crate) fn encoded(mut bytes: Bytes, codec: CodecName) -> Result<StoredResult, String> {
    if codec.as_str() == "json" {
        bytes = bytes.slice_ref(bytes.trim_ascii());
        if let Err(error) = serde_json::from_slice::<IgnoredAny>(&bytes) {
            return Err(format!("it is not JSON, at line {} column {}", error.line(), error.column()));
        }
    }
    Ok(StoredResult::Encoded { codec, bytes })
}

/// Parses the name of a codec.
pub(crate) fn codec_name(codec: &str) -> Result<CodecName, Stop> {
    let problem = || Stop::Usage(format!("`{codec}` is no codec: its name has 1 to 15 bytes of ASCII"));
    CodecName::new(codec.as_bytes()).ok_or_else(problem)
}

/// Reads a file, or standard input.
fn bytes_of(path: &Path) -> Result<Bytes, Stop> {
    let mut bytes = Vec::new();
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().take(MAX_RESULT_BYTES + 1).read_to_end(&mut bytes),
        false => std::fs::File::open(path).and_then(|file| file.take(MAX_RESULT_BYTES + 1).read_to_end(&mut bytes)),
    };
    let read = read.map_err(|error| wrong(path, &error.to_string()))?;
    if read as u64 > MAX_RESULT_BYTES {
        return Err(wrong(path, &format!("it has more than {MAX_RESULT_BYTES} bytes")));
    }
    Ok(Bytes::from(bytes))
}

/// Reads the result in the file at `path`, in the form of `codec`.
fn read(path: &Path, codec: &str) -> Result<StoredResult, Stop> {
    let codec = codec_name(codec)?;
    encoded(bytes_of(path)?, codec).map_err(|problem| wrong(path, &problem))
}

pub(crate) async fn purge(arguments: &Purge) -> Result<ExitCode, Stop> {
    let store = arguments.store.open().await?;
    let operator = store.operator();
    let mut removed = 0;
    loop {
        let left = arguments.limit.map(|limit| limit - removed);
        let batch = left.map_or(arguments.batch, |left| arguments.batch.min(u32::try_from(left).unwrap_or(u32::MAX)));
        let now = match batch {
            0 => 0,
            batch => operator.purge(batch).await.map_err(|error| so_far(removed, error.into()))?,
        };
        removed += now;
        if now == 0 {
            break;
        }
    }
    let object = json!({ "store": store.name(), "action": "purge", "removed": removed });
    let text = match (store.name(), removed) {
        ("redis" | "nats" | "dynamodb", 0) => format!("{} removes expired records by itself", store.name()),
        _ => format!("{removed} expired records removed from {}", store.name()),
    };
    Output { json: arguments.json }.line(&object, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds the number of removed records to a failure in the middle of a purge.
fn so_far(removed: u64, stop: Stop) -> Stop {
    match stop {
        Stop::Unreachable(text) => {
            Stop::Unreachable(format!("{text}; {removed} expired records were removed before that: repeat it"))
        }
        stop => stop,
    }
}
