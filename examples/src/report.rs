//! The table at the end, and the check of its figures.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use idem_runtime::{Disposition, Outcome, Refusal};

use crate::{Event, Order};

/// A kind of event that an example counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// A message was delivered.
    Delivery,
    /// A delivery ran the handler, and the result was recorded.
    Handled,
    /// A delivery got the recorded result.
    Replay,
    /// A delivery ended with an error; the broker delivers the message again.
    Failure,
    /// A delivery was rejected because another delivery's handler was running; the broker delivers the message again.
    InProgress,
    /// A message was set aside, for a decision of a person.
    DeadLetter,
    /// The body of the handler started.
    BodyRun,
    /// A delivery waited for a running attempt.
    Wait,
    /// A worker died.
    WorkerDied,
    /// An attempt took over the key of a dead attempt.
    Takeover,
    /// The payment provider got a repeated request for a charge that existed.
    RepeatedCharge,
    /// An order had a recorded result before this run.
    FinishedBefore,
    /// An order has a recorded result after this run.
    OnRecord,
}

impl Count {
    /// All kinds of counts, in the order of the table.
    pub const ALL: [Self; 13] = [
        Self::Delivery,
        Self::Handled,
        Self::Replay,
        Self::Failure,
        Self::InProgress,
        Self::DeadLetter,
        Self::BodyRun,
        Self::Wait,
        Self::WorkerDied,
        Self::Takeover,
        Self::RepeatedCharge,
        Self::FinishedBefore,
        Self::OnRecord,
    ];

    /// Ways in which a delivery can end. A delivery that ended in none of these ways was cut off by the death of its
    /// worker.
    const ENDS: [Self; 5] = [Self::Handled, Self::Replay, Self::Failure, Self::InProgress, Self::DeadLetter];

    /// Returns the name of the count in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Delivery => "deliveries",
            Self::Handled => "  handled",
            Self::Replay => "  replayed",
            Self::Failure => "  failed",
            Self::InProgress => "  rejected",
            Self::DeadLetter => "  set aside",
            Self::BodyRun => "handler runs",
            Self::Wait => "waits",
            Self::WorkerDied => "workers that died",
            Self::Takeover => "takeovers",
            Self::RepeatedCharge => "repeated charges refused",
            Self::FinishedBefore => "results of earlier runs",
            Self::OnRecord => "results on record",
        }
    }

    /// Returns the explanation of the count in the table.
    fn note(self, idempotent: bool) -> &'static str {
        match self {
            Self::Delivery => "each message at least once; they ended in these ways:",
            Self::Handled if idempotent => "the handler ran and its result was recorded",
            Self::Handled => "the handler ran to its end",
            Self::Replay => "answered with the recorded result; the handler did not run",
            Self::Failure => "the handler returned an error; delivered again",
            Self::InProgress => "the handler was running for another delivery; delivered again",
            Self::DeadLetter => "for a person to look at",
            Self::BodyRun => "those handled, those failed, and those cut off while they ran",
            Self::Wait => "for a handler that was running for another delivery",
            Self::WorkerDied => "in the middle of handlers",
            Self::Takeover => "runs that began after the lease of a dead worker had lapsed",
            Self::RepeatedCharge => "a later run asked again; the provider recognised its key",
            Self::FinishedBefore => "found in the store at the start",
            Self::OnRecord => "one for each order, also where the worker died after recording it",
        }
    }
}

/// Returns the counts that one delivery to an idempotent handler adds: the count of its end, and the counts of its wait
/// and its takeover.
pub fn counts(outcome: &Outcome) -> impl Iterator<Item = Count> {
    let end = if outcome.replayed() {
        Count::Replay
    } else if outcome.executed() && outcome.recorded() {
        Count::Handled
    } else if outcome.disposition() == Disposition::DeadLetter {
        Count::DeadLetter
    } else if outcome.refusal() == Some(Refusal::InProgress) {
        Count::InProgress
    } else {
        Count::Failure
    };
    let met = [(outcome.waited(), Count::Wait), (outcome.took_over(), Count::Takeover)];
    [end].into_iter().chain(met.into_iter().filter_map(|(happened, count)| happened.then_some(count)))
}

/// Number of occurrences of each [`Count`].
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

/// Books of a payment provider that accepts idempotency keys: at most one charge for each key.
#[derive(Default, Debug)]
pub struct Charges(HashMap<String, Order>);

impl Charges {
    /// Charges the customer of `order`, unless a charge under `payment_key` exists.
    pub fn charge(&mut self, payment_key: String, order: &Order) -> bool {
        let charges = self.0.len();
        self.0.entry(payment_key).or_insert_with(|| order.clone());
        self.0.len() > charges
    }

    /// Returns whether there is a charge under `payment_key`.
    pub fn contains(&self, payment_key: &str) -> bool {
        self.0.contains_key(payment_key)
    }
}

