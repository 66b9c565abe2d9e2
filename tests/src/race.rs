//! Race: processes work on the same keys of one store and write every effect into one table, while tests kill, stop and
//! disconnect the processes; then the table is audited.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::fs::Permissions;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::Inspection;
use idem_runtime::{Key, OnCrash, Store};

use crate::server::{Env, until};
use crate::stores;

pub mod messages;

use messages::TcpBroker;

/// Default length of racers' leases, longer than a store takes to answer.
pub const LEASE: Duration = Duration::from_secs(1);
/// Time within which the audited store must answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest total error of two readings of [`now`], in milliseconds.
const CLOCK_SLACK: u64 = 20;

// Table of effects.

/// Line of the table of effects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line {
    /// Milliseconds since the machine started, by a clock that all processes share and that can't be set.
    pub at: u64,
    /// Wall clock of the process, in milliseconds since 1970.
    pub wall: u64,
    /// Id of the process.
    pub worker: u32,
    /// Number of the call in its process, from 1.
    pub call: u32,
    /// Number of the key.
    pub key: usize,
    /// Event at that time.
    pub event: Event,
}

/// Event that a racer writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A call begins.
    Asked,
    /// The body begins, as the attempt of this number. This line is the effect: every run of a body writes one such
    /// line.
    Began(u32),
    /// The store confirmed the lease. The line has the time of the renewal's request.
    Held,
    /// The body was polled.
    Polled,
    /// The body of this step made its effect, with this child key.
    StepMade(String, String),
    /// The body of this step has returned, and the request for its journal entry may be on its way. The racer never
    /// reads the answer.
    StepSent(String),
    /// This step returned this value, of this attempt or of an earlier one.
    StepKept(String, String),
    /// This step ended with `Error::LeaseLost`: the store refused its journal entry.
    StepRefused(String),
    /// This step ended with `Error::Store`: the store did not confirm its journal entry.
    StepUnconfirmed(String),
    /// The sender is about to send the message at this place.
    Sending(usize),
    /// The broker has confirmed the message at this place.
    Sent(usize),
    /// All messages are sent, and the request to mark them may be on its way. The racer never reads the answer.
    Marking,
    /// The body has finished its work.
    Ended,
    /// The body has pushed its messages, and has returned an error.
    Failed,
    /// The call has ended with `Error::Unsent` for this reason.
    Unsent(String),
    /// The call ran the body and returned this result.
    Ran(String),
    /// The call replayed this result.
    Replayed(String),
    /// The call has ended with `Error::LeaseLost`.
    LeaseLost,
    /// The call has ended with `Error::LeaseLost` because the store did not renew the lease. The text is the kind of
    /// the store's error.
    Unrenewed(String),
    /// The call has ended with `Error::Unrecorded`.
    Unrecorded,
    /// The call has ended with `Error::InProgress`.
    InProgress,
    /// The call has ended with `Error::Interrupted`.
    Interrupted,
    /// The call has ended with `Error::AttemptsExhausted`.
    Exhausted,
    /// The call has ended with `Error::Store` of this kind.
    Store(String),
}

impl Event {
    /// Reports whether the call has ended with this event.
    pub fn ends_a_call(&self) -> bool {
        !matches!(self, Self::Asked | Self::Began(_) | Self::Held | Self::Polled | Self::Ended)
            && !self.is_of_a_step()
            && !self.is_of_a_message()
    }

    /// Reports whether the event happened while messages were sent or marked.
    pub fn is_of_a_message(&self) -> bool {
        matches!(self, Self::Sending(_) | Self::Sent(_) | Self::Marking)
    }

    /// Reports whether the event happened in a step.
    pub fn is_of_a_step(&self) -> bool {
        matches!(
            self,
            Self::StepMade(..)
                | Self::StepSent(_)
                | Self::StepKept(..)
                | Self::StepRefused(_)
                | Self::StepUnconfirmed(_)
        )
    }

    /// Reports whether the racer acknowledges or dead-letters the message, and goes on to other keys.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Ran(_) | Self::Replayed(_) | Self::Interrupted | Self::Exhausted)
    }

    /// Reports whether the call has ended with `Error::LeaseLost`, for any reason.
    pub fn is_lease_lost(&self) -> bool {
        matches!(self, Self::LeaseLost | Self::Unrenewed(_))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, wall, worker, call, key, event } = self;
        write!(f, "{at} {wall} {worker} {call} {key} ")?;
        match event {
            Event::Asked => write!(f, "asked"),
            Event::Began(attempt) => write!(f, "began {attempt}"),
            Event::Held => write!(f, "held"),
            Event::Polled => write!(f, "polled"),
            Event::StepMade(step, child_key) => write!(f, "step-made {step} {child_key}"),
            Event::StepSent(step) => write!(f, "step-sent {step}"),
            Event::StepKept(step, value) => write!(f, "step-kept {step} {value}"),
            Event::StepRefused(step) => write!(f, "step-refused {step}"),
            Event::StepUnconfirmed(step) => write!(f, "step-unconfirmed {step}"),
            Event::Sending(place) => write!(f, "sending {place}"),
            Event::Sent(place) => write!(f, "sent {place}"),
            Event::Marking => write!(f, "marking"),
            Event::Ended => write!(f, "ended"),
            Event::Failed => write!(f, "failed"),
            Event::Unsent(reason) => write!(f, "unsent {reason}"),
            Event::Ran(result) => write!(f, "ran {result}"),
            Event::Replayed(result) => write!(f, "replayed {result}"),
            Event::LeaseLost => write!(f, "lease-lost"),
            Event::Unrenewed(kind) => write!(f, "unrenewed {kind}"),
            Event::Unrecorded => write!(f, "unrecorded"),
            Event::InProgress => write!(f, "in-progress"),
            Event::Interrupted => write!(f, "interrupted"),
            Event::Exhausted => write!(f, "exhausted"),
            Event::Store(kind) => write!(f, "store {kind}"),
        }
    }
}

