//! Broker: it starts the processes under test, delivers each message until the message is acknowledged or needs a
//! person, and kills the processes.

use std::process::{Child, Command};
use std::time::Duration;

use idem_tests::chance::Chance;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpListener;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{sleep, timeout};

use crate::bank::FaultKind;

/// Longest wait for a process. Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(180);
/// Largest number of deliveries of one message. A message has a few faults, and a reconciler asks 16 times.
const DELIVERIES: usize = 60;

/// Process under test, with its line to the broker.
struct Payer {
    child: Child,
    lines: Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
}

impl Payer {
    async fn start(args: [&str; 2], bank: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
        let port = listener.local_addr().expect("an address").port();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_payer")]).args(args);
        let child = command.args([port.to_string(), bank.to_string()]).spawn().expect("a process starts");
        let (line, _) = timeout(PATIENCE, listener.accept()).await.expect("the process connects").expect("accepts");
        let (read, write) = line.into_split();
        Self { child, lines: BufReader::new(read).lines(), write }
    }

    async fn send(&mut self, text: &str) {
        self.write.write_all(format!("{text}\n").as_bytes()).await.expect("the process reads");
    }

    async fn answer(&mut self) -> String {
        let line = timeout(PATIENCE, self.lines.next_line()).await.expect("each delivery ends");
        line.expect("the process lives").expect("the process lives")
    }

    /// Kills the process (`kill -9`).
    fn kill(mut self) {
        self.child.kill().expect("was running");
        self.child.wait().expect("was running");
    }
}

impl Drop for Payer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// End of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// A delivery was acknowledged, with this receipt.
    Acknowledged(String),
    /// The effect is in doubt, and a person has to decide.
    NeedsPerson,
}

/// End of a delivery.
enum DeliveryEnd {
    Ended(End),
    /// The message must be delivered again, after this time.
    Again(Duration),
}

/// First event after the begin of a delivery.
enum Event {
    /// The process has sent the end of the delivery.
    Answer(String),
    /// The process must be killed, or the delivery cut off.
    Fault(FaultKind),
}

/// Kills and cuts at random moments of some deliveries.
pub struct RandomMoments {
    pub chance: Chance,
    /// Longest time from the beginning of a delivery to its fault.
    pub within: Duration,
    /// Number of faults that may still happen.
    pub left: usize,
}

impl RandomMoments {
    /// Returns no faults.
    pub fn none() -> Self {
        Self { chance: Chance::seeded(0), within: Duration::ZERO, left: 0 }
    }

    /// Returns the fault of the next delivery, and its moment; `None` for a delivery without a fault.
    fn draw(&mut self) -> Option<(Duration, FaultKind)> {
        let is_hit = self.left > 0 && self.chance.percent(70);
        is_hit.then(|| {
            let kind = if self.chance.percent(70) { FaultKind::Kill } else { FaultKind::CutOff };
            // Short times are more frequent, since most deliveries run in a process that has started before.
            let longest = self.chance.up_to(self.within);
            (self.chance.up_to(longest), kind)
        })
    }
}

/// Consumer of one message at a time. A process that was killed is replaced.
pub struct Lane<'a> {
    spec: &'a str,
    strategy: &'a str,
    bank: u16,
    payer: Option<Payer>,
    /// Number of processes that were killed.
    pub killed: usize,
    /// Number of deliveries that were cut off.
    pub cut_off: usize,
}

impl<'a> Lane<'a> {
    pub fn new(spec: &'a str, strategy: &'a str, bank: u16) -> Self {
        Self { spec, strategy, bank, payer: None, killed: 0, cut_off: 0 }
    }

    /// Delivers a message again and again until it ends. Carries out the faults of the bank, and those at random
    /// moments.
    pub async fn serve(
        &mut self,
        id: u64,
        interventions: &mut UnboundedReceiver<FaultKind>,
        moments: &mut RandomMoments,
    ) -> End {
        for _ in 0..DELIVERIES {
            match self.deliver(id, interventions, moments).await {
                DeliveryEnd::Ended(end) => return end,
                DeliveryEnd::Again(after) => sleep(after).await,
            }
        }
        panic!("{} {}, message {id}: no end after {DELIVERIES} deliveries", self.spec, self.strategy);
    }

    async fn deliver(
        &mut self,
        id: u64,
        interventions: &mut UnboundedReceiver<FaultKind>,
        moments: &mut RandomMoments,
    ) -> DeliveryEnd {
        let mut payer = match self.payer.take() {
            Some(payer) => payer,
            None => Payer::start([self.spec, self.strategy], self.bank).await,
        };
        payer.send(&format!("deliver {id}")).await;
        let moment = moments.draw();
        let at_random = async {
            match moment {
                Some((after, kind)) => {
                    sleep(after).await;
                    kind
                }
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            answer = payer.answer() => Event::Answer(answer),
            kind = at_random => {
                moments.left -= 1;
                Event::Fault(kind)
            }
            kind = interventions.recv() => Event::Fault(kind.expect("the account is open")),
        };
        let answer = match event {
            Event::Answer(answer) => answer,
            Event::Fault(FaultKind::Kill) => {
                self.killed += 1;
                payer.kill();
                return DeliveryEnd::Again(Duration::ZERO);
            }
            Event::Fault(_) => {
                payer.send("cut").await;
                let answer = payer.answer().await;
                // The delivery may have ended before.
                self.cut_off += usize::from(answer == "cut");
                answer
            }
        };
        self.payer = Some(payer);
        match answer.split_once(' ') {
            Some(("ack", receipt)) => DeliveryEnd::Ended(End::Acknowledged(receipt.to_owned())),
            Some(("retry", micros)) => DeliveryEnd::Again(Duration::from_micros(micros.parse().expect("a number"))),
            None if answer == "person" => DeliveryEnd::Ended(End::NeedsPerson),
            None if answer == "cut" => DeliveryEnd::Again(Duration::ZERO),
            _ => panic!("{} {}, message {id}: {answer}", self.spec, self.strategy),
        }
    }
}
