//! Steps of an operation: their states, and the decisions about them.

use std::fmt::Write as _;

use idem_runtime::operator::{Operator, StepResolution};
use idem_runtime::record::{Record, StoredResult};
use idem_runtime::store::{Inspection, Journal, JournalError, JournaledStep, Standing, StepState};
use idem_runtime::{Key, Store};
use serde_json::{Value, json};

use crate::report::{Stop, content, described, line, printable};

/// Number of steps that a text names before it counts the rest.
const NAMED: usize = 3;

/// Returns the name of the state of a step. A step that the running attempt has begun is running.
fn state(found: &Inspection, step: &JournaledStep) -> &'static str {
    match step.state() {
        StepState::InDoubt if found.standing() == Standing::Running && step.attempt() == found.attempt() => "running",
        state => state.name(),
    }
}

/// Returns the names of the steps in doubt. The steps that the running attempt has begun are not in doubt.
fn in_doubt(found: &Inspection) -> Result<Vec<String>, JournalError> {
    let steps = found.steps()?;
    let names = steps.iter().filter(|step| state(found, step) == StepState::InDoubt.name());
    Ok(names.map(|step| step.name().to_owned()).collect())
}

/// Returns the first names of a list, in quotes: `book`, `pay` and 2 more.
fn named(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().take(NAMED).map(|name| format!("`{name}`")).collect();
    match (names.len().saturating_sub(NAMED), &quoted[..]) {
        (0, [before @ .., last]) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        (0, _) => quoted.concat(),
        (more, _) => format!("{} and {more} more", quoted.join(", ")),
    }
}

/// Returns the names of the steps in doubt for the advice about an operation that does not run; `None` if there are
/// none.
pub(crate) fn doubts(record: &Record) -> Option<String> {
    let steps = record.journal.as_ref()?.steps().ok()?;
    let names: Vec<_> =
        steps.iter().filter(|step| step.state() == StepState::InDoubt).map(|step| step.name().to_owned()).collect();
    match &names[..] {
        [] => None,
        [name] => Some(format!("step `{name}`")),
        names => Some(format!("steps {}", named(names))),
    }
}

/// Returns a summary of the steps: their number, and the steps in doubt. `None` if the record has no journal.
pub(crate) fn summary(found: &Inspection) -> Option<String> {
    Some(match (found.steps(), in_doubt(found)) {
        (Ok(steps), _) if steps.is_empty() => return None,
        (Ok(steps), Ok(names)) => match names.len() {
            0 => format!("{}, none in doubt", steps.len()),
            count => format!("{}, {count} in doubt: {}", steps.len(), named(&names)),
        },
        (Err(error), _) | (_, Err(error)) => format!("can't be read: {error}"),
    })
}

/// Adds the steps to the object of a record: their numbers, and with `listed` each step. `values`: whether the steps
/// have their values.
pub(crate) fn add_to(object: &mut Value, found: &Inspection, listed: bool, values: bool) {
    let (steps, doubts) = match (found.steps(), in_doubt(found)) {
        (Ok(steps), Ok(doubts)) => (steps, doubts.len()),
        (Err(error), _) | (_, Err(error)) => {
            object["steps"] = Value::Null;
            object["steps_in_doubt"] = Value::Null;
            object["journal_damage"] = error.to_string().into();
            if listed {
                object["journal"] = Value::Null;
            }
            return;
        }
    };
    object["steps"] = steps.len().into();
    object["steps_in_doubt"] = doubts.into();
    if listed {
        object["journal"] = steps.iter().map(|step| step_object(found, step, values)).collect();
    }
}

fn step_object(found: &Inspection, step: &JournaledStep, values: bool) -> Value {
    let mut value = step.value().map_or(Value::Null, |value| match value {
        StoredResult::Encoded { codec, bytes } => {
            json!({ "is": "encoded", "codec": codec.as_str(), "bytes": bytes.len() })
        }
        StoredResult::TooLarge { size } => json!({ "is": "too_large", "bytes": size }),
        _ => json!({ "is": "unknown" }),
    });
    if let (true, Some(StoredResult::Encoded { bytes, .. })) = (values, step.value()) {
        let (form, text) = content(bytes);
        value[form] = text.into();
    }
    json!({
        "name": step.name(),
        "attempt": step.attempt(),
        "state": state(found, step).replace(' ', "_"),
        "inputs": step.inputs().map(|inputs| inputs.short().to_string()),
        "value": value,
    })
}