impl Line {
    fn read(text: &str) -> Self {
        let words: Vec<&str> = text.split(' ').collect();
        let [at, wall, worker, call, key, what @ ..] = &words[..] else { panic!("`{text}` is no line") };
        let number = |word: &str| word.parse::<u64>().unwrap_or_else(|_| panic!("`{text}` is no line"));
        let small = |word: &str| u32::try_from(number(word)).expect("a small number");
        let event = match what {
            ["asked"] => Event::Asked,
            ["began", attempt] => Event::Began(small(attempt)),
            ["held"] => Event::Held,
            ["polled"] => Event::Polled,
            ["step-made", step, child_key] => Event::StepMade((*step).to_owned(), (*child_key).to_owned()),
            ["step-sent", step] => Event::StepSent((*step).to_owned()),
            ["step-kept", step, value] => Event::StepKept((*step).to_owned(), (*value).to_owned()),
            ["step-refused", step] => Event::StepRefused((*step).to_owned()),
            ["step-unconfirmed", step] => Event::StepUnconfirmed((*step).to_owned()),
            ["sending", place] => Event::Sending(small(place) as usize),
            ["sent", place] => Event::Sent(small(place) as usize),
            ["marking"] => Event::Marking,
            ["ended"] => Event::Ended,
            ["failed"] => Event::Failed,
            ["unsent", reason] => Event::Unsent((*reason).to_owned()),
            ["ran", result] => Event::Ran((*result).to_owned()),
            ["replayed", result] => Event::Replayed((*result).to_owned()),
            ["lease-lost"] => Event::LeaseLost,
            ["unrenewed", kind] => Event::Unrenewed((*kind).to_owned()),
            ["unrecorded"] => Event::Unrecorded,
            ["in-progress"] => Event::InProgress,
            ["interrupted"] => Event::Interrupted,
            ["exhausted"] => Event::Exhausted,
            ["store", kind] => Event::Store((*kind).to_owned()),
            _ => panic!("`{text}` is no line"),
        };
        let key = usize::try_from(number(key)).expect("a key");
        Self { at: number(at), wall: number(wall), worker: small(worker), call: small(call), key, event }
    }
}

/// Milliseconds since the machine started, by a clock that can't be set and is the same in every process.
pub fn now() -> u64 {
    // Opened once, so that a process that has no free file descriptor can still read the clock.
    static CLOCK: LazyLock<File> = LazyLock::new(|| File::open("/proc/uptime").expect("Linux"));
    let mut text = [0; 64];
    let length = CLOCK.read_at(&mut text, 0).expect("Linux");
    let text = str::from_utf8(&text[..length]).expect("a text");
    let (seconds, rest) = text.split_once('.').expect("a decimal fraction");
    let hundredths = &rest[..2];
    seconds.parse::<u64>().expect("seconds") * 1000 + hundredths.parse::<u64>().expect("hundredths") * 10
}

/// Result that a run records: the number of the attempt, the process and the call.
pub fn result(attempt: u32, worker: u32, call: u32) -> String {
    format!("{attempt}/{worker}/{call}")
}

/// Result of a run, padded to `bytes` bytes.
pub fn padded(result: &str, bytes: usize) -> String {
    result.to_owned() + &".".repeat(bytes.saturating_sub(result.len()))
}

/// Result of a run without the padding of [`padded`].
pub fn told(padded: &str) -> &str {
    padded.trim_end_matches('.')
}

fn attempt_of(result: &str) -> u32 {
    result.split('/').next().and_then(|attempt| attempt.parse().ok()).expect("a result of a racer")
}

/// Handle with which a racer appends to the table.
#[derive(Debug)]
pub struct Table(File);

impl Table {
    /// Opens an existing table.
    pub fn open(path: &Path) -> Self {
        Self(File::options().append(true).open(path).expect("the table of effects exists"))
    }

    /// Appends a line with the present time.
    pub fn write(&self, call: u32, key: usize, event: Event) {
        self.write_as_of(now(), call, key, event);
    }

    /// Appends a line with the time `at`.
    pub fn write_as_of(&self, at: u64, call: u32, key: usize, event: Event) {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let wall = u64::try_from(wall.as_millis()).expect("the clock shows a time after 1970");
        let line = Line { at, wall, worker: std::process::id(), call, key, event };
        // One write is one line, even if other processes append concurrently.
        (&self.0).write_all(format!("{line}\n").as_bytes()).expect("the table can be written");
    }
}

/// Key that racers work on.
///
/// # Panics
/// Never: a number is a valid key.
pub fn key(n: usize) -> Key {
    Key::new("race", n).expect("a valid key")
}

// Processes that write the table.

/// Keys that a racer serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keys {
    /// The racer serves this number of keys, one after the other. Only its first body does the [`Work`].
    Fixed(usize),
    /// The racer serves keys one after the other, until [`Crew::finish`] sets the number of keys. Only its first body
    /// does the [`Work`].
    Open,
    /// The racer serves this number of keys concurrently. Every body does the [`Work`].
    Together(usize),
    /// The racer serves one key, and after [`Crew::open_gate`] this number of further keys concurrently. The bodies of
    /// the further keys do the [`Work`].
    Gated(usize),
    /// The racer serves the first number of keys concurrently, and the bodies of these keys do the [`Work`]. Meanwhile
    /// the racer serves the second number of further keys repeatedly, with [`Work::Some`], until [`Crew::open_gate`].
    Beside(usize, usize),
}

