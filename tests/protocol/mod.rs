//! State machine of the protocol; `tests/protocol.rs` explains the model and its output.

pub(crate) mod config;
pub(crate) mod mutants;
pub(crate) mod properties;
pub(crate) mod state;
pub(crate) mod steps;
pub(crate) mod store;
pub(crate) mod traces;
