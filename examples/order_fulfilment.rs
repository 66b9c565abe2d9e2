//! Fulfils orders in four steps: charge, reserve, book a parcel, send a letter. The worker is killed again and again,
//! and each effect still happens once.
//!
//! ```sh
//! cargo run --example order_fulfilment --features fulfilment
//! ```
//!
//! - The bank and the stock recognise the child key of a step, so these steps may run again.
//! - The carrier has no keys. The step `book` asks it whether it has the parcel, before it books another one.
//! - A letter can't be called back, and the post office has no keys. If the step `letter` is in doubt, the operation is
//!   interrupted, and an operator looks in the books of the post office.
//!
//! The same handler without steps shows the difference. The first argument is the number of kills (default: 60). The
//! second is a store: a file of SQLite (default: a new one), or the URL of a server, with the feature `redis` or
//! `postgres`.
#![allow(clippy::disallowed_methods, reason = "a worker waits for its orders")]

use std::env;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use idem_examples::Claims;
use idem_examples::services::{Services, ask};
use idem_runtime::operator::StepResolution;
use idem_runtime::{Disposition, Reconciliation, SqliteStore, Store, StoreExt as _, current, idempotent, observe};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::sleep;

type Failure = Box<dyn std::error::Error + Send + Sync>;

struct Shop {
    store: Arc<dyn Store>,
    services: SocketAddr,
}

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    charge: String,
    parcel: String,
    letter: String,
}

/// Fulfils an order. After a crash the next attempt continues with the steps that have ended.
#[idempotent(key = "order:{order}", ttl = "7d", lease = "300ms", store = *shop.store, scope = "fulfil")]
async fn fulfil(shop: &Shop, order: u64) -> Result<Receipt, Failure> {
    let attempt = current()?;
    let charge: String = attempt.step("charge").run(async |step| shop.charge(order, step.child_key()).await).await?;
    attempt.step("reserve").run(async |step| shop.reserve(order, step.child_key()).await).await?;
    let parcel = attempt
        .step("book")
        .reconcile(async |_| shop.find_parcel(order, attempt.number()).await)
        .run(async |_| shop.book(order, attempt.number()).await)
        .await?;
    let letter = attempt.step("letter").irreversible().fail();
    let letter = letter.run(async |_| shop.send_letter(order, attempt.number()).await).await?;
    Ok(Receipt { charge, parcel, letter })
}

/// Fulfils an order without steps: an attempt begins with the first effect.
#[idempotent(key = "order:{order}", ttl = "7d", lease = "300ms", store = *shop.store, scope = "plain")]
async fn fulfil_plainly(shop: &Shop, order: u64) -> Result<Receipt, Failure> {
    let attempt = current()?;
    let charge = shop.charge(order, attempt.child_key("charge")).await?;
    shop.reserve(order, attempt.child_key("reserve")).await?;
    let parcel = shop.book(order, attempt.number()).await?;
    let letter = shop.send_letter(order, attempt.number()).await?;
    Ok(Receipt { charge, parcel, letter })
}

impl Shop {
    async fn charge(&self, order: u64, key: String) -> Result<String, Failure> {
        Ok(ask(self.services, &format!("charge {order} {key}")).await?)
    }

    async fn reserve(&self, order: u64, key: String) -> Result<String, Failure> {
        Ok(ask(self.services, &format!("reserve {order} {key}")).await?)
    }

    async fn book(&self, order: u64, attempt: u32) -> Result<String, Failure> {
        Ok(ask(self.services, &format!("book {order} {attempt}")).await?)
    }

    /// Asks the carrier for the parcel. The carrier then refuses requests of earlier attempts that are still under way,
    /// so "none" remains true.
    async fn find_parcel(&self, order: u64, attempt: u32) -> Result<Reconciliation<String>, Failure> {
        Ok(match ask(self.services, &format!("parcel {order} {attempt}")).await? {
            none if none == "none" => Reconciliation::NotDone,
            parcel => Reconciliation::Done(parcel),
        })
    }

    async fn send_letter(&self, order: u64, attempt: u32) -> Result<String, Failure> {
        Ok(ask(self.services, &format!("letter {order} {attempt}")).await?)
    }
}

/// Delivers one order until its message is acknowledged or set aside.
async fn deliver(shop: Arc<Shop>, order: u64, with_steps: bool) -> Result<(), Failure> {
    loop {
        let (_, outcome) = match with_steps {
            true => observe(fulfil(&shop, order)).await,
            false => observe(fulfil_plainly(&shop, order)).await,
        };
        let request = match outcome.disposition() {
            Disposition::Retry { after } => {
                sleep(after.min(Duration::from_millis(50))).await;
                continue;
            }
            Disposition::Ack => format!("acknowledge {order}"),
            Disposition::DeadLetter => format!("aside {order}"),
        };
        ask(shop.services, &request).await?;
        return Ok(());
    }
}

/// Runs a worker: a separate process, which the main process kills.
async fn work(services: SocketAddr, store: &str, with_steps: bool) -> Result<(), Failure> {
    let shop = Arc::new(Shop { store: open(store).await?, services });
    loop {
        let open = ask(services, "orders").await.unwrap_or_default();
        let orders: Vec<u64> = open.split(' ').filter_map(|order| order.parse().ok()).collect();
        if orders.is_empty() {
            return Ok(());
        }
        let mut deliveries = JoinSet::new();
        for order in orders {
            deliveries.spawn(deliver(Arc::clone(&shop), order, with_steps));
        }
        while let Some(ended) = deliveries.join_next().await {
            ended??;
        }
    }
}

