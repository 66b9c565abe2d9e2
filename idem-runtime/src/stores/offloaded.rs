//! Keeps large results in an object store.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutPayload};
use sha2::{Digest, Sha256};

use crate::codec::CodecName;
use crate::combine::race;
use crate::key::Key;
use crate::record::envelope::{self, Envelope, Form, unreadable};
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Record, Reservation, ReserveRequest, StoredResult, Verdict,
};
use crate::store::{StepValues, Store, StoreError, StoreErrorKind, StoreFuture, forward, store_of_shared};
use crate::stores::wrapper;
use crate::sync::SharedOnce;

const CODEC: CodecName = envelope::OFFLOADED;
const DIGEST_BYTES: usize = 32;
/// First pause between two tries of a call to the object store. The pause doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A wrapper around any store that keeps large results in an object store (S3, GCS, Azure, a folder, …). The records
/// stay in the inner store.
///
/// A result of more than [`above`](OffloadedOptions::above) bytes becomes an object before the record is finished, and
/// so does a value of a [step](crate::Attempt::step) before the step is journaled. The record holds the object's path,
/// size and SHA-256. So records stay small, and a store with a size limit, such as
/// `DynamoDB`, takes results of any size. Raise `max_result_bytes` of the policy as well (default: 256 KiB), and
/// [`StepPolicy::max_value_bytes`](crate::policy::StepPolicy::max_value_bytes) for steps.
///
/// - *Atomicity*, *Clock*: as in the inner store. A record never refers to an object that is not completely uploaded.
/// - *Durability*: as in the inner store for the record. The result lasts as long as its object. A result whose object
///   is missing, altered, or out of reach for longer than [`timeout`](OffloadedOptions::timeout) is unavailable
///   ([`StoredResult::Unreadable`], an error for the caller). The operation is still finished, and never runs again.
/// - *Limits*: the object store's limit for one `PUT`.
/// - *Cost*: for a large result, one more `PUT` at the first run and one more `GET` at each replay. Small results cause
///   no further cost.
///
/// **If the object store fails while a result is recorded,** the upload is retried for [`timeout`] (at most a third of
/// the lease). If the upload still fails, the result goes into the record. If the record is too large for the inner
/// store, the completion is recorded without its result. The operation has had its effect, so no failure of the object
/// store lets the operation run again.
///
/// **The object store removes the objects.** Give the prefix a lifecycle rule that removes objects some time after the
/// longest `ttl`, never sooner: an object and its record are about equally old. The value of a step is as old as the
/// attempt that ran the step: a rule for handlers with steps also adds the longest time that an operation takes with
/// all its attempts. This wrapper removes an object only if its attempt has lost the lease, or if the inner store can't
/// hold the record. The lifecycle rule also removes the object of an attempt that dies between the upload of its object
/// and the write of its record, and the object of a result that an operator discards.
///
/// Objects are named `<prefix>/<hash of the key>/<hash of the attempt and of the result>`. Two stores may share a
/// prefix. All consumers of one store need the wrapper: a consumer without the wrapper gets an error that names the
/// codec `idem:object`. Small results are written unchanged, so the wrapper can be added at any time.
///
/// [`timeout`]: OffloadedOptions::timeout
///
/// ```
/// use std::sync::Arc;
/// use idem_runtime::{MemoryStore, Offloaded};
/// use object_store::memory::InMemory;
///
/// let store = Offloaded::new(MemoryStore::new(), Arc::new(InMemory::new()));
/// ```
#[derive(Clone, Debug)]
pub struct Offloaded(Arc<OffloadedInner>);

impl Offloaded {
    /// Wraps `store` with the default settings of [`OffloadedOptions`]: large results go to `objects`, everything else
    /// to `store`.
    pub fn new(store: impl Store, objects: Arc<dyn ObjectStore>) -> Self {
        Self::options().wrap(store, objects)
    }

    /// Returns the default settings, to be changed before wrapping a store.
    pub fn options() -> OffloadedOptions {
        OffloadedOptions::default()
    }
}

store_of_shared!(Offloaded);

/// Settings of an [`Offloaded`].
#[derive(Clone)]
#[must_use]
pub struct OffloadedOptions {
    prefix: Path,
    above: usize,
    timeout: Duration,
    upkeep_objects: Option<Arc<dyn ObjectStore>>,
}

