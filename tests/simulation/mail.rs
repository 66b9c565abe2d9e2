//! Messages of a world: a broker that is away, refuses messages, loses requests and answers, and gets requests after
//! their sender is gone; the senders of the processes; and the checks of what leaves and what arrives.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use idem_runtime::Key;
use idem_runtime::clock::Clock;
use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};

use crate::dice::Dice;
use crate::history::nanos;
use crate::ledger::{Check, Finding};
use crate::store::{DeliberateBreak, Line, Net, WeakLine};

/// Number of refusals after which a message is set aside.
const MAX_REFUSALS: u32 = 3;
/// Destinations of messages, by the place of the message.
const DESTINATIONS: [&str; 2] = ["orders", "mail"];

/// Message that a body has pushed.
#[derive(Clone, Debug)]
struct Push {
    key: Key,
    /// Number of the attempt; 0 without a reservation.
    attempt: u32,
    /// Name of the body, which no other body has.
    name: String,
    /// Place among the messages of the body.
    place: usize,
}

impl Push {
    fn destination(&self) -> &'static str {
        DESTINATIONS[self.place % DESTINATIONS.len()]
    }

    fn body(&self) -> String {
        format!("{}+{}", self.name, self.place)
    }
}

/// Messages of a world, and its broker.
pub(crate) struct Mail {
    /// Dice of messages, senders and brokers.
    pub(crate) dice: Dice,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    pushes: Vec<Push>,
    /// Names of bodies that have returned a value.
    returned: HashSet<String>,
    /// Time until which the broker is away.
    away_until: u64,
    /// Bodies of the messages that have arrived.
    arrived: HashSet<String>,
    /// Number of times that the broker has refused a message, by its body.
    refusals: HashMap<String, u32>,
    /// Number of times that the broker still refuses a message, by its body.
    stubborn: BTreeMap<String, u32>,
    /// The id of each body that has left, and the body of each id.
    ids: HashMap<String, String>,
    bodies: HashMap<String, String>,
    findings: Vec<(Key, Check, String)>,
}

impl Books {
    /// Reports whether the broker has the message, or has refused it so often that it is set aside.
    fn is_done(&self, push: &Push) -> bool {
        let body = push.body();
        let is_set_aside = push.attempt > 0 && self.refusals.get(&body).is_some_and(|times| *times >= MAX_REFUSALS);
        self.arrived.contains(&body) || is_set_aside
    }

    fn find(&mut self, key: &Key, check: Check, text: String) {
        self.findings.push((key.clone(), check, text));
    }
}

/// Fate of a message on its way to the broker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Confirmed,
    /// The message does not arrive.
    Lost,
    /// The message arrives, and its answer gets lost.
    AnswerLost,
    /// The broker does not answer in time, and may keep the message.
    Hangs,
}

impl Mail {
    pub(crate) fn new(dice: Dice) -> Self {
        Self { dice, books: Mutex::default() }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }

    /// Returns the next message of the body `name`, with its destination.
    fn next(&self, key: &Key, attempt: u32, name: &str) -> Push {
        let place = self.books().pushes.iter().filter(|push| push.name == name).count();
        Push { key: key.clone(), attempt, name: name.to_owned(), place }
    }

    /// Lets the broker be away until `until`.
    pub(crate) fn goes_away(&self, until: u64) {
        self.books().away_until = until;
    }

    /// Enters that the body `name` has returned a value, so that its messages may leave.
    pub(crate) fn returns(&self, name: &str) {
        self.books().returned.insert(name.to_owned());
    }

    /// Returns the findings, each with its key.
    pub(crate) fn take_findings(&self, net: &Net) -> Vec<Finding> {
        let found = std::mem::take(&mut self.books().findings);
        let numbered = |(key, check, text)| Finding { check, key: net.history().key(&key), text };
        found.into_iter().map(numbered).collect()
    }

