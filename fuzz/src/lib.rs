//! Handling of untrusted input: records that any client may have written, results of other releases, keys, bodies.
//!
//! Each target takes arbitrary bytes, and panics if the library breaks a promise about them. The programs in
//! `fuzz_targets` search for such bytes; `tests/corpora.rs` includes this file and runs every target over the corpora.

pub mod bodies;
pub mod codecs;
pub mod columns;
pub mod envelopes;
pub mod fingerprints;
mod input;
pub mod journals;
pub mod keys;
pub mod messages;
pub mod record;

/// Name and function of a target. The corpus and the program of a target have the target's name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 9] = [
    ("bodies", bodies::bodies),
    ("codecs", codecs::codecs),
    ("columns", columns::columns_as_stored),
    ("envelopes", envelopes::envelopes),
    ("fingerprints", fingerprints::fingerprints),
    ("journals", journals::journals),
    ("keys", keys::keys),
    ("messages", messages::messages),
    ("record", record::record),
];
