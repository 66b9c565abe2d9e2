//! `idem watch`: shows running and stuck records repeatedly.

#[cfg(feature = "watch")]
mod screen;

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use idem_runtime::store::{Filter, Inspection, Standing, Stats};
use idem_runtime::{Key, Store, StoreExt};
use serde_json::{Value, json};

use crate::list::{Age, counted, summed};
use crate::records::object;
use crate::report::{Output, STATUSES, Stop, human, millis, printable};
use crate::scan::{check_scan, each};
use crate::store::StoreArguments;

/// Watches running and stuck records: leases, their holders, and keys that wait for an operator.
///
/// On a terminal, the command shows one screen (q ends it, arrows scroll); otherwise it prints each snapshot of the
/// store below the previous one.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct WatchArguments {
    /// Time between two snapshots, as `2s` or `1m`
    #[arg(long, value_name = "TIME", default_value = "2s")]
    every: Age,
    /// Ends after this number of snapshots (default: never)
    #[arg(long, value_name = "N")]
    times: Option<u64>,
    #[command(flatten)]
    look: LookArguments,
    /// Also counts all records for each snapshot, and shows the number of operations that end per second; this
    /// reads all records
    #[arg(long)]
    counts: bool,
    /// Prints each snapshot below the previous one, even on a terminal
    #[arg(long)]
    plain: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Selection of the records of a snapshot.
#[derive(clap::Args, Clone)]
pub(crate) struct LookArguments {
    /// Only records of this scope
    #[arg(long, value_name = "NAME")]
    pub(crate) scope: Option<String>,
    /// Maximum number of records in a snapshot
    #[arg(long, value_name = "N", default_value = "1000")]
    pub(crate) limit: usize,
    /// Allows a scan of the whole store in Redis and DynamoDB, for each snapshot
    #[arg(long)]
    pub(crate) scan: bool,
}

impl LookArguments {
    /// Returns the filter of all records in this selection.
    pub(crate) fn all(&self) -> Filter {
        let mut all = Filter::new();
        all.scope = self.scope.as_deref().map(Into::into);
        all.scan = self.scan;
        all
    }
}

/// Shortest time between two snapshots, to limit the load of the store.
const SHORTEST: Duration = Duration::from_secs(1);

impl WatchArguments {
    fn pause(&self) -> Duration {
        self.every.0.max(SHORTEST)
    }
}

/// A snapshot of the store: the records to show, and their counts.
pub(crate) struct Look {
    store: &'static str,
    /// Time that the store took to answer for this snapshot.
    took: Duration,
    /// Records that need an operator, then running records; in each group the oldest first.
    pub(crate) records: Vec<(Key, Inspection)>,
    /// True if there are more records.
    more: bool,
    /// Counts of all records, if requested, and the time of counting.
    stats: Option<(Stats, Instant)>,
    /// Number of operations that ended per second since the previous snapshot.
    ended: Option<f64>,
}

/// Returns the rank of a standing: 0 is the most urgent.
fn rank(standing: Standing) -> u8 {
    match standing {
        Standing::Damaged | Standing::Interrupted => 0,
        Standing::Lapsed => 1,
        _ => 2,
    }
}

impl Look {
    /// Reads a snapshot, and counts all records if `counts` is set.
    pub(crate) async fn at(
        store: &dyn Store,
        arguments: &LookArguments,
        counts: bool,
        before: Option<&Self>,
    ) -> Result<Self, Stop> {
        let began = Instant::now();
        let operator = store.operator();
        let all = arguments.all();
        let filter = all.clone().uncertain().standing(Standing::Running).limit(Filter::MAX_LIMIT);
        let mut records = Vec::new();
        let end = each(&operator, filter, |key, found| {
            records.push((key.clone(), found.clone()));
            Ok(records.len() <= arguments.limit)
        })
        .await?;
        let more = end.goes_on() || records.len() > arguments.limit;
        records.sort_by_key(|(_, found)| (rank(found.standing()), std::cmp::Reverse(found.began)));
        records.truncate(arguments.limit);
        let stats = match counts {
            true => Some((operator.stats(&all, u64::MAX).await?, Instant::now())),
            false => None,
        };
        let ended = match (before.and_then(|look| look.stats.as_ref()), &stats) {
            (Some((before, then)), Some((now, at))) => {
                let of = |stats: &Stats| stats.total().of(Standing::Completed) + stats.total().of(Standing::Failed);
                // The difference may be negative, if more records have expired than ended.
                let ended = u32::try_from(of(now).saturating_sub(of(before))).unwrap_or(u32::MAX);
                Some(f64::from(ended) / at.duration_since(*then).as_secs_f64().max(0.001))
            }
            _ => None,
        };
        Ok(Self { store: store.name(), took: began.elapsed(), records, more, stats, ended })
    }