/// Omits the object store, whose `Debug` form may hold credentials.
impl fmt::Debug for OffloadedOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("OffloadedOptions");
        shown.field("prefix", &self.prefix).field("above", &self.above).field("timeout", &self.timeout);
        shown.finish_non_exhaustive()
    }
}

impl Default for OffloadedOptions {
    fn default() -> Self {
        Self { prefix: Path::from("idem"), above: 64 * 1024, timeout: Duration::from_secs(10), upkeep_objects: None }
    }
}

impl OffloadedOptions {
    /// Folder in the object store (default: `idem`). Results that were written to another folder remain readable.
    pub fn prefix(self, prefix: &str) -> Self {
        Self { prefix: Path::from(prefix), ..self }
    }

    /// Size above which results become objects, in bytes (default: 64 KiB).
    pub fn above(self, bytes: usize) -> Self {
        Self { above: bytes, ..self }
    }

    /// Longest time that a call of this store waits for the object store, with all retries (default: 10 s). An upload
    /// takes at most a third of the lease.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Object store for the results of cancelled calls, which a thread of the library records (default: the object
    /// store of all other calls).
    ///
    /// Most clients of a remote object store keep connections that belong to the runtime that opened them. If a handler
    /// blocks that runtime, an upload over such a connection waits. The upload is given up after a third of the lease,
    /// and the result goes into the record; a store with a size limit then records the completion without a result. A
    /// second client of the same bucket avoids this wait.
    pub fn upkeep_objects(self, objects: Arc<dyn ObjectStore>) -> Self {
        Self { upkeep_objects: Some(objects), ..self }
    }

    /// Wraps `store` with these settings: large results go to `objects`, everything else to `store`.
    #[expect(clippy::needless_pass_by_value, reason = "a wrapper takes its store; handles are cheap to clone")]
    pub fn wrap(self, store: impl Store, objects: Arc<dyn ObjectStore>) -> Offloaded {
        Offloaded(self.open(store.handle(), objects))
    }

    fn open(self, inner: Arc<dyn Store>, objects: Arc<dyn ObjectStore>) -> Arc<OffloadedInner> {
        Arc::new_cyclic(|this| OffloadedInner {
            this: Weak::clone(this),
            inner,
            objects,
            options: self,
            upkeep: SharedOnce::new(),
        })
    }
}

struct OffloadedInner {
    this: Weak<OffloadedInner>,
    inner: Arc<dyn Store>,
    objects: Arc<dyn ObjectStore>,
    options: OffloadedOptions,
    upkeep: SharedOnce<Arc<OffloadedInner>>,
}

/// Omits the object store, whose `Debug` form may hold credentials.
impl fmt::Debug for OffloadedInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Offloaded");
        shown.field("inner", &self.inner).field("options", &self.options).finish_non_exhaustive()
    }
}

