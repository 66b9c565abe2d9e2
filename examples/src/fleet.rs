//! Parts that the examples for brokers share: the messages, a bank that keeps a log of payments (its books), worker
//! processes that are killed, and the audit of the books. `outages` has the run in which broker and store are away.
//!
//! This module uses no broker: each example uses its broker in its own file.
#![allow(clippy::disallowed_methods, reason = "a bank takes its time")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;
use std::{env, fmt};

use idem_runtime::brokers::Intake;
use idem_runtime::policy::Backoff;
use idem_runtime::{Outcome, Policy, SqliteStore};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use crate::outages;
use crate::servers::Server;

/// Error after which an example can't go on.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Names and texts of a message's headers.
pub type Headers = BTreeMap<String, String>;

/// Broker of an example: its queues and, for a run with outages, its server.
#[allow(async_fn_in_trait, reason = "no other crate implements it")]
pub trait Broker {
    /// Name of the example.
    const NAME: &str;
    /// Default of `--url`; `None` if the example starts a server instead.
    const URL: Option<&str>;
    /// True if the broker holds the records, too.
    const IS_STORE: bool = false;
    /// True if a message waits for the policy's pause before its next delivery.
    const HAS_DELAYS: bool = true;

    /// Starts a server for the run `name`, with its files in `folder`.
    ///
    /// # Errors
    /// If the server does not start.
    fn start(&self, name: &str, folder: &Path) -> Result<Box<dyn Server>, Failure>;

    /// Creates the queues unless they exist, and publishes messages.
    ///
    /// # Errors
    /// The server's error. Some messages may be published.
    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure>;

    /// Returns the headers of the messages that were set aside.
    ///
    /// # Errors
    /// The server's error.
    async fn dead_letters(&self, run: &Run) -> Result<Vec<Headers>, Failure>;

    /// Removes the queues.
    ///
    /// # Errors
    /// The server's error.
    async fn clean_up(&self, run: &Run) -> Result<(), Failure>;
}

/// Stops the intake of this process at SIGTERM.
///
/// # Errors
/// If no signal handler can be installed.
pub fn stop_at_sigterm(intake: &Intake) -> io::Result<()> {
    let (mut terminate, intake) = (signal(SignalKind::terminate())?, intake.clone());
    tokio::spawn(async move {
        terminate.recv().await;
        intake.stop();
    });
    Ok(())
}

/// Time after which each broker of these examples redelivers an unacknowledged message. The slow handler takes three
/// times as long.
pub const BROKER_TIMEOUT: Duration = Duration::from_secs(2);
const SLOW: Duration = Duration::from_secs(6);
/// Pause before the next try of an order whose next try comes late. The real pause is at least half of this time.
const LATE: Duration = Duration::from_secs(30);
/// Time limit of a step of an example.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const WORKERS: usize = 3;
const PLAIN: u64 = 60;
/// Messages that the workers must set aside.
const BAD: [&str; 2] = ["malformed", "1003/1"];
/// Environment variable that makes the program a worker.
const WORKER: &str = "IDEM_EXAMPLE_RUN";

/// Fault that the example causes while an order is charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Mishap {
    None,
    /// The charge takes longer than the broker waits for an acknowledgement.
    Slow,
    /// The bank does not answer the first two calls.
    FailsTwice,
    /// The charge never succeeds.
    Poison,
    /// The worker is killed after the charge, before the store records its result.
    WorkerDies,
    /// The charge takes until [`Run::release`].
    IsHeld,
    /// The bank does not answer the first call about an order whose next try comes late.
    FailsLate,
}

/// An order to charge, as it is published.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Event {
    /// The order, which identifies the operation.
    pub order: u64,
    /// The amount, in cents.
    pub cents: u64,
    /// Number of this message among several messages about the same order. A real producer that publishes a message
    /// again sends no such number.
    pub(crate) copy: u32,
    pub(crate) mishap: Mishap,
}

