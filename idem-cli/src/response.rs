//! Converts HTTP responses from the form that `curl -i` prints to the form that the layer records, and back.

use std::fmt::Write as _;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Response, StatusCode};
use idem_runtime::http::{recorded_response, response_of};
use idem_runtime::record::StoredResult;
use serde_json::{Value, json};

use crate::report::printable;

/// Returns the response in `file`, as the layer would have recorded it. The error names lines but never their content,
/// because the file may contain customer data.
pub(crate) fn read(file: &Bytes) -> Result<StoredResult, String> {
    let response = parse(file)?;
    recorded_response(&response).ok_or_else(|| "a header is larger than a record can hold".to_owned())
}

fn parse(file: &Bytes) -> Result<Response<Bytes>, String> {
    let (mut at, mut line_number) = (0, 0);
    let mut next_line = || {
        let rest = &file[at..];
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        at += end + 1;
        line_number += 1;
        Some((line_number, rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]), at))
    };
    let cut_short = || "it ends before the empty line that ends the headers".to_owned();
    loop {
        let (number, line, _) = next_line().ok_or_else(|| match file.starts_with(b"HTTP/") {
            true => cut_short(),
            false => no_status(1),
        })?;
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = status(line).ok_or_else(|| no_status(number))?;
        let body_at = loop {
            let (number, line, end) = next_line().ok_or_else(cut_short)?;
            if line.is_empty() {
                break end;
            }
            let (name, value) = header(line).ok_or_else(|| format!("line {number} is no header"))?;
            response.headers_mut().append(name, value);
        };
        // Interim responses precede the final one: `100 Continue`, early hints.
        if response.status().is_informational() {
            continue;
        }
        *response.body_mut() = file.slice(body_at..);
        return check(&response).map(|()| response);
    }
}

fn no_status(line: usize) -> String {
    format!("line {line} is no status line, as in `HTTP/1.1 201 Created`: write it as `curl -i` prints a response")
}

fn status(line: &[u8]) -> Option<StatusCode> {
    let mut words = line.strip_prefix(b"HTTP/")?.splitn(3, |byte| *byte == b' ');
    let version = words.next()?;
    if version.is_empty() || !version.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.') {
        return None;
    }
    StatusCode::from_bytes(words.next()?).ok().filter(|status| status.as_u16() < 600)
}

fn header(line: &[u8]) -> Option<(HeaderName, HeaderValue)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = HeaderName::from_bytes(&line[..colon]).ok()?;
    Some((name, HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?))
}

/// Refuses files that were cut, edited or joined from several responses.
fn check(response: &Response<Bytes>) -> Result<(), String> {
    let (body, headers) = (response.body(), response.headers());
    if body.starts_with(b"HTTP/") {
        return Err("its body begins with another status line: keep only the last response in the file".to_owned());
    }
    // Encoded responses are refused, as the layer does not record them either: another client may not accept the
    // encoding.
    if headers.get_all(CONTENT_ENCODING).iter().any(|encoding| encoding != "identity") {
        return Err("it is compressed (`Content-Encoding`): ask for it without compression".to_owned());
    }
    let has_none = matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if has_none && !body.is_empty() {
        return Err(format!("a response with the status {} has no body", response.status().as_u16()));
    }
    // The tool that printed a chunked response has joined its chunks, so there is no length to compare.
    if headers.contains_key(TRANSFER_ENCODING) {
        return match begins_with_chunk(body) {
            true => Err("its body holds the lengths of its chunks (`curl --raw`): print it without them, or leave \
                         `Transfer-Encoding` out"
                .to_owned()),
            false => Ok(()),
        };
    }
    let is_length = |said: &HeaderValue| {
        let digits = said.to_str().ok().filter(|said| said.bytes().all(|byte| byte.is_ascii_digit()));
        digits.and_then(|said| said.parse().ok()) == Some(body.len())
    };
    if !has_none && !headers.get_all(CONTENT_LENGTH).iter().all(is_length) {
        return Err(format!(
            "its `Content-Length` is not that of its body, which has {} bytes: correct the body, or leave the header out",
            body.len()
        ));
    }
    Ok(())
}

