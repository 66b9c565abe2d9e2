//! Output of the commands, and their exit statuses.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::operator::OperatorError;
use idem_runtime::record::StoredResult;
use idem_runtime::{StoreError, StoreErrorKind};
use serde_json::{Value, json};

/// Exit status of a program that ended because of a closed pipe.
pub(crate) const CLOSED_PIPE: u8 = 141;

/// Exit statuses, for the end of every help text.
pub(crate) const STATUSES: &str = "\
Exit status: 0 done, 1 refused or something is wrong, 2 wrong use, 3 the store can't be reached or used, 4 nothing found, \
141 if what reads the output is gone.";

/// Reason why a command did not finish.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The store or the person refused, or the stored data is wrong.
    Refused(String),
    /// The user used the command in a wrong way.
    Usage(String),
    /// The store can't be reached or used.
    Unreachable(String),
    /// The record does not exist.
    Nothing(String),
    /// The reader of the output is gone.
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

    /// Prints the reason, and returns the exit status. A closed pipe is not reported.
    pub(crate) fn report(&self, as_json: bool) -> ExitCode {
        let (status, kind) = self.status();
        let message = match self {
            Self::Unreachable(text) => advised(hidden(text)),
            Self::Refused(text) | Self::Usage(text) | Self::Nothing(text) => hidden(text),
            Self::Output(_) if status == CLOSED_PIPE => return ExitCode::from(status),
            Self::Output(error) => format!("can't write: {error}"),
        };
        // The reader of standard error may be gone as well.
        let _ = match as_json {
            true => writeln!(io::stderr(), "{}", json!({ "error": kind, "status": status, "message": message })),
            false => writeln!(io::stderr(), "idem: {message}"),
        };
        ExitCode::from(status)
    }
}

/// Adds advice about certificates, because the drivers report only the problem.
fn advised(mut text: String) -> String {
    if text.contains("invalid peer certificate") {
        text.push_str("; this program trusts the certificates of this system, or in the file that SSL_CERT_FILE names");
    }
    text
}

/// Joins the texts of an error and its causes, without repetitions.
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

/// Placeholders for logins in the URLs of messages and help texts. A placeholder contains no password.
const PLACEHOLDERS: [&str; 2] = ["[user:password@]", "[user[:password]@]"];

/// Removes the logins of URLs from a text, so that a URL in a message leaves no password in a log.
pub(crate) fn hidden(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        // The rest of the word is still searched: a user may have typed a URL behind a placeholder.
        let placeholder = PLACEHOLDERS.into_iter().find(|it| after.starts_with(it)).unwrap_or_default();
        let after = &after[placeholder.len()..];
        let is_end = |c: char| c.is_whitespace() || matches!(c, '/' | '?' | '`' | '"' | '\'');
        let authority = &after[..after.find(is_end).unwrap_or(after.len())];
        shown.extend([before, "://", placeholder]);
        // A password may contain characters that should have been escaped, so the login extends to the last `@` before
        // white space.
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

/// Removes the values of `password=` parameters from a text.
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

/// Returns the text on one line, without control characters, because names and reasons may contain any text.
pub(crate) fn printable(text: &str) -> String {
    text.replace(char::is_control, "�")
}

/// Returns a line about a record for a person.
pub(crate) fn line(name: &str, value: &str) -> String {
    format!("{name:<13}{}\n", printable(value))
}

/// Returns a result as text if its bytes are text, otherwise as hexadecimal digits. JSON is not parsed, so its numbers
/// keep their form.
pub(crate) fn content(bytes: &Bytes) -> (&'static str, String) {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains(|c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t')) => {
            ("text", text.to_owned())
        }
        _ => ("hex", bytes.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"))),
    }
}

