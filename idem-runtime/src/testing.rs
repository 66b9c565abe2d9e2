//! Tests of handlers, on simulated time.
//!
//! [`Simulation`] runs many tasks on one thread, in an order that a seed decides.

mod simulation;

pub use crate::clock::SimulatedClock;
pub use simulation::{Killed, Random, Simulation, Stuck, Task};
