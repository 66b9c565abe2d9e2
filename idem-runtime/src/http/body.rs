//! Request and response bodies that pass through the layer.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use sha2::{Digest, Sha256};

/// Any error of a body.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body that was read whole, as far as it has not been handed out yet.
struct Whole {
    bytes: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl Whole {
    fn new(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()), trailers }
    }

    fn next<E>(&mut self) -> Poll<Option<Result<Frame<Bytes>, E>>> {
        let frame = self.bytes.take().map(Frame::data).or_else(|| self.trailers.take().map(Frame::trailers));
        Poll::Ready(frame.map(Ok))
    }

    fn is_over(&self) -> bool {
        self.bytes.is_none() && self.trailers.is_none()
    }

    fn size(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

pin_project! {
    /// The body of a request as the handler gets it: already read into memory, or streamed.
    pub struct RequestBody<B> {
        #[pin]
        kind: RequestKind<B>,
    }
}

pin_project! {
    #[project = RequestProjection]
    enum RequestKind<B> {
        Read {
            whole: Whole,
        },
        AsItComes {
            #[pin]
            body: B,
        },
        Digested {
            #[pin]
            body: B,
            hash: Sha256,
            claim: Arc<DigestClaim>,
            is_over: bool,
        },
    }
}

/// A digest that a client claims for a body, and the result of checking it.
pub(super) struct DigestClaim {
    digest: [u8; 32],
    is_lie: AtomicBool,
}

impl DigestClaim {
    pub(super) fn new(digest: [u8; 32]) -> Arc<Self> {
        Arc::new(Self { digest, is_lie: AtomicBool::new(false) })
    }

    /// True if the body has another digest, or broke off.
    pub(super) fn is_lie(&self) -> bool {
        self.is_lie.load(Ordering::Acquire)
    }
}

impl<B> RequestBody<B> {
    pub(super) fn read(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { kind: RequestKind::Read { whole: Whole::new(bytes, trailers) } }
    }

    pub(super) fn as_it_comes(body: B) -> Self {
        Self { kind: RequestKind::AsItComes { body } }
    }

    pub(super) fn digested(body: B, claim: Arc<DigestClaim>) -> Self {
        Self { kind: RequestKind::Digested { body, hash: Sha256::new(), claim, is_over: false } }
    }
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().kind.project() {
            RequestProjection::Read { whole } => whole.next(),
            RequestProjection::AsItComes { body } => body.poll_frame(cx).map_err(Into::into),
            RequestProjection::Digested { mut body, hash, claim, is_over } => {
                if *is_over {
                    return Poll::Ready(None);
                }
                let frame = ready!(body.as_mut().poll_frame(cx));
                if let Some(Ok(frame)) = &frame
                    && let Some(data) = frame.data_ref()
                {
                    hash.update(data);
                }
                // Compare the digest before handing out the last frame, if the body announces which frame is the last.
                *is_over = !matches!(frame, Some(Ok(_))) || body.is_end_stream();
                let holds = !*is_over || (!matches!(frame, Some(Err(_))) && hash.finalize_reset()[..] == claim.digest);
                if !holds {
                    claim.is_lie.store(true, Ordering::Release);
                }
                match frame {
                    Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
                    _ if !holds => Poll::Ready(Some(Err("the body is not the one of its `Content-Digest`".into()))),
                    frame => Poll::Ready(frame.map(|frame| frame.map_err(Into::into))),
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Read { whole } => whole.is_over(),
            RequestKind::AsItComes { body } => body.is_end_stream(),
            // The digest is compared at the end of the body, so the reader has to poll for that end.
            RequestKind::Digested { is_over, .. } => *is_over,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Read { whole } => whole.size(),
            RequestKind::AsItComes { body } | RequestKind::Digested { body, .. } => body.size_hint(),
        }
    }
}

/// Reason why the body of a request could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UnreadBody {
    /// The body is longer than the limit.
    TooLarge,
    /// The body broke off.
    Broken,
}

/// Reads a request's body of at most `limit` bytes.
pub(super) async fn read<B: Body<Data = Bytes>>(
    body: B,
    limit: usize,
) -> Result<(Bytes, Option<HeaderMap>), UnreadBody> {
    let mut body = pin!(body);
    let (mut frames, mut trailers) = (Frames::default(), None);
    while let Some(frame) = next_frame(body.as_mut()).await {
        match frame.map_err(|_| UnreadBody::Broken)?.into_data() {
            Ok(data) => {
                frames.push(data);
                if frames.size > limit {
                    return Err(UnreadBody::TooLarge);
                }
            }
            Err(frame) => trailers = frame.into_trailers().map(Box::new).ok(),
        }
    }
    Ok((frames.join(), trailers.map(|trailers| *trailers)))
}

/// Returns the next frame. Does not poll a body that reports its end: the poll could wait for another turn of the
/// connection.
async fn next_frame<B: Body>(mut body: Pin<&mut B>) -> Option<Result<Frame<B::Data>, B::Error>> {
    poll_fn(|cx| match body.is_end_stream() {
        true => Poll::Ready(None),
        false => body.as_mut().poll_frame(cx),
    })
    .await
}

/// Data of a body that was read. Most bodies arrive in one frame.
#[derive(Default)]
struct Frames {
    first: Option<Bytes>,
    more: Vec<Bytes>,
    size: usize,
}

impl Frames {
    fn push(&mut self, data: Bytes) {
        self.size += data.len();
        match self.first {
            None => self.first = Some(data),
            Some(_) => self.more.push(data),
        }
    }

    fn into_iter(self) -> impl Iterator<Item = Bytes> {
        self.first.into_iter().chain(self.more)
    }

    /// Joins the frames in one buffer. A single frame is not copied.
    fn join(self) -> Bytes {
        if self.more.is_empty() {
            return self.first.unwrap_or_default();
        }
        let mut all = BytesMut::with_capacity(self.size);
        self.into_iter().for_each(|frame| all.extend_from_slice(&frame));
        all.freeze()
    }
}

pin_project! {
    /// The body of a response: streamed from the handler, read before it was recorded, or taken from a record.
    pub struct ResponseBody<B: Body> {
        #[pin]
        kind: ResponseKind<B>,
    }
}

pin_project! {
    #[project = ResponseProjection]
    enum ResponseKind<B: Body> {
        Read {
            whole: Whole,
        },
        AsItComes {
            #[pin]
            body: B,
        },
        // The layer has read the beginning already.
        Resumed {
            frames: VecDeque<Bytes>,
            error: Option<B::Error>,
            rest: Option<Pin<Box<B>>>,
        },
    }
}

impl<B: Body> ResponseBody<B> {
    pub(super) fn read(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { kind: ResponseKind::Read { whole: Whole::new(bytes, trailers) } }
    }

    pub(super) fn as_it_comes(body: B) -> Self {
        Self { kind: ResponseKind::AsItComes { body } }
    }

    fn resumed(frames: Frames, error: Option<B::Error>, rest: Option<Pin<Box<B>>>) -> Self {
        Self { kind: ResponseKind::Resumed { frames: frames.into_iter().collect(), error, rest } }
    }
}

impl<B: Body> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            ResponseProjection::Read { whole } => whole.next(),
            ResponseProjection::AsItComes { body } => body.poll_frame(cx),
            ResponseProjection::Resumed { frames, error, rest } => {
                if let Some(data) = frames.pop_front() {
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                if let Some(error) = error.take() {
                    return Poll::Ready(Some(Err(error)));
                }
                match rest {
                    Some(rest) => rest.as_mut().poll_frame(cx),
                    None => Poll::Ready(None),
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            ResponseKind::Read { whole } => whole.is_over(),
            ResponseKind::AsItComes { body } => body.is_end_stream(),
            ResponseKind::Resumed { frames, error, rest } => {
                frames.is_empty() && error.is_none() && rest.as_ref().is_none_or(Body::is_end_stream)
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            // An exact length would make HTTP/1.1 send `Content-Length`, and no trailers.
            ResponseKind::Read { whole: Whole { trailers: Some(_), .. } } | ResponseKind::Resumed { .. } => {
                SizeHint::default()
            }
            ResponseKind::Read { whole } => whole.size(),
            ResponseKind::AsItComes { body } => body.size_hint(),
        }
    }
}

/// The part of a response's body that can be recorded.
pub(super) enum RecordableBody<B: Body> {
    /// The whole body, with its trailers.
    Whole(Bytes, Option<HeaderMap>),
    /// The body is longer than the limit. The number is its minimum length in bytes.
    TooLarge(u64, ResponseBody<B>),
    /// The body broke off.
    Broken(ResponseBody<B>),
}

/// Reads a response's body of at most `limit` bytes. A body that is not read whole can still be sent from its
/// beginning.
pub(super) async fn collect<B: Body<Data = Bytes>>(body: B, limit: usize) -> RecordableBody<B> {
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return RecordableBody::TooLarge(announced, ResponseBody::as_it_comes(body));
    }
    // Boxed, so that the body can still move after its first poll.
    let mut body = Box::pin(body);
    let (mut frames, mut trailers) = (Frames::default(), None);
    while let Some(frame) = next_frame(body.as_mut()).await {
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) => {
                frames.push(data);
                if frames.size > limit {
                    let size = frames.size as u64;
                    return RecordableBody::TooLarge(size, ResponseBody::resumed(frames, None, Some(body)));
                }
            }
            Ok(Err(frame)) => trailers = frame.into_trailers().map(Box::new).ok(),
            Err(error) => return RecordableBody::Broken(ResponseBody::resumed(frames, Some(error), None)),
        }
    }
    RecordableBody::Whole(frames.join(), trailers.map(|trailers| *trailers))
}
