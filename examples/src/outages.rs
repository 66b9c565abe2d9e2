//! A run in which the broker is killed and comes back, and in which the store is away, while worker processes go on.
//!
//! Each step waits for a condition on the books, and no condition depends on the speed of the machine.
#![allow(clippy::disallowed_methods, reason = "an outage takes its time")]

use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::time::Duration;

use rusqlite::Connection;
use tokio::time::{Instant, sleep};

use crate::fleet::{Broker, Event, Failure, Fleet, Headers, LIMIT, Mishap, Run, payload};
use crate::servers::Server;

/// Seconds of each outage, unless `IDEM_EXAMPLE_OUTAGE` sets another number.
pub(crate) const SECONDS: u64 = 5;
const WORKERS: usize = 2;
/// Number of handlers of each worker.
const HANDLERS: usize = 8;
/// Orders that never succeed.
const POISON: std::ops::RangeInclusive<u64> = 3_001..=3_012;
/// Orders that fail once and whose next try comes late. There are more of these orders than handlers, so they would
/// occupy all handlers if they waited in handlers.
const LATE: std::ops::RangeInclusive<u64> = 4_001..=4_024;
/// Orders that succeed, in each of the three steps.
const PLAIN: [std::ops::RangeInclusive<u64>; 3] = [1..=60, 61..=120, 121..=180];
/// Tag of the message that can't be read.
const MALFORMED: &str = "malformed";

/// Runs the workers through the outages. Returns the findings as text, and whether everything is correct.
pub(crate) async fn run<B: Broker>(broker: &B, run: &Run, server: &mut dyn Server) -> Result<(String, bool), Failure> {
    let mut outages = Outages { broker, run, fleet: Fleet::of(run), wrong: Vec::new(), told: String::new() };
    let worked = outages.work(server).await;
    outages.fleet.end()?;
    worked?;
    let Outages { mut wrong, mut told, .. } = outages;
    audit(run, &mut wrong);
    for wrong in &wrong {
        writeln!(told, "WRONG: {wrong}.")?;
    }
    if wrong.is_empty() {
        writeln!(told, "Every order was charged exactly once, and no good message was set aside.")?;
    }
    Ok((told, wrong.is_empty()))
}

/// A run, and its findings so far.
struct Outages<'a, B> {
    broker: &'a B,
    run: &'a Run,
    fleet: Fleet<'a>,
    wrong: Vec<String>,
    told: String,
}

