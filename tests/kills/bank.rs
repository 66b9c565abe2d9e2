//! Bank: a server in the test process that makes the effects. No process under test can read its ledger, except by a
//! look-up of a reference. The bank stands still, is late or gives no answer where a test demands it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Reaction of a bank to a second request with the same reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repetition {
    /// The bank makes a second effect.
    Repeats,
    /// The bank answers with the receipt of the first request, as an API with idempotency keys does.
    Replays,
    /// The bank refuses the request.
    Refuses,
}

/// Place of a handler at which a fault happens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Place {
    /// The body is about to call the bank.
    Before,
    /// The request is on its way. The bank takes the request later.
    OnItsWay,
    /// The effect is made, and the body has no answer.
    Made,
    /// The body has the answer of the bank, and its result is not recorded. A step that called the bank has ended.
    After,
    /// The reconciler waits for the bank.
    Asked,
    /// The reconciler has the answer of the bank, and its result is not recorded.
    Found,
}

/// Kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum FaultKind {
    /// The process is killed (`SIGKILL`).
    Kill,
    /// The delivery is cut off: the process drops the future of the handler.
    CutOff,
    /// The connection to the bank ends without an answer.
    NoAnswer,
    /// The bank can't help now: it is busy, or does not know whether it has seen the reference.
    NoHelp,
}

/// One fault of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    pub place: Place,
    pub kind: FaultKind,
}

/// Moment at which the bank takes requests that were on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// After the next look-up, which therefore finds nothing.
    AfterSearch,
    /// After the next request.
    AfterRequest,
}

/// Account of one message.
pub struct Account {
    repetition: Repetition,
    arrival: Arrival,
    /// False if no look-up ever gets an answer.
    knows: bool,
    faults: VecDeque<Fault>,
    /// Receiver of the faults that the test has to carry out: kills and cuts.
    interventions: UnboundedSender<FaultKind>,
    /// Receipts of all effects.
    effects: Vec<String>,
    /// Receipts by reference.
    references: HashMap<String, String>,
    /// References of requests on their way.
    late: Vec<String>,
    /// Faults that have happened.
    happened: Vec<Fault>,
    /// Number of look-ups without an answer because the bank does not know.
    unanswered: usize,
    /// Number of requests that the bank has refused because their reference was used.
    refused: usize,
}

/// Final state of an account.
#[derive(Debug)]
pub struct Statement {
    pub effects: Vec<String>,
    pub happened: Vec<Fault>,
    pub unanswered: usize,
    pub refused: usize,
}

enum Reply {
    Text(String),
    /// The bank keeps the connection open and does not answer.
    Silence,
    Close,
}

impl Account {
    fn new(
        repetition: Repetition,
        arrival: Arrival,
        faults: impl IntoIterator<Item = Fault>,
    ) -> (Self, UnboundedReceiver<FaultKind>) {
        let (interventions, receiver) = unbounded_channel();
        let account = Self {
            repetition,
            arrival,
            knows: true,
            faults: faults.into_iter().collect(),
            interventions,
            effects: Vec::new(),
            references: HashMap::new(),
            late: Vec::new(),
            happened: Vec::new(),
            unanswered: 0,
            refused: 0,
        };
        (account, receiver)
    }

    /// Takes the next fault if it belongs to one of these places.
    fn fault_at(&mut self, places: &[Place]) -> Option<Fault> {
        self.faults.front().filter(|fault| places.contains(&fault.place))?;
        let fault = self.faults.pop_front()?;
        self.happened.push(fault);
        Some(fault)
    }

    /// Carries out the part of the bank in a fault.
    fn carry_out(&mut self, kind: FaultKind, no_help: &str) -> Reply {
        match kind {
            FaultKind::Kill | FaultKind::CutOff => {
                self.interventions.send(kind).expect("the test serves this message");
                Reply::Silence
            }
            FaultKind::NoAnswer => Reply::Close,
            FaultKind::NoHelp => Reply::Text(no_help.to_owned()),
        }
    }

    /// Takes a request to pay. Returns the answer.
    fn charge(&mut self, id: u64, reference: &str) -> String {
        let known = self.references.get(reference);
        match (self.repetition, known) {
            (Repetition::Replays, Some(receipt)) => receipt.clone(),
            (Repetition::Refuses, Some(_)) => {
                self.refused += 1;
                "used".to_owned()
            }
            _ => {
                let receipt = format!("{id}/{}", self.effects.len());
                self.effects.push(receipt.clone());
                self.references.insert(reference.to_owned(), receipt.clone());
                receipt
            }
        }
    }

