//! The print of a JSON body is a hash of its content: two bodies with the same meaning have the same print.
//!
//! The print is the SHA-256 of a canonical form. The form is written while the body is read, in one pass and without
//! recursion:
//!
//! | value | form |
//! |---|---|
//! | `null`, `true`, `false` | `n`, `t`, `f` |
//! | a text | `"`, its characters in UTF-8, `FF` |
//! | a number | `#`, its sign, its digits without zeros at either end, `e` and the exponent unless it is 0, `FF` |
//! | a number whose exponent has more than 18 digits | `!`, the number as it is written, `FF` |
//! | an array | `[`, its elements, `]` |
//! | an object | `{`, its members in the order of their bytes, `FE`; a member is its name, `FF`, the form of its value |
//! | an object whose members take more than 32 bytes | `h`, SHA-256 of these members |
//!
//! UTF-8 contains neither `FE` nor `FF`, so different values have different forms. An escaped surrogate without its
//! other half is written as the three bytes to which UTF-8 would encode it, so it differs from every other text. At the
//! end of a long object its hash replaces its members, so the form is not much longer than the body, no matter how deep
//! the body nests.

use sha2::{Digest, Sha256};

/// Deepest nesting that is read. Most JSON parsers accept no more than 128 or 512 levels.
pub(super) const MAX_DEPTH: usize = 400;

/// Byte that ends a text, a name or a number in the canonical form.
const END: u8 = 0xff;
/// Byte that ends the members of an object in the canonical form.
const MEMBERS_END: u8 = 0xfe;

/// Largest size in bytes of an object's members in the canonical form; a hash replaces larger members.
const MAX_MEMBERS_BYTES: usize = 32;
/// Largest number of digits of an exponent that is used in calculations.
const MAX_EXPONENT_DIGITS: usize = 18;

/// Reason why a body has no print as JSON.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JsonDefect {
    /// The body is not JSON.
    NotJson,
    /// The body nests deeper than [`MAX_DEPTH`].
    TooDeep,
    /// An object has two members of one name: parsers differ about which of the two they use.
    TwoMembers,
}

/// Members of a JSON body that are compared when two requests have the same key; see
/// [`fingerprint_members`](super::IdempotencyLayer::fingerprint_members).
///
/// ```
/// use idem_runtime::http::JsonMembers;
///
/// let payment = JsonMembers::only(["amount", "currency", "card"]);
/// let without_the_time = JsonMembers::without(["sent_at"]);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JsonMembers {
    names: Vec<String>,
    /// True if only the members with these names are compared; false if all members except these are compared.
    are_chosen: bool,
}

impl JsonMembers {
    /// Compares only these members of the body's object, with their whole values. Other members may differ.
    pub fn only<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Self {
        Self { names: names.into_iter().map(Into::into).collect(), are_chosen: true }
    }

    /// Compares all members of the body's object except these members, which may differ.
    pub fn without<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Self {
        Self { names: names.into_iter().map(Into::into).collect(), are_chosen: false }
    }

    fn chooses(&self, name: &[u8]) -> bool {
        self.names.iter().any(|it| it.as_bytes() == name) == self.are_chosen
    }

    /// Describes the parts of the body that a retry must repeat, for the description of the API that clients read.
    pub(super) fn words(&self) -> String {
        let names: Vec<_> = self.names.iter().map(|name| format!("`{name}`")).collect();
        let names = names.join(", ");
        match self.are_chosen {
            true => format!("these members of its body: {names}"),
            false => format!("its body without these members: {names}"),
        }
    }
}

/// Returns the print of a JSON body, or of its `chosen` members. If the body has several defects, the error is the
/// first defect in the order of the bytes.
pub(super) fn print(body: &[u8], chosen: Option<&JsonMembers>) -> Result<[u8; 32], JsonDefect> {
    let text = std::str::from_utf8(body).map_err(|_| JsonDefect::NotJson)?;
    let (form, open, members) = (Vec::new(), Vec::new(), Vec::new());
    let mut reader = Reader { rest: text.as_bytes(), form, open, members, chosen };
    reader.document()?;
    Ok(Sha256::digest(&reader.form).into())
}

/// An array or object that has begun and not ended.
#[derive(Clone, Copy)]
enum Container {
    Array,
    Object {
        /// Position in [`Reader::form`] at which the members of the object begin.
        start: usize,
        /// Index of the object's first member in [`Reader::members`].
        first: usize,
    },
}

/// The position of a member in [`Reader::form`].
#[derive(Clone, Copy)]
struct Member {
    start: usize,
    end: usize,
}

