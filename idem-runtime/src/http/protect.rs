//! Takes a request through the layer: checks the request, runs its handler, and records the response.
//!
//! The checks are, in order: method, key, caller, length, body, fingerprint. Then the layer makes one call of the
//! engine. The body of this call is the handler.

use std::borrow::Cow;
use std::future::poll_fn;
use std::iter;
use std::mem;
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode, Uri};
use http_body::Body;
use sha2::{Digest, Sha256, Sha512};

use super::body::{
    BoxError, DigestClaim, RecordableBody, RequestBody, ResponseBody, StreamCheck, UnreadBody, collect, read,
};
use super::field::{self, Digests, KeyFieldProblem};
use super::grpc::{self, ClientProtocol};
use super::identity::{self, BodyPrint, Payload, Target};
use super::problem::{Problem, ProblemKind};
use super::profile::{Equality, Recording};
use super::record::{NotRecorded, OwnFields, RECORDED, REPLAYABLE, RecordResponses, Recordable, encode, stored};
use super::settings::{IdempotencyKey, Settings};
use super::tasks::{Gate, NoPlace, Place};
use crate::combine::{race, soon};
use crate::engine::{Operation, Outcome, Reconciliation, current, observe, reconciliation};
use crate::error::Error;
use crate::key::{Fingerprint, FingerprintError, Key};
use crate::metrics::StoreOp;
use crate::policy::{Mode, OnCrash, Policy};
use crate::record::{Decision, Release, State, StoredResult, Traceparent};
use crate::store::StoreError;
use crate::sync::{Mutex, lock};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Shortest retry time, used while the layer is busy, and for a duplicate while the duration of handlers is unknown.
const SOON: Duration = Duration::from_secs(1);

/// The keys that outer layers have already reserved for a request.
#[derive(Clone)]
struct OuterKeys {
    key: Key,
    /// Keys of the outer layers. Boxed: most requests pass one layer.
    outer: Option<Box<OuterKeys>>,
}

impl OuterKeys {
    fn keys(&self) -> impl Iterator<Item = &Key> {
        iter::successors(Some(self), |it| it.outer.as_deref()).map(|it| &it.key)
    }
}

/// The layer's decision about a request.
pub(super) enum Classification {
    /// The layer does not cover the request.
    Pass,
    /// The layer refuses the request.
    Refuse(Refusal),
    /// The handler of the request runs once for its key.
    Protect(KeyedRequest),
}

/// A request with a key, ready to run or to be answered without its handler.
pub(super) struct PreparedRequest {
    pub(super) asked: KeyedRequest,
    pub(super) print: Print,
    pub(super) claim: Option<Arc<DigestClaim>>,
    /// Head of the request, for the reconciler; `None` if the layer has no reconciler. Boxed: most layers have none.
    pub(super) question: Option<Box<Parts>>,
    /// Origin of an error that is returned in place of a response.
    pub(super) on_error: ErrorOrigin,
    /// Guard that counts the request as in flight; `None` if the limit was reached in shadow mode, because shadow mode
    /// refuses no request.
    pub(super) place: Option<Place>,
}

/// The fingerprint of a request.
pub(super) type Print = Result<Fingerprint, FingerprintError>;

/// Origin of an error that is returned in place of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ErrorOrigin {
    /// The handler has returned the error, so the key is freed.
    Handler,
    /// A tower service has returned the error. An inner service, such as a time limit, may have cut off the handler.
    Service,
}

/// A problem, and the form in which the client expects it.
pub(super) struct Refusal {
    problem: Problem,
    protocol: ClientProtocol,
    /// Header field of the key, if the response repeats this field.
    echo: Option<HeaderValue>,
}

/// A request with a key.
pub(super) struct KeyedRequest {
    key: Key,
    /// The caller, to count the requests of each caller; `None` if the layer distinguishes no callers.
    caller: Option<Arc<str>>,
    name: IdempotencyKey,
    /// Header field of the key, if the responses repeat this field.
    echo: Option<HeaderValue>,
    method: Method,
    protocol: ClientProtocol,
    digests: Digests,
    /// Digest that enters the fingerprint in place of a body that streams to the handler; `None` if the layer reads the
    /// body first.
    streams: Option<[u8; 32]>,
    /// Trace context of the request. Boxed: most requests have no trace.
    traceparent: Option<Box<Traceparent>>,
}

