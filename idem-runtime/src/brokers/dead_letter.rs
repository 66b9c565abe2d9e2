//! Reasons of a message that is set aside, as headers of the message.

use std::fmt::{self, Display, Write as _};
use std::time::Duration;

use crate::engine::{Outcome, Refusal};

/// Longest value of a header, in bytes.
const MAX_BYTES: usize = 1_000;
const CUT: &str = "…";

/// Reasons of a message that is set aside, as headers for the message in the dead-letter queue.
///
/// An [`Intake`](super::Intake) creates values of this type. [`headers`](DeadLetter::headers) returns pairs of a name
/// and a text, for the headers of a broker's client:
///
/// | name | text |
/// |---|---|
/// | `idem-why` | `attempts_exhausted`, `fingerprint_mismatch`, `interrupted` and the like: the call was refused, and no delivery changes that; `unsent`: the operation has finished, and its messages are not all sent; `recorded_error`: the operation has finished with an error; `last_delivery`: the message has used up its deliveries; `beyond_limit`: the message was delivered too often, and no handler got it; `unreadable`: the message could not be read |
/// | `idem-error` | text of the error |
/// | `idem-key` | key as errors show it, with its scope ([`KeyDisplay`](crate::KeyDisplay)); absent without a key |
/// | `idem-scope` | scope of the key; absent without a key |
/// | `idem-attempt` | number of the latest attempt; absent if the call was refused without a number |
/// | `idem-deliveries` | number of deliveries; absent if the consumer does not know this number |
/// | `idem-time` | time at which the message was set aside, in UTC by the wall clock of this host |
///
/// Each text has at most 1,000 bytes, is not empty, and contains no control characters. The `Display` implementation
/// writes the same pairs in one line, for a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeadLetter {
    headers: Vec<(&'static str, String)>,
}

impl DeadLetter {
    /// Returns the reasons of a message whose delivery ended with `error` and `outcome`. `error` is `None` if the
    /// delivery returned a value although a call in it was refused.
    pub(super) fn of(error: Option<&dyn Display>, outcome: &Outcome, wall: Duration) -> Self {
        let why = match outcome.refusal().and_then(name) {
            Some(refusal) => refusal,
            None if outcome.unsent() => "unsent",
            None if outcome.recorded() => "recorded_error",
            None if outcome.is_last_delivery() => "last_delivery",
            None => "failed",
        };
        let error = error.unwrap_or(&"the handler returned a value, and a call in it was refused");
        let mut letter = Self::new(why, error);
        if let Some(key) = outcome.key() {
            letter.add("idem-key", key);
            letter.add("idem-scope", &key.scope());
        }
        if let Some(attempt) = outcome.attempt() {
            letter.add("idem-attempt", &attempt);
        }
        letter.at(outcome.delivery(), wall)
    }

    /// Returns the reasons of a message that no handler got.
    pub(super) fn unhandled(why: &'static str, error: &dyn Display, deliveries: Option<u32>, wall: Duration) -> Self {
        Self::new(why, error).at(deliveries, wall)
    }

    fn new(why: &'static str, error: &dyn Display) -> Self {
        let mut letter = Self { headers: Vec::with_capacity(7) };
        letter.add("idem-why", &why);
        letter.add("idem-error", error);
        letter
    }

    fn at(mut self, deliveries: Option<u32>, wall: Duration) -> Self {
        if let Some(deliveries) = deliveries {
            self.add("idem-deliveries", &deliveries);
        }
        self.add("idem-time", &UtcTime(wall));
        self
    }

    fn add(&mut self, name: &'static str, value: &dyn Display) {
        self.headers.push((name, text(value)));
    }

    /// Returns the names and texts of the headers.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.headers.iter().map(|(name, text)| (*name, &**text))
    }
}

impl fmt::Display for DeadLetter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (name, text)) in self.headers().enumerate() {
            write!(f, "{}{}={text:?}", if at == 0 { "" } else { " " }, name.trim_start_matches("idem-"))?;
        }
        Ok(())
    }
}

/// Returns the name of a refusal that no later delivery can change; `None` if a later delivery may succeed.
fn name(refusal: Refusal) -> Option<&'static str> {
    match refusal {
        Refusal::FingerprintMismatch => Some("fingerprint_mismatch"),
        Refusal::Interrupted => Some("interrupted"),
        Refusal::AttemptsExhausted => Some("attempts_exhausted"),
        Refusal::MissingKey => Some("missing_key"),
        Refusal::InvalidKey => Some("invalid_key"),
        Refusal::InvalidFingerprint => Some("invalid_fingerprint"),
        Refusal::InvalidPolicy => Some("invalid_policy"),
        Refusal::ResultUnavailable => Some("result_unavailable"),
        Refusal::Replay | Refusal::InProgress | Refusal::Store => None,
    }
}

/// Returns `value` as the text of a header.
fn text(value: &dyn Display) -> String {
    let mut written = String::new();
    // The text of an error may be long, so the writer stops it with an error at the limit. The text up to the limit is
    // kept.
    let _ = write!(BoundedText(&mut written), "{value}");
    let mut text: String = written.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.len() > MAX_BYTES {
        text.truncate((0..=MAX_BYTES - CUT.len()).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0));
        text.push_str(CUT);
    }
    if text.trim().is_empty() { "-".to_owned() } else { text }
}

/// Collects text until more than [`MAX_BYTES`] bytes are written.
struct BoundedText<'a>(&'a mut String);

impl fmt::Write for BoundedText<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.extend(text.chars().take(MAX_BYTES + 1));
        if self.0.len() > MAX_BYTES { Err(fmt::Error) } else { Ok(()) }
    }
}

/// A wall-clock time since 1970, as `2026-01-31T23:59:59Z`.
struct UtcTime(Duration);

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut days, seconds) = (self.0.as_secs() / 86_400, self.0.as_secs() % 86_400);
        let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let mut year = 1970;
        while days >= 365 + u64::from(is_leap(year)) && year < 9_999 {
            days -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let mut month = 1;
        for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        write!(f, "{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wall_clock_time_is_written_as_date_and_time_in_utc() {
        let written = |seconds| UtcTime(Duration::from_secs(seconds)).to_string();
        assert_eq!(written(0), "1970-01-01T00:00:00Z");
        assert_eq!(written(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(written(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(written(951_868_800), "2000-03-01T00:00:00Z");
        assert_eq!(written(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(written(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn the_text_of_a_header_is_bounded_and_has_no_control_characters() {
        assert_eq!(text(&"two\r\nlines"), "two  lines");
        assert_eq!(text(&""), "-");
        let long = text(&"é".repeat(5_000));
        assert!(long.len() <= MAX_BYTES && long.len() > MAX_BYTES - 8, "{}", long.len());
        assert!(long.ends_with("é…"));
        let whole = "x".repeat(MAX_BYTES);
        assert_eq!(text(&whole), whole);
    }
}