/// Result of an example, with the figures that its last table shows.
#[derive(Debug)]
pub struct Report {
    idempotent: bool,
    events: usize,
    orders: usize,
    malformed: usize,
    counts: Counts,
    /// For each currency, the amount in the file and the amount charged.
    totals: BTreeMap<String, (u128, u128)>,
    double: usize,
    missing: usize,
}

impl Report {
    /// Compares the orders in the file with the charges of the payment provider.
    ///
    /// If the file has several amounts for one order, any of these amounts is right; the other messages are dead
    /// letters.
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

    /// Returns whether every order was charged and handled exactly once.
    pub fn is_correct(&self) -> bool {
        self.problems().is_empty()
    }

    /// Returns the number of needless runs of handlers, for orders that had a result. The idempotency of the payment
    /// provider must not hide such runs.
    fn needless(&self) -> u64 {
        let open = (self.orders as u64).saturating_sub(self.counts.get(Count::FinishedBefore));
        self.counts.get(Count::Handled).saturating_sub(open)
    }

    /// Returns the number of deliveries that were cut off because their workers died.
    fn cut_off(&self) -> u64 {
        let ended = Count::ENDS.map(|end| self.counts.get(end)).iter().sum();
        self.counts.get(Count::Delivery).saturating_sub(ended)
    }