impl KeyedRequest {
    pub(super) fn refusal(&self, problem: Problem) -> Refusal {
        Refusal { problem, protocol: self.protocol, echo: self.echo.clone() }
    }

    pub(super) fn busy(&self) -> Refusal {
        self.refusal(Problem::new(ProblemKind::Busy).retry_after(SOON))
    }

    /// Builds the head for the handler. Moves the client's key into the extensions of the head. The extensions also get
    /// the key that this layer reserves, for inner layers.
    pub(super) fn mark(&mut self, mut head: Parts) -> Parts {
        let covered = OuterKeys { key: self.key.clone(), outer: None };
        if let Some(outer) = head.extensions.insert(covered)
            && let Some(covered) = head.extensions.get_mut::<OuterKeys>()
        {
            covered.outer = Some(Box::new(outer));
        }
        head.extensions.insert(IdempotencyKey(mem::take(&mut self.name.0)));
        head
    }
}

/// Returns the whole target, even in nested routers.
fn uri(head: &Parts) -> &Uri {
    #[cfg(feature = "axum")]
    return super::extract::uri(head);
    #[cfg(not(feature = "axum"))]
    return &head.uri;
}

impl Settings {
    /// Classifies a request by its head, and by the length of its body if the length is stated.
    pub(super) fn look(&self, head: &Parts, length: Option<u64>) -> Classification {
        let mode = self.policy.current_mode();
        if !self.covers(head) || mode == Mode::Off {
            return Classification::Pass;
        }
        match self.asked(head, length) {
            // Shadow mode reads only bodies whose stated length is short.
            Ok(Some(asked)) if mode == Mode::Shadow && (length.is_none() || asked.streams.is_some()) => {
                Classification::Pass
            }
            Ok(Some(asked)) => Classification::Protect(asked),
            Ok(None) => Classification::Pass,
            Err(problem) if mode == Mode::Shadow => {
                tracing::info!(%problem, "shadow mode: would have been refused");
                Classification::Pass
            }
            Err(problem) => {
                let (protocol, echo) = (ClientProtocol::of(head), self.echo(head));
                Classification::Refuse(Refusal { problem, protocol, echo })
            }
        }
    }

    fn covers(&self, head: &Parts) -> bool {
        let is_read = || {
            let path = uri(head).path().trim_end_matches('/');
            self.profile.reads.iter().any(|end| path.ends_with(end))
        };
        self.methods().contains(&head.method) && self.covers.as_ref().map_or_else(|| !is_read(), |covers| covers(head))
    }

    /// Returns the field of the key as it was sent, if responses repeat this field. Returns `None` if a request has
    /// several such fields.
    fn echo(&self, head: &Parts) -> Option<HeaderValue> {
        let mut lines = head.headers.get_all(&self.header).iter().filter(|_| self.profile.echoes_key);
        lines.next().filter(|_| lines.next().is_none()).cloned()
    }

    fn asked(&self, head: &Parts, length: Option<u64>) -> Result<Option<KeyedRequest>, Problem> {
        let problem = |kind| Err(Problem::new(kind));
        // The key is checked first, because a request without a key may pass without further checks.
        let name = match field::key(&head.headers, &self.header) {
            Ok(name) if self.accepts(&name) => name,
            Err(KeyFieldProblem::Missing) if !self.requires(head) => return Ok(None),
            Err(KeyFieldProblem::Missing) => return problem(ProblemKind::MissingKey),
            _ => return problem(ProblemKind::InvalidKey),
        };
        // The caller is a part of the key, so a request without a caller is refused before anything is stored.
        let caller = match &self.caller.0 {
            None => String::new(),
            Some(principal) => match (principal.of)(head).filter(|caller| !caller.trim().is_empty()) {
                Some(caller) => caller,
                None => {
                    let has_credentials =
                        head.headers.contains_key(header::AUTHORIZATION) || head.headers.contains_key(header::COOKIE);
                    return problem(if has_credentials {
                        ProblemKind::Forbidden
                    } else {
                        ProblemKind::Unauthenticated
                    });
                }
            },
        };
        let route = self.route(head).ok_or_else(|| Problem::new(ProblemKind::InvalidHost))?;
        let key = identity::request_key(self.scope.as_deref(), head.method.as_str(), &route, &caller, &name);
        let key = key.map_err(|error| Problem::of(error.into()))?;
        // The route has this layer twice, or the layer is nested in a layer with the same scope: the outer layer
        // already protects the request.
        if head.extensions.get::<OuterKeys>().is_some_and(|covered| covered.keys().any(|it| *it == key)) {
            return Ok(None);
        }
        // The fingerprint of a body that is too long to be read needs the digest of the body.
        let Some(digests) = field::digests(&head.headers) else { return problem(ProblemKind::DigestMismatch) };
        let is_short = length.is_some_and(|length| length <= self.max_body_bytes as u64);
        let streams = digests.sha256.filter(|_| self.stream_digested && !is_short && !self.compares_json());
        if streams.is_none() && length.is_some() && !is_short {
            return problem(ProblemKind::BodyTooLarge);
        }
        let caller = self.caller.0.is_some().then(|| Arc::from(caller));
        let (name, echo, method) = (IdempotencyKey(name), self.echo(head), head.method.clone());
        let protocol = ClientProtocol::of(head);
        let traceparent =
            head.headers.get(TRACEPARENT).and_then(|field| field.to_str().ok()?.parse().ok()).map(Box::new);
        Ok(Some(KeyedRequest { key, caller, name, echo, method, protocol, digests, streams, traceparent }))
    }

