//! Log of a single thread, as text.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::Dispatch;
use tracing::subscriber::DefaultGuard;

/// Makes `tracing` ask every subscriber about every event. With a single subscriber, the first thread that reaches an
/// event decides for all threads whether the event is logged, and that thread may belong to a test without a
/// subscriber.
pub fn hear_all() {
    static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));
    LazyLock::force(&ANOTHER);
}

/// Records the log of this thread until `end`.
#[derive(Debug)]
pub struct Log {
    text: Text,
    listening: DefaultGuard,
}

#[derive(Clone, Default, Debug)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Starts to record the log.
    #[must_use]
    pub fn start() -> Self {
        hear_all();
        let text = Text::default();
        let writer = text.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        Self { text, listening: tracing::subscriber::set_default(subscriber) }
    }

    /// Returns the log since the start.
    pub fn end(self) -> String {
        drop(self.listening);
        String::from_utf8(self.text.0.lock().unwrap().clone()).expect("text")
    }
}
