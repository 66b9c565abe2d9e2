//! The scene of an incident: a store, the worker process that causes the incident, deliveries of messages, and charges.

use std::cell::{Cell, RefCell};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use idem_runtime::{Error, Key, OnCrash, Operation, Outcome, Policy, SqliteStore, Store, StoreExt as _, observe};
use idem_tests::server::until;
use idem_tests::sqlite::Folder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::alerts::Looks;
use super::page::Section;

/// Policy with a retention of a week, which is longer than the broker keeps messages.
pub(crate) const PAY: Policy = Policy::new(Duration::from_secs(7 * 86_400));

/// Error of a delivery: the error of the body, or the reason why the body did not run.
#[derive(Debug)]
pub(crate) enum Failure {
    Refused(Error),
    /// The body failed.
    Declined,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Delivers the message about an order.
pub(crate) async fn deliver<T: Serialize + DeserializeOwned>(
    store: &(impl Store + ?Sized),
    order: &str,
    policy: Policy,
    body: impl Future<Output = Result<T, Failure>>,
) -> (Result<T, Failure>, Outcome) {
    observe(Operation::new(store, key(order), policy).run(body)).await
}

/// Returns the key of an order.
pub(crate) fn key(order: &str) -> Result<Key, idem_runtime::key::KeyError> {
    Key::new("pay", format!("order:{order}"))
}

/// An incident: its state in this test, and its description on the page.
pub(crate) struct Scene {
    pub(crate) folder: Folder,
    pub(crate) url: String,
    pub(crate) host: String,
    /// Id of the process that holds the keys.
    pub(crate) process: Cell<u32>,
    section: RefCell<Section>,
    before: String,
}

impl Scene {
    /// Creates the scene of the incident `title` on the store at this URL.
    pub(crate) fn at(title: &'static str, url: &str) -> Self {
        let name = Command::new("uname").arg("-n").output().expect("the name of this host");
        Self {
            folder: Folder::new(),
            url: url.to_owned(),
            host: String::from_utf8(name.stdout).expect("a name").trim().to_owned(),
            process: Cell::new(std::process::id()),
            section: RefCell::new(Section::named(title)),
            before: String::new(),
        }
    }

    /// Creates the scene of the incident `title` on a SQLite file.
    pub(crate) async fn on_file(title: &'static str) -> (Self, SqliteStore) {
        let mut scene = Self::at(title, "");
        scene.url = format!("sqlite:{}", scene.folder.file().display());
        let store = SqliteStore::options().holder("payments").open(scene.folder.file()).await.expect("opens");
        scene.begins(&store);
        (scene, store)
    }

    /// Takes the first snapshot of this store's metrics.
    pub(crate) fn begins(&mut self, store: &(impl Store + ?Sized)) {
        self.before = store.metrics().prometheus_text();
    }

    /// Charges the customer, which must not happen twice.
    #[allow(clippy::unused_async, reason = "nothing happens before it is polled")]
    pub(crate) async fn charge(&self, order: &str) -> Result<Value, Failure> {
        charge(self.folder.path(), order);
        Ok(json!({ "receipt": format!("r-{order}") }))
    }

    /// Returns the number of times that the customer of an order was charged.
    pub(crate) fn charges(&self, order: &str) -> usize {
        let charges = std::fs::read_to_string(self.folder.path().join("charges")).unwrap_or_default();
        charges.lines().filter(|line| *line == order).count()
    }

    /// Starts a process that charges this customer, and then neither returns nor releases its key.
    pub(crate) async fn worker(&self, order: &str, on_crash: OnCrash, lease: Duration) -> Worker {
        let orders = json!({
            "file": self.folder.file(), "folder": self.folder.path(), "order": order,
            "fail": on_crash == OnCrash::Fail, "lease": lease.as_secs(),
        });
        // The kernel kills the worker if this process dies first.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(std::env::current_exe().expect("a program"))
            .args(["scene::worker_process_that_an_incident_starts", "--exact"])
            .env(ORDERS, orders.to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("a worker");
        let worker = Worker(child);
        until("the worker charges", async || self.charges(order) == 1).await;
        self.process.set(worker.0.id());
        worker
    }

    /// Asserts that the alerts named on the page fire, and that the panels named on the page show the described data.
    #[track_caller]
    pub(crate) fn is_seen(&self, store: &(impl Store + ?Sized)) {
        let section = self.section.borrow();
        let looks = Looks { before: self.before.clone(), after: store.metrics().prometheus_text() };
        let alerts: Vec<_> = quoted(section.entry("Alert"), '`').filter(|it| it.starts_with("Idem")).collect();
        assert!(!alerts.is_empty(), "no alert is named");
        for alert in alerts {
            assert!(looks.fires(alert), "{alert} does not fire:\n{}", looks.after);
        }
        let mut panels = section.entry("Dashboard").split('*').skip(1);
        let mut seen = 0;
        while let (Some(panel), Some(said)) = (panels.next(), panels.next()) {
            let shown = looks.shown(panel);
            assert!(!shown.is_empty(), "`{panel}` shows nothing new:\n{}", looks.after);
            for label in quoted(said, '`') {
                assert!(shown.contains(&label), "`{panel}` does not show `{label}`, but {shown:?}");
            }
            seen += 1;
        }
        assert!(seen > 0, "no panel is named");
    }

    /// Runs the next block of commands of the page.
    #[track_caller]
    pub(crate) fn play(&self) {
        self.section.borrow_mut().play(self);
    }

    /// Asserts that all commands of the page were run.
    #[track_caller]
    pub(crate) fn ends(&self) {
        self.section.borrow().ends();
    }
}

/// Returns each part of `text` that stands between two characters `sign`, as between quotes.
fn quoted(text: &str, sign: char) -> impl Iterator<Item = &str> {
    text.split(sign).skip(1).step_by(2)
}

fn charge(folder: &Path, order: &str) {
    let file = std::fs::File::options().create(true).append(true).open(folder.join("charges"));
    writeln!(file.expect("a file"), "{order}").expect("can be written");
}

/// A worker process, which is killed when this value is dropped.
pub(crate) struct Worker(Child);

impl Worker {
    /// Kills the process, as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it has ended");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Environment variable that only a worker process has: the orders of this process.
const ORDERS: &str = "IDEM_RUNBOOK_WORKER";

/// The body of a worker process, which an incident starts. As an ordinary test, this function does nothing.
#[tokio::test]
async fn worker_process_that_an_incident_starts() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let orders: Value = serde_json::from_str(&orders).expect("orders");
    let text = |name: &str| orders[name].as_str().expect("an order").to_owned();
    let store = SqliteStore::options().holder("payments").open(text("file")).await.expect("opens");
    let on_crash = if orders["fail"] == true { OnCrash::Fail } else { OnCrash::Retry };
    let lease = Duration::from_secs(orders["lease"].as_u64().expect("a lease"));
    let body = async {
        charge(Path::new(&text("folder")), &text("order"));
        std::future::pending::<Result<Value, Failure>>().await
    };
    let _ = deliver(&store, &text("order"), PAY.lease(lease).on_crash(on_crash), body).await;
}
