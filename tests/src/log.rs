//! What is logged on one thread, as text.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::Dispatch;
use tracing::subscriber::DefaultGuard;

/// Makes `tracing` ask every subscriber. With a single one it asks that of whichever thread comes first to a place in the code
/// whether anybody listens there, and the threads of other tests have none.
pub fn hear_all() {
    static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));
    LazyLock::force(&ANOTHER);
}

/// Listens on this thread until it ends.
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
    /// Begins to listen.
    #[must_use]
    pub fn start() -> Self {
        hear_all();
        let text = Text::default();
        let writer = text.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        Self { text, listening: tracing::subscriber::set_default(subscriber) }
    }

    /// What was logged since then.
    pub fn end(self) -> String {
        drop(self.listening);
        String::from_utf8(self.text.0.lock().unwrap().clone()).expect("text")
    }
}