async fn open(store: &str) -> Result<Arc<dyn Store>, Failure> {
    match store.split_once("://").map(|(scheme, _)| scheme) {
        #[cfg(feature = "redis")]
        Some("redis") => Ok(Arc::new(idem_runtime::RedisStore::connect(store).await?)),
        #[cfg(feature = "postgres")]
        Some("postgres" | "postgresql") => {
            Ok(Arc::new(idem_runtime::PostgresStore::options().ensure_schema().connect(store).await?))
        }
        Some(scheme) => Err(format!("`{scheme}` needs the feature of its store").into()),
        None => Ok(Arc::new(SqliteStore::open(store).await?)),
    }
}

/// Largest number of further kills, on a machine on which the planned ones have shown nothing.
const MORE_KILLS: u64 = 1000;

/// Result of all orders of one handler.
struct Audit {
    kills: u64,
    orders: usize,
    /// Orders by the effect that did not happen exactly once: charge, reservation, parcel, letter.
    wrong: [usize; 4],
    /// Steps that an operator has settled.
    settled: usize,
}

/// Kills the worker `kills` times or more, until the kills have shown a letter in doubt (with steps), or an effect that
/// happened twice (without). Then lets the last worker finish, and counts the effects.
async fn audit(store: &str, kills: u64, with_steps: bool) -> Result<Audit, Failure> {
    let services = Services::default();
    let address = services.open().await?.to_string();
    let operated = open(store).await?;
    let mut settled = 0;
    let mut seed = 0x5eed_u64;
    let mut life = 0;
    loop {
        let twice = |at: usize| services.effects().values().any(|order| order.counts()[at] > 1);
        let has_shown = if with_steps { settled > 0 } else { twice(2) && twice(3) };
        let is_last = life >= kills && (has_shown || life >= kills + MORE_KILLS);
        if is_last {
            services.close();
        }
        let words = ["worker", &address, store, if with_steps { "steps" } else { "plain" }];
        let mut worker = Command::new(env::current_exe()?).args(words).kill_on_drop(true).spawn()?;
        if is_last {
            while worker.wait().await?.success() && !services.set_aside().is_empty() {
                settled += settle(&services, &*operated).await?;
                worker = Command::new(env::current_exe()?).args(words).kill_on_drop(true).spawn()?;
            }
        } else {
            // A random time of up to 0.4 s (xorshift, Marsaglia 2003).
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            sleep(Duration::from_millis(30 + seed % 370)).await;
            worker.kill().await?;
        }
        settled += settle(&services, &*operated).await?;
        if is_last {
            let effects = services.effects();
            let wrong = [0, 1, 2, 3].map(|at| effects.values().filter(|order| order.counts()[at] != 1).count());
            return Ok(Audit { kills: life, orders: effects.len(), wrong, settled });
        }
        life += 1;
    }
}

/// Decides, as an operator, about the letters in doubt: the books of the post office say whether a letter was sent.
async fn settle(services: &Services, store: &dyn Store) -> Result<usize, Failure> {
    let operator = store.operator().by("example");
    let set_aside = services.set_aside();
    for order in &set_aside {
        let key = operator.key(&format!("fulfil/order:{order}"))?;
        let seen = operator.inspect(&key).await?.ok_or("the order has no record")?;
        let resolution = match services.has_letter(*order, seen.attempt() + 1) {
            true => StepResolution::done(&format!("letter {order}.1"))?,
            false => StepResolution::not_done(),
        };
        operator.resolve_step(&key, &seen, "letter", resolution).await?;
        services.deliver_again(*order);
    }
    Ok(set_aside.len())
}

async fn run(kills: u64, store: &str, claims: &mut Claims) -> Result<(), Failure> {
    for with_steps in [true, false] {
        // Without steps a few kills are enough.
        let kills = if with_steps { kills } else { kills.min(30) };
        let Audit { kills, orders, wrong, settled } = audit(store, kills, with_steps).await?;
        let [charges, reservations, parcels, letters] = wrong;
        println!("{} steps: {kills} kills, {orders} orders", if with_steps { "with" } else { "without" });
        println!(
            "  orders with a wrong number of charges {charges}, reservations {reservations}, parcels {parcels}, letters {letters}"
        );
        if with_steps {
            println!("  letters in doubt that an operator has settled: {settled}");
            claims.check("each effect of each order has happened exactly once", wrong == [0; 4]);
            claims.check("some letters were in doubt", settled > 0);
        } else {
            claims.check("without steps, effects without keys happen twice", parcels > 0 && letters > 0);
        }
    }
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let mut claims = Claims::default();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["worker", services, store, form] => match services.parse() {
            Ok(services) => work(services, store, form == "steps").await,
            Err(error) => Err(Failure::from(error)),
        },
        ref words => {
            let kills = words.first().and_then(|kills| kills.parse().ok()).unwrap_or(60);
            let file = env::temp_dir().join(format!("order_fulfilment-{}.db", std::process::id()));
            let new_file = file.display().to_string();
            let ended = run(kills, words.get(1).copied().unwrap_or(&new_file), &mut claims).await;
            for suffix in ["", "-wal", "-shm"] {
                let _ = std::fs::remove_file(format!("{new_file}{suffix}"));
            }
            ended
        }
    };
    claims.exit_code(&result)
}