    fn count(&self, standing: Standing) -> usize {
        self.records.iter().filter(|(_, found)| found.standing() == standing).count()
    }

    /// Returns the lines at the top of the screen.
    pub(crate) fn head(&self) -> Vec<String> {
        let Self { store, took, more, .. } = self;
        let [running, lapsed, interrupted] =
            [Standing::Running, Standing::Lapsed, Standing::Interrupted].map(|it| self.count(it));
        let more = if *more { " (and more)" } else { "" };
        let damaged = match self.count(Standing::Damaged) {
            0 => String::new(),
            damaged => format!(", {damaged} damaged"),
        };
        let mut lines = vec![
            format!("{store}, answered in {}", human(*took)),
            format!("{running} running, {lapsed} lapsed, {interrupted} interrupted{damaged}{more}"),
        ];
        if let Some((stats, _)) = &self.stats {
            let ended = self.ended.map_or(String::new(), |ended| format!("; {ended:.1} a second end"));
            lines.push(format!("of all: {}{ended}", summed(&stats.total())));
        }
        lines
    }

    fn json(&self) -> Value {
        let records: Vec<_> = self.records.iter().map(|(key, found)| object(key, self.store, found)).collect();
        json!({
            "store": self.store,
            "took_ms": millis(self.took),
            "running": self.count(Standing::Running),
            "lapsed": self.count(Standing::Lapsed),
            "interrupted": self.count(Standing::Interrupted),
            "damaged": self.count(Standing::Damaged),
            "more": self.more,
            "all": self.stats.as_ref().map(|(stats, _)| counted(None, &stats.total())),
            "ended_per_second": self.ended,
            "records": records,
        })
    }

    fn text(&self) -> String {
        let mut text = self.head().join("\n");
        for (key, found) in &self.records {
            let Row { standing, began, lease, holder } = Row::of(found);
            let _ = write!(text, "\n{standing:<12}{began:>10}  {key}, attempt {}{lease}{holder}", found.attempt());
        }
        text
    }
}

/// The columns of a record, as text.
struct Row {
    standing: &'static str,
    began: String,
    lease: String,
    holder: String,
}

impl Row {
    fn of(found: &Inspection) -> Self {
        let lease = found.lapses_in.filter(|left| !left.is_zero());
        Self {
            standing: found.standing().name(),
            began: found.began.map_or("?".to_owned(), human),
            lease: lease.map_or(String::new(), |left| format!(", lapses in {}", human(left))),
            holder: found.holder().map_or(String::new(), |holder| format!("  ({})", printable(holder.as_str()))),
        }
    }
}

pub(crate) async fn main(arguments: &WatchArguments) -> Result<ExitCode, Stop> {
    check_scan(arguments.store.place()?.kind(), arguments.look.scan)?;
    let store = arguments.store.open_to_read().await?;
    #[cfg(feature = "watch")]
    {
        use std::io::IsTerminal;
        let on_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
        if on_terminal && !arguments.plain && !arguments.json {
            return screen::run(&*store, arguments).await;
        }
    }
    let output = Output { json: arguments.json };
    let mut before = None;
    let mut left = arguments.times;
    loop {
        // A failure ends the command, because a script that reads the output could not see later failures.
        let look = Look::at(&*store, &arguments.look, arguments.counts, before.as_ref()).await?;
        output.line(&look.json(), &look.text())?;
        left = left.map(|left| left.saturating_sub(1));
        if left == Some(0) {
            return Ok(ExitCode::SUCCESS);
        }
        tokio::time::sleep(arguments.pause()).await;
        if !arguments.json {
            output.line(&json!(null), "")?;
        }
        before = Some(look);
    }
}