/// The bank's answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Receipt {
    /// The key of the payment at the bank.
    pub payment: String,
    /// The amount, in cents.
    pub cents: u64,
}

impl Event {
    /// Reads a message.
    ///
    /// # Errors
    /// The parser's error.
    pub fn read(payload: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(payload)
    }

    /// Returns a published message about an order without a mishap.
    #[must_use]
    pub fn plain(order: u64) -> Self {
        Self { order, cents: 100 + order, copy: 1, mishap: Mishap::None }
    }

    pub(crate) fn tag(&self) -> String {
        format!("{}/{}", self.order, self.copy)
    }
}

/// One run of an example, shared by its processes.
#[derive(Clone)]
pub struct Run {
    /// URL of the server.
    pub url: String,
    /// A unique name of the run, for example for its queues.
    pub name: String,
    pub(crate) folder: PathBuf,
    /// True for a run with outages.
    pub(crate) has_outages: bool,
}

impl Run {
    /// Opens the store that the worker processes share.
    ///
    /// # Errors
    /// If the file can't be opened.
    pub async fn store(&self) -> Result<SqliteStore, Failure> {
        let options = SqliteStore::options().busy_timeout(Duration::from_millis(200));
        Ok(options.response_timeout(Duration::from_secs(1)).open(self.file()).await?)
    }