    /// Lists the reasons why the result is not correct, each in a few words.
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut add = |is_wrong: bool, problem: String| problems.extend(is_wrong.then_some(problem));
        add(
            self.needless() > 0,
            format!("orders that were done were handled again {}", several(self.needless(), "time", "times")),
        );
        add(self.double > 0, format!("{} too many", several(self.double, "charge", "charges")));
        add(self.missing > 0, format!("{} not charged", several(self.missing, "order", "orders")));
        for (currency, (due, charged)) in &self.totals {
            add(charged > due, format!("{currency} {} too much", money(charged.saturating_sub(*due))));
            add(charged < due, format!("{currency} {} too little", money(due.saturating_sub(*charged))));
        }
        let unrecorded = (self.orders as u64).saturating_sub(self.counts.get(Count::OnRecord));
        add(
            self.idempotent && unrecorded > 0,
            format!("{} without a recorded result", several(unrecorded, "order", "orders")),
        );
        problems
    }

    fn verdict(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.problems();
        let [deliveries, failures, died, runs, before, repeated] = [
            Count::Delivery,
            Count::Failure,
            Count::WorkerDied,
            Count::BodyRun,
            Count::FinishedBefore,
            Count::RepeatedCharge,
        ]
        .map(|count| self.counts.get(count));
        if !problems.is_empty() {
            writeln!(f, "WRONG: {}.", problems.join(", "))?;
        } else if self.orders == 0 {
            writeln!(f, "There was nothing to charge.")?;
        } else if runs == 0 && before > 0 {
            writeln!(
                f,
                "No handler ran: {} got the results that earlier runs had recorded. Every order was charged exactly once.",
                several(deliveries, "delivery", "deliveries"),
            )?;
        } else {
            writeln!(
                f,
                "Every order was charged exactly once, over {}, {} and {}.",
                several(deliveries, "delivery", "deliveries"),
                several(failures, "failure", "failures"),
                several(died, "dead worker", "dead workers"),
            )?;
        }
        // Without the attribute, only the payment provider's keys prevented double charges.
        if !self.idempotent {
            if repeated > 0 {
                let refused = several(repeated, "repeated charge", "repeated charges");
                writeln!(
                    f,
                    "The provider refused {refused}, as the handler passes it one key for each order. An effect"
                )?;
                writeln!(f, "without such a key (an e-mail, a parcel, a row) would have happened again each time.")?;
            }
            writeln!(f, "The same deliveries come out right with `#[idempotent]`: leave `--without-idempotency` out.")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row =
            |label: &str, value: String, note: &str| format!("  {label:<24}{value:>16}   {note}").trim_end().to_owned();
        let rows_of = |counts: &[Count]| -> Vec<_> {
            let counted = counts.iter().filter(|count| self.counts.get(**count) > 0);
            counted
                .map(|count| row(count.name(), number(self.counts.get(*count)), count.note(self.idempotent)))
                .collect()
        };
        let mut file = vec![row(
            "events in the file",
            number(self.events),
            &format!("for {}", several(self.orders, "order", "orders")),
        )];
        if self.malformed > 0 {
            file.push(row("malformed lines", number(self.malformed), "skipped"));
        }
        file.extend(rows_of(&[Count::FinishedBefore]));

        let mut deliveries = rows_of(&[Count::Delivery]);
        deliveries.extend(rows_of(&Count::ENDS));
        if self.cut_off() > 0 {
            deliveries.push(row("  cut off", number(self.cut_off()), "their workers died; delivered again"));
        }

        let met = rows_of(&[Count::BodyRun, Count::Wait, Count::WorkerDied, Count::Takeover, Count::RepeatedCharge]);

        let mut books = rows_of(&[Count::OnRecord]);
        for (currency, (due, charged)) in &self.totals {
            let note = if due == charged { "as due".to_owned() } else { format!("due: {}", money(*due)) };
            books.push(row(&format!("{currency} charged"), money(*charged), &note));
        }
        books.push(row("charges too many", number(self.double), ""));
        books.push(row("orders not charged", number(self.missing), ""));

        for group in [file, deliveries, met, books].into_iter().filter(|group| !group.is_empty()) {
            writeln!(f, "{}\n", group.join("\n"))?;
        }
        self.verdict(f)
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
    use std::collections::HashSet;

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
        let mut counts = Counts::default();
        let orders: HashSet<_> = events.iter().map(|event| &event.order.order_id).collect();
        counts.add(Count::OnRecord, orders.len() as u64);
        Report::new(events, 0, counts, &charges, true)
    }

    #[test]
    fn an_order_with_repeated_lines_is_due_once() {
        let events = [event(0, "A", 100), event(1, "B", 250), event(2, "A", 100)];
        let [a, b, _] = &events;
        let right = report(&events, &[("1", a), ("2", b), ("1", a)]);
        assert!(right.is_correct(), "{right}");
        assert_eq!(right.totals["EUR"], (350, 350));
        let double = report(&events, &[("1", a), ("2", b), ("3", a)]);
        assert_eq!((double.is_correct(), double.double, double.missing), (false, 1, 0));
        assert!(double.to_string().ends_with("WRONG: 1 charge too many, EUR 1.00 too much.\n"), "{double}");
        let missing = report(&events, &[("1", a)]);
        assert_eq!((missing.is_correct(), missing.double, missing.missing), (false, 0, 1));
        assert!(missing.to_string().ends_with("WRONG: 1 order not charged, EUR 2.50 too little.\n"), "{missing}");
    }

    #[test]
    fn an_order_with_several_amounts_is_due_once_with_any_of_them() {
        let events = [event(0, "A", 100), event(1, "A", 999)];
        let [first, second] = &events;
        assert!(report(&events, &[("1", first)]).is_correct());
        assert!(report(&events, &[("1", second)]).is_correct());
        assert!(!report(&events, &[("1", first), ("2", second)]).is_correct());
        assert!(!report(&events, &[("1", &event(0, "A", 5))]).is_correct());
    }

    #[test]
    fn a_second_run_for_an_order_is_reported() {
        let events = [event(0, "A", 100)];
        let mut right = report(&events, &[("1", &events[0])]);
        right.counts.add(Count::Handled, 1);
        assert!(right.is_correct());
        right.counts.add(Count::Handled, 1);
        assert!(!right.is_correct());
        assert!(right.to_string().ends_with("WRONG: orders that were done were handled again 1 time.\n"), "{right}");
    }

    #[test]
    fn an_order_without_a_recorded_result_is_reported() {
        let events = [event(0, "A", 100)];
        let mut right = report(&events, &[("1", &events[0])]);
        right.counts = Counts::default();
        assert!(right.to_string().ends_with("WRONG: 1 order without a recorded result.\n"), "{right}");
        right.idempotent = false;
        assert!(right.is_correct());
    }

    #[test]
    fn orders_of_earlier_runs_are_not_handled_again() {
        let events = [event(0, "A", 100), event(1, "B", 250)];
        let mut again = report(&events, &[("1", &events[0]), ("2", &events[1])]);
        again.counts.add(Count::FinishedBefore, 1);
        again.counts.add(Count::BodyRun, 1);
        again.counts.add(Count::Handled, 1);
        assert!(again.is_correct(), "{again}");
        again.counts.add(Count::Handled, 1);
        assert!(!again.is_correct());

        let mut replayed = report(&events, &[("1", &events[0]), ("2", &events[1])]);
        replayed.counts.add(Count::FinishedBefore, 2);
        replayed.counts.add(Count::Delivery, 3);
        replayed.counts.add(Count::Replay, 3);
        let text = replayed.to_string();
        assert!(text.contains("results of earlier runs"), "{text}");
        assert!(
            text.contains("No handler ran: 3 deliveries got the results that earlier runs had recorded."),
            "{text}"
        );
    }

    #[test]
    fn each_delivery_counts_in_exactly_one_row() {
        let events = [event(0, "A", 100)];
        let mut died = report(&events, &[("1", &events[0])]);
        died.counts.add(Count::Delivery, 5);
        Count::ENDS[..4].iter().for_each(|end| died.counts.add(*end, 1));
        assert_eq!(died.cut_off(), 1);
        assert!(
            died.to_string().contains("\n    cut off                              1   their workers died"),
            "{died}"
        );
    }

    #[test]
    fn a_run_without_orders_is_correct_if_nothing_was_charged() {
        assert!(report(&[], &[]).is_correct());
        assert!(!report(&[], &[("1", &event(0, "A", 5))]).is_correct());
    }

    #[test]
    fn numbers_are_written_in_groups_of_three_digits() {
        assert_eq!([number(0_u64), number(999_u64), number(1_234_567_u64)], ["0", "999", "1,234,567"]);
        assert_eq!([money(5), money(123_456)], ["0.05", "1,234.56"]);
    }
}
