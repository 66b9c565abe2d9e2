//! The real engine under a hostile scheduler.

#[path = "simulation/dice.rs"]
mod dice;
#[path = "simulation/history.rs"]
mod history;
#[path = "simulation/ledger.rs"]
mod ledger;
#[path = "simulation/linearize.rs"]
mod linearize;
#[path = "conformance/plain.rs"]
mod plain;
#[path = "model/reference.rs"]
mod reference;
#[path = "simulation/store.rs"]
mod store;
#[path = "simulation/world.rs"]
mod world;

use world::{Broken, run};

#[test]
fn worlds() {
    let first: u64 = std::env::var("IDEM_SIM_SEED").map_or(0, |text| text.parse().unwrap());
    let runs: u64 = std::env::var("IDEM_SIM_RUNS").map_or(100, |text| text.parse().unwrap());
    let mut counts = std::collections::BTreeMap::<&str, u64>::new();
    for seed in first..first + runs {
        let report = run(seed, Broken::Nothing);
        for (what, n) in &report.counts {
            *counts.entry(what).or_default() += n;
        }
        if let Some(finding) = report.findings.first() {
            panic!("seed {seed}: {finding}\n{}", report.transcript(Some(finding.key)));
        }
    }
    eprintln!("{counts:#?}");
}
