//! The protocol as a state machine; `tests/protocol.rs` explains it and its output.

pub(crate) mod config;
pub(crate) mod mutants;
pub(crate) mod properties;
pub(crate) mod state;
pub(crate) mod steps;
pub(crate) mod store;
pub(crate) mod traces;
