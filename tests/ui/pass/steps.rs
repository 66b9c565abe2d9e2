//! Each form of a step, in handlers that are spawned: bodies borrow locals, loop variables and arguments.

use std::time::Duration;

use idem_runtime::policy::{Backoff, StepPolicy};
use idem_runtime::{Error, MemoryStore, Reconciliation, current, idempotent};

struct App {
    store: MemoryStore,
    rate: u64,
}

impl App {
    async fn quote(&self, line: &str, key: String) -> Result<u64, Error> {
        tokio::task::yield_now().await;
        Ok(self.rate + line.len() as u64 + key.len() as u64)
    }
}

const BACKOFF: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(5));

#[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
async fn fulfil(app: &App, order: u64, lines: &[String]) -> Result<u64, Error> {
    let attempt = current()?;
    attempt.set_step_policy(StepPolicy::new().strict());
    let address = format!("address of {order}");
    let mut total = 0;
    for line in lines {
        let line = line.as_str();
        // Borrows the loop variable, and a local.
        let quote = attempt.step(("quote", line)).fingerprint(&address);
        total += quote.run(async |step| app.quote(line, step.child_key()).await).await?;
        // Captures a variable mutably.
        let counted = attempt.step(("counted", line)).run(async |_| {
            total += 1;
            Ok::<_, Error>(())
        });
        counted.await?;
        // Runs the body several times.
        let retried = attempt.step(("retried", line)).timeout(Duration::from_secs(1)).retry(3, BACKOFF);
        total += retried.run(async |step| app.quote(line, step.child_key()).await).await?;
        let mut tries = 0;
        let counting = attempt.step(("tries", line)).retry(3, BACKOFF).run(|step| {
            tries += 1;
            async move { app.quote(line, step.child_key()).await }
        });
        total += counting.await? + tries;
    }
    // Two steps that run together, of which one asks a reconciler.
    let booked = attempt
        .step("book")
        .was("reserve")
        .reconcile(async |step| match app.quote(&address, step.child_key()).await? {
            0 => Ok(Reconciliation::NotDone),
            found => Ok(Reconciliation::Done(found)),
        })
        .uncertain_errors_if(|error| matches!(error, Error::NoAttempt))
        .run(async |step| app.quote(&address, step.child_key()).await);
    let wired = attempt.step("wire").irreversible().fail().run(async |_| app.quote(&address, String::new()).await);
    let (booked, wired) = tokio::try_join!(booked, wired)?;
    // A closure that is not async.
    let noted: u64 = attempt.step("note").run(|_| std::future::ready(Ok::<_, Error>(1))).await?;
    Ok(total + booked + wired + noted)
}

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// The error of the handler is a trait object.
#[idempotent(key = "boxed:{order}", ttl = "7d", store = app.store)]
async fn boxed(app: &App, order: u64) -> Result<u64, BoxedError> {
    let attempt = current()?;
    let quoted = attempt.step("quote").run(async |step| Ok::<_, BoxedError>(app.quote("a", step.child_key()).await?)).await?;
    let booked = attempt
        .step("book")
        .reconcile(async |step| Ok::<_, BoxedError>(Reconciliation::Done(app.quote("b", step.child_key()).await?)))
        .uncertain_errors_if(|error: &BoxedError| error.is::<Error>())
        .run(async |step| Ok::<_, BoxedError>(app.quote("b", step.child_key()).await?))
        .await?;
    let retried = attempt.step("retried").fail().retry(2, BACKOFF);
    Ok(quoted + booked + retried.run(async |_| Ok::<_, BoxedError>(app.quote("c", String::new()).await?)).await?)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
    let spawned = runtime.spawn(async {
        let app = App { store: MemoryStore::new(), rate: 10 };
        boxed(&app, 42).await.unwrap();
        fulfil(&app, 42, &["cup".to_owned(), "tea".to_owned()]).await
    });
    assert!(runtime.block_on(spawned).unwrap().unwrap() > 0);
}
