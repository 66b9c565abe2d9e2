//! Tests of the commands for stores, which run the program on SQLite files and on real servers (`./scripts/test -p
//! idem-cli`).

#[path = "stores/outbox.rs"]
mod outbox;
#[path = "stores/records.rs"]
mod records;
#[path = "stores/results.rs"]
mod results;
#[path = "stores/servers.rs"]
mod servers;
#[path = "stores/steps.rs"]
mod steps;
#[path = "stores/support.rs"]
mod support;
#[path = "stores/usage.rs"]
mod usage;