impl Member {
    fn of(self, form: &[u8]) -> &[u8] {
        &form[self.start..self.end]
    }

    fn name(self, form: &[u8]) -> &[u8] {
        self.of(form).split(|byte| *byte == END).next().unwrap_or_default()
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    form: Vec<u8>,
    open: Vec<Container>,
    /// Members of all open objects; the members of the innermost object are the last.
    members: Vec<Member>,
    /// Members of the outermost object that are compared; `None` if all members are compared.
    chosen: Option<&'a JsonMembers>,
}

impl<'a> Reader<'a> {
    fn document(&mut self) -> Result<(), JsonDefect> {
        loop {
            if self.opens_value()? {
                continue;
            }
            // A value has ended; the containers around the value may end here, too.
            while self.ends_container()? {}
            if self.open.is_empty() {
                return if self.peek().is_none() { Ok(()) } else { Err(JsonDefect::NotJson) };
            }
        }
    }

    /// Reads a value; of an array or object, reads only the beginning. Returns whether a first element or member
    /// follows.
    fn opens_value(&mut self) -> Result<bool, JsonDefect> {
        match self.peek().ok_or(JsonDefect::NotJson)? {
            b'{' => return self.opens_object(),
            b'[' => return self.opens_array(),
            b'"' => {
                self.form.push(b'"');
                self.text()?;
            }
            b'n' => self.word(b"null")?,
            b't' => self.word(b"true")?,
            b'f' => self.word(b"false")?,
            _ => self.number()?,
        }
        Ok(false)
    }

    fn opens_array(&mut self) -> Result<bool, JsonDefect> {
        self.take(1);
        self.form.push(b'[');
        if self.peek() == Some(b']') {
            self.take(1);
            self.form.push(b']');
            return Ok(false);
        }
        self.nest(Container::Array)
    }

    fn opens_object(&mut self) -> Result<bool, JsonDefect> {
        self.take(1);
        self.form.push(b'{');
        if self.peek() == Some(b'}') {
            self.take(1);
            self.form.push(MEMBERS_END);
            return Ok(false);
        }
        self.nest(Container::Object { start: self.form.len(), first: self.members.len() })?;
        self.begin_member()?;
        Ok(true)
    }

    fn nest(&mut self, container: Container) -> Result<bool, JsonDefect> {
        if self.open.len() == MAX_DEPTH {
            return Err(JsonDefect::TooDeep);
        }
        self.open.push(container);
        Ok(true)
    }

    /// Reads the character after a value. Returns whether this character ends the container. The end of a container is
    /// also the end of a value in the container around it.
    fn ends_container(&mut self) -> Result<bool, JsonDefect> {
        let Some(&container) = self.open.last() else { return Ok(false) };
        match (container, self.peek().ok_or(JsonDefect::NotJson)?) {
            (Container::Array, b',') => {
                self.take(1);
                Ok(false)
            }
            (Container::Array, b']') => {
                self.take(1);
                self.form.push(b']');
                self.open.pop();
                Ok(true)
            }
            (Container::Object { .. }, b',') => {
                self.take(1);
                self.end_member();
                self.begin_member()?;
                Ok(false)
            }
            (Container::Object { start, first }, b'}') => {
                self.take(1);
                self.end_member();
                self.end_object(start, first)?;
                self.open.pop();
                Ok(true)
            }
            _ => Err(JsonDefect::NotJson),
        }
    }

    /// Reads the name of a member, and the colon.
    fn begin_member(&mut self) -> Result<(), JsonDefect> {
        let start = self.form.len();
        self.members.push(Member { start, end: start });
        if self.peek() != Some(b'"') {
            return Err(JsonDefect::NotJson);
        }
        self.text()?;
        if self.peek() != Some(b':') {
            return Err(JsonDefect::NotJson);
        }
        self.take(1);
        Ok(())
    }

    fn end_member(&mut self) {
        if let Some(member) = self.members.last_mut() {
            member.end = self.form.len();
        }
    }

    /// Sorts the members of an object whose form begins at `start`. Replaces long members by their hash.
    fn end_object(&mut self, start: usize, first: usize) -> Result<(), JsonDefect> {
        let (form, members) = (&mut self.form, &mut self.members[first..]);
        members.sort_unstable_by(|one, other| one.of(form).cmp(other.of(form)));
        if members.windows(2).any(|pair| pair[0].name(form) == pair[1].name(form)) {
            return Err(JsonDefect::TwoMembers);
        }
        let chosen = self.chosen.filter(|_| self.open.len() == 1);
        let sorted = members.iter().filter(|member| chosen.is_none_or(|it| it.chooses(member.name(form))));
        let sorted = sorted.map(|member| member.of(form));
        if sorted.clone().map(<[u8]>::len).sum::<usize>() > MAX_MEMBERS_BYTES {
            let hash = sorted.fold(Sha256::new(), Digest::chain_update).finalize();
            form.truncate(start - 1);
            form.push(b'h');
            form.extend_from_slice(&hash);
        } else {
            let sorted = sorted.collect::<Vec<_>>().concat();
            form.truncate(start);
            form.extend_from_slice(&sorted);
            form.push(MEMBERS_END);
        }
        self.members.truncate(first);
        Ok(())
    }