/// Work of a racer's body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// The body is ready immediately.
    Nothing,
    /// The body takes some milliseconds.
    Some,
    /// The body takes two leases.
    Long,
    /// The body takes some milliseconds, and then runs until [`Crew::open_gate`]. The body renews its lease itself.
    Held,
    /// Like `Held`, but only the heartbeat renews the lease.
    Quiet,
    /// Like `Quiet`, and the racer writes each poll of the body into the table. When a stopped racer continues, its
    /// runtime polls many other tasks before its timers.
    Polled,
    /// The last step of the body makes its effect, and then runs until [`Crew::open_gate`]. The step runs in a task of
    /// its own, which also goes on if the lease is lost.
    InStep,
    /// The body of the last step returns, and the racer never reads the answer to the request for its journal entry.
    InEntry,
    /// The sender waits before its first message until [`Crew::open_gate`].
    BeforeSending,
    /// The broker confirms the last message, and then the sender waits until [`Crew::open_gate`].
    AfterSending,
    /// The sender has sent the last message, and the racer never reads the answer to the request that marks them.
    InMark,
    /// Like `Quiet`, but the body blocks the only thread of its runtime.
    Blocks,
    /// Like `Quiet`, but the body blocks its thread by `block_in_place`.
    BlocksInPlace,
}

/// Runtimes of a racer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The racer has one runtime with one thread.
    One,
    /// The racer works on one runtime. The store was opened on another runtime, whose only thread stands still.
    OpenedElsewhere,
    /// The racer works on one runtime. Its first body, a [long](Work::Long) one for its own key, ran on another
    /// runtime, whose only thread stands still.
    BegunElsewhere,
    /// The process opens the store, runs a [long](Work::Long) body for its own key, and forks two children. All three
    /// processes then serve the same keys, and after them each process serves as many keys of its own.
    Forked,
}

/// Arguments of a racer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Orders {
    /// Text that names the store for [`stores::open`].
    pub spec: String,
    /// Path of the table of effects.
    pub path: PathBuf,
    /// Number of the first key.
    pub begin: usize,
    /// Keys to serve.
    pub keys: Keys,
    /// Work of the bodies.
    pub work: Work,
    /// Runtimes of the racer.
    pub place: Place,
    /// Length of the leases.
    pub lease: Duration,
    /// Smallest size of a result, in bytes.
    pub bytes: usize,
    /// Policies of the keys.
    pub policies: Policies,
    /// True if the bodies of keys under `on_crash = retry` have [steps](STEPS).
    pub steps: bool,
    /// Port of the broker to which the bodies send [messages]; `None` if they send none.
    pub broker: Option<u16>,
}

/// Names of the steps of a body: one before its [`Work`], and one after it.
pub const STEPS: [&str; 2] = ["first", "last"];

/// Policies of a crew's keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policies {
    /// Every key is under `on_crash = retry`.
    Retry,
    /// Even keys are under `on_crash = retry`, odd keys under `on_crash = fail`.
    Mixed,
    /// The keys are by turns under `on_crash = retry`, `on_crash = fail` and `max_attempts = 1`.
    Limited,
}

impl Policies {
    /// Policy of a key.
    pub fn on_crash(self, key: usize) -> OnCrash {
        match self {
            Self::Mixed if key % 2 == 1 => OnCrash::Fail,
            Self::Limited if key % 3 == 1 => OnCrash::Fail,
            Self::Mixed | Self::Limited | Self::Retry => OnCrash::Retry,
        }
    }

    /// Reports whether a key is under `max_attempts = 1`.
    pub fn has_one_attempt(self, key: usize) -> bool {
        self == Self::Limited && key % 3 == 2
    }
}

impl Orders {
    /// Returns orders to run a body for each of `keys` keys.
    #[must_use]
    pub fn plain(spec: impl Into<String>, path: impl Into<PathBuf>, keys: usize) -> Self {
        Self {
            spec: spec.into(),
            path: path.into(),
            begin: 0,
            keys: Keys::Fixed(keys),
            work: Work::Nothing,
            place: Place::One,
            lease: LEASE,
            bytes: 0,
            policies: Policies::Retry,
            steps: false,
            broker: None,
        }
    }

    /// Reports whether the body of a key has steps. The error of a step frees its key, so a key with one body has none.
    pub fn has_steps(&self, key: usize) -> bool {
        self.steps && self.policies.on_crash(key) == OnCrash::Retry && !self.policies.has_one_attempt(key)
    }

    /// Reports whether the first body of a key returns an error after it has pushed its messages.
    pub fn fails_first(&self, key: usize) -> bool {
        self.broker.is_some() && key % 8 == 6
    }

    /// Returns the orders as arguments of a program.
    #[must_use]
    pub fn words(&self) -> [String; 11] {
        let Self { spec, path, begin, keys, work, place, lease, bytes, policies, steps, broker } = self;
        let path = path.to_str().expect("a path of ours").to_owned();
        let keys = match keys {
            Keys::Fixed(keys) => format!("fixed {keys}"),
            Keys::Open => "open".to_owned(),
            Keys::Together(keys) => format!("together {keys}"),
            Keys::Gated(keys) => format!("gated {keys}"),
            Keys::Beside(keys, beside) => format!("beside {keys} {beside}"),
        };
        let lease = lease.as_millis().to_string();
        let (work, place) = (format!("{work:?}"), format!("{place:?}"));
        let (begin, bytes, policies) = (begin.to_string(), bytes.to_string(), format!("{policies:?}"));
        let broker = broker.unwrap_or_default().to_string();
        [spec.clone(), path, begin, keys, work, place, lease, bytes, policies, steps.to_string(), broker]
    }

