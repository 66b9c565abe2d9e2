//! The result of the handlers of all benches.

#![allow(unreachable_pub, reason = "the module is public in one of its two packages")]

use serde::{Deserialize, Serialize};

/// The result of the benches' handlers: some 150 bytes of JSON.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Receipt {
    pub order_id: u64,
    pub carrier: String,
    pub tracking: String,
    pub cents: u64,
    pub currency: String,
    pub lines: u32,
    pub express: bool,
}

impl Receipt {
    /// Returns the result for this order, without any other work.
    pub fn of(order_id: u64) -> Self {
        Self {
            order_id,
            carrier: "Hinterland Parcel".to_owned(),
            tracking: "HP-2031-0000-4711-8842-XZ".to_owned(),
            cents: 129_900,
            currency: "EUR".to_owned(),
            lines: 3,
            express: true,
        }
    }
}
