//! Model of the protocol, checked in every state that it can reach. Messages between calls and store may be lost,
//! delayed, doubled and reordered; processes may die, and leases may lapse, at any time.
//!
//! # Scope of the model
//!
//! - *The store* (`protocol/store.rs`): reservations, renewals, appends, completions, releases, operators' decisions,
//!   computed by the runtime's own `Record::first`, `Record::admit`, `Record::lease`, `Record::after`, `Record::ended`,
//!   `Record::decide`, `Finish::state`, `Release::state` and `Journal::later`. Each step is atomic.
//! - *The calls* (`protocol/steps.rs`): the steps of `engine/` and `store/context/`. A call repeats a reservation with
//!   the same owner token, or gives it up and releases it. A body runs, returns, is dropped, dies, or is stopped by its
//!   heartbeat. The first step of a body may journal its beginning (`fail`, `reconcile`); its body ends with a value, a
//!   certain error or an uncertain one, and its reconciler may give each answer. A completion is repeated while the
//!   lease can be held. After the completion, the call sends the messages of its body, and marks those that
//!   the broker has confirmed. A later call sends the messages that are not marked, before it replays the result. If a
//!   call is dropped, a task writes the end of its attempt afterwards. A call counts its lease from the time of its
//!   request.
//! - *The network*: requests and answers arrive once, late, twice or never, in any order. A call without an answer
//!   continues, and its request may arrive long after the call has ended.
//! - *The broker* (messages of bodies): a message arrives and is confirmed, arrives without a confirmation, or is lost.
//! - *Time*: a small clock, which may tick between any two steps, so that a lease may lapse at any time. If the store
//!   has no clock, each call has a clock that is ahead of true time and is read in whole ticks.
//! - *The world*: processes die, calls are dropped, the store restarts, retentions end, and operators inspect records
//!   and later reopen them, discard or replace their results, drop their messages, or decide about their steps.
//!
//! Random traces compare the parts that do not share the runtime's code with it (`protocol/traces.rs`): the model's
//! store with the memory store, and with DynamoDB if clocks differ; the model's calls with the engine's calls, request
//! by request and result by result.
//!
//! # Omissions
//!
//! The model leaves out the bytes, statements and scripts of the stores, which the conformance suite covers; the
//! batching of heartbeats; pauses (a retry follows immediately, or any time later); and the order in which tasks are
//! polled. A dropped store call is a store call without an answer. Owner tokens are distinct by construction. A
//! call that does not wait tries a reservation at most twice; with refusals and in random traces it tries at most three
//! times, as in the engine. No body makes a nested call with its own key, no body runs one step twice, and at most one
//! step of a body journals its beginning. Calls in mode `off` and calls without a key are left out, because they make
//! no store call. `protocol/README.md` lists the omissions that concern messages of bodies.
//!
//! # Failures and reruns
//!
//! Each configuration is a test, and prints its description, its bound and its number of states:
//!
//! ```sh
//! # One configuration; one mistake with its shortest history; all configurations with one more of every fault:
//! cargo test -p idem-model --no-default-features crashes -- --nocapture
//! IDEM_PROTOCOL_MUTANT=LiveTakenOver cargo test -p idem-model --no-default-features mistake -- --nocapture
//! IDEM_PROTOCOL_BOUND=large cargo test --release -p idem-model --no-default-features -- --nocapture
//! ```
//!
//! With the feature `dynamodb`, the traces also need the emulator that `scripts/test` provides.
//!
//! For a broken rule, the test prints the shortest history that breaks the rule, one step a line, with the record and
//! the state of each call. `Deliver(1)` delivers the second message of the plan; at `StoreDoes(1)` the store executes
//! that call's request; at `Hears(1)` the answer arrives. If the call no longer waits for its request, the step is
//! `ArrivesLate` or `IsLost`.
//!
//! Every step checks the rules (`protocol/properties.rs`), which are independent of the code that keeps them. "Every
//! call ends" is sound because the model has no cycles: each step uses up time or the budget of faults
//! (`no_configuration_has_a_cycle`), so every path ends.
#![allow(
    clippy::cast_possible_truncation,
    clippy::match_same_arms,
    reason = "a handful of calls, and one arm for each rule"
)]
#![allow(
    clippy::struct_excessive_bools,
    clippy::too_many_lines,
    reason = "what may vary is many small things, and a table of steps is read from top to bottom"
)]

#[path = "protocol/mod.rs"]
mod protocol;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use protocol::config::{self, Config};
use protocol::mutants::Mutant;
use protocol::properties::{ENDS, Rule};
use protocol::state::{Slot, World};
use protocol::steps::{Action, take};
use stateright::{Checker, HasDiscoveries, Model};

/// Declares a test for each configuration.
macro_rules! configurations {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                exhaust(config::named(stringify!($name)));
            }
        )*

        const CONFIGURATIONS: &[&str] = &[$(stringify!($name)),*];
    };
}

