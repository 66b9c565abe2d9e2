//! The main process: it starts the brokers, delivers the orders to two workers, and kills these workers.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_examples::Claims;
use idem_examples::senders::RabbitMqSender;
use idem_examples::servers::{Server, ServerProcess};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::Failure;
use crate::audit::{self, AuditedBroker};

/// Number of orders that are open until all kills are done.
const OPEN: usize = 20;
/// Number of acknowledged orders that each new worker gets again, as if their acknowledgements were lost.
const AGAIN: usize = 5;
/// Longest life of a worker that is killed, in milliseconds from its first delivery.
const LIFE_MS: u64 = 250;
/// Time limit of a run, in addition to a second for each kill.
const LIMIT: Duration = Duration::from_secs(120);
const WORKERS: usize = 2;
/// Time between the kill of a broker and its next start.
const OUTAGE: Duration = Duration::from_secs(1);

/// End of an order, as its worker has acknowledged it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Paid { payment: String },
    Declined,
}

/// Orders of a run, as their broker would know them.
#[derive(Default)]
struct Orders {
    next: u64,
    open: BTreeSet<u64>,
    ended: BTreeMap<u64, End>,
    /// Number of tasks with kills still to do. New orders come until it is 0.
    busy: usize,
    wrong: Vec<String>,
}

impl Orders {
    /// Returns all open orders, and opens new ones until the kills are done.
    fn open(&mut self) -> BTreeSet<u64> {
        while self.busy > 0 && self.open.len() < OPEN {
            self.open.insert(self.next);
            self.next += 1;
        }
        self.open.clone()
    }

    /// Reads a line of a worker, and returns its order.
    fn end(&mut self, line: &str) -> Result<u64, Failure> {
        let (order, end) = match line.split(' ').collect::<Vec<_>>()[..] {
            ["paid", order, payment] => (order.parse()?, End::Paid { payment: payment.to_owned() }),
            ["declined", order] => (order.parse()?, End::Declined),
            _ => return Err(format!("a worker says `{line}`").into()),
        };
        self.open.remove(&order);
        let known = self.ended.entry(order).or_insert_with(|| end.clone());
        if *known != end {
            self.wrong.push(format!("order {order} was acknowledged as {known:?} and as {end:?}"));
        }
        Ok(order)
    }
}

/// A run with one broker.
struct Run<'a> {
    name: String,
    url: String,
    store: &'a str,
    has_outbox: bool,
    orders: Mutex<Orders>,
}

/// A worker process, and its orders that it has not acknowledged.
struct Worker<'a> {
    run: &'a Run<'a>,
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    given: BTreeSet<u64>,
    unsettled: BTreeSet<u64>,
}

impl Run<'_> {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one worker follow the other, and kills each but the last.
    async fn kill(&self, place: usize, kills: usize) -> Result<(), Failure> {
        let mut seed = 0x5eed_u64 + place as u64;
        for life in 0..kills {
            // A random time (xorshift, Marsaglia 2003).
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let mut worker = self.worker(&format!("{place}.{life}")).await?;
            if let Ok(ended) = timeout(Duration::from_millis(seed % LIFE_MS), worker.serve()).await {
                ended?;
                return Err("a worker has ended before it was killed".into());
            }
            worker.child.kill().await?;
            // Acknowledgements of the killed worker may still be on their way.
            worker.serve().await?;
        }
        let mut worker = self.worker(&format!("{place}.{kills}")).await?;
        self.orders().busy -= 1;
        worker.serve().await?;
        let status = worker.child.wait().await?;
        if status.success() { Ok(()) } else { Err(format!("a worker has ended: {status}").into()) }
    }

    /// Kills the broker while the workers publish, starts it again, and waits until the workers publish again.
    async fn break_broker(&self, server: &mut ServerProcess) -> Result<(), Failure> {
        self.until_ended(OPEN).await;
        server.kill()?;
        sleep(OUTAGE).await;
        tokio::task::block_in_place(|| server.start())?;
        let ended = self.orders().ended.len();
        self.until_ended(ended + 3 * OPEN).await;
        self.orders().busy -= 1;
        Ok(())
    }

    async fn until_ended(&self, orders: usize) {
        while self.orders().ended.len() < orders {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Starts a worker, and waits until it is ready for orders.
    async fn worker(&self, worker: &str) -> Result<Worker<'_>, Failure> {
        let form = if self.has_outbox { "outbox" } else { "direct" };
        let mut child = Command::new(env::current_exe()?)
            .args(["worker", worker, &self.name, &self.url, self.store, form])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("a worker without output")?).lines();
        match lines.next_line().await? {
            Some(line) if line == "ready" => {}
            line => return Err(format!("a worker is not ready: {line:?}").into()),
        }
        let input = child.stdin.take();
        let mut worker = Worker { run: self, child, input, lines, given: BTreeSet::new(), unsettled: BTreeSet::new() };
        let again: Vec<_> = self.orders().ended.keys().rev().take(AGAIN).copied().collect();
        worker.give(again).await;
        Ok(worker)
    }
}