impl<B: Broker> Outages<'_, B> {
    async fn work(&mut self, server: &mut dyn Server) -> Result<(), Failure> {
        let outage = env::var("IDEM_EXAMPLE_OUTAGE").map_or(Ok(SECONDS), |seconds| seconds.parse())?;
        let outage = Duration::from_secs(outage);
        self.starvation().await?;
        self.broker_outage(server, outage).await?;
        if !B::IS_STORE {
            self.store_outage(outage).await?;
        }
        self.poison().await?;
        self.shutdown().await?;
        self.broker.clean_up(self.run).await
    }

    /// Checks that good messages don't wait behind messages that have failed and wait for their next try.
    async fn starvation(&mut self) -> Result<(), Failure> {
        // The step starts with one worker, so that no rebalance delays messages.
        self.publish(&LATE.map(|order| payload(&event(order, Mishap::FailsLate))).collect::<Vec<_>>()).await?;
        self.fleet.workers.push(self.run.spawn()?);
        let tries = |notes: &str| orders(notes, "body ").filter(|order| LATE.contains(order)).count();
        self.until("all late orders have failed", |notes| tries(notes) >= LATE.count(), Duration::ZERO).await?;
        self.publish(&plain(0)).await?;
        self.until_settled(0, Duration::ZERO).await?;
        let again = tries(&self.run.notes()) - LATE.count();
        let waited = again >= LATE.count() - HANDLERS;
        self.check(!B::HAS_DELAYS || !waited, "good messages waited until failed ones were tried again");
        self.tell(format_args!(
            "{} good messages settled, when {again} of {} failed ones had their next try",
            PLAIN[0].clone().count(),
            LATE.count()
        ));
        for _ in 1..WORKERS {
            self.fleet.workers.push(self.run.spawn()?);
        }
        let mut messages: Vec<_> = POISON.map(|order| payload(&event(order, Mishap::Poison))).collect();
        messages.push(br#"{"order": "fourty"#.to_vec());
        self.publish(&messages).await
    }

    /// Checks that the workers outlive their broker, and go on as soon as it is back, although a handler still runs.
    async fn broker_outage(&mut self, server: &mut dyn Server, outage: Duration) -> Result<(), Failure> {
        let held = event(2_001, Mishap::IsHeld);
        self.publish(&[payload(&held)]).await?;
        self.until("the slow handler runs", |notes| has_line(notes, "body 2001 2001/1"), Duration::ZERO).await?;
        let (before, after) = (plain(1), plain(1).split_off(PLAIN[1].clone().count() / 2));
        self.publish(&before[..before.len() - after.len()]).await?;
        self.until("a message of the second step", |notes| settled(notes, 1) > 4, Duration::ZERO).await?;
        server.kill()?;
        self.outage(outage).await?;
        let began = Instant::now();
        server.start()?;
        let started = began.elapsed();
        self.publish(&after).await?;
        self.until_settled(1, outage).await?;
        self.run.release(&held)?;
        self.until("the slow message", |notes| has_line(notes, "acknowledged 2001/1"), outage).await?;
        self.tell(format_args!(
            "the broker was killed for {outage:?}: all messages settled {:.1?} after its start of {started:.1?}",
            began.elapsed().saturating_sub(started)
        ));
        Ok(())
    }

    /// Checks that the workers consume nothing while their store is away.
    async fn store_outage(&mut self, outage: Duration) -> Result<(), Failure> {
        let mut lock = Connection::open(self.run.file())?;
        lock.busy_timeout(LIMIT)?;
        // Other connections can still read, so only writes show the outage.
        let locked = lock.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let deliveries = |notes: &str| notes.lines().filter(|line| line.starts_with("delivered ")).count();
        let before = deliveries(&self.run.notes());
        self.publish(&plain(2)).await?;
        self.outage(outage).await?;
        let during = deliveries(&self.run.notes()) - before;
        drop(locked);
        drop(lock);
        // Each handler may get one message before the outage is noticed. Then each worker tries one message after each
        // pause.
        let tries = usize::try_from(outage.as_secs())?.min(20) + usize::try_from(outage.as_secs())? / 3;
        let most = WORKERS * (HANDLERS + tries);
        self.check(during <= most, &format!("{during} deliveries in an outage of the store, more than {most}"));
        let began = Instant::now();
        self.until_settled(2, outage).await?;
        self.tell(format_args!(
            "the store was away for {outage:?}: {during} deliveries meanwhile, all messages settled {:.1?} later",
            began.elapsed()
        ));
        Ok(())
    }

    /// Checks that messages that never succeed are set aside with the reasons, without `max_attempts`.
    async fn poison(&mut self) -> Result<(), Failure> {
        let late = |notes: &str| {
            orders(notes, "acknowledged ").filter(|order| LATE.contains(order)).collect::<BTreeSet<_>>().len()
        };
        self.until("the late orders", |notes| late(notes) >= LATE.count(), LIMIT).await?;
        let all = POISON.count() + 1;
        let aside =
            |notes: &str| notes.lines().filter_map(|line| line.strip_prefix("aside ")).collect::<BTreeSet<_>>().len();
        self.until("all messages that never succeed are set aside", |notes| aside(notes) >= all, LIMIT * 2).await?;
        let began = Instant::now();
        let mut found = Vec::new();
        // A worker writes into the books before it copies a message to the dead-letter queue.
        while found.len() < all && began.elapsed() < LIMIT {
            found.extend(self.broker.dead_letters(self.run).await?);
        }
        for order in POISON {
            let is_it = |headers: &&Headers| {
                headers.get("idem-key").is_some_and(|key| key.ends_with(&format!("order:{order}")))
            };
            let is_right = found.iter().find(is_it).is_some_and(has_reasons);
            self.check(is_right, &format!("order {order} is not set aside with its reasons"));
        }
        let unreadable = |headers: &Headers| headers.get("idem-why").is_some_and(|why| why == "unreadable");
        self.check(found.iter().any(unreadable), "the message that can't be read is not set aside with its reason");
        self.tell(format_args!("{} messages that never succeed: set aside with their reasons", found.len()));
        if let Some(headers) = found.iter().find(|headers| has_reasons(headers)) {
            self.tell(format_args!("  for example {headers:?}"));
        }
        Ok(())
    }

    /// Checks that a worker that gets SIGTERM finishes its message.
    async fn shutdown(&mut self) -> Result<(), Failure> {
        let held = event(2_002, Mishap::IsHeld);
        self.publish(&[payload(&held)]).await?;
        self.until("the last handler runs", |notes| has_line(notes, "body 2002 2002/1"), Duration::ZERO).await?;
        let workers = std::mem::take(&mut self.fleet.workers);
        let released = async {
            sleep(Duration::from_secs(1)).await;
            self.run.release(&held)
        };
        let mut fleet = Fleet::of(self.run);
        let stopped = async {
            for worker in workers {
                fleet.stop(worker).await?;
            }
            Ok::<_, Failure>(())
        };
        let (released, stopped) = tokio::join!(released, stopped);
        released?;
        stopped?;
        let is_settled = has_line(&self.run.notes(), "acknowledged 2002/1");
        self.check(is_settled, "a worker that was stopped did not finish its message");
        self.tell(format_args!("SIGTERM: {WORKERS} workers finished their messages"));
        Ok(())
    }

    /// Publishes the messages. A broker that has just started may refuse some messages, so publishing is repeated;
    /// duplicates are harmless.
    async fn publish(&self, messages: &[Vec<u8>]) -> Result<(), Failure> {
        let began = Instant::now();
        loop {
            match self.broker.publish(self.run, messages).await {
                Err(_) if began.elapsed() < LIMIT => sleep(Duration::from_millis(100)).await,
                published => return published,
            }
        }
    }

    /// Lets the outage last. No worker may end meanwhile.
    async fn outage(&mut self, outage: Duration) -> Result<(), Failure> {
        let began = Instant::now();
        while began.elapsed() < outage {
            self.fleet.check_workers()?;
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Waits until all good messages of the step are settled.
    async fn until_settled(&mut self, step: usize, longer: Duration) -> Result<(), Failure> {
        let all = PLAIN[step].clone().count();
        self.until("the good messages of a step", |notes| settled(notes, step) == all, longer).await
    }

    /// Waits until the books show `what`, for the time limit of a step and `longer`. No worker may end meanwhile.
    async fn until(&mut self, what: &str, shows: impl Fn(&str) -> bool, longer: Duration) -> Result<(), Failure> {
        let began = Instant::now();
        while !shows(&self.run.notes()) {
            self.fleet.check_workers()?;
            if began.elapsed() > LIMIT + longer {
                return Err(format!("missing after {:?}: {what}", LIMIT + longer).into());
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    fn check(&mut self, is_right: bool, wrong: &str) {
        if !is_right {
            self.wrong.push(wrong.to_owned());
        }
    }

    fn tell(&mut self, line: std::fmt::Arguments<'_>) {
        eprintln!("{line}");
        let _ = writeln!(self.told, "  {line}");
    }
}

fn event(order: u64, mishap: Mishap) -> Event {
    Event { mishap, ..Event::plain(order) }
}

fn plain(step: usize) -> Vec<Vec<u8>> {
    PLAIN[step].clone().map(|order| payload(&Event::plain(order))).collect()
}

fn has_line(notes: &str, line: &str) -> bool {
    notes.lines().any(|it| it == line)
}

/// Returns the order of each line that begins with `what`.
fn orders<'a>(notes: &'a str, what: &'a str) -> impl Iterator<Item = u64> {
    notes.lines().filter_map(move |line| line.strip_prefix(what)?.split([' ', '/']).next()?.parse().ok())
}

/// Returns the number of good messages of the step that are settled.
fn settled(notes: &str, step: usize) -> usize {
    let settled = orders(notes, "acknowledged ").chain(orders(notes, "aside "));
    settled.filter(|order| PLAIN[step].contains(order)).collect::<BTreeSet<_>>().len()
}

fn has_reasons(headers: &Headers) -> bool {
    let text = |name: &str| headers.get(name).map_or("", |text| &**text);
    text("idem-why") == "last_delivery"
        && text("idem-error").contains("the bank refuses this customer")
        && text("idem-scope").ends_with("charge")
        && text("idem-deliveries").parse::<u32>().is_ok_and(|deliveries| deliveries > 1)
        && text("idem-attempt").parse::<u32>().is_ok_and(|attempt| attempt > 1)
        && text("idem-time").ends_with('Z')
}

/// Compares the books with the orders.
fn audit(run: &Run, wrong: &mut Vec<String>) {
    let notes = run.notes();
    let charges = |order: u64| {
        let files = std::fs::read_dir(&run.folder).into_iter().flatten().flatten();
        files.filter(|file| file.file_name().to_string_lossy().starts_with(&format!("payment {order} "))).count()
    };
    for order in PLAIN.into_iter().flatten().chain(LATE).chain([2_001, 2_002]) {
        // If the broker is also the store, the run has no outage of the store, and no messages of that step.
        let is_published = notes.lines().any(|line| line == format!("delivered {order}/1"));
        let times = charges(order);
        if is_published && times != 1 {
            wrong.push(format!("order {order} was charged {times} times"));
        }
    }
    for order in POISON.filter(|order| charges(*order) > 0) {
        wrong.push(format!("order {order} was charged"));
    }
    let bad: BTreeSet<_> = POISON.map(|order| format!("{order}/1")).chain([MALFORMED.to_owned()]).collect();
    let aside: BTreeSet<_> = notes.lines().filter_map(|line| Some(line.strip_prefix("aside ")?.to_owned())).collect();
    for tag in aside.difference(&bad) {
        wrong.push(format!("the message {tag} was set aside"));
    }
    for tag in bad.difference(&aside) {
        wrong.push(format!("the message {tag} was not set aside"));
    }
}
