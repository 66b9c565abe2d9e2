//! Splits `"order:{event.id}"` into literal text and expressions.

use std::ops::Range;

use syn::{Expr, LitStr};

use super::nearest::nearest;

/// Piece of a key template.
pub(crate) enum Part {
    /// Text that is the same for every call.
    Text(String),
    /// An expression over the arguments.
    Value(Expr),
}

/// Mistake in a template, with the place of the mistake in the template, in bytes. Without a place, the mistake
/// concerns the whole template.
#[derive(Debug, PartialEq)]
struct Mistake {
    place: Option<Range<usize>>,
    message: String,
}

impl Mistake {
    fn at(place: Range<usize>, message: impl Into<String>) -> Self {
        Self { place: Some(place), message: message.into() }
    }

    /// Converts the mistake into an error at the literal. A stable compiler can't report an error at a part of a
    /// literal, so the message repeats the template and marks the place.
    fn of(self, literal: &LitStr) -> syn::Error {
        let Self { place, message } = self;
        let (template, written) = (literal.value(), literal.token().to_string());
        // In a literal with escapes or hashes, a place in the value is not the place that the user sees.
        let place = place.filter(|place| written == format!("\"{template}\"") && *place != (0..template.len()));
        let marked = place.map(|place| {
            let width = |text: &str| text.chars().count();
            let (before, mistake) = (width(&template[..place.start]), width(&template[place]));
            format!("\n\n  {written}\n   {}{}", " ".repeat(before), "^".repeat(mistake))
        });
        syn::Error::new(literal.span(), message + &marked.unwrap_or_default())
    }
}

/// Reads a key template. Every expression gets the span and the hygiene of the literal. So the expression sees the same
/// names as code next to the literal, even inside of a `macro_rules!` macro.
///
/// `arguments` are all names that the arguments bind; `None` if they are not known.
pub(crate) fn parse(literal: &LitStr, arguments: Option<&[String]>) -> syn::Result<Vec<Part>> {
    let pieces = split(&literal.value()).map_err(|mistake| mistake.of(literal))?;
    let parts = pieces.into_iter().map(|piece| match piece {
        Piece::Text(text) => Ok(Part::Text(text)),
        Piece::Placeholder(source, place) => {
            let value = placeholder(&source, literal)
                .and_then(|value| misspelt(&value, arguments.unwrap_or_default()).map_or(Ok(value), Err));
            value.map(Part::Value).map_err(|message| Mistake::at(place, message).of(literal))
        }
    });
    parts.collect()
}

/// Returns a message about an expression whose first name is almost the name of an argument.
///
/// The compiler would suggest the name of the argument, too, but in place of the whole literal: `key = event`.
fn misspelt(value: &Expr, arguments: &[String]) -> Option<String> {
    let first = match value {
        Expr::Path(path) if path.qself.is_none() => path.path.get_ident()?.to_string(),
        Expr::Field(field) => return misspelt(&field.base, arguments),
        Expr::MethodCall(call) => return misspelt(&call.receiver, arguments),
        Expr::Index(index) => return misspelt(&index.expr, arguments),
        Expr::Unary(unary) => return misspelt(&unary.expr, arguments),
        Expr::Reference(reference) => return misspelt(&reference.expr, arguments),
        Expr::Paren(paren) => return misspelt(&paren.expr, arguments),
        Expr::Try(tried) => return misspelt(&tried.expr, arguments),
        _ => return None,
    };
    // A name with a capital letter may be the name of a constant.
    if first == "self" || first.contains(char::is_uppercase) || arguments.contains(&first) {
        return None;
    }
    let names: Vec<_> = arguments.iter().map(String::as_str).collect();
    let meant = nearest(&first, &names).filter(|meant| meant.chars().count() > 1)?;
    Some(format!("there is no argument `{first}`; did you mean `{meant}`?"))
}

fn placeholder(source: &str, literal: &LitStr) -> Result<Expr, String> {
    let parse = |source: &str| LitStr::new(source, literal.span()).parse::<Expr>();
    match parse(source) {
        Ok(Expr::Lit(_)) => {
            Err(format!("`{{{source}}}` is the same for every call; write an argument, for example `{{event.id}}`"))
        }
        Ok(expr) => Ok(expr),
        Err(error) => Err(match format_spec(source, literal) {
            Some((expr, spec)) => format!(
                "`{{{source}}}`: format specifications such as `{spec}` have no place in a key; write `{{{expr}}}`, \
                 or an expression that yields the text"
            ),
            None => format!("can't read `{{{source}}}` as an expression: {error}"),
        }),
    }
}

/// Splits `x:?` into `x` and `:?`, if the part before the colon is an expression.
fn format_spec<'a>(source: &'a str, literal: &LitStr) -> Option<(&'a str, &'a str)> {
    let colons = source.match_indices(':').map(|(at, _)| at);
    let mut splits = colons.map(|at| source.split_at(at));
    splits.find(|(expr, spec)| {
        !spec.starts_with("::") && LitStr::new(expr.trim(), literal.span()).parse::<Expr>().is_ok()
    })
}

