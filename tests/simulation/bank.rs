//! Banks of a world: services that charge once for each request which arrives. Requests and answers get lost, and
//! requests arrive after their caller is gone. A reconciler asks the bank about a charge in doubt.

use std::cell::RefCell;
use std::time::Duration;

use futures::future::{Either, select};
use idem_runtime::clock::Clock;
use idem_runtime::{Reconciliation, current};
use tokio::sync::oneshot;

use crate::dice::Dice;
use crate::history::nanos;
use crate::ledger::InquiryEnd;
use crate::store::{DeliberateBreak, yield_now};
use crate::world::{Delivery, Failure, STEPS, World};

/// Bank of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bank {
    /// True if the bank answers the second request with a reference by its first charge. Otherwise it charges again.
    pub(crate) refuses_twice: bool,
    /// Answer of the reconciler if the bank knows no charge; `None` if the handler has no reconciler.
    pub(crate) not_found: Option<NotFound>,
    /// Time after which the bank refuses a request that is on its way.
    pub(crate) expiry: Duration,
    pub(crate) max_reconciliations: u16,
}

/// Answer of a reconciler if the bank knows no charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotFound {
    /// The bank refuses a second request, so the reconciler answers `NotDone`.
    NotDone,
    /// The bank does not refuse a second request, so the reconciler answers `Unknown`.
    Unknown,
    /// The reconciler waits until every earlier request has expired, and only then asks the bank.
    NotDoneAfterExpiry,
}

impl Bank {
    /// Draws a bank and a reconciler that is right about this bank. In a world with `blocked` bodies, a body may send
    /// its request after the lapse of its lease, so no expiry is long enough.
    pub(crate) fn draw(dice: &Dice, lease: Duration, blocked: bool) -> Self {
        let (refuses_twice, not_found) = match dice.between(0, 4) {
            0 => (dice.chance(500), None),
            1 | 2 => (true, Some(NotFound::NotDone)),
            3 if !blocked => (false, Some(NotFound::NotDoneAfterExpiry)),
            _ => (false, Some(NotFound::Unknown)),
        };
        let max_reconciliations = dice.pick(&[2, 5, 16]);
        Self { refuses_twice, not_found, expiry: lease * dice.pick(&[1, 1, 2]) / 2, max_reconciliations }
    }
}

/// Reaction of a step to a doubt about its effect, which is a charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    /// True if the step has a reconciler. Otherwise an operator has to decide (`fail`).
    pub(crate) reconciles: bool,
    pub(crate) bank: Bank,
}

impl Guard {
    /// Draws a reaction, and a reconciler that is right about its bank. [`Bank::draw`] explains `blocked`.
    pub(crate) fn draw(dice: &Dice, lease: Duration, blocked: bool) -> Self {
        let reconciles = dice.chance(600);
        let (refuses_twice, not_found) = match dice.between(0, 4) {
            _ if !reconciles => (dice.chance(300), None),
            1 if !blocked => (false, Some(NotFound::NotDoneAfterExpiry)),
            2..=4 if !blocked => (false, Some(NotFound::Unknown)),
            _ => (true, Some(NotFound::NotDone)),
        };
        let expiry = lease * dice.pick(&[1, 1, 2]) / 2;
        Self { reconciles, bank: Bank { refuses_twice, not_found, expiry, max_reconciliations: 0 } }
    }
}

/// Charges of the banks of a world, by account. Each operation has an account, and one for each of its steps.
#[derive(Debug)]
pub(crate) struct Charges {
    /// Dice of requests and reconcilers.
    pub(crate) dice: Dice,
    names: RefCell<Vec<Vec<String>>>,
}

impl Charges {
    pub(crate) fn new(dice: Dice, operations: usize) -> Self {
        Self { dice, names: RefCell::new(vec![Vec::new(); operations * (1 + STEPS)]) }
    }

    /// Returns the names of the charges of an account.
    pub(crate) fn of(&self, account: usize) -> Vec<String> {
        self.names.borrow()[account].clone()
    }

    /// Returns the account of a step.
    pub(crate) fn account(&self, operation: usize, step: u8) -> usize {
        let operations = self.names.borrow().len() / (1 + STEPS);
        operations + operation * STEPS + usize::from(step)
    }
}

impl World {
    /// Lets a request arrive that was sent at `sent_at`. Returns the name of the charge; `None` if the bank refuses the
    /// request.
    fn charge_now(&self, (account, bank): (usize, Bank), name: &str, sent_at: u64) -> Option<String> {
        if self.net.now() >= sent_at + nanos(bank.expiry) {
            self.count("requests that a bank refused because they had expired");
            return None;
        }
        let mut names = self.charges.names.borrow_mut();
        let charges = &mut names[account];
        let first = charges.first().filter(|_| bank.refuses_twice).cloned();
        if first.is_some() {
            self.count("requests that a bank knew");
            return first;
        }
        charges.push(name.to_owned());
        self.net.history().note(format!("the bank charges {name}"));
        self.ledger.borrow_mut().step_charged(&self.net, name);
        Some(name.to_owned())
    }

