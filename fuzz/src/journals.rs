//! Journals of steps, as a record of an unfinished operation holds them.

use idem_runtime::store::{Journal, StepState};

/// Asserts that any bytes are a journal or an error, and that a journal that was cut off is an error or has only steps
/// of the whole journal.
pub fn journals(data: &[u8]) {
    let steps = |length: usize| Journal::new(data[..length].to_vec())?.steps().ok();
    let Some(whole) = steps(data.len()) else { return };
    for step in &whole {
        assert_eq!(step.value().is_some(), step.state() == StepState::Ended, "{step:?}");
    }
    for length in 1..data.len() {
        for step in steps(length).unwrap_or_default() {
            assert!(whole.iter().any(|it| it.name() == step.name()), "only the journal that was cut off has {step:?}");
        }
    }
}