    /// Takes the requests that were on their way.
    fn arrive(&mut self, id: u64) {
        for reference in std::mem::take(&mut self.late) {
            self.charge(id, &reference);
        }
    }

    fn passed(&mut self, place: Place) -> Reply {
        match self.fault_at(&[place]) {
            Some(fault) => self.carry_out(fault.kind, "go"),
            None => Reply::Text("go".to_owned()),
        }
    }

    fn charged(&mut self, id: u64, reference: &str) -> Reply {
        match self.fault_at(&[Place::OnItsWay, Place::Made]) {
            Some(Fault { kind: FaultKind::NoHelp, .. }) => Reply::Text("busy".to_owned()),
            Some(Fault { place: Place::OnItsWay, kind }) => {
                self.late.push(reference.to_owned());
                self.carry_out(kind, "busy")
            }
            Some(fault) => {
                self.charge(id, reference);
                self.carry_out(fault.kind, "busy")
            }
            None => {
                let answer = self.charge(id, reference);
                self.arrive(id);
                Reply::Text(answer)
            }
        }
    }

    fn searched(&mut self, id: u64, reference: &str) -> Reply {
        let fault = self.fault_at(&[Place::Asked]);
        if fault.is_none() && !self.knows {
            self.unanswered += 1;
            return Reply::Text("unknown".to_owned());
        }
        let found = self.references.get(reference).map_or("none", String::as_str).to_owned();
        if self.arrival == Arrival::AfterSearch {
            self.arrive(id);
        }
        match fault {
            Some(fault) => self.carry_out(fault.kind, "unknown"),
            None => Reply::Text(found),
        }
    }
}

/// Bank with its accounts.
#[derive(Clone, Default)]
pub struct Bank(Arc<Mutex<HashMap<u64, Account>>>);

impl Bank {
    /// Serves the bank on a free port. Returns the port.
    pub async fn serve(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
        let port = listener.local_addr().expect("an address").port();
        let bank = self.clone();
        tokio::spawn(async move {
            loop {
                let (line, _) = listener.accept().await.expect("accepts");
                let bank = bank.clone();
                // If the process that asks is killed, the connection breaks, and the task ends with an error.
                tokio::spawn(async move { bank.answer(line).await.ok() });
            }
        });
        port
    }

    async fn answer(&self, line: TcpStream) -> std::io::Result<()> {
        let mut line = BufReader::new(line);
        let mut request = String::new();
        line.read_line(&mut request).await?;
        let Some(request) = request.strip_suffix('\n') else { return Ok(()) };
        match self.reply(request) {
            Reply::Text(text) => line.write_all(text.as_bytes()).await,
            Reply::Silence => line.read_to_end(&mut Vec::new()).await.map(drop),
            Reply::Close => Ok(()),
        }
    }

    fn reply(&self, request: &str) -> Reply {
        let words: Vec<&str> = request.split(' ').collect();
        let [what, id, word] = words[..] else { panic!("`{request}` is no request") };
        let id = id.parse().expect("a number");
        let mut accounts = self.0.lock().unwrap();
        // A process that was cut off may send a request after the end of its message.
        let Some(account) = accounts.get_mut(&id) else { return Reply::Close };
        match (what, word) {
            ("pass", "before") => account.passed(Place::Before),
            ("pass", "made") => account.passed(Place::Made),
            ("pass", "after") => account.passed(Place::After),
            ("pass", "found") => account.passed(Place::Found),
            ("charge", reference) => account.charged(id, reference),
            ("find", reference) => account.searched(id, reference),
            _ => panic!("`{request}` is no request"),
        }
    }

    /// Opens the account of a message. Returns the kills and cuts that the test has to carry out.
    pub fn open(
        &self,
        id: u64,
        repetition: Repetition,
        arrival: Arrival,
        faults: impl IntoIterator<Item = Fault>,
    ) -> UnboundedReceiver<FaultKind> {
        let (account, interventions) = Account::new(repetition, arrival, faults);
        self.0.lock().unwrap().insert(id, account);
        interventions
    }

    /// Makes the bank answer no look-up of this message.
    pub fn forget(&self, id: u64) {
        self.0.lock().unwrap().get_mut(&id).expect("open").knows = false;
    }

    /// Takes the requests that are still on their way, and closes the account.
    pub fn close(&self, id: u64) -> Statement {
        let mut account = self.0.lock().unwrap().remove(&id).expect("open");
        account.arrive(id);
        let Account { effects, happened, unanswered, refused, .. } = account;
        Statement { effects, happened, unanswered, refused }
    }
}
