//! Faults that last for several leases or longer: outages, after which the delayed requests take effect or are lost;
//! and rights that a process loses for the rest of its life.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_runtime::clock::Clock;
use idem_runtime::store::Release;
use idem_runtime::{StoreError, StoreErrorKind};
use tokio::sync::{Notify, oneshot};

use crate::dice::Dice;
use crate::store::{LandedRequest, Line, Net, Request};

/// Outage, during which no request of the cut-off process reaches the store, and no answer reaches the process.
pub(crate) struct Outage {
    /// Process that is cut off; `None` for all processes.
    process: Option<usize>,
    length: Duration,
    /// Time that a caller waits for its answer.
    patience: Duration,
    /// True if delayed requests are lost, as on a line that refuses connections.
    swallows: bool,
    /// True if delayed requests take effect in another order than they were sent.
    shuffles: bool,
    /// Longest pause between two delayed requests that take effect.
    pause: Duration,
    held: Mutex<Vec<HeldRequest>>,
    is_over: AtomicBool,
    over: Notify,
}

/// Request that is delayed until the end of an outage.
struct HeldRequest {
    line: Line,
    request: Request,
    ops: Vec<usize>,
    answer: Option<oneshot::Sender<LandedRequest>>,
}

impl Outage {
    /// Draws an outage that lasts for several leases.
    pub(crate) fn draw(dice: &Dice, process: Option<usize>, lease: Duration) -> Self {
        Self {
            process,
            length: lease * u32::try_from(dice.between(2, 5)).expect("few") + dice.up_to(lease),
            patience: dice.pick(&[lease / 10, lease / 2, lease * 2]),
            swallows: dice.chance(300),
            shuffles: dice.chance(500),
            pause: dice.pick(&[Duration::ZERO, Duration::ZERO, lease / 8]),
            held: Mutex::default(),
            is_over: AtomicBool::new(false),
            over: Notify::new(),
        }
    }

    pub(crate) fn length(&self) -> Duration {
        self.length
    }

    pub(crate) fn process(&self) -> Option<usize> {
        self.process
    }

    pub(crate) fn cuts_off(&self, process: usize) -> bool {
        self.process.is_none_or(|it| it == process)
    }

    /// Delays a request whose caller is gone.
    pub(crate) fn keep(&self, line: Line, request: Request, ops: Vec<usize>) {
        self.held.lock().unwrap().push(HeldRequest { line, request, ops, answer: None });
    }

    /// Delays a request. Returns its answer if the request takes effect within its caller's time limit.
    pub(crate) async fn hold(&self, net: &Net, line: Line, request: Request, ops: Vec<usize>) -> Option<LandedRequest> {
        let (answer, hears) = oneshot::channel();
        self.held.lock().unwrap().push(HeldRequest { line, request, ops, answer: Some(answer) });
        tokio::select! {
            biased;
            landed = hears => landed.ok(),
            () = net.clock.sleep(self.patience) => None,
        }
    }

    /// Waits until the outage ends. Returns false if the caller's time limit ends first.
    pub(crate) async fn lets_through(&self, net: &Net) -> bool {
        let over = self.over.notified();
        if self.is_over.load(Ordering::SeqCst) {
            return true;
        }
        tokio::select! {
            biased;
            () = over => true,
            () = net.clock.sleep(self.patience) => false,
        }
    }

    /// Ends the outage: the delayed requests take effect or are lost, whether or not their callers wait.
    pub(crate) async fn end(&self, net: &Net, dice: &Dice) {
        self.is_over.store(true, Ordering::SeqCst);
        self.over.notify_waiters();
        let mut held = std::mem::take(&mut *self.held.lock().unwrap());
        if self.shuffles {
            for n in (1..held.len()).rev() {
                held.swap(n, usize::try_from(dice.between(0, n as u64)).expect("few"));
            }
        }
        if self.swallows {
            for _ in held.drain(..) {
                net.count("requests that an outage lost");
            }
        }
        for HeldRequest { line, request, ops, answer } in held {
            net.count("requests that landed after an outage");
            if line.is_dead() {
                net.count("requests that landed after their process was killed in an outage");
            }
            let landed = line.land(&request, &ops).await;
            let is_heard = answer.is_some_and(|answer| answer.send(landed).is_ok());
            net.count(match is_heard {
                true => "answers that an outage delayed",
                false => "answers that an outage lost",
            });
            net.clock.sleep(dice.up_to(self.pause)).await;
        }
    }
}

/// Operation that the store permanently refuses to a process that has lost the right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Right {
    Begin,
    Renew,
    Finish,
}

/// Right that a process loses for the rest of its life.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    pub(crate) right: Right,
    pub(crate) kind: StoreErrorKind,
    /// Time of the loss, in nanoseconds.
    pub(crate) from: u64,
}

impl Loss {
    /// Draws the right that a process loses at `from`.
    pub(crate) fn draw(dice: &Dice, from: u64) -> Self {
        let right = dice.pick(&[Right::Begin, Right::Renew, Right::Renew, Right::Finish]);
        Self { right, kind: dice.pick(&[StoreErrorKind::Misconfigured, StoreErrorKind::Corrupt]), from }
    }

    /// Returns the error for `request` at the time `now`, if the request needs the lost right.
    pub(crate) fn refuses(&self, request: &Request, now: u64) -> Option<StoreError> {
        let needed = match request {
            Request::Begin(_) => Right::Begin,
            // A journal is also a renewal.
            Request::Renew(_) | Request::Append(..) => Right::Renew,
            Request::Finish(..) => Right::Finish,
            _ => return None,
        };
        (needed == self.right && now >= self.from).then(|| StoreError::new(self.kind, "the right is missing"))
    }
}

/// Returns whether the request is a release because the body did not begin, or because it has returned.
pub(crate) fn frees(request: &Request) -> bool {
    matches!(request, Request::Release(_, Release::NotStarted | Release::Returned))
}
