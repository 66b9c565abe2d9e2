//! Parts of a consumer that are the same for every broker: its intake of messages, the reasons of messages that are set
//! aside, the time for which a message may be delivered again, and the offset that may be committed.
//!
//! This module depends on no client of a broker. `docs/brokers.md` describes the settlement of a message with each
//! broker, and the limits for slow handlers. [`Observe`](crate::future::Observe) has the settings of a delivery.

mod dead_letter;
mod intake;
#[cfg(all(test, shuttle))]
mod interleavings;
mod offsets;
mod redelivery;

pub use self::dead_letter::DeadLetter;
pub use self::intake::{HandlerSlot, Intake};
pub use self::offsets::{OffsetTracker, StartedMessage};
pub use self::redelivery::{Redelivery, RedeliveryProblem};
pub use crate::engine::{Batch, BatchItem, ItemFailure, ItemFailures, KafkaRecord, OnBeatLost};
pub use crate::store::context::Beat;
