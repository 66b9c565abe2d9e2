//! Splits `"order:{event.id}"` into literal text and expressions.

use syn::{Expr, LitStr};

/// Piece of a key template.
pub(crate) enum Part {
    /// Text that is the same for every call.
    Text(String),
    /// An expression over the arguments.
    Value(Expr),
}

/// Reads a key template. Every expression gets the span and the hygiene of the literal. So the expression sees the same
/// names as code next to the literal, even inside of a `macro_rules!` macro.
pub(crate) fn parse(literal: &LitStr) -> syn::Result<Vec<Part>> {
    let fail = |message| syn::Error::new(literal.span(), message);
    let pieces = split(&literal.value()).map_err(fail)?;
    let parts = pieces.into_iter().map(|piece| match piece {
        Piece::Text(text) => Ok(Part::Text(text)),
        Piece::Placeholder(source) => placeholder(&source, literal).map(Part::Value).map_err(fail),
    });
    parts.collect()
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
    Placeholder(String),
}

fn split(template: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        match c {
            '{' | '}' if after.starts_with(c) => {
                text.push(c);
                rest = &after[1..];
            }
            '{' => {
                let end = end(after).ok_or_else(|| {
                    format!(
                        "`{{{after}` is not closed; write the missing bracket or quote, or `{{{{` for a literal brace"
                    )
                })?;
                push_text(&mut pieces, &mut text)?;
                push_placeholder(&mut pieces, after[..end].trim())?;
                rest = &after[end + 1..];
            }
            '}' => return Err("`}` closes nothing; write `}}` for a literal brace".to_owned()),
            c => {
                text.push(c);
                rest = after;
            }
        }
    }
    push_text(&mut pieces, &mut text)?;
    if !pieces.iter().any(|piece| matches!(piece, Piece::Placeholder(_))) {
        return Err("every call would have the same key; write what tells operations apart in braces, \
                    for example `order:{event.id}`"
            .to_owned());
    }
    Ok(pieces)
}

fn push_text(pieces: &mut Vec<Piece>, text: &mut String) -> Result<(), String> {
    if text.contains('%') {
        return Err("`%` introduces an escape in stored keys; write another character".to_owned());
    }
    if text.contains(char::is_control) {
        return Err("a key has no control characters; write a printable separator such as `:`".to_owned());
    }
    if !text.is_empty() {
        pieces.push(Piece::Text(std::mem::take(text)));
    }
    Ok(())
}

fn push_placeholder(pieces: &mut Vec<Piece>, source: &str) -> Result<(), String> {
    if source.is_empty() {
        return Err("`{}` is empty; write an expression over the arguments in it, for example `{event.id}`".to_owned());
    }
    if let Some(Piece::Placeholder(before)) = pieces.last() {
        // `{a}{b}` would make the same key from `1` and `23` as from `12` and `3`.
        return Err(format!("nothing separates `{{{before}}}` from `{{{source}}}`; write `{{{before}}}:{{{source}}}`"));
    }
    pieces.push(Piece::Placeholder(source.to_owned()));
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
        Piece::Placeholder(source.to_owned())
    }

    fn message(template: &str) -> String {
        match parse(&LitStr::new(template, Span::call_site())) {
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
            assert_eq!(split(template), Ok(pieces), "{template}");
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
            let parts = parse(&LitStr::new(&format!("{{{source}}}"), Span::call_site()));
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
}
