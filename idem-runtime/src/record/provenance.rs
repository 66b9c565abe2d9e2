//! Provenance of a record: information for people.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::sync::{SharedList, SharedOnce};

/// Latest holder of a key: its host, its process, and the name of its store handle.
///
/// A holder is a short text, `<host>/<process>` or `<host>/<process>/<name>`, of at most
/// [`MAX_BYTES`](Self::MAX_BYTES).
///
/// ```
/// use idem_runtime::MemoryStore;
/// use idem_runtime::store::{Holder, Store};
///
/// let store = MemoryStore::options().holder("worker-7").build();
/// let holder = store.context().holder();
/// assert_eq!((holder.process(), holder.name()), (Some(std::process::id()), Some("worker-7")));
/// assert_eq!(Holder::new("shop-1/4711/worker-7").host(), "shop-1");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder<'a>(&'a str);

impl<'a> Holder<'a> {
    /// Length of the longest holder in a record, in bytes. A longer text is cut off.
    pub const MAX_BYTES: usize = 128;

    /// Makes a holder from its text.
    pub const fn new(text: &'a str) -> Self {
        Self(text)
    }

    /// Text of the holder.
    pub const fn as_str(&self) -> &'a str {
        self.0
    }

    /// Name of the host.
    pub fn host(&self) -> &'a str {
        self.0.split('/').next().unwrap_or_default()
    }

    /// Number of the process; `None` if the text has no number.
    pub fn process(&self) -> Option<u32> {
        self.0.split('/').nth(1)?.parse().ok()
    }

    /// Name of the store handle; `None` if the handle has no name.
    pub fn name(&self) -> Option<&'a str> {
        self.0.splitn(3, '/').nth(2)
    }
}

impl fmt::Display for Holder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl fmt::Debug for Holder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Holder({})", self.0)
    }
}

/// Returns the holder with this host, this process and `name`. The text stays allocated for the life of the process, so
/// that each call can share it without a reference count.
pub(crate) fn here(name: &str) -> Holder<'static> {
    static KNOWN: SharedList<String> = SharedList::new();
    let text = written_here(name);
    Holder(KNOWN.find_or_add(|known| *known == text, || text.clone()))
}

fn written_here(name: &str) -> String {
    /// Length of the longest host name in Linux. A longer limit is not needed. A shorter limit could cut off the end of
    /// a pod's name, the part that distinguishes pods.
    const HOST: usize = 64;
    static NAME: SharedOnce<String> = SharedOnce::new();
    let mut text = bounded(&NAME.get_or_init(host).replace('/', "-"), HOST).into_owned();
    text.push('/');
    text.push_str(&std::process::id().to_string());
    if !name.is_empty() {
        text.push('/');
        text.push_str(name);
    }
    bounded(&text, Holder::MAX_BYTES).into_owned()
}

