//! Answers of a payment provider.

use std::fmt;

use idem_runtime::Error;
use serde::{Deserialize, Serialize};

/// A successful charge. The store records it, and every duplicate gets it back.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub struct Receipt {
    /// The provider's identifier of the charge.
    pub payment: String,
    /// The amount charged.
    pub amount_cents: u64,
}

/// Reason why a payment has no receipt.
#[derive(Debug)]
pub enum PaymentError {
    /// The provider can't be reached.
    Unreachable,
    /// The provider got the request, but its answer was lost: the customer may have been charged.
    AnswerLost,
    /// An error of the idempotency library.
    Idempotency(Error),
}

impl From<Error> for PaymentError {
    fn from(error: Error) -> Self {
        Self::Idempotency(error)
    }
}

impl fmt::Display for PaymentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable => f.write_str("the payment provider can't be reached"),
            Self::AnswerLost => f.write_str("the payment provider did not answer"),
            Self::Idempotency(error) => error.fmt(f),
        }
    }
}
