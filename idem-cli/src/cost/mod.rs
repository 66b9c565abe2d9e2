//! `idem cost`: the cost of calls in units of the store, measured there with its own records.

#[cfg(feature = "dynamodb")]
pub(crate) mod dynamodb;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
mod prices;
#[cfg(feature = "redis")]
pub(crate) mod redis;

use std::fmt;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Action, Decision, Finish, Lease, Reservation, ReserveRequest, Verdict, renew_all};
use idem_runtime::{Json, Key, Store};
use serde_json::{Map, Value, json};

use self::prices::Prices;
use crate::report::{Output, STATUSES, Stop};
use crate::store::StoreArguments;

/// Lease for the measurement: longer than a run, short enough that leftovers of a killed run vanish soon.
const LEASE: Duration = Duration::from_secs(120);
const TTL: Duration = Duration::from_secs(120);
/// Number of measurements of each size. The least counts, because other load on the server can only add to it.
const ROUNDS: usize = 3;
const DAYS_A_MONTH: f64 = 30.0;

/// Measures the cost of a million calls in units of this store, and the price of a month at your prices.
///
/// Makes some hundred records in the scope `idem-cost`, one after the other, and removes them again. Calls of many
/// concurrent tasks share commits and round trips, and so cost less. No price is built in.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct CostArguments {
    #[command(flatten)]
    store: StoreArguments,
    /// Sizes of recorded results, in bytes
    #[arg(long, value_name = "N", value_delimiter = ',', default_values = ["100", "1000", "10000"])]
    result_bytes: Vec<usize>,
    /// First runs and duplicates per day
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = at_least_zero)]
    calls_per_day: f64,
    /// Number of duplicates in 100 calls
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = percent)]
    duplicates: f64,
    /// Renewals of a lease in a first run: its duration divided by a third of the lease, rounded down
    #[arg(long, value_name = "N", default_value = "0", value_parser = at_least_zero)]
    renewals: f64,
    /// Retention of a record, in days
    #[arg(long, value_name = "DAYS", default_value = "7", value_parser = at_least_zero)]
    ttl_days: f64,
    /// Price of a unit, by its name (docs/cli.md lists the names)
    #[arg(long = "price", value_name = "NAME=NUMBER")]
    prices: Vec<String>,
    /// File with one such price per line
    #[arg(long = "prices", value_name = "FILE")]
    price_file: Option<std::path::PathBuf>,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

fn at_least_zero(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "write a number, 0 or more".to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    at_least_zero(text).ok().filter(|number| *number <= 100.0).ok_or_else(|| "write a number from 0 to 100".to_owned())
}

/// A unit that is counted for each call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// Name for the output, and for the JSON field.
    pub(crate) name: &'static str,
    /// Name of the price, and the number of these units that it covers.
    pub(crate) price: Option<(&'static str, f64)>,
}

/// A measurement, as a future.
pub(crate) type Measured<'a, T> = Pin<Box<dyn Future<Output = Result<T, Stop>> + 'a>>;

/// The store under measurement, and its counters.
pub(crate) trait Meter {
    fn store(&self) -> Arc<dyn Store>;

    /// Returns the units that are counted for each call, in the order of [`count`](Meter::count).
    fn units(&self) -> &'static [Unit];

    /// Returns the number of records in a round.
    fn records(&self) -> usize;

    /// Returns the counts so far.
    fn count(&self) -> Measured<'_, Vec<f64>>;

    /// Returns the bytes that the record of the key takes in the store, including its share of indexes.
    fn stored<'a>(&'a self, key: &'a Key) -> Measured<'a, f64>;

    /// Lists the costs that the figures leave out.
    fn notes(&self) -> &'static [&'static str];
}

/// The measured kinds of work on a record.
const WORK: [&str; 4] = ["first run", "replay", "duplicate of a running call", "renewal"];
const FIRST_RUN: usize = 0;
const REPLAY: usize = 1;
const RENEWAL: usize = 3;

