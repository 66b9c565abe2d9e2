//! Parts that the examples share: the command line, the orders, the faults, the table at the end, and claims.
//!
//! This module does not use the idempotency library: each example uses it in its own file. `senders` implements a trait
//! of the library.

#[cfg(feature = "rmcp")]
pub mod agent;
mod arguments;
#[cfg(feature = "stripe")]
pub mod bank;
mod claims;
#[cfg(feature = "documents")]
pub mod documents;
#[cfg(feature = "fleet")]
pub mod fleet;
mod generate;
#[cfg(feature = "kafka")]
pub mod kafka;
mod ledger;
mod mishaps;
#[cfg(feature = "nats")]
pub mod nats;
mod orders;
#[cfg(feature = "fleet")]
mod outages;
mod payment;
#[cfg(feature = "sqs")]
mod plain_http;
mod queue;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(feature = "redis")]
pub mod redis_streams;
mod report;
#[cfg(any(feature = "kafka", feature = "nats", feature = "rabbitmq", feature = "sqs"))]
pub mod senders;
#[cfg(feature = "fleet")]
pub mod servers;
#[cfg(feature = "fulfilment")]
pub mod services;
#[cfg(feature = "sqs")]
pub mod sqs;

use std::error::Error;
use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

pub use arguments::{Arguments, Source};
pub use claims::Claims;
pub use generate::generate;
pub use ledger::Ledger;
pub use mishaps::{Mishap, deliveries};
pub use orders::{Event, Malformed, Order, read};
pub use payment::{PaymentError, Receipt};
#[cfg(feature = "sqs")]
pub use plain_http::PlainHttp;
pub use queue::{Message, Queue};
pub use report::{Charges, Count, Counts, Report, counts};

/// Runs an example: reads the orders, lets `deliver` charge them, and prints the table of counts.
///
/// The exit code is 0 if every order was charged and handled exactly once, 1 if not, and 2 if the example could not
/// run.
pub fn main<E: Into<Box<dyn Error>>>(
    name: &str,
    deliver: impl FnOnce(&Arguments, &[Event]) -> Result<(Counts, Charges), E>,
) -> ExitCode {
    let fail = |problem: &dyn fmt::Display| {
        eprintln!("{name}: {problem}");
        ExitCode::from(2)
    };
    let arguments = match Arguments::parse(std::env::args_os().skip(1)) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            show(&arguments::usage(name));
            return ExitCode::SUCCESS;
        }
        Err(problem) => return fail(&format_args!("{problem}\n\n{}", arguments::usage(name).trim_end())),
    };
    let input = match arguments.source.read() {
        Ok(input) => input,
        Err(error) => return fail(&format_args!("can't read {}: {error}", arguments.source)),
    };
    let (events, malformed) = read(&input);
    for line in &malformed {
        eprintln!("{line}");
    }
    let (counts, charges) = match deliver(&arguments, &events) {
        Ok(delivered) => delivered,
        Err(error) => return fail(&explain(&*error.into())),
    };
    let report = Report::new(&events, malformed.len(), counts, &charges, arguments.idempotent);
    show(&report.to_string());
    if report.is_correct() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Formats an error with its causes, except causes that its text already contains.
pub fn explain(error: &dyn Error) -> String {
    let text = error.to_string();
    match error.source().map(explain) {
        Some(cause) if cause != text => format!("{text}: {cause}"),
        _ => text,
    }
}

/// Prints `text`. If the output is closed (`| head`), the text is lost, and the exit code does not change.
fn show(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}
