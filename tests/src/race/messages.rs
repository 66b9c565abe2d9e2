//! Messages of a race: a broker in the test process, which counts what the racers send, and the audit of its list. A
//! racer that was killed can't change the list.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Event, Line, now};

/// Destinations of the messages of a body, in the order in which the body pushes them.
pub const DESTINATIONS: [&str; 3] = ["orders", "mail", "orders"];

/// Returns the message of the run with `result` at this place among [`DESTINATIONS`].
pub fn message(key: usize, result: &str, place: usize) -> OutgoingMessage {
    OutgoingMessage::new(format!("{result}/{place}")).key(key)
}

/// Place of a message of the outbox among [`DESTINATIONS`].
///
/// # Panics
/// If the message was not made by [`message`].
pub fn place_of(body: &str) -> usize {
    body.rsplit('/').next().and_then(|place| place.parse().ok()).expect("the body of a message of a racer")
}

/// State of a [`TcpBroker`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The broker confirms messages.
    Confirms,
    /// The broker closes each connection, and keeps no message.
    Away,
    /// The broker keeps each message, and closes the connection without an answer.
    LosesAnswers,
}

/// Message that the broker has kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceivedMessage {
    /// Time of its arrival, as of [`now`].
    pub at: u64,
    /// Number of the key whose body pushed the message.
    pub key: usize,
    /// Destination of the message.
    pub destination: String,
    /// Id of the message.
    pub id: String,
    /// Body of the message: the result of its run, and its place.
    pub body: String,
}

#[derive(Debug)]
struct BrokerState {
    mode: Mode,
    /// Number of times that the broker still refuses the first message of a key.
    refusals: HashMap<usize, u32>,
    received: Vec<ReceivedMessage>,
}

/// Broker behind a port of this process.
#[derive(Debug)]
pub struct TcpBroker {
    port: u16,
    state: Arc<Mutex<BrokerState>>,
}

impl TcpBroker {
    /// Starts a broker that confirms messages.
    ///
    /// # Panics
    /// If no port is free.
    pub fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let state = BrokerState { mode: Mode::Confirms, refusals: HashMap::new(), received: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let weak = Arc::downgrade(&state);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let (Ok(connection), Some(state)) = (connection, weak.upgrade()) else { break };
                std::thread::spawn(move || serve(&connection, &state));
            }
        });
        Self { port, state }
    }

    /// Port of the broker.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets the behaviour of the broker.
    pub fn set(&self, mode: Mode) {
        self.state.lock().unwrap().mode = mode;
    }

    /// Lets the broker refuse the first message of `key`, the next `times` times.
    pub fn refuse(&self, key: usize, times: u32) {
        self.state.lock().unwrap().refusals.insert(key, times);
    }

    /// Messages that the broker has kept, in the order of their arrival.
    pub fn received(&self) -> Vec<ReceivedMessage> {
        self.state.lock().unwrap().received.clone()
    }

    /// Places of the messages of `key` that have arrived, in the order of their arrival.
    pub fn places(&self, key: usize) -> Vec<usize> {
        let of_key = |message: &ReceivedMessage| message.key == key;
        self.received().iter().filter(|message| of_key(message)).map(|message| place_of(&message.body)).collect()
    }
}

impl Drop for TcpBroker {
    fn drop(&mut self) {
        // The thread that accepts connections finds no state any more, and ends.
        self.state =
            Arc::new(Mutex::new(BrokerState { mode: Mode::Away, refusals: HashMap::new(), received: Vec::new() }));
        TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).ok();
    }
}

