//! Settings of a layer for clients, and the decisions that depend only on these settings.

use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderName};
use http::{HeaderMap, Method, Request};

use super::budget::{RetryBudget, TokenBucket};
use super::error::{CallRefusal, RetryLimit};
use super::key::{CallKey, CallName, InvalidCallKey};
use crate::clock::{Clock, SplitMix, SystemClock, as_nanos};
use crate::engine::current;
use crate::policy::Backoff;

#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) header: HeaderName,
    pub(super) methods: Vec<Method>,
    pub(super) requires_key: bool,
    pub(super) max_tries: u32,
    pub(super) try_timeout: Option<Duration>,
    pub(super) max_pause: Duration,
    pub(super) max_body_bytes: usize,
    pub(super) backoff: Backoff,
    /// Tokens for retries. All layers made from this layer share the tokens.
    pub(super) bucket: Arc<TokenBucket>,
    pub(super) quoted: bool,
    pub(super) clock: Arc<dyn Clock>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            header: HeaderName::from_static("idempotency-key"),
            methods: vec![Method::POST, Method::PATCH],
            requires_key: false,
            max_tries: 5,
            try_timeout: None,
            max_pause: Duration::from_secs(60),
            max_body_bytes: 1 << 20,
            backoff: Backoff::new(Duration::from_millis(200), Duration::from_secs(10)),
            bucket: Arc::new(TokenBucket::new(RetryBudget::DEFAULT)),
            quoted: false,
            clock: Arc::new(SystemClock::default()),
        }
    }
}

impl Settings {
    /// Gives `request` a key if the request needs a key and has no key. Returns the key of the request; `None` if the
    /// request needs no key.
    pub(super) fn identify<B>(&self, request: &mut Request<B>) -> Result<Option<CallKey>, CallRefusal> {
        let invalid = |InvalidCallKey| CallRefusal::InvalidKey;
        if let Some(key) = CallKey::in_field(request.headers(), &self.header).map_err(invalid)? {
            return Ok(Some(key));
        }
        let Some(key) = self.key_of(request)? else { return Ok(None) };
        let key = if self.quoted { key.quoted() } else { key };
        request.headers_mut().insert(self.header.clone(), key.to_field().map_err(invalid)?);
        Ok(Some(key))
    }

    fn key_of<B>(&self, request: &Request<B>) -> Result<Option<CallKey>, CallRefusal> {
        if let Some(key) = request.extensions().get::<CallKey>() {
            return Ok(Some(key.clone()));
        }
        let attempt = current().ok();
        if let Some(name) = request.extensions().get::<CallName>() {
            return name.key(attempt.as_ref()).ok_or(CallRefusal::NoAttempt).map(Some);
        }
        if !self.methods.contains(request.method()) {
            return Ok(None);
        }
        match attempt {
            Some(_) => Err(CallRefusal::Unnamed),
            None if self.requires_key => Err(CallRefusal::NoKey),
            None => Ok(Some(CallKey::from_bits(self.clock.entropy()))),
        }
    }

    /// Returns the number of bytes to read from a body with these headers. An event stream is not read, because it
    /// has no end.
    pub(super) fn body_limit(&self, headers: &HeaderMap) -> usize {
        const EVENTS: &[u8] = b"text/event-stream";
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.as_bytes().get(..EVENTS.len()));
        let is_stream = kind.is_some_and(|kind| kind.eq_ignore_ascii_case(EVENTS));
        if is_stream { 0 } else { self.max_body_bytes }
    }

    /// Returns the pause before the next try, or the limit that allows no further try. `asked` is the pause that the
    /// server asks for, and `tries` is the number of tries so far.
    pub(super) fn pause(&self, asked: Duration, tries: u32) -> Result<Duration, RetryLimit> {
        if tries >= self.max_tries {
            return Err(RetryLimit::Tries);
        }
        if asked > self.max_pause {
            return Err(RetryLimit::Pause);
        }
        if !self.bucket.withdraw(self.clock.now()) {
            return Err(RetryLimit::Budget);
        }
        #[expect(clippy::cast_possible_truncation, reason = "64 random bits are enough")]
        let seed = self.clock.entropy() as u64;
        // A random part is added, so that clients to which the server named the same pause don't return at the same
        // time.
        let spread = SplitMix(seed).next() % (as_nanos(asked) / 4 + 1);
        let longer = asked.saturating_add(Duration::from_nanos(spread));
        Ok(longer.max(self.backoff.after(tries, seed)))
    }
}
