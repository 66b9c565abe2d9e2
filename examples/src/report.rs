//! The table at the end, and the check of its figures.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use idem_runtime::{Disposition, Outcome, Refusal};

use crate::{Event, Order};

/// An event that is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// An order was finished by an earlier run.
    FinishedBefore,
    /// A message was delivered.
    Delivery,
    /// The body of the handler started.
    BodyRun,
    /// The result of a body was recorded.
    Record,
    /// A duplicate got the recorded result.
    Replay,
    /// A duplicate waited for the running attempt.
    Wait,
    /// A duplicate stopped waiting.
    InProgress,
    /// A body failed and must run again.
    Failure,
    /// A worker died.
    WorkerDied,
    /// An attempt took over from a dead one.
    Takeover,
    /// The payment provider was asked again for a charge that it had already made.
    RepeatedCharge,
    /// A message was set aside for a person.
    DeadLetter,
}

impl Count {
    /// All, in the order of the table.
    pub const ALL: [Self; 12] = [
        Self::FinishedBefore,
        Self::Delivery,
        Self::BodyRun,
        Self::Record,
        Self::Replay,
        Self::Wait,
        Self::InProgress,
        Self::Failure,
        Self::WorkerDied,
        Self::Takeover,
        Self::RepeatedCharge,
        Self::DeadLetter,
    ];

    /// The name in the table.
    pub fn name(self) -> &'static str {
        self.label().0
    }

    /// The name in the table, and a short explanation.
    fn label(self) -> (&'static str, &'static str) {
        match self {
            Self::FinishedBefore => ("orders finished before", "by earlier runs, whose records were kept"),
            Self::Delivery => ("deliveries", "duplicates and redeliveries included"),
            Self::BodyRun => ("handler bodies run", ""),
            Self::Record => ("results recorded", "at most one for each order; who dies counts no more"),
            Self::Replay => ("replays", "answered from the record"),
            Self::Wait => ("waits", "for an attempt that was running"),
            Self::InProgress => ("rejected, in progress", "and delivered again later"),
            Self::Failure => ("failures, then retried", ""),
            Self::WorkerDied => ("workers that died", "in the middle of handlers"),
            Self::Takeover => ("takeovers", "of attempts that had died"),
            Self::RepeatedCharge => ("repeated charges refused", "by the provider, which knew their `child_key`"),
            Self::DeadLetter => ("dead letters", ""),
        }
    }
}

/// The counts that one delivery to an idempotent handler adds.
pub fn counts(outcome: &Outcome) -> impl Iterator<Item = Count> {
    let retried = matches!(outcome.disposition(), Disposition::Retry { .. });
    [
        (outcome.executed() && outcome.recorded(), Count::Record),
        (outcome.replayed(), Count::Replay),
        (outcome.waited(), Count::Wait),
        (outcome.took_over(), Count::Takeover),
        (outcome.refusal() == Some(Refusal::InProgress), Count::InProgress),
        (outcome.executed() && retried, Count::Failure),
        (outcome.disposition() == Disposition::DeadLetter, Count::DeadLetter),
    ]
    .into_iter()
    .filter_map(|(happened, count)| happened.then_some(count))
}

/// How often each [`Count`] happened.
#[derive(Clone, Default, Debug)]
pub struct Counts([u64; Count::ALL.len()]);

impl Counts {
    /// Adds `times` to a count.
    pub fn add(&mut self, count: Count, times: u64) {
        self.0[count as usize] += times;
    }

    fn get(&self, count: Count) -> u64 {
        self.0[count as usize]
    }
}

/// The books of a payment provider that accepts idempotency keys: each charge under its key.
#[derive(Default, Debug)]
pub struct Charges(HashMap<String, Order>);

impl Charges {
    /// Charges the customer of `order`, unless that was done under `payment_key` before.
    pub fn charge(&mut self, payment_key: String, order: &Order) -> bool {
        let charges = self.0.len();
        self.0.entry(payment_key).or_insert_with(|| order.clone());
        self.0.len() > charges
    }

    /// Whether there is a charge under `payment_key`.
    pub fn contains(&self, payment_key: &str) -> bool {
        self.0.contains_key(payment_key)
    }
}

