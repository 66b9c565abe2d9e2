//! Policies that demand a reaction to a crash.

use super::{OnCrash, Policy};

/// A [`Policy`] whose handlers must name their reaction to a crash: in the attribute by `on_crash = …`, elsewhere by
/// [`on_crash`](Self::on_crash). [`Policy::require_recovery`], the last step of a policy, makes a `RecoveryPolicy`.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::policy::RecoveryPolicy;
/// use idem_runtime::{Error, MemoryStore, Policy, idempotent};
///
/// const PAYMENTS: RecoveryPolicy = Policy::new(Duration::from_secs(30 * 86_400)).require_recovery();
///
/// #[idempotent(key = "{order}", store = store, policy = PAYMENTS, on_crash = fail)]
/// async fn charge(store: &MemoryStore, order: u64) -> Result<u64, Error> {
///     Ok(order)
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RecoveryPolicy(Policy);

impl RecoveryPolicy {
    pub(super) const fn new(policy: Policy) -> Self {
        Self(policy)
    }

    /// Returns the policy with this reaction to a crash.
    #[must_use]
    pub const fn on_crash(self, on_crash: OnCrash) -> Policy {
        self.0.on_crash(on_crash)
    }

    /// Returns the policy, for a handler that names its reaction elsewhere.
    pub(crate) const fn with_recovery(self) -> Policy {
        self.0
    }
}
