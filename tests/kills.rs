//! Kills between a call to the outside world and its record: processes with a handler that pays at a bank are killed at
//! each place of the handler, on every real store and by every strategy. The ledger of the bank is in this process,
//! and the processes can't read it, so each duplicate and each loss shows.
//!
//! docs/proof.md has the table of the results, generated from the table in this file. Each row of the table is a test
//! with the name of its strategy, in the module of its store. The test `refunds` of each store kills and cuts off the
//! program of docs/guide.md (an uncertain error, and a reconciler) at random places and moments.
//!
//! `scripts/kills` runs more of both: `IDEM_KILLS` is the number of messages for each cell of the table, and
//! `IDEM_KILLS_FAULTS` the number of faults of `refunds` on each store. `IDEM_KILLS_SEED` repeats the random choices.
#![allow(missing_docs, unreachable_pub, reason = "only this test uses the modules")]
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

#[path = "kills/bank.rs"]
mod bank;
#[path = "kills/broker.rs"]
mod broker;
#[path = "kills/refunds.rs"]
mod refunds;
#[path = "kills/rigs.rs"]
mod rigs;

use std::cell::Cell;

use futures::future::join_all;

use crate::bank::{Arrival, Bank, Fault, FaultKind, Place, Repetition};
use crate::broker::{End, Lane, RandomMoments};
use crate::rigs::{Rig, number};

/// Number of processes that work for a test at the same time.
const LANES: usize = 6;
/// Number of messages for each cell in `scripts/kills`, of which docs/proof.md shows the results.
const PUBLISHED: usize = 15;

/// Result for a message, once it has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    /// The message is acknowledged, and has one effect.
    Once,
    /// The message has more than one effect.
    Duplicated,
    /// The message is acknowledged, and has no effect.
    Lost,
    /// The message waits for a person, and has one effect.
    DoubtAndPaid,
    /// The message waits for a person, and has no effect.
    DoubtAndUnpaid,
}

use Word::{DoubtAndPaid, DoubtAndUnpaid, Duplicated, Once};

impl Word {
    fn of(end: &End, effects: usize) -> Self {
        match (end, effects) {
            (End::Acknowledged(_), 1) => Once,
            (End::Acknowledged(_), 0) => Self::Lost,
            (End::NeedsPerson, 1) => DoubtAndPaid,
            (End::NeedsPerson, 0) => DoubtAndUnpaid,
            _ => Duplicated,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Once => "exactly once",
            Duplicated => "duplicated",
            Self::Lost => "lost",
            DoubtAndPaid => "in doubt (paid)",
            DoubtAndUnpaid => "in doubt (not paid)",
        }
    }
}

/// Faults of the columns of the table, in their order.
const FAULTS: [Fault; 5] = [
    Fault { place: Place::Before, kind: FaultKind::Kill },
    Fault { place: Place::OnItsWay, kind: FaultKind::Kill },
    Fault { place: Place::Made, kind: FaultKind::Kill },
    Fault { place: Place::After, kind: FaultKind::Kill },
    Fault { place: Place::Made, kind: FaultKind::NoAnswer },
];

/// Row of the table.
struct Strategy {
    name: &'static str,
    title: &'static str,
    repetition: Repetition,
    /// Result of each fault; `None` if the strategy has no such place.
    words: [Option<Word>; 5],
}

const STRATEGIES: [Strategy; 10] = [
    Strategy {
        name: "retry",
        title: "`on_crash = retry`, no key for the bank",
        repetition: Repetition::Repeats,
        words: [Some(Once), Some(Duplicated), Some(Duplicated), Some(Duplicated), Some(Duplicated)],
    },
    Strategy {
        name: "child_key",
        title: "`on_crash = retry`, `child_key` for the bank",
        repetition: Repetition::Replays,
        words: [Some(Once); 5],
    },
    Strategy {
        name: "step",
        title: "a step, no key for the bank",
        repetition: Repetition::Repeats,
        words: [Some(Once), Some(Duplicated), Some(Duplicated), Some(Once), Some(Duplicated)],
    },
    Strategy {
        name: "step_child_key",
        title: "a step, its `child_key` for the bank",
        repetition: Repetition::Replays,
        words: [Some(Once); 5],
    },
    Strategy {
        name: "step_fail",
        title: "an irreversible step, `fail`",
        repetition: Repetition::Repeats,
        words: [Some(DoubtAndUnpaid), Some(DoubtAndPaid), Some(DoubtAndPaid), Some(Once), Some(DoubtAndPaid)],
    },
    Strategy {
        name: "step_reconcile",
        title: "a step, `reconcile(…)`, uncertain time-outs",
        repetition: Repetition::Refuses,
        words: [Some(Once); 5],
    },
    Strategy {
        name: "fail",
        title: "`on_crash = fail`",
        repetition: Repetition::Repeats,
        words: [Some(DoubtAndUnpaid), Some(DoubtAndPaid), Some(DoubtAndPaid), Some(DoubtAndPaid), Some(Duplicated)],
    },
    Strategy {
        name: "reconcile",
        title: "`on_crash = reconcile(…)`, uncertain time-outs",
        repetition: Repetition::Refuses,
        words: [Some(Once); 5],
    },
    Strategy {
        name: "within",
        title: "a row, `within` its transaction",
        repetition: Repetition::Repeats,
        words: [Some(Once), None, Some(Once), Some(Once), None],
    },
    Strategy {
        name: "step_within",
        title: "a row, a step `within` its transaction",
        repetition: Repetition::Repeats,
        words: [Some(Once), None, Some(Once), Some(Once), None],
    },
];

