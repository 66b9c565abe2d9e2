//! Steps of a journal as an operator sees them, and the changes of a journal that an operator decides.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::journal::{Journal, JournalEntry, JournalError, StepProgress};
use super::{Inspection, StoredResult};
use crate::codec::{self, Codec, CodecError, Json};
use crate::key::Fingerprint;
use crate::policy::StepPolicy;

/// A step in the journal of an unfinished operation; see [`Journal::steps`].
// `Debug` shows the size of the value, and never the value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournaledStep(JournalEntry);

/// State of a [`JournaledStep`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StepState {
    /// The step has ended, and does not run again.
    Ended,
    /// The body of the step has begun, and its end is not known: the effect may have happened. If the attempt of the
    /// step is running, the body may be running.
    InDoubt,
    /// The body of the step has begun, and has had no effect. The step runs again.
    Undone,
}

impl StepState {
    /// Returns the name of the state in errors and commands: `ended`, `in doubt` or `undone`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::InDoubt => "in doubt",
            Self::Undone => "undone",
        }
    }
}

impl fmt::Display for StepState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl JournaledStep {
    /// Name of the step, with its key: `charge`, or `reserve[cup]`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Number of the attempt that wrote the latest entry of the step.
    pub const fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// Fingerprint of the inputs; `None` if the step has no fingerprint.
    pub const fn inputs(&self) -> Option<&Fingerprint> {
        self.0.inputs.as_ref()
    }

    /// State of the step.
    pub const fn state(&self) -> StepState {
        match self.0.progress {
            StepProgress::Begun => StepState::InDoubt,
            StepProgress::Undone => StepState::Undone,
            StepProgress::Ended(_) => StepState::Ended,
        }
    }

    /// Value of a step that has ended, or the reason why no value is stored. `None` if the step has not ended.
    pub const fn value(&self) -> Option<&StoredResult> {
        match &self.0.progress {
            StepProgress::Ended(value) => Some(value),
            StepProgress::Begun | StepProgress::Undone => None,
        }
    }
}

/// End of a step in doubt, as an operator decides it; see
/// [`Operator::resolve_step`](crate::operator::Operator::resolve_step).
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct StepResolution(StepProgress);

impl StepResolution {
    /// The effect of the step happened, and `value` is the value of the step. The value is written as JSON, the codec
    /// of steps, and read back as a check.
    ///
    /// # Errors
    /// [`CodecError`] if the value can't be written, or can't be read back.
    pub fn done<T: Serialize + DeserializeOwned>(value: &T) -> Result<Self, CodecError> {
        let (codec, bytes) = codec::write::<Json, T>(value)?;
        codec::read::<Json, T>(codec, &bytes).unwrap_or_else(|| Json::decode(&bytes))?;
        Ok(Self::from(StoredResult::Encoded { codec, bytes: Bytes::from(bytes) }))
    }

    /// The effect of the step happened, and its value is unknown. The step never runs again: each attempt gets
    /// [`StepProblem::ValueUnavailable`](crate::step::StepProblem::ValueUnavailable).
    pub const fn done_without_value() -> Self {
        Self(StepProgress::Ended(StoredResult::Unencodable))
    }

    /// The effect of the step did not happen. The next attempt runs the step.
    pub const fn not_done() -> Self {
        Self(StepProgress::Undone)
    }
}

/// Converts a value of a step without decoding the value, because its type is unknown here.
impl From<StoredResult> for StepResolution {
    fn from(value: StoredResult) -> Self {
        Self(StepProgress::Ended(value))
    }
}

/// Reason why the journal of a record does not allow a decision about a step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StepDecisionError {
    /// The journal has no step with this name.
    NoSuchStep,
    /// The effect of the step is not in doubt. Holds the state of the step.
    NotInDoubt(StepState),
    /// The value is larger than the values that steps may have.
    #[non_exhaustive]
    TooLarge {
        /// Size of the value in bytes.
        size: usize,
        /// Largest size in bytes.
        max: usize,
    },
    /// The journal can't be read.
    Unreadable(JournalError),
}

impl fmt::Display for StepDecisionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchStep => f.write_str("the journal has no such step"),
            Self::NotInDoubt(StepState::Ended) => f.write_str("the step is not in doubt: it has ended"),
            Self::NotInDoubt(state) => write!(f, "the step is not in doubt: it is {state}"),
            Self::TooLarge { size, max } => {
                write!(f, "the value has {size} bytes, and the value of a step has {max} bytes at most")
            }
            Self::Unreadable(error) => error.fmt(f),
        }
    }
}