configurations! {
    lost crashes beats polls stuck_keys hangs endings drops drops_in_one_step late_takeovers at_most_once late_landings late_landings_counted one_side_fails reconcilers reconcilers_unanswered reconcilers_cleaned_up some_reconcile reconcilers_counted uncertain_errors errors_recorded waiting waits_and_fails waits_in_outages max_attempts
    attempts_refunded first_attempt_lapses fingerprints refusals refused_renewals shadow two_keys three_workers restarts operators two_operators clocks_that_differ
    late_renewals_between_clocks marks_between_clocks one_value doubled_reservation
    steps steps_unconfirmed steps_joined steps_doubled steps_reopened steps_between_clocks
    steps_under_fail steps_under_fail_late steps_under_fail_dropped steps_reconciled steps_reconciled_late steps_begun_doubled steps_decided
    steps_decided_late
    outbox outbox_beside outbox_marks outbox_apart outbox_dropped outbox_waited_for outbox_shortened outbox_operators
}

#[test]
fn every_configuration_is_a_test() {
    let names: Vec<_> = config::all().iter().map(|config| config.name).collect();
    assert_eq!(names, CONFIGURATIONS);
}

/// Checks every reachable state.
fn exhaust(config: Config) {
    let config = if is_large() { config.larger() } else { config };
    let checker = config.clone().checker().spawn_dfs().join();
    assert!(checker.is_done(), "every state was looked at");
    println!(
        "{:28} {:>8} states, {:>8} steps, depth {:>2}: {}; {} calls, {} at a time, {}",
        config.name,
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        config.about,
        config.count(),
        config.workers,
        config.budget,
    );
    let mut problems = String::new();
    for property in checker.model().properties() {
        let found = checker.discovery(property.name).is_some();
        if found && property.expectation.discovery_is_failure() {
            let story = shortest(&config, property.name).expect("found before");
            write!(problems, "\n{}: does not hold\n{}", property.name, tell(&config, &story)).unwrap();
        } else if !found && !property.expectation.discovery_is_failure() {
            write!(problems, "\nthis configuration never shows that {}", property.name).unwrap();
        }
    }
    assert!(problems.is_empty(), "{}: {problems}", config.name);
}

fn is_large() -> bool {
    std::env::var("IDEM_PROTOCOL_BOUND").is_ok_and(|bound| bound == "large")
}

/// Returns a history that breaks the rule `property`, or leads to the event of that name. The history is short, because
/// states are checked in the order of their depth. Yet a shorter history may exist, because the checker keeps
/// the last history that it finds before it stops.
fn found(config: &Config, property: &'static str, at_most: Option<usize>) -> Option<Vec<Action>> {
    let only = HasDiscoveries::AnyOf(BTreeSet::from([property]));
    let checker = config.clone().checker().finish_when(only);
    let checker = match at_most {
        // A history of `steps` steps needs a larger depth: the first state has depth 1, and the checker leaves out the
        // deepest states.
        Some(steps) => checker.target_max_depth(steps + 2),
        None => checker,
    };
    let checker = checker.spawn_bfs().join();
    checker.discovery(property).map(stateright::Path::into_actions)
}

/// Returns the shortest history that shows `property`.
fn shortest(config: &Config, property: &'static str) -> Option<Vec<Action>> {
    let mut shortest = found(config, property, None)?;
    // The search for a history of "every call ends" must not stop early, because it would then find none.
    while property != ENDS
        && let Some(shorter) = found(config, property, Some(shortest.len() - 1))
    {
        shortest = shorter;
    }
    Some(shortest)
}

/// Text of a history, one step a line.
fn tell(config: &Config, story: &[Action]) -> String {
    let mut told = String::new();
    let mut world = config.init_states().remove(0);
    for (n, action) in story.iter().enumerate() {
        let before = world.clone();
        take(config, &mut world, *action);
        write!(told, "{:>4}. {action:?}", n + 1).unwrap();
        for (key, (old, new)) in before.slots.iter().zip(&world.slots).enumerate().filter(|(_, (old, new))| old != new)
        {
            let record =
                |slot: &Option<Slot>| slot.as_ref().map_or_else(|| "nothing".into(), |slot| format!("{slot:?}"));
            write!(told, "\n        record {key}: {} -> {}", record(old), record(new)).unwrap();
        }
        for (who, (old, new)) in before.calls.iter().zip(&world.calls).enumerate() {
            if old.phase != new.phase {
                write!(told, "\n        call {who}: {:?} -> {:?}", old.phase, new.phase).unwrap();
            }
        }
        if before.broken != world.broken {
            write!(told, "\n        broken: {:?}", world.broken).unwrap();
        }
        told.push('\n');
    }
    told
}

