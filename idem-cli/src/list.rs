//! `idem list` and `idem stats`.

use std::io::Write;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use idem_runtime::StoreExt;
use idem_runtime::store::{Counts, Cursor, Filter, Standing};
use serde_json::{Map, Value, json};

use crate::records::{object, questions};
use crate::report::{Output, STATUSES, Stop, human, printable};
use crate::scan::{ListEnd, check_scan, each};
use crate::shell::quoted;
use crate::store::StoreArguments;

/// Selection of records.
#[derive(clap::Args)]
pub(crate) struct Which {
    /// Only records with this standing: `running`, `lapsed`, `released`, `interrupted`, `completed`, `failed` or
    /// `damaged`; may be given more than once
    #[arg(long = "state", value_name = "NAME", value_parser = standing)]
    standings: Vec<Standing>,
    /// Only records whose effect may have happened although the record does not show this: lapsed, interrupted and
    /// damaged records
    #[arg(long)]
    uncertain: bool,
    /// Only finished records with messages that are not marked as sent
    #[arg(long)]
    unsent: bool,
    /// Only records of this scope
    #[arg(long, value_name = "NAME")]
    scope: Option<String>,
    /// Only records whose latest attempt began at least this long ago, as `90s`, `15m`, `24h` or `7d`
    #[arg(long, value_name = "TIME")]
    older_than: Option<Age>,
    /// Only records whose key contains this text, as errors and logs show a key; upper and lower case differ
    #[arg(long, value_name = "TEXT")]
    contains: Option<String>,
    /// Only records that have used up their attempts, if `max_attempts` of the handler is this number; `idem reopen`
    /// lets the next delivery run
    #[arg(long, value_name = "MAX_ATTEMPTS")]
    attempts_exhausted: Option<NonZeroU32>,
    /// Allows a scan of the whole store in Redis and DynamoDB; Redis may then miss records and repeat others, DynamoDB
    /// bills the whole table as read
    #[arg(long)]
    scan: bool,
}

/// Lists records, without their results.
///
/// SQLite and PostgreSQL read in the order of keys, and skip records that do not match.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct List {
    #[command(flatten)]
    which: Which,
    /// Maximum number of records
    #[arg(long, value_name = "N", default_value = "100")]
    limit: u64,
    /// Continues where an earlier list stopped
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Counts records by scope and by standing.
///
/// Reads all records that are counted, without their results.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct StatsOf {
    #[command(flatten)]
    which: Which,
    /// Approximate maximum number of records
    #[arg(long, value_name = "N", default_value = "1000000")]
    limit: u64,
    /// Continues where an earlier count stopped
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Time that has passed since an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Age(pub(crate) Duration);

impl FromStr for Age {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let seconds = match unit {
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err("write a number and `s`, `m`, `h` or `d`, as `15m`".to_owned()),
        };
        let number: u32 = number.parse().map_err(|_| "write a number and its unit, as `15m`".to_owned())?;
        Ok(Self(Duration::from_secs(u64::from(number) * seconds)))
    }
}

/// Parses the name of a standing.
pub(crate) fn standing(name: &str) -> Result<Standing, String> {
    let known = || Standing::ALL.map(Standing::name).join(", ");
    Standing::ALL.into_iter().find(|it| it.name() == name).ok_or_else(|| format!("it is one of {}", known()))
}

impl Which {
    fn filter(&self, after: Option<&str>) -> Filter {
        let mut filter = Filter::new().limit(Filter::MAX_LIMIT).after(after.map(Cursor::new));
        filter = self.standings.iter().fold(filter, |filter, standing| filter.standing(*standing));
        if self.uncertain {
            filter = filter.uncertain();
        }
        filter.scope = self.scope.as_deref().map(Into::into);
        filter.older_than = self.older_than.map(|age| age.0);
        filter.contains = self.contains.as_deref().map(Into::into);
        filter.attempts_exhausted = self.attempts_exhausted;
        (filter.scan, filter.unsent) = (self.scan, self.unsent);
        filter
    }
}

pub(crate) async fn list(arguments: &List) -> Result<ExitCode, Stop> {
    check_scan(arguments.store.place()?.kind(), arguments.which.scan)?;
    let store = arguments.store.open_to_read().await?;
    let output = Output { json: arguments.json };
    let mut shown = 0;
    let limit = arguments.limit.max(1);
    // Each page is printed completely, so that the next cursor skips no record.
    let page = u32::try_from(limit).unwrap_or(u32::MAX).min(Filter::MAX_LIMIT);
    let filter = arguments.which.filter(arguments.after.as_deref()).limit(page);
    let end = each(&store.operator(), filter, |key, found| {
        shown += 1;
        let began = found.began.map_or("?".to_owned(), human);
        let holder = found.holder().map_or(String::new(), |holder| format!("  ({})", printable(holder.as_str())));
        let doubt = questions(found).map_or(String::new(), |questions| format!("  {questions}"));
        let text =
            format!("{:<12} {began:>10}  attempt {}  {key}{holder}{doubt}", found.standing().name(), found.attempt());
        output.line(&object(key, store.name(), found), &text)?;
        Ok(shown < limit)
    })
    .await?;
    rest(&output, &end)?;
    match shown {
        0 => Err(Stop::Nothing(format!("no such record in {}", store.name()))),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Prints that more records follow, and the number of unreadable entries.
fn rest(output: &Output, end: &ListEnd) -> Result<(), Stop> {
    let ListEnd { next, unreadable } = end;
    if next.is_none() && *unreadable == 0 {
        return Ok(());
    }
    if output.json {
        let next = next.as_ref().map(Cursor::as_str);
        return output.line(&json!({ "next": next, "unreadable": unreadable }), "");
    }
    let mut errors = std::io::stderr();
    if let Some(next) = next {
        let _ = writeln!(errors, "There may be more: --after {}", quoted(next.as_str()));
    }
    if *unreadable > 0 {
        let _ = writeln!(errors, "{unreadable} entries are no records: another program keeps them there.");
    }
    Ok(())
}

pub(crate) async fn stats(arguments: &StatsOf) -> Result<ExitCode, Stop> {
    check_scan(arguments.store.place()?.kind(), arguments.which.scan)?;
    let store = arguments.store.open_to_read().await?;
    let filter = arguments.which.filter(arguments.after.as_deref());
    let stats = store.operator().stats(&filter, arguments.limit).await?;
    let output = Output { json: arguments.json };
    for (scope, counts) in &stats.scopes {
        output.line(&counted(Some(scope), counts), &format!("{scope}\n    {}", summed(counts)))?;
    }
    let total = stats.total();
    output.line(&counted(None, &total), &format!("all\n    {}", summed(&total)))?;
    rest(&output, &ListEnd { next: stats.next, unreadable: stats.unreadable })?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the counts of a scope, or of all scopes, as JSON.
pub(crate) fn counted(scope: Option<&str>, counts: &Counts) -> Value {
    let mut object = Map::new();
    object.insert("scope".to_owned(), scope.into());
    object.insert("total".to_owned(), counts.total().into());
    object.extend(Standing::ALL.map(|standing| (standing.name().to_owned(), counts.of(standing).into())));
    Value::Object(object)
}

/// Returns the counts as text, without standings that have no record.
pub(crate) fn summed(counts: &Counts) -> String {
    let some = Standing::ALL.into_iter().filter(|standing| counts.of(*standing) > 0);
    let some: Vec<_> = some.map(|standing| format!("{} {standing}", counts.of(standing))).collect();
    if some.is_empty() { "no records".to_owned() } else { some.join(", ") }
}
