//! The protocol as a state machine; `tests/protocol.rs` says what it is about and how to read it.

pub(crate) mod config;
pub(crate) mod mutants;
pub(crate) mod properties;
pub(crate) mod state;
pub(crate) mod steps;
pub(crate) mod store;
pub(crate) mod traces;