/// Returns the name of this host, from sources that need no network.
fn host() -> String {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let told = told.or_else(|| ["HOSTNAME", "COMPUTERNAME"].into_iter().find_map(|name| std::env::var(name).ok()));
    told.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the start of `text`: whole characters, of at most `most` bytes. Control characters become spaces, because
/// some stores and terminals do not accept them.
fn bounded(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most && is_plain_text(text) {
        return Cow::Borrowed(text);
    }
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    let without_controls = |c: char| if c.is_control() { ' ' } else { c };
    Cow::Owned(text[..end.unwrap_or_default()].chars().map(without_controls).collect())
}

/// Returns whether `text` has no control characters. Most texts are ASCII, so the check for ASCII comes first.
fn is_plain_text(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~')) || !text.chars().any(char::is_control)
}

/// A W3C `traceparent`: the trace of a run, and the span in that trace that caused the run.
///
/// ```
/// use idem_runtime::record::Traceparent;
///
/// let parent: Traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse()?;
/// assert_eq!(parent.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
/// # Ok::<(), idem_runtime::record::TraceparentError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Traceparent([u8; Self::BYTES]);

impl Traceparent {
    /// Length of the text, in bytes.
    pub const BYTES: usize = 55;

    /// Text of the `traceparent`, as in the header.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// Trace id, 32 hexadecimal digits.
    pub fn trace_id(&self) -> &str {
        &self.as_str()[3..35]
    }

    /// Id of the span that caused the run, 16 hexadecimal digits.
    pub fn span_id(&self) -> &str {
        &self.as_str()[36..52]
    }
}

/// Parses the text of a header. A header of a later version can be longer; the parser keeps only the part that all
/// versions share.
impl FromStr for Traceparent {
    type Err = TraceparentError;

    fn from_str(text: &str) -> Result<Self, TraceparentError> {
        let (head, rest) = text.as_bytes().split_first_chunk().ok_or(TraceparentError)?;
        let mut parts = head.split(|byte| *byte == b'-');
        let [Some(version), Some(trace), Some(span), Some(flags), None] = std::array::from_fn(|_| parts.next()) else {
            return Err(TraceparentError);
        };
        let is_hex = |part: &[u8], len: usize| {
            part.len() == len && part.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_set = |part: &[u8]| part.iter().any(|byte| *byte != b'0');
        let is_whole = rest.is_empty() || (version != b"00" && rest[0] == b'-');
        let sound = is_hex(version, 2) && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
        match sound && version != b"ff" && is_set(trace) && is_set(span) && is_whole {
            true => Ok(Self(*head)),
            false => Err(TraceparentError),
        }
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Traceparent({self})")
    }
}

/// Error for a text that is not a `traceparent`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TraceparentError;

impl fmt::Display for TraceparentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a `traceparent`: write `00-<32 hexadecimal digits>-<16>-<2>`, in lower case")
    }
}

impl std::error::Error for TraceparentError {}

/// Name of the reconciler in place of an operator's name.
const RECONCILER: &str = "reconciler";
/// Start of the reason that a reconciler leaves in a record; the number of questions follows.
const ASKED: &str = "question ";

/// Information in a record for people: the latest holder, the trace of its run, and the operator and reason of the last
/// decision. Only the limit [`max_reconciliations`](crate::Policy::max_reconciliations) and the check for a repeated
/// decision depend on a provenance.
#[derive(Clone, Default)]
pub struct Provenance(SmallValue);

/// Content of a provenance, usually without an allocation: every request, record and lease contains a provenance.
#[derive(Clone, Default)]
enum SmallValue {
    #[default]
    Nothing,
    /// The provenance has only a holder, which is a store handle of this process.
    Held(&'static str),
    /// All four texts in the written form of a record; at least one text is not empty. The bytes are a copy, in one
    /// allocation.
    Told(Arc<[u8]>),
}

impl Provenance {
    /// Empty provenance.
    pub(crate) const NONE: Self = Self(SmallValue::Nothing);
    /// Length of the longest name of an operator in a record, in bytes. A longer name is cut off.
    pub const MAX_BY_BYTES: usize = 96;
    /// Length of the longest reason in a record, in bytes. A longer reason is cut off.
    pub const MAX_REASON_BYTES: usize = 500;

    /// Makes a provenance whose holder is a store handle of this process.
    pub(crate) const fn held(holder: Holder<'static>) -> Self {
        Self(SmallValue::Held(holder.0))
    }

    /// Returns the holder, if it is a store handle of this process and the provenance holds nothing else.
    #[cfg(feature = "memory")]
    pub(crate) fn handle(&self) -> Option<&'static str> {
        match &self.0 {
            SmallValue::Held(holder) => Some(holder),
            _ => None,
        }
    }

    /// Returns whether the provenance is empty.
    pub fn is_empty(&self) -> bool {
        match &self.0 {
            SmallValue::Nothing => true,
            SmallValue::Held(holder) => holder.is_empty(),
            SmallValue::Told(_) => false,
        }
    }

