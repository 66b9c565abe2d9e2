//! Shuts down a consumer without leaving keys held.
//!
//! On SIGTERM the consumer takes no more messages, gives running handlers some time, drops handlers that need longer,
//! and flushes the store: `flush` waits for the write with which a dropped handler frees its key.
//! `cargo run --example shutdown --features shutdown` sends itself that signal.
#![allow(clippy::disallowed_methods, reason = "handlers take real time")]

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, fs, io, process};

use idem_examples::Claims;
use idem_runtime::{Key, SqliteStore, Store as _, StoreExt as _, idempotent, observe};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

type AnyError = Box<dyn Error + Send + Sync>;

/// Time for running handlers after the signal. The supervisor must wait longer before it kills the process.
const GRACE: Duration = Duration::from_millis(500);

#[idempotent(key = "order:{order}", ttl = "7d", store = store, scope = "ship")]
async fn ship(store: &SqliteStore, order: u32, takes: Duration) -> Result<u32, AnyError> {
    sleep(takes).await;
    Ok(order)
}

/// Handles messages until SIGTERM.
async fn consume(store: &SqliteStore, mut messages: mpsc::Receiver<(u32, Duration)>) -> Result<(), AnyError> {
    let mut stop = std::pin::pin!(told_to_stop());
    let mut running = JoinSet::new();
    loop {
        let (order, takes) = tokio::select! {
            // 1. Take no more messages.
            told = &mut stop => break told?,
            Some(message) = messages.recv() => message,
        };
        let store = store.clone();
        running.spawn(async move { observe(ship(&store, order, takes)).await.1.disposition() });
    }
    // 2. Give the running handlers some time to finish.
    let drained = timeout(GRACE, async { while running.join_next().await.is_some() {} }).await;
    println!("   {}", if drained.is_ok() { "all handlers have ended" } else { "some handlers are dropped" });
    // 3. Drop the other handlers. Their messages are not acknowledged, so the broker delivers them again.
    running.shutdown().await;
    // 4. Write the releases of dropped handlers.
    store.flush().await;
    Ok(())
}

async fn told_to_stop() -> io::Result<()> {
    #[cfg(unix)]
    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?.recv().await;
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await?;
    Ok(())
}

async fn run(claims: &mut Claims, folder: &Path) -> Result<(), AnyError> {
    let file = folder.join("records.db");
    let store = SqliteStore::open(&file).await?;
    let (send, messages) = mpsc::channel(8);
    send.send((1, Duration::from_millis(300))).await?; // Ends in time.
    send.send((2, Duration::from_secs(3600))).await?; // Does not end.
    let supervisor = async {
        sleep(Duration::from_millis(200)).await;
        Command::new("kill").args(["-TERM", &process::id().to_string()]).status()
    };
    let (consumed, signalled) = tokio::join!(consume(&store, messages), supervisor);
    claims.check("SIGTERM was sent", signalled?.success());
    consumed?;

    // This second handle reads the records as another process would.
    let other = SqliteStore::open(&file).await?;
    let found =
        async |order: u32| Ok::<_, AnyError>(other.inspect(&Key::new("ship", format!("order:{order}"))?).await?);
    let ended = found(1).await?.is_some_and(|found| found.record.is_finished());
    claims.check("the handler that ended in time has recorded its result", ended);
    let freed = found(2).await?.is_some_and(|found| !found.record.is_pending());
    claims.check("the handler that was dropped has freed its key", freed);
    let (_, outcome) = observe(ship(&other, 2, Duration::ZERO)).await;
    claims.check("its message runs at once when it is delivered again", outcome.executed());
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    let folder = env::temp_dir().join(format!("idem-shutdown-{}", process::id()));
    let mut claims = Claims::default();
    let result = match fs::create_dir_all(&folder) {
        Ok(()) => run(&mut claims, &folder).await,
        Err(error) => Err(error.into()),
    };
    let _ = fs::remove_dir_all(&folder);
    claims.exit_code(&result)
}