    /// Reads the orders from the arguments of this process.
    ///
    /// # Panics
    /// If the arguments were not made by [`words`](Self::words).
    pub fn read() -> Self {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let [spec, path, begin, keys, work, place, lease, bytes, policies, steps, broker] = &words[..] else {
            panic!("no orders: {words:?}")
        };
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let keys = match keys.split_once(' ') {
            None => Keys::Open,
            Some(("fixed", keys)) => Keys::Fixed(number(keys)),
            Some(("gated", keys)) => Keys::Gated(number(keys)),
            Some(("together", keys)) => Keys::Together(number(keys)),
            Some((_, keys)) => {
                let (keys, beside) = keys.split_once(' ').expect("two numbers");
                Keys::Beside(number(keys), number(beside))
            }
        };
        let kinds = [
            Work::Nothing,
            Work::Some,
            Work::Long,
            Work::Held,
            Work::Quiet,
            Work::Polled,
            Work::InStep,
            Work::InEntry,
            Work::BeforeSending,
            Work::AfterSending,
            Work::InMark,
            Work::Blocks,
            Work::BlocksInPlace,
        ];
        let policies_of = [Policies::Retry, Policies::Mixed, Policies::Limited];
        let places = [Place::One, Place::OpenedElsewhere, Place::BegunElsewhere, Place::Forked];
        Self {
            spec: spec.clone(),
            path: path.into(),
            begin: number(begin),
            keys,
            work: kinds.into_iter().find(|it| format!("{it:?}") == *work).expect("a kind of work"),
            place: places.into_iter().find(|it| format!("{it:?}") == *place).expect("a place"),
            lease: Duration::from_millis(number(lease) as u64),
            bytes: number(bytes),
            policies: policies_of.into_iter().find(|it| format!("{it:?}") == *policies).expect("policies"),
            steps: steps == "true",
            broker: u16::try_from(number(broker)).ok().filter(|port| *port != 0),
        }
    }
}

/// Racers of one store and one table.
#[derive(Debug)]
pub struct Crew {
    program: String,
    /// `setpriv` and its arguments, with which racers start; empty to start racers directly.
    wrapper: Vec<String>,
    env: Env,
    orders: Orders,
    racers: Vec<Child>,
    /// Racers with a body that runs until its gate opens.
    gates: Vec<u32>,
    /// Number of bytes of the table that were read, and the lines in these bytes.
    read: Mutex<(usize, Vec<Line>)>,
}

impl Crew {
    /// Returns a crew without racers. `program` is `env!("CARGO_BIN_EXE_racer")`; `spec` names the store for
    /// [`stores::open`].
    pub fn new(program: &str, spec: &str) -> Self {
        let unique = format!("idem-race-{}-{}", std::process::id(), crate::server::free_port());
        let path = std::env::temp_dir().join(unique);
        // The crew creates both files: racers may run as another user, and may have no free descriptor when they fail.
        for path in [&path, &beside(&path, "failed")] {
            let file = File::create(path).expect("a file for the effects");
            file.set_permissions(Permissions::from_mode(0o666)).expect("ours");
        }
        let orders = Orders {
            spec: spec.to_owned(),
            path,
            begin: 0,
            keys: Keys::Open,
            work: Work::Nothing,
            place: Place::One,
            lease: LEASE,
            bytes: 0,
            policies: Policies::Retry,
            steps: false,
            broker: None,
        };
        Self {
            program: program.to_owned(),
            wrapper: Vec::new(),
            env: Vec::new(),
            orders,
            racers: Vec::new(),
            gates: Vec::new(),
            read: Mutex::default(),
        }
    }

    /// Orders of racers that start later, except for the arguments of [`start`](Self::start).
    pub fn orders(&mut self) -> &mut Orders {
        &mut self.orders
    }

    /// Sets the environment of racers that start later.
    pub fn set_env(&mut self, env: Env) {
        self.env = env;
    }

    /// Sets the arguments of `setpriv` for racers that start later.
    pub fn set_wrapper(&mut self, wrapper: Vec<String>) {
        self.wrapper = wrapper;
    }

    /// Starts a racer whose first key is `begin`. Returns the racer's process id.
    pub fn start(&mut self, begin: usize, keys: Keys, work: Work) -> u32 {
        let orders = Orders { begin, keys, work, ..self.orders.clone() };
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(&self.wrapper).arg(&self.program);
        command.args(orders.words()).envs(self.env.iter().cloned());
        let racer = command.spawn().expect("a racer starts");
        let worker = racer.id();
        self.racers.push(racer);
        self.gates.push(worker);
        worker
    }

    /// Kills a racer (`kill -9`).
    pub fn kill(&mut self, worker: u32) {
        let at =
            self.racers.iter().position(|racer| racer.id() == worker).expect("the process is a racer of this race");
        let mut racer = self.racers.remove(at);
        racer.kill().expect("was running");
        racer.wait().expect("was running");
    }

    /// Sends a racer a signal that stops or continues it.
    pub fn signal(&self, worker: u32, signal: &str) {
        assert!(self.racers.iter().any(|racer| racer.id() == worker), "the process is a racer of this race");
        assert!(crate::server::signal(worker, signal), "the process has ended");
    }

