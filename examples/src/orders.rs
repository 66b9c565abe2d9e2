//! Order events as JSON lines.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An order to be charged: one line of the file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Order {
    /// Identifies the order; two lines with the same id are about the same order.
    pub order_id: String,
    /// The customer who is charged.
    pub customer: String,
    /// The amount, in cents.
    pub amount_cents: u64,
    /// The currency, as three capital letters.
    pub currency: String,
}

/// Writes the order as a JSON line.
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

/// An order and its place in the file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Event {
    /// Index of the order among the valid lines of the file, from 0.
    pub index: usize,
    /// Number of the line, from 1.
    pub line: usize,
    /// The order in the line.
    pub order: Order,
}

/// A line that is not an order.
#[derive(PartialEq, Eq, Debug)]
pub struct Malformed {
    /// Number of the line, from 1.
    pub line: usize,
    /// Reason why the line is not an order.
    pub reason: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

/// Reads all lines. Returns the orders, and the reason for each line that is not an order. Blank lines are skipped.
pub fn read(input: &[u8]) -> (Vec<Event>, Vec<Malformed>) {
    let (mut events, mut malformed) = (Vec::new(), Vec::new());
    let input = input.strip_prefix("\u{feff}".as_bytes()).unwrap_or(input);
    for (at, text) in input.split(|byte| *byte == b'\n').enumerate() {
        let line = at + 1;
        match order(text) {
            Ok(Some(order)) => events.push(Event { index: events.len(), line, order }),
            Ok(None) => {}
            Err(reason) => malformed.push(Malformed { line, reason }),
        }
    }
    (events, malformed)
}

fn order(line: &[u8]) -> Result<Option<Order>, String> {
    let line = str::from_utf8(line).map_err(|error| format!("not UTF-8 from byte {} on", error.valid_up_to() + 1))?;
    if line.trim().is_empty() {
        return Ok(None);
    }
    let order: Order = serde_json::from_str(line).map_err(|error| {
        // The parser got a single line, so its line number is always 1.
        let text = error.to_string();
        let reason = text.split(" at line ").next().unwrap_or_default();
        format!("{reason} (column {})", error.column())
    })?;
    if order.order_id.is_empty() {
        return Err("`order_id` is empty".to_owned());
    }
    if order.amount_cents == 0 {
        return Err("`amount_cents` is 0".to_owned());
    }
    if order.currency.len() != 3 || !order.currency.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Err(format!("`currency` is {:?}, not three capital letters", order.currency));
    }
    Ok(Some(order))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"order_id":"A-1","customer":"Ada Berg","amount_cents":1999,"currency":"EUR"}"#;

    fn problem(line: &str) -> String {
        let (events, mut malformed) = read(line.as_bytes());
        assert_eq!((events.len(), malformed.len()), (0, 1), "{line}");
        malformed.remove(0).reason
    }

    #[test]
    fn orders_before_and_after_a_malformed_line_are_read() {
        let input = format!("\u{feff}{GOOD}\r\n\n  \nnonsense\n{GOOD}");
        let (events, malformed) = read(input.as_bytes());
        assert_eq!(events.iter().map(|event| (event.index, event.line)).collect::<Vec<_>>(), [(0, 1), (1, 5)]);
        assert_eq!(malformed.iter().map(|bad| bad.line).collect::<Vec<_>>(), [4]);
        assert_eq!(events[0].order.amount_cents, 1999);
    }

    #[test]
    fn an_empty_input_has_no_malformed_lines() {
        assert_eq!(read(b""), (vec![], vec![]));
    }

    #[test]
    fn the_reason_of_a_malformed_line_names_mistake_and_column() {
        assert_eq!(problem("{"), "EOF while parsing an object (column 1)");
        assert_eq!(problem("{}"), "missing field `order_id` (column 2)");
        assert_eq!(problem(&format!("{GOOD} {GOOD}")), "trailing characters (column 79)");
        assert_eq!(problem(&GOOD.replace("1999", "0")), "`amount_cents` is 0");
        assert_eq!(problem(&GOOD.replace("1999", "-5")), "invalid value: integer `-5`, expected u64 (column 57)");
        assert_eq!(
            problem(&GOOD.replace("1999", "19.99")),
            "invalid type: floating point `19.99`, expected u64 (column 60)"
        );
        assert_eq!(problem(&GOOD.replace("EUR", "Euro")), "`currency` is \"Euro\", not three capital letters");
        assert_eq!(problem(&GOOD.replace("A-1", "")), "`order_id` is empty");
        let (_, malformed) = read(b"{\"order_id\":\"\xff\"}");
        assert_eq!(malformed[0].to_string(), "line 1: not UTF-8 from byte 14 on");
    }
}
