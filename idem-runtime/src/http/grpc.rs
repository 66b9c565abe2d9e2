//! Recognises clients of gRPC, and writes answers in their form.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Response, Version, request, response};

use super::field::is_type;
use super::problem::Problem;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Flag of a gRPC-web frame that contains trailers.
const TRAILERS: u8 = 0x80;
/// Length in bytes of a frame's head, which contains the flags and the length of the content.
const FRAME_HEAD_BYTES: usize = 5;

/// The protocol in which a client expects its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ClientProtocol {
    /// HTTP without gRPC.
    Http,
    /// gRPC: HTTP/2 with trailers.
    Grpc,
    /// gRPC-web: the trailers are the last frame of the body.
    GrpcWeb,
    /// gRPC-web whose body is Base64.
    GrpcWebText,
}

impl ClientProtocol {
    /// Recognises the client of a request. A request for gRPC without HTTP/2 or without trailers is answered as plain
    /// HTTP: such a client could not read a gRPC status, and would take the status 200 for a success.
    pub(super) fn of(head: &request::Parts) -> Self {
        let takes_trailers = || {
            let lines = head.headers.get_all(header::TE).iter().filter_map(|line| line.to_str().ok());
            lines.flat_map(|line| line.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
        };
        match Self::of_content(&head.headers) {
            Self::Grpc if head.version < Version::HTTP_2 || !takes_trailers() => Self::Http,
            protocol => protocol,
        }
    }

    fn of_content(headers: &HeaderMap) -> Self {
        match headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes) {
            Some(value) if is_type(value, "application/grpc") => Self::Grpc,
            Some(value) if is_type(value, "application/grpc-web") => Self::GrpcWeb,
            Some(value) if is_type(value, "application/grpc-web-text") => Self::GrpcWebText,
            _ => Self::Http,
        }
    }

    /// Returns a problem in the form of this protocol; `None` for plain HTTP.
    pub(super) fn response(self, problem: &Problem) -> Option<Response<Bytes>> {
        let (status, message) = (problem.kind().grpc_status(), problem.kind().title());
        let mut response = Response::new(Bytes::new());
        let content_type = match self {
            Self::Http => return None,
            Self::Grpc => {
                response.headers_mut().insert(STATUS, HeaderValue::from_static(status));
                response.headers_mut().insert(MESSAGE, HeaderValue::from_static(message));
                "application/grpc"
            }
            Self::GrpcWeb => {
                *response.body_mut() = frame(status, message).into();
                "application/grpc-web+proto"
            }
            Self::GrpcWebText => {
                *response.body_mut() = STANDARD.encode(frame(status, message)).into();
                "application/grpc-web-text+proto"
            }
        };
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        problem.put_headers(response.headers_mut());
        Some(response)
    }
}

/// Makes the gRPC-web frame with these trailers.
fn frame(status: &str, message: &str) -> Vec<u8> {
    let trailers = format!("{STATUS}: {status}\r\n{MESSAGE}: {message}\r\n");
    let mut frame = Vec::with_capacity(FRAME_HEAD_BYTES + trailers.len());
    frame.put_u8(TRAILERS);
    frame.put_u32(u32::try_from(trailers.len()).unwrap_or(u32::MAX));
    frame.extend_from_slice(trailers.as_bytes());
    frame
}

/// Returns the trailers at the end of a response of gRPC-web; `None` for all other responses.
pub(super) fn trailers_in_body(head: &response::Parts, body: &[u8]) -> Option<HeaderMap> {
    match ClientProtocol::of_content(&head.headers) {
        ClientProtocol::Http | ClientProtocol::Grpc => None,
        ClientProtocol::GrpcWeb => trailers_of(body),
        ClientProtocol::GrpcWebText => {
            // Several frames may be encoded one by one, each with its padding.
            let mut frames = Vec::with_capacity(body.len() / 4 * 3);
            body.chunks(4).try_for_each(|group| STANDARD.decode_vec(group, &mut frames)).ok()?;
            trailers_of(&frames)
        }
    }
}

fn trailers_of(mut frames: &[u8]) -> Option<HeaderMap> {
    while let Some((head, rest)) = frames.split_first_chunk::<FRAME_HEAD_BYTES>() {
        let [flags, length @ ..] = *head;
        let (content, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(length)).ok()?)?;
        if flags & TRAILERS != 0 {
            return fields(content);
        }
        frames = rest;
    }
    None
}

/// Reads the lines of a trailers frame.
fn fields(content: &[u8]) -> Option<HeaderMap> {
    let mut fields = HeaderMap::new();
    for line in content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty()) {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        fields.try_append(name, HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?).ok()?;
    }
    Some(fields)
}