    /// Lets the held body of `worker` end.
    pub fn open_gate(&self, worker: u32) {
        File::create(gate(&self.orders.path, worker)).expect("can be written");
    }

    /// Sets the final number of keys: all keys that were begun, and some more.
    pub fn finish(&self) -> usize {
        let keys = self.lines().iter().map(|line| line.key).max().unwrap_or_default() + 10;
        // The number is written to a draft that is then renamed, so that racers read the whole number or none.
        let draft = beside(&self.orders.path, "draft");
        std::fs::write(&draft, keys.to_string()).expect("can be written");
        std::fs::rename(draft, beside(&self.orders.path, "keys")).expect("can be written");
        keys
    }

    /// Lines of the table.
    pub fn lines(&self) -> Vec<Line> {
        self.read(<[Line]>::to_vec)
    }

    fn read<T>(&self, look: impl FnOnce(&[Line]) -> T) -> T {
        let mut read = self.read.lock().unwrap();
        let (bytes, lines) = &mut *read;
        let mut file = File::open(&self.orders.path).expect("the table can be read");
        file.seek(SeekFrom::Start(*bytes as u64)).expect("the table of effects only grows");
        let mut text = String::new();
        file.read_to_string(&mut text).expect("the table can be read");
        // The last line may be incomplete: its racer may have been killed while writing.
        if let Some((whole, _)) = text.rsplit_once('\n') {
            lines.extend(whole.lines().map(Line::read));
            *bytes += whole.len() + 1;
        }
        look(lines)
    }

    /// Waits until `condition` holds for the lines of the table.
    ///
    /// # Panics
    /// If `condition` does not hold after minutes.
    pub async fn until(&self, what: &str, mut condition: impl FnMut(&[Line]) -> bool) {
        let what = format!("{what} ({})", self.orders.spec);
        let failed = beside(&self.orders.path, "failed");
        until(&what, async || {
            let why = std::fs::read_to_string(&failed).expect("the file exists");
            assert!(why.is_empty(), "{what}: a racer failed: {why}");
            self.read(&mut condition)
        })
        .await;
    }

    /// Waits until every racer has ended.
    ///
    /// # Panics
    /// If a racer fails, or if no racer makes progress.
    pub async fn ended(&mut self) {
        let mut got_on = 0;
        while !self.racers.is_empty() {
            // Each racer may take long, but some racer must make progress.
            let before = got_on;
            until(&format!("the racers get on ({})", self.orders.spec), async || {
                self.racers.retain_mut(|racer| match racer.try_wait().expect("was running") {
                    Some(status) => {
                        assert!(status.success(), "a racer failed: {status}");
                        false
                    }
                    None => true,
                });
                let done = |line: &&Line| line.event.is_final();
                got_on = self.read(|lines| lines.iter().filter(done).count());
                self.racers.is_empty() || got_on > before
            })
            .await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Audits the messages that `broker` has received, as `messages::audit` says, and that no record of `store` holds
    /// messages any more.
    pub async fn audit_messages(
        &self,
        keys: usize,
        store: &dyn Store,
        broker: &TcpBroker,
        set_aside: &BTreeSet<usize>,
    ) {
        let mut recorded = BTreeMap::new();
        for n in 0..keys {
            let found = store.inspect(&key(n)).await.expect("answers").expect("recorded");
            assert_eq!(found.unsent_messages(), None, "key {n} has unsent messages");
            if let Standing::Completed(result) = Standing::of(n, &found, self.orders.policies) {
                recorded.insert(n, result);
            }
        }
        let (received, lines) = (broker.received(), self.lines());
        if let Err(problem) = messages::audit(&received, &lines, &recorded, set_aside) {
            let received: Vec<_> = received.iter().map(|message| format!("{message:?}")).collect();
            let lines: Vec<_> = lines.iter().map(ToString::to_string).collect();
            panic!("{problem}\n{}\n{}", received.join("\n"), lines.join("\n"));
        }
        println!("{} messages, {} beyond one for each", received.len(), received.len() - 3 * recorded.len());
    }

    /// Audits the table and the store; see [`Rules`].
    pub async fn audit(&self, keys: usize, rules: &Rules) -> Effects {
        let store = stores::open(&self.orders.spec, PATIENCE).await;
        rules.audit(&self.lines(), keys, &*store, &self.orders).await
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for racer in &mut self.racers {
            racer.kill().ok();
            racer.wait().ok();
        }
        for path in [self.orders.path.clone(), beside(&self.orders.path, "keys"), beside(&self.orders.path, "failed")] {
            std::fs::remove_file(path).ok();
        }
        for worker in &self.gates {
            std::fs::remove_file(gate(&self.orders.path, *worker)).ok();
        }
    }
}

/// File whose existence lets the held body of `worker` end.
pub fn gate(path: &Path, worker: u32) -> PathBuf {
    beside(path, &format!("gate-{worker}"))
}

/// File next to the table at `path`.
pub fn beside(path: &Path, name: &str) -> PathBuf {
    path.with_extension(name)
}

// Rules for the table of effects.

/// Guarantees for a table and its store:
///
/// - every key has one recorded result, of a run that ended, and every caller got this result;
/// - no attempt number occurs twice, and no body ran after the recorded attempt;
/// - an attempt begins only when a lease has passed since the previous attempt's lease was last confirmed, so that
///   bodies overlap only if a lease was not renewed;
/// - the call whose run is recorded did not get `LeaseLost`.
///
/// For each step of a key:
///
/// - an attempt makes the effect of the step at most once, and every effect has the same child key;
/// - once the step has returned a value to an attempt, no later attempt makes its effect;
/// - the step returns one value to all attempts, and this value is that of an effect.
///
/// So the step has one effect, and one more for each attempt that ended between its effect and its journal entry.
///
/// For a key under `on_crash = fail`:
///
/// - at most one body began;
/// - the key ends interrupted only if a body of the key did not return, or if the process of a call was killed before
///   the body could begin;
/// - no caller gets a result of an interrupted key;
/// - a call gets `Interrupted` only if another call of the key is without a result, and that call's lease has lapsed.
///
/// For a key under `max_attempts = 1`:
///
/// - at most one body began;
/// - the attempts of the key are exhausted only if a body began, or if the process of a call was killed before the body
///   could begin;
/// - the key ends free, with its attempt used up, only if its body was cancelled because its lease was not renewed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rules {
    /// True if every lease lasts for its full time. If a test sets the clock that measures leases, a lease may be
    /// shorter.
    pub leases: bool,
    /// Start and end of the time in which the store lost records. The rules hold separately before and after that time.
    pub forgotten: Option<(u64, u64)>,
    /// Start and end of the time in which no server answered. A call that began and ended in that time began no body,
    /// and left no mark in the record.
    pub stopped: Option<(u64, u64)>,
}

/// Numbers of the attempts that took effect, for each key.
#[derive(Debug)]
pub struct Effects(pub Vec<Vec<u32>>);

impl Effects {
    /// Number of effects in excess of one for each key.
    pub fn repeated(&self) -> usize {
        self.0.iter().map(|attempts| attempts.len().saturating_sub(1)).sum()
    }
}

/// One call, as its lines in the table describe it.
#[derive(Clone, Debug)]
struct Call {
    worker: u32,
    number: u32,
    key: usize,
    asked: u64,
    /// Number and start of the attempt. `held` is the latest time at which the lease was confirmed.
    began: Option<(u32, u64)>,
    held: u64,
    ended: bool,
    /// Effects of steps: the name of each step, and its child key.
    made: Vec<(String, String)>,
    /// Values of steps: the name of each step, and its value.
    kept: Vec<(String, String)>,
    told: Option<(u64, Event)>,
}

impl Call {
    fn result(&self) -> Option<String> {
        self.began.map(|(attempt, _)| result(attempt, self.worker, self.number))
    }

