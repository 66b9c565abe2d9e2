//! Refunds orders at a bank that does not recognise repetitions: answers are lost, requests arrive late, and the worker
//! is killed again and again. Each order is still refunded once.
//!
//! Stripe itself recognises an `Idempotency-Key`. The bank of this example is localstripe, a Python package that
//! imitates Stripe and ignores this header, so that each double is visible. Start the bank in one terminal, and the
//! example in another:
//!
//! ```sh
//! python3 -m venv bank && bank/bin/pip install localstripe && bank/bin/localstripe --from-scratch
//! cargo run --example stripe_refund --features stripe
//! ```
//!
//! - *The handler* sends a reference with each refund. `judge` names the errors after which the refund is in doubt;
//!   after a crash it always is.
//! - *The reconciler* looks for the reference at the bank. "Not found" is not enough for another refund, because a
//!   request may still be under way. So the reconciler waits until no request can be, and looks again.
//! - *The naive handler* makes the same call without a reconciler, and repeats the call in case of doubt.
//!
//! The example prints the number of refunds that each handler has caused. The first argument is the address of the bank
//! (default: `127.0.0.1:8420`).
#![allow(clippy::disallowed_methods, reason = "a worker waits for its bank")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{env, fs};

use idem_examples::Claims;
use idem_examples::bank::{Bank, BankError, DEADLINE, Faults, Refund, bad_network};
use idem_runtime::{
    Disposition, OnError, Outcome, Reconciliation, SqliteStore, StoreExt as _, current, idempotent, observe,
};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const ORDERS: u64 = 30;
/// Kills of each handler's worker, after these times in turn.
const KILLS: usize = 8;
const LIVES_MS: [u64; 4] = [300, 900, 150, 1_400];
/// Charge of the order that the bank refuses to refund.
const UNKNOWN: &str = "ch_unknown";

struct Shop {
    store: SqliteStore,
    bank: Bank,
}

struct Order {
    number: u64,
    charge: String,
}

fn judge(error: &BankError) -> OnError {
    match error {
        BankError::Refused(_) => OnError::Record,       // Final: replayed.
        BankError::Unanswered(_) => OnError::Uncertain, // It may have happened.
        BankError::Unreachable(_) | BankError::Idempotency(_) => OnError::Release, // Nothing happened: run again.
    }
}

/// Refunds an order once.
#[idempotent(
    key = "{order.number}", ttl = "90d", lease = "1s", store = shop.store, scope = "refund",
    on_error = judge, on_crash = reconcile(find_refund(shop, order))
)]
async fn refund(shop: &Shop, order: &Order) -> Result<Refund, BankError> {
    shop.bank.refund(&order.charge, &current()?.child_key("refund")).await
}

/// Reads, and never writes.
async fn find_refund(shop: &Shop, order: &Order) -> Result<Reconciliation<Refund>, BankError> {
    let reference = current()?.child_key("refund");
    let find = async || {
        let refunds = shop.bank.refunds(&order.charge).await?;
        Ok::<_, BankError>(refunds.into_iter().find(|(_, found)| *found == reference).map(|(refund, _)| refund))
    };
    if let Some(refund) = find().await? {
        return Ok(Reconciliation::Done(refund));
    }
    // A request of the attempt in doubt may still be under way, for this time at most.
    sleep(DEADLINE).await;
    Ok(find().await?.map_or(Reconciliation::NotDone, Reconciliation::Done))
}

/// Refunds an order at least once: the same call, without a reconciler.
#[idempotent(key = "{order.number}", ttl = "90d", lease = "1s", store = shop.store, scope = "refund_naively")]
async fn refund_naively(shop: &Shop, order: &Order) -> Result<Refund, BankError> {
    shop.bank.refund(&order.charge, &current()?.child_key("refund")).await
}

/// Delivers one order until its message is acknowledged or set aside. Prints the end for the main process.
async fn deliver(shop: Arc<Shop>, order: Order, naive: bool) {
    loop {
        let (result, outcome): (Result<Refund, BankError>, Outcome) = match naive {
            true => observe(refund_naively(&shop, &order)).await,
            false => observe(refund(&shop, &order)).await,
        };
        match (outcome.disposition(), result) {
            (Disposition::Retry { after }, _) => sleep(after.min(Duration::from_secs(1))).await,
            (Disposition::DeadLetter, Err(BankError::Refused(_))) => return println!("{} refused", order.number),
            (Disposition::DeadLetter, Err(error)) => return println!("{} stuck: {error}", order.number),
            (_, _) => return println!("{} refunded", order.number),
        }
    }
}

/// Runs a worker: a separate process, which the main process kills.
async fn work(bank: &str, file: &str, naive: bool, orders: &[String]) -> Result<(), Failure> {
    let shop = Arc::new(Shop { store: SqliteStore::open(file).await?, bank: Bank::at(bank.parse()?) });
    let mut deliveries = JoinSet::new();
    for order in orders {
        let (number, charge) = order.split_once('=').ok_or("an order is number=charge")?;
        let order = Order { number: number.parse()?, charge: charge.to_owned() };
        deliveries.spawn(deliver(Arc::clone(&shop), order, naive));
    }
    deliveries.join_all().await;
    shop.store.flush().await;
    Ok(())
}

