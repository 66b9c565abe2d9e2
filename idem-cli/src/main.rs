//! The command `idem`, described in docs/cli.md.
// The command runs in real time next to other processes, so it may read the clock directly.
#![allow(clippy::disallowed_methods)]

mod advice;
mod conformance;
mod doctor;
mod generate;
mod key;
mod list;
mod records;
mod report;
mod response;
mod scan;
mod schema;
#[cfg(feature = "serve")]
mod serve;
mod shape;
mod shell;
mod steps;
mod store;
mod tls;
mod watch;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use report::{Stop, hidden};

/// Idempotency on the command line: shows what is recorded and what is stuck, and lets you decide about it.
#[derive(Parser)]
#[command(name = "idem", version, max_term_width = 120, after_help = report::STATUSES)]
struct CommandLine {
    /// The store may be named before the command, too: clap copies these values to the same arguments of the command.
    #[command(flatten)]
    _store: store::StoreArguments,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::DoctorArguments),
    List(list::List),
    Stats(list::StatsOf),
    Watch(watch::WatchArguments),
    #[cfg(feature = "serve")]
    Serve(serve::ServeArguments),
    Show(records::Show),
    Resolve(records::Resolve),
    Reopen(records::Reopen),
    Discard(records::Discard),
    Forget(records::Forget),
    Release(records::Release),
    /// Decides about messages of a finished operation that are not marked as sent.
    #[command(subcommand)]
    Outbox(records::Outbox),
    Purge(records::Purge),
    Key(key::KeyArguments),
    /// Prints, compares or creates the schema that a store needs in its server.
    #[command(subcommand)]
    Schema(schema::Schema),
    /// Checks that a store or a server follows the rules.
    #[command(subcommand)]
    Conformance(Conformance),
    Completions(generate::Completions),
    Man(generate::Man),
}

#[derive(Subcommand)]
enum Conformance {
    Http(conformance::http::HttpArguments),
    Store(conformance::store::StoreCheckArguments),
}

impl Command {
    /// Returns whether the output is JSON.
    fn json(&self) -> bool {
        match self {
            Self::Doctor(it) => it.json,
            Self::List(it) => it.json,
            Self::Stats(it) => it.json,
            Self::Watch(it) => it.json,
            #[cfg(feature = "serve")]
            Self::Serve(it) => it.json,
            Self::Show(it) => it.json,
            Self::Resolve(it) => it.json(),
            Self::Reopen(it) => it.json(),
            Self::Discard(it) => it.json(),
            Self::Forget(it) => it.json(),
            Self::Release(it) => it.json(),
            Self::Outbox(it) => it.json(),
            Self::Purge(it) => it.json,
            Self::Key(it) => it.json,
            Self::Schema(it) => it.json(),
            Self::Conformance(Conformance::Store(it)) => it.json,
            _ => false,
        }
    }

    async fn run(&self) -> Result<ExitCode, Stop> {
        match self {
            Self::Doctor(it) => doctor::main(it).await,
            Self::List(it) => list::list(it).await,
            Self::Stats(it) => list::stats(it).await,
            Self::Watch(it) => watch::main(it).await,
            #[cfg(feature = "serve")]
            Self::Serve(it) => serve::main(it).await,
            Self::Show(it) => records::show(it).await,
            Self::Resolve(it) => records::resolve(it).await,
            Self::Reopen(it) => records::reopen(it).await,
            Self::Discard(it) => records::discard(it).await,
            Self::Forget(it) => records::forget(it).await,
            Self::Release(it) => records::release(it).await,
            Self::Outbox(it) => records::outbox(it).await,
            Self::Purge(it) => records::purge(it).await,
            Self::Key(it) => key::main(it),
            Self::Schema(it) => schema::main(it).await,
            Self::Conformance(Conformance::Http(it)) => Ok(conformance::http::main(it)),
            Self::Conformance(Conformance::Store(it)) => conformance::store::main(it).await,
            Self::Completions(it) => generate::completions(it, CommandLine::command()),
            Self::Man(it) => generate::man(it, CommandLine::command()),
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let command = match CommandLine::try_parse_from(&arguments) {
        Ok(arguments) => arguments.command,
        Err(error) => {
            // The arguments could not be parsed, so the text of each argument shows whether JSON is wanted.
            let as_json = arguments.iter().skip(1).take_while(|it| *it != "--").any(|it| it == "--json");
            return misused(&error, as_json);
        }
    };
    // The checker of HTTP servers builds its own runtime.
    if let Command::Conformance(Conformance::Http(arguments)) = &command {
        return conformance::http::main(arguments);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
    let done = runtime.map_err(Stop::Output).and_then(|runtime| runtime.block_on(command.run()));
    done.unwrap_or_else(|stop| stop.report(command.json()))
}

/// Prints clap's message without passwords: the message may quote a URL that the user wrote in the wrong place. Help is
/// printed unchanged.
fn misused(error: &clap::Error, as_json: bool) -> ExitCode {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match report::print(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(stop) => stop.report(false),
        },
        _ if as_json => Stop::Usage(text.trim().trim_start_matches("error: ").to_owned()).report(true),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => unread(&text),
        _ => unread(&hidden(&text)),
    }
}

fn unread(text: &str) -> ExitCode {
    // The reader of standard error may be gone.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
    ExitCode::from(2)
}