    fn is_told(&self, what: impl Fn(&Event) -> bool) -> bool {
        self.told.as_ref().is_some_and(|(_, event)| what(event))
    }
}

/// Numbers of the attempts that began, in order.
fn attempts(calls: &[Call]) -> Vec<u32> {
    let mut attempts: Vec<u32> = calls.iter().filter_map(|call| call.began).map(|(attempt, _)| attempt).collect();
    attempts.sort_unstable();
    attempts
}

/// Final state of a key's record.
#[derive(Debug)]
enum Standing {
    /// The record holds this result.
    Completed(String),
    /// The key is interrupted, or will be once its lease has lapsed.
    Interrupted,
    /// The record says that the only attempt of the key has begun, and holds no result.
    Exhausted,
    /// The record says that the body of the key's only attempt was cancelled.
    Cancelled,
}

impl Standing {
    fn of(n: usize, found: &Inspection, policies: Policies) -> Self {
        match &found.record.state {
            State::Completed(StoredResult::Encoded { bytes, .. }) => {
                let recorded: String = serde_json::from_slice(bytes).expect("a result of a racer");
                Self::Completed(told(&recorded).to_owned())
            }
            State::Interrupted | State::Pending { on_crash: OnCrash::Fail, begun: true, .. } => Self::Interrupted,
            State::Pending { begun: true, .. } if policies.has_one_attempt(n) => Self::Exhausted,
            State::Released if policies.has_one_attempt(n) && found.record.attempts_used == 1 => Self::Cancelled,
            _ => panic!("key {n}: {found:?}"),
        }
    }
}

fn calls(lines: &[Line]) -> Vec<Call> {
    let mut calls: HashMap<(u32, u32), Call> = HashMap::new();
    // A sender does not know the number of the call that uses it.
    let of_calls = lines.iter().filter(|line| !line.event.is_of_a_message());
    for Line { at, worker, call, key, event, .. } in of_calls {
        let (worker, call, key, asked) = (*worker, *call, *key, *at);
        let it = calls.entry((worker, call)).or_insert(Call {
            worker,
            number: call,
            key,
            asked,
            began: None,
            held: asked,
            ended: false,
            made: Vec::new(),
            kept: Vec::new(),
            told: None,
        });
        match event {
            Event::Asked | Event::Polled | Event::StepSent(_) | Event::StepRefused(_) | Event::StepUnconfirmed(_) => {}
            Event::StepMade(step, child_key) => it.made.push((step.clone(), child_key.clone())),
            Event::StepKept(step, value) => it.kept.push((step.clone(), value.clone())),
            Event::Began(attempt) => it.began = Some((*attempt, *at)),
            Event::Held => it.held = it.held.max(*at),
            Event::Ended => it.ended = true,
            told => it.told = Some((*at, told.clone())),
        }
    }
    calls.into_values().collect()
}

impl Rules {
    /// Rules for a store that lost no record, and whose clock was not set.
    pub const STRICT: Self = Self { leases: true, forgotten: None, stopped: None };