    /// File of the store.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.join("idem.db")
    }

    /// Returns the policy for an order. In a run with outages this policy has no `max_attempts`, so that only the
    /// delivery limit ends the deliveries of a message. Some orders wait long for their next try.
    pub fn policy(&self, policy: Policy, event: &Event) -> Policy {
        let policy = if self.has_outages { policy.max_attempts(u32::MAX) } else { policy };
        if event.mishap == Mishap::FailsLate { policy.backoff(Backoff::new(LATE, LATE)) } else { policy }
    }

    /// Ends the charges that are held.
    pub(crate) fn release(&self, event: &Event) -> io::Result<()> {
        self.is_first(&format!("released {}", event.order)).map(drop)
    }

    /// Asks the bank to charge a customer. The bank recognises a payment by its key, and charges once for each key.
    ///
    /// # Errors
    /// If the bank does not answer.
    pub async fn charge(&self, event: &Event, payment: String) -> io::Result<Receipt> {
        self.note(&format!("body {} {}", event.order, event.tag()))?;
        match event.mishap {
            Mishap::Slow => sleep(SLOW).await,
            Mishap::IsHeld => {
                while !self.folder.join(format!("released {}", event.order)).exists() {
                    sleep(Duration::from_millis(20)).await;
                }
            }
            Mishap::None | Mishap::WorkerDies => sleep(Duration::from_millis(20)).await,
            Mishap::Poison => return Err(io::Error::other("the bank refuses this customer, today and tomorrow")),
            Mishap::FailsTwice if self.is_first("failed once")? || self.is_first("failed twice")? => {
                return Err(io::Error::other("the bank does not answer"));
            }
            Mishap::FailsLate if self.is_first(&format!("failed {}", event.order))? => {
                return Err(io::Error::other("the bank does not answer"));
            }
            Mishap::FailsTwice | Mishap::FailsLate => {}
        }
        // To create the file is to make the charge. The file outlives a kill of this process.
        if !self.is_first(&format!("payment {} {payment}", event.order))? {
            self.note("recognised")?;
        }
        if event.mishap == Mishap::WorkerDies && self.is_first("died")? {
            self.note(&format!("dying {}", std::process::id()))?;
            std::future::pending::<()>().await;
        }
        Ok(Receipt { payment, cents: event.cents })
    }

    /// Writes into the books that a message has arrived; `event` is `None` if the message can't be read.
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn delivered(&self, event: Option<&Event>) -> io::Result<()> {
        self.note(&format!("delivered {}", event.map_or("malformed".to_owned(), Event::tag)))
    }

    /// Writes into the books that a message is about to be acknowledged after `outcome`. This line precedes the
    /// acknowledgement: if a worker is killed in between, the message is delivered and acknowledged again.
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn acknowledged(&self, event: &Event, outcome: &Outcome) -> io::Result<()> {
        if outcome.replayed() {
            self.note("replayed")?;
        }
        self.note(&format!("acknowledged {}", event.tag()))
    }

    /// Writes into the books that a message is about to be set aside; `event` is `None` if the message can't be read.
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn set_aside(&self, event: Option<&Event>) -> io::Result<()> {
        self.note(&format!("aside {}", event.map_or("malformed".to_owned(), Event::tag)))
    }

    /// Returns whether the worker should lose its connection now. One worker loses its connection once, after ten
    /// messages.
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn loses_connection(&self, received: usize) -> io::Result<bool> {
        Ok(received == 10 && !self.has_outages && self.is_first("connection lost")?)
    }

    /// Appends one line to the books, unbuffered: a killed process loses no line that it has written.
    fn note(&self, line: &str) -> io::Result<()> {
        let mut books = OpenOptions::new().create(true).append(true).open(self.folder.join("books"))?;
        books.write_all(format!("{line}\n").as_bytes())
    }

    pub(crate) fn notes(&self) -> String {
        fs::read_to_string(self.folder.join("books")).unwrap_or_default()
    }

    /// Returns true only at the first call with this `what` in all processes of the run.
    fn is_first(&self, what: &str) -> io::Result<bool> {
        match File::create_new(self.folder.join(what)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn spawn(&self) -> io::Result<Child> {
        let run = format!("{}\n{}\n{}\n{}", self.url, self.name, self.folder.display(), self.has_outages);
        Command::new(env::current_exe()?).env(WORKER, run).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()
    }
}

/// Runs an example. `work` runs a worker process until SIGTERM.
///
/// The exit code is 0 if every order was charged exactly once, 1 if not, and 2 if the example could not run.
pub fn main<B: Broker>(broker: &B, work: &impl AsyncFn(Run) -> Result<(), Failure>) -> ExitCode {
    let fail = |problem: &dyn fmt::Display| {
        eprintln!("{}: {problem}", B::NAME);
        ExitCode::from(2)
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    // A worker process runs this same program.
    if let Some(run) = env::var(WORKER).ok().as_deref().and_then(from_variable) {
        end_with_parent();
        let level = tracing_subscriber::filter::LevelFilter::WARN;
        tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).with_ansi(false).init();
        return match runtime.block_on(work(run)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("worker {}: {}", std::process::id(), crate::explain(&*error));
                ExitCode::FAILURE
            }
        };
    }
    let arguments = match arguments::<B>() {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return ExitCode::SUCCESS,
        Err(problem) => return fail(&problem),
    };
    let name = format!("idem-example-{}", std::process::id());
    let folder = env::temp_dir().join(&name);
    let worked = runtime.block_on(async {
        fs::create_dir_all(&folder)?;
        let mut server = match &arguments.url {
            Some(_) => None,
            None => Some(broker.start(&name, &folder.join("server"))?),
        };
        let url = arguments.url.unwrap_or_else(|| server.as_ref().map_or_else(String::new, |server| server.url()));
        let run = Run { url, name, folder: folder.clone(), has_outages: arguments.has_outages };
        match &mut server {
            Some(server) if run.has_outages => outages::run(broker, &run, &mut **server).await,
            _ => run_kills(broker, &run).await,
        }
    });
    let _ = fs::remove_dir_all(&folder);
    match worked {
        Ok((text, is_correct)) => {
            crate::show(&text);
            if is_correct { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => fail(&crate::explain(&*error)),
    }
}

/// Kills and stops workers while they handle messages. Returns the audit as text, and whether the books are correct.
async fn run_kills(broker: &impl Broker, run: &Run) -> Result<(String, bool), Failure> {
    let mut fleet = Fleet::of(run);
    // The audit reads the books even if a step of the run failed, but the error of that step is reported first.
    let worked = fleet.work(broker).await;
    fleet.end()?;
    let (died, stopped) = (fleet.died, fleet.stopped);
    let cleaned_up = broker.clean_up(run).await;
    let audit = Audit::of(run, died, stopped);
    worked?;
    cleaned_up?;
    Ok((audit.to_string(), audit.is_correct()))
}

/// Ends this process when the process that started it is gone, even after a kill.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(1);
    });
}

