//! The protocol, checked.
mod common { }
#[path = "model/protocol/mod.rs"]
mod protocol;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Path};

use protocol::config::{self, Config};
use protocol::mutants::Mutant;
use protocol::state::World;
use protocol::steps::Action;

fn story(config: &Config, path: &Path<World, Action>) -> String {
    let mut story = String::new();
    for (n, action) in path.clone().into_actions().iter().enumerate() {
        writeln!(story, "{:>4}. {action:?}", n + 1).unwrap();
    }
    write!(story, "  in the end: {:#?}", path.last_state()).unwrap();
    let _ = config;
    story
}

fn check(config: &Config) {
    let began = Instant::now();
    let checker = config.clone().checker().spawn_dfs().join();
    println!("{:30} {:>9} states {:>9} unique, depth {:>3} {:?}", config.name, checker.state_count(), checker.unique_state_count(), checker.max_depth(), began.elapsed());
    assert!(checker.is_done());
    for property in checker.model().properties() {
        let found = checker.discovery(property.name);
        match (property.expectation.discovery_is_failure(), found) {
            (true, Some(_)) => {
                let only = HasDiscoveries::AnyOf(BTreeSet::from([property.name]));
                let checker = config.clone().checker().finish_when(only).spawn_bfs().join();
                println!("FAIL {} {}", config.name, property.name);
                if let Some(path) = checker.discovery(property.name) { println!("{}", story(config, &path)); } else { println!("not by bfs"); }
            }
            (false, None) => println!("NEVER {} {}", config.name, property.name),
            _ => {}
        }
    }
}

#[test]
fn configs() {
    let only = std::env::var("IDEM_PROTOCOL_ONLY").ok();
    for config in config::all() {
        if only.as_deref().is_none_or(|only| only == config.name) {
        check(&config);
        }
    }
}

#[test]
fn mutants() {
    for mutant in Mutant::ALL {
        let began = Instant::now();
        let name = mutant.noticed_by();
        let only = HasDiscoveries::AnyOf(BTreeSet::from([name]));
        let checker = config::named(mutant.config()).with(*mutant).checker().finish_when(only).spawn_bfs().join();
        let found = checker.discovery(name);
        println!("{:30} {:30} {} {:?} states {} {:?}", format!("{mutant:?}"), mutant.config(), if found.is_some() {"ok"} else {"MISSED"}, found.map(|p| p.into_actions().len()), checker.unique_state_count(), began.elapsed());
    }
}
