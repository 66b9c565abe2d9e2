//! Spans and events of the current thread, captured for assertions.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

/// Captured span or event: its name or message, and its fields.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) level: Level,
    pub(crate) fields: Fields,
    /// Names of the enclosing spans, from the innermost one.
    pub(crate) inside: Vec<&'static str>,
}

#[derive(Clone, Default, Debug)]
pub(crate) struct Fields(pub(crate) BTreeMap<&'static str, String>);

impl Seen {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.fields.0.get(name).map(String::as_str)
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = self.0.entry(field.name()).or_default();
        text.clear();
        let _ = write!(text, "{value:?}");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

/// Captures all spans and events of this thread while it lives.
pub(crate) struct Capture {
    seen: Arc<Mutex<Log>>,
    _default: DefaultGuard,
}

#[derive(Default)]
struct Log {
    spans: Vec<(u64, Seen)>,
    events: Vec<Seen>,
}

struct Listener(Arc<Mutex<Log>>);

impl Capture {
    pub(crate) fn start() -> Self {
        idem_tests::log::hear_all();
        let seen = Arc::new(Mutex::new(Log::default()));
        let subscriber = tracing_subscriber::registry().with(Listener(Arc::clone(&seen)));
        Self { seen, _default: tracing::subscriber::set_default(subscriber) }
    }

    /// Spans of this name in order, with the fields that are recorded so far.
    pub(crate) fn spans(&self, name: &str) -> Vec<Seen> {
        let log = self.seen.lock().unwrap();
        log.spans.iter().map(|(_, seen)| seen.clone()).filter(|seen| seen.name == name).collect()
    }

    /// Events of the library at this level or a more severe one.
    pub(crate) fn events(&self, level: Level) -> Vec<Seen> {
        let log = self.seen.lock().unwrap();
        log.events.iter().filter(|seen| seen.level <= level).cloned().collect()
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Listener {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let metadata = attributes.metadata();
        let around = context.span_scope(id).into_iter().flatten().skip(1);
        let inside = around.map(|span| span.name()).collect();
        let seen = Seen { name: metadata.name().to_owned(), level: *metadata.level(), fields, inside };
        self.0.lock().unwrap().spans.push((id.into_u64(), seen));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut log = self.0.lock().unwrap();
        // Span ids are reused, so the fields are added to the latest span with this id.
        if let Some((_, seen)) = log.spans.iter_mut().rev().find(|(known, _)| *known == id.into_u64()) {
            values.record(&mut seen.fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        if !metadata.target().starts_with("idem_runtime") {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let name = fields.0.remove("message").unwrap_or_default();
        let inside = context.event_scope(event).into_iter().flatten().map(|span| span.name()).collect();
        self.0.lock().unwrap().events.push(Seen { name, level: *metadata.level(), fields, inside });
    }
}