/// Every mistake is noticed by the property that is listed with it. The test of the configuration itself shows that the
/// configuration breaks no rule without the mistake.
#[test]
fn every_mistake_is_noticed_by_its_property() {
    let only = std::env::var("IDEM_PROTOCOL_MUTANT").ok();
    let mut missed = Vec::new();
    for mutant in Mutant::ALL {
        let name = format!("{mutant:?}");
        if only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        let config = config::named(mutant.config()).with(*mutant);
        match found(&config, mutant.noticed_by(), None) {
            Some(_) => {
                println!("{name:32} {:28} | {} | {}", config.name, mutant.noticed_by(), mutant.about());
                if only.is_some() {
                    println!("{}", tell(&config, &shortest(&config, mutant.noticed_by()).expect("found")));
                }
            }
            None => missed.push(format!("{name} in {}, by {:?}", config.name, mutant.noticed_by())),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:#?}");
}

/// `tests/protocol/README.md` lists every configuration and every mistake. `IDEM_UPDATE=1` rewrites the lists.
#[test]
fn the_page_of_the_model_lists_every_configuration_and_every_mistake() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    let page = std::fs::read_to_string(path).expect("tests/protocol/README.md");
    let mut written = String::new();
    let mut rows = 0;
    for line in page.lines() {
        // The first two lines of a table, its heading and the line of dashes, stay. The new rows replace the other
        // lines.
        rows = if line.starts_with('|') { rows + 1 } else { 0 };
        if rows <= 2 {
            writeln!(written, "{line}").unwrap();
        }
        match line {
            "|---|---|---|" if rows == 2 => {
                for Config { name, about, workers, budget, .. } in &config::all() {
                    let count = config::named(name).count();
                    writeln!(written, "| `{name}` | {about} | {count} calls, {workers} at a time; {budget} |").unwrap();
                }
            }
            "|---|---|---|---|" if rows == 2 => {
                for mutant in Mutant::ALL {
                    let (about, noticed_by, config) = (mutant.about(), mutant.noticed_by(), mutant.config());
                    writeln!(written, "| `{mutant:?}` | {about} | {noticed_by} | `{config}` |").unwrap();
                }
            }
            _ => {}
        }
    }
    if std::env::var_os("IDEM_UPDATE").is_some() {
        std::fs::write(path, written).expect("can be written");
        return;
    }
    assert!(page == written, "{path} is out of date: run the test with IDEM_UPDATE=1, and look at the difference");
}

/// `tests/protocol/README.md` and `docs/proof.md` name the invariants that the model checks.
#[test]
fn both_pages_name_the_invariants_that_the_model_checks() {
    let number = |name: &str| {
        let (letter, number) = name.split(' ').next()?.split_at(1);
        Some((letter.to_owned(), number.parse::<u8>().ok()?))
    };
    let checked: BTreeSet<_> = Rule::ALL.iter().filter_map(|rule| number(rule.name())).collect();
    let mut ranges: Vec<(String, u8, u8)> = Vec::new();
    // The invariants are sorted as on both pages: S before L, then by number.
    for (letter, number) in checked.iter().filter(|it| it.0 == "S").chain(checked.iter().filter(|it| it.0 == "L")) {
        match ranges.last_mut().filter(|last| last.0 == *letter && last.2 + 1 == *number) {
            Some(last) => last.2 = *number,
            None => ranges.push((letter.clone(), *number, *number)),
        }
    }
    let names = ranges.iter().flat_map(|(letter, from, to)| match to - from {
        0 => vec![format!("{letter}{from}")],
        1 => vec![format!("{letter}{from}"), format!("{letter}{to}")],
        _ => vec![format!("{letter}{from} to {letter}{to}")],
    });
    let names: Vec<_> = names.collect();
    let (last, others) = names.split_last().expect("some are checked");
    let sentence = format!("{} and {last}", others.join(", "));
    for page in ["README.md", "../../docs/proof.md"] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
        let text = std::fs::read_to_string(path).expect("a page").replace('\n', " ");
        assert!(text.contains(&sentence), "{page} does not say {sentence:?}");
    }
}

/// At least one mistake breaks each rule, which shows that every check of a rule can fail.
#[test]
fn every_property_notices_a_mistake() {
    let noticed: BTreeSet<_> = Mutant::ALL.iter().map(|mutant| mutant.noticed_by()).collect();
    let rules: BTreeSet<_> = Rule::ALL.iter().map(|rule| rule.name()).chain([ENDS]).collect();
    assert_eq!(noticed, rules);
}

/// If a path had no end, the checker would not check "every call ends" on this path.
#[test]
fn no_configuration_has_a_cycle() {
    for name in ["waiting", "waits_and_fails", "two_keys", "restarts", "fingerprints", "outbox", "outbox_waited_for"] {
        let config = config::named(name);
        // A state is `true` while it is on the path, and `false` after all of its steps were followed.
        let mut seen: HashMap<World, bool> = HashMap::new();
        let start = config.init_states().remove(0);
        let mut path = vec![(start.clone(), config.next_states(&start))];
        seen.insert(start, true);
        while let Some((state, next)) = path.last_mut() {
            let Some(next) = next.pop() else {
                seen.insert(state.clone(), false);
                path.pop();
                continue;
            };
            match seen.get(&next) {
                Some(true) => panic!("{name}: this state leads to itself: {next:#?}"),
                Some(false) => {}
                None => {
                    seen.insert(next.clone(), true);
                    let after = config.next_states(&next);
                    path.push((next, after));
                }
            }
        }
    }
}
