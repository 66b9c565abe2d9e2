//! Names of steps, and the handle that the body of a step gets.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use crate::engine::attempt::Attempt;
use crate::record::journal::MAX_STEP_NAME_BYTES;

/// Name of a step: a text, or a text and a key.
///
/// `"charge"` is the name of one step; `("reserve", line.sku)` names one step of a loop, and is written
/// `reserve[<sku>]`. The text has no `[`, so two different pairs never have the same name. A name has at most 256
/// bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
// Shared: the journal of an attempt holds several copies.
pub struct StepName(Arc<str>);

impl From<&str> for StepName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl<K: fmt::Display> From<(&str, K)> for StepName {
    fn from((name, key): (&str, K)) -> Self {
        // A bracket in `name` makes the name invalid, as it does in a name without a key.
        if name.contains('[') {
            return Self(Arc::default());
        }
        // A step of a loop is named each time, so its name is written at once, with room for a number.
        let mut written = String::with_capacity(name.len() + 22);
        written.push_str(name);
        write!(written, "[{key}]").expect("a `Display` that fails also panics in `format!`");
        Self(written.into())
    }
}

impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StepName {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name as the journal of an attempt keeps it.
    pub(super) fn shared(&self) -> &Arc<str> {
        &self.0
    }

    pub(super) fn is_valid(&self) -> bool {
        let (name, key) = self.0.split_once('[').map_or((&*self.0, None), |(name, key)| (name, Some(key)));
        let is_name = !name.trim().is_empty() && !name.starts_with("idem:");
        let is_key = key.is_none_or(|key| key.ends_with(']'));
        is_name && is_key && self.0.len() <= MAX_STEP_NAME_BYTES
    }
}

/// A step that runs: the handle that its body and its reconciler get.
// One pointer: the futures of a handler hold several copies.
#[derive(Clone, Debug)]
pub struct Step(pub(super) Arc<StepFacts>);

#[derive(Debug)]
pub(super) struct StepFacts {
    pub(super) attempt: Attempt,
    pub(super) name: StepName,
    /// Name before a renaming, which the child key of the step keeps.
    pub(super) was: Option<StepName>,
}

impl Step {
    /// Returns the name of the step.
    pub fn name(&self) -> &str {
        self.0.name.as_str()
    }

    /// Returns the attempt that runs the step.
    pub fn attempt(&self) -> &Attempt {
        &self.0.attempt
    }

    /// Returns a key for a call to another API that accepts idempotency keys: `attempt.child_key(name)` with the name
    /// of this step. A [renamed](super::StepBuilder::was) step keeps the key of its old name. The key is the same on
    /// every attempt.
    pub fn child_key(&self) -> String {
        self.attempt().child_key(self.0.was.as_ref().unwrap_or(&self.0.name).as_str())
    }
}
