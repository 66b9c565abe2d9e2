//! Instructions that a call takes, counted by callgrind, and the code that is [generated] for each handler, compared
//! with the tables in benches/README.md.
//!
//! A time differs from run to run by a third on these machines, a count of instructions by less than a percent. The
//! program runs itself under `valgrind --tool=callgrind` with two numbers of calls; the difference is the cost of the
//! calls between them. It fails if a count differs from the table by more than [`TOLERANCE`]; `IDEM_UPDATE=1` writes
//! the tables. The argument `generated` leaves out the instructions, and so needs no valgrind.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::record::Record;
use idem_runtime::store::{Finish, Lease, Release, Reservation, ReserveRequest, StoreFuture, Verdict, forward};
use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, Reconciliation, Store, current, idempotent};

mod generated;
#[allow(dead_code, unreachable_pub, reason = "a module of the benches, which use all of it")]
#[path = "../src/handlers.rs"]
mod handlers;
#[path = "../src/by_hand/memory.rs"]
mod map;
#[path = "../src/receipt.rs"]
mod receipt;

use self::receipt::Receipt;

/// Numbers of calls whose counts are compared.
const CALLS: [u32; 2] = [2000, 12_000];
/// Largest difference from the table, in percent.
const TOLERANCE: f64 = 2.0;
const TTL: Duration = Duration::from_secs(7 * 86_400);
const START: &str = "<!-- instructions -->";
const END: &str = "<!-- end of instructions -->";

/// Store that grants every reservation and holds nothing: what remains is the engine's own cost.
#[derive(Clone, Debug)]
struct Granting(MemoryStore);

impl Store for Granting {
    forward! { |store| store.0 => namespace, response_timeout, context, begin, renew, append, wait, inspect, decide, purge, list, ping }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        let granted = Record::first(request).grant(request, false);
        StoreFuture::new(async move { Ok(granted) })
    }

    fn finish<'a>(&'a self, _: &'a Lease, _: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async { Ok(Verdict::Applied) })
    }

    fn release<'a>(&'a self, _: &'a Lease, _: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async { Ok(Verdict::Applied) })
    }
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &dyn Store, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

/// Work whose instructions are counted.
const WORK: [(&str, Work); 10] = [
    ("first run by hand", Work::FirstByHand),
    ("replay by hand", Work::ReplayByHand),
    ("first run, no store", Work::Granted),
    ("first run", Work::First),
    ("first run of a handler with a reconciler", Work::WithReconciler),
    ("replay", Work::Replay),
    ("duplicate of a running attempt", Work::Refused),
    ("uncertain error, then a reconciler that knows", Work::Reconciled),
    ("first run with three steps", Work::Steps),
    ("error after ten steps, then an attempt that continues", Work::Continued),
];

#[derive(Clone, Copy)]
enum Work {
    FirstByHand,
    ReplayByHand,
    Granted,
    First,
    WithReconciler,
    Replay,
    Refused,
    Reconciled,
    Steps,
    Continued,
}

/// Ships by an operation with a reconciler. The effect of an order that `is_lost` is in doubt.
async fn reconciling(store: &MemoryStore, order_id: u64, is_lost: bool) -> Result<Receipt, Error> {
    let operation = Operation::new(store, Key::new("bench::ship", order_id), Policy::new(TTL))
        .uncertain_errors()
        .reconcile(async { Ok(Reconciliation::Done(Receipt::of(order_id))) });
    operation.run(async { if is_lost { Err(Error::NoAttempt) } else { Ok(Receipt::of(order_id)) } }).await
}

/// Ships in steps, and then fails if `fails`.
async fn in_steps(store: &MemoryStore, order_id: u64, steps: u64, fails: bool) -> Result<Receipt, Error> {
    let operation = Operation::new(store, Key::new("bench::ship", order_id), Policy::new(TTL));
    let body = async {
        let attempt = current()?;
        for line in 0..steps {
            attempt.step(("line", line)).run(async |_| Ok::<_, Error>(line)).await?;
        }
        if fails { Err(Error::NoAttempt) } else { Ok(Receipt::of(order_id)) }
    };
    operation.run(body).await
}