/// Costs of the calls for one size of result.
struct Costs {
    bytes: usize,
    /// By index in [`WORK`], then by unit.
    units: [Vec<f64>; 4],
    stored: f64,
}

pub(crate) async fn main(arguments: &CostArguments) -> Result<ExitCode, Stop> {
    let place = arguments.store.place()?;
    let meter = place.meter(arguments.store.namespace()?, arguments.store.timeout()).await?;
    let units = meter.units();
    let prices = Prices::read(&arguments.prices, arguments.price_file.as_deref(), &names(units))?;
    let mut all = Vec::new();
    for bytes in &arguments.result_bytes {
        all.push(measure(&*meter, *bytes).await?);
    }
    print(arguments, place.kind(), units, &all, meter.notes(), &prices)
}

/// Returns the names of all prices.
fn names(units: &[Unit]) -> Vec<&'static str> {
    units.iter().filter_map(|unit| unit.price.map(|(name, _)| name)).chain(["gb_month"]).collect()
}

/// Measures several rounds, returns the least costs, and removes all records.
async fn measure(meter: &dyn Meter, bytes: usize) -> Result<Costs, Stop> {
    let mut least: Option<Costs> = None;
    for _ in 0..ROUNDS {
        let mut leases = Vec::new();
        let measured = round(meter, bytes, &mut leases).await;
        let removed = remove(&*meter.store(), &leases).await;
        let costs = measured?;
        removed?;
        least = Some(match least {
            None => costs,
            Some(mut least) => {
                for (least, now) in least.units.iter_mut().flatten().zip(costs.units.iter().flatten()) {
                    *least = least.min(*now);
                }
                least
            }
        });
    }
    least.ok_or_else(|| Stop::Usage("nothing was measured".to_owned()))
}

async fn remove(store: &dyn Store, leases: &[Lease]) -> Result<(), Stop> {
    for lease in leases {
        for action in [Action::BreakLease, Action::Forget] {
            let Some(found) = store.inspect(&lease.key).await? else { continue };
            let _ = store.decide(&Decision::new(&lease.key, &found, action)).await?;
        }
    }
    Ok(())
}

async fn round(meter: &dyn Meter, bytes: usize, leases: &mut Vec<Lease>) -> Result<Costs, Stop> {
    let store = meter.store();
    let beats = store.heartbeats();
    // Unique, so that two concurrent measurements use different keys.
    let owner = beats.new_owner();
    let name = owner.as_bytes().iter().fold(String::new(), |name, byte| format!("{name}{byte:02x}"));
    let request = |n: usize| {
        // As long as a key that contains a UUID.
        let key = Key::new("idem-cost", format!("order:{name}:{n:03}")).expect("a short key");
        ReserveRequest::new(key, beats.new_owner(), LEASE, TTL).holder(beats.holder())
    };
    let count = meter.records();
    // First run every operation once, so that one-time costs are not counted: connections, prepared statements, loaded
    // scripts.
    let lease = granted(&*store, &request(999)).await?;
    leases.push(lease.clone());
    let _ = store.reserve(&request(999)).await?;
    let _ = renew_all(&*store, std::slice::from_ref(&lease)).await?;
    let _ = store.finish(&lease, &finish(bytes)).await?;
    let _ = store.reserve(&request(999)).await?;
    // Two counts in a row: their difference is the cost of counting.
    let mut counts = vec![meter.count().await?, meter.count().await?];
    let first = leases.len();
    // Each of the loops below repeats one operation (reserve, duplicate, renewal, finish, replay) and ends with a
    // count.
    for n in 0..count {
        leases.push(granted(&*store, &request(n)).await?);
    }
    counts.push(meter.count().await?);
    for n in 0..count {
        match store.reserve(&request(n)).await? {
            Reservation::InProgress { .. } => {}
            other => return Err(unexpected(&other)),
        }
    }
    counts.push(meter.count().await?);
    for lease in &leases[first..] {
        match renew_all(&*store, std::slice::from_ref(lease)).await?[..] {
            [Verdict::Applied] => {}
            ref other => return Err(unexpected(&other)),
        }
    }
    counts.push(meter.count().await?);
    for lease in &leases[first..] {
        match store.finish(lease, &finish(bytes)).await? {
            Verdict::Applied => {}
            Verdict::Refused => return Err(unexpected(&Verdict::Refused)),
        }
    }
    counts.push(meter.count().await?);
    for n in 0..count {
        match store.reserve(&request(n)).await? {
            Reservation::Finished { record, .. }
                if record.state.result().is_some_and(|it| it.stored_bytes() == bytes) => {}
            Reservation::Finished { .. } => {
                return Err(Stop::Refused("the result was not stored: it is too large".to_owned()));
            }
            other => return Err(unexpected(&other)),
        }
    }
    counts.push(meter.count().await?);
    #[allow(clippy::cast_precision_loss, reason = "a small number")]
    let each = |step: usize| -> Vec<f64> {
        // The difference between the first two counts is the cost of counting itself.
        let own = counts[1].iter().zip(&counts[0]).map(|(after, before)| after - before);
        let pairs = counts[step + 2].iter().zip(&counts[step + 1]).zip(own);
        pairs.map(|((after, before), own)| ((after - before - own) / count as f64).max(0.0)).collect()
    };
    let [reserve, running, renewal, finish, replay] = [0, 1, 2, 3, 4].map(each);
    let first_run = reserve.iter().zip(&finish).map(|(a, b)| a + b).collect();
    let stored = meter.stored(&leases[first].key).await?;
    Ok(Costs { bytes, units: [first_run, replay, running, renewal], stored })
}