impl Error for StepDecisionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreadable(error) => Some(error),
            _ => None,
        }
    }
}

impl From<JournalError> for StepDecisionError {
    fn from(error: JournalError) -> Self {
        Self::Unreadable(error)
    }
}

impl Journal {
    /// Reads the steps, in the order of their latest entries.
    ///
    /// # Errors
    /// [`JournalError`] if the journal can't be read.
    pub fn steps(&self) -> Result<Vec<JournaledStep>, JournalError> {
        let entries = self.entries()?;
        let latest = latest_entries(&entries);
        let counts = |(at, entry): (usize, JournalEntry)| (latest[&entry.name] == at).then_some(JournaledStep(entry));
        Ok(entries.iter().cloned().enumerate().filter_map(counts).collect())
    }

    /// Returns this journal with the end of a step in doubt.
    pub(crate) fn with_resolved(&self, step: &str, resolution: &StepResolution) -> Result<Self, StepDecisionError> {
        let entries = self.entries()?;
        let latest = entries.iter().rfind(|entry| *entry.name == *step).ok_or(StepDecisionError::NoSuchStep)?;
        match JournaledStep(latest.clone()).state() {
            StepState::InDoubt => {}
            state => return Err(StepDecisionError::NotInDoubt(state)),
        }
        if let StepProgress::Ended(value) = &resolution.0
            && value.stored_bytes() > StepPolicy::DEFAULT_MAX_VALUE_BYTES
        {
            return Err(StepDecisionError::TooLarge {
                size: value.stored_bytes(),
                max: StepPolicy::DEFAULT_MAX_VALUE_BYTES,
            });
        }
        let settled = JournalEntry { progress: resolution.0.clone(), ..latest.clone() };
        Ok(Self::continued(Some(self), [&settled].into_iter()).unwrap_or_else(|| self.clone()))
    }

    /// Returns this journal without the entries of `step`, and without the entries of all steps that
    /// [`steps`](Self::steps) lists after it; `None` if no entry is left.
    pub(crate) fn before(&self, step: &str) -> Result<Option<Self>, StepDecisionError> {
        let entries = self.entries()?;
        let latest = latest_entries(&entries);
        let from = *latest.get(step).ok_or(StepDecisionError::NoSuchStep)?;
        Ok(Self::continued(None, entries.iter().filter(|entry| latest[&entry.name] < from)))
    }
}

/// Returns the place of the latest entry of each step.
fn latest_entries(entries: &[JournalEntry]) -> BTreeMap<Arc<str>, usize> {
    entries.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect()
}

