//! Reads `"1h 30m"` as a `Duration`.

use std::time::Duration;

/// Units from the largest to the smallest: the order in which a duration must name them.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Longest duration that the runtime and every store accept: 100 years.
const MAX_MILLIS: u64 = 100 * 366 * 86_400_000;

/// Reads a duration. The error message quotes the text, and names the mistake and a correction.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let mut rest = text.trim();
    let mut millis: u64 = 0;
    // Index of the largest unit that may still follow. A larger unit (as in `30m 1h`) is probably a mistake.
    let mut next = 0;
    if rest.is_empty() {
        return Err(unreadable(text));
    }
    while !rest.is_empty() {
        let (number, after) = split_while(rest, |c| c.is_ascii_digit());
        let (unit, after) = split_while(after, char::is_alphabetic);
        let position = UNITS.iter().position(|(name, _)| *name == unit);
        let (Some(position), false) = (position, number.is_empty()) else { return Err(unreadable(text)) };
        if position < next {
            return Err(format!("can't read `{text}` as a duration; write the largest unit first, and each unit once"));
        }
        let part = number.parse::<u64>().ok().and_then(|number| number.checked_mul(UNITS[position].1));
        let sum = part.and_then(|part| millis.checked_add(part)).filter(|sum| *sum <= MAX_MILLIS);
        millis = sum.ok_or_else(|| format!("`{text}` is too long; a duration has at most 36600 days"))?;
        next = position + 1;
        rest = after.trim_start();
    }
    Ok(Duration::from_millis(millis))
}

/// Writes a duration in the form that [`parse`] reads, for messages.
pub(crate) fn show(duration: Duration) -> String {
    let mut millis = duration.as_millis();
    let mut parts = Vec::new();
    for (unit, size) in UNITS {
        let count = millis / u128::from(size);
        millis %= u128::from(size);
        if count > 0 {
            parts.push(format!("{count}{unit}"));
        }
    }
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

fn unreadable(text: &str) -> String {
    match suggestion(text) {
        Some(better) => format!("can't read `{text}` as a duration; write `{better}`"),
        None => format!(
            "can't read `{text}` as a duration; write whole numbers with the units `ms`, `s`, `m`, `h`, `d`, \
             for example `30s`, `7d` or `1h 30m`"
        ),
    }
}

/// Returns the duration that a text such as `7 days`, `1 hour 30 minutes` or `2w` probably means, in valid form; `None`
/// for a text such as `90`, which has no unit.
fn suggestion(text: &str) -> Option<String> {
    let mut rest = text.trim();
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let (number, after) = split_while(rest, |c| c.is_ascii_digit());
        let (word, after) = split_while(after.trim_start(), char::is_alphabetic);
        let number: u64 = number.parse().ok()?;
        let (factor, unit) = match word.to_lowercase().as_str() {
            "ms" | "msec" | "msecs" | "millis" | "millisecond" | "milliseconds" => (1, "ms"),
            "s" | "sec" | "secs" | "second" | "seconds" => (1, "s"),
            "m" | "min" | "mins" | "minute" | "minutes" => (1, "m"),
            "h" | "hr" | "hrs" | "hour" | "hours" => (1, "h"),
            "d" | "day" | "days" => (1, "d"),
            "w" | "week" | "weeks" => (7, "d"),
            _ => return None,
        };
        parts.push(format!("{}{unit}", number.checked_mul(factor)?));
        rest = after.trim_start_matches([' ', ',']);
    }
    let better = parts.join(" ");
    // Offers only a text that `parse` accepts.
    (!better.is_empty() && parse(&better).is_ok()).then_some(better)
}

fn split_while(text: &str, take: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !take(c)).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_with_units_and_sums_are_read() {
        let cases = [
            ("500ms", 500),
            ("30s", 30_000),
            ("15m", 900_000),
            ("24h", 86_400_000),
            ("7d", 604_800_000),
            ("1h 30m", 5_400_000),
            ("1h30m", 5_400_000),
            (" 1d  1ms ", 86_400_001),
            ("0s", 0),
            ("36600d", MAX_MILLIS),
        ];
        for (text, millis) in cases {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn the_error_for_a_mistyped_duration_suggests_a_correction() {
        let cases = [
            ("7 days", "write `7d`"),
            ("1 hour, 30 minutes", "write `1h 30m`"),
            ("2w", "write `14d`"),
            ("30S", "write `30s`"),
            ("30m 1h", "largest unit first"),
            ("1m 1m", "each unit once"),
            ("90", "write whole numbers"),
            ("1.5h", "write whole numbers"),
            ("-1s", "write whole numbers"),
            ("", "write whole numbers"),
            ("s", "write whole numbers"),
            ("30 µs", "write whole numbers"),
            ("36601d", "at most 36600 days"),
            ("99999999999999999999d", "at most 36600 days"),
        ];
        for (text, expected) in cases {
            let message = parse(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
            assert!(message.contains(&format!("`{text}`")), "{text}: {message}");
        }
    }

    #[test]
    fn a_shown_duration_is_read_back() {
        for millis in [0, 1, 999, 10_000, 5_400_000, 86_400_001, MAX_MILLIS] {
            let duration = Duration::from_millis(millis);
            assert_eq!(parse(&show(duration)), Ok(duration));
        }
    }
}
