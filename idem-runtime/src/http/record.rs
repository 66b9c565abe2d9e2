//! Encodes responses as the bytes of a record, without the headers that a replay must not repeat.
//!
//! The written form of version 1 (codec `http1`), with numbers in big-endian order:
//!
//! | bytes | content |
//! |---|---|
//! | 1 | the version, 1 |
//! | 2 | the status |
//! | fields | the headers: their number (2 bytes); for each header, the length of its name (2), the length of its value (4), the name, the value |
//! | 1 | 1 if trailers follow, or 0 |
//! | fields | the trailers, in the same form |
//! | the rest | the body |

use bytes::{Buf, BufMut, Bytes};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::response::Parts;
use http::{Method, Response, StatusCode};

use crate::codec::{CodecName, ResultProblem, RoundTripError};
use crate::engine::{AttemptEnd, Recorder, recorder};
use crate::error::Error;
use crate::policy::OnUndecodable;
use crate::record::{Finish, Release, State, StoredResult};

const VERSION: u8 = 1;
const CODEC: CodecName = CodecName::new(b"http1").expect("a name that fits");

/// Number of fields that a replay adds to the recorded fields: the length and the marker.
const ADDED: usize = 2;
/// Largest size of a record without its fields and its body. [`FIELD_BYTES`] is the size of a field without its name
/// and value.
const HEAD_BYTES: usize = 8;
const FIELD_BYTES: usize = 6;

/// Names of headers that are valid only in one exchange, one connection or one session, so a replay must not repeat
/// them. The list is sorted.
const NEVER: &[&str] = &[
    "age",
    "alt-svc",
    "authentication-info",
    "clear-site-data",
    "connection",
    "date",
    "idempotency-recorded",
    "idempotency-replayable",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "retry-after",
    "server",
    "server-timing",
    "set-cookie",
    "set-cookie2",
    "te",
    "transfer-encoding",
    "upgrade",
    "via",
    "www-authenticate",
];

/// Name of the field with which the layer marks a response that is not recorded, although the handler ran.
pub(super) const RECORDED: HeaderName = HeaderName::from_static("idempotency-recorded");
/// Name of the field with which the layer marks a response that no duplicate will get, although its operation is
/// recorded.
pub(super) const REPLAYABLE: HeaderName = HeaderName::from_static("idempotency-replayable");

/// The fields that only the layer sends: a handler that sends them, in the head or in trailers, would deceive the
/// client.
#[derive(Clone, Debug)]
pub(super) struct OwnFields {
    /// Field that marks a replay.
    pub(super) marker: HeaderName,
    /// The field of the key, if responses repeat it.
    pub(super) echo: Option<HeaderName>,
}

impl OwnFields {
    pub(super) fn remove_from(&self, fields: &mut HeaderMap) {
        fields.remove(&self.marker);
        fields.remove(RECORDED);
        fields.remove(REPLAYABLE);
        if let Some(echo) = &self.echo {
            fields.remove(echo);
        }
    }
}

/// A recorded response, for a replay.
#[derive(Debug)]
pub(super) struct RecordedResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

/// Encodes a response as the layer records it. An operator who knows the right response to an interrupted request
/// encodes it with this function, and passes the result to [`Resolution::completed`](crate::operator::Resolution), or
/// to any other [`Finish::Completed`].
///
/// Headers that a replay must not repeat are left out (`Date`, `Set-Cookie`, headers of a connection). A replay sets
/// `Content-Length` to the length of the body. Returns `None` if a header is too large for the format.
pub fn recorded_response(response: &Response<Bytes>) -> Option<StoredResult> {
    let (head, ()) = response_head(response).into_parts();
    encode(&head, response.body(), None, &Method::POST, |_| true).map(stored)
}

fn response_head(response: &Response<Bytes>) -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = response.status();
    *head.headers_mut() = response.headers().clone();
    head
}