    /// Enters that a message leaves the process. Checks that it may: its body has returned, its record is finished, and
    /// all earlier messages of its destination are with the broker.
    fn leaves(&self, net: &Net, message: &OutgoingMessage, remembers: bool) {
        let (id, body) = (message.id(), text_of(message));
        let mut books = self.books();
        let Some(push) = books.pushes.iter().find(|push| push.body() == body).cloned() else {
            panic!("{body} leaves, and no body has pushed it");
        };
        let known_id = books.ids.entry(body.clone()).or_insert_with(|| id.to_owned()).clone();
        let known_body = books.bodies.entry(id.to_owned()).or_insert_with(|| body.clone()).clone();
        // Bodies without a reservation are not recorded, and their messages have the ids of their places.
        let is_recorded = |it: &Push| it.attempt > 0 && it.body() == known_body;
        let may_share = push.attempt == 0 && !books.pushes.iter().any(is_recorded);
        let is_same = known_id == id && (known_body == body || may_share);
        if !is_same || push.destination() != message.destination() {
            let text = format!("{body} leaves with id {id}; earlier: {known_id}, {known_body}");
            books.find(&push.key, Check::MessageIdentity, text);
        }
        let earlier = |other: &&Push| {
            other.name == push.name && other.place < push.place && other.destination() == push.destination()
        };
        if let Some(other) = books.pushes.iter().filter(earlier).find(|other| !books.is_done(other)).cloned() {
            books.find(&push.key, Check::MessageOrder, format!("{body} leaves before {other:?} has arrived"));
        }
        if !books.returned.contains(&push.name) {
            books.find(&push.key, Check::MessageLeft, format!("{body} leaves, and its body has returned no value"));
        }
        if push.attempt == 0 || !remembers {
            return;
        }
        // An operator may have reopened or forgotten the record after the sender has read it.
        let number = net.history().key(&push.key);
        let is_excused = net.history().was_reopened(number, 0..) || net.history().was_forgotten(number);
        if let Some(found) = net.truth(&push.key)
            && !is_excused
            && (!found.record.is_finished() || found.record.attempt != push.attempt)
        {
            let text = format!("{body} of attempt {} leaves, and the store holds {found:?}", push.attempt);
            books.find(&push.key, Check::MessageLeft, text);
        }
    }

    fn arrives(&self, net: &Net, body: &str) {
        net.history().note(format!("the broker has {body}"));
        if !self.books().arrived.insert(body.to_owned()) {
            net.count("messages that arrived again");
        }
    }

    /// Checks that the broker has the messages of the attempt whose end a caller has got. `value`: value that the
    /// caller has got, which names a body without a reservation.
    pub(crate) fn acknowledges(&self, key: &Key, attempt: Option<u32>, value: &str) {
        let mut books = self.books();
        let is_of_it = |push: &&Push| {
            let is_named = match attempt {
                Some(attempt) => push.attempt == attempt,
                // A large value is the name of its body and dashes.
                None => push.attempt == 0 && value.trim_end_matches('-') == push.name,
            };
            push.key == *key && is_named && books.returned.contains(&push.name)
        };
        let missing = books.pushes.iter().filter(is_of_it).find(|push| !books.is_done(push)).cloned();
        if let Some(push) = missing {
            let text = format!("a caller got the end of attempt {attempt:?}, and {push:?} has not arrived");
            books.find(key, Check::MessageAcknowledged, text);
        }
    }

    /// Checks that every message of the finished attempt `attempt` of `key` is with the broker in the end.
    pub(crate) fn close(&self, key: &Key, attempt: u32) {
        let mut books = self.books();
        let is_of_it =
            |push: &&Push| push.key == *key && push.attempt == attempt && books.returned.contains(&push.name);
        if let Some(push) = books.pushes.iter().filter(is_of_it).find(|push| !books.is_done(push)).cloned() {
            books.find(key, Check::MessageMissing, format!("{push:?} of a finished record has not arrived"));
        }
    }

    fn fate(&self, net: &Net, body: &str) -> Result<Fate, SendError> {
        let mut books = self.books();
        if net.now() < books.away_until {
            net.count("messages that met a broker that was away");
            return Ok(Fate::Lost);
        }
        // A refusal belongs to the message, so it goes on after the storm.
        if !books.stubborn.contains_key(body) {
            let times = if net.is_stormy() { self.dice.pick(&[0, 0, 0, 0, 0, 1, 2, 9]) } else { 0 };
            books.stubborn.insert(body.to_owned(), times);
        }
        let left = books.stubborn.get_mut(body).expect("just inserted");
        if *left > 0 {
            *left -= 1;
            let times = books.refusals.entry(body.to_owned()).or_default();
            *times += 1;
            net.count("messages that the broker refused");
            if *times == MAX_REFUSALS {
                net.count("messages that were set aside");
            }
            return Err(SendError::refused("the broker refuses the message"));
        }
        if !net.is_stormy() {
            return Ok(Fate::Confirmed);
        }
        Ok(self.dice.pick(&[
            Fate::Confirmed,
            Fate::Confirmed,
            Fate::Confirmed,
            Fate::Confirmed,
            Fate::Lost,
            Fate::AnswerLost,
            Fate::Hangs,
        ]))
    }
}

