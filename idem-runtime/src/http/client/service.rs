//! The tries of a request.
//!
//! The future of this module is written by hand and boxes nothing, so it is `Send` whenever its fields are. A boxed
//! future would require `Send` and `'static` of the client's types in the bounds of `Service`. Within another future,
//! where lifetimes are erased, the compiler can't prove these bounds for a boxed error or a borrowing future, so a
//! handler that calls the client could not be spawned.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::ReplyBody;
use super::error::{RetryError, RetryLimit};
use super::key::CallKey;
use super::pause::{before_retry, retry_after};
use super::settings::Settings;
use crate::clock::Sleep;

/// The service of a [`RetryLayer`](super::RetryLayer).
#[derive(Clone, Debug)]
pub struct Retry<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> Retry<S> {
    pub(super) fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
    }
}

impl<S, B, R> Service<Request<B>> for Retry<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: Clone,
    R: Body<Data = Bytes>,
    R::Error: fmt::Display,
{
    type Response = Response<ReplyBody<R>>;
    type Error = RetryError<S::Error>;
    type Future = RetryFuture<S, B, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        let failed = |error| RetryError::Client { error, key: None, limit: None, last: None };
        self.inner.poll_ready(cx).map_err(failed)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // This call takes the service that is ready, and leaves its clone for the next call.
        let next = self.inner.clone();
        let inner = mem::replace(&mut self.inner, next);
        let settings = Arc::clone(&self.settings);
        // The key is computed here, in the handler's task, because the future may be polled in another task.
        let (key, refusal) = match settings.identify(&mut request) {
            Ok(key) => (key, None),
            Err(refusal) => (None, Some(refusal.of(request.method().clone(), request.uri().clone()))),
        };
        let mut tries =
            RequestTries { inner, settings, request: Some(request), key, count: 0, last: None, deadline: None };
        let step = match refusal {
            Some(error) => RetryStep::Refusal { error: Some(error) },
            None => tries.begin(),
        };
        RetryFuture { tries, step }
    }
}

/// The state of a request that all its tries share.
struct RequestTries<S, B> {
    inner: S,
    settings: Arc<Settings>,
    /// `None` once the last try has begun.
    request: Option<Request<B>>,
    key: Option<CallKey>,
    /// Number of tries that have begun.
    count: u32,
    last: Option<Box<Response<Bytes>>>,
    /// End of the time limit of the running try.
    deadline: Option<Sleep>,
}

/// The end of a try.
enum TryEnd<R, E> {
    /// A response whose body is read in full, or is too long to be read.
    Answer(Response<ReplyBody<R>>),
    /// A response whose body broke off, and the message of the body's error.
    BrokenBody(Response<ReplyBody<R>>, String),
    Failure(E),
    /// The time limit has passed. The field holds the part of a response that arrived in time, if any.
    Timeout(Option<Response<ReplyBody<R>>>),
}

impl<R, E> TryEnd<R, E> {
    /// Returns the response, if there is one.
    fn response(&self) -> Option<&Response<ReplyBody<R>>> {
        match self {
            Self::Answer(response) | Self::BrokenBody(response, _) => Some(response),
            Self::Timeout(response) => response.as_ref(),
            Self::Failure(_) => None,
        }
    }

    fn into_response(self) -> Option<Response<ReplyBody<R>>> {
        match self {
            Self::Answer(response) | Self::BrokenBody(response, _) => Some(response),
            Self::Timeout(response) => response,
            Self::Failure(_) => None,
        }
    }
}

impl<S, B> RequestTries<S, B> {
    /// Begins a try. The service must be ready.
    fn begin<R>(&mut self) -> RetryStep<S::Future, R, S::Error>
    where
        S: Service<Request<B>>,
        B: Clone,
    {
        if self.count == 0 && self.key.is_some() {
            self.settings.bucket.deposit(self.settings.clock.now());
        }
        self.count += 1;
        self.deadline = None;
        let is_last = self.key.is_none() || self.count >= self.settings.max_tries;
        let request = if is_last { self.request.take() } else { self.request.clone() };
        RetryStep::Call { call: self.inner.call(request.expect("no try follows the last one")) }
    }