/// The result of an example.
#[derive(Debug)]
pub struct Report {
    idempotent: bool,
    events: usize,
    orders: usize,
    malformed: usize,
    counts: Counts,
    /// Amounts in the file and amounts charged, by currency.
    totals: BTreeMap<String, (u128, u128)>,
    double: usize,
    missing: usize,
}

impl Report {
    /// Compares the file with the charges.
    ///
    /// If the file has several amounts for one order, any one of them is right; the others are dead letters.
    pub fn new(events: &[Event], malformed: usize, counts: Counts, charges: &Charges, idempotent: bool) -> Self {
        let mut versions: HashMap<&str, Vec<&Order>> = HashMap::new();
        for Event { order, .. } in events {
            versions.entry(&order.order_id).or_default().push(order);
        }
        let mut by_order: HashMap<&str, Vec<&Order>> = HashMap::new();
        let mut totals = BTreeMap::<_, (u128, u128)>::new();
        for order in charges.0.values() {
            by_order.entry(&order.order_id).or_default().push(order);
            totals.entry(order.currency.clone()).or_default().1 += u128::from(order.amount_cents);
        }
        let (mut double, mut missing) = (0, 0);
        for (order_id, versions) in &versions {
            let charges = by_order.get(order_id).map(Vec::as_slice).unwrap_or_default();
            double += charges.len().saturating_sub(1);
            missing += usize::from(charges.is_empty());
            let due = charges.first().filter(|charge| versions.contains(charge)).unwrap_or(&versions[0]);
            totals.entry(due.currency.clone()).or_default().0 += u128::from(due.amount_cents);
        }
        Self { idempotent, events: events.len(), orders: versions.len(), malformed, counts, totals, double, missing }
    }

    /// Whether every order was charged exactly once.
    pub fn is_correct(&self) -> bool {
        let totals_agree = self.totals.values().all(|(due, charged)| due == charged);
        self.double == 0 && self.missing == 0 && totals_agree && self.needless() == 0
    }

    /// How often an order was handled to the end although its result was already recorded. The payment provider's own
    /// idempotency must not hide this.
    fn needless(&self) -> u64 {
        let open = (self.orders as u64).saturating_sub(self.counts.get(Count::FinishedBefore));
        self.counts.get(Count::Record).saturating_sub(open)
    }

    fn sentence(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_correct() && self.orders == 0 {
            return writeln!(f, "There was nothing to charge.");
        }
        if self.is_correct() {
            let [deliveries, failures, died] =
                [Count::Delivery, Count::Failure, Count::WorkerDied].map(|count| self.counts.get(count));
            if self.counts.get(Count::BodyRun) == 0 && self.counts.get(Count::FinishedBefore) > 0 {
                return writeln!(
                    f,
                    "Nothing ran: {} got what earlier runs have recorded. Every order was charged exactly once.",
                    several(deliveries, "delivery", "deliveries"),
                );
            }
            return writeln!(
                f,
                "Every order was charged exactly once, over {}, {} and {}.",
                several(deliveries, "delivery", "deliveries"),
                several(failures, "failure", "failures"),
                several(died, "dead worker", "dead workers"),
            );
        }
        let double = several(self.double, "charge", "charges");
        write!(f, "WRONG: {double} too many, {} missing", number(self.missing))?;
        for (currency, (due, charged)) in &self.totals {
            match charged.checked_sub(*due) {
                Some(0) => {}
                Some(more) => write!(f, ", {currency} {} too much", money(more))?,
                None => write!(f, ", {currency} {} too little", money(due - charged))?,
            }
        }
        if self.needless() > 0 {
            write!(f, ", {} handled again", several(self.needless(), "finished order", "finished orders"))?;
        }
        writeln!(f, ".")?;
        if !self.idempotent {
            writeln!(f, "The same deliveries come out right with `#[idempotent]`: leave `--without-idempotency` out.")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |label: &str, value: String, note: &str| {
            writeln!(f, "{}", format!("  {label:<26}{value:>18}   {note}").trim_end())
        };
        row("events in the file", number(self.events), &several(self.orders, "order", "orders"))?;
        row("malformed lines", number(self.malformed), "")?;
        for count in Count::ALL {
            if count == Count::FinishedBefore && self.counts.get(count) == 0 {
                continue;
            }
            let (label, note) = count.label();
            row(label, number(self.counts.get(count)), note)?;
        }
        for (currency, (due, charged)) in &self.totals {
            row(&format!("{currency} in the file"), money(*due), "")?;
            row(&format!("{currency} charged"), money(*charged), "")?;
        }
        row("double charges", number(self.double), "")?;
        row("missing charges", number(self.missing), "")?;
        writeln!(f)?;
        self.sentence(f)
    }
}

fn number(value: impl TryInto<u128>) -> String {
    let digits = value.try_into().unwrap_or(u128::MAX).to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap_or("")).collect();
    groups.join(",")
}