#[derive(Debug, PartialEq)]
enum Piece {
    Text(String),
    /// Source of an expression, and the place of its braces in the template.
    Placeholder(String, Range<usize>),
}

fn split(template: &str) -> Result<Vec<Piece>, Mistake> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(c) = rest.chars().next() {
        let at = template.len() - rest.len();
        let after = &rest[c.len_utf8()..];
        match c {
            '{' | '}' if after.starts_with(c) => {
                text.push(c);
                rest = &after[1..];
            }
            '{' => {
                let Some(end) = end(after) else {
                    let message = format!(
                        "`{{{after}` is not closed; write the missing bracket or quote, or `{{{{` for a literal brace"
                    );
                    return Err(Mistake::at(at..template.len(), message));
                };
                push_text(&mut pieces, &mut text);
                push_placeholder(&mut pieces, after[..end].trim(), at..at + end + 2)?;
                rest = &after[end + 1..];
            }
            '}' => return Err(Mistake::at(at..at + 1, "`}` closes nothing; write `}}` for a literal brace")),
            '%' => {
                let message = "`%` introduces an escape in stored keys; write another character";
                return Err(Mistake::at(at..at + 1, message));
            }
            c if c.is_control() => {
                let message = "a key has no control characters; write a printable separator such as `:`".to_owned();
                return Err(Mistake { place: None, message });
            }
            c => {
                text.push(c);
                rest = after;
            }
        }
    }
    push_text(&mut pieces, &mut text);
    if !pieces.iter().any(|piece| matches!(piece, Piece::Placeholder(..))) {
        let message = "every call would have the same key; write what tells operations apart in braces, for example \
                       `order:{event.id}`"
            .to_owned();
        return Err(Mistake { place: None, message });
    }
    Ok(pieces)
}

fn push_text(pieces: &mut Vec<Piece>, text: &mut String) {
    if !text.is_empty() {
        pieces.push(Piece::Text(std::mem::take(text)));
    }
}

fn push_placeholder(pieces: &mut Vec<Piece>, source: &str, place: Range<usize>) -> Result<(), Mistake> {
    if source.is_empty() {
        let message = "`{}` is empty; write an expression over the arguments in it, for example `{event.id}`";
        return Err(Mistake::at(place, message));
    }
    if let Some(Piece::Placeholder(before, start)) = pieces.last() {
        // `{a}{b}` would make the same key from `1` and `23` as from `12` and `3`.
        let message =
            format!("nothing separates `{{{before}}}` from `{{{source}}}`; write `{{{before}}}:{{{source}}}`");
        return Err(Mistake::at(start.start..place.end, message));
    }
    pieces.push(Piece::Placeholder(source.to_owned(), place));
    Ok(())
}

/// Returns the position of the `}` that closes a placeholder, outside of nested brackets, strings and characters.
///
/// The compiler's lexer can't be used here, because it reports errors directly to the user, with its own messages.
fn end(source: &str) -> Option<usize> {
    let mut open = Vec::new();
    let mut at = 0;
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at + c.len_utf8()..];
        at += c.len_utf8();
        match c {
            '(' => open.push(')'),
            '[' => open.push(']'),
            '{' => open.push('}'),
            '}' if open.is_empty() => return Some(at - 1),
            ')' | ']' | '}' if open.pop() != Some(c) => return None,
            '"' => at += string_end(rest)?,
            '\'' => at += char_end(rest),
            _ => {}
        }
    }
    None
}

/// Returns the length of the rest of a string, including its closing quote.
fn string_end(rest: &str) -> Option<usize> {
    let mut escaped = false;
    let end = rest.find(|c| {
        let closes = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        closes
    });
    end.map(|end| end + 1)
}

