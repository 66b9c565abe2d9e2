//! `idem conformance store`: checks whether a store keeps the contract on this machine, with this server.

use std::any::Any;
use std::process::ExitCode;
use std::time::Duration;

use idem_runtime::conformance::{CLAUSES, Clause, Subject};
use serde_json::json;

use crate::report::{Output, STATUSES, Stop, confirm};
use crate::store::StoreArguments;

/// Checks that a store keeps the contract, with two connections to its server.
///
/// The check writes some thousand records in the scope `conformance` and in other scopes; these records expire within
/// 20 minutes. Clauses about an unreachable server, about foreign values and about blocked records are not checked
/// here.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct StoreCheckArguments {
    /// Runs only this clause; may be given more than once
    #[arg(long = "case", value_name = "NAME")]
    names: Vec<String>,
    /// Does not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Clauses of the store contract that this command does not check, because their tests must make the server
/// unreachable, overwrite a record, or block a record.
const UNARMED: [&str; 3] = ["unreachable_store", "foreign_value", "blocked_record_holds_up_no_other"];
/// Time limit for the check of one clause. A check that takes longer is reported as hanging.
const LONGEST: Duration = Duration::from_secs(300);
/// Largest result that the checks write to DynamoDB, which limits an item to 400 KB.
const LARGEST_ITEM: usize = 390_000;
/// Largest result that the checks write to NATS, which limits a message to 1 MiB.
const LARGEST_MESSAGE: usize = 1_000_000;

pub(crate) async fn main(arguments: &StoreCheckArguments) -> Result<ExitCode, Stop> {
    let clauses = chosen(&arguments.names)?;
    let place = arguments.store.place()?;
    confirm(arguments.yes, "", &format!("Write some thousand records into {}", place.kind()))?;
    let mut subject = Subject::new(arguments.store.open().await?).peer(arguments.store.open().await?);
    if place.kind() == "dynamodb" {
        subject = subject.largest_result(LARGEST_ITEM).patience(Duration::from_secs(120));
    }
    if place.kind() == "nats" {
        subject = subject.largest_result(LARGEST_MESSAGE);
    }
    // The check of a clause fails by a panic. The clause's line of output shows the message of the panic, so the
    // default hook must not print this message too.
    std::panic::set_hook(Box::new(|_| {}));
    let output = Output { json: arguments.json };
    let width = clauses.iter().map(|clause| clause.name().len()).max().unwrap_or_default();
    let mut failed = 0;
    for clause in &clauses {
        let run = tokio::spawn(tokio::time::timeout(LONGEST, clause.check(subject.clone()))).await;
        let wrong = match run {
            Ok(Ok(())) => None,
            Ok(Err(_)) => Some(format!("it hangs: no end within {} s", LONGEST.as_secs())),
            Err(error) => Some(error.try_into_panic().map_or_else(|_| "it was cancelled".to_owned(), said)),
        };
        failed += usize::from(wrong.is_some());
        let (name, claim, passed) = (clause.name(), clause.claim(), wrong.is_none());
        let object = json!({ "case": name, "rule": claim, "passed": passed, "error": wrong });
        let verdict = if passed { "passed" } else { "FAILED" };
        let text = format!("{verdict}  {name:width$}  {claim}");
        output.line(&object, &wrong.map_or(text.clone(), |wrong| format!("{text}\n        {wrong}")))?;
    }
    if !arguments.json {
        let (kind, total) = (place.kind(), clauses.len());
        output
            .line(&json!(null), &format!("\n{kind}: {} of {total} clauses passed, {failed} failed", total - failed))?;
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn chosen(names: &[String]) -> Result<Vec<&'static Clause>, Stop> {
    let clauses: Vec<_> = CLAUSES.iter().filter(|clause| !UNARMED.contains(&clause.name())).collect();
    if names.is_empty() {
        return Ok(clauses);
    }
    let find = |name: &String| {
        let found = clauses.iter().find(|clause| clause.name() == name).copied();
        found.ok_or_else(|| Stop::Usage(format!("there is no clause `{name}` that can be checked here")))
    };
    names.iter().map(find).collect()
}

/// Returns the message of the panic with which the check of a clause failed.
fn said(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().map_or("it failed", |text| text).to_owned(),
    }
}