fn several<N: TryInto<u128>>(value: N, one: &str, many: &str) -> String {
    let value = number(value);
    let noun = if value == "1" { one } else { many };
    format!("{value} {noun}")
}

fn money(cents: u128) -> String {
    format!("{}.{:02}", number(cents / 100), cents % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(index: usize, order_id: &str, amount_cents: u64) -> Event {
        let order = Order { order_id: order_id.into(), customer: "Ada".into(), amount_cents, currency: "EUR".into() };
        Event { index, line: index + 1, order }
    }

    fn report(events: &[Event], calls: &[(&str, &Event)]) -> Report {
        let mut charges = Charges::default();
        for (key, event) in calls {
            charges.charge((*key).to_owned(), &event.order);
        }
        Report::new(events, 0, Counts::default(), &charges, true)
    }

    #[test]
    fn each_order_is_due_once() {
        let events = [event(0, "A", 100), event(1, "B", 250), event(2, "A", 100)];
        let [a, b, _] = &events;
        let right = report(&events, &[("1", a), ("2", b), ("1", a)]);
        assert!(right.is_correct(), "{right}");
        assert_eq!(right.totals["EUR"], (350, 350));
        let double = report(&events, &[("1", a), ("2", b), ("3", a)]);
        assert_eq!((double.is_correct(), double.double, double.missing), (false, 1, 0));
        assert!(double.to_string().ends_with("WRONG: 1 charge too many, 0 missing, EUR 1.00 too much.\n"), "{double}");
        let missing = report(&events, &[("1", a)]);
        assert_eq!((missing.is_correct(), missing.double, missing.missing), (false, 0, 1));
    }

    #[test]
    fn one_of_several_amounts_is_due() {
        let events = [event(0, "A", 100), event(1, "A", 999)];
        let [first, second] = &events;
        assert!(report(&events, &[("1", first)]).is_correct());
        assert!(report(&events, &[("1", second)]).is_correct());
        assert!(!report(&events, &[("1", first), ("2", second)]).is_correct());
        assert!(!report(&events, &[("1", &event(0, "A", 5))]).is_correct());
    }

    #[test]
    fn a_second_record_is_noticed() {
        let events = [event(0, "A", 100)];
        let mut right = report(&events, &[("1", &events[0])]);
        right.counts.add(Count::Record, 1);
        assert!(right.is_correct());
        right.counts.add(Count::Record, 1);
        assert!(!right.is_correct());
        assert!(right.to_string().ends_with(", 1 finished order handled again.\n"), "{right}");
    }

    #[test]
    fn what_earlier_runs_have_finished_is_not_finished_again() {
        let events = [event(0, "A", 100), event(1, "B", 250)];
        let mut again = report(&events, &[("1", &events[0]), ("2", &events[1])]);
        again.counts.add(Count::FinishedBefore, 1);
        again.counts.add(Count::BodyRun, 1);
        again.counts.add(Count::Record, 1);
        assert!(again.is_correct(), "{again}");
        again.counts.add(Count::Record, 1);
        assert!(!again.is_correct());

        let mut replayed = report(&events, &[("1", &events[0]), ("2", &events[1])]);
        replayed.counts.add(Count::FinishedBefore, 2);
        replayed.counts.add(Count::Delivery, 3);
        let text = replayed.to_string();
        assert!(text.contains("orders finished before"), "{text}");
        assert!(text.contains("Nothing ran: 3 deliveries got what earlier runs have recorded."), "{text}");
    }

    #[test]
    fn nothing_adds_up() {
        assert!(report(&[], &[]).is_correct());
        assert!(!report(&[], &[("1", &event(0, "A", 5))]).is_correct());
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([number(0_u64), number(999_u64), number(1_234_567_u64)], ["0", "999", "1,234,567"]);
        assert_eq!([money(5), money(123_456)], ["0.05", "1,234.56"]);
    }
}
