//! `idem conformance http`: checks whether an HTTP server follows the rules of the header `Idempotency-Key`.

mod cases;
mod run;
mod wire;

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cases::{Case, File, Ground, Level, Profile};
use run::Checker;
use serde_json::json;
use wire::Server;

use crate::report::{self, CLOSED_PIPE, time_limit};

const BUILT_IN: &str = include_str!("../../cases/http.json");

/// Largest case file that is read. People write case files, so a larger file is probably the wrong file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Checks that an HTTP server follows the rules of the Idempotency-Key.
///
/// The server provides an operation that counts its runs, a second operation, and the counter. docs/http.md describes
/// these routes.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 if every required case passed, 1 if one failed, 2 for wrong use or a server that \
                        can't be reached, 141 if what reads the output is gone."
)]
pub(crate) struct HttpArguments {
    /// URL of the server, as `http://127.0.0.1:8080` or `https://example.com`; its path is put before the paths of the
    /// routes
    #[arg(required_unless_present = "print_cases")]
    url: Option<String>,
    /// Rules that the server should follow
    #[arg(long, value_enum, default_value = "ietf")]
    profile: Profile,
    /// File of cases that replaces the built-in cases
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Prints the built-in file of cases, and checks nothing
    #[arg(long, exclusive = true)]
    print_cases: bool,
    /// Runs only the case with this name or id; may be given more than once
    #[arg(long = "case", value_name = "NAME")]
    names: Vec<String>,
    /// Path of the operation (default: from the file of cases)
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Path of the second operation (default: from the file of cases)
    #[arg(long, value_name = "PATH")]
    other_path: Option<String>,
    /// Path of the counter (default: from the file of cases)
    #[arg(long, value_name = "PATH")]
    counter: Option<String>,
    /// Credentials of a caller in the file, as `first=Authorization: Bearer …`; may be given more than once
    #[arg(long = "caller", value_name = "NAME=HEADER")]
    callers: Vec<String>,
    /// Time limit for an answer, as `10s` or `2m`
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_limit)]
    timeout: Duration,
    /// Prints one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Reason why there is no verdict.