/// Result of all deliveries with one of the two handlers.
struct Totals {
    kills: usize,
    refused: BTreeSet<u64>,
    stuck: Vec<String>,
    /// Number of refunds at the bank for each order.
    refunds: BTreeMap<u64, usize>,
}

/// Lets workers refund new orders, kills them, and counts the refunds at the bank.
async fn refund_all(bank: &Bank, network: SocketAddr, file: &Path, naive: bool) -> Result<Totals, Failure> {
    // The naive handler would try the refused order forever.
    let mut charges = BTreeMap::from_iter((!naive).then(|| (0, UNKNOWN.to_owned())));
    for number in 1..=ORDERS {
        charges.insert(number, bank.charge(500).await?);
    }
    let mut open = charges.clone();
    let mut totals = Totals { kills: 0, refused: BTreeSet::new(), stuck: Vec::new(), refunds: BTreeMap::new() };
    while !open.is_empty() {
        let mut worker = Command::new(env::current_exe()?)
            .args(["--worker", &network.to_string()])
            .arg(file)
            .arg(if naive { "naive" } else { "reconciling" })
            .args(open.iter().map(|(number, charge)| format!("{number}={charge}")))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut lines = BufReader::new(worker.stdout.take().ok_or("no output")?).lines();
        let mut read = async || -> Result<(), Failure> {
            while let Some(line) = lines.next_line().await? {
                let (number, end) = line.split_once(' ').ok_or("a line without an end")?;
                let number = number.parse()?;
                open.remove(&number);
                match end {
                    "refunded" => {}
                    "refused" => drop(totals.refused.insert(number)),
                    _ => totals.stuck.push(line.clone()),
                }
            }
            Ok(())
        };
        if totals.kills < KILLS {
            let life = Duration::from_millis(LIVES_MS[totals.kills % LIVES_MS.len()]);
            match timeout(life, read()).await {
                Ok(ended) => ended?,
                Err(_) => totals.kills += 1,
            }
            worker.kill().await?;
        } else {
            timeout(Duration::from_secs(120), read()).await??;
        }
        worker.wait().await?;
    }
    // Late requests arrive before the count.
    sleep(DEADLINE).await;
    for (number, charge) in charges {
        totals.refunds.insert(number, bank.refunds(&charge).await?.len());
    }
    Ok(totals)
}

async fn ask(claims: &mut Claims, bank: SocketAddr, folder: &Path) -> Result<(), Failure> {
    let faults = Arc::new(Faults::default());
    let network = bad_network(bank, Arc::clone(&faults)).await?;
    let bank = Bank::at(bank);
    let once: BTreeMap<_, _> = (0..=ORDERS).map(|number| (number, usize::from(number > 0))).collect();
    let sum = |totals: &Totals| totals.refunds.values().sum::<usize>();

    // Each handler has orders, records and workers of its own.
    let (reconciling_db, naive_db) = (folder.join("reconciling.db"), folder.join("naive.db"));
    let asking = refund_all(&bank, network, &reconciling_db, false);
    let (asking, naive) = tokio::try_join!(asking, refund_all(&bank, network, &naive_db, true))?;
    println!("with a reconciler: {} refunds of {ORDERS} orders, {} kills", sum(&asking), asking.kills);
    claims.check("each order was refunded once", asking.refunds == once);
    claims.check("the refusal of the bank was final", asking.refused == BTreeSet::from([0]));
    claims.check("no order waits for an operator", asking.stuck.is_empty());

    println!("without one: {} refunds of {ORDERS} orders, {} kills", sum(&naive), naive.kills);
    claims.check("each order was refunded at least once", naive.refunds.values().all(|count| *count >= 1));
    claims.check("some orders were refunded twice or more", naive.refunds.values().any(|count| *count > 1));

    let count = |counter: &std::sync::atomic::AtomicU32| counter.load(Ordering::Relaxed);
    println!(
        "refunds lost on their way: {} requests, {} answers; {} answers withheld; {} requests late",
        count(&faults.lost_requests),
        count(&faults.lost_answers),
        count(&faults.withheld_answers),
        count(&faults.late_requests)
    );
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let mut claims = Claims::default();
    let arguments: Vec<_> = env::args().skip(1).collect();
    if let [mark, network, file, handler, orders @ ..] = arguments.as_slice()
        && mark == "--worker"
    {
        return claims.exit_code(&work(network, file, handler == "naive", orders).await);
    }
    let bank = arguments.first().map_or("127.0.0.1:8420", String::as_str);
    let folder = env::temp_dir().join(format!("idem-example-{}", std::process::id()));
    let asked = match (bank.parse(), fs::create_dir_all(&folder)) {
        (Ok(bank), Ok(())) => ask(&mut claims, bank, &folder).await,
        (Err(error), _) => Err(error.into()),
        (_, Err(error)) => Err(error.into()),
    };
    let _ = fs::remove_dir_all(&folder);
    claims.exit_code(&asked)
}