impl Inspection {
    /// Reads the steps in the journal of the record; see [`Journal::steps`]. The list is empty if the record has no
    /// journal: the journal ends with the operation, unless [`StepPolicy::keep`](crate::policy::StepPolicy::keep) keeps
    /// it beside the result.
    ///
    /// # Errors
    /// [`JournalError`] if the journal can't be read, also if a wrapper has stored it in a form that the inspected
    /// store does not know.
    pub fn steps(&self) -> Result<Vec<JournaledStep>, JournalError> {
        if let Some(journal) = self.record.journal.as_ref().or(self.kept.as_ref()) {
            return journal.steps();
        }
        let Some((result, kept)) = self.record.state.result().map(StoredResult::parts) else { return Ok(Vec::new()) };
        match (kept, result.hidden_journal()) {
            (Some(journal), _) => journal.steps(),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::CodecName;

    fn stored(value: &'static str) -> StoredResult {
        StoredResult::Encoded { codec: CodecName::new(b"json").unwrap(), bytes: Bytes::from_static(value.as_bytes()) }
    }

    fn journal(entries: &[(&str, u32, StepProgress)]) -> Journal {
        let inputs = Some(Fingerprint::from_bytes([7; Fingerprint::BYTES]));
        let entries: Vec<_> = entries
            .iter()
            .map(|&(name, attempt, ref progress)| JournalEntry {
                name: name.into(),
                attempt,
                inputs,
                progress: progress.clone(),
            })
            .collect();
        Journal::continued(None, entries.iter()).unwrap()
    }

    /// Returns the names and states of the steps.
    fn states(journal: &Journal) -> Vec<(String, u32, StepState)> {
        let steps = journal.steps().unwrap();
        steps.iter().map(|step| (step.name().to_owned(), step.attempt(), step.state())).collect()
    }

    fn ended(value: &'static str) -> StepProgress {
        StepProgress::Ended(stored(value))
    }

    fn example() -> Journal {
        use StepProgress::{Begun, Undone};
        journal(&[
            ("a", 1, Begun),
            ("b", 1, ended("1")),
            ("c", 1, Begun),
            ("a", 1, ended("2")),
            ("c", 2, Undone),
            ("d", 2, Begun),
        ])
    }

    #[test]
    fn a_step_is_listed_where_its_latest_entry_is() {
        use StepState::{Ended, InDoubt, Undone};
        let expected = [("b", 1, Ended), ("a", 1, Ended), ("c", 2, Undone), ("d", 2, InDoubt)];
        assert_eq!(states(&example()), expected.map(|(name, attempt, state)| (name.to_owned(), attempt, state)));
        let steps = example().steps().unwrap();
        assert_eq!((steps[1].value(), steps[3].value()), (Some(&stored("2")), None));
        assert!(steps[0].inputs().is_some());
    }

    #[test]
    fn a_step_does_not_show_its_value_in_debug_texts() {
        let steps = journal(&[("a", 1, ended("\"secret\""))]).steps().unwrap();
        let resolution = StepResolution::done(&"secret".to_owned()).unwrap();
        let text = format!("{steps:?} {resolution:?}");
        assert!(text.contains("8 bytes") && !text.contains("secret"), "{text}");
    }

    #[test]
    fn a_resolved_step_keeps_its_attempt_and_its_inputs() {
        for (resolution, state, value) in [
            (StepResolution::done(&7).unwrap(), StepState::Ended, Some(stored("7"))),
            (StepResolution::done_without_value(), StepState::Ended, Some(StoredResult::Unencodable)),
            (StepResolution::not_done(), StepState::Undone, None),
        ] {
            let before = example();
            let resolved = before.with_resolved("d", &resolution).unwrap();
            assert!(resolved.bytes().starts_with(before.bytes()), "an attempt may continue the journal");
            let step = resolved.steps().unwrap().pop().unwrap();
            assert_eq!((step.name(), step.attempt(), step.state()), ("d", 2, state));
            assert_eq!(step.value(), value.as_ref());
            assert_eq!(step.inputs(), before.steps().unwrap()[3].inputs());
            assert_eq!(resolved.with_resolved("d", &resolution), Err(StepDecisionError::NotInDoubt(state)), "{state}");
        }
    }

    #[test]
    fn a_decision_about_a_step_that_is_not_in_doubt_is_refused() {
        let not_done = StepResolution::not_done();
        for (step, expected) in [
            ("b", StepDecisionError::NotInDoubt(StepState::Ended)),
            ("c", StepDecisionError::NotInDoubt(StepState::Undone)),
            ("e", StepDecisionError::NoSuchStep),
        ] {
            assert_eq!(example().with_resolved(step, &not_done), Err(expected), "{step}");
        }
        assert_eq!(example().before("e"), Err(StepDecisionError::NoSuchStep));
        let large = StepResolution::done(&"x".repeat(StepPolicy::DEFAULT_MAX_VALUE_BYTES)).unwrap();
        let size = StepPolicy::DEFAULT_MAX_VALUE_BYTES + 2;
        let expected = StepDecisionError::TooLarge { size, max: StepPolicy::DEFAULT_MAX_VALUE_BYTES };
        assert_eq!(example().with_resolved("d", &large), Err(expected));
        let damaged = Journal::new(vec![1, 0]).unwrap();
        let unreadable = StepDecisionError::Unreadable(JournalError::Damaged);
        assert_eq!(damaged.with_resolved("d", &not_done), Err(unreadable.clone()));
        assert_eq!(damaged.before("d"), Err(unreadable));
    }

    #[test]
    fn a_journal_before_a_step_has_the_steps_that_are_listed_before() {
        let listed = states(&example());
        for (at, (name, ..)) in listed.iter().enumerate() {
            let before = example().before(name).unwrap();
            assert_eq!(before.as_ref().map(states).unwrap_or_default(), listed[..at], "{name}");
        }
    }
}
