//! Parts that the benches share: rounds that alternate between the sides, and a table of ratios and goals.
//!
//! Every comparison is a ratio of two figures that were measured in the same run. Each round measures every side once,
//! in changing order, so that a machine that slows down slows all sides. A line of the table is the ratio of the sides'
//! medians.

#![allow(clippy::missing_panics_doc)] // A bench that can't run stops.
#![allow(clippy::cast_precision_loss)] // Counts and times of a run are far below 2^52.
#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

pub mod by_hand;
pub mod handlers;
pub mod peer;
mod receipt;

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use idem_runtime::store::{Lease, Reservation, ReserveRequest};
use idem_runtime::{Key, Store};
use rustix::time::{ClockId, clock_gettime};

pub use self::receipt::Receipt;

/// Returns whether this run only shows that the benches work: `IDEM_BENCH_QUICK` is 1, or `cargo bench` did not start
/// the run.
pub fn is_quick() -> bool {
    std::env::var_os("IDEM_BENCH_QUICK").is_some_and(|value| value != "0")
        || !std::env::args().any(|it| it == "--bench")
}

/// Returns `full`, or `quick` in a run that only shows that the benches work.
pub fn sized<T>(full: T, quick: T) -> T {
    if is_quick() { quick } else { full }
}

/// Returns whether the command line selects the line `work`, as in
/// `cargo bench -p idem-benches --bench redis -- "replay"`.
pub fn is_wanted(work: &str) -> bool {
    let mut filters = std::env::args().skip(1).filter(|it| !it.starts_with('-')).peekable();
    filters.peek().is_none() || filters.any(|filter| work.contains(&filter))
}

/// Reserves `order_id` for longer than any bench takes, and returns the lease.
///
/// # Panics
/// If the order can't be reserved.
pub async fn hold(store: &dyn Store, scope: &'static str, order_id: u64) -> Lease {
    let request = ReserveRequest::new(
        Key::new(scope, format!("order:{order_id}")).expect("a valid key"),
        store.context().new_owner(),
        Duration::from_secs(3600),
        Duration::from_secs(7 * 86_400),
    );
    match store.reserve(&request).await {
        Ok(Reservation::Granted { lease, .. }) => lease,
        other => panic!("{other:?}"),
    }
}

/// Runs `work`, and returns the elapsed time.
pub fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

/// Runs `work`, and returns the processor time that this thread has used. Other processes do not change this time.
pub fn timed_on_cpu(work: impl FnOnce()) -> Duration {
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::try_from(now).expect("since the thread started")
    };
    let started = now();
    work();
    now().saturating_sub(started)
}

/// Converts the time that `count` calls took to nanoseconds per call.
pub fn nanos_each(took: Duration, count: usize) -> f64 {
    took.as_nanos() as f64 / count as f64
}

/// Converts the time that `count` calls took to thousands of calls per second.
pub fn thousands_per_second(took: Duration, count: usize) -> f64 {
    count as f64 / took.as_secs_f64() / 1e3
}

/// The measurements of one side, one value per round.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Returns the median of the rounds.
    pub fn median(&self) -> f64 {
        quantile(&self.0, 0.5)
    }

    /// Returns the bounds of the middle half of the rounds.
    pub fn middle_half(&self) -> (f64, f64) {
        (quantile(&self.0, 0.25), quantile(&self.0, 0.75))
    }

    /// Returns the largest value of all rounds.
    pub fn max(&self) -> f64 {
        quantile(&self.0, 1.0)
    }

    /// Combines the values of two sides, round by round, by `calculate`.
    #[must_use]
    pub fn with(&self, other: &Self, calculate: impl Fn(f64, f64) -> f64) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| calculate(*a, *b)).collect())
    }
}

impl From<Vec<f64>> for Samples {
    fn from(values: Vec<f64>) -> Self {
        Self(values)
    }
}

fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // From 0 to the last index.
    sorted[((sorted.len() - 1) as f64 * at).round() as usize]
}

/// Measures every side once per round, in an order that rotates from round to round. One extra round comes first and is
/// not counted.
pub fn alternate<const N: usize>(rounds: usize, mut sides: [&mut dyn FnMut() -> f64; N]) -> [Samples; N] {
    let samples = alternate_all(rounds, &mut sides);
    samples.try_into().expect("one for each side")
}

/// Measures like [`alternate`], for any number of sides.
pub fn alternate_all(rounds: usize, sides: &mut [&mut dyn FnMut() -> f64]) -> Vec<Samples> {
    let mut samples = vec![Vec::with_capacity(rounds); sides.len()];
    for round in 0..=rounds {
        for turn in 0..sides.len() {
            let side = (round + turn) % sides.len();
            let value = sides[side]();
            if round > 0 {
                samples[side].push(value);
            }
        }
    }
    samples.into_iter().map(Samples).collect()
}