/// Describes a result without its content.
pub(crate) fn described(result: &StoredResult) -> String {
    match result {
        StoredResult::Encoded { codec, bytes } => format!("{} bytes of {}", bytes.len(), codec.as_str()),
        StoredResult::LeftOut { codec, size: Some(size) } => format!("{size} bytes of {}", codec.as_str()),
        StoredResult::LeftOut { codec, size: None } => codec.as_str().to_owned(),
        StoredResult::TooLarge { size } => format!("not recorded: {size} bytes are more than the policy allows"),
        StoredResult::Unreadable { reason } => format!("can't be read: {reason}"),
        _ => "unknown: it could not be written, or was resolved without one".to_owned(),
    }
}

/// Escapes the control characters that JSON allows in texts, because a terminal would execute some of them.
fn escaped(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' => {
                // Writing to a `String` never fails.
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// Output format: one JSON object per line, or text.
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    /// Prints `object` if the output is JSON, otherwise `text`.
    pub(crate) fn line(&self, object: &Value, text: &str) -> Result<(), Stop> {
        let mut output = io::stdout().lock();
        match self.json {
            true => writeln!(output, "{}", escaped(&object.to_string()))?,
            false => writeln!(output, "{}", text.trim_end_matches('\n'))?,
        }
        Ok(output.flush()?)
    }
}

/// Prints text or bytes unchanged.
pub(crate) fn print(bytes: &[u8]) -> Result<(), Stop> {
    let mut output = io::stdout().lock();
    output.write_all(bytes)?;
    Ok(output.flush()?)
}

/// Asks on the terminal for confirmation, unless `yes` is set. Fails without a terminal.
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

/// Parses a time limit, `10`, `10s` or `2m`: from one second to one hour.
pub(crate) fn time_limit(text: &str) -> Result<Duration, String> {
    let (number, unit) = match (text.strip_suffix('s'), text.strip_suffix('m')) {
        (Some(number), _) => (number, 1),
        (_, Some(number)) => (number, 60),
        _ => (text, 1),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    let limit = seconds.filter(|seconds| (1..=3600).contains(seconds)).map(Duration::from_secs);
    limit.ok_or_else(|| "a time limit is written as `10`, `10s` or `2m`: from one second to one hour".to_owned())
}

/// Formats a duration for a person, in its two largest units.
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

/// Returns milliseconds, for JSON.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logins_of_urls_are_hidden() {
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
            ("redis://[user:password@]bob:secret@host", "redis://[user:password@]***@host"),
            ("redis://[bob:secret@]host", "redis://***@]host"),
        ];
        for (text, expected) in shown {
            assert_eq!(hidden(text), expected);
        }
    }

    #[test]
    fn the_forms_of_urls_in_messages_stay_whole() {
        let forms = "redis://[user:password@]host[:port][/database], redis-cluster://host[:port][,host…] or \
                     `postgres://[user[:password]@]host[:port][/database]`";
        assert_eq!(hidden(forms), forms);
    }

    #[test]
    fn control_characters_in_names_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2J\nb"), "a�[2J�b");
        assert_eq!(printable("a\u{9b}2Jb"), "a�2Jb");
        let object = serde_json::json!({ "reason": "a\u{9b}2J\u{1b}é" });
        let escaped = escaped(&object.to_string());
        assert_eq!(escaped, "{\"reason\":\"a\\u009b2J\\u001bé\"}");
        assert_eq!(serde_json::from_str::<Value>(&escaped).unwrap(), object);
    }

    #[test]
    fn a_time_limit_may_have_a_unit() {
        for (text, seconds) in [("10", 10), ("5s", 5), ("2m", 120), ("60m", 3600), ("3600", 3600)] {
            assert_eq!(time_limit(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "0", "0s", "s", "61m", "3601", "1h", "-1", "5 s", "18446744073709551615m"] {
            assert!(time_limit(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_duration_is_shown_in_its_two_largest_units() {
        let shown = [(0, "0 ms"), (999, "999 ms"), (1_500, "1.5 s"), (60_000, "1 min"), (3_690_000, "1 h 1 min")];
        for (millis, expected) in shown.into_iter().chain([(604_800_000, "7 d"), (608_400_000, "7 d 1 h")]) {
            assert_eq!(human(Duration::from_millis(millis)), expected);
        }
    }
}
