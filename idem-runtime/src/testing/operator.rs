//! Operator of a scenario, who decides about steps in doubt as soon as no effect can happen any more.

use std::collections::{BTreeMap, BTreeSet};

use super::run::PlainFacts;
use super::worker::World;
use crate::key::Key;
use crate::record::StoredResult;
use crate::record::journaled_step::StepResolution;
use crate::store::{JournaledStep, StepState, StoreExt as _};

/// Decides about all steps in doubt: by the effects that have happened, as an operator does who asks the outside world.
/// Returns whether a decision was made, so that the message can be delivered again.
pub(super) async fn decide_steps(world: &World, plain: &PlainFacts) -> bool {
    let mut decided = false;
    for key in world.keys() {
        decided |= decide_steps_of(world, plain, &key).await;
    }
    decided
}

async fn decide_steps_of(world: &World, plain: &PlainFacts, key: &Key) -> bool {
    let operator = world.memory().operator();
    let (mut decided, mut undecided) = (false, BTreeSet::new());
    loop {
        // Each decision changes the record.
        let Ok(Some(found)) = operator.inspect(key).await else { return decided };
        let steps = found.steps().unwrap_or_default();
        let mut in_doubt = steps.iter().filter(|step| step.state() == StepState::InDoubt).map(JournaledStep::name);
        let Some(step) = in_doubt.find(|step| !undecided.contains(*step)) else { return decided };
        let Some((resolution, seen)) = decision(plain, step, &world.effects_of_step(key, step)) else {
            world.narrate(&format!("the operator can't decide about step `{step}` of {key}"));
            undecided.insert(step.to_owned());
            continue;
        };
        match operator.resolve_step(key, &found, step, resolution).await {
            Ok(()) => world.narrate(&format!("the operator decides about step `{step}` of {key}: {seen}")),
            Err(error) => {
                world.narrate(&format!("the operator can't decide about step `{step}`: {error}"));
                return decided;
            }
        }
        decided = true;
    }
}

/// Returns the end of a step whose effects `happened`, and what the operator has seen. `None` if the plain run does not
/// show the value of the step, or if only a part of its effects has happened: no decision would be true.
fn decision(
    plain: &PlainFacts,
    step: &str,
    happened: &BTreeMap<String, usize>,
) -> Option<(StepResolution, &'static str)> {
    if happened.is_empty() {
        return Some((StepResolution::not_done(), "its effect has not happened"));
    }
    let has_happened = |(effect, times): (&String, &usize)| happened.get(effect).is_some_and(|it| it >= times);
    let is_whole = plain.step_effects.get(step).is_some_and(|effects| effects.iter().all(has_happened));
    match plain.step_values.get(step).filter(|_| is_whole)? {
        value @ StoredResult::Encoded { .. } => Some((value.clone().into(), "its effect has happened")),
        _ => None,
    }
}