/// Returns the length of the rest of a character, including its closing quote; 0 for a lifetime or a label.
fn char_end(rest: &str) -> usize {
    let mut chars = rest.char_indices();
    match chars.next() {
        // The character after the backslash may be a quote, so the closing quote is the next one.
        Some((_, '\\')) => rest.get(2..).and_then(|tail| tail.find('\'')).map_or(0, |end| end + 3),
        Some(_) => chars.next().filter(|(_, c)| *c == '\'').map_or(0, |(end, _)| end + 1),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proc_macro2::Span;
    use quote::ToTokens;

    fn text(text: &str) -> Piece {
        Piece::Text(text.to_owned())
    }

    fn value(source: &str) -> Piece {
        Piece::Placeholder(source.to_owned(), 0..0)
    }

    fn message(template: &str) -> String {
        let arguments = ["event", "id", "a", "b"].map(str::to_owned);
        match parse(&LitStr::new(template, Span::call_site()), Some(&arguments)) {
            Ok(_) => panic!("`{template}` is read"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn templates_are_split_into_text_and_expressions() {
        let cases = [
            ("order:{id}", vec![text("order:"), value("id")]),
            ("{a}:{b}", vec![value("a"), text(":"), value("b")]),
            ("{{{ a }}}", vec![text("{"), value("a"), text("}")]),
            ("a{{b}}c{d}é", vec![text("a{b}c"), value("d"), text("é")]),
            ("{ {x} }", vec![value("{x}")]),
            ("{f(\"}\")}", vec![value("f(\"}\")")]),
            (r#"{f("\"}")}"#, vec![value(r#"f("\"}")"#)]),
            ("{f('}', '\\'', '{', 'é')}", vec![value("f('}', '\\'', '{', 'é')")]),
            ("{x::<'static>()}", vec![value("x::<'static>()")]),
            ("{a[0]}-{b.1}", vec![value("a[0]"), text("-"), value("b.1")]),
        ];
        for (template, pieces) in cases {
            let mut found = split(template).unwrap_or_else(|mistake| panic!("{template}: {mistake:?}"));
            for piece in &mut found {
                if let Piece::Placeholder(source, place) = piece {
                    let written = template[std::mem::take(place)].strip_prefix('{').and_then(|it| it.strip_suffix('}'));
                    assert_eq!(written.map(str::trim), Some(&**source), "{template}");
                }
            }
            assert_eq!(found, pieces, "{template}");
        }
    }

    #[test]
    fn each_placeholder_of_a_template_is_an_expression() {
        let sources = [
            "event.order_id",
            "msg.id()",
            "self.tenant",
            "crate::key::<u32>(event)",
            "if x { Y { z: 1 } } else { Y { z: 2 } }",
            "r#type",
            "*id",
            "map[\"a\"]",
            "match x { A::B { c: d } => d, _ => 0 }",
            "(|c: u32| c)(id)",
        ];
        for source in sources {
            let parts = parse(&LitStr::new(&format!("{{{source}}}"), Span::call_site()), None);
            let parts = parts.unwrap_or_else(|error| panic!("{source}: {error}"));
            let [Part::Value(expr)] = &parts[..] else { panic!("{source}") };
            let expected: Expr = syn::parse_str(source).unwrap();
            assert_eq!(expr.to_token_stream().to_string(), expected.to_token_stream().to_string());
        }
    }

    #[test]
    fn the_error_for_a_wrong_template_suggests_a_correction() {
        let cases = [
            ("", "every call would have the same key"),
            ("orders", "every call would have the same key"),
            ("{{id}}", "every call would have the same key"),
            ("{}", "`{}` is empty"),
            ("a:{ }", "`{}` is empty"),
            ("{id", "`{id` is not closed"),
            ("{f(id}", "is not closed"),
            ("{f(\"}", "is not closed"),
            ("id}", "`}` closes nothing"),
            ("{a}{b}", "write `{a}:{b}`"),
            ("100%:{a}", "`%` introduces an escape"),
            ("a\n{a}", "no control characters"),
            ("{id:?}", "format specifications such as `:?`"),
            ("{id:>5}", "write `{id}`"),
            ("{order.id:#x}", "write `{order.id}`"),
            ("{a::b:04}", "write `{a::b}`"),
            ("{0}", "is the same for every call"),
            ("{\"a\"}", "is the same for every call"),
            ("{a b}", "can't read `{a b}` as an expression"),
            ("{a.}", "can't read `{a.}` as an expression"),
            ("{=}", "can't read `{=}` as an expression"),
        ];
        for (template, expected) in cases {
            let message = message(template);
            assert!(message.contains(expected), "{template}: {message}");
        }
    }

    #[test]
    fn the_error_for_a_part_of_a_template_marks_the_part() {
        let cases = [
            ("é:{id +}", "\"é:{id +}\"", "  ^^^^^^"),
            ("order:{id", "\"order:{id\"", "      ^^^"),
            ("a}{id}", "\"a}{id}\"", " ^"),
            ("x:{a}{b}", "\"x:{a}{b}\"", "  ^^^^^^"),
            ("x:{ }", "\"x:{ }\"", "  ^^^"),
            ("1%:{id}", "\"1%:{id}\"", " ^"),
            ("x:{evnt.id}", "\"x:{evnt.id}\"", "  ^^^^^^^^^"),
        ];
        for (template, written, marks) in cases {
            let message = message(template);
            assert!(message.ends_with(&format!("\n\n  {written}\n   {marks}")), "{template}: {message}");
        }
        for template in ["{id +}", "orders", "a\n{id}", "\"{id +}"] {
            assert!(!message(template).contains('^'), "{template}: {}", message(template));
        }
    }

    #[test]
    fn a_name_that_is_almost_an_argument_is_an_error() {
        let arguments = ["event", "self_id", "tenant"].map(str::to_owned);
        let read = |template: &str| parse(&LitStr::new(template, Span::call_site()), Some(&arguments));
        for (template, meant) in
            [("{evnt}", "event"), ("{evnt.id}", "event"), ("{(*evnt).id()?[0]}", "event"), ("{&tennant}", "tenant")]
        {
            let Err(error) = read(template) else { panic!("`{template}` is read") };
            assert!(error.to_string().contains(&format!("did you mean `{meant}`?")), "{template}: {error}");
        }
        for template in
            ["{event}", "{EVENT}", "{evnt()}", "{evnt::id}", "{evnt!()}", "{|evnt| evnt}", "{order}", "{self.event}"]
        {
            assert!(read(template).is_ok(), "{template}");
        }
    }
}
