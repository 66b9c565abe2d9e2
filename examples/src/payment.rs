//! What a payment provider answers.

use std::fmt;

use idem_runtime::Error;
use serde::{Deserialize, Serialize};

/// A charge that went through. It is what the store records and every duplicate gets back.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub struct Receipt {
    /// The provider's name for the charge.
    pub payment: String,
    /// What the customer was charged.
    pub amount_cents: u64,
}

/// Why there is no receipt.
#[derive(Debug)]
pub enum PaymentError {
    /// The provider can't be reached.
    Unreachable,
    /// The provider was asked and did not answer: the customer is charged or not.
    AnswerLost,
    /// The idempotency library has something to say instead.
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