fn from_variable(variable: &str) -> Option<Run> {
    let mut lines = variable.lines().map(str::to_owned);
    let (url, name, folder) = (lines.next()?, lines.next()?, lines.next()?.into());
    Some(Run { url, name, folder, has_outages: lines.next()? == "true" })
}

/// The command line of an example.
struct Arguments {
    /// URL of the server; `None` if the example starts a server.
    url: Option<String>,
    has_outages: bool,
}

/// Returns the arguments; `None` after `--help`.
fn arguments<B: Broker>() -> Result<Option<Arguments>, String> {
    let mut arguments = env::args().skip(1);
    let usage = format!(
        "Usage: {} [--url URL | --outages]\n\n\
         Publishes orders, some of them twice, charges each exactly once with {WORKERS} worker processes that are killed and \
         stopped,\nand audits the books of the bank.\n\n\
         \x20 --url URL   the server (default: {})\n\
         \x20 --outages   start a server, kill it and start it again while workers run, and lock their store;\n\
         \x20             IDEM_EXAMPLE_OUTAGE sets the seconds of each outage (default: {})\n\n\
         Exit status: 0 every order was charged exactly once, 1 one was not, 2 the example could not run.\n",
        B::NAME,
        B::URL.unwrap_or("one of its own"),
        outages::SECONDS,
    );
    match (arguments.next().as_deref(), arguments.next(), arguments.next()) {
        (None, ..) => Ok(Some(Arguments { url: B::URL.map(str::to_owned), has_outages: false })),
        (Some("--url"), Some(url), None) => Ok(Some(Arguments { url: Some(url), has_outages: false })),
        (Some("--outages"), None, None) => Ok(Some(Arguments { url: None, has_outages: true })),
        (Some("--help" | "-h"), None, None) => {
            crate::show(&usage);
            Ok(None)
        }
        _ => Err(format!("these arguments say nothing\n\n{}", usage.trim_end())),
    }
}

/// Returns the events and the payloads of all messages except the slow messages, which are published later. One payload
/// can't be read, and has no event.
fn first_messages() -> (Vec<Event>, Vec<Vec<u8>>) {
    let event = |order: u64, copy, mishap| Event { order, cents: 100 + order, copy, mishap };
    let mut events =
        vec![event(1_001, 1, Mishap::WorkerDies), event(1_002, 1, Mishap::FailsTwice), event(1_003, 1, Mishap::Poison)];
    for order in 1..=PLAIN {
        // Every third order is published twice, and every twelfth three times.
        let copies = if order % 12 == 0 { 3 } else { 1 + u32::from(order % 3 == 0) };
        events.extend((1..=copies).map(|copy| event(order, copy, Mishap::None)));
    }
    let mut payloads: Vec<_> = events.iter().map(payload).collect();
    payloads.insert(7, br#"{"order": "fourty"#.to_vec());
    (events, payloads)
}

fn slow_messages() -> Vec<Event> {
    (1..=2).map(|copy| Event { order: 2_001, cents: 2_101, copy, mishap: Mishap::Slow }).collect()
}

pub(crate) fn payload(event: &Event) -> Vec<u8> {
    serde_json::to_vec(event).expect("an event serializes")
}

/// The worker processes.
pub(crate) struct Fleet<'a> {
    run: &'a Run,
    pub(crate) workers: Vec<Child>,
    /// Ids of the worker processes that were killed.
    killed: BTreeSet<u32>,
    died: u32,
    stopped: u32,
}

impl<'a> Fleet<'a> {
    pub(crate) fn of(run: &'a Run) -> Self {
        Self { run, workers: Vec::new(), killed: BTreeSet::new(), died: 0, stopped: 0 }
    }