/// Makes the calls in this process.
async fn calls(work: Work, count: u64) {
    let store = MemoryStore::new();
    match work {
        Work::FirstByHand => {
            let map = map::Map::default();
            for order_id in 0..count {
                map::ship(&map, order_id).expect("ships");
            }
        }
        Work::ReplayByHand => {
            let map = map::Map::default();
            map::ship(&map, 1).expect("ships");
            for _ in 0..count {
                map::replay(&map, 1).expect("is there");
            }
        }
        Work::Granted => {
            let store = Granting(store);
            for order_id in 0..count {
                ship(&store, order_id).await.expect("ships");
            }
        }
        Work::First => {
            for order_id in 0..count {
                ship(&store, order_id).await.expect("ships");
            }
        }
        Work::WithReconciler => {
            for order_id in 0..count {
                reconciling(&store, order_id, false).await.expect("ships");
            }
        }
        Work::Replay => {
            for _ in 0..count {
                ship(&store, 1).await.expect("ships");
            }
        }
        Work::Refused => {
            let key = Key::new("bench::ship", "order:1").expect("a key");
            let request = ReserveRequest::new(key, store.context().new_owner(), TTL, TTL);
            let lease = store.reserve(&request).await.expect("reserves");
            for _ in 0..count {
                ship(&store, 1).await.expect_err("is running");
            }
            drop(lease);
        }
        Work::Reconciled => {
            for order_id in 0..count {
                reconciling(&store, order_id, true).await.expect_err("is lost");
                reconciling(&store, order_id, true).await.expect("is found");
            }
        }
        Work::Steps => {
            for order_id in 0..count {
                in_steps(&store, order_id, 3, false).await.expect("ships");
            }
        }
        Work::Continued => {
            for order_id in 0..count {
                in_steps(&store, order_id, 10, true).await.expect_err("fails");
                in_steps(&store, order_id, 10, false).await.expect("continues");
            }
        }
    }
}

/// Counts the instructions of a call, by two runs of this program under callgrind.
fn counted(name: &str) -> f64 {
    let program = std::env::current_exe().expect("a path");
    let [few, many] = CALLS.map(|count| {
        let out = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(&program)
            .args(["--calls", name, &count.to_string()])
            .output()
            .expect("valgrind is installed");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let total = said.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse::<f64>().ok());
        total.filter(|_| out.status.success()).unwrap_or_else(|| panic!("callgrind counts nothing: {said}"))
    });
    (many - few) / f64::from(CALLS[1] - CALLS[0])
}

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md")
}

/// Returns the count that the table has for this work.
fn expected(table: &str, name: &str) -> Option<f64> {
    let row = table.lines().find_map(|line| line.strip_prefix(&format!("| {name} | ")))?;
    row.split(" |").next()?.replace(' ', "").parse().ok()
}

/// Returns whether a count is as near to the count in the table as it has to be.
fn is_near(now: f64, was: f64) -> bool {
    (now / was - 1.0).abs() * 100.0 <= TOLERANCE
}

/// Passes the table between two markers to `compare`, which returns whether the counts agree, and the new table. Writes
/// the new table if they don't agree, and the user wants it. Returns whether the counts agree with the table then.
fn replace_table([start, end]: [&str; 2], compare: impl FnOnce(&str) -> (bool, String)) -> bool {
    let text = fs::read_to_string(page()).expect("benches/README.md");
    let (before, rest) = text.split_once(start).expect("the start of the table");
    let (old, after) = rest.split_once(end).expect("the end of the table");
    let (agrees, table) = compare(old);
    if !agrees && std::env::var_os("IDEM_UPDATE").is_some() {
        fs::write(page(), [before, start, &table, end, after].concat()).expect("benches/README.md can be written");
        return true;
    }
    agrees
}

/// Compares the counts of instructions with the table, and returns whether they agree.
fn compare() -> bool {
    replace_table([START, END], |old| {
        let (mut agrees, mut table) = (true, "\n| call | instructions |\n|---|---|\n".to_owned());
        println!("\n### Instructions\n\n| call | instructions | in the table |\n|---|---|---|");
        for (name, _) in WORK {
            let (now, was) = (counted(name), expected(old, name));
            let is_near = was.is_some_and(|was| is_near(now, was));
            agrees &= is_near;
            let was = was.map_or("none".to_owned(), |was| format!("{was:.0}"));
            println!("| {name} | {now:.0} | {was}{} |", if is_near { "" } else { ", which differs" });
            let _ = writeln!(table, "| {name} | {now:.0} |");
        }
        (agrees, table)
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, count] = &arguments[..]
        && flag == "--calls"
    {
        let (_, work) = WORK.into_iter().find(|(of, _)| of == name).expect("a known kind of call");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(calls(work, count.parse().expect("a number")));
        return ExitCode::SUCCESS;
    }
    let only_generated = arguments.iter().any(|argument| argument == "generated");
    let agrees = [generated::compare(), only_generated || compare()];
    if agrees == [true; 2] {
        return ExitCode::SUCCESS;
    }
    eprintln!(
        "\nThe counts differ from the table by more than {TOLERANCE} %. If the change is worth it, say why in the commit and \
         run\nIDEM_UPDATE=1 cargo run --release -p idem-instructions"
    );
    ExitCode::FAILURE
}
