//! Writes HTML. Names of elements and attributes are parts of the program (`&'static str`), and every other text is
//! escaped here, so no text of a record can become markup.

use std::fmt::Write as _;

/// HTML of a page or of a part of it.
#[derive(Default)]
pub(super) struct Html(String);

/// Name and value of an attribute.
pub(super) type Attribute<'a> = (&'static str, &'a str);

impl Html {
    /// Writes the start of a document.
    pub(super) fn document() -> Self {
        Self("<!doctype html>\n".to_owned())
    }

    /// Writes an element without content and without an end tag, as `input`.
    pub(super) fn void(&mut self, name: &'static str, attributes: &[Attribute<'_>]) {
        self.start(name, attributes);
        self.0.push('\n');
    }

    /// Writes an element that contains a text.
    pub(super) fn element(&mut self, name: &'static str, attributes: &[Attribute<'_>], text: &str) {
        self.start(name, attributes);
        self.text(text);
        self.end(name);
    }

    /// Writes an element with the content that `inside` writes.
    pub(super) fn nest(&mut self, name: &'static str, attributes: &[Attribute<'_>], inside: impl FnOnce(&mut Self)) {
        self.start(name, attributes);
        inside(self);
        self.end(name);
    }

    /// Writes a link to a page of this site.
    pub(super) fn link(&mut self, target: &Target, text: &str) {
        self.element("a", &[("href", target.as_str())], text);
    }

    /// Writes a text. Characters that a reader can't see but that change the look of the text around them are replaced.
    pub(super) fn text(&mut self, text: &str) {
        self.0.extend(text.chars().map(visible).flat_map(Escape::new));
    }

    pub(super) fn finish(self) -> String {
        self.0
    }

    fn start(&mut self, name: &'static str, attributes: &[Attribute<'_>]) {
        self.0.extend(["<", name]);
        for (name, value) in attributes {
            self.0.extend([" ", name, "=\""]);
            self.text(value);
            self.0.push('"');
        }
        self.0.push('>');
    }

    fn end(&mut self, name: &'static str) {
        self.0.extend(["</", name, ">\n"]);
    }
}

/// Replaces control characters (except line ends and tabs) and the marks that change the direction of a text: a key
/// must not change the look of its neighbours.
fn visible(c: char) -> char {
    match c {
        '\n' | '\t' => c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}' => '�',
        c if c.is_control() => '�',
        c => c,
    }
}

/// Characters that stand for one character in HTML.
enum Escape {
    Plain(Option<char>),
    Entity(std::str::Chars<'static>),
}

impl Escape {
    fn new(c: char) -> Self {
        let entity = match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&quot;",
            '\'' => "&#39;",
            c => return Self::Plain(Some(c)),
        };
        Self::Entity(entity.chars())
    }
}

impl Iterator for Escape {
    type Item = char;

    fn next(&mut self) -> Option<char> {
        match self {
            Self::Plain(c) => c.take(),
            Self::Entity(chars) => chars.next(),
        }
    }
}

/// Path and query of a page of this site. The path is a part of the program, so a link never leaves the site.
#[derive(Clone)]
pub(super) struct Target(String);

impl Target {
    pub(super) fn new(path: &'static str) -> Self {
        Self(path.to_owned())
    }

    /// Adds a parameter.
    #[must_use]
    pub(super) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.0.extend([if self.0.contains('?') { "&" } else { "?" }, name, "="]);
        for byte in value.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => self.0.push(char::from(byte)),
                // Writing to a `String` never fails.
                _ => drop(write!(self.0, "%{byte:02X}")),
            }
        }
        self
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_never_markup() {
        let mut html = Html::default();
        html.element("p", &[("title", "\"><script>alert('1')</script>")], "<b>&amp;\u{0}\u{202e}é\n");
        let expected = "<p title=\"&quot;&gt;&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;\">\
                        &lt;b&gt;&amp;amp;��é\n</p>\n";
        assert_eq!(html.finish(), expected);
    }

    #[test]
    fn a_parameter_of_a_target_keeps_to_its_place() {
        let target = Target::new("/record").with("key", "1/pay/a&b=\"ü\"#").with("result", "1");
        assert_eq!(target.as_str(), "/record?key=1%2Fpay%2Fa%26b%3D%22%C3%BC%22%23&result=1");
    }
}