    /// Sends a request to the bank, and waits for its answer. Returns the name of the charge; `None` without an answer.
    pub(crate) async fn charge(&self, account: usize, bank: Bank, name: &str) -> Option<String> {
        let dice = &self.charges.dice;
        self.count("requests to a bank");
        let fate = if self.net.is_stormy() { dice.between(0, 9) } else { 0 };
        let (is_lost, is_slow, answer_lost) = (fate == 9, matches!(fate, 6..=8), matches!(fate, 4 | 5));
        let delay = dice.up_to(if is_slow { bank.expiry } else { bank.expiry / 4 });
        let patience = if is_slow { dice.up_to(bank.expiry) } else { bank.expiry };
        let (answer, answered) = oneshot::channel();
        if !is_lost {
            let (world, name, sent_at) = (self.clone(), name.to_owned(), self.net.now());
            // The request goes on after its body is dropped or its process is killed.
            drop(self.simulation.spawn(async move {
                world.net.clock.sleep(delay).await;
                let charged = world.charge_now((account, bank), &name, sent_at);
                if !answer_lost && answer.send(charged).is_err() {
                    world.count("requests that arrived after their caller was gone");
                }
            }));
        }
        match select(answered, self.net.clock.sleep(patience)).await {
            Either::Left((Ok(charged), _)) => charged,
            // The answer is lost, and the caller waits for it in vain.
            Either::Left((Err(_), patience)) => {
                patience.await;
                None
            }
            Either::Right(_) => None,
        }
    }
}

/// Reconciler that is being polled, whose events are entered in the books.
struct Inquiry<'a> {
    delivery: &'a Delivery,
    number: usize,
}

impl Inquiry<'_> {
    fn end(&self, end: InquiryEnd) {
        let world = &self.delivery.world;
        world.ledger.borrow_mut().end_inquiry(&world.net, self.number, end);
    }
}

impl Drop for Inquiry<'_> {
    fn drop(&mut self) {
        self.end(InquiryEnd::Dropped);
    }
}

/// Reconciler of a delivery: asks the bank, and sometimes fails, hangs or panics.
pub(crate) async fn find(delivery: &Delivery) -> Result<Reconciliation<String>, Failure> {
    let Delivery { world, operation, call, .. } = delivery;
    let bank = world.operations[*operation].bank.expect("only operations with a bank have reconcilers");
    let (net, dice) = (&world.net, &world.charges.dice);
    let attempt = current().expect("inside of a handler");
    let number = world.ledger.borrow_mut().start_inquiry(net, *call, &attempt);
    let inquiry = Inquiry { delivery, number };
    let believe = || world.ledger.borrow_mut().believe(net, *call, &attempt);
    let lease = world.operations[*operation].terms.lease;
    if bank.not_found == Some(NotFound::NotDoneAfterExpiry) {
        net.clock.sleep(bank.expiry).await;
        believe();
    }
    for _ in 0..dice.between(1, 3) {
        match dice.between(0, 3) {
            0 => yield_now().await,
            1 if net.is_stormy() => net.clock.sleep(dice.up_to(lease * 2)).await,
            _ => net.clock.sleep(dice.up_to(lease / 8)).await,
        }
        believe();
        if net.is_stormy() && dice.chance(60) {
            inquiry.end(InquiryEnd::Panicked);
            std::panic::resume_unwind(Box::new("a reconciler panics"));
        }
        if net.is_stormy() && dice.chance(60) {
            let text = format!("question {number}");
            inquiry.end(InquiryEnd::Error(text.clone()));
            return Err(Failure::Passing(text));
        }
    }
    let found = world.charges.of(*operation).first().cloned();
    net.clock.sleep(dice.up_to(lease / 8)).await;
    believe();
    let answer = match (found, bank.not_found) {
        (Some(name), _) => InquiryEnd::Done(name),
        (None, Some(NotFound::NotDone | NotFound::NotDoneAfterExpiry)) => InquiryEnd::NotDone,
        (None, _) => InquiryEnd::Unknown,
    };
    inquiry.end(answer.clone());
    Ok(match (answer, net.prank) {
        (InquiryEnd::Unknown, DeliberateBreak::UnknownIsDone) => Reconciliation::Done("nothing".to_owned()),
        (InquiryEnd::Done(name), _) => Reconciliation::Done(name),
        (InquiryEnd::NotDone, _) | (InquiryEnd::Unknown, DeliberateBreak::UnknownIsNotDone) => Reconciliation::NotDone,
        _ => Reconciliation::Unknown { ask_again: lease / 4 },
    })
}