    /// Becomes ready when the running try has taken longer than its time limit.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(limit) = self.settings.try_timeout else { return Poll::Pending };
        self.deadline.get_or_insert_with(|| self.settings.clock.sleep(limit)).as_mut().poll(cx)
    }

    /// Returns the number of bytes to read from the body of the response. A request without a key is not retried, so
    /// the body of its response is not read.
    fn body_limit<R>(&self, response: &Response<R>) -> usize {
        if self.key.is_some() { self.settings.body_limit(response.headers()) } else { 0 }
    }

    /// Reads the body of a response, up to the limit and within the time limit of the try.
    fn poll_read<R, E>(
        &mut self,
        response: &mut Option<Response<ReplyBody<R>>>,
        cx: &mut Context<'_>,
    ) -> Poll<TryEnd<R, E>>
    where
        R: Body<Data = Bytes>,
        R::Error: fmt::Display,
    {
        let mut reply = response.take().expect("a future that is ready is not polled");
        let limit = self.body_limit(&reply);
        Poll::Ready(match reply.body_mut().poll_read(cx, limit) {
            Poll::Ready(Ok(())) => TryEnd::Answer(reply),
            Poll::Ready(Err(error)) => TryEnd::BrokenBody(reply, error.to_string()),
            Poll::Pending if self.poll_deadline(cx).is_ready() => TryEnd::Timeout(Some(reply)),
            Poll::Pending => {
                *response = Some(reply);
                return Poll::Pending;
            }
        })
    }

    /// Returns the pause after a try, or the limit that allows no further try; `None` if the end of the try is final.
    fn pause_after<R, E>(&self, end: &TryEnd<R, E>) -> Option<Result<Duration, RetryLimit>> {
        self.key.as_ref()?;
        let wall = self.settings.clock.wall();
        let asked = match end {
            TryEnd::Answer(response) => before_retry(response.status(), response.headers(), wall)?,
            _ => end.response().and_then(|response| retry_after(response.headers(), wall)).unwrap_or_default(),
        };
        let pause = self.settings.pause(asked, self.count);
        tracing::debug!(tries = self.count, ?pause, "a request has no final response");
        Some(pause)
    }

    /// Returns the result of the call after its last try.
    fn result<R, E>(
        &mut self,
        end: TryEnd<R, E>,
        limit: Option<RetryLimit>,
    ) -> Result<Response<ReplyBody<R>>, RetryError<E>>
    where
        R: Body<Data = Bytes>,
    {
        let (key, last) = (self.key.take(), self.last.take());
        match (end, key, limit) {
            (TryEnd::Answer(mut response), key, limit) => {
                key.map(|key| response.extensions_mut().insert(key));
                limit.map(|limit| response.extensions_mut().insert(limit));
                Ok(response)
            }
            (TryEnd::BrokenBody(response, reason), Some(key), Some(limit)) => {
                Err(RetryError::BrokenBody { reason, key, limit, last: read(response) })
            }
            // This case does not happen: without a limit the request has no key, and the body of its response is not
            // read.
            (TryEnd::BrokenBody(response, _), ..) => Ok(response),
            (TryEnd::Failure(error), key, limit) => Err(RetryError::Client { error, key, limit, last }),
            (TryEnd::Timeout(response), key, limit) => {
                Err(RetryError::TimedOut { key, limit, last: response.map(read).or(last) })
            }
        }
    }
}

/// Returns a response with the part of its body that was read. The drop of the unread part frees the connection.
fn read<R: Body<Data = Bytes>>(response: Response<ReplyBody<R>>) -> Box<Response<Bytes>> {
    Box::new(response.map(ReplyBody::into_read))
}

pin_project! {
    /// The future of a [`Retry`].
    pub struct RetryFuture<S, B, R>
    where
        S: Service<Request<B>>,
    {
        tries: RequestTries<S, B>,
        #[pin]
        step: RetryStep<S::Future, R, S::Error>,
    }
}

pin_project! {
    #[project = StepProjection]
    enum RetryStep<F, R, E> {
        Refusal {
            error: Option<RetryError<E>>,
        },
        Call {
            #[pin]
            call: F,
        },
        Read {
            response: Option<Response<ReplyBody<R>>>,
        },
        Pause {
            sleep: Sleep,
        },
        // Waits until the client is ready for the next try.
        Readiness,
    }
}

impl<S, B, R> fmt::Debug for RetryFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryFuture").field("tries", &self.tries.count).finish_non_exhaustive()
    }
}

impl<S, B, R> Future for RetryFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>>,
    B: Clone,
    R: Body<Data = Bytes>,
    R::Error: fmt::Display,
{
    type Output = Result<Response<ReplyBody<R>>, RetryError<S::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (tries, mut step) = (this.tries, this.step);
        loop {
            let end = match step.as_mut().project() {
                StepProjection::Refusal { error } => {
                    return Poll::Ready(Err(error.take().expect("a future that is ready is not polled")));
                }
                StepProjection::Call { call } => match call.poll(cx) {
                    Poll::Ready(Ok(response)) => {
                        let response = Some(response.map(ReplyBody::new));
                        step.set(RetryStep::Read { response });
                        continue;
                    }
                    Poll::Ready(Err(error)) => TryEnd::Failure(error),
                    Poll::Pending => {
                        ready!(tries.poll_deadline(cx));
                        TryEnd::Timeout(None)
                    }
                },
                StepProjection::Read { response } => ready!(tries.poll_read(response, cx)),
                StepProjection::Pause { sleep } => {
                    ready!(sleep.as_mut().poll(cx));
                    step.set(RetryStep::Readiness);
                    continue;
                }
                StepProjection::Readiness => match ready!(tries.inner.poll_ready(cx)) {
                    Ok(()) => {
                        let next = tries.begin();
                        step.set(next);
                        continue;
                    }
                    // The client accepts no further requests.
                    Err(error) => return Poll::Ready(tries.result(TryEnd::Failure(error), None)),
                },
            };
            match tries.pause_after(&end) {
                Some(Ok(pause)) => {
                    let earlier = tries.last.take();
                    tries.last = end.into_response().map(read).or(earlier);
                    // The pause replaces the finished call. The drop of this call frees the connection.
                    step.set(RetryStep::Pause { sleep: tries.settings.clock.sleep(pause) });
                }
                Some(Err(limit)) => return Poll::Ready(tries.result(end, Some(limit))),
                None => return Poll::Ready(tries.result(end, None)),
            }
        }
    }
}
