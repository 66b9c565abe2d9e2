//! Streams that report when bytes move on them.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::clock::Instant;

/// Number of bytes for which an exchange gets more time: for each 256 KiB that the exchange has sent without an answer,
/// its time limit grows by the limit of a short exchange. The system accepts bytes immediately, and the library can't
/// see how many bytes are still under way.
pub(crate) const SENT_IN_TIME: usize = 256 * 1024;

/// Observer of a stream, which is notified when bytes move on the stream.
pub(crate) trait Meter {
    /// Records that bytes have arrived.
    fn heard(&self);

    /// Records that bytes were sent.
    fn sent(&self, bytes: usize);
}

impl<M: Meter> Meter for Arc<M> {
    fn heard(&self) {
        M::heard(self);
    }

    fn sent(&self, bytes: usize) {
        M::sent(self, bytes);
    }
}

/// A point in time that many tasks set and read; initially the clock's origin.
#[derive(Debug, Default)]
pub(crate) struct Moment {
    nanos: AtomicU64,
}

impl Moment {
    pub(crate) fn set(&self, at: Instant) {
        self.nanos.store(at.nanos(), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Instant {
        Instant::new(Duration::from_nanos(self.nanos.load(Ordering::Relaxed)))
    }
}

/// A stream that notifies its meter when bytes move on it.
pub(crate) struct Metered<S, M> {
    pub(crate) stream: S,
    pub(crate) meter: M,
}

impl<S: AsyncRead + Unpin, M: Meter + Unpin> AsyncRead for Metered<S, M> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.meter.heard();
        }
        read
    }
}

impl<S, M: Meter> Metered<S, M> {
    fn note(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = written {
            self.meter.sent(bytes);
        }
        written
    }
}

impl<S: AsyncWrite + Unpin, M: Meter + Unpin> AsyncWrite for Metered<S, M> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
