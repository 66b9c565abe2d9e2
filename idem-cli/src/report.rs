//! What a verb prints, and how it ends.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use idem_runtime::operator::OperatorError;
use idem_runtime::{StoreError, StoreErrorKind};
use serde_json::{Value, json};

/// As of a program that a closed pipe has ended.
pub(crate) const CLOSED_PIPE: u8 = 141;

/// The exit statuses, for the end of every help.
pub(crate) const STATUSES: &str = "\
Exit status: 0 done, 1 refused or something is wrong, 2 wrong use, 3 the store can't be reached or used, 4 nothing found, \
141 if what reads the output is gone.";

/// Why a verb has not done what it was asked for.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The store or the person said no, or something is wrong with what is stored.
    Refused(String),
    /// Wrong use.
    Usage(String),
    /// The store can't be reached or used.
    Unreachable(String),
    /// There is no such record.
    Nothing(String),
    /// Nobody reads what is printed.
    Output(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Self {
        Self::of_store(error.kind(), chain(&error))
    }
}

impl From<OperatorError> for Stop {
    fn from(error: OperatorError) -> Self {
        match &error {
            OperatorError::NoRecord { .. } => Self::Nothing(error.to_string()),
            OperatorError::Unsupported { .. } => Self::Refused(chain(&error)),
            OperatorError::Store { source, .. } => Self::of_store(source.kind(), chain(&error)),
            _ => Self::Refused(error.to_string()),
        }
    }
}

impl Stop {
    fn of_store(kind: StoreErrorKind, message: String) -> Self {
        match kind {
            StoreErrorKind::Corrupt | StoreErrorKind::TooLarge | StoreErrorKind::Unsupported => Self::Refused(message),
            _ => Self::Unreachable(message),
        }
    }

    fn status(&self) -> (u8, &'static str) {
        match self {
            Self::Refused(_) => (1, "refused"),
            Self::Usage(_) => (2, "usage"),
            Self::Unreachable(_) => (3, "unreachable"),
            Self::Nothing(_) => (4, "nothing_found"),
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => (CLOSED_PIPE, "closed_pipe"),
            Self::Output(_) => (1, "output"),
        }
    }

    /// Says why, and returns the exit status. A pipe that was closed needs no words.
    pub(crate) fn report(&self, as_json: bool) -> ExitCode {
        let (status, kind) = self.status();
        let message = match self {
            Self::Unreachable(text) => advised(hidden(text)),
            Self::Refused(text) | Self::Usage(text) | Self::Nothing(text) => hidden(text),
            Self::Output(_) if status == CLOSED_PIPE => return ExitCode::from(status),
            Self::Output(error) => format!("can't write: {error}"),
        };
        // Nobody may be there to read this either.
        let _ = match as_json {
            true => writeln!(io::stderr(), "{}", json!({ "error": kind, "status": status, "message": message })),
            false => writeln!(io::stderr(), "idem: {message}"),
        };
        ExitCode::from(status)
    }
}

/// With what is to be done about a certificate: the drivers only say what is wrong with it.
fn advised(mut text: String) -> String {
    if text.contains("invalid peer certificate") {
        text.push_str("; trusted are the certificates of this system, or those in the file that SSL_CERT_FILE names");
    }
    text
}

/// An error and what caused it, each said once.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            let _ = write!(text, ": {said}");
        }
        cause = error.source();
    }
    text
}

/// The text without the logins of URLs: whoever types a URL in the wrong place finds no password in a log.
pub(crate) fn hidden(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        let is_end = |c: char| c.is_whitespace() || matches!(c, '/' | '?' | '`' | '"' | '\'');
        let authority = &after[..after.find(is_end).unwrap_or(after.len())];
        shown.extend([before, "://"]);
        // A password may hold any character that its writer forgot to escape: up to the last `@` before white space.
        let word = &after[..after.find(char::is_whitespace).unwrap_or(after.len())];
        let login = word.rfind('@').filter(|at| authority.contains('@') || word[..*at].contains(':'));
        rest = match login {
            Some(at) => {
                shown.push_str("***");
                &after[at..]
            }
            None => after,
        };
    }
    shown.push_str(rest);
    without_parameters(&shown)
}

