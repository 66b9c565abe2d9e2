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

#[test]
fn explore() {
    use plain::Mistake;
    use store::Prank;
    let mut all: Vec<Broken> = Mistake::ALL.iter().map(|it| Broken::Store(*it)).collect();
    all.push(Broken::Store(Mistake::None));
    for prank in [
        Prank::FinishesNothing,
        Prank::ReleasesNothing,
        Prank::RenewsNothing,
        Prank::StaleReads,
        Prank::FailsAfterAll,
        Prank::SlowClock,
        Prank::OwnersRepeat,
    ] {
        all.push(Broken::Between(prank));
    }
    for broken in all {
        let mut found = std::collections::BTreeMap::new();
        for seed in 0..300 {
            let report = match std::panic::catch_unwind(|| run(seed, broken)) {
                Ok(it) => it,
                Err(_) => {
                    found.entry("panic".to_owned()).or_insert((seed, 0)).1 += 1;
                    continue;
                }
            };
            let mut checks: Vec<_> = report.findings.iter().map(|it| it.check).collect();
            checks.sort();
            checks.dedup();
            for check in checks {
                found.entry(format!("{check:?}")).or_insert((seed, 0)).1 += 1;
            }
        }
        eprintln!("{broken:?}: {found:?}");
    }
}