enum Stop {
    /// Wrong use, or a server that can't be reached.
    Error(String),
    /// The reader of the output is gone.
    Output(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Runs the subcommand.
pub(crate) fn main(arguments: &HttpArguments) -> ExitCode {
    let verdict = match &arguments.url {
        Some(url) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map_err(Stop::Output).and_then(|runtime| runtime.block_on(check(url, arguments)))
        }
        None => io::stdout().lock().write_all(BUILT_IN.as_bytes()).map(|()| true).map_err(Stop::Output),
    };
    match verdict {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(CLOSED_PIPE),
        Err(Stop::Output(error)) => report::Stop::Usage(format!("can't write: {error}")).report(arguments.json),
        Err(Stop::Error(text)) => report::Stop::Usage(text).report(arguments.json),
    }
}

/// Returns whether all required cases pass.
async fn check(url: &str, arguments: &HttpArguments) -> Result<bool, Stop> {
    let server = Server::parse(url).map_err(|what| {
        // A URL that contains `@` may contain a password, so the error does not quote this URL.
        let url = if url.contains('@') { "the URL" } else { url };
        Stop::Error(format!("{url} is not a URL to check: {what}"))
    })?;
    let file = file(arguments).map_err(Stop::Error)?;
    let chosen = choose(&file, arguments).map_err(Stop::Error)?;
    let (profile, patience) = (arguments.profile, arguments.timeout);
    let checker = Checker { server: &server, file: &file, profile, patience };
    // Before the first case: check that the server answers and has a counter.
    checker.count().await.map_err(|error| Stop::Error(format!("{url}: {error}")))?;

    let mut output = io::stdout().lock();
    let width = chosen.iter().map(|(case, _)| case.name.len()).max().unwrap_or_default();
    let (mut failed, mut advice) = (0, 0);
    for (case, ground) in &chosen {
        let wrong = checker.run(case).await.err();
        // A case also fails if the server stops during the case. The request for the counter then fails too, and the
        // command gives no verdict.
        if let Some(wrong) = &wrong {
            *if ground.level == Level::Required { &mut failed } else { &mut advice } += 1;
            if let Err(error) = checker.count().await {
                let name = &case.name;
                return Err(Stop::Error(format!("{url}: gone in the case `{name}`: {wrong}; {error}")));
            }
        }
        let text = match arguments.json {
            true => object(case, ground, profile, wrong.as_deref()),
            false => row(case, ground, width, wrong.as_deref()),
        };
        writeln!(output, "{text}")?;
        output.flush()?;
    }
    if !arguments.json {
        let total = chosen.len();
        let passed = total - failed - advice;
        writeln!(output, "\n{profile}: {passed} of {total} cases passed, {failed} failed, {advice} with advice")?;
        output.flush()?;
    }
    Ok(failed == 0)
}

/// Returns the JSON object that reports a case.
fn object(case: &Case, ground: &Ground, profile: Profile, wrong: Option<&str>) -> String {
    json!({
        "id": case.id,
        "case": case.name,
        "profile": profile.to_string(),
        "rule": case.rule,
        "level": ground.level.to_string(),
        "source": ground.source,
        "sentence": ground.sentence,
        "passed": wrong.is_none(),
        "error": wrong,
    })
    .to_string()
}

/// Returns the lines that report a case, with a name of up to `width` characters.
fn row(case: &Case, ground: &Ground, width: usize, wrong: Option<&str>) -> String {
    let (id, name, rule) = (&case.id, &case.name, &case.rule);
    let verdict = match (wrong, ground.level) {
        (None, _) => "passed",
        (Some(_), Level::Required) => "FAILED",
        (Some(_), Level::Advised) => "advice",
    };
    let row = format!("{verdict}  {id}  {name:width$}  {rule}");
    match wrong {
        None => row,
        Some(wrong) => format!("{row}\n        {wrong}\n        {}: {}", ground.source, ground.sentence),
    }
}

/// Reads the file of cases, and replaces the parts that the arguments set.
fn file(arguments: &HttpArguments) -> Result<File, String> {
    let mut file = match &arguments.cases {
        None => File::parse(BUILT_IN)?,
        Some(path) => {
            let at = |error: String| format!("{}: {error}", path.display());
            let mut text = String::new();
            let opened = std::fs::File::open(path).map_err(|error| at(error.to_string()))?;
            let read = opened.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(|error| at(error.to_string()))?;
            if read as u64 == MAX_FILE_BYTES {
                return Err(at(format!("not a file of cases: it has {MAX_FILE_BYTES} bytes or more")));
            }
            File::parse(&text).map_err(at)?
        }
    };
    let paths = [
        (&arguments.path, &mut file.path),
        (&arguments.other_path, &mut file.other_path),
        (&arguments.counter, &mut file.counter),
    ];
    for (given, path) in paths {
        if let Some(given) = given {
            cases::is_path(given)?;
            path.clone_from(given);
        }
    }
    for given in &arguments.callers {
        let (name, line) = given.split_once('=').ok_or("--caller is written as `NAME=Header: value`")?;
        cases::header(line)?;
        let Some(lines) = file.callers.get_mut(name) else {
            let known: Vec<_> = file.callers.keys().map(String::as_str).collect();
            return Err(format!("there is no caller `{name}`; there are {}", known.join(", ")));
        };
        *lines = vec![line.to_owned()];
    }
    Ok(file)
}

/// Selects the cases of the profile. If the arguments name cases, selects only the named cases of the profile. Each
/// case comes with the sentence that asks for its rule.
fn choose<'a>(file: &'a File, arguments: &HttpArguments) -> Result<Vec<(&'a Case, &'a Ground)>, String> {
    let profile = arguments.profile;
    let is_named = |case: &Case, name: &String| case.name == *name || case.id == *name;
    let of_profile = file.cases.iter().filter_map(|case| Some((case, case.ground(profile)?)));
    let chosen: Vec<_> = of_profile
        .filter(|(case, _)| arguments.names.is_empty() || arguments.names.iter().any(|name| is_named(case, name)))
        .collect();
    if let Some(missing) = arguments.names.iter().find(|name| !chosen.iter().any(|(case, _)| is_named(case, name))) {
        return Err(format!("the profile {profile} has no case `{missing}`"));
    }
    match chosen.is_empty() {
        true => Err(format!("there are no cases of the profile {profile}")),
        false => Ok(chosen),
    }
}
