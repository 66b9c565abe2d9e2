//! Ledger of effects, which no server can read; the answers that clients got; and the comparison of both.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::client::{Answer, Order};

/// Effects in their order: the operation, and the number of the attempt.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Vec<(String, u32)>>>);

impl Ledger {
    /// Serves a ledger on a free port. Returns the port.
    pub(crate) async fn serve(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
        let port = listener.local_addr().expect("an address").port();
        let ledger = self.clone();
        tokio::spawn(async move {
            loop {
                let (line, _) = listener.accept().await.expect("accepts");
                let ledger = ledger.clone();
                // If the server that connects is killed, the connection breaks, and the task ends with an error.
                tokio::spawn(async move { ledger.enter(line).await.ok() });
            }
        });
        port
    }

    /// Reads an entry from a connection, writes it, and answers with its number.
    async fn enter(&self, line: TcpStream) -> std::io::Result<()> {
        let mut line = BufReader::new(line);
        let mut entry = String::new();
        line.read_line(&mut entry).await?;
        // An entry that has arrived only in part is not written.
        let Some((operation, attempt)) = entry.strip_suffix('\n').and_then(|entry| entry.rsplit_once(' ')) else {
            return Ok(());
        };
        let attempt = attempt.parse().map_err(std::io::Error::other)?;
        let number = {
            let mut entries = self.0.lock().unwrap();
            entries.push((operation.to_owned(), attempt));
            entries.len() - 1
        };
        line.write_all(number.to_string().as_bytes()).await
    }

    fn entries(&self) -> Vec<(String, u32)> {
        self.0.lock().unwrap().clone()
    }
}

/// The answers to one operation.
#[derive(Default)]
struct Account {
    /// Different recorded answers. More than one is a violation.
    recorded: HashSet<Answer>,
    /// Answers that say that the server could not record them.
    unrecorded: Vec<Answer>,
    is_interrupted: bool,
}

impl Account {
    fn is_settled(&self) -> bool {
        !self.recorded.is_empty() || self.is_interrupted
    }
}

/// All answers that clients got, with the violations found so far.
#[derive(Default)]
pub(crate) struct Answers(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    accounts: HashMap<usize, Account>,
    counts: BTreeMap<String, u64>,
    violations: Vec<String>,
}

impl Answers {
    pub(crate) fn count(&self, what: impl Into<String>) {
        *self.0.lock().unwrap().counts.entry(what.into()).or_insert(0) += 1;
    }

    /// Notes the answer to a request. Returns whether the answer is final.
    pub(crate) fn note(&self, order: Order, answer: Option<Answer>) -> bool {
        let mut seen = self.0.lock().unwrap();
        let Seen { accounts, counts, violations } = &mut *seen;
        let account = accounts.entry(order.0).or_default();
        let Some(answer) = answer else {
            *counts.entry("no answer".to_owned()).or_insert(0) += 1;
            return false;
        };
        let is = |name: &str| answer.body.contains(&format!("urn:idem:http:{name}"));
        let problem = ["in-progress", "interrupted", "store-unavailable", "unrecorded", "busy", "caller-busy"]
            .into_iter()
            .find(|name| is(name));
        let replay = if answer.has("idempotent-replayed: true") { " replayed" } else { "" };
        let name = format!("{} {}{replay}", answer.status, problem.unwrap_or_default());
        *counts.entry(name.trim_end().replace("  ", " ")).or_insert(0) += 1;
        match (answer.status, problem) {
            (201, None) if answer.has("idempotency-recorded: false") => {
                account.unrecorded.push(answer);
                false
            }
            (201, None) => {
                account.recorded.insert(answer.repeated());
                true
            }
            (409, Some("interrupted")) if order.is_under_fail() => {
                account.is_interrupted = true;
                true
            }
            (409, Some("in-progress")) | (503, Some(_)) | (429, Some("caller-busy")) => false,
            _ => {
                violations.push(format!("{}: {answer:?} is no possible answer to this request", order.name()));
                false
            }
        }
    }

    /// Notes the answer to a request with the key of `order` and another payload. Such a request must run no handler.
    pub(crate) fn note_mismatch(&self, order: Order, answer: Option<&Answer>) {
        let status = answer.map_or(0, |answer| answer.status);
        self.count(format!("another payload: {status}"));
        if ![0, 422, 503].contains(&status) {
            let violation = format!("{}: another payload is answered by {answer:?}", order.name());
            self.0.lock().unwrap().violations.push(violation);
        }
    }

    pub(crate) fn violate(&self, violation: String) {
        self.0.lock().unwrap().violations.push(violation);
    }

    /// Returns whether the order has a final answer.
    pub(crate) fn is_settled(&self, order: Order) -> bool {
        self.0.lock().unwrap().accounts.get(&order.0).is_some_and(Account::is_settled)
    }

    /// Orders that were sent, and have no final answer yet.
    pub(crate) fn open(&self) -> Vec<Order> {
        let seen = self.0.lock().unwrap();
        let open = seen.accounts.iter().filter(|(_, account)| !account.is_settled());
        open.map(|(order, _)| Order(*order)).collect()
    }

    /// Orders with a recorded answer.
    pub(crate) fn recorded(&self) -> Vec<Order> {
        let seen = self.0.lock().unwrap();
        seen.accounts.iter().filter(|(_, it)| !it.recorded.is_empty()).map(|(order, _)| Order(*order)).collect()
    }

    /// Compares the answers with the ledger. Prints figures, and returns the violations.
    pub(crate) fn audit(&self, ledger: &Ledger) -> Vec<String> {
        let mut seen = self.0.lock().unwrap();
        let Seen { accounts, counts, violations } = &mut *seen;
        let entries = ledger.entries();
        let mut effects: HashMap<&str, Vec<u32>> = HashMap::new();
        for (operation, attempt) in &entries {
            effects.entry(operation).or_default().push(*attempt);
        }
        let (mut repeated, mut unrecorded, mut interrupted) = (0, 0, 0);
        for (order, account) in &*accounts {
            let (order, name) = (Order(*order), Order(*order).name());
            let attempts = effects.remove(&*name).unwrap_or_default();
            repeated += usize::from(attempts.len() > 1);
            unrecorded += account.unrecorded.len();
            interrupted += usize::from(account.is_interrupted);
            let numbers: HashSet<_> = attempts.iter().collect();
            if numbers.len() < attempts.len() || (attempts.len() > 1 && order.is_under_fail()) {
                violations.push(format!("{name}: effects of the attempts {attempts:?}"));
            }
            if account.recorded.len() > 1 {
                violations.push(format!("{name}: different answers {:?}", account.recorded));
            }
            for answer in account.recorded.iter().chain(&account.unrecorded) {
                let number = answer.body.strip_prefix(&format!("{name} effect "));
                let entry = number.and_then(|number| entries.get(number.parse::<usize>().ok()?));
                if entry.is_none_or(|(operation, _)| *operation != name) {
                    violations.push(format!("{name}: {answer:?} has no effect"));
                }
            }
        }
        violations.extend(effects.into_keys().map(|operation| format!("{operation}: an effect without a request")));
        println!("operations: {}, effects: {}", accounts.len(), entries.len());
        println!("operations with several effects, all under `retry` if there is no violation: {repeated}");
        println!("interrupted under `fail`: {interrupted}; answers that could not be recorded: {unrecorded}");
        for (name, count) in &*counts {
            println!("{name}: {count}");
        }
        violations.clone()
    }
}