fn text_of(message: &OutgoingMessage) -> String {
    String::from_utf8(message.body().to_vec()).expect("a text")
}

impl Net {
    /// Pushes up to three messages of the body `name`.
    pub(crate) fn push_messages(&self, attempt: &idem_runtime::Attempt, name: &str) {
        let Some(mail) = &self.mail else { return };
        let count = mail.dice.between(0, 3);
        let number = if attempt.is_protected() { attempt.number() } else { 0 };
        let mut pushes = Vec::new();
        for _ in 0..count {
            let push = mail.next(attempt.key(), number, name);
            mail.books().pushes.push(push.clone());
            pushes.push(push);
        }
        if self.prank == DeliberateBreak::PushesAreReversed {
            pushes.reverse();
        }
        for push in pushes {
            let accepted = attempt.outbox().push(push.destination(), OutgoingMessage::new(push.body()));
            // The body of a lost lease learns of the loss here.
            self.count(if accepted.is_ok() { "messages" } else { "messages that were not accepted" });
        }
    }
}

/// Sender of a process.
pub(crate) struct Postbox {
    net: Arc<Net>,
    line: WeakLine,
}

impl Postbox {
    pub(crate) fn of(line: &Line, net: &Arc<Net>) -> Self {
        Self { net: Arc::clone(net), line: line.downgrade() }
    }

    fn is_dead(&self) -> bool {
        self.line.is_dead()
    }
}

/// Message on its way. A message whose sender is dropped may arrive later.
struct Flight {
    net: Weak<Net>,
    body: Option<String>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        let (Some(body), Some(net)) = (self.body.take(), self.net.upgrade()) else { return };
        let Some(mail) = &net.mail else { return };
        if !net.is_stormy() || !mail.dice.chance(500) {
            return;
        }
        net.count("messages that arrived after their sender was gone");
        let after = mail.dice.up_to(net.longest_lease());
        let clock = net.clock.clone();
        clock.clone().spawn(Box::pin(async move {
            clock.sleep(after).await;
            if let Some(mail) = &net.mail {
                mail.arrives(&net, &body);
            }
        }));
    }
}

impl Sender for Postbox {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let net = &self.net;
            let mail = net.mail.as_ref().expect("a world with messages");
            if self.is_dead() {
                return std::future::pending().await;
            }
            let renamed;
            let message = match net.prank {
                DeliberateBreak::MessagesAreRenamed => {
                    let id = format!("{}/{}", message.id(), mail.dice.between(0, u64::MAX - 1));
                    renamed = message.clone().addressed(message.destination(), id);
                    &renamed
                }
                _ => message,
            };
            let body = text_of(message);
            mail.leaves(net, message, net.remembers());
            let mut flight = Flight { net: Arc::downgrade(net), body: Some(body.clone()) };
            let pause = mail.dice.up_to(net.longest_lease() / 20);
            net.clock.sleep(pause).await;
            if self.is_dead() {
                return std::future::pending().await;
            }
            let fate = match mail.fate(net, &body) {
                Ok(fate) => fate,
                Err(refused) => {
                    flight.body = None;
                    return Err(refused);
                }
            };
            if fate == Fate::Hangs {
                net.clock.sleep(self.timeout() * 2).await;
                return Err("no answer".into());
            }
            flight.body = None;
            if fate != Fate::Lost {
                mail.arrives(net, &body);
            }
            net.clock.sleep(pause).await;
            if self.is_dead() {
                return std::future::pending().await;
            }
            match (fate, net.prank) {
                (Fate::Confirmed, _) | (_, DeliberateBreak::LostMessagesAreConfirmed) => Ok(()),
                (Fate::AnswerLost, _) => {
                    net.count("messages whose answer was lost");
                    Err("no answer".into())
                }
                _ => Err("the broker is away".into()),
            }
        })
    }

    fn timeout(&self) -> Duration {
        self.net.longest_lease()
    }

    fn max_refusals(&self) -> u32 {
        MAX_REFUSALS
    }
}

/// Returns the time at which an outage of the broker ends that begins now.
pub(crate) fn outage(net: &Net, dice: &Dice) -> u64 {
    net.count("outages of the broker");
    net.now() + nanos(dice.up_to(net.longest_lease() * 3))
}
