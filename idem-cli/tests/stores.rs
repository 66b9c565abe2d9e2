//! The commands for stores, as a program: on SQLite files, and on real servers (`./scripts/test -p idem-cli`).

#[path = "stores/records.rs"]
mod records;
#[path = "stores/servers.rs"]
mod servers;
#[path = "stores/support.rs"]
mod support;