    /// Kills the workers that are left.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        for worker in &mut self.workers {
            worker.kill()?;
            worker.wait()?;
        }
        Ok(())
    }

    async fn work(&mut self, broker: &impl Broker) -> Result<(), Failure> {
        let (events, payloads) = first_messages();
        broker.publish(self.run, &payloads).await?;
        for _ in 0..WORKERS {
            self.workers.push(self.run.spawn()?);
        }
        // One worker is stopped after a third of the messages, and replaced.
        self.until(events.len() / 3).await?;
        let worker = self.workers.remove(0);
        self.stop(worker).await?;
        self.workers.push(self.run.spawn()?);
        self.until(payloads.len()).await?;
        // No worker is killed from here on, so each slow message must be delivered only once, although its handler
        // takes longer than the broker waits.
        let slow: Vec<_> = slow_messages().iter().map(payload).collect();
        broker.publish(self.run, &slow).await?;
        self.until(payloads.len() + slow.len()).await?;
        for worker in std::mem::take(&mut self.workers) {
            self.stop(worker).await?;
        }
        Ok(())
    }

    /// Waits until `settled` messages are acknowledged or set aside. Kills each worker that has written into the books
    /// that it is dying, and replaces it.
    async fn until(&mut self, settled: usize) -> Result<(), Failure> {
        let began = Instant::now();
        loop {
            let notes = self.run.notes();
            for dying in notes.lines().filter_map(|line| line.strip_prefix("dying ")?.parse().ok()) {
                if self.killed.insert(dying)
                    && let Some(place) = self.workers.iter().position(|worker| worker.id() == dying)
                {
                    let mut worker = self.workers.swap_remove(place);
                    let killed = worker.kill(); // SIGKILL
                    worker.wait()?;
                    killed?;
                    self.died += 1;
                    self.workers.push(self.run.spawn()?);
                }
            }
            self.check_workers()?;
            let done: BTreeSet<_> = notes.lines().filter_map(settled_tag).collect();
            if done.len() >= settled {
                return Ok(());
            }
            if began.elapsed() > LIMIT {
                let delivered = notes.lines().filter_map(|line| line.strip_prefix("delivered "));
                let open: BTreeSet<_> = delivered.filter(|tag| !done.contains(tag)).collect();
                let done = done.len();
                return Err(
                    format!("{done} of {settled} messages are settled after {LIMIT:?}, but not {open:?}").into()
                );
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Returns an error if a worker has ended.
    pub(crate) fn check_workers(&mut self) -> Result<(), Failure> {
        for worker in &mut self.workers {
            if let Some(status) = worker.try_wait()? {
                return Err(format!("a worker has ended by itself: {status}").into());
            }
        }
        Ok(())
    }

    /// Sends SIGTERM to a worker, and waits for its end.
    pub(crate) async fn stop(&mut self, mut worker: Child) -> Result<(), Failure> {
        let told = Command::new("kill").args(["-TERM", &worker.id().to_string()]).status();
        let began = Instant::now();
        let status = loop {
            match worker.try_wait()? {
                Some(status) => break status,
                None if began.elapsed() > LIMIT => {
                    worker.kill()?;
                    worker.wait()?;
                    return Err(format!("a worker has not ended {LIMIT:?} after it was told to").into());
                }
                None => sleep(Duration::from_millis(10)).await,
            }
        };
        told?;
        self.stopped += 1;
        if status.success() { Ok(()) } else { Err(format!("a worker did not end well: {status}").into()) }
    }
}

fn settled_tag(line: &str) -> Option<&str> {
    line.strip_prefix("acknowledged ").or_else(|| line.strip_prefix("aside "))
}

/// Findings of the audit of the books.
struct Audit {
    deliveries: usize,
    bodies: usize,
    replays: usize,
    aside: usize,
    charged: HashMap<u64, usize>,
    recognised: usize,
    died: u32,
    stopped: u32,
    wrong: Vec<String>,
}

impl Audit {
    fn of(run: &Run, died: u32, stopped: u32) -> Self {
        let notes = run.notes();
        let lines = |prefix: &'static str| notes.lines().filter_map(move |line| line.strip_prefix(prefix));
        let mut charged = HashMap::new();
        // The bank has made one file for each charge, named after the order and the key of the payment.
        for file in fs::read_dir(&run.folder).into_iter().flatten().flatten() {
            let name = file.file_name();
            let order = name.to_str().and_then(|name| name.strip_prefix("payment ")?.split(' ').next()?.parse().ok());
            if let Some(order) = order {
                *charged.entry(order).or_default() += 1;
            }
        }
        let (events, _) = first_messages();
        let slow = slow_messages();
        let mut wrong = Vec::new();
        let mut check = |is_right: bool, what: &str| {
            if !is_right {
                wrong.push(what.to_owned());
            }
        };
        // Each order must be charged once, except the order of the poisoned message.
        let published: BTreeMap<u64, Mishap> =
            events.iter().chain(&slow).map(|event| (event.order, event.mishap)).collect();
        for (order, mishap) in &published {
            let times = charged.get(order).copied().unwrap_or(0);
            let right = usize::from(*mishap != Mishap::Poison);
            check(times == right, &format!("order {order} was charged {times} times"));
        }
        // The handler of an order may run again only because of a fault that the example has caused.
        let runs = |order: u64| {
            lines("body ").filter(|line| line.split(' ').next() == Some(order.to_string().as_str())).count()
        };
        check(runs(1_002) == 3, "the handler that fails twice did not run three times");
        check(runs(2_001) == 1, "the handler that takes long did not run once");
        let plain = (1..=PLAIN).filter(|order| runs(*order) > 1).count();
        // A killed worker also holds other messages, whose handlers may have to run again.
        check(plain <= 8, "more handlers ran again than one worker holds");
        let slow_run = lines("body 2001 ").next().unwrap_or_default();
        let slow_deliveries = lines("delivered ").filter(|tag| *tag == slow_run).count();
        check(slow_deliveries == 1, "the message that takes long was delivered again while its handler ran");
        let aside: BTreeSet<_> = lines("aside ").collect();
        check(aside.is_subset(&BAD.into()), "a good message was set aside");
        check(aside.is_superset(&BAD.into()), "a bad message was not set aside");
        check(died == 1, "no worker was killed");
        Self {
            deliveries: lines("delivered ").count(),
            bodies: lines("body ").count(),
            replays: notes.lines().filter(|line| *line == "replayed").count(),
            aside: aside.len(),
            recognised: lines("recognised").count(),
            charged,
            died,
            stopped,
            wrong,
        }
    }

    fn is_correct(&self) -> bool {
        self.wrong.is_empty()
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let twice = self.charged.values().filter(|times| **times > 1).count();
        let rows = [
            ("deliveries", self.deliveries, "duplicates and redeliveries included"),
            ("handler bodies run", self.bodies, "with those that failed, and the one that was killed"),
            ("replays", self.replays, "answered from the record"),
            ("charges", self.charged.values().sum(), "one for each order"),
            ("charges asked for again", self.recognised, "recognised by their key, which is the same on every attempt"),
            ("double charges", twice, ""),
            ("messages set aside", self.aside, "one that never succeeds, one that can't be read"),
            ("workers killed", self.died as usize, "SIGKILL, in the middle of a handler"),
            ("workers stopped", self.stopped as usize, "SIGTERM"),
        ];
        for (what, count, note) in rows {
            writeln!(f, "  {:<28}{:>8}{}{note}", what, count, if note.is_empty() { "" } else { "   " })?;
        }
        writeln!(f)?;
        for wrong in &self.wrong {
            writeln!(f, "WRONG: {wrong}.")?;
        }
        match self.is_correct() {
            true => writeln!(f, "Every order was charged exactly once."),
            false => Ok(()),
        }
    }
}