    /// Returns the latest holder of the key.
    pub fn holder(&self) -> Option<Holder<'_>> {
        let [holder, ..] = self.texts();
        Some(Holder(holder)).filter(|_| !holder.is_empty())
    }

    /// Returns the trace of the latest run.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.traceparent_text()?.as_bytes().try_into().ok().map(Traceparent)
    }

    /// Returns the text of the latest run's trace.
    pub(crate) fn traceparent_text(&self) -> Option<&str> {
        let [_, traceparent, ..] = self.texts();
        Some(traceparent).filter(|text| !text.is_empty())
    }

    /// Returns the name of the operator who made the latest decision about the record.
    pub fn decided_by(&self) -> Option<&str> {
        let [_, _, by, _] = self.texts();
        Some(by).filter(|by| !by.is_empty())
    }

    /// Returns the reason of the latest decision about the record.
    pub fn decided_reason(&self) -> Option<&str> {
        let [.., reason] = self.texts();
        Some(reason).filter(|reason| !reason.is_empty())
    }

    /// Returns the four texts of the provenance: holder, `traceparent`, operator and reason. An absent text is empty.
    pub(crate) fn texts(&self) -> [&str; 4] {
        match &self.0 {
            SmallValue::Nothing => [""; 4],
            SmallValue::Held(holder) => [holder, "", "", ""],
            SmallValue::Told(written) => split(written).map_or([""; 4], |(texts, _)| texts),
        }
    }

    /// Appends the provenance in the written form of a record; see [`format`](super::format).
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match &self.0 {
            SmallValue::Told(written) => out.extend_from_slice(written),
            _ => write(self.texts(), out),
        }
    }

    /// Reads a provenance that [`write`](Self::write) wrote at the start of `bytes`. Returns the provenance with the
    /// bytes that follow it; `None` for all other bytes, because each provenance has only one written form.
    pub(super) fn read(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let ([holder, traceparent, by, reason], rest) = split(bytes)?;
        let is_plain = |text: &str, most: usize| text.len() <= most && is_plain_text(text);
        let is_traceparent = |text: &str| text.len() == Traceparent::BYTES && text.parse::<Traceparent>().is_ok();
        let sound = is_plain(holder, Holder::MAX_BYTES)
            && (traceparent.is_empty() || is_traceparent(traceparent))
            && is_plain(by, Self::MAX_BY_BYTES)
            && is_plain(reason, Self::MAX_REASON_BYTES);
        let written = &bytes[..bytes.len() - rest.len()];
        let is_empty = written.iter().all(|byte| *byte == 0);
        (sound && !is_empty).then(|| (Self(SmallValue::Told(written.into())), rest))
    }

    /// Reads only the trace of a provenance that [`write`](Self::write) wrote, and does not check the other texts,
    /// because a replay needs only the trace.
    #[cfg(feature = "redis")]
    pub(super) fn read_trace(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (texts, rest) = split_bytes(bytes)?;
        let provenance = match texts {
            [_, [], ..] => Self::NONE,
            [_, traceparent, ..] => Self::of_texts(["", std::str::from_utf8(traceparent).ok()?, "", ""]),
        };
        Some((provenance, rest))
    }

    /// Returns the provenance with another holder.
    #[must_use]
    pub fn with_holder(&self, holder: Holder<'_>) -> Self {
        let [_, traceparent, by, reason] = self.texts();
        Self::of_texts([holder.as_str(), traceparent, by, reason])
    }

    /// Returns the provenance with another trace.
    #[must_use]
    pub fn with_traceparent(&self, traceparent: Option<Traceparent>) -> Self {
        let [holder, before, by, reason] = self.texts();
        let traceparent = traceparent.as_ref().map_or("", Traceparent::as_str);
        match traceparent == before {
            true => self.clone(),
            false => Self::of_texts([holder, traceparent, by, reason]),
        }
    }

    /// Returns the provenance with another operator and reason. An empty text means that no name or no reason is given.
    #[must_use]
    pub fn with_decision(&self, by: &str, reason: &str) -> Self {
        if by.is_empty() && reason.is_empty() && self.decided_by().is_none() && self.decided_reason().is_none() {
            return self.clone();
        }
        let [holder, traceparent, ..] = self.texts();
        Self::of_texts([holder, traceparent, by, reason])
    }

    /// Returns the provenance for a record that replaces a record with the provenance `before`. The returned provenance
    /// keeps the operator and the reason of `before`.
    pub(super) fn after(&self, before: &Self) -> Self {
        let (by, reason) = (before.decided_by(), before.decided_reason());
        match (by, reason) {
            (None, None) => self.clone(),
            (by, reason) => self.with_decision(by.unwrap_or_default(), reason.unwrap_or_default()),
        }
    }

    /// Returns the provenance for the question number `times` to the reconciler since the last decision of an operator.
    #[must_use]
    pub fn reconciling(&self, times: u16) -> Self {
        self.with_decision(RECONCILER, &format!("{ASKED}{times}"))
    }

    /// Returns the number of times that the reconciler was asked since the last decision of an operator. The limit
    /// [`max_reconciliations`](crate::Policy::max_reconciliations) depends on this number: if the number is lost, the
    /// reconciler is asked more often.
    pub fn reconciliations(&self) -> u16 {
        match (self.decided_by(), self.decided_reason()) {
            (Some(RECONCILER), Some(reason)) => {
                reason.strip_prefix(ASKED).and_then(|times| times.parse().ok()).unwrap_or_default()
            }
            _ => 0,
        }
    }

    /// Makes a provenance from texts of any origin. An invalid text is left out and is no error, because a provenance
    /// is only information for people.
    pub(crate) fn of_texts(texts: [&str; 4]) -> Self {
        if texts.iter().all(|text| text.is_empty()) {
            return Self::NONE;
        }
        let [holder, traceparent, by, reason] = texts;
        let traceparent: Option<Traceparent> = traceparent.parse().ok();
        let [holder, by, reason] =
            [(holder, Holder::MAX_BYTES), (by, Self::MAX_BY_BYTES), (reason, Self::MAX_REASON_BYTES)]
                .map(|(text, most)| bounded(text, most));
        let texts = [&*holder, traceparent.as_ref().map_or("", Traceparent::as_str), &*by, &*reason];
        if texts.iter().all(|text| text.is_empty()) {
            return Self::NONE;
        }
        let mut written = Vec::with_capacity(texts.iter().map(|text| 2 + text.len()).sum());
        write(texts, &mut written);
        Self(SmallValue::Told(written.into()))
    }
}

