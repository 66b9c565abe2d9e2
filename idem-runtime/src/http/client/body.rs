//! The body of a response that the layer has read in part or in full.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

/// The body of a response: read in full, or read up to a limit and then streamed.
///
/// `http_body_util::BodyExt::collect` returns the whole body, without waiting if the layer has read the body in full.
pub struct ReplyBody<B> {
    frames: VecDeque<Bytes>,
    /// Number of bytes that the layer has read.
    read: usize,
    trailers: Option<HeaderMap>,
    /// The part that was not read. Boxed, so that the body can move after its first poll.
    rest: Option<Pin<Box<B>>>,
}

impl<B: Body<Data = Bytes>> ReplyBody<B> {
    pub(super) fn new(body: B) -> Self {
        Self { frames: VecDeque::new(), read: 0, trailers: None, rest: Some(Box::pin(body)) }
    }

    /// Reads the body to its end, or until more than `limit` bytes are read. A limit of 0 reads nothing.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, limit: usize) -> Poll<Result<(), B::Error>> {
        while let Some(rest) = &mut self.rest {
            // A body that reports its end is not polled, because the poll could wait for the connection.
            if rest.is_end_stream() {
                self.rest = None;
                break;
            }
            let announced = usize::try_from(rest.size_hint().lower()).unwrap_or(usize::MAX);
            if limit == 0 || self.read.saturating_add(announced) > limit {
                break;
            }
            match ready!(rest.as_mut().poll_frame(cx)).transpose()?.map(Frame::into_data) {
                // Empty frames are not kept: any number of them would stay below the limit.
                Some(Ok(data)) if data.is_empty() => {}
                Some(Ok(data)) => {
                    self.read += data.len();
                    self.frames.push_back(data);
                }
                Some(Err(frame)) => self.trailers = frame.into_trailers().ok(),
                None => self.rest = None,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns the bytes that were read, and closes the rest of the body.
    pub(super) fn into_read(self) -> Bytes {
        match Vec::from(self.frames).as_slice() {
            [] => Bytes::new(),
            // A single frame is not copied.
            [all] => all.clone(),
            frames => frames.concat().into(),
        }
    }

    /// Returns whether the layer has read the body to its end.
    pub fn is_whole(&self) -> bool {
        self.rest.is_none()
    }
}

impl<B> fmt::Debug for ReplyBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplyBody").field("is_whole", &self.rest.is_none()).finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> Body for ReplyBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(data) = self.frames.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        match &mut self.rest {
            Some(rest) => rest.as_mut().poll_frame(cx),
            None => Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.trailers.is_none() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        // An exact length would make HTTP/1.1 send `Content-Length`, and no trailers.
        if self.trailers.is_some() {
            return SizeHint::default();
        }
        let read = self.frames.iter().map(|frame| frame.len() as u64).sum::<u64>();
        let rest = self.rest.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint);
        let mut size = SizeHint::default();
        size.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper() {
            size.set_upper(upper.saturating_add(read));
        }
        size
    }
}
