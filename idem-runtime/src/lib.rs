//! Idempotent handlers for messages that are delivered at least once.
#![warn(missing_docs)]

mod attempt;
mod clock;
mod codec;
#[cfg(feature = "conformance")]
pub mod conformance;
mod ending;
mod engine;
mod error;
mod fingerprint;
mod heartbeat;
mod key;
mod lease;
mod outcome;
mod policy;
pub mod record;
mod recorder;
mod store;
mod stores;
mod sync;

pub use attempt::{Attempt, current};
pub use clock::{Clock, Instant, ManualClock, Sleep, SystemClock};
pub use codec::{Codec, CodecError, CodecName, Json};
pub use ending::Ending;
pub use engine::{Operation, run};
pub use error::{Error, Unavailable};
pub use fingerprint::{Fingerprint, FingerprintError};
pub use heartbeat::Heartbeats;
#[cfg(feature = "macros")]
pub use idem_macros::idempotent;
pub use key::{Key, KeyBuilder, KeyError, KeyPart, KeyProblem, Scope, Site};
pub use lease::{Lease, Owner};
pub use outcome::{Disposition, Observe, Outcome, Refusal, observe};
pub use policy::{InProgress, InvalidPolicy, MissingKey, Mode, ModeSwitch, OnCrash, OnError, OnStoreError, Policy};
pub use record::{Meeting, Payload, Record, State};
pub use recorder::{
    ErrorRule, RecordResults, RecordValues, Recorder, record_results, record_results_if, record_values,
};
pub use store::{
    Finish, Inspection, Release, Reservation, Reserve, Store, StoreError, StoreErrorKind, StoreFuture, Write,
};
#[cfg(feature = "memory")]
pub use stores::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use stores::redis::{RedisOptions, RedisStore};

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;