/// Returns a side whose rounds take about `target` each, so that the duration of a bench is similar on all machines.
/// `side` makes a given number of calls and returns thousands of calls per second. The first round raises the number of
/// calls until the calls take about `target`. Then the rate of each round sets the number of calls in the next round,
/// which is at least `least`.
pub fn paced(target: Duration, least: u64, mut side: impl FnMut(u64) -> f64) -> impl FnMut() -> f64 {
    let mut count = None;
    move || {
        let mut calls = count.unwrap_or(least);
        loop {
            let rate = side(calls);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A moderate number of calls.
            let enough = (rate * 1e3 * target.as_secs_f64()) as u64;
            let done = count.is_some() || calls >= enough / 2;
            count = Some(enough.max(least));
            if done {
                return rate;
            }
            // The first calls may be slow, so the number of calls grows step by step.
            calls = enough.clamp(least, calls * 20);
            count = None;
        }
    }
}

/// Goal for the result of a line: a missed goal is printed, and does not fail the bench.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// The result should be this value or more.
    AtLeast(f64),
    /// The result should be this value or less.
    AtMost(f64),
    /// The library should have this share of the limit's throughput, or more.
    OfLimit(f64),
    /// The line has no goal, and only allows a comparison.
    None,
}

/// A table in Markdown, printed line by line during the measurement. If `IDEM_BENCH_OUT` names a file, each line is
/// also appended to that file, as JSON.
#[derive(Debug)]
pub struct Table {
    title: String,
    unit: String,
    result: String,
    has_limit: bool,
}

/// Measurements of the sides that a line of a table compares.
#[derive(Clone, Copy, Debug)]
pub struct Sides<'a> {
    /// Measurements of the hand-written code.
    pub raw: &'a Samples,
    /// Measurements of a client that does only the necessary work, as an upper limit for the library.
    pub limit: Option<&'a Samples>,
    /// Measurements of the library.
    pub idem: &'a Samples,
}

impl Table {
    /// Prints the head of a table. `result` names the result of a line, for example `ratio`.
    pub fn new(title: &str, unit: &str, result: &str) -> Self {
        Self::headed(title, unit, result, "")
    }

    /// Prints the head of a table whose lines may have a limit.
    pub fn with_limit(title: &str, unit: &str, result: &str) -> Self {
        Self::headed(title, unit, result, &format!("limit, {unit} | "))
    }

    fn headed(title: &str, unit: &str, result: &str, limit: &str) -> Self {
        let quick = if is_quick() { " (quick run: the figures mean nothing)" } else { "" };
        println!("\n### {title}{quick}\n");
        println!("| work | raw, {unit} | {limit}idem, {unit} | {result} | middle half of the rounds | goal | |");
        println!("|---{}|---|---|---|---|---|---|", if limit.is_empty() { "" } else { "|---" });
        let (title, unit, result) = (title.to_owned(), unit.to_owned(), result.to_owned());
        Self { title, unit, result, has_limit: !limit.is_empty() }
    }

    /// Prints a line: the medians of both sides, and the result of `calculate` for the library and the raw side.
    pub fn line(&self, work: &str, raw: &Samples, idem: &Samples, calculate: fn(f64, f64) -> f64, goal: Goal) {
        self.sides(work, &Sides { raw, limit: None, idem }, calculate, goal);
    }

    /// Prints a line that may have a limit.
    pub fn sides(&self, work: &str, sides: &Sides<'_>, calculate: fn(f64, f64) -> f64, goal: Goal) {
        let Sides { raw, limit, idem } = *sides;
        let rounds = idem.with(raw, calculate);
        let result = calculate(idem.median(), raw.median());
        let limit_column = match limit {
            _ if !self.has_limit => String::new(),
            Some(limit) => format!(" {} |", figure(limit.median())),
            None => " |".to_owned(),
        };
        let mut line = format!(
            "| {work} | {} |{limit_column} {} | **{}** |",
            figure(raw.median()),
            figure(idem.median()),
            figure(result)
        );
        let (low, high) = rounds.middle_half();
        write!(line, " {} to {} |", figure(low), figure(high)).unwrap();
        let share = limit.map_or(result, |limit| idem.median() / limit.median());
        let judged = Judged { goal, value: if matches!(goal, Goal::OfLimit(_)) { share } else { result } };
        println!("{line} {judged} |");
        self.record(work, [Some(raw), limit], idem, result, &rounds, judged);
    }

    /// Prints a line without a raw side.
    pub fn value(&self, work: &str, samples: &Samples, result: f64, goal: Goal) {
        let (low, high) = samples.middle_half();
        let judged = Judged { goal, value: result };
        println!(
            "| {work} | |{} {} | **{}** | {} to {} | {judged} |",
            if self.has_limit { " |" } else { "" },
            figure(samples.median()),
            figure(result),
            figure(low),
            figure(high)
        );
        self.record(work, [None, None], samples, result, samples, judged);
    }