    async fn audit(&self, lines: &[Line], keys: usize, store: &dyn Store, orders: &Orders) -> Effects {
        let mut of_keys = vec![Vec::new(); keys];
        for call in calls(lines) {
            of_keys[call.key].push(call);
        }
        let mut effects = Vec::new();
        for (n, calls) in of_keys.into_iter().enumerate() {
            let found = store.inspect(&key(n)).await.expect("answers").expect("recorded");
            let standing = Standing::of(n, &found, orders.policies);
            let audited = match orders.policies.on_crash(n) {
                OnCrash::Fail => self.audit_fail(&calls, &standing, orders.lease),
                _ if orders.policies.has_one_attempt(n) => self.audit_limited(&calls, &standing, orders.lease),
                _ => self.audit_key(&calls, &standing, orders.lease),
            };
            let audited = audited.and_then(|effects| self.audit_steps(&calls).map(|()| effects));
            effects.push(audited.unwrap_or_else(|problem| {
                let lines: Vec<_> = lines.iter().filter(|line| line.key == n).map(ToString::to_string).collect();
                panic!("key {n}, {standing:?}: {problem}\n{}", lines.join("\n"))
            }));
        }
        Effects(effects)
    }

    /// Returns the attempts that took effect for a key under `on_crash = fail`, or the broken rule.
    fn audit_fail(&self, calls: &[Call], standing: &Standing, lease: Duration) -> Result<Vec<u32>, String> {
        for told in calls.iter().filter(|call| call.is_told(|event| *event == Event::Interrupted)) {
            if !calls.iter().any(|call| self.may_interrupt(call, told, lease)) {
                return Err(format!("{} got `Interrupted`, and no attempt was interrupted", told.worker));
            }
        }
        let (before, after) = self.sides(calls);
        for side in [&before, &after] {
            let began = side.iter().filter(|call| call.began.is_some()).count();
            if began > 1 {
                return Err(format!("{began} bodies began"));
            }
        }
        let Standing::Interrupted = standing else { return self.audit_key(calls, standing, lease) };
        let has_result = |call: &&&Call| call.is_told(|event| matches!(event, Event::Ran(_) | Event::Replayed(_)));
        if let Some(call) = after.iter().find(has_result) {
            return Err(format!("{} got a result for an interrupted key", call.worker));
        }
        if !calls.iter().any(|call| self.may_have_begun(call)) {
            return Err(
                "the key is interrupted, although no body began and no process was killed after its mark".to_owned()
            );
        }
        Ok(attempts(calls))
    }

    /// Returns the attempts that took effect for a key under `max_attempts = 1`, or the broken rule.
    fn audit_limited(&self, calls: &[Call], standing: &Standing, lease: Duration) -> Result<Vec<u32>, String> {
        let began = calls.iter().filter(|call| call.began.is_some()).count();
        if began > 1 {
            return Err(format!("{began} bodies began"));
        }
        let is_exhausted = calls.iter().any(|call| call.is_told(|event| *event == Event::Exhausted));
        if (is_exhausted || matches!(standing, Standing::Exhausted)) && !calls.iter().any(|it| self.may_have_begun(it))
        {
            return Err("the attempts of the key are exhausted, and no body began".to_owned());
        }
        let is_cancelled = |call: &Call| call.began.is_some() && call.is_told(|it| matches!(it, Event::Unrenewed(_)));
        match standing {
            Standing::Cancelled if !calls.iter().any(is_cancelled) => {
                Err("the key was freed after its only body, and no body was cancelled".to_owned())
            }
            Standing::Exhausted | Standing::Cancelled => Ok(attempts(calls)),
            _ => self.audit_key(calls, standing, lease),
        }
    }

    /// Reports whether the body of `call` began, or whether its process was killed when the record may have been marked
    /// as begun.
    fn may_have_begun(&self, call: &Call) -> bool {
        call.began.is_some() || (call.told.is_none() && !self.is_within_the_stop(call))
    }

    /// Reports whether `call` began while no server answered, and ended or was killed before a server answered again.
    fn is_within_the_stop(&self, call: &Call) -> bool {
        self.stopped.is_some_and(|(from, to)| {
            let has_ended = call.told.as_ref().is_none_or(|(at, _)| *at <= to);
            call.asked > from && call.asked <= to && call.began.is_none() && has_ended
        })
    }

    /// Reports whether `call` may be the reason for the `Interrupted` that the call `told` got.
    fn may_interrupt(&self, call: &Call, told: &Call, lease: Duration) -> bool {
        let told_at = told.told.as_ref().map_or(u64::MAX, |(at, _)| *at);
        let lapses = call.held + u64::try_from(lease.as_millis()).expect("short");
        let has_lapsed = !self.leases || told_at + CLOCK_SLACK >= lapses;
        let has_no_result = match &call.told {
            Some((_, Event::InProgress | Event::Interrupted)) => false,
            Some((at, Event::Ran(_) | Event::Replayed(_))) => *at >= told.asked,
            _ => true,
        };
        has_lapsed
            && has_no_result
            && !self.is_within_the_stop(call)
            && (call.worker, call.number) != (told.worker, told.number)
    }

    /// Calls before and after the time in which records were lost. A call that overlaps this time is in neither list.
    fn sides<'a>(&self, calls: &'a [Call]) -> (Vec<&'a Call>, Vec<&'a Call>) {
        match self.forgotten {
            None => (Vec::new(), calls.iter().collect()),
            Some((from, to)) => (
                calls.iter().filter(|call| call.told.as_ref().is_some_and(|(at, _)| *at < from)).collect(),
                calls.iter().filter(|call| call.asked > to).collect(),
            ),
        }
    }