impl Worker<'_> {
    /// Gives the worker all open orders, and counts what it acknowledges, until its output ends.
    async fn serve(&mut self) -> Result<(), Failure> {
        loop {
            let open = self.run.orders().open();
            let new: Vec<_> = open.difference(&self.given).copied().collect();
            self.give(new).await;
            if self.unsettled.is_empty() {
                // The kills are done. The worker ends, because no further order comes.
                self.input = None;
            }
            let Some(line) = self.lines.next_line().await? else { return Ok(()) };
            let order = self.run.orders().end(&line)?;
            self.unsettled.remove(&order);
        }
    }

    /// Writes orders to the worker. A killed worker reads none of them.
    async fn give(&mut self, orders: Vec<u64>) {
        let Some(input) = &mut self.input else { return };
        for order in &orders {
            let _ = input.write_all(format!("{order}\n").as_bytes()).await;
        }
        self.given.extend(&orders);
        self.unsettled.extend(&orders);
    }
}

/// Settings of the example.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    /// Number of kills with each broker.
    pub(crate) kills: usize,
    /// File or URL of a store; `None` for a new file.
    pub(crate) store: Option<&'a str>,
    pub(crate) has_outbox: bool,
    /// True if each broker is killed once, too.
    pub(crate) has_outages: bool,
}

/// Kills workers with one broker after the other, and audits the messages.
pub(crate) async fn run(settings: Settings<'_>, claims: &mut Claims) -> Result<(), Failure> {
    let folder = env::temp_dir().join(format!("outbox-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let file = folder.join("idem.db").display().to_string();
    let settings = Settings { store: settings.store.or(Some(&file)), ..settings };
    let ended = run_brokers(settings, &folder, claims).await;
    let _ = fs::remove_dir_all(&folder);
    ended
}

async fn run_brokers(settings: Settings<'_>, folder: &Path, claims: &mut Claims) -> Result<(), Failure> {
    let mut nats = ServerProcess::nats(&folder.join("nats"))?;
    let broker = AuditedBroker::jetstream(&nats.url()).await?;
    run_broker(broker, "JetStream", &mut nats, settings, claims).await?;
    drop(nats);
    let mut rabbitmq = ServerProcess::rabbitmq(&folder.join("rabbitmq"))?;
    let broker = AuditedBroker::rabbitmq(&rabbitmq.url()).await?;
    let sender = RabbitMqSender::new(&rabbitmq.url());
    let refused = sender.publish("orders.nowhere", "id", b"", std::iter::empty()).await;
    claims.check("RabbitMQ refuses a message for no queue", refused.is_err_and(|error| error.is_refused()));
    run_broker(broker, "RabbitMQ", &mut rabbitmq, settings, claims).await
}

async fn run_broker(
    broker: AuditedBroker,
    title: &str,
    server: &mut ServerProcess,
    settings: Settings<'_>,
    claims: &mut Claims,
) -> Result<(), Failure> {
    let Settings { kills, store, has_outbox, has_outages } = settings;
    let began = Instant::now();
    let orders = Mutex::new(Orders { busy: WORKERS + usize::from(has_outages), ..Orders::default() });
    let name = format!("{title}-{}", std::process::id());
    let run = Run { name, url: server.url(), store: store.unwrap_or_default(), has_outbox, orders };
    let each = kills / WORKERS;
    let limit = LIMIT + Duration::from_secs(kills as u64);
    let outage = async { if has_outages { run.break_broker(server).await } else { Ok(()) } };
    let all = async { tokio::try_join!(run.kill(0, each), run.kill(1, kills - each), outage) };
    timeout(limit, all).await.map_err(|_| format!("the orders are not done after {limit:?}"))??;
    let orders = run.orders.into_inner().unwrap_or_else(PoisonError::into_inner);
    let form = if has_outbox { "with" } else { "without" };
    let outage = if has_outages { " and a kill of the broker" } else { "" };
    println!("{title}, {form} an outbox: {kills} kills{outage} in {:.0?}", began.elapsed());
    for wrong in &orders.wrong {
        println!("  {wrong}");
    }
    claims.check("every input has the same end in all of its acknowledgements", orders.wrong.is_empty());
    audit::audit(&broker.messages().await?, &orders.ended, claims);
    Ok(())
}
