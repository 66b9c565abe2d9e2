//! Steps to which the effects of a handler belong.

use std::collections::BTreeMap;

use super::run::Run;

/// Returns the step of each effect that happens in a step.
///
/// An effect belongs to a step if exactly the value of this step keeps a later attempt from requesting the effect. In
/// `runs` the first delivery ends at each effect and at each write of the journal. An effect that the handler requests
/// several times has no step here, and neither has an effect that two steps explain.
pub(super) fn step_of_each_effect(plain: &Run, runs: &[Run]) -> BTreeMap<String, String> {
    // Under `on_crash = fail` no attempt follows a crash, so the run shows nothing.
    let runs: Vec<_> = runs.iter().map(|run| &run.later).filter(|later| later.began).collect();
    let is_of = |effect: &String, step: &String| {
        let is_explained = runs.iter().all(|run| run.kept.contains(step) != run.requested.contains(effect));
        is_explained && [true, false].iter().all(|kept| runs.iter().any(|run| run.kept.contains(step) == *kept))
    };
    let is_requested_once = |effect: &&String| plain.effect_calls.iter().filter(|call| call == effect).count() == 1;
    let effects = plain.effects.keys().filter(is_requested_once);
    let found = effects.filter_map(|effect| {
        let mut steps = plain.steps.iter().filter(|step| is_of(effect, step));
        let step = steps.next()?;
        steps.next().is_none().then(|| (effect.clone(), step.clone()))
    });
    found.collect()
}