/// Appends the four texts of a provenance in the written form of a record.
fn write([holder, traceparent, by, reason]: [&str; 4], out: &mut Vec<u8>) {
    for text in [holder, traceparent, by] {
        out.push(u8::try_from(text.len()).unwrap_or_default());
        out.extend_from_slice(text.as_bytes());
    }
    out.extend_from_slice(&u16::try_from(reason.len()).unwrap_or_default().to_be_bytes());
    out.extend_from_slice(reason.as_bytes());
}

/// Splits off the four texts that [`write()`] wrote at the start of `bytes`. Returns the four texts, and the bytes that
/// follow the texts.
fn split(bytes: &[u8]) -> Option<([&str; 4], &[u8])> {
    let (found, rest) = split_bytes(bytes)?;
    let mut texts = [""; 4];
    for (text, found) in texts.iter_mut().zip(found) {
        *text = std::str::from_utf8(found).ok()?;
    }
    Some((texts, rest))
}

/// Splits off the texts like `split`, but returns them as bytes.
fn split_bytes(bytes: &[u8]) -> Option<([&[u8]; 4], &[u8])> {
    let (mut texts, mut rest): ([&[u8]; 4], _) = ([&[]; 4], bytes);
    for (at, text) in texts.iter_mut().enumerate() {
        let len = if at < 3 {
            let (len, after) = rest.split_first()?;
            rest = after;
            usize::from(*len)
        } else {
            let (len, after) = rest.split_first_chunk()?;
            rest = after;
            usize::from(u16::from_be_bytes(*len))
        };
        (*text, rest) = rest.split_at_checked(len)?;
    }
    Some((texts, rest))
}

impl PartialEq for Provenance {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (SmallValue::Told(a), SmallValue::Told(b)) => a == b,
            _ => self.texts() == other.texts(),
        }
    }
}

impl Eq for Provenance {}