/// Decodes the response that the layer has recorded as `result`, with its trailers; `None` for any other result.
pub fn response_of(result: &StoredResult) -> Option<(Response<Bytes>, Option<HeaderMap>)> {
    let (result, _) = result.parts();
    let StoredResult::Encoded { codec, bytes } = &*result else { return None };
    let recorded = (*codec == CODEC).then(|| decode(bytes.clone())).flatten()?;
    let (head, body, trailers) = recorded.into_response(&Method::POST);
    Some((head.map(|()| body), trailers))
}

/// Returns whether a replay may repeat the header `name` of a response whose `Connection` field lists `nominated`.
fn may_be_replayed(name: &HeaderName, nominated: &[String]) -> bool {
    let text = name.as_str();
    let is_of_the_exchange = NEVER.binary_search(&text).is_ok()
        || ["ratelimit", "x-ratelimit-", "x-rate-limit-"].iter().any(|start| text.starts_with(start));
    !is_of_the_exchange && !nominated.iter().any(|other| other == text)
}

/// Encodes a response for its record; `None` if a header is too large. `keeps` selects the headers to record.
pub(super) fn encode(
    head: &Parts,
    body: &[u8],
    trailers: Option<&HeaderMap>,
    method: &Method,
    keeps: impl Fn(&HeaderName) -> bool,
) -> Option<Bytes> {
    let listed = head.headers.get_all(header::CONNECTION).iter().filter_map(|line| line.to_str().ok());
    let nominated: Vec<String> =
        listed.flat_map(|line| line.split(',')).map(|name| name.trim().to_ascii_lowercase()).collect();
    // The body of a response to HEAD, or of a 304, is empty, so only the header shows the length.
    let has_one_length = head.headers.get_all(header::CONTENT_LENGTH).iter().count() == 1;
    let states_length = has_one_length && (*method == Method::HEAD || head.status == StatusCode::NOT_MODIFIED);
    let kept = |name: &HeaderName| match *name {
        header::CONTENT_LENGTH => states_length,
        header::TRAILER => trailers.is_some(),
        _ => may_be_replayed(name, &nominated) && keeps(name),
    };
    let fields = [Some(&head.headers), trailers];
    let field = |(name, value): (&HeaderName, &HeaderValue)| FIELD_BYTES + name.as_str().len() + value.len();
    let most: usize = fields.into_iter().flatten().flat_map(HeaderMap::iter).map(field).sum();
    let mut out = Vec::with_capacity(HEAD_BYTES + most + body.len());
    out.put_u8(VERSION);
    out.put_u16(head.status.as_u16());
    put_fields(&mut out, &head.headers, kept)?;
    out.put_u8(u8::from(trailers.is_some()));
    if let Some(trailers) = trailers {
        put_fields(&mut out, trailers, |name| may_be_replayed(name, &nominated) && keeps(name))?;
    }
    out.extend_from_slice(body);
    Some(Bytes::from(out))
}

fn put_fields(out: &mut Vec<u8>, fields: &HeaderMap, kept: impl Fn(&HeaderName) -> bool) -> Option<()> {
    let start = out.len();
    out.put_u16(0);
    let mut count = 0_u16;
    for (name, value) in fields.iter().filter(|(name, _)| kept(name)) {
        count = count.checked_add(1)?;
        out.put_u16(name.as_str().len().try_into().ok()?);
        out.put_u32(value.len().try_into().ok()?);
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(value.as_bytes());
    }
    out[start..start + 2].copy_from_slice(&count.to_be_bytes());
    Some(())
}

/// Decodes the output of [`encode`]. The body shares the bytes of the record.
fn decode(mut bytes: Bytes) -> Option<RecordedResponse> {
    if bytes.try_get_u8().ok()? != VERSION {
        return None;
    }
    let status = StatusCode::from_u16(bytes.try_get_u16().ok()?).ok()?;
    let headers = get_fields(&mut bytes)?;
    let trailers = match bytes.try_get_u8().ok()? {
        0 => None,
        1 => Some(get_fields(&mut bytes)?),
        _ => return None,
    };
    Some(RecordedResponse { status, headers, body: bytes, trailers })
}

