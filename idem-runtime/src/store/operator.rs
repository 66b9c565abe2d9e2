//! Decisions of a person about a record.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{
    Decision, DecisionAnswer, Filter, Finish, Inspection, Journal, JournalError, Page, Revision, Standing, Stats,
    StepDecisionError, Store, StoreError, StoreErrorKind,
};
use crate::codec::{self, Codec, CodecError, Json};
use crate::key::{Key, KeyError};
use crate::metrics::StoreOp;
use crate::record::StoredResult;
use crate::record::journaled_step::StepResolution;

/// Lets a person inspect records and decide about them: resolve, replace, reopen or discard an operation, break a
/// lease, forget a record. [`StoreExt::operator`](super::StoreExt::operator) makes an operator.
///
/// Each decision takes the record that the person has seen, as an [`Inspection`] or its [`Revision`]. A decision is
/// refused once that record has changed: if two people decide about the same record, only one decision takes effect.
/// The same person may repeat a decision: the repetition changes nothing. The record keeps the name of the person and
/// the reason until the next decision. An event of `tracing` (level INFO) also contains the name and the reason.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// use idem_runtime::operator::Resolution;
/// use idem_runtime::{Error, MemoryStore, StoreExt, idempotent};
///
/// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = "pay", on_crash = fail)]
/// async fn pay(store: &MemoryStore, order: u64) -> Result<String, Error> {
///     std::future::pending().await // The bank does not answer, and the process is killed.
/// }
///
/// let store = MemoryStore::new();
/// let _ = tokio::time::timeout(std::time::Duration::from_millis(1), pay(&store, 42)).await;
/// let interrupted = pay(&store, 42).await.unwrap_err();
/// assert!(matches!(interrupted, Error::Interrupted { .. }));
///
/// // The bank says that the money was moved.
/// let operator = store.operator().by("alice").reason("INC-7");
/// let key = operator.key("pay/42")?;
/// let found = operator.inspect(&key).await?.expect("the key of the error");
/// operator.resolve(&key, &found, Resolution::completed(&"receipt 7".to_owned())?).await?;
/// assert_eq!(pay(&store, 42).await?, "receipt 7");
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Operator<'a, S: ?Sized> {
    store: &'a S,
    by: String,
    reason: String,
}

impl<'a, S: Store + ?Sized> Operator<'a, S> {
    pub(super) fn new(store: &'a S) -> Self {
        Self { store, by: String::new(), reason: String::new() }
    }

    /// Sets the name of the person, for the record and the event of each decision (default: empty). A record keeps the
    /// first [`Provenance::MAX_BY_BYTES`](crate::record::Provenance::MAX_BY_BYTES) bytes of the name.
    pub fn by(self, by: impl Into<String>) -> Self {
        Self { by: by.into(), ..self }
    }