impl fmt::Debug for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Provenance");
        let texts = [
            ("holder", self.holder().map(|holder| holder.as_str())),
            ("traceparent", self.traceparent_text()),
            ("decided_by", self.decided_by()),
            ("decided_reason", self.decided_reason()),
        ];
        for (name, text) in texts {
            if let Some(text) = text {
                shown.field(name, &text);
            }
        }
        shown.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_holder_that_is_too_long_is_cut_between_two_characters() {
        let holder = written_here(&"ü\n".repeat(200));
        assert!(holder.len() <= Holder::MAX_BYTES && holder.len() > Holder::MAX_BYTES - 3, "{holder}");
        assert!(!holder.contains('\n'));
        let holder = Holder::new(&holder);
        assert_eq!(holder.process(), Some(std::process::id()));
        assert!(holder.name().unwrap().starts_with("ü ü "), "{holder}");
        assert_eq!(Holder::new("host/7").name(), None);
        assert_eq!(Holder::new("host/7/a/b").name(), Some("a/b"));
    }

    #[test]
    fn invalid_traceparents_are_refused() {
        let parent: Traceparent = PARENT.parse().unwrap();
        assert_eq!((parent.to_string(), parent.span_id()), (PARENT.to_owned(), "00f067aa0ba902b7"));
        assert_eq!(
            format!("{}-more", PARENT.replacen("00", "01", 1)).parse::<Traceparent>().unwrap().as_str()[..2],
            *"01"
        );
        for wrong in [
            String::new(),
            PARENT[..54].to_owned(),
            format!("{PARENT}-more"),
            PARENT.to_uppercase(),
            PARENT.replacen("00", "ff", 1),
            PARENT.replace("00f067aa0ba902b7", "0000000000000000"),
            PARENT.replace('4', "ü"),
        ] {
            assert_eq!(wrong.parse::<Traceparent>(), Err(TraceparentError), "{wrong}");
        }
    }

    #[test]
    fn a_provenance_returns_the_texts_it_was_made_from() {
        let nothing = Provenance::default();
        assert!(
            nothing.is_empty()
                && nothing == Provenance::held(Holder::new(""))
                && nothing.with_decision("", "").is_empty()
        );
        let held = Provenance::held(Holder::new("host/1"));
        assert_eq!(held, nothing.with_holder(Holder::new("host/1")));
        let told = held.with_traceparent(PARENT.parse().ok()).with_decision("alice", "INC-7");
        let texts = Provenance::of_texts(["host/1", PARENT, "alice", "INC-7"]);
        assert_eq!(told, texts);
        assert_ne!(told, held);
        assert_eq!(held.after(&told), held.with_decision("alice", "INC-7"), "the trace is that of the latest run");
        assert_eq!(told.with_decision("", "").decided_by(), None);
        let long = held.with_decision(&"é".repeat(100), &"é".repeat(1000));
        assert_eq!(long.decided_by().unwrap().len(), Provenance::MAX_BY_BYTES);
        assert_eq!(long.decided_reason().unwrap().len(), Provenance::MAX_REASON_BYTES);
        assert!(Provenance::of_texts(["", "nonsense", "", ""]).is_empty());
        assert_eq!(told.texts(), ["host/1", PARENT, "alice", "INC-7"]);
    }
    #[cfg(feature = "redis")]
    #[test]
    fn a_replay_reads_only_the_trace_of_a_provenance() {
        for (texts, trace) in [
            (["host/1", PARENT, "alice", "INC-7"], PARENT),
            (["host/1", "", "alice", ""], ""),
            (["", PARENT, "", ""], PARENT),
        ] {
            let mut written = Vec::new();
            Provenance::of_texts(texts).write(&mut written);
            written.extend_from_slice(b"rest");
            let (whole, rest) = Provenance::read(&written).unwrap();
            assert_eq!((whole.texts(), rest), (texts, &b"rest"[..]));
            let (provenance, rest) = Provenance::read_trace(&written).unwrap();
            assert_eq!((provenance.texts(), rest), (["", trace, "", ""], &b"rest"[..]));
            assert!((0..written.len() - 4).all(|cut| Provenance::read_trace(&written[..cut]).is_none()));
        }
    }
}
