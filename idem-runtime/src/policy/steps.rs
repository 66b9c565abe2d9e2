//! Policy of the steps of a handler: the limits of their journal, and what becomes of it.

/// Limits of the journal of a handler with [steps](crate::Attempt::step), and what becomes of the journal.
///
/// The body sets its policy with [`Attempt::set_step_policy`](crate::Attempt::set_step_policy) before its first step. A
/// handler without steps pays nothing for it.
///
/// ```
/// use idem_runtime::policy::StepPolicy;
/// use idem_runtime::{Error, MemoryStore, StoreExt, current, idempotent};
///
/// const AUDITED: StepPolicy = StepPolicy::new().strict().keep().max_value_bytes(4096);
///
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store, scope = "shop::fulfil")]
/// async fn fulfil(store: &MemoryStore, id: u32) -> Result<u32, Error> {
///     let attempt = current()?;
///     attempt.set_step_policy(AUDITED);
///     attempt.step("charge").run(async |_| Ok(id * 10)).await
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let store = MemoryStore::new();
/// assert_eq!(fulfil(&store, 42).await.unwrap(), 420);
/// let operator = store.operator();
/// let found = operator.inspect(&operator.key("shop::fulfil/order:42").unwrap()).await.unwrap().unwrap();
/// assert_eq!(found.steps().unwrap()[0].name(), "charge");
/// # });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepPolicy {
    pub(crate) max_steps: usize,
    pub(crate) max_value_bytes: usize,
    pub(crate) max_journal_bytes: usize,
    pub(crate) strict: bool,
    pub(crate) keep: bool,
}

impl StepPolicy {
    /// Default limit of the steps of an operation.
    pub const DEFAULT_MAX_STEPS: usize = 1000;
    /// Default size limit of the value of a step: 256 KiB.
    pub const DEFAULT_MAX_VALUE_BYTES: usize = 256 * 1024;
    /// Default size limit of a journal: 1 MiB.
    pub const DEFAULT_MAX_JOURNAL_BYTES: usize = 1024 * 1024;

    /// Returns the defaults.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            max_steps: Self::DEFAULT_MAX_STEPS,
            max_value_bytes: Self::DEFAULT_MAX_VALUE_BYTES,
            max_journal_bytes: Self::DEFAULT_MAX_JOURNAL_BYTES,
            strict: false,
            keep: false,
        }
    }

    /// Sets the limit of the steps of an operation (default: 1 000). A step beyond the limit does not run:
    /// [`StepProblem::TooMany`](crate::step::StepProblem::TooMany). A journal with 8 000 entries takes no further step,
    /// whatever the limit.
    #[must_use]
    pub const fn max_steps(self, max_steps: usize) -> Self {
        Self { max_steps, ..self }
    }

    /// Sets the size limit of the value of a step after encoding, in bytes (default: 256 KiB). A larger value is
    /// returned to its caller, and the step is journaled as ended without its value: a later attempt does not run the
    /// step, and gets [`StepProblem::ValueUnavailable`](crate::step::StepProblem::ValueUnavailable).
    #[must_use]
    pub const fn max_value_bytes(self, max_value_bytes: usize) -> Self {
        Self { max_value_bytes, ..self }
    }

    /// Sets the size limit of the journal, in bytes (default: 1 MiB). Each entry of a step writes the whole journal. A
    /// value that does not fit into the rest of the journal is left out as a value that is too large. If there is no
    /// room for an entry without a value, the step does not run:
    /// [`StepProblem::JournalFull`](crate::step::StepProblem::JournalFull). `DynamoDB` limits a journal to 392 KiB.
    #[must_use]
    pub const fn max_journal_bytes(self, max_journal_bytes: usize) -> Self {
        Self { max_journal_bytes, ..self }
    }

    /// Makes it an error if the body returns `Ok` without having reached a step that an earlier attempt has journaled
    /// (default: a warning in the log). Such a step was removed or renamed, or depends on data that has changed.
    ///
    /// The result of the body is then not recorded, and the call returns
    /// [`Error::Step`](crate::Error::Step) with [`StepProblem::NotReached`](crate::step::StepProblem::NotReached): the
    /// message is delivered again.
    #[must_use]
    pub const fn strict(self) -> Self {
        Self { strict: true, ..self }
    }

    /// Keeps the journal with the recorded result, for `idem show --steps` and [`Inspection::steps`] (default: the
    /// journal ends with the operation).
    ///
    /// Result and journal are one value of the record, and count together against the size limit of the store. If they
    /// don't fit, the result is recorded alone. A process of a version without this feature can't read the result.
    ///
    /// [`Inspection::steps`]: crate::store::Inspection::steps
    #[must_use]
    pub const fn keep(self) -> Self {
        Self { keep: true, ..self }
    }
}

impl Default for StepPolicy {
    fn default() -> Self {
        Self::new()
    }
}