    fn record(
        &self,
        work: &str,
        [raw, limit]: [Option<&Samples>; 2],
        idem: &Samples,
        result: f64,
        rounds: &Samples,
        judged: Judged,
    ) {
        let Some(path) = std::env::var_os("IDEM_BENCH_OUT") else { return };
        let side = |samples: &Samples| {
            let (low, high) = samples.middle_half();
            serde_json::json!({ "value": samples.median(), "low": low, "high": high })
        };
        let (low, high) = rounds.middle_half();
        let line = serde_json::json!({
            "bench": bench_name(),
            "table": self.title,
            "work": work,
            "tasks": tasks_of(work),
            "unit": self.unit,
            "raw": raw.map(side),
            "limit": limit.map(side),
            "idem": side(idem),
            "result": { "value": result, "low": low, "high": high, "means": self.result },
            "goal": judged.text(),
            "met": judged.is_met(),
            "quick": is_quick(),
        });
        // Benches run in the folder of their package, but the path is relative to the project's folder.
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        let file = std::fs::File::options().create(true).append(true).open(&path);
        let written = file.and_then(|mut file| writeln!(file, "{line}"));
        written.unwrap_or_else(|error| panic!("IDEM_BENCH_OUT: {}: {error}", path.display()));
    }
}

/// Returns the name of the bench: `redis` of `redis-0d6e3af7d9172b91`, as cargo names the program.
fn bench_name() -> String {
    let program = std::env::args().next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy();
    name.rsplit_once('-').map_or_else(|| name.to_string(), |(name, _)| name.to_owned())
}

/// Returns the number of tasks in the name of a line: the number before "task" or "tasks".
fn tasks_of(work: &str) -> Option<u64> {
    let words: Vec<&str> = work.split([' ', ',', ')']).collect();
    words.windows(2).find(|pair| pair[1].starts_with("task")).and_then(|pair| pair[0].parse().ok())
}

/// A goal, and the value that is compared with it: the result of a line, or the library's share of the limit.
#[derive(Clone, Copy)]
struct Judged {
    goal: Goal,
    value: f64,
}

impl Judged {
    fn text(self) -> Option<String> {
        match self.goal {
            Goal::AtLeast(goal) => Some(format!("≥ {goal}")),
            Goal::AtMost(goal) => Some(format!("≤ {goal}")),
            Goal::OfLimit(goal) => Some(format!("≥ {goal} of the limit; has {}", figure(self.value))),
            Goal::None => None,
        }
    }

    fn is_met(self) -> Option<bool> {
        match self.goal {
            Goal::AtLeast(goal) | Goal::OfLimit(goal) => Some(self.value >= goal),
            Goal::AtMost(goal) => Some(self.value <= goal),
            Goal::None => None,
        }
    }
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(text) = self.text() else { return f.write_str(" | ") };
        let met = match self.is_met() {
            _ if is_quick() => "",
            Some(true) => "met",
            _ => "MISSED",
        };
        write!(f, "{text} | {met}")
    }
}

/// Formats a number with three digits.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_has_some_150_bytes_of_json() {
        let bytes = serde_json::to_vec(&Receipt::of(1_000_000)).unwrap();
        assert!((140..160).contains(&bytes.len()), "{}", bytes.len());
    }

    #[test]
    fn the_side_that_a_round_measures_first_rotates() {
        let order = std::cell::RefCell::new(String::new());
        let side = |name| {
            let order = &order;
            move || {
                order.borrow_mut().push(name);
                1.0
            }
        };
        alternate(2, [&mut side('a'), &mut side('b')]);
        assert_eq!(*order.borrow(), "abbaab");
    }

    #[test]
    fn a_paced_side_makes_as_many_calls_as_fit() {
        let made = std::cell::RefCell::new(Vec::new());
        // This side makes 10 thousand calls per second, after slow first calls.
        let side = |count: u64| {
            made.borrow_mut().push(count);
            if count < 100 { 1.0 } else { 10.0 }
        };
        let mut paced = paced(Duration::from_millis(100), 10, side);
        paced();
        paced();
        assert_eq!(*made.borrow(), [10, 100, 1000, 1000]);
    }

    #[test]
    fn the_number_of_tasks_is_read_from_the_name_of_a_line() {
        assert_eq!(tasks_of("first run, 64 tasks (against default socket)"), Some(64));
        assert_eq!(tasks_of("first run, FULL, 1 task"), Some(1));
        assert_eq!(tasks_of("one beat of 10 000 leases"), None);
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let samples = Samples::from(vec![5.0, 1.0, 3.0]);
        assert!((samples.median() - 3.0).abs() < f64::EPSILON);
        assert!((samples.max() - 5.0).abs() < f64::EPSILON);
    }
}
