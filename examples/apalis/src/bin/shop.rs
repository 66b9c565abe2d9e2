//! A worker process for the tests with a real Redis: `shop <URL> <queue> <folder>`. The folder has the records and the
//! books of the shop.
#![allow(clippy::disallowed_methods, reason = "a program without a clock of its own")]

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use apalis::prelude::{BoxDynError, Task, WorkerBuilder};
use apalis_redis::{Config, RedisStorage};
use idem_apalis::{DeliveryLayer, OperationLayer};
use idem_runtime::policy::Backoff;
use idem_runtime::{Policy, SqliteStore, current, idempotent};

const BEAT: Duration = Duration::from_millis(500);
const POLICY: Policy = Policy::new(Duration::from_secs(86_400))
    .lease(Duration::from_secs(1))
    .max_attempts(3)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(1)));

#[derive(Clone)]
struct Shop {
    folder: PathBuf,
    store: SqliteStore,
}

impl Shop {
    fn note(&self, line: &str) -> io::Result<()> {
        let mut books = OpenOptions::new().create(true).append(true).open(self.folder.join("books"))?;
        books.write_all(format!("{line}\n").as_bytes())
    }

    /// Returns true only at the first call with this `what` in all processes.
    fn is_first(&self, what: &str) -> io::Result<bool> {
        match File::create_new(self.folder.join(what)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Handler of orders such as `7:dies`, which consist of the number and the fault.
    async fn charge(&self, order: &str) -> Result<String, BoxDynError> {
        let (number, fault) = order.split_once(':').ok_or("no order")?;
        let (payment, attempt) = (current()?.child_key("charge"), current()?.number());
        self.note(&format!("body {number}"))?;
        if fault == "poison" {
            return Err("the bank refuses this customer".into());
        }
        // The bank recognises a payment by its key, and charges once for each key.
        if self.is_first(&format!("payment {}", payment.replace('/', "-")))? {
            self.note(&format!("charge {number}"))?;
        }
        if fault == "dies" && self.is_first(&format!("died {number}"))? {
            self.note(&format!("hangs {number}"))?;
            std::future::pending::<()>().await;
        }
        Ok(format!("receipt of attempt {attempt} for {number}"))
    }
}

/// Fails at its first run, and at no later run.
#[idempotent(key = "{order}", policy = POLICY, store = shop.store)]
async fn notify(shop: &Shop, order: &str) -> Result<String, BoxDynError> {
    shop.note("notify")?;
    match shop.is_first("notified")? {
        true => Err("the mail server is away".into()),
        false => Ok(format!("mail for {order}")),
    }
}

async fn work(url: &str, queue: &str, folder: &Path) -> Result<(), BoxDynError> {
    let store = SqliteStore::open(folder.join("idem.db")).await?;
    let shop = Shop { folder: folder.to_owned(), store: store.clone() };
    let config =
        |name: String| Config::default().queue(&name).batch_size(1).heartbeat_interval(BEAT).missed_heartbeats(4);
    let connection = apalis_redis::connect(url).await?;
    let orders = RedisStorage::new(connection.clone()).with_config(config(format!("{queue}-orders")));
    let mails = RedisStorage::new(connection).with_config(config(format!("{queue}-mails")));
    let name = |part: &str| format!("{part}-{}", std::process::id());

    let operations = OperationLayer::new(&store, "shop::charge", POLICY)
        .key(|task: &Task<String>| task.args.split(':').next().map(str::to_owned));
    let bank = shop.clone();
    let charge = operations.handler(move |order: String| {
        let bank = bank.clone();
        async move { bank.charge(&order).await }
    });
    // This handler returns a value although its call failed.
    let careless = DeliveryLayer::new().handler(move |order: String| {
        let shop = shop.clone();
        async move {
            let _ = notify(&shop, &order).await;
            Ok::<_, BoxDynError>("sent".to_owned())
        }
    });
    let orders = WorkerBuilder::new(name("orders")).backend(orders).build(charge);
    let mails = WorkerBuilder::new(name("mails")).backend(mails).build(careless);
    let mut workers = pin!(async { tokio::try_join!(orders.run(), mails.run()) });
    let mut wake = tokio::time::interval(BEAT);
    loop {
        tokio::select! {
            ended = &mut workers => return ended.map(drop).map_err(Into::into),
            // A worker of apalis 1.0 can sleep through its own heartbeat. Each tick polls the workers.
            _ = wake.tick() => {}
        }
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), BoxDynError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, queue, folder] = arguments.as_slice() else {
        return Err("usage: shop <URL> <queue> <folder>".into());
    };
    work(url, queue, Path::new(folder)).await
}
