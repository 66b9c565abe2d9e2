//! Compresses large results.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::get_frame_content_size;

use crate::codec::CodecName;
use crate::key::Key;
use crate::record::envelope::{self, Envelope, Form, unreadable};
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Reservation, ReserveRequest, StoredResult, Verdict,
};
use crate::store::{Store, StoreFuture, forward, store_of_shared};
use crate::stores::wrapper;
use crate::sync::SharedOnce;

const CODEC: CodecName = envelope::COMPRESSED;

/// A wrapper around any store that compresses large results with zstd.
///
/// A result of more than [`above`](CompressedOptions::above) bytes is compressed, and the smaller of the two forms is
/// stored. If a result can't be decompressed, or would exceed [`max_bytes`](CompressedOptions::max_bytes), duplicates
/// get the error of an unavailable result ([`StoredResult::Unreadable`]). The operation is still finished, and never
/// runs again. All consumers of one store need the wrapper: a consumer without the wrapper gets an error that names the
/// codec `idem:zstd`. Results that are not compressed are written unchanged, so the wrapper can be added at any time.
///
/// - *Atomicity*, *Clock*, *Durability*: as in the inner store.
/// - *Limits*: as in the inner store, for the compressed result.
/// - *Cost*: no further call. Compression takes about 1 ms of processor time per MB, in the task of the handler;
///   decompression takes less. Each thread that compresses needs about 1 MB of memory.
///
/// ```
/// use idem_runtime::{Compressed, MemoryStore};
///
/// let store = Compressed::new(MemoryStore::new());
/// ```
#[derive(Clone, Debug)]
pub struct Compressed(Arc<CompressedInner>);

impl Compressed {
    /// Wraps `store` with the default settings of [`CompressedOptions`].
    pub fn new(store: impl Store) -> Self {
        Self::options().wrap(store)
    }

    /// Returns the default settings, to be changed before wrapping a store.
    pub fn options() -> CompressedOptions {
        CompressedOptions::default()
    }
}

store_of_shared!(Compressed);

/// Settings of a [`Compressed`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct CompressedOptions {
    level: i32,
    above: usize,
    max_bytes: usize,
}

impl Default for CompressedOptions {
    fn default() -> Self {
        Self { level: 1, above: 1024, max_bytes: 64 * 1024 * 1024 }
    }
}

impl CompressedOptions {
    /// Compression level of zstd, up to 22 (default: 1). Higher levels give smaller results and are slower. Negative
    /// levels are faster and give larger results.
    pub fn level(self, level: i32) -> Self {
        Self { level, ..self }
    }

    /// Size above which results are compressed, in bytes (default: 1 KiB).
    pub fn above(self, bytes: usize) -> Self {
        Self { above: bytes, ..self }
    }

    /// Largest result that is compressed or decompressed, in bytes (default: 64 MiB). A larger result is written
    /// uncompressed. If the limit is lowered later, compressed results above the new limit are unavailable.
    pub fn max_bytes(self, bytes: usize) -> Self {
        Self { max_bytes: bytes, ..self }
    }

    /// Wraps `store` with these settings.
    #[expect(clippy::needless_pass_by_value, reason = "a wrapper takes its store; handles are cheap to clone")]
    pub fn wrap(self, store: impl Store) -> Compressed {
        Compressed(self.open(store.handle()))
    }

    fn open(self, inner: Arc<dyn Store>) -> Arc<CompressedInner> {
        Arc::new_cyclic(|this| CompressedInner {
            this: Weak::clone(this),
            inner,
            options: self,
            upkeep: SharedOnce::new(),
        })
    }
}

#[derive(Debug)]
struct CompressedInner {
    this: Weak<CompressedInner>,
    inner: Arc<dyn Store>,
    options: CompressedOptions,
    upkeep: SharedOnce<Arc<CompressedInner>>,
}

thread_local! {
    // Each thread keeps one context of zstd for compression and one for decompression, because creating a context costs
    // many times as much as compressing a small result.
    static COMPRESSOR: RefCell<Option<(i32, Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses `bytes` into one frame. Equal `bytes` always give equal frames. Returns `None` if zstd fails.
fn compress(level: i32, bytes: &[u8]) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|compressor| {
        if compressor.as_ref().is_none_or(|(its, _)| *its != level) {
            let mut new = Compressor::new(level).ok()?;
            new.include_checksum(true).ok()?;
            *compressor = Some((level, new));
        }
        let (_, compressor) = compressor.as_mut()?;
        compressor.compress(bytes).ok()
    })
}

/// Returns an upper bound for the content of a frame of `len` bytes: a block has at least 4 bytes, and holds at most
/// 128 KiB. The bound limits the buffer that is allocated for a frame with a false size.
const fn most_in(len: usize) -> usize {
    (len / 4).saturating_mul(128 * 1024)
}