    /// Sets the reason of the decisions, for the record and the event of each decision (default: empty). A record keeps
    /// the first [`Provenance::MAX_REASON_BYTES`](crate::record::Provenance::MAX_REASON_BYTES) bytes of the reason.
    pub fn reason(self, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..self }
    }

    /// Parses a key as errors and logs show it (`<scope>/<text>`), or as a store holds it (`1/<scope>/<text>`, with or
    /// without the namespace in front). Quotes around the key are ignored.
    ///
    /// # Errors
    /// [`KeyError`] if the text is not a key, or is a key of another namespace. The error shows what to type instead.
    pub fn key(&self, shown: &str) -> Result<Key, KeyError> {
        let shown = shown.trim();
        let quoted = ['"', '\'', '`'].into_iter().find_map(|quote| shown.strip_prefix(quote)?.strip_suffix(quote));
        let shown = quoted.unwrap_or(shown);
        let stored = shown.strip_prefix(self.store.namespace()).filter(|stored| stored.starts_with(Key::STORED));
        stored.unwrap_or(shown).parse()
    }

    /// Reads the record of `key`; `None` if there is no record. A record that can't be read is returned as
    /// [damaged](Inspection::damage), with the reason.
    ///
    /// # Errors
    /// [`OperatorError::Store`] if the store did not answer.
    pub async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, OperatorError> {
        self.store
            .inspect(key)
            .watched(self.store, StoreOp::Inspect)
            .await
            .map(|found| found.map(Inspection::with_result_alone))
            .map_err(|source| self.failed(Some(key), source))
    }

    /// Records the end of the operation whose latest attempt is `seen`. Every duplicate gets this end.
    ///
    /// `resolve` is possible if the attempt was interrupted, has lapsed, or has ended without a result. An operation
    /// that completed without a storable result gets the result of `resolution`. A recorded result is not changed;
    /// [`replace`](Self::replace) corrects it.
    ///
    /// # Errors
    /// [`OperatorError`] holds the reason for a refusal. A refused decision changes nothing. After
    /// [`OperatorError::Store`] the decision may be recorded: repeat it.
    pub async fn resolve(
        &self,
        key: &Key,
        seen: impl Into<Revision>,
        resolution: Resolution,
    ) -> Result<(), OperatorError> {
        self.decide(Decision::resolve(key, seen, resolution.0)).await
    }

    /// Corrects the recorded end of a finished operation: from now on duplicates get the new end. The handler does not
    /// run in between. Callers that already have the recorded result keep that result.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn replace(
        &self,
        key: &Key,
        seen: impl Into<Revision>,
        resolution: Resolution,
    ) -> Result<(), OperatorError> {
        self.decide(Decision::replace(key, seen, resolution.0)).await
    }

    /// Lets the next delivery run again. The earlier attempts no longer count against `max_attempts`.
    ///
    /// `reopen` is possible if the attempt was interrupted, has lapsed, or has ended without a result. A recorded
    /// result is not changed; [`discard`](Self::discard) removes it.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn reopen(&self, key: &Key, seen: impl Into<Revision>) -> Result<(), OperatorError> {
        self.decide(Decision::reopen(key, seen)).await
    }

    /// Lets the next delivery run again, like [`reopen`](Self::reopen), with `journal` in place of the journal of the
    /// record (`None`: without a journal, so that all steps run again). The decision is refused as well if the attempt
    /// has journaled a step since the person looked.
    ///
    /// [`resolve_step`](Self::resolve_step), [`reopen_from`](Self::reopen_from) and
    /// [`reopen_without_steps`](Self::reopen_without_steps) make the journal for the usual decisions.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn reopen_with(
        &self,
        key: &Key,
        seen: impl Into<Revision>,
        journal: Option<Journal>,
    ) -> Result<(), OperatorError> {
        self.decide(Decision::reopen_with(key, seen, journal)).await
    }

    /// Journals what became of a step whose effect is in doubt, and lets the next delivery run again: with the value of
    /// the step, or with the step to run. `step` is the name of the step in [`Inspection::steps`]. Other steps stay as
    /// they are: a handler with several steps in doubt needs a decision about each.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// use idem_runtime::operator::StepResolution;
    /// use idem_runtime::{Error, MemoryStore, StoreExt, current, idempotent};
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = "ship")]
    /// async fn ship(store: &MemoryStore, order: u64) -> Result<String, Error> {
    ///     let book = current()?.step("book").fail();
    ///     book.run(async |_| std::future::pending().await).await // The process is killed.
    /// }
    ///
    /// let store = MemoryStore::new();
    /// let _ = tokio::time::timeout(std::time::Duration::from_millis(1), ship(&store, 42)).await;
    /// assert!(matches!(ship(&store, 42).await, Err(Error::Step { .. })));
    ///
    /// // The carrier has the parcel.
    /// let operator = store.operator().by("alice").reason("INC-7");
    /// let key = operator.key("ship/42")?;
    /// let found = operator.inspect(&key).await?.expect("the key of the error");
    /// operator.resolve_step(&key, &found, "book", StepResolution::done(&"parcel 7".to_owned())?).await?;
    /// assert_eq!(ship(&store, 42).await?, "parcel 7");
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`OperatorError::Step`] if the journal has no such step, or the step is not in doubt. Otherwise see
    /// [`reopen_with`](Self::reopen_with).
    pub async fn resolve_step(
        &self,
        key: &Key,
        seen: &Inspection,
        step: &str,
        resolution: StepResolution,
    ) -> Result<(), OperatorError> {
        let journal = self.with_step_resolved(key, seen, step, &resolution)?;
        self.reopen_with(key, seen, Some(journal)).await
    }

    /// Lets the next delivery run again from `step` on: removes the step, and the steps that [`Inspection::steps`]
    /// lists after it, from the journal. The effects of these steps happen again, even of a step in doubt.
    ///
    /// # Errors
    /// [`OperatorError::Step`] if the journal has no such step. Otherwise see [`reopen_with`](Self::reopen_with).
    pub async fn reopen_from(&self, key: &Key, seen: &Inspection, step: &str) -> Result<(), OperatorError> {
        let journal = self.before_step(key, seen, step)?;
        self.reopen_with(key, seen, journal).await
    }

    /// Lets the next delivery run again without a journal. The effects of all steps happen again, even of a step in
    /// doubt. This is the only decision about steps if the journal can't be read.
    ///
    /// # Errors
    /// See [`reopen_with`](Self::reopen_with).
    pub async fn reopen_without_steps(&self, key: &Key, seen: impl Into<Revision>) -> Result<(), OperatorError> {
        self.reopen_with(key, seen, None).await
    }

    /// Returns the journal of `seen` with the end of a step in doubt, for [`reopen_with`](Self::reopen_with). Decides
    /// nothing: a program that asks a person for a confirmation gets a refusal before the question.
    ///
    /// # Errors
    /// See [`resolve_step`](Self::resolve_step).
    pub fn with_step_resolved(
        &self,
        key: &Key,
        seen: &Inspection,
        step: &str,
        resolution: &StepResolution,
    ) -> Result<Journal, OperatorError> {
        self.journal(key, seen, step, |journal| journal.with_resolved(step, resolution))
    }

    /// Returns the journal of `seen` without `step` and the steps after it, for [`reopen_with`](Self::reopen_with);
    /// `None` if no step is left. Decides nothing.
    ///
    /// # Errors
    /// See [`reopen_from`](Self::reopen_from).
    pub fn before_step(&self, key: &Key, seen: &Inspection, step: &str) -> Result<Option<Journal>, OperatorError> {
        self.journal(key, seen, step, |journal| journal.before(step))
    }

    /// Changes the journal of `seen` for a decision about `step`.
    fn journal<T>(
        &self,
        key: &Key,
        seen: &Inspection,
        step: &str,
        change: impl FnOnce(&Journal) -> Result<T, StepDecisionError>,
    ) -> Result<T, OperatorError> {
        // The states that refuse the decision whatever the journal holds. Their reasons say more than "no such step".
        let (key, store, attempt, action) = (key.clone(), self.store.context().name(), seen.attempt(), "reopen_with");
        match seen.standing() {
            Standing::Damaged => return Err(OperatorError::Damaged { key, store, action }),
            Standing::Completed | Standing::Failed => {
                return Err(OperatorError::Finished { key, store, attempt, action });
            }
            Standing::Running => {
                let lapses_in = seen.lapses_in.unwrap_or_default();
                return Err(OperatorError::LiveLease { key, store, attempt, lapses_in });
            }
            Standing::Lapsed | Standing::Released | Standing::Interrupted => {}
        }
        let changed = match &seen.record.journal {
            Some(journal) => change(journal),
            None => Err(StepDecisionError::NoSuchStep),
        };
        changed.map_err(|source| OperatorError::Step { key, store, step: step.into(), source })
    }

    /// Discards the recorded end of a finished operation, and lets the next delivery run again. The earlier attempts no
    /// longer count against `max_attempts`.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn discard(&self, key: &Key, seen: impl Into<Revision>) -> Result<(), OperatorError> {
        self.decide(Decision::discard(key, seen)).await
    }

    /// Lets the messages of a finished operation be sent again that were set aside, because the broker refused them: by
    /// the next delivery, or by a [`Resender`](crate::outbox::Resender). [`Inspection::unsent_messages`] shows them.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn resend_messages(&self, key: &Key, seen: impl Into<Revision>) -> Result<(), OperatorError> {
        self.decide(Decision::resend_messages(key, seen)).await
    }

    /// Gives up the messages of a finished operation that are not marked as sent. A message that is being sent
    /// meanwhile may arrive.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn drop_messages(&self, key: &Key, seen: impl Into<Revision>) -> Result<(), OperatorError> {
        self.decide(Decision::drop_messages(key, seen)).await
    }

    /// Ends a lease whose holder has certainly ended. A broken lease has the consequences of a crash: under `on_crash =
    /// retry` the next delivery runs, under `on_crash = fail` the key is interrupted.
    ///
    /// If the holder still runs, its body continues concurrently with the next attempt, until the holder's next renewal
    /// is refused.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn break_lease(&self, key: &Key, seen: impl Into<Revision>) -> Result<(), OperatorError> {
        self.decide(Decision::break_lease(key, seen)).await
    }

    /// Removes the record and its result: the next delivery runs like the first delivery. Returns whether there was a
    /// record. `forget` is the only possible decision about a damaged record.
    ///
    /// # Errors
    /// See [`resolve`](Self::resolve).
    pub async fn forget(&self, key: &Key, seen: impl Into<Revision>) -> Result<bool, OperatorError> {
        match self.decide(Decision::forget(key, seen)).await {
            Ok(()) => Ok(true),
            Err(OperatorError::NoRecord { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Checks up to `batch` records that may have expired, and removes the expired records. Returns the number of
    /// removed records.
    ///
    /// # Errors
    /// [`OperatorError::Store`] if the store did not confirm; repeat the call.
    pub async fn purge(&self, batch: u32) -> Result<u64, OperatorError> {
        self.store.purge(batch).watched(self.store, StoreOp::Purge).await.map_err(|source| self.failed(None, source))
    }

    /// Returns a page of the records that `filter` selects, without their results; [`inspect`](Self::inspect) returns
    /// the result of one record. The next page begins at [`Page::next`], which is `None` in the last page.
    ///
    /// SQLite and PostgreSQL list records in the order of the primary key, the memory store in an order of its own.
    /// DynamoDB reads the whole table, page by page, and charges for it. Redis lists records only under
    /// [`Filter::scan`], and may then miss and repeat records.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// use idem_runtime::store::Filter;
    /// use idem_runtime::{MemoryStore, StoreExt};
    ///
    /// let store = MemoryStore::new();
    /// let mut filter = Filter::new().uncertain().scope("pay");
    /// loop {
    ///     let page = store.operator().list(&filter).await?;
    ///     for (key, found) in &page.records {
    ///         println!("{key}: attempt {}, {}, held by {:?}", found.attempt(), found.standing(), found.holder());
    ///     }
    ///     let Some(next) = page.next else { break };
    ///     filter = filter.after(next);
    /// }
    /// # Ok::<(), idem_runtime::operator::OperatorError>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`OperatorError::Unsupported`] if the store can't list records, or can list them only by a scan.
    /// [`OperatorError::Store`] if the store did not answer.
    pub async fn list(&self, filter: &Filter) -> Result<Page, OperatorError> {
        self.store.list(filter).watched(self.store, StoreOp::List).await.map_err(|source| self.failed(None, source))
    }

    /// Counts the records that `filter` selects, by scope and by standing. The count begins at [`Filter::after`] and
    /// stops after about `at_most` records. If more records follow, [`Stats::next`] is the position to continue from.
    ///
    /// `stats` reads all records that it counts, page by page, without their results. The call costs as much as a
    /// [`list`](Self::list) of the same records. A record that is written meanwhile may be counted or not.
    ///
    /// # Errors
    /// See [`list`](Self::list).
    ///
    /// # Cancel safety
    /// A dropped call changes nothing; its counts are lost.
    pub async fn stats(&self, filter: &Filter, at_most: u64) -> Result<Stats, OperatorError> {
        let mut stats = Stats::default();
        let mut filter = filter.clone().limit(Filter::MAX_LIMIT);
        let mut counted = 0;
        loop {
            let page = self.list(&filter).await?;
            stats.count(&page);
            counted += page.records.len() as u64;
            match page.next {
                Some(next) if counted < at_most => filter = filter.after(next),
                next => {
                    stats.next = next;
                    return Ok(stats);
                }
            }
        }
    }

    async fn decide(&self, decision: Decision) -> Result<(), OperatorError> {
        let decision = decision.by(&*self.by).reason(&*self.reason);
        let Decision { key, seen, action, .. } = &decision;
        let (key, seen, action, store) = (key.clone(), *seen, action.name(), self.store.context().name());
        let attempt = seen.attempt();
        let deciding = self.store.decide(&decision).watched(self.store, StoreOp::Decide);
        let decided = deciding.await.map_err(|source| self.failed(Some(&key), source))?;
        match decided {
            DecisionAnswer::Applied => {
                let Self { by, reason, .. } = self;
                tracing::info!(%key, store, attempt, action, by, reason, "an operator has decided");
                Ok(())
            }
            DecisionAnswer::LiveLease { lapses_in } => Err(OperatorError::LiveLease { key, store, attempt, lapses_in }),
            DecisionAnswer::OtherAttempt { latest } => Err(OperatorError::OtherAttempt { key, store, attempt, latest }),
            DecisionAnswer::Changed { standing, decided_by } => {
                let (seen, decided_by) = (seen.standing(), decided_by.map(String::from));
                Err(OperatorError::Changed { key, store, attempt, seen, standing, decided_by })
            }
            DecisionAnswer::Finished => Err(OperatorError::Finished { key, store, attempt, action }),
            DecisionAnswer::Unfinished => Err(OperatorError::Unfinished { key, store, attempt, action }),
            DecisionAnswer::NoRecord => Err(OperatorError::NoRecord { key, store }),
            DecisionAnswer::Damaged => Err(OperatorError::Damaged { key, store, action }),
        }
    }

    fn failed(&self, key: Option<&Key>, source: StoreError) -> OperatorError {
        let store = self.store.context().name();
        match source.kind() {
            StoreErrorKind::Unsupported => OperatorError::Unsupported { store, source },
            _ => OperatorError::Store { key: key.cloned(), store, source },
        }
    }
}

/// End of an operation, as a person decides it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Resolution(Finish);

impl Resolution {
    /// The operation completed with `result`, a value of the type in the `Ok` of the handler. Duplicates replay the
    /// result. The result is written as JSON, and read back as a check.
    ///
    /// # Errors
    /// [`CodecError`] if the result can't be written, or can't be read back.
    pub fn completed<T: Serialize + DeserializeOwned>(result: &T) -> Result<Self, CodecError> {
        Self::completed_by::<Json, T>(result)
    }

    /// The operation completed with `result`, like [`completed`](Self::completed), but written with the codec of the
    /// handler.
    ///
    /// # Errors
    /// See [`completed`](Self::completed).
    pub fn completed_by<C: Codec, T: Serialize + DeserializeOwned>(result: &T) -> Result<Self, CodecError> {
        Ok(Self(Finish::Completed(encoded::<C, T>(result)?)))
    }

    /// The operation completed, and its result is unknown: duplicates get
    /// [`Error::ResultUnavailable`](crate::Error::ResultUnavailable) and are acknowledged.
    pub fn completed_without_result() -> Self {
        Self(Finish::Completed(StoredResult::Unencodable))
    }

    /// The operation failed permanently with `error`, a value of the error type of a handler under `on_error = record`.
    /// Duplicates replay the error.
    ///
    /// # Errors
    /// See [`completed`](Self::completed).
    pub fn failed<E: Serialize + DeserializeOwned>(error: &E) -> Result<Self, CodecError> {
        Self::failed_by::<Json, E>(error)
    }

    /// The operation failed permanently with `error`, like [`failed`](Self::failed), but written with the codec of the
    /// handler.
    ///
    /// # Errors
    /// See [`completed`](Self::completed).
    pub fn failed_by<C: Codec, E: Serialize + DeserializeOwned>(error: &E) -> Result<Self, CodecError> {
        Ok(Self(Finish::Failed(encoded::<C, E>(error)?)))
    }

    /// The operation failed permanently, and there is no error to replay.
    pub fn failed_without_result() -> Self {
        Self(Finish::Failed(StoredResult::Unencodable))
    }
}

/// Converts a [`Finish`] without decoding its result, because the type of the result is unknown here.
impl From<Finish> for Resolution {
    fn from(finish: Finish) -> Self {
        Self(finish)
    }
}

fn encoded<C: Codec, T: Serialize + DeserializeOwned>(result: &T) -> Result<StoredResult, CodecError> {
    let (codec, bytes) = codec::write::<C, T>(result)?;
    codec::read::<C, T>(codec, &bytes).unwrap_or_else(|| C::decode(&bytes))?;
    Ok(StoredResult::Encoded { codec, bytes: Bytes::from(bytes) })
}

/// Reason why a decision took no effect.
#[derive(Debug)]
#[non_exhaustive]
pub enum OperatorError {
    /// An attempt is running.
    #[non_exhaustive]
    LiveLease {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// Number of the running attempt.
        attempt: u32,
        /// Time until its lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// The decision is about an older attempt, and a newer attempt exists.
    #[non_exhaustive]
    OtherAttempt {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// Number of the attempt that the decision is about.
        attempt: u32,
        /// Number of the latest attempt.
        latest: u32,
    },
    /// The record of the attempt has changed since the person looked at it.
    #[non_exhaustive]
    Changed {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// Number of the attempt.
        attempt: u32,
        /// Standing of the operation when the person looked.
        seen: Standing,
        /// Current standing of the operation.
        standing: Standing,
        /// Name of the person who decided meanwhile; `None` if no person decided or gave a name.
        decided_by: Option<String>,
    },
    /// The operation has finished, and its recorded end is not changed.
    #[non_exhaustive]
    Finished {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// Number of the attempt.
        attempt: u32,
        /// [Name](crate::store::Action::name) of the refused action.
        action: &'static str,
    },
    /// The operation has not finished, so it has no result to discard or replace.
    #[non_exhaustive]
    Unfinished {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// Number of the attempt.
        attempt: u32,
        /// [Name](crate::store::Action::name) of the refused action.
        action: &'static str,
    },
    /// There is no record.
    #[non_exhaustive]
    NoRecord {
        /// Key without a record.
        key: Key,
        /// Name of the store.
        store: &'static str,
    },
    /// The record can't be read, so the only possible decision is to forget it.
    #[non_exhaustive]
    Damaged {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// [Name](crate::store::Action::name) of the refused action.
        action: &'static str,
    },
    /// The journal of the record does not allow the decision about a step.
    #[non_exhaustive]
    Step {
        /// Key of the record.
        key: Key,
        /// Name of the store.
        store: &'static str,
        /// Name of the step.
        step: Box<str>,
        /// Reason of the refusal.
        source: StepDecisionError,
    },
    /// The store can't do this operation, or does it only on an explicit request, such as a list by [`Filter::scan`].
    #[non_exhaustive]
    Unsupported {
        /// Name of the store.
        store: &'static str,
        /// Reason why the store can't do the operation.
        source: StoreError,
    },
    /// The store failed.
    #[non_exhaustive]
    Store {
        /// Key of the record; `None` if the call concerns many records.
        key: Option<Key>,
        /// Name of the store.
        store: &'static str,
        /// Error of the store.
        source: StoreError,
    },
}

impl fmt::Display for OperatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LiveLease { key, store, attempt, lapses_in } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} is running; nothing was changed; its lease lapses in \
                 {lapses_in:?} unless it is renewed: wait, or end the lease by `idem release --break-lease` if its process \
                 is gone for sure"
            ),
            Self::OtherAttempt { key, store, attempt, latest } => write!(
                f,
                "key `{key}` in {store}: the latest attempt is {latest}, not {attempt}; nothing was changed; look at the \
                 record again (`idem show`)"
            ),
            Self::Changed { key, store, attempt, seen, standing, decided_by } => {
                match seen {
                    Standing::Damaged => {
                        write!(f, "key `{key}` in {store}: the record has changed since you looked: ")?;
                    }
                    _ => write!(f, "key `{key}` in {store}: attempt {attempt} has changed since you looked: ")?,
                }
                match (decided_by, seen == standing) {
                    (Some(by), _) => write!(f, "{by} has decided about it, and it is {standing}")?,
                    (None, true) => write!(f, "it was written again, and is {standing} as before")?,
                    (None, false) => write!(f, "it was {seen}, and is {standing}")?,
                }
                f.write_str("; nothing was changed; look at the record again (`idem show`)")
            }
            Self::Finished { key, store, attempt, action } => {
                write!(f, "key `{key}` in {store}: attempt {attempt} has finished; what it recorded stands")?;
                f.write_str(match *action {
                    "resolve" => "; replace the result if it is wrong (`idem resolve --replace`)",
                    "reopen" | "reopen_with" => "; discard the result if that is to be given up (`idem discard`)",
                    _ => "",
                })
            }
            Self::Unfinished { key, store, attempt, action } => {
                write!(f, "key `{key}` in {store}: attempt {attempt} has recorded no result; nothing was changed; ")?;
                f.write_str(match *action {
                    "replace" => "resolve it (`idem resolve` without `--replace`)",
                    _ => "reopen it (`idem reopen`)",
                })
            }
            Self::NoRecord { key, store } => write!(
                f,
                "key `{key}` in {store}: there is no record; it has expired, was forgotten, or is in another namespace"
            ),
            Self::Damaged { key, store, action } => write!(
                f,
                "key `{key}` in {store}: the record is damaged, and `{action}` needs one that can be read; nothing was changed; \
                 find out whether the effect happened, then forget the record (`idem forget`): the next delivery runs as the first \
                 one"
            ),
            Self::Step { key, store, step, source } => {
                write!(f, "key `{key}` in {store}, step `{step}`: {source}; nothing was changed")?;
                f.write_str(match source {
                    StepDecisionError::NoSuchStep => "; look at the steps (`idem show --steps`)",
                    StepDecisionError::NotInDoubt(_) => {
                        "; to run it again, reopen the operation from this step on (`idem reopen --from`)"
                    }
                    StepDecisionError::Unreadable(JournalError::Damaged) => {
                        "; to run all steps again, reopen the operation without them (`idem reopen --drop-steps`)"
                    }
                    _ => "",
                })
            }
            Self::Store { key: Some(key), store, source } => {
                write!(f, "key `{key}` in {store}: {source}; ")?;
                f.write_str(match source.may_have_landed() {
                    true => "the decision may be recorded: repeat it",
                    false => "nothing was changed",
                })
            }
            Self::Store { key: None, store, source } | Self::Unsupported { store, source } => {
                write!(f, "{store}: {source}")
            }
        }
    }
}

impl Error for OperatorError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Store { source, .. } | Self::Unsupported { source, .. } => Some(source),
            Self::Step { source, .. } => Some(source),
            _ => None,
        }
    }
}