fn finish(bytes: usize) -> Finish {
    // JSON text that a server can't compress.
    let mut text = vec![b'"'; bytes];
    let mut state = 1_u64;
    for byte in text.iter_mut().take(bytes.saturating_sub(1)).skip(1) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
            [usize::try_from(state >> 58).unwrap_or(0)];
    }
    Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: Bytes::from(text) })
}

async fn granted(store: &dyn Store, request: &ReserveRequest) -> Result<Lease, Stop> {
    match store.reserve(request).await? {
        Reservation::Granted { lease, .. } => Ok(lease),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &dyn fmt::Debug) -> Stop {
    Stop::Refused(format!("unexpected answer {answer:?}"))
}

/// Units per month, and their price.
struct Month {
    /// By unit.
    units: Vec<f64>,
    stored_gb: f64,
    /// Price of each unit that has one.
    money: Vec<(&'static str, f64)>,
}

fn month(arguments: &CostArguments, units: &[Unit], costs: &Costs, prices: &Prices) -> Month {
    let calls = arguments.calls_per_day * DAYS_A_MONTH;
    let duplicates = calls * arguments.duplicates / 100.0;
    let first_runs = calls - duplicates;
    let of = |unit: usize| {
        first_runs * (costs.units[FIRST_RUN][unit] + arguments.renewals * costs.units[RENEWAL][unit])
            + duplicates * costs.units[REPLAY][unit]
    };
    let counted: Vec<f64> = (0..units.len()).map(of).collect();
    let stored_gb = first_runs / DAYS_A_MONTH * arguments.ttl_days * costs.stored / 1e9;
    let billed = units.iter().zip(&counted).filter_map(|(unit, count)| unit.price.map(|(name, of)| (name, count / of)));
    let billed = billed.chain([("gb_month", stored_gb)]);
    let money = billed.filter_map(|(name, count)| prices.of(name).map(|price| (name, count * price))).collect();
    Month { units: counted, stored_gb, money }
}

fn print(
    arguments: &CostArguments,
    kind: &str,
    units: &[Unit],
    all: &[Costs],
    notes: &[&str],
    prices: &Prices,
) -> Result<ExitCode, Stop> {
    let output = Output { json: arguments.json };
    let heads: Vec<&str> = units.iter().map(|unit| unit.name).collect();
    let say = |text: &str| if arguments.json { Ok(()) } else { output.line(&Value::Null, text) };
    // First table: calls, in one row for each size and kind of work.
    say(&format!("{kind}: a million calls, one after the other"))?;
    say(&row(&["", "result"], &heads))?;
    for costs in all {
        for (work, counted) in WORK.iter().zip(&costs.units) {
            let mut object = Map::from_iter([
                ("store".to_owned(), json!(kind)),
                ("work".to_owned(), json!(work)),
                ("result_bytes".to_owned(), json!(costs.bytes)),
            ]);
            for (name, count) in heads.iter().zip(counted) {
                object.insert(field(name), json!(count * 1e6));
            }
            let figures: Vec<String> = counted.iter().map(|count| figure(count * 1e6)).collect();
            let figures: Vec<&str> = figures.iter().map(String::as_str).collect();
            output.line(&Value::Object(object), &row(&[work, &format!("{} B", costs.bytes)], &figures))?;
        }
    }
    say(&format!(
        "\na month of {} calls a day, {} of 100 duplicates, {} renewals in each, records kept {} days",
        figure(arguments.calls_per_day),
        arguments.duplicates,
        arguments.renewals,
        arguments.ttl_days
    ))?;
    // Second table: a month, with the sums if there are prices.
    let columns: Vec<&str> = ["bytes a record", "GB stored"].into_iter().chain(heads.iter().copied()).collect();
    say(&row(&["", "result"], &columns))?;
    for costs in all {
        let month = month(arguments, units, costs, prices);
        let mut object = Map::from_iter([
            ("store".to_owned(), json!(kind)),
            ("work".to_owned(), json!("month")),
            ("result_bytes".to_owned(), json!(costs.bytes)),
            ("record_bytes".to_owned(), json!(costs.stored)),
            ("stored_gb".to_owned(), json!(month.stored_gb)),
        ]);
        for (name, count) in heads.iter().zip(&month.units) {
            object.insert(field(name), json!(count));
        }
        let total: f64 = month.money.iter().map(|(_, sum)| sum).sum();
        if !month.money.is_empty() {
            object.insert("money".to_owned(), month.money.iter().map(|(name, sum)| (*name, *sum)).collect());
            object.insert("total".to_owned(), json!(total));
        }
        let counted = [costs.stored, month.stored_gb].into_iter().chain(month.units.iter().copied());
        let figures: Vec<String> = counted.map(figure).collect();
        let figures: Vec<&str> = figures.iter().map(String::as_str).collect();
        let mut text = row(&["month", &format!("{} B", costs.bytes)], &figures);
        if !month.money.is_empty() {
            let sums: Vec<String> = month.money.iter().map(|(name, sum)| format!("{name} {sum:.2}")).collect();
            text = format!("{text}\n{:<30}{} = {total:.2} a month", "", sums.join(" + "));
        }
        output.line(&Value::Object(object), &text)?;
    }
    if prices.is_empty() {
        say(&format!("\nno prices: give yours by --price NAME=NUMBER; names: {}", names(units).join(", ")))?;
    }
    for note in notes {
        say(&format!("note: {note}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(heads: &[&str], figures: &[&str]) -> String {
    let [work, bytes] = heads else { return String::new() };
    figures.iter().fold(format!("{work:<28}{bytes:>10}"), |row, figure| format!("{row}{figure:>18}"))
}

fn field(name: &str) -> String {
    name.replace(' ', "_")
}

/// Formats a number with three digits, and a letter for thousands, millions and so on.
fn figure(value: f64) -> String {
    let (value, of) = match value.abs() {
        size if size >= 1e12 => (value / 1e12, "T"),
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 100.0 => format!("{value:.0}{of}"),
        size if size >= 10.0 => format!("{value:.1}{of}"),
        _ => format!("{value:.2}{of}"),
    }
}