/// Returns whether a body begins with the length of a chunk (a line of hexadecimal digits) and has more lines.
fn begins_with_chunk(body: &[u8]) -> bool {
    let Some(end) = body.windows(2).position(|end| end == b"\r\n") else { return false };
    let length = body[..end].split(|byte| *byte == b';').next().unwrap_or_default();
    !length.is_empty() && length.iter().all(u8::is_ascii_hexdigit) && body.len() > end + 2
}

/// Formats a recorded response for a person, as `curl -i` would print it, and as JSON; `None` if `result` is not a
/// response.
pub(crate) fn shown(
    result: &StoredResult,
    content: impl Fn(&Bytes) -> (&'static str, String),
) -> Option<(String, Value)> {
    let (response, trailers) = response_of(result)?;
    let mut text = format!("HTTP/1.1 {}\n", response.status());
    let mut headers = Vec::new();
    let value_of = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    for (name, value) in response.headers() {
        let value = value_of(value);
        let _ = writeln!(text, "{name}: {}", printable(&value));
        headers.push(json!([name.as_str(), value]));
    }
    let (kind, body) = content(response.body());
    let _ = write!(text, "\n{}{body}", if kind == "hex" { "(hex) " } else { "" });
    let mut object = json!({ "status": response.status().as_u16(), "headers": headers });
    object[kind] = body.into();
    if let Some(trailers) = trailers {
        let trailers: Vec<_> = trailers.iter().map(|(name, value)| (name.as_str(), value_of(value))).collect();
        for (name, value) in &trailers {
            let _ = write!(text, "\n(trailer) {name}: {}", printable(value));
        }
        object["trailers"] = json!(trailers);
    }
    Some((text, object))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(file: &str) -> Option<String> {
        read(&Bytes::copy_from_slice(file.as_bytes())).err()
    }

    #[test]
    fn a_response_body_that_still_holds_chunk_lengths_is_refused() {
        const HEAD: &str = "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n";
        for body in ["6\r\n{\"a\":1\r\n1\r\n}\r\n0\r\n\r\n", "1F;name=value\r\ncut", "0\r\n\r\n"] {
            let problem = problem(&format!("{HEAD}{body}"));
            assert!(problem.as_ref().is_some_and(|it| it.contains("`curl --raw`")), "{body:?}: {problem:?}");
        }
        for body in ["", "{\"a\":1}", "42", "42\r\n", "42\n43\n", "no number\r\nat all", "\r\n\r\n"] {
            assert_eq!(problem(&format!("{HEAD}{body}")), None, "{body:?}");
        }
        // Without `Transfer-Encoding`, a body that looks like chunks is accepted unchanged.
        assert_eq!(problem("HTTP/1.1 200 OK\r\n\r\n6\r\n{\"a\":1\r\n0\r\n\r\n"), None);
    }

    #[test]
    fn a_response_whose_content_length_differs_from_its_body_is_refused() {
        let with = |lengths: &str| problem(&format!("HTTP/1.1 200 OK\r\n{lengths}\r\nbody"));
        for right in ["", "Content-Length: 4\r\n", "Content-Length: 4\r\nContent-Length: 4\r\n"] {
            assert_eq!(with(right), None, "{right:?}");
        }
        for wrong in [
            "Content-Length: 5\r\n",
            "Content-Length: 4\r\nContent-Length: 5\r\n",
            "Content-Length: 5\r\nContent-Length: 4\r\n",
            "Content-Length: 4, 5\r\n",
            "Content-Length: +4\r\n",
        ] {
            assert!(with(wrong).is_some_and(|it| it.contains("`Content-Length`")), "{wrong:?}");
        }
    }

    #[test]
    fn control_characters_of_headers_do_not_reach_the_terminal() {
        let file = "HTTP/1.1 200 OK\r\nx-name: a\u{9b}31mb\u{85}c\r\n\r\n";
        let result = read(&Bytes::from_static(file.as_bytes())).unwrap();
        let (text, _) = shown(&result, |_| ("text", String::new())).unwrap();
        assert!(text.contains("x-name: a�31mb�c\n"), "{text:?}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
}
