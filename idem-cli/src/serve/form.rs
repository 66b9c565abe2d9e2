//! Parameters of queries and forms (`application/x-www-form-urlencoded`).

/// Parameters of a query or a form, in their order.
#[derive(Default)]
pub(super) struct Form(Vec<(String, String)>);

impl Form {
    /// Parses parameters. A text that is not UTF-8 gets replacement characters.
    pub(super) fn parse(encoded: &[u8]) -> Self {
        let pairs = encoded.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty());
        let decoded = pairs.map(|pair| {
            let mut parts = pair.splitn(2, |byte| *byte == b'=');
            let mut next = || decode(parts.next().unwrap_or_default());
            (next(), next())
        });
        Self(decoded.collect())
    }

    /// Returns the first parameter with this name; `None` if it is absent or empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.iter().find(|(it, _)| it == name).map(|(_, value)| value.as_str());
        value.filter(|value| !value.is_empty())
    }

    /// Returns all parameters with this name.
    pub(super) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(it, value)| it == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }
}

fn decode(encoded: &[u8]) -> String {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut at = 0;
    while let Some(byte) = encoded.get(at) {
        let escaped = (*byte == b'%').then(|| encoded.get(at + 1..at + 3)).flatten();
        let escaped = escaped.filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let escaped = escaped.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        at += if escaped.is_some() { 3 } else { 1 };
        bytes.push(escaped.unwrap_or(if *byte == b'+' { b' ' } else { *byte }));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_once() {
        let form = Form::parse(b"key=1%2Fpay%2Fa+b%2526&empty=&state=failed&state=lapsed&odd=%zz%&=x&plain");
        assert_eq!((form.get("key"), form.get("odd")), (Some("1/pay/a b%26"), Some("%zz%")));
        assert_eq!((form.get("empty"), form.get("plain"), form.get("absent")), (None, None, None));
        assert_eq!(form.all("state").collect::<Vec<_>>(), ["failed", "lapsed"]);
        assert_eq!(Form::parse(b"a=%ff").get("a"), Some("\u{fffd}"));
    }
}
