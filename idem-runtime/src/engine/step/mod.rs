//! Steps: named parts of a handler whose values are journaled under the attempt.

mod builder;
mod doubt;
mod name;
mod run;

pub use self::builder::{RetriedStep, StepBuilder};
pub use self::doubt::{
    Always, AskDoubt, FailOnDoubt, Irreversible, Never, Reaction, ReconcileOnDoubt, RerunOnDoubt, StepDoubt,
    UncertainIf,
};
pub use self::name::{Step, StepName};
pub(super) use self::run::is_inside_step_of;
#[cfg(feature = "testing")]
pub(crate) use self::run::{InsideStep, polled_step};
