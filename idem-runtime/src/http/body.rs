//! Request and response bodies that pass through the layer.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::LengthLimitError;
use pin_project_lite::pin_project;
use sha2::{Digest, Sha256, Sha512};

use super::field::Digests;
use super::problem::ProblemKind;
use super::record::OwnFields;
use crate::clock::{Clock, Instant, Sleep};

/// Error of a body of any type.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The parts of a completely read body that have not been returned yet.
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
        Checked {
            #[pin]
            body: B,
            check: Box<StreamCheck>,
        },
    }
}

/// The digests that a client claims for a streamed body, and the defect that was found while the body streamed.
pub(super) struct DigestClaim {
    digests: Digests,
    defect: OnceLock<ProblemKind>,
}

impl DigestClaim {
    pub(super) fn new(digests: Digests) -> Arc<Self> {
        Arc::new(Self { digests, defect: OnceLock::new() })
    }

    /// Returns the reason why no response to this body may be recorded: the body has another digest, broke off, or did
    /// not arrive in time.
    pub(super) fn defect(&self) -> Option<ProblemKind> {
        self.defect.get().copied()
    }

    fn fail(&self, defect: ProblemKind) -> BoxError {
        // A later defect is ignored, because the first defect has ended the body.
        let _ = self.defect.set(defect);
        match defect {
            ProblemKind::BodyTimeout => "the body did not arrive in time".into(),
            ProblemKind::BodyTooLarge => "the body is too large".into(),
            _ => "the body is not the one of its `Content-Digest`".into(),
        }
    }
}

/// Remaining time that the reader of a body waits for the client's data. The time between two reads is not subtracted.
struct ArrivalTimer {
    clock: Arc<dyn Clock>,
    left: Duration,
    /// Start and end of the present wait.
    wait: Option<(Instant, Sleep)>,
}

impl ArrivalTimer {
    /// Returns whether the time is over. If time is left, the task is woken when the time is over.
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let Self { clock, left, wait } = self;
        let (_, end) = wait.get_or_insert_with(|| (clock.now(), clock.sleep(*left)));
        end.as_mut().poll(cx).is_ready()
    }

    /// Ends the present wait, because data has arrived.
    fn arrived(&mut self) {
        if let Some((since, _)) = self.wait.take() {
            self.left = self.left.saturating_sub(self.clock.now().saturating_since(since));
        }
    }
}

/// The checks of a body that streams to its handler.
pub(super) struct StreamCheck {
    claim: Arc<DigestClaim>,
    sha256: Sha256,
    sha512: Option<Sha512>,
    timer: ArrivalTimer,
    is_over: bool,
}

impl StreamCheck {
    /// Makes the checks of a body that has to arrive within `deadline`.
    pub(super) fn new(claim: Arc<DigestClaim>, clock: Arc<dyn Clock>, deadline: Duration) -> Self {
        let sha512 = claim.digests.sha512.map(|_| Sha512::new());
        let timer = ArrivalTimer { clock, left: deadline, wait: None };
        Self { claim, sha256: Sha256::new(), sha512, timer, is_over: false }
    }

    fn update(&mut self, data: &[u8]) {
        self.sha256.update(data);
        if let Some(sha512) = &mut self.sha512 {
            sha512.update(data);
        }
    }

    /// Returns whether the body so far has the digests that were claimed for it.
    fn holds(&mut self) -> bool {
        let Digests { sha256, sha512 } = self.claim.digests;
        let other = self.sha512.as_mut().map(Sha512::finalize_reset);
        sha256.is_none_or(|digest| self.sha256.finalize_reset()[..] == digest)
            && sha512.is_none_or(|digest| other.is_some_and(|other| other[..] == digest))
    }

    fn poll_frame<B>(&mut self, mut body: Pin<&mut B>, cx: &mut Context<'_>) -> Poll<Option<BodyFrame>>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        if self.is_over {
            return Poll::Ready(None);
        }
        let Poll::Ready(frame) = body.as_mut().poll_frame(cx) else {
            if !self.timer.is_over(cx) {
                return Poll::Pending;
            }
            self.is_over = true;
            return Poll::Ready(Some(Err(self.claim.fail(ProblemKind::BodyTimeout))));
        };
        self.timer.arrived();
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.update(data);
        }
        // If the body announces its last frame, the digest is compared before that frame is returned.
        self.is_over = !matches!(frame, Some(Ok(_))) || body.is_end_stream();
        match frame {
            Some(Err(error)) => {
                let error = error.into();
                self.claim.fail(match is_limit(&*error) {
                    true => ProblemKind::BodyTooLarge,
                    false => ProblemKind::DigestMismatch,
                });
                Poll::Ready(Some(Err(error)))
            }
            _ if self.is_over && !self.holds() => Poll::Ready(Some(Err(self.claim.fail(ProblemKind::DigestMismatch)))),
            frame => Poll::Ready(frame.map(|frame| frame.map_err(Into::into))),
        }
    }
}

/// The next frame of a body, or the error that ends the body.
type BodyFrame = Result<Frame<Bytes>, BoxError>;

impl<B> RequestBody<B> {
    pub(super) fn read(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { kind: RequestKind::Read { whole: Whole::new(bytes, trailers) } }
    }

    pub(super) fn as_it_comes(body: B) -> Self {
        Self { kind: RequestKind::AsItComes { body } }
    }