    /// Returns the part of the target that enters the key; `None` if the host is part of the key and the request names
    /// no host.
    fn route<'a>(&self, head: &'a Parts) -> Option<Cow<'a, str>> {
        let route = match self.profile.equality {
            Equality::Json => Cow::Borrowed(uri(head).path()),
            Equality::Bytes if self.scope.is_some() => Cow::Borrowed(""),
            #[cfg(feature = "axum")]
            Equality::Bytes => identity::unnamed(super::extract::template(head).unwrap_or_default()),
            #[cfg(not(feature = "axum"))]
            Equality::Bytes => Cow::Borrowed(""),
        };
        match self.separate_hosts {
            true => identity::host(uri(head), &head.headers).map(|host| Cow::Owned(host + &route)),
            false => Some(route),
        }
    }

    /// Returns the part of the target that enters the fingerprint; `None` under a profile that compares JSON.
    fn target<'a>(&self, head: &'a Parts) -> Option<Target<'a>> {
        match self.profile.equality {
            Equality::Json => None,
            Equality::Bytes => Some((uri(head).path(), uri(head).query())),
        }
    }

    /// Reads the body of a request, unless the body streams to the handler.
    pub(super) async fn read<B>(
        &self,
        head: &Parts,
        asked: &KeyedRequest,
        body: B,
    ) -> Result<(RequestBody<B>, Print, Option<Arc<DigestClaim>>), Problem>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        if let Some(digest) = asked.streams {
            let print = self.print_of(head, BodyPrint::of_digest(&digest));
            let claim = DigestClaim::new(asked.digests);
            let clock = self.store.context().clock_handle();
            let check = StreamCheck::new(Arc::clone(&claim), clock, self.body_deadline);
            return Ok((RequestBody::checked(body, check), print, Some(claim)));
        }
        let body_deadline = if self.is_shadow() { Policy::MAX_DURATION } else { self.body_deadline };
        let mut reading = pin!(read(body, self.max_body_bytes));
        let read = match soon(reading.as_mut()).await {
            Some(read) => read,
            None => {
                let deadline = self.store.context().clock().sleep(body_deadline);
                race(reading, deadline).await.ok_or_else(|| Problem::new(ProblemKind::BodyTimeout))?
            }
        };
        let (bytes, trailers) = read.map_err(|unread| match unread {
            UnreadBody::TooLarge => Problem::new(ProblemKind::BodyTooLarge),
            UnreadBody::Broken => Problem::new(ProblemKind::InvalidBody),
        })?;
        let print = self.print(head, asked, &bytes)?;
        Ok((RequestBody::read(bytes, trailers), print, None))
    }

    /// Returns whether the layer is in shadow mode, in which it refuses nothing.
    fn is_shadow(&self) -> bool {
        self.policy.current_mode() == Mode::Shadow
    }

    /// Counts a request as in flight until the returned place is dropped. Returns `None` if a limit is reached in
    /// shadow mode.
    ///
    /// # Errors
    /// A limit is reached.
    pub(super) fn enter(&self, asked: &KeyedRequest) -> Result<Option<Place>, Problem> {
        let kind = match self.tasks.enter(&asked.key, asked.caller.as_ref()) {
            Ok(place) => return Ok(Some(place)),
            Err(_) if self.is_shadow() => return Ok(None),
            Err(NoPlace::Layer) => ProblemKind::Busy,
            Err(NoPlace::Caller) => ProblemKind::CallerBusy,
        };
        Err(Problem::new(kind).retry_after(SOON))
    }

    /// Returns the fingerprint of a request with this `body`.
    pub(super) fn print(&self, head: &Parts, asked: &KeyedRequest, body: &Bytes) -> Result<Print, Problem> {
        match self.checked_print(head, asked, body) {
            Err(problem) if self.is_shadow() => {
                tracing::info!(%problem, "shadow mode: would have been refused");
                Ok(self.print_of(head, BodyPrint::of_bytes(body)))
            }
            print => print,
        }
    }

    fn checked_print(&self, head: &Parts, asked: &KeyedRequest, body: &Bytes) -> Result<Print, Problem> {
        let Digests { sha256, sha512 } = asked.digests;
        let is_lie = sha256.is_some_and(|digest| Sha256::digest(body)[..] != digest)
            || sha512.is_some_and(|digest| Sha512::digest(body)[..] != digest);
        if is_lie {
            return Err(Problem::new(ProblemKind::DigestMismatch));
        }
        let print = match sha256 {
            _ if self.compares_json() => BodyPrint::of_json(body, self.fingerprint_members.as_ref())
                .map_err(|_| Problem::new(ProblemKind::InvalidBody))?,
            Some(digest) => BodyPrint::of_digest(&digest),
            None => BodyPrint::of_bytes(body),
        };
        Ok(self.print_of(head, print))
    }

    fn print_of(&self, head: &Parts, print: BodyPrint) -> Print {
        let names = match self.profile.equality {
            Equality::Bytes => &self.fingerprint_headers[..],
            Equality::Json => &[],
        };
        Payload::new(self.target(head), uri(head), &head.headers, names, print).fingerprint()
    }

    /// Runs `handler` once for the key of the request, or answers without running it. Records the response before
    /// returning it. The request is in flight until the returned future is dropped.
    ///
    /// This function is no `async fn`, and none of its statements moves an argument: an `async fn` stores a moved
    /// argument twice, and the arguments make up most of the size of the future.
    pub(super) fn run<S, F, H, R, E>(
        settings: S,
        request: PreparedRequest,
        gate: Gate,
        handler: F,
    ) -> impl Future<Output = Result<Response<ResponseBody<R>>, E>>
    where
        S: Deref<Target = Self>,
        F: FnOnce() -> H,
        H: Future<Output = Result<Response<R>, E>>,
        R: Body<Data = Bytes>,
    {
        let mut handler = Some(handler);
        async move {
            let (this, PreparedRequest { asked, print, claim, question, on_error, place: _place }, handler) =
                (&*settings, &request, &mut handler);
            let enforced = this.policy.current_mode() == Mode::Enforce;
            // The body of the call stores the response here and returns only the recordable result to the engine. A
            // response whose recording fails can thus still be sent.
            let answered = Mutex::new(None);
            let body = async {
                gate.pass().await;
                if let (Some(head), true) = (question, reconciliation::is_asked())
                    // Boxed: few requests ask, but every request would carry the size of this future.
                    && let Some((result, response)) = Box::pin(this.ask(asked, head)).await
                {
                    *lock(&answered) = response.map(Ok);
                    return result;
                }
                let answer = {
                    let mut running = pin!(handler.take().expect("a body runs once")());
                    this.timing(running.as_mut()).await
                };
                let (result, answer) = match answer {
                    Ok(response) => {
                        let (result, response) = this.judge(asked, response, claim.as_deref()).await;
                        (result, Ok(response))
                    }
                    Err(error) => {
                        let release = match on_error {
                            ErrorOrigin::Handler => Release::Returned,
                            ErrorOrigin::Service => this.cut_off(),
                        };
                        (Err(NotRecorded::Freed(release)), Err(error))
                    }
                };
                *lock(&answered) = Some(answer);
                result
            };
            // The engine decides whether the body runs.
            let operation =
                Operation::new(&this.store, Ok(asked.key.clone()), this.policy).fingerprinted(print.clone());
            let call = observe(operation.recorded_by(RecordResponses).run(body))
                .traceparent(asked.traceparent.as_deref().copied());
            let (result, outcome) = call.await;
            // Boxed: few records are removed again, but every request would carry the size of this future.
            if enforced && outcome.attempt() == Some(1) && matches!(result, Err(NotRecorded::Forgotten)) {
                Box::pin(this.forget(&asked.key)).await;
            }
            let answer = lock(&answered).take();
            this.answer(asked, result, answer, outcome, enforced)
        }
    }

    /// Builds the response to a request whose call has ended.
    fn answer<R: Body<Data = Bytes>, E>(
        &self,
        asked: &KeyedRequest,
        result: Result<Recordable, NotRecorded>,
        answer: Option<Result<Response<ResponseBody<R>>, E>>,
        outcome: Outcome,
        enforced: bool,
    ) -> Result<Response<ResponseBody<R>>, E> {
        let mut response = match (result, answer) {
            (Ok(Recordable::Replayed(recorded)), _) => {
                let (head, body, trailers) = recorded.into_response(&asked.method);
                let mut response = head.map(|()| ResponseBody::read(body, trailers));
                response.headers_mut().insert(self.marker.clone(), HeaderValue::from_static("true"));
                response
            }
            // The response can be replayed, and the client has to come again: nothing else delivers the messages.
            (Err(NotRecorded::Refused(error @ Error::Unsent { replayable: true, .. })), Some(_)) => {
                self.refuse(asked.refusal(Problem::of(error)))
            }
            // The handler ran in this call. If its response could not be recorded, a header shows this to the client.
            (result, Some(answer)) => {
                let echo = asked.echo.is_some().then(|| self.header.clone());
                let own = OwnFields { marker: self.marker.clone(), echo };
                let mut response = answer?.map(|body| body.without(&own));
                own.remove_from(response.headers_mut());
                let is_lost = match &result {
                    // This response exists nowhere else. A resender sends the messages, if a record holds them.
                    Ok(_) | Err(NotRecorded::Refused(Error::Unsent { .. })) => enforced && !outcome.recorded(),
                    Err(NotRecorded::Refused(error)) => {
                        tracing::error!(%error, "the response is sent, and it is not recorded");
                        true
                    }
                    Err(NotRecorded::Freed(_) | NotRecorded::Forgotten) => false,
                };
                if is_lost {
                    response.headers_mut().insert(RECORDED, HeaderValue::from_static("false"));
                } else if enforced && outcome.recorded() && !outcome.result_stored() {
                    response.headers_mut().insert(REPLAYABLE, HeaderValue::from_static("false"));
                }
                response
            }
            (Err(NotRecorded::Refused(error)), None) => {
                let limit = match &error {
                    // The response exists as soon as the handler has ended, so the retry time is limited to the usual
                    // duration of a handler.
                    Error::InProgress { .. } => self.tasks.usual().max(SOON),
                    _ => Duration::MAX,
                };
                self.refuse(asked.refusal(Problem::of(error).retry_within(limit)))
            }
            // This case does not happen: a body that has returned has stored its answer.
            (Ok(Recordable::Ran(_)) | Err(NotRecorded::Freed(_) | NotRecorded::Forgotten), None) => {
                self.refuse(asked.refusal(Problem::new(ProblemKind::Misconfigured)))
            }
        };
        if let Some(echo) = &asked.echo {
            response.headers_mut().insert(self.header.clone(), echo.clone());
        }
        response.extensions_mut().insert::<Outcome>(outcome);
        Ok(response)
    }

    /// Returns the head of a request for the reconciler of the layer.
    pub(super) fn question(&self, head: &Parts) -> Option<Box<Parts>> {
        self.reconcile.is_some().then(|| Box::new(head.clone()))
    }

    /// Asks the reconciler of the layer about the request with this `head`. Returns the result of the call, with the
    /// response if there is one; `None` if the handler must run.
    async fn ask<R: Body<Data = Bytes>>(
        &self,
        asked: &KeyedRequest,
        head: &Parts,
    ) -> Option<(Result<Recordable, NotRecorded>, Option<Response<ResponseBody<R>>>)> {
        let answer = match &self.reconcile {
            Some(reconcile) => reconcile(head.clone()).await,
            None => None,
        };
        let mut response = None;
        let answer = match answer {
            Some(Reconciliation::Done(found)) => {
                let (head, body) = found.into_parts();
                let result = self.encoded(asked, &head, &body, None);
                response = Some(Response::from_parts(head, ResponseBody::read(body, None)));
                Ok(Reconciliation::Done(Recordable::Ran(result)))
            }
            Some(Reconciliation::NotDone) => Ok(Reconciliation::NotDone),
            Some(Reconciliation::Unknown { ask_again }) => Ok(Reconciliation::Unknown { ask_again }),
            None => current().map(|attempt| Reconciliation::Unknown { ask_again: attempt.pause() }).map_err(Into::into),
        };
        reconciliation::settle(answer).map(|result| (result, response))
    }

    /// Encodes a response for its record.
    fn encoded(
        &self,
        asked: &KeyedRequest,
        head: &http::response::Parts,
        body: &[u8],
        trailers: Option<&HeaderMap>,
    ) -> StoredResult {
        let keeps = |name: &HeaderName| {
            let is_own = *name == self.marker || (asked.echo.is_some() && *name == self.header);
            !is_own && self.replay_headers.as_ref().is_none_or(|replays| replays(name))
        };
        encode(head, body, trailers, &asked.method, keeps).map_or(StoredResult::Unencodable, stored)
    }

    /// Removes the released record of `key` with its fingerprint, unless another attempt has begun. If the store fails,
    /// the record stays, and a request with another payload is refused.
    async fn forget(&self, key: &Key) {
        let store = &*self.store;
        let removing = async {
            let found = store.inspect(key).watched(store, StoreOp::Inspect).await?;
            if let Some(found) = found.filter(|it| it.record.attempt == 1 && it.record.state == State::Released) {
                let decision = Decision::forget(key, &found).reason("the request failed validation");
                // The store refuses the decision if another attempt has begun meanwhile: the record of that
                // attempt must stay.
                let _ = store.decide(&decision).watched(store, StoreOp::Decide).await?;
            }
            Ok::<_, StoreError>(())
        };
        if let Err(error) = removing.await {
            tracing::warn!(%key, %error, "the key is freed, and another request under it is refused");
        }
    }

    /// Runs a handler, and notes its duration.
    async fn timing<F: Future>(&self, mut handler: Pin<&mut F>) -> F::Output {
        let clock = self.store.context().clock();
        let mut began = None;
        let answer = poll_fn(|cx| {
            let polled = handler.as_mut().poll(cx);
            // If the handler ends at its first poll, the clock is not read.
            if polled.is_pending() && began.is_none() {
                began = Some(clock.now());
            }
            polled
        });
        let answer = answer.await;
        self.tasks.took(began.map_or(Duration::ZERO, |began| clock.now().saturating_since(began)));
        answer
    }

    /// Decides about the recording of a response. Returns the result to record, and the response for the first client.
    async fn judge<R: Body<Data = Bytes>>(
        &self,
        asked: &KeyedRequest,
        response: Response<R>,
        claim: Option<&DigestClaim>,
    ) -> (Result<Recordable, NotRecorded>, Response<ResponseBody<R>>) {
        let released = || Err(NotRecorded::Freed(Release::Returned));
        let interrupted = || Err(NotRecorded::Freed(self.cut_off()));
        let marked = || Ok(Recordable::Ran(StoredResult::Unencodable));
        let defect = || claim.and_then(DigestClaim::defect);
        let refused = |defect| (released(), self.refuse(asked.refusal(Problem::new(defect))));
        // A body that does not match its digest, or did not arrive, must leave no record, even if the handler
        // succeeded.
        if let Some(defect) = defect() {
            return refused(defect);
        }
        let (mut head, body) = response.into_parts();
        // The handler's decision overrides the layer's rule. The layer's rule overrides the profile's rule.
        let own = head.extensions.remove::<Recording>();
        let rule = |head: &http::response::Parts, trailers: &HeaderMap| match (own, &self.recording) {
            (Some(own), _) => own,
            (None, Some(rule)) => rule(head, trailers),
            (None, None) => (self.profile.recording)(head, trailers),
        };
        let as_it_comes = |head, body| Response::from_parts(head, ResponseBody::as_it_comes(body));
        // The first decision depends only on the head, so that a response that is not recorded can be streamed.
        match rule(&head, &HeaderMap::new()) {
            Recording::Release => return (released(), as_it_comes(head, body)),
            Recording::Interrupt => return (interrupted(), as_it_comes(head, body)),
            Recording::Forget => return (Err(NotRecorded::Forgotten), as_it_comes(head, body)),
            Recording::Mark => return (marked(), as_it_comes(head, body)),
            Recording::Record if self.is_passed_on(&head, &asked.method) => {
                return (marked(), as_it_comes(head, body));
            }
            Recording::Record => {}
        }
        // The second decision also depends on the trailers, so the whole body is read first.
        match collect(body, self.policy.result_limit()).await {
            RecordableBody::Whole(body, trailers) => {
                if let Some(defect) = defect() {
                    return refused(defect);
                }
                let in_body = grpc::trailers_in_body(&head, &body);
                let judged = trailers.as_ref().or(in_body.as_ref());
                let result = match judged.map_or(Recording::Record, |trailers| rule(&head, trailers)) {
                    Recording::Release => released(),
                    Recording::Interrupt => interrupted(),
                    Recording::Forget => Err(NotRecorded::Forgotten),
                    Recording::Mark => marked(),
                    Recording::Record => Ok(Recordable::Ran(self.encoded(asked, &head, &body, trailers.as_ref()))),
                };
                (result, Response::from_parts(head, ResponseBody::read(body, trailers)))
            }
            RecordableBody::TooLarge(size, body) => {
                tracing::debug!(key = %asked.key, size, "a response is too large to be recorded");
                (Ok(Recordable::Ran(StoredResult::TooLarge { size })), Response::from_parts(head, body))
            }
            RecordableBody::Broken(body) => {
                tracing::warn!(key = %asked.key, "the body of a response broke off; nothing is recorded");
                (interrupted(), Response::from_parts(head, body))
            }
        }
    }

    /// Returns the release that the policy's `on_crash` requires for a run that was cut off.
    fn cut_off(&self) -> Release {
        match self.policy.on_crash {
            OnCrash::Retry => Release::Returned,
            OnCrash::Fail => Release::Interrupted,
        }
    }

    /// Returns whether a response can only be passed on, not recorded: it switches to another protocol, is endless, or
    /// is encoded for one client.
    fn is_passed_on(&self, head: &http::response::Parts, method: &Method) -> bool {
        let content_type = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let is_endless = ["text/event-stream", "multipart/x-mixed-replace"]
            .iter()
            .any(|endless| field::is_type(content_type, endless));
        let is_tunnel = head.status.is_informational() || (*method == Method::CONNECT && head.status.is_success());
        let is_encoded = head.headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        if is_encoded && !self.tasks.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a response reaches the idempotency layer encoded and is not recorded: duplicates get 410; put the layer \
                 inside of compression, that is, add the compression layer after it in axum and before it in a ServiceBuilder"
            );
        }
        is_endless || is_tunnel || is_encoded
    }

    /// Builds the response to a refused request.
    pub(super) fn refuse<R: Body<Data = Bytes>>(&self, refusal: Refusal) -> Response<ResponseBody<R>> {
        let Refusal { problem, protocol, echo } = refusal;
        let status = match problem.kind() {
            ProblemKind::FingerprintMismatch => self.profile.mismatch,
            kind => kind.status(),
        };
        let problem = problem.at(status, &self.problem_base).named(self.store.context().clock().entropy());
        let instance = problem.instance();
        match problem.error() {
            Some(error) if status.is_server_error() => {
                tracing::warn!(%error, %problem, instance, "a request is refused");
            }
            error => {
                let error = error.map(tracing::field::display);
                tracing::debug!(error, %problem, instance, "a request is refused");
            }
        }
        let mut response = protocol.response(&problem).unwrap_or_else(|| (self.profile.problem)(&problem));
        if let (StatusCode::UNAUTHORIZED, Some(principal)) = (response.status(), &self.caller.0) {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, principal.challenge.clone());
        }
        if let Some(echo) = echo {
            response.headers_mut().insert(self.header.clone(), echo);
        }
        if let Some(hook) = &self.on_problem {
            hook(&problem, &mut response);
        }
        response.map(|body| ResponseBody::read(body, None))
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn a_request_carries_the_keys_that_all_its_layers_have_reserved() {
        let key = identity::request_key(Some("s"), "POST", "", "", "k").unwrap();
        let mut asked = KeyedRequest {
            key: key.clone(),
            caller: None,
            name: IdempotencyKey("k".to_owned()),
            echo: None,
            method: Method::POST,
            protocol: ClientProtocol::Http,
            traceparent: None,
            digests: Digests::default(),
            streams: None,
        };
        let head = asked.mark(Request::new(()).into_parts().0);
        assert_eq!(head.extensions.get::<IdempotencyKey>().unwrap().0, "k");
        let head = asked.mark(head);
        assert!(head.extensions.get::<OuterKeys>().unwrap().keys().eq([&key, &key]));
    }
}