/// Generates a module of tests for each store, and [`STORES`].
macro_rules! stores {
    ($($store:ident ($title:literal): $($strategy:ident)*;)*) => {
        $(mod $store {
            $(#[tokio::test]
            async fn $strategy() {
                crate::check(stringify!($store), stringify!($strategy)).await;
            })*

            #[tokio::test]
            async fn refunds() {
                crate::refunds::check(stringify!($store)).await;
            }
        })*
        const STORES: &[(&str, &str, &[&str])] = &[$((stringify!($store), $title, &[$(stringify!($strategy)),*])),*];
    };
}

stores! {
    sqlite ("SQLite"):
        retry child_key step step_child_key step_fail step_reconcile fail reconcile within step_within;
    postgres ("PostgreSQL"):
        retry child_key step step_child_key step_fail step_reconcile fail reconcile within step_within;
    mysql ("MariaDB"):
        retry child_key step step_child_key step_fail step_reconcile fail reconcile within step_within;
    redis ("Redis"):
        retry child_key step step_child_key step_fail step_reconcile fail reconcile;
    dynamo ("DynamoDB"):
        retry child_key step step_child_key step_fail step_reconcile fail reconcile;
    nats ("NATS JetStream"):
        retry child_key step step_child_key step_fail step_reconcile fail reconcile;
}

fn variable(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |it| it.parse().unwrap_or_else(|_| panic!("{name} is a number, not {it}")))
}

/// Lets each message of one row meet its fault, and compares its result with the word of its cell.
async fn check(store: &str, name: &str) {
    let strategy = STRATEGIES.iter().find(|it| it.name == name).expect("a strategy");
    let (rig, bank) = (Rig::start(store).await, Bank::default());
    let port = bank.serve().await;
    let messages = variable("IDEM_KILLS", 2);
    let cells = FAULTS.iter().zip(strategy.words).filter_map(|(fault, word)| Some((*fault, word?)));
    let cases: Vec<_> = cells.flat_map(|cell| (0..messages).map(move |n| (cell, n))).collect();
    let (next, killed) = (Cell::new(0), Cell::new(0));
    // The open transaction of a process keeps every other process from an SQLite file.
    let in_rows = name.ends_with("within");
    let lanes = if store == "sqlite" && in_rows { 1 } else { LANES };
    let lanes = (0..lanes).map(async |_| {
        let mut lane = Lane::new(&rig.spec, name, port);
        while let Some(((fault, word), n)) = cases.get(next.replace(next.get() + 1)) {
            let id = number();
            let arrival = if n % 2 == 0 { Arrival::AfterSearch } else { Arrival::AfterRequest };
            let mut interventions = bank.open(id, strategy.repetition, arrival, [*fault]);
            let end = lane.serve(id, &mut interventions, &mut RandomMoments::none()).await;
            let statement = bank.close(id);
            assert_eq!(statement.happened, [*fault], "{store} {name}: the fault has happened");
            // Without a request on its way, the bank refuses a request only if a body runs although its effect is made.
            let may_refuse = fault.place == Place::OnItsWay;
            assert!(may_refuse || statement.refused == 0, "{store} {name}, {fault:?}: a second request");
            let effects = if in_rows { rig.rows(id).await } else { statement.effects.len() };
            let found = Word::of(&end, effects);
            assert_eq!(found, *word, "{store} {name}, {fault:?}, message {n}: {end:?}, {effects} effects");
            if let (End::Acknowledged(receipt), false) = (end, in_rows) {
                assert!(statement.effects.contains(&receipt), "{store} {name}, {fault:?}: {receipt} is no receipt");
            }
        }
        killed.set(killed.get() + lane.killed);
    });
    join_all(lanes).await;
    println!("{store} {name}: {} kills, {} messages, each as expected", killed.get(), cases.len());
}

const BEGIN: &str = "<!-- the table of kills -->\n";
const END: &str = "<!-- the end of the table of kills -->\n";

/// Returns the generated part of docs/proof.md.
fn written() -> String {
    use std::fmt::Write as _;
    let mut text = String::from(
        "\n| store | strategy | before the call | request on its way | effect made, no answer | answer received, no record | \
         no kill: answer lost | kills |\n|---|---|---|---|---|---|---|---|\n",
    );
    let mut all = 0;
    for (_, title, strategies) in STORES {
        for name in *strategies {
            let strategy = STRATEGIES.iter().find(|it| it.name == *name).expect("a strategy");
            write!(text, "| {title} | {} |", strategy.title).expect("a text");
            let mut kills = 0;
            for (fault, word) in FAULTS.iter().zip(strategy.words) {
                write!(text, " {} |", word.map_or("n/a", Word::text)).expect("a text");
                kills += if word.is_some() && fault.kind == FaultKind::Kill { PUBLISHED } else { 0 };
            }
            writeln!(text, " {kills} |").expect("a text");
            all += kills;
        }
    }
    write!(text, "\n{all} processes were killed, {PUBLISHED} in each cell. ").expect("a text");
    text + "`./scripts/kills` does it again.\n\n"
}

/// `IDEM_KILLS_TABLE=write` makes this test write the table.
#[test]
fn the_table_of_kills_in_the_documentation_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/proof.md");
    let text = std::fs::read_to_string(path).expect("docs/proof.md");
    let (before, rest) = text.split_once(BEGIN).expect("the table begins");
    let (table, after) = rest.split_once(END).expect("the table ends");
    if std::env::var("IDEM_KILLS_TABLE").is_ok_and(|it| it == "write") {
        std::fs::write(path, [before, BEGIN, &written(), END, after].concat()).expect("can be written");
        return;
    }
    assert_eq!(table, written(), "`IDEM_KILLS_TABLE=write` writes it anew");
}