    /// Returns the attempts that took effect, or the broken rule.
    fn audit_key(&self, calls: &[Call], standing: &Standing, lease: Duration) -> Result<Vec<u32>, String> {
        let Standing::Completed(recorded) = standing else { return Err("the key has no result".to_owned()) };
        let ran = |call: &&Call| call.result().is_some_and(|result| result == *recorded);
        let run = calls.iter().find(ran).ok_or("no run returned the recorded result")?;
        if !run.ended {
            return Err("the result was recorded before its body had ended".to_owned());
        }
        if run.is_told(Event::is_lease_lost) {
            return Err("the recorded attempt got `LeaseLost`".to_owned());
        }
        let (before, after) = self.sides(calls);
        self.audit_memory(&before, None, lease)?;
        self.audit_memory(&after, Some(recorded), lease)?;
        let last = attempt_of(recorded);
        if let Some((later, _)) = after.iter().filter_map(|call| call.began).find(|(attempt, _)| *attempt > last) {
            return Err(format!("attempt {later} ran after the recorded attempt"));
        }
        Ok(attempts(calls))
    }

    /// Checks the rules for the steps of a key.
    fn audit_steps(&self, calls: &[Call]) -> Result<(), String> {
        for step in STEPS {
            let of_step = |(name, text): &(String, String)| (name == step).then(|| text.clone());
            let child_keys: HashSet<_> = calls.iter().flat_map(|call| call.made.iter().filter_map(of_step)).collect();
            if child_keys.len() > 1 {
                return Err(format!("the effects of the step `{step}` have the child keys {child_keys:?}"));
            }
            let has_made = |call: &Call| call.made.iter().filter_map(of_step).count();
            if calls.iter().any(|call| has_made(call) > 1) {
                return Err(format!("one attempt made the effect of the step `{step}` twice"));
            }
            let made: HashSet<_> = calls.iter().filter(|call| has_made(call) > 0).filter_map(Call::result).collect();
            let (before, after) = self.sides(calls);
            for side in [before, after] {
                let kept = side.iter().flat_map(|call| call.kept.iter().filter_map(of_step));
                let values: HashSet<_> = kept.collect();
                if values.len() > 1 || !values.is_subset(&made) {
                    return Err(format!("the step `{step}` returned {values:?}, and its effects were {made:?}"));
                }
                let has_kept = |call: &&&Call| call.kept.iter().any(|(name, _)| name == step);
                let first =
                    side.iter().filter(has_kept).filter_map(|call| call.began).map(|(attempt, _)| attempt).min();
                let is_later = |call: &&&Call| call.began.is_some_and(|(it, _)| first.is_some_and(|first| it > first));
                if let Some(call) = side.iter().filter(is_later).find(|call| has_made(call) > 0) {
                    return Err(format!(
                        "{} made the effect of the step `{step}`, which had ended before",
                        call.worker
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks the rules for calls between which no record was lost.
    fn audit_memory(&self, calls: &[&Call], recorded: Option<&str>, lease: Duration) -> Result<(), String> {
        let mut outcome = recorded;
        for call in calls {
            if let Some((_, Event::Ran(result) | Event::Replayed(result))) = &call.told
                && *outcome.get_or_insert(result) != result
            {
                return Err(format!("{} got the result {result}", call.worker));
            }
        }
        let mut runs: Vec<_> = calls.iter().filter_map(|it| it.began.map(|(attempt, at)| (attempt, at, it))).collect();
        runs.sort_unstable_by_key(|(attempt, at, _)| (*attempt, *at));
        for pair in runs.windows(2) {
            let [(first, _, before), (second, began, _)] = pair else { unreachable!("windows of two") };
            if first == second {
                return Err(format!("attempt {first} ran twice"));
            }
            let lapses = before.held + u64::try_from(lease.as_millis()).expect("short");
            // A body that returns an error frees its key.
            let is_freed = before.is_told(|event| *event == Event::Failed);
            if self.leases && !is_freed && began + CLOCK_SLACK < lapses {
                return Err(format!("attempt {second} began {} ms before the lease lapsed", lapses - began));
            }
        }
        Ok(())
    }
}

// The race that every store runs.

/// Race in which `racers` processes work on all keys. Meanwhile `kills` further processes are started and killed one
/// after the other, each at any point of its work.
#[derive(Clone, Copy, Debug)]
pub struct Race<'a> {
    /// Program of a racer: `env!("CARGO_BIN_EXE_racer")`.
    pub program: &'a str,
    /// Text that names the store for [`stores::open`].
    pub spec: &'a str,
    /// Number of keys.
    pub keys: usize,
    /// Number of processes that work until all keys are done.
    pub racers: usize,
    /// Number of processes that are killed.
    pub kills: usize,
}

impl<'a> Race<'a> {
    /// Returns the race that every store runs: 8 processes and 1 000 keys.
    pub fn new(program: &'a str, spec: &'a str) -> Self {
        Self { program, spec, keys: 1000, racers: 7, kills: 12 }
    }

    /// Runs the race concurrently with `meanwhile`, and audits it by [`Rules::STRICT`].
    pub async fn run(self, meanwhile: impl Future<Output = ()>) -> Effects {
        let mut crew = Crew::new(self.program, self.spec);
        let keys = Keys::Fixed(self.keys);
        for n in 0..self.racers {
            crew.start(n * self.keys / self.racers, keys, Work::Nothing);
        }
        let kills = async {
            for kill in 0..self.kills {
                let victim = crew.start(kill * self.keys / self.kills, keys, Work::Nothing);
                tokio::time::sleep(Duration::from_millis(60)).await;
                crew.kill(victim);
            }
        };
        tokio::join!(kills, meanwhile);
        crew.ended().await;
        crew.audit(self.keys, &Rules::STRICT).await
    }
}