/// Returns a line for each step, in the order of the journal.
pub(crate) fn lines(found: &Inspection, values: bool) -> String {
    // The summary has said that the journal can't be read.
    let steps = found.steps().unwrap_or_default();
    let mut text = String::new();
    for (at, step) in steps.iter().enumerate() {
        let state = state(found, step);
        let since = if step.state() == StepState::InDoubt { "since" } else { "in" };
        let mut said = format!("{}: {state} {since} attempt {}", step.name(), step.attempt());
        if let Some(inputs) = step.inputs() {
            let _ = write!(said, ", inputs {}", inputs.short());
        }
        if let Some(value) = step.value() {
            let _ = write!(said, ", {}", value_described(value));
        }
        text.push_str(&line(&format!("step {}", at + 1), &said));
        if let (true, Some(StoredResult::Encoded { bytes, .. })) = (values, step.value()) {
            let (form, value) = content(bytes);
            let hex = if form == "hex" { "(hex) " } else { "" };
            text.push_str(&line("", &format!("{hex}{}", printable(&value))));
        }
    }
    text
}

fn value_described(value: &StoredResult) -> String {
    match value {
        StoredResult::TooLarge { size } => format!("its value was not recorded: {size} bytes are too many"),
        StoredResult::Encoded { .. } => described(value),
        _ => "its value is unknown".to_owned(),
    }
}

/// Decision about the steps of an operation, which reopens the operation.
pub(crate) struct StepChange {
    journal: Option<Journal>,
    /// End of a text that begins with "Reopen" and the name of the operation.
    pub(crate) what: String,
    /// Name of the decision in JSON.
    pub(crate) name: &'static str,
}

impl StepChange {
    /// Settles a step in doubt. `end`: the end of the step, for the question.
    pub(crate) fn resolve<S: Store + ?Sized>(
        operator: &Operator<'_, S>,
        key: &Key,
        found: &Inspection,
        step: &str,
        resolution: &StepResolution,
        end: &str,
    ) -> Result<Self, Stop> {
        let journal = operator.with_step_resolved(key, found, step, resolution)?;
        Ok(Self { journal: Some(journal), what: format!(", with step `{step}` {end}"), name: "resolve_step" })
    }

    /// Removes a step and the steps after it.
    pub(crate) fn from<S: Store + ?Sized>(
        operator: &Operator<'_, S>,
        key: &Key,
        found: &Inspection,
        step: &str,
    ) -> Result<Self, Stop> {
        let journal = operator.before_step(key, found, step)?;
        let kept = journal.as_ref().and_then(|journal| journal.steps().ok()).map_or(0, |steps| steps.len());
        let again = found.steps().unwrap_or_default().split_off(kept);
        Ok(Self { journal, what: format!(", from step `{step}` on{}", run_again(&again)), name: "reopen_from" })
    }

    /// Removes all steps.
    pub(crate) fn without_steps(found: &Inspection) -> Self {
        let what = match found.steps() {
            Ok(steps) if steps.is_empty() => ", which has no steps".to_owned(),
            Ok(steps) => format!(", without its steps{}", run_again(&steps)),
            Err(_) => ", without its steps, which can't be read and run again".to_owned(),
        };
        Self { journal: None, what, name: "reopen_without_steps" }
    }

    pub(crate) fn into_journal(self) -> Option<Journal> {
        self.journal
    }
}

/// Returns what runs again, for a question.
fn run_again(steps: &[JournaledStep]) -> String {
    let names: Vec<_> = steps.iter().map(|step| step.name().to_owned()).collect();
    let doubts = steps.iter().filter(|step| step.state() == StepState::InDoubt).count();
    let doubts = if doubts == 0 { String::new() } else { format!(", {doubts} of them in doubt") };
    let verb = if names.len() == 1 { "runs" } else { "run" };
    format!(": {} {verb} again{doubts}", named(&names))
}