/// Decompresses `frame` into `size` bytes. Returns `None` if the frame holds fewer or more bytes, or if its checksum
/// does not match.
fn decompress(frame: &[u8], size: usize) -> Option<Vec<u8>> {
    if get_frame_content_size(frame).ok()?? != size as u64 || size > most_in(frame.len()) {
        return None;
    }
    DECOMPRESSOR.with_borrow_mut(|decompressor| {
        if decompressor.is_none() {
            *decompressor = Some(Decompressor::new().ok()?);
        }
        let mut out = Vec::with_capacity(size);
        // zstd never writes beyond the capacity of the buffer.
        decompressor.as_mut()?.decompress_to_buffer(frame, &mut out).ok()?;
        (out.len() == size).then_some(out)
    })
}

impl CompressedInner {
    /// Returns the payload in an envelope; `None` if the payload is stored unchanged.
    fn pack(&self, payload: &StoredResult) -> Option<StoredResult> {
        let (result, messages) = payload.apart();
        Some(self.pack_alone(&result)?.together(messages.as_ref()))
    }

    fn pack_alone(&self, payload: &StoredResult) -> Option<StoredResult> {
        let StoredResult::Encoded { codec, bytes } = payload else { return None };
        let compressed = (bytes.len() > self.options.above && bytes.len() <= self.options.max_bytes)
            .then(|| compress(self.options.level, bytes))
            .flatten()
            .filter(|frame| envelope::header_bytes(codec) + frame.len() < bytes.len());
        let bytes = match compressed {
            Some(frame) => envelope::seal(Form::Zstd, codec, bytes.len() as u64, &[&frame]),
            None if *codec == CODEC => envelope::seal(Form::AsItWas, codec, bytes.len() as u64, &[bytes]),
            None => return None,
        };
        Some(StoredResult::Encoded { codec: CODEC, bytes })
    }

    fn unpack(&self, payload: &mut StoredResult) {
        let (packed, messages) = payload.apart();
        let StoredResult::Encoded { codec: CODEC, bytes } = &*packed else { return };
        let unpacked = match self.open(bytes) {
            Ok((codec, bytes)) => StoredResult::Encoded { codec, bytes },
            Err(reason) => unreadable(reason),
        };
        drop(packed);
        *payload = unpacked.together(messages.as_ref());
    }

    /// Returns `inspection` with its result unpacked.
    fn seen(&self, mut inspection: Option<Inspection>) -> Option<Inspection> {
        if let Some(Inspection { record, .. }) = &mut inspection
            && let Some(payload) = record.state.result_mut()
        {
            self.unpack(payload);
        }
        inspection
    }

    fn open(&self, bytes: &Bytes) -> Result<(CodecName, Bytes), String> {
        const DAMAGED: &str = "its compressed form is damaged";
        let Envelope { form, codec, size, rest } = envelope::open(bytes)?;
        let max = self.options.max_bytes;
        let bytes = match form {
            form if form == Form::AsItWas as u8 => rest,
            form if form != Form::Zstd as u8 => return Err(DAMAGED.to_owned()),
            _ if size > max as u64 => {
                return Err(format!("it has {size} bytes, more than the {max} that may be decompressed"));
            }
            // `size` is at most `max_bytes`, which is a `usize`.
            _ => decompress(&rest, usize::try_from(size).unwrap_or(max)).ok_or(DAMAGED)?.into(),
        };
        match bytes.len() as u64 == size {
            true => Ok((codec, bytes)),
            false => Err(DAMAGED.to_owned()),
        }
    }
}

impl Store for CompressedInner {
    fn upkeep(&self) -> Arc<dyn Store> {
        wrapper::upkeep(&self.this, &self.inner, &self.upkeep, |inner| self.options.open(inner))
    }

    forward! { |store| store.inner => namespace, response_timeout, context, begin, renew, append, step_values, release, purge, list, ping }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move {
            let mut answer = self.inner.reserve(request).await?;
            if let Reservation::Finished { record, .. } = &mut answer
                && let Some(payload) = record.state.result_mut()
            {
                self.unpack(payload);
            }
            Ok(answer)
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        if !envelope::concerns(finish, CODEC, self.options.above) {
            return self.inner.finish(lease, finish);
        }
        StoreFuture::new(async move {
            match self.pack(finish.result()) {
                Some(packed) => self.inner.finish(lease, &finish.with_result(packed)).await,
                None => self.inner.finish(lease, finish).await,
            }
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        let packed = match decision.action.finish() {
            Some(finish) if envelope::concerns(finish, CODEC, self.options.above) => {
                self.pack(finish.result()).map(|packed| finish.with_result(packed))
            }
            _ => None,
        };
        let Some(packed) = packed else { return self.inner.decide(decision) };
        StoreFuture::new(async move {
            self.inner.decide(&Decision { action: decision.action.with_finish(packed), ..decision.clone() }).await
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move { Ok(self.seen(self.inner.inspect(key).await?)) })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move { Ok(self.seen(self.inner.wait(key, attempt, at_most).await?)) })
    }
}
