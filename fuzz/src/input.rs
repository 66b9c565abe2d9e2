//! Values that are read from the bytes of a fuzzer. Missing bytes are replaced by zeros, so that every input gives a
//! value.

use std::time::Duration;

use bytes::Bytes;
use idem_runtime::OnCrash;
use idem_runtime::codec::CodecName;
use idem_runtime::key::Fingerprint;
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::OwnerToken;

/// The remaining bytes of an input.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.take(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Returns a number below `n`.
    pub(crate) fn below(&mut self, n: u8) -> u8 {
        self.byte() % n
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Returns mostly a small number or a number near a limit, and sometimes an arbitrary number.
    pub(crate) fn integer(&mut self) -> i64 {
        match self.byte() {
            255 => i64::from_be_bytes(self.array()),
            254 => i64::MAX - i64::from(self.byte()),
            253 => i64::MIN + i64::from(self.byte()),
            252 => i64::from(u32::from_be_bytes(self.array())),
            small => i64::from(small),
        }
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Reads one byte as a length, and returns that many of the following bytes.
    pub(crate) fn bytes(&mut self) -> &'a [u8] {
        let len = self.byte();
        self.take(len.into())
    }

    pub(crate) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Returns a duration in whole milliseconds, as records store durations.
    pub(crate) fn duration(&mut self) -> Duration {
        Duration::from_millis(self.integer().unsigned_abs().min(i64::MAX.unsigned_abs()))
    }

    pub(crate) fn on_crash(&mut self) -> OnCrash {
        if self.flag() { OnCrash::Fail } else { OnCrash::Retry }
    }

    pub(crate) fn fingerprint(&mut self) -> Option<Fingerprint> {
        self.flag().then(|| {
            let mut bytes = [self.byte(); Fingerprint::BYTES];
            // The version is mostly the current one, so that fingerprints can be compared.
            bytes[0] = Fingerprint::VERSION + u8::from(bytes[0] == u8::MAX);
            Fingerprint::from_bytes(bytes)
        })
    }

    pub(crate) fn owner(&mut self) -> OwnerToken {
        OwnerToken::from_bytes([self.byte(); OwnerToken::BYTES])
    }

    pub(crate) fn codec(&mut self) -> CodecName {
        let name = match self.below(7) {
            0 => "json",
            1 => "msgpack",
            2 => "postcard",
            3 => "idem:zstd",
            4 => "idem:object",
            5 => "bytes",
            _ => return CodecName::new(self.bytes()).unwrap_or(CodecName::of::<idem_runtime::Json>()),
        };
        CodecName::new(name.as_bytes()).expect("a name")
    }

    pub(crate) fn payload(&mut self) -> StoredResult {
        match self.below(4) {
            0 => StoredResult::TooLarge { size: self.integer().cast_unsigned() },
            1 => StoredResult::Unencodable,
            _ => StoredResult::Encoded { codec: self.codec(), bytes: Bytes::copy_from_slice(self.bytes()) },
        }
    }

    /// Returns a record that an attempt could have written.
    pub(crate) fn record(&mut self) -> Record {
        let attempt = u32::from_be_bytes(self.array()).max(1);
        let starts = u32::from_be_bytes(self.array()).min(attempt);
        let (owner, fingerprint) = (self.owner(), self.fingerprint());
        let state = match self.below(5) {
            0 => State::Pending {
                lease: self.duration(),
                ttl: self.duration(),
                on_crash: self.on_crash(),
                begun: self.flag(),
            },
            1 => State::Released,
            2 => State::Interrupted,
            3 => State::Completed(self.payload()),
            _ => State::Failed(self.payload()),
        };
        {
            let mut record = Record::new(owner, attempt, state);
            record.attempts_used = starts;
            record.fingerprint = fingerprint;
            record
        }
    }
}