fn get_fields(bytes: &mut Bytes) -> Option<HeaderMap> {
    let count = bytes.try_get_u16().ok()?;
    // The stored count may be larger than the number of fields that follow.
    let claimed = usize::from(count).min(bytes.len() / FIELD_BYTES);
    let mut fields = HeaderMap::with_capacity(claimed + ADDED);
    for _ in 0..count {
        let name_len = usize::from(bytes.try_get_u16().ok()?);
        let value_len = usize::try_from(bytes.try_get_u32().ok()?).ok()?;
        if bytes.len() < name_len.checked_add(value_len)? {
            return None;
        }
        let name = HeaderName::from_bytes(&bytes.split_to(name_len)).ok()?;
        let value = HeaderValue::from_maybe_shared(bytes.split_to(value_len)).ok()?;
        fields.try_append(name, value).ok()?;
    }
    Some(fields)
}

impl RecordedResponse {
    /// Returns the response, its body and its trailers. Sets `Content-Length` anew unless the response can't have a
    /// body.
    pub(super) fn into_response(self, method: &Method) -> (Response<()>, Bytes, Option<HeaderMap>) {
        let Self { status, mut headers, body, trailers } = self;
        let has_no_body = *method == Method::HEAD
            || status.is_informational()
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        if !has_no_body && trailers.is_none() {
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
        let mut response = Response::new(());
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        (response, body, trailers)
    }
}

/// A response to record, or a response that an earlier run recorded.
#[derive(Debug)]
pub(super) enum Recordable {
    /// The handler ran; this result is recorded.
    Ran(StoredResult),
    /// An earlier run recorded this response.
    Replayed(Box<RecordedResponse>),
}

/// Reason why no response is recorded.
#[derive(Debug)]
pub(super) enum NotRecorded {
    /// The handler ran, and its response frees the key.
    Freed(Release),
    /// The handler ran, and its response frees the key for any payload.
    Forgotten,
    /// The engine refused the call with this error.
    Refused(Error),
}

impl From<Error> for NotRecorded {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Records responses with the codec `http1`.
#[derive(Debug)]
pub(super) struct RecordResponses;

impl Recorder<Recordable, NotRecorded> for RecordResponses {
    fn record(&self, result: &Result<Recordable, NotRecorded>, max_result_bytes: usize) -> AttemptEnd {
        match result {
            Ok(Recordable::Ran(StoredResult::Encoded { bytes, .. })) if bytes.len() > max_result_bytes => {
                AttemptEnd::Finish(Finish::Completed(StoredResult::TooLarge { size: bytes.len() as u64 }))
            }
            Ok(Recordable::Ran(stored)) => AttemptEnd::Finish(Finish::Completed(stored.clone())),
            Err(NotRecorded::Freed(release)) => AttemptEnd::Release(*release),
            // The record of a response that is to be forgotten is first released, and removed later. A body never
            // returns `Refused` or `Replayed`.
            Err(NotRecorded::Forgotten | NotRecorded::Refused(_)) | Ok(Recordable::Replayed(_)) => {
                AttemptEnd::Release(Release::Returned)
            }
        }
    }

    fn replay(
        &self,
        state: &State,
        on_undecodable: OnUndecodable,
    ) -> Result<Result<Recordable, NotRecorded>, ResultProblem> {
        let State::Completed(stored) = state else { return Err(ResultProblem::RecordedError) };
        let (stored, _) = stored.parts();
        let (codec, bytes) = recorder::encoded(&stored)?;
        let no_response = || "it is not a response".into();
        let recorded = match (codec == CODEC).then(|| decode(bytes.clone())) {
            Some(Some(recorded)) => recorded,
            other => {
                let problem = other.map(|_| no_response());
                let migrated = recorder::migrate(codec, bytes, false, on_undecodable, problem)?;
                decode(migrated.into()).ok_or_else(|| ResultProblem::MigratedUndecodable { source: no_response() })?
            }
        };
        Ok(Ok(Recordable::Replayed(Box::new(recorded))))
    }