    /// Skips blanks, and returns the next character.
    fn peek(&mut self) -> Option<u8> {
        let blanks = self.count(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
        self.take(blanks);
        self.rest.first().copied()
    }

    /// Returns the number of bytes at the start of `rest` for which `is_of_kind` is true.
    fn count(&self, is_of_kind: impl Fn(u8) -> bool) -> usize {
        self.rest.iter().position(|byte| !is_of_kind(*byte)).unwrap_or(self.rest.len())
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        taken
    }

    /// Reads the next byte if `is_of_kind` is true for it. Returns whether a byte was read.
    fn takes(&mut self, is_of_kind: impl Fn(u8) -> bool) -> bool {
        let takes = self.rest.first().is_some_and(|byte| is_of_kind(*byte));
        self.take(usize::from(takes));
        takes
    }

    fn word(&mut self, word: &[u8]) -> Result<(), JsonDefect> {
        self.rest = self.rest.strip_prefix(word).ok_or(JsonDefect::NotJson)?;
        self.form.push(word[0]);
        Ok(())
    }

    /// Reads a text. Writes its characters, and the byte that ends a text.
    fn text(&mut self) -> Result<(), JsonDefect> {
        self.take(1);
        loop {
            let plain = self.take(self.count(|byte| !matches!(byte, b'"' | b'\\' | 0..=0x1f)));
            self.form.extend_from_slice(plain);
            match self.rest {
                [b'"', rest @ ..] => {
                    self.rest = rest;
                    self.form.push(END);
                    return Ok(());
                }
                [b'\\', b'u', rest @ ..] => self.escaped_unit(rest)?,
                [b'\\', escaped, rest @ ..] => {
                    self.form.push(match escaped {
                        b'"' | b'\\' | b'/' => *escaped,
                        b'b' => 8,
                        b'f' => 12,
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        _ => return Err(JsonDefect::NotJson),
                    });
                    self.rest = rest;
                }
                _ => return Err(JsonDefect::NotJson),
            }
        }
    }

    /// Reads a hexadecimal escape whose digits are at the start of `digits`: a character, or half of a surrogate pair.
    fn escaped_unit(&mut self, digits: &'a [u8]) -> Result<(), JsonDefect> {
        let (high, rest) = code_unit(digits).ok_or(JsonDefect::NotJson)?;
        self.rest = rest;
        let mut code = u32::from(high);
        if let (0xd800..=0xdbff, [b'\\', b'u', digits @ ..]) = (high, rest)
            && let Some((low @ 0xdc00..=0xdfff, rest)) = code_unit(digits)
        {
            code = 0x10000 + ((u32::from(high) - 0xd800) << 10) + (u32::from(low) - 0xdc00);
            self.rest = rest;
        }
        match char::from_u32(code) {
            Some(character) => self.form.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
            // A surrogate without its other half has no character, so its three bytes are written.
            None => self.form.extend([0xe0 | high >> 12, 0x80 | high >> 6 & 0x3f, 0x80 | high & 0x3f].map(low_byte)),
        }
        Ok(())
    }

    /// Reads a number.
    fn number(&mut self) -> Result<(), JsonDefect> {
        let start = self.rest;
        let is_negative = self.takes(|byte| byte == b'-');
        let whole = self.digits()?;
        if whole.len() > 1 && whole[0] == b'0' {
            return Err(JsonDefect::NotJson);
        }
        let fraction = if self.takes(|byte| byte == b'.') { self.digits()? } else { b"" };
        let (mut falls, mut exponent) = (false, &b""[..]);
        if self.takes(|byte| matches!(byte, b'e' | b'E')) {
            falls = self.rest.first() == Some(&b'-');
            self.takes(|byte| matches!(byte, b'+' | b'-'));
            exponent = self.digits()?;
        }
        let written = &start[..start.len() - self.rest.len()];
        match power(falls, exponent) {
            _ if whole.iter().chain(fraction).all(|digit| *digit == b'0') => self.form.extend_from_slice(b"#0"),
            Some(power) => self.decimal(is_negative, [whole, fraction], power),
            None => {
                self.form.push(b'!');
                self.form.extend_from_slice(written);
            }
        }
        self.form.push(END);
        Ok(())
    }

    /// Writes the number `whole.fraction` times ten to the `power`, without zeros at either end.
    fn decimal(&mut self, is_negative: bool, [whole, fraction]: [&[u8]; 2], power: i128) {
        self.form.push(b'#');
        self.form.extend(is_negative.then_some(b'-'));
        let start = self.form.len();
        self.form.extend_from_slice(whole);
        self.form.extend_from_slice(fraction);
        let digits = &self.form[start..];
        let end = digits.iter().rposition(|digit| *digit != b'0').map_or(0, |last| last + 1);
        let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
        self.form.truncate(start + end);
        self.form.drain(start..start + zeros.min(end));
        let power = power + whole.len() as i128 - end as i128;
        if power != 0 {
            self.form.push(b'e');
            self.form.extend_from_slice(itoa::Buffer::new().format(power).as_bytes());
        }
    }

    /// Reads one digit or more.
    fn digits(&mut self) -> Result<&'a [u8], JsonDefect> {
        match self.take(self.count(|byte| byte.is_ascii_digit())) {
            [] => Err(JsonDefect::NotJson),
            digits => Ok(digits),
        }
    }
}

fn low_byte(unit: u16) -> u8 {
    unit.to_le_bytes()[0]
}

/// Reads four hexadecimal digits. Returns the number that the digits form, and the remaining bytes.
fn code_unit(digits: &[u8]) -> Option<(u16, &[u8])> {
    let (digits, rest) = digits.split_at_checked(4)?;
    let unit = digits.iter().try_fold(0, |unit, digit| Some(unit << 4 | char::from(*digit).to_digit(16)?))?;
    Some((u16::try_from(unit).ok()?, rest))
}

/// Returns the exponent with these digits; `None` if the exponent is too long for calculations.
fn power(is_negative: bool, digits: &[u8]) -> Option<i128> {
    let digits = &digits[digits.iter().take_while(|digit| **digit == b'0').count()..];
    if digits.len() > MAX_EXPONENT_DIGITS {
        return None;
    }
    let power = digits.iter().fold(0, |power, digit| power * 10 + i128::from(digit - b'0'));
    Some(if is_negative { -power } else { power })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn print(body: &[u8]) -> Result<[u8; 32], JsonDefect> {
        super::print(body, None)
    }

    #[test]
    fn only_chosen_members_of_a_body_are_compared() {
        let only = JsonMembers::only(["amount", "card"]);
        let without = JsonMembers::without(["sent_at"]);
        let of = |members: &JsonMembers, body: &str| super::print(body.as_bytes(), Some(members));
        let long = "x".repeat(100);
        let body = r#"{"amount":5,"card":{"no":"1","sent_at":1},"sent_at":1}"#;
        // The order of members and all members that are not chosen may differ.
        for (members, same) in [
            (&only, r#"{"card":{"sent_at":1,"no":"1"},"amount":5.0}"#.to_owned()),
            (&only, format!(r#"{{"a":"{long}","amount":5,"card":{{"no":"1","sent_at":1}},"z":[{{"amount":1}}]}}"#)),
            (&without, format!(r#"{{"amount":5,"sent_at":"{long}","card":{{"no":"1","sent_at":1}}}}"#)),
            (&without, r#"{"sent_at":2,"amount":5,"card":{"no":"1","sent_at":1}}"#.to_owned()),
        ] {
            assert_eq!(of(members, &same), of(members, body), "{same}");
        }
        // A chosen member is compared with its whole value, and only in the outermost object.
        for other in [
            r#"{"amount":6,"card":{"no":"1","sent_at":1},"sent_at":1}"#,
            r#"{"amount":5,"card":{"no":"1","sent_at":2},"sent_at":1}"#,
            r#"{"amount":5,"sent_at":1}"#,
            r#"{"body":{"amount":5,"card":{"no":"1","sent_at":1},"sent_at":1}}"#,
            r#"[{"amount":5,"card":{"no":"1","sent_at":1},"sent_at":1}]"#,
        ] {
            assert_ne!(of(&only, other), of(&only, body), "{other}");
            assert_ne!(of(&without, other), of(&without, body), "{other}");
        }
        // A body that is no object is compared as a whole. A repeated name is refused, whether the member is chosen or
        // not.
        assert_ne!(of(&only, r#"[{"a":1}]"#), of(&only, r#"[{"a":2}]"#));
        assert_eq!(of(&only, r#"{"a":1,"a":2}"#), Err(JsonDefect::TwoMembers));
    }

    #[test]
    fn json_bodies_are_compared_by_their_content() {
        let groups = [
            &[r#"{"a":1,"b":[1,2]}"#, " {\n\"b\" : [1.0 , 2e0], \"a\":10e-1 } ", r#"{"\u0061":1,"b":[1,2]}"#][..],
            &[r#"{"a":1,"b":[2,1]}"#],
            &[r#"{"a":1}"#],
            &[r#"{"a":1,"b":null}"#],
            &[r#"{"a":"1"}"#],
            &["9007199254740993"],
            &["9007199254740992", "9007199254740992.0"],
            &["36893488147419103233"],
            &["36893488147419103232"],
            &["0", "-0", "0.0", "0e9", "0e999", "-0.00E-99999999999999999999"],
            &["-1"],
            &["12", "0.12e2", "1.2e+1", "120E-1", "0.00120e0004"],
            &["1e400"],
            &["1e-400"],
            // Exponents that are too long for calculations: such numbers are equal only in the same spelling.
            &["1e9999999999999999999"],
            &["10e9999999999999999998"],
            &["[]"],
            &["{}", "{ }"],
            &[r#"{"":{}}"#],
            &[r#"[{"a":{}},{}]"#],
            &[r#"[{"a":{},"b":{}}]"#, r#"[{"b":{},"a":{}}]"#],
            &[r#"{"}":1}"#],
            &[r#""a\"]""#],
            &[r#""\ud83d\ude00""#, "\"\u{1f600}\"", r#""\uD83D\uDE00""#],
            &[r#""\ud83d""#],
            &[r#""\ude00""#],
            &[r#""\ude00\ud83d""#],
            &[r#""\ud83d\u0041""#, r#""\ud83dA""#],
            &["\"\u{fffd}\""],
            &["[[],{}]", "[ [ ] , { } ]"],
            &["null"],
            &["true"],
            &["false"],
        ];
        let mut seen = HashMap::new();
        for group in groups {
            let first = print(group[0].as_bytes()).unwrap();
            assert_eq!(seen.insert(first, group[0]), None, "{}", group[0]);
            for other in group {
                assert_eq!(print(other.as_bytes()), Ok(first), "{other}");
            }
        }
    }

    #[test]
    fn each_defect_of_a_json_body_has_its_own_error() {
        for twice in
            [r#"{"a":1,"a":1}"#, r#"[{"b":{"a":1,"\u0061":2}}]"#, r#"{"a":0,"b":{},"a":"a long value, hashed"}"#]
        {
            assert_eq!(print(twice.as_bytes()), Err(JsonDefect::TwoMembers), "{twice}");
        }
        for nonsense in [
            "",
            " ",
            "nul",
            "nulll",
            "[",
            "[1",
            "[1,",
            "[,1]",
            "[1,]",
            "{",
            "{}}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{1:1}",
            "01",
            "-",
            "1.",
            ".5",
            "1e",
            "1e+",
            "+1",
            "--1",
            "0x1",
            "NaN",
            "\"",
            "\"\\\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u+123\"",
            "\"\t\"",
            "\u{feff}1",
            "1 2",
            "[1}",
            "{\"a\":1]",
            "\u{a0}1",
        ] {
            assert_eq!(print(nonsense.as_bytes()), Err(JsonDefect::NotJson), "{nonsense}");
            assert!(serde_json::from_str::<serde::de::IgnoredAny>(nonsense).is_err(), "{nonsense}");
        }
        assert_eq!(print(b"\"caf\xe9\""), Err(JsonDefect::NotJson));
    }

    #[test]
    fn the_nesting_of_a_json_body_is_bounded() {
        for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("[{\"a\":", "}]")] {
            let levels = open.matches(['[', '{']).count();
            let nested = |depth: usize| [&*open.repeat(depth / levels), "1", &*close.repeat(depth / levels)].concat();
            assert!(print(nested(MAX_DEPTH).as_bytes()).is_ok(), "{open}");
            assert_eq!(print(nested(MAX_DEPTH + levels).as_bytes()), Err(JsonDefect::TooDeep), "{open}");
            assert_eq!(print(open.repeat(100_000).as_bytes()), Err(JsonDefect::TooDeep), "{open}");
        }
    }

    #[test]
    fn long_members_of_an_object_are_hashed_and_short_members_are_not() {
        let member = |length: usize| print(format!(r#"{{"a":"{}"}}"#, "x".repeat(length)).as_bytes()).unwrap();
        let prints: std::collections::HashSet<_> = (0..100).map(member).collect();
        assert_eq!(prints.len(), 100);
    }
}