/// Reads one message of a [`TcpSender`], and answers it.
fn serve(mut connection: &TcpStream, state: &Mutex<BrokerState>) {
    let mut text = String::new();
    // A sender that was killed in the middle of its line has sent no message.
    if BufReader::new(connection).read_line(&mut text).is_err() || !text.ends_with('\n') {
        return;
    }
    let words: Vec<&str> = text.trim_end().split(' ').collect();
    let [key, destination, id, body] = words[..] else { panic!("`{text}` is no message") };
    let key: usize = key.parse().expect("the number of a key");
    let answer = {
        let mut state = state.lock().unwrap();
        let left = state.refusals.get_mut(&key).filter(|left| place_of(body) == 0 && **left > 0);
        if let Some(left) = left {
            *left -= 1;
            Some("refused")
        } else if state.mode == Mode::Away {
            None
        } else {
            let [destination, id, body] = [destination, id, body].map(str::to_owned);
            state.received.push(ReceivedMessage { at: now(), key, destination, id, body });
            (state.mode == Mode::Confirms).then_some("kept")
        }
    };
    if let Some(answer) = answer {
        // The sender may have been killed.
        writeln!(connection, "{answer}").ok();
    }
}

/// Sender for a [`TcpBroker`]: one connection for each message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpSender(pub u16);

impl Sender for TcpSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let body = std::str::from_utf8(message.body())?;
            let key = message.partition_key().unwrap_or_default();
            let text = format!("{key} {} {} {body}\n", message.destination(), message.id());
            let mut connection = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.0)).await?;
            connection.write_all(text.as_bytes()).await?;
            let mut answer = String::new();
            connection.read_to_string(&mut answer).await?;
            match answer.trim_end() {
                "kept" => Ok(()),
                "refused" => Err(SendError::refused("the broker refuses the message")),
                _ => Err("the broker has not answered".into()),
            }
        })
    }
}

/// Guarantees for the messages of a race. Each body pushes one message for each of [`DESTINATIONS`].
///
/// - No message arrives of a run that was not recorded.
/// - Each message of a recorded run arrives. It always has the same id and destination, and no other message has
///   that id.
/// - The first arrivals of the messages for one destination are in the order of their pushes.
/// - No caller gets a result before all messages of its key have arrived.
///
/// `recorded` holds the results of the keys that have one. The message at place 0 of a key in `set_aside` may arrive
/// after the result was returned, and after the later messages of its destination.
pub(super) fn audit(
    received: &[ReceivedMessage],
    lines: &[Line],
    recorded: &BTreeMap<usize, String>,
    set_aside: &BTreeSet<usize>,
) -> Result<(), String> {
    let (mut ids, mut bodies) = (HashMap::new(), HashMap::new());
    let mut first: HashMap<(usize, usize), (usize, u64)> = HashMap::new();
    for (n, message) in received.iter().enumerate() {
        let ReceivedMessage { at, key, destination, id, body } = message;
        let result = recorded.get(key).ok_or_else(|| format!("{message:?} arrived, and key {key} has no result"))?;
        let place = place_of(body);
        if *body != format!("{result}/{place}") {
            return Err(format!("{message:?} arrived, and the result of key {key} is {result}"));
        }
        if DESTINATIONS[place] != destination {
            return Err(format!("{message:?} arrived at a wrong destination"));
        }
        if ids.entry(body).or_insert(id) != &id || bodies.entry(id).or_insert(body) != &body {
            return Err(format!("{message:?} arrived with several ids, or other content arrived with its id"));
        }
        first.entry((*key, place)).or_insert((n, *at));
    }
    for (key, result) in recorded {
        let mut arrivals = Vec::new();
        for place in 0..DESTINATIONS.len() {
            let arrival = first.get(&(*key, place));
            arrivals.push(*arrival.ok_or_else(|| format!("message {place} of key {key} ({result}) has not arrived"))?);
        }
        if arrivals[0].0 > arrivals[2].0 && !set_aside.contains(key) {
            return Err(format!("the messages of key {key} for {} arrived in another order", DESTINATIONS[0]));
        }
        let skipped = usize::from(set_aside.contains(key));
        let last = arrivals[skipped..].iter().map(|(_, at)| *at).max().unwrap_or_default();
        let has_result = |line: &&Line| line.key == *key && matches!(line.event, Event::Ran(_) | Event::Replayed(_));
        if let Some(line) = lines.iter().filter(has_result).find(|line| line.at < last) {
            let mut text = format!("a caller got the result of key {key} at {}: {line}", line.at);
            write!(text, ", and its messages had arrived at {last}").expect("a text");
            return Err(text);
        }
    }
    Ok(())
}