/// The text without what is said to be a password.
fn without_parameters(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("password=") {
        shown.extend([before, "password=***"]);
        let end = after.find(|c: char| c.is_whitespace() || matches!(c, '&' | '`' | '"'));
        rest = &after[end.unwrap_or(after.len())..];
    }
    shown.push_str(rest);
    shown
}

/// The text on one line, without what would steer a terminal: names and reasons are whatever somebody has written.
pub(crate) fn printable(text: &str) -> String {
    text.replace(char::is_control, "�")
}

/// Where a verb prints: one JSON object a line, or text.
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    /// Prints the object, or the text in its place.
    pub(crate) fn line(&self, object: &Value, text: &str) -> Result<(), Stop> {
        let mut output = io::stdout().lock();
        match self.json {
            true => writeln!(output, "{object}")?,
            false => writeln!(output, "{}", text.trim_end_matches('\n'))?,
        }
        Ok(output.flush()?)
    }
}

/// Prints text or bytes as they are.
pub(crate) fn print(bytes: &[u8]) -> Result<(), Stop> {
    let mut output = io::stdout().lock();
    output.write_all(bytes)?;
    Ok(output.flush()?)
}

/// Asks on the terminal whether to go on, unless `yes` says so. Without a terminal nobody can be asked.
pub(crate) fn confirm(yes: bool, about: &str, question: &str) -> Result<(), Stop> {
    if yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Stop::Usage(format!("{question}: nobody can be asked here; nothing was changed; add --yes")));
    }
    let mut terminal = io::stderr();
    write!(terminal, "{}{question}? [y/N] ", hidden(about))?;
    terminal.flush()?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" | "Yes" => Ok(()),
        _ => Err(Stop::Refused("nothing was changed".to_owned())),
    }
}

/// A duration as a person reads it: its two largest units.
pub(crate) fn human(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let of = |large: u64, small: u64| (seconds / large, seconds % large / small);
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..60 => format!("{:.1} s", duration.as_secs_f64()),
        60..3600 => pair(of(60, 1), "min", "s"),
        3600..86_400 => pair(of(3600, 60), "h", "min"),
        _ => pair(of(86_400, 3600), "d", "h"),
    }
}

fn pair((large, small): (u64, u64), many: &str, few: &str) -> String {
    match small {
        0 => format!("{large} {many}"),
        small => format!("{large} {many} {small} {few}"),
    }
}

/// Milliseconds, for JSON.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_login_is_shown() {
        let shown = [
            ("no record", "no record"),
            ("redis://host:6379/0", "redis://host:6379/0"),
            ("at `redis://:secret@host/0`, and", "at `redis://***@host/0`, and"),
            ("postgres://bob:se/cr@et@host/db x", "postgres://***@host/db x"),
            ("two a://u:p@h b://v:q@i", "two a://***@h b://***@i"),
            (
                "redis-sentinel://h/main?sentinel_password=secret&tls=true",
                "redis-sentinel://h/main?sentinel_password=***&tls=true",
            ),
            ("host=h password=secret user=u", "host=h password=*** user=u"),
        ];
        for (text, expected) in shown {
            assert_eq!(hidden(text), expected);
        }
    }

    #[test]
    fn no_name_steers_a_terminal() {
        assert_eq!(printable("a\u{1b}[2J\nb"), "a�[2J�b");
    }

    #[test]
    fn durations_are_short() {
        let shown = [(0, "0 ms"), (999, "999 ms"), (1_500, "1.5 s"), (60_000, "1 min"), (3_690_000, "1 h 1 min")];
        for (millis, expected) in shown.into_iter().chain([(604_800_000, "7 d"), (608_400_000, "7 d 1 h")]) {
            assert_eq!(human(Duration::from_millis(millis)), expected);
        }
    }
}