    fn check(&self, _: &Result<Recordable, NotRecorded>) -> Result<(), RoundTripError> {
        Ok(())
    }
}

/// Wraps `bytes` as a result of this codec.
pub(super) fn stored(bytes: Bytes) -> StoredResult {
    StoredResult::Encoded { codec: CODEC, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(status: u16, fields: &[(&str, &str)]) -> Parts {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in fields {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            response.headers_mut().append(name, HeaderValue::from_str(value).unwrap());
        }
        response.into_parts().0
    }

    fn shown(fields: &HeaderMap) -> Vec<String> {
        fields.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect()
    }

    #[test]
    fn the_list_of_headers_never_replayed_is_sorted() {
        assert!(NEVER.is_sorted());
    }

    #[test]
    fn a_response_survives_encoding_and_decoding() {
        let head = head(201, &[("location", "/p/1"), ("x-a", "1"), ("x-b", "2"), ("x-a", "3, 4"), ("etag", "\"e\"")]);
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let bytes = encode(&head, b"body", Some(&trailers), &Method::POST, |_| true).unwrap();
        let recorded = decode(bytes.clone()).unwrap();
        assert_eq!(recorded.status, 201);
        assert_eq!(shown(&recorded.headers), shown(&head.headers));
        assert_eq!(recorded.headers.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "3, 4"]);
        assert_eq!((&*recorded.body, recorded.trailers), (&b"body"[..], Some(trailers)));
        // Truncated bytes are rejected, and altered bytes cause no panic.
        for len in 0..bytes.len() - 4 {
            assert!(decode(bytes.slice(..len)).is_none(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut altered = bytes.to_vec();
            altered[at] ^= 0xff;
            drop(decode(altered.into()));
        }
    }

    #[test]
    fn response_headers_that_concern_only_the_first_exchange_are_not_recorded() {
        let fields = [
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("set-cookie", "a=1"),
            ("www-authenticate", "Bearer"),
            ("date", "now"),
            ("ratelimit-limit", "1"),
            ("x-ratelimit-remaining", "1"),
            ("retry-after", "1"),
            ("content-length", "4"),
            ("transfer-encoding", "chunked"),
            ("trailer", "x"),
            ("x-mine", "1"),
            ("etag", "e"),
        ];
        let of = |status, method: Method| {
            let bytes = encode(&head(status, &fields), b"", None, &method, |name| name != "x-mine").unwrap();
            shown(&decode(bytes).unwrap().headers)
        };
        assert_eq!(of(200, Method::POST), ["etag: e"]);
        assert_eq!(of(304, Method::POST), ["content-length: 4", "etag: e"]);
        assert_eq!(of(200, Method::HEAD), ["content-length: 4", "etag: e"]);
        let two = head(200, &[("content-length", "4"), ("content-length", "5")]);
        let bytes = encode(&two, b"", None, &Method::HEAD, |_| true).unwrap();
        assert_eq!(shown(&decode(bytes).unwrap().headers), [""; 0]);
    }

    #[test]
    fn a_replay_computes_the_length_of_its_body() {
        let length = |status, method: &Method| {
            let bytes = encode(&head(status, &[]), b"four", None, method, |_| true).unwrap();
            decode(bytes).unwrap().into_response(method).0.headers().get("content-length").cloned()
        };
        assert_eq!(length(200, &Method::POST).unwrap(), "4");
        for (status, method) in [(204, Method::POST), (304, Method::POST), (200, Method::HEAD)] {
            assert_eq!(length(status, &method), None);
        }
    }
}
