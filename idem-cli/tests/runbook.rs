//! Tests of the incidents in docs/operations.md. Each test produces an incident with a real store, and resolves it with
//! the commands of that page (`./scripts/test -p idem-cli --test runbook`).

#[path = "runbook/alerts.rs"]
mod alerts;
#[path = "runbook/incidents.rs"]
mod incidents;
#[path = "runbook/page.rs"]
mod page;
#[path = "runbook/scene.rs"]
mod scene;

/// Titles of the incidents on the page.
const INCIDENTS: [&str; 16] = [
    "A worker died under `on_crash = fail`",
    "A step is in doubt",
    "A process hangs and holds its lease",
    "A result grew too large",
    "A deployment changed a return type",
    "A `ttl` is too short",
    "Redis was flushed",
    "PostgreSQL failed over",
    "A poison message",
    "A key is too coarse",
    "The store was away for an hour",
    "A wrong result is recorded",
    "The store is full",
    "The store is slow",
    "A clock was set",
    "Two people decide at once",
];

#[test]
fn docs_operations_has_each_incident_and_a_link_to_it() {
    assert_eq!(page::titles(), INCIDENTS);
    let (table, source) = (page::table(), include_str!("runbook/incidents.rs"));
    for title in INCIDENTS {
        let link = format!("[{title}](#{})", page::anchor(title));
        assert!(table.contains(&link), "no `{link}` in the table of the page");
        assert!(source.contains(&format!("\"{title}\"")), "nobody plays `{title}`");
    }
    // Every link of the table leads to an incident.
    assert_eq!(table.matches("](#").count(), INCIDENTS.len(), "{table}");
}
