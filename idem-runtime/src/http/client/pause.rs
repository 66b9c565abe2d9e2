//! Decides from a response whether the request is retried, and after which pause.

use std::time::{Duration, UNIX_EPOCH};

use http::StatusCode;
use http::header::{self, HeaderMap, HeaderName};

const STRIPE_SHOULD_RETRY: HeaderName = HeaderName::from_static("stripe-should-retry");

/// Returns the pause that the server asks for; zero if the server asks for no pause; `None` if the response is final.
/// `wall` is the time of the wall clock.
pub(super) fn before_retry(status: StatusCode, headers: &HeaderMap, wall: Duration) -> Option<Duration> {
    let asked = retry_after(headers, wall);
    let is_transient = match headers.get(STRIPE_SHOULD_RETRY).map(|value| value.as_bytes().trim_ascii()) {
        Some(b"true") => true,
        Some(b"false") => false,
        _ => match status {
            // A 409 without `Retry-After` has another cause, and a retry does not change this cause.
            StatusCode::CONFLICT => asked.is_some(),
            _ => is_transient(status),
        },
    };
    is_transient.then(|| asked.unwrap_or_default())
}

fn is_transient(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_EARLY
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::INTERNAL_SERVER_ERROR
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

/// Reads `Retry-After`. If the response has several such fields, returns the longest pause.
pub(super) fn retry_after(headers: &HeaderMap, wall: Duration) -> Option<Duration> {
    let values = headers.get_all(header::RETRY_AFTER).iter();
    values.filter_map(|value| pause(value.to_str().ok()?.trim_matches([' ', '\t']), wall)).max()
}

/// Reads seconds or a date (RFC 9110, section 10.2.3).
fn pause(text: &str, wall: Duration) -> Option<Duration> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that overflows is a very long pause.
        return Some(text.parse().map_or(Duration::MAX, Duration::from_secs));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(wall))
}
