//! What a consumer has to know of its broker: for how long it may deliver a message again, and which offset may be committed.
//!
//! Nothing in here depends on the client of a broker. How each broker settles a message, and what a slow handler meets there,
//! is in `docs/brokers.md`; what a delivery tells the engine is in [`Observe`](crate::future::Observe).

mod offsets;
mod redelivery;

pub use self::offsets::{OffsetTracker, Started};
pub use self::redelivery::{Redelivery, RedeliveryProblem};
pub use crate::engine::{Batch, BatchItem, ItemFailure, ItemFailures, KafkaRecord, OnBeatLost};
pub use crate::store::heartbeat::Beat;
