//! Tests of your handlers, on simulated time.
//!
//! [`explore`] kills a handler at each of its awaits.
//! [`Simulation`] runs many tasks on one thread, in an order that a seed decides.

mod explorer;
mod report;
mod scenario;
mod simulation;
mod worker;

pub use crate::clock::SimulatedClock;
pub use explorer::{Delivered, Explorer, explore};
pub use report::{Finding, Problem, Report};
pub use simulation::{Killed, Random, Simulation, Stuck, Task};
pub use worker::{Effect, NoAnswer, SimulatedStore, Worker};