    pub(super) fn checked(body: B, check: StreamCheck) -> Self {
        Self { kind: RequestKind::Checked { body, check: Box::new(check) } }
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
            RequestProjection::Checked { body, check } => check.poll_frame(body, cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Read { whole } => whole.is_over(),
            RequestKind::AsItComes { body } => body.is_end_stream(),
            // The digest is compared at the end of the body, so the body must not report its end before that
            // comparison.
            RequestKind::Checked { check, .. } => check.is_over,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Read { whole } => whole.size(),
            RequestKind::AsItComes { body } | RequestKind::Checked { body, .. } => body.size_hint(),
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

/// Returns whether a limit outside of the layer has cut off the body.
fn is_limit(error: &(dyn std::error::Error + 'static)) -> bool {
    error.is::<LengthLimitError>() || error.source().is_some_and(is_limit)
}

/// Reads a request's body of at most `limit` bytes.
pub(super) async fn read<B>(body: B, limit: usize) -> Result<(Bytes, Option<HeaderMap>), UnreadBody>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let unread = |error: B::Error| if is_limit(&*error.into()) { UnreadBody::TooLarge } else { UnreadBody::Broken };
    let mut body = pin!(body);
    let (mut frames, mut trailers) = (Frames::default(), None);
    while let Some(frame) = next_frame(body.as_mut()).await {
        match frame.map_err(unread)?.into_data() {
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

/// Returns the next frame. Does not poll a body that reports its end, because the poll could wait for the connection.
async fn next_frame<B: Body>(mut body: Pin<&mut B>) -> Option<Result<Frame<B::Data>, B::Error>> {
    poll_fn(|cx| match body.is_end_stream() {
        true => Poll::Ready(None),
        false => body.as_mut().poll_frame(cx),
    })
    .await
}

/// The frames of a body. Most bodies arrive in one frame, which needs no vector.
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
        // The fields that only the layer may send. They are removed from the trailers when the trailers arrive. Boxed:
        // few responses have trailers.
        own: Option<Box<OwnFields>>,
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
        // The layer has already read the beginning of the body.
        Resumed {
            frames: VecDeque<Bytes>,
            error: Option<B::Error>,
            rest: Option<Pin<Box<B>>>,
        },
    }
}

impl<B: Body> ResponseBody<B> {
    fn of(kind: ResponseKind<B>) -> Self {
        Self { kind, own: None }
    }

    pub(super) fn read(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self::of(ResponseKind::Read { whole: Whole::new(bytes, trailers) })
    }

    pub(super) fn as_it_comes(body: B) -> Self {
        Self::of(ResponseKind::AsItComes { body })
    }

    fn resumed(frames: Frames, error: Option<B::Error>, rest: Option<Pin<Box<B>>>) -> Self {
        Self::of(ResponseKind::Resumed { frames: frames.into_iter().collect(), error, rest })
    }

    /// Removes the layer's own fields from the trailers, including trailers that have not arrived yet.
    pub(super) fn without(mut self, own: &OwnFields) -> Self {
        match &mut self.kind {
            ResponseKind::Read { whole } => {
                if let Some(trailers) = &mut whole.trailers {
                    own.remove_from(trailers);
                }
            }
            ResponseKind::AsItComes { .. } | ResponseKind::Resumed { .. } => self.own = Some(Box::new(own.clone())),
        }
        self
    }
}

impl<B: Body> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> ResponseKind<B> {
    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project() {
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
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let mut polled = this.kind.poll_frame(cx);
        if let (Poll::Ready(Some(Ok(frame))), Some(own)) = (&mut polled, this.own.as_deref())
            && let Some(trailers) = frame.trailers_mut()
        {
            own.remove_from(trailers);
        }
        polled
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
    /// The body is longer than the limit. The number is the minimum length of the body, in bytes.
    TooLarge(u64, ResponseBody<B>),
    /// The body broke off.
    Broken(ResponseBody<B>),
}

/// Reads a response's body of at most `limit` bytes. A body that is only partly read can still be sent from its
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::task::Waker;

    use super::*;
    use crate::clock::ManualClock;

    /// A body whose polls return these frames. `None` makes a poll pending.
    struct Script(VecDeque<Option<&'static str>>);

    impl Body for Script {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.pop_front() {
                Some(Some(data)) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(data.as_bytes()))))),
                Some(None) => Poll::Pending,
                None => Poll::Ready(None),
            }
        }
    }

    #[test]
    fn a_slow_client_uses_up_the_body_deadline_and_a_slow_reader_does_not() {
        let (clock, seconds) = (ManualClock::new(), Duration::from_secs);
        let claim = DigestClaim::new(Digests { sha256: Some([0; 32]), sha512: None });
        let check = StreamCheck::new(Arc::clone(&claim), Arc::new(clock.clone()), seconds(10));
        let script = [None, Some("a"), None, Some("b"), None, None];
        let mut body = pin!(RequestBody::checked(Script(script.into()), check));
        let mut poll = || body.as_mut().poll_frame(&mut Context::from_waker(Waker::noop()));
        assert!(poll().is_pending());
        clock.advance(seconds(6));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(_)))));
        clock.advance(seconds(1000));
        assert!(poll().is_pending());
        clock.advance(seconds(3));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(_)))));
        assert!(poll().is_pending());
        assert_eq!(claim.defect(), None);
        clock.advance(seconds(1));
        assert!(matches!(poll(), Poll::Ready(Some(Err(_)))));
        assert!(matches!(poll(), Poll::Ready(None)));
        assert_eq!(claim.defect(), Some(ProblemKind::BodyTimeout));
    }
}