/// Reason why an object can't be retrieved. Every reason is a text of this library, because an error text of an object
/// store may quote requests.
enum ObjectFailure {
    /// The object will not be available later either.
    Gone(&'static str),
    /// The object may exist, but the object store refuses this request.
    Refused(&'static str),
    /// The failure may be temporary: the same call may succeed later.
    Passing(&'static str),
}

impl ObjectFailure {
    fn reason(&self) -> &'static str {
        match self {
            Self::Gone(reason) | Self::Refused(reason) | Self::Passing(reason) => reason,
        }
    }
}

impl From<Error> for ObjectFailure {
    fn from(error: Error) -> Self {
        match error {
            Error::NotFound { .. } => Self::Gone("its object is missing"),
            Error::PermissionDenied { .. } => Self::Refused("the object store denies access to its object"),
            Error::Unauthenticated { .. } => Self::Refused("the object store refuses the credentials"),
            Error::Generic { .. } => Self::Passing("the object store failed"),
            // All other errors, including a variant that exists only under another feature of `object_store`.
            _ => Self::Refused("the object store can't do what is asked for"),
        }
    }
}

impl From<ObjectFailure> for StoreError {
    fn from(failure: ObjectFailure) -> Self {
        match failure {
            ObjectFailure::Gone(reason) | ObjectFailure::Refused(reason) => {
                Self::new(StoreErrorKind::Misconfigured, reason)
            }
            ObjectFailure::Passing(reason) => Self::new(StoreErrorKind::Unavailable, reason),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

impl OffloadedInner {
    /// Returns the path of this result of this attempt. Another result of the same attempt has another path, so that a
    /// repeated `finish` with another result does not overwrite the recorded object. The owner token is hashed, because
    /// it must not be visible in the name of an object.
    fn path(&self, key: &Key, attempt: &[u8], digest: &[u8]) -> Path {
        let key = Sha256::digest(key.as_str());
        let attempt = Sha256::new().chain_update(attempt).chain_update(digest).finalize();
        self.options.prefix.clone().join(hex(&key)).join(hex(&attempt[..16]))
    }

    /// Repeats a call to the object store until the call succeeds or fails permanently, or until `limit` is over.
    async fn try_for<T, F>(&self, limit: Duration, call: impl Fn() -> F) -> Result<T, ObjectFailure>
    where
        F: Future<Output = Result<T, ObjectFailure>>,
    {
        let clock = self.inner.context().clock();
        let mut last = ObjectFailure::Passing("the object store does not answer");
        let tries = async {
            let mut pause = FIRST_PAUSE;
            loop {
                match call().await {
                    Err(failure @ ObjectFailure::Passing(_)) => last = failure,
                    ended => return ended,
                }
                clock.sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        race(tries, clock.sleep(limit)).await.unwrap_or(Err(last))
    }

    async fn upload(&self, limit: Duration, path: &Path, bytes: &Bytes) -> Result<(), ObjectFailure> {
        self.try_for(limit, || async {
            self.objects.put(path, PutPayload::from_bytes(bytes.clone())).await?;
            Ok(())
        })
        .await
    }

    /// Makes an object of a result or a value. Returns the path of the object, and the reference to it. `writer` enters
    /// the path: a result that is removed must not be the equal value of a step.
    async fn place(
        &self,
        limit: Duration,
        key: &Key,
        writer: &[u8],
        (codec, bytes): (CodecName, &Bytes),
    ) -> Result<(Path, StoredResult), ObjectFailure> {
        let digest: [u8; DIGEST_BYTES] = Sha256::digest(bytes).into();
        let path = self.path(key, writer, &digest);
        self.upload(limit, &path, bytes).await?;
        let parts: [&[u8]; 2] = [&digest, path.as_ref().as_bytes()];
        let reference = envelope::seal(Form::Object, &codec, bytes.len() as u64, &parts);
        Ok((path, StoredResult::Encoded { codec: CODEC, bytes: reference }))
    }

    /// Returns the time limit of an upload during a call of the attempt of `lease`. If the handler ended at its first
    /// poll, its lease is not renewed during the upload, so the upload must end well before the lease.
    fn limit_of(&self, lease: &Lease) -> Duration {
        self.options.timeout.min(lease.duration / 3)
    }

    /// Tries once to remove an object. If the removal fails, the lifecycle rule removes the object later.
    async fn remove(&self, path: &Path) {
        let clock = self.inner.context().clock();
        if !matches!(race(self.objects.delete(path), clock.sleep(self.options.timeout)).await, Some(Ok(()))) {
            tracing::debug!(%path, "an unused object could not be removed");
        }
    }

    /// Records `finish`. First uploads a large result as an object. A result with the codec name of the envelope is
    /// recorded in an envelope.
    async fn finish_offloaded(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        let (result, messages) = finish.result().apart();
        let StoredResult::Encoded { codec, bytes } = &*result else {
            return self.inner.finish(lease, finish).await;
        };
        if bytes.len() > self.options.above {
            match self.place(self.limit_of(lease), &lease.key, lease.owner.as_bytes(), (*codec, bytes)).await {
                Ok((path, reference)) => {
                    let offloaded = finish.with_result(reference.together(messages.as_ref()));
                    let written = self.inner.finish(lease, &offloaded).await;
                    // The object is removed only if no write of this attempt can have taken effect: a record must not
                    // lose its object.
                    match &written {
                        Ok(Verdict::Refused) => self.remove(&path).await,
                        Err(error) if error.kind() == StoreErrorKind::TooLarge => self.remove(&path).await,
                        _ => {}
                    }
                    return written;
                }
                Err(failure) => tracing::warn!(
                    key = %lease.key, bytes = bytes.len(),
                    "{}; the result goes into the record itself", failure.reason()
                ),
            }
        }
        match codec {
            // A reader would take the unchanged result for an envelope.
            &CODEC => {
                let sealed = sealed_as_it_was(bytes).together(messages.as_ref());
                self.inner.finish(lease, &finish.with_result(sealed)).await
            }
            _ => self.inner.finish(lease, finish).await,
        }
    }

    /// Applies a decision. First uploads a large result as an object. A failed upload is an error, because an operator
    /// can repeat the decision.
    async fn decide_offloaded(&self, decision: &Decision, finish: &Finish) -> Result<DecisionAnswer, StoreError> {
        let with = |finish| Decision { action: decision.action.with_finish(finish), ..decision.clone() };
        let StoredResult::Encoded { codec, bytes } = finish.result() else { return self.inner.decide(decision).await };
        if bytes.len() <= self.options.above {
            return match as_it_was(finish) {
                Some(sealed) => self.inner.decide(&with(sealed)).await,
                None => self.inner.decide(decision).await,
            };
        }
        // A repetition of the decision uses the same path, so that it writes the same object. If the decision is
        // refused, the object stays until the lifecycle rule removes it: a record that an earlier copy of the decision
        // wrote may refer to the object.
        let writer = decision.seen.attempt().to_be_bytes();
        let placed = self.place(self.options.timeout, &decision.key, &writer, (*codec, bytes)).await;
        let (_, reference) = placed.map_err(|failure| {
            let message = format!("nothing was decided: the result can't be kept: {}", failure.reason());
            StoreError::new(StoreErrorKind::Unavailable, message)
        })?;
        let decided = self.inner.decide(&with(finish.with_result(reference))).await?;
        if decided == DecisionAnswer::Finished
            && let Some(found) = self.inspect(&decision.key).await?
            && found.record.attempt == decision.seen.attempt()
            && found.record.state.is_end(finish)
        {
            // The attempt itself has recorded the same result, in another object.
            return Ok(DecisionAnswer::Applied);
        }
        Ok(decided)
    }

    /// Replaces the envelope in a record by the result to which the envelope refers, before the record is replayed.
    async fn open_replay(&self, key: &Key, record: &mut Record) {
        let Some(payload) = record.state.result_mut() else { return };
        let (result, messages) = payload.apart();
        let StoredResult::Encoded { codec: CODEC, bytes } = &*result else { return };
        // A failure is not returned as an error: with `on_store_error = run`, an error would run the finished operation
        // again.
        let opened = self.open(bytes).await.unwrap_or_else(|failure| {
            tracing::warn!(%key, "a result can't be read: {}", failure.reason());
            unreadable(failure.reason())
        });
        drop(result);
        *payload = opened.together(messages.as_ref());
    }

    /// Returns the result to which the envelope in `bytes` refers, or the reason why it can't be read now.
    async fn open_or_fail(&self, bytes: &Bytes) -> Result<StoredResult, StoreError> {
        match self.open(bytes).await {
            Ok(result) => Ok(result),
            Err(ObjectFailure::Gone(reason)) => Ok(unreadable(reason)),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Returns the result to which the envelope in `bytes` refers.
    async fn open(&self, bytes: &Bytes) -> Result<StoredResult, ObjectFailure> {
        const DAMAGED: ObjectFailure = ObjectFailure::Gone("the reference to its object is damaged");
        let Envelope { form, codec, size, mut rest } = match envelope::open(bytes) {
            Ok(envelope) => envelope,
            Err(reason) => return Ok(unreadable(reason)),
        };
        if form == Form::AsItWas as u8 && rest.len() as u64 == size {
            return Ok(StoredResult::Encoded { codec, bytes: rest });
        }
        if form != Form::Object as u8 || rest.len() < DIGEST_BYTES {
            return Err(DAMAGED);
        }
        let digest = rest.split_to(DIGEST_BYTES);
        let path = std::str::from_utf8(&rest).ok().and_then(|path| Path::parse(path).ok()).ok_or(DAMAGED)?;
        let bytes = self
            .try_for(self.options.timeout, || async {
                let object = self.objects.get(&path).await?;
                // The size is checked before the object is read, so that a larger object is never loaded into memory.
                if object.meta.size != size {
                    return Err(ObjectFailure::Gone("its object has another size"));
                }
                Ok(object.bytes().await?)
            })
            .await?;
        match Sha256::digest(&bytes)[..] == digest[..] {
            true => Ok(StoredResult::Encoded { codec, bytes }),
            false => Err(ObjectFailure::Gone("its object was altered")),
        }
    }
}

impl StepValues for OffloadedInner {
    fn keep<'a>(&'a self, lease: &'a Lease, value: &'a StoredResult) -> StoreFuture<'a, StoredResult> {
        let StoredResult::Encoded { codec, bytes } = value else { return StoreFuture::ready(Ok(value.clone())) };
        if *codec == CODEC {
            // A reader would take the unchanged value for a reference.
            return StoreFuture::ready(Ok(sealed_as_it_was(bytes)));
        }
        if bytes.len() <= self.options.above {
            return StoreFuture::ready(Ok(value.clone()));
        }
        StoreFuture::new(async move {
            let writer = [b"step", &lease.owner.as_bytes()[..]].concat();
            let uploaded = self.place(self.limit_of(lease), &lease.key, &writer, (*codec, bytes)).await;
            uploaded.map(|(_, reference)| reference).map_err(|failure| {
                tracing::warn!(
                    key = %lease.key, bytes = bytes.len(),
                    "{}; the value of the step goes into the journal itself", failure.reason()
                );
                failure.into()
            })
        })
    }

    fn fetch<'a>(&'a self, stored: &'a StoredResult) -> StoreFuture<'a, StoredResult> {
        match stored {
            StoredResult::Encoded { codec: CODEC, bytes } => StoreFuture::new(self.open_or_fail(bytes)),
            other => StoreFuture::ready(Ok(other.clone())),
        }
    }
}

/// Returns `finish` in an envelope if a reader would take its unchanged result for an envelope.
fn as_it_was(finish: &Finish) -> Option<Finish> {
    let StoredResult::Encoded { codec: CODEC, bytes } = finish.result() else { return None };
    Some(finish.with_result(sealed_as_it_was(bytes)))
}

/// Returns `bytes`, which the codec of the envelope has written, in an envelope.
fn sealed_as_it_was(bytes: &Bytes) -> StoredResult {
    StoredResult::Encoded { codec: CODEC, bytes: envelope::seal(Form::AsItWas, &CODEC, bytes.len() as u64, &[bytes]) }
}

impl Store for OffloadedInner {
    fn upkeep(&self) -> Arc<dyn Store> {
        let Some(objects) = &self.options.upkeep_objects else {
            let around = |inner| self.options.clone().open(inner, Arc::clone(&self.objects));
            return wrapper::upkeep(&self.this, &self.inner, &self.upkeep, around);
        };
        let options = OffloadedOptions { upkeep_objects: None, ..self.options.clone() };
        Arc::clone(self.upkeep.get_or_init(|| options.open(self.inner.upkeep(), Arc::clone(objects)))) as _
    }

    forward! { |store| store.inner => namespace, response_timeout, context, begin, renew, append, release, purge, list, ping }

    fn step_values(&self) -> Option<&dyn StepValues> {
        Some(self)
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move {
            let mut answer = self.inner.reserve(request).await?;
            if let Reservation::Finished { record, .. } = &mut answer {
                self.open_replay(&request.key, record).await;
            }
            Ok(answer)
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        match envelope::concerns(finish, CODEC, self.options.above) {
            true => StoreFuture::new(self.finish_offloaded(lease, finish)),
            false => self.inner.finish(lease, finish),
        }
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        match decision.action.finish() {
            Some(finish) if envelope::concerns(finish, CODEC, self.options.above) => {
                StoreFuture::new(self.decide_offloaded(decision, finish))
            }
            _ => self.inner.decide(decision),
        }
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let mut inspection = self.inner.inspect(key).await?;
            if let Some(Inspection { record, .. }) = &mut inspection
                && let Some(payload) = record.state.result_mut()
            {
                let (result, messages) = payload.apart();
                if let StoredResult::Encoded { codec: CODEC, bytes } = &*result {
                    let opened = self.open_or_fail(bytes).await?;
                    drop(result);
                    *payload = opened.together(messages.as_ref());
                }
            }
            Ok(inspection)
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let mut told = self.inner.wait(key, attempt, at_most).await?;
            if let Some(Inspection { record, .. }) = &mut told {
                self.open_replay(key, record).await;
            }
            Ok(told)
        })
    }
}
