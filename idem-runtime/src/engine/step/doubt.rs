//! Reactions to a step whose effect is in doubt, and the errors that leave an effect in doubt.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::name::Step;
use crate::engine::reconciliation::Reconciliation;

/// Question to the reconciler of a step.
// A trait without the types of the step: the future of `run` then names no type that depends on the lifetimes inside of
// its error. Otherwise a handler whose error is a `Box<dyn Error>` could not be spawned.
pub trait AskDoubt {
    /// Future of the reconciler. Never made by a step without a reconciler.
    type Question;

    /// Asks the reconciler; `None` if the step has no reconciler.
    fn ask(self, step: Step) -> Option<Self::Question>;
}

/// Reaction of a step to an effect in doubt: an earlier body of the step has begun, and its end is not known.
#[diagnostic::on_unimplemented(
    message = "a step that is irreversible must name its reaction to an effect in doubt",
    label = "add `.fail()` or `.reconcile(…)` before this call",
    note = "`.fail()` waits for an operator, `.reconcile(…)` asks the outside world"
)]
pub trait StepDoubt<T, E>: AskDoubt {
    /// Reaction to the doubt.
    const REACTION: Reaction;

    /// Polls the future of the reconciler.
    fn poll_question(question: Pin<&mut Self::Question>, cx: &mut Context<'_>) -> Poll<Result<Reconciliation<T>, E>>;
}

/// Kinds of [`StepDoubt`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reaction {
    /// The body runs again.
    Rerun,
    /// No body runs before an operator has decided.
    Fail,
    /// The reconciler decides.
    Reconcile,
}

/// Runs the body of a step in doubt again (the default).
#[derive(Clone, Copy, Debug)]
pub struct RerunOnDoubt;

/// Runs no further body of a step in doubt; see [`StepBuilder::fail`](super::StepBuilder::fail).
#[derive(Clone, Copy, Debug)]
pub struct FailOnDoubt;

/// Asks the outside world about a step in doubt; see [`StepBuilder::reconcile`](super::StepBuilder::reconcile).
pub struct ReconcileOnDoubt<F>(pub(super) F);

/// Has no reaction to a doubt, so the step can't run; see
/// [`StepBuilder::irreversible`](super::StepBuilder::irreversible).
#[derive(Clone, Copy, Debug)]
pub struct Irreversible;

impl<F> fmt::Debug for ReconcileOnDoubt<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReconcileOnDoubt")
    }
}

impl AskDoubt for RerunOnDoubt {
    type Question = Infallible;

    fn ask(self, _: Step) -> Option<Infallible> {
        None
    }
}

impl<T, E> StepDoubt<T, E> for RerunOnDoubt {
    const REACTION: Reaction = Reaction::Rerun;

    fn poll_question(question: Pin<&mut Infallible>, _: &mut Context<'_>) -> Poll<Result<Reconciliation<T>, E>> {
        match *question {}
    }
}

impl AskDoubt for FailOnDoubt {
    type Question = Infallible;

    fn ask(self, _: Step) -> Option<Infallible> {
        None
    }
}

impl<T, E> StepDoubt<T, E> for FailOnDoubt {
    const REACTION: Reaction = Reaction::Fail;

    fn poll_question(question: Pin<&mut Infallible>, _: &mut Context<'_>) -> Poll<Result<Reconciliation<T>, E>> {
        match *question {}
    }
}

impl<F, Fut> AskDoubt for ReconcileOnDoubt<F>
where
    F: FnOnce(Step) -> Fut,
{
    type Question = Fut;

    fn ask(self, step: Step) -> Option<Fut> {
        Some((self.0)(step))
    }
}

impl<T, E, F, Fut> StepDoubt<T, E> for ReconcileOnDoubt<F>
where
    F: FnOnce(Step) -> Fut,
    Fut: Future<Output = Result<Reconciliation<T>, E>>,
{
    const REACTION: Reaction = Reaction::Reconcile;

    fn poll_question(question: Pin<&mut Fut>, cx: &mut Context<'_>) -> Poll<Result<Reconciliation<T>, E>> {
        question.poll(cx)
    }
}

/// Rule for the errors of a body that leave the effect of its step in doubt.
pub trait UncertainIf<E> {
    /// Returns whether the effect may have happened although the body returned `error`.
    fn is_uncertain(&self, error: &E) -> bool;
}

/// No error leaves the effect of a step in doubt (the default).
#[derive(Clone, Copy, Debug)]
pub struct Never;

/// Each error leaves the effect of a step in doubt.
#[derive(Clone, Copy, Debug)]
pub struct Always;

impl<E> UncertainIf<E> for Never {
    fn is_uncertain(&self, _: &E) -> bool {
        false
    }
}

impl<E> UncertainIf<E> for Always {
    fn is_uncertain(&self, _: &E) -> bool {
        true
    }
}

impl<E, F: Fn(&E) -> bool> UncertainIf<E> for F {
    fn is_uncertain(&self, error: &E) -> bool {
        self(error)
    }
}
