//! Each form of a step, in handlers that are spawned: bodies borrow locals, loop variables and arguments.

use std::time::Duration;

use idem_runtime::policy::{Backoff, OnUndecodable, StepPolicy};
use idem_runtime::within::OpenTransaction;
use idem_runtime::{
    Codec, CodecError, Error, Json, MemoryStore, Postcard, PostgresStore, Reconciliation, Undecodable, current,
    idempotent,
};
use tokio_postgres::Client;

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
    // A step whose effect can't be undone, and which asks a reconciler.
    let posted = attempt
        .step("post")
        .irreversible()
        .reconcile(async |step| Ok(Reconciliation::Done(app.quote(&address, step.child_key()).await?)))
        .run(async |step| app.quote(&address, step.child_key()).await)
        .await?;
    // A codec, and a reaction to values of an older type.
    let rows = attempt.step("rows").codec::<Postcard>().on_undecodable(OnUndecodable::Migrate(migrate));
    let rows = rows.run(async |_| Ok::<_, Error>(vec![app.quote(&address, String::new()).await?])).await?;
    // Two steps of which one loses the race.
    let raced = tokio::select! {
        quoted = attempt.step("fast").run(async |step| app.quote(&address, step.child_key()).await) => quoted?,
        quoted = attempt.step("slow").run(async |_| {
            app.quote(&address, String::new()).await?;
            std::future::pending::<Result<u64, Error>>().await
        }) => quoted?,
    };
    Ok(total + booked + wired + noted + posted + rows[0] + raced)
}

/// Reads a single row of an older version as a list of rows.
fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
    Json::encode(&[recorded.decode::<u64>()?])
}

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// The error of the handler is a trait object.
#[idempotent(key = "boxed:{order}", ttl = "7d", store = app.store)]
async fn boxed(app: &App, order: u64) -> Result<u64, BoxedError> {
    let attempt = current()?;
    let quoted =
        attempt.step("quote").run(async |step| Ok::<_, BoxedError>(app.quote("a", step.child_key()).await?)).await?;
    let booked = attempt
        .step("book")
        .reconcile(async |step| Ok::<_, BoxedError>(Reconciliation::Done(app.quote("b", step.child_key()).await?)))
        .uncertain_errors_if(|error: &BoxedError| error.is::<Error>())
        .run(async |step| Ok::<_, BoxedError>(app.quote("b", step.child_key()).await?))
        .await?;
    let retried = attempt.step("retried").fail().retry(2, BACKOFF);
    let retried = retried.run(async |_| Ok::<_, BoxedError>(app.quote("c", String::new()).await?)).await?;
    let posted = attempt
        .step("post")
        .codec::<Postcard>()
        .on_undecodable(OnUndecodable::Migrate(migrate))
        .irreversible()
        .reconcile(async |step| Ok::<_, BoxedError>(Reconciliation::Done(app.quote("d", step.child_key()).await?)));
    let post = posted.run(async |step| Ok::<_, BoxedError>(app.quote("d", step.child_key()).await?));
    let posted = tokio::select! {
        posted = post => posted?,
        never = attempt.step("never").run(async |_| std::future::pending::<Result<u64, BoxedError>>().await) => never?,
    };
    Ok(quoted + booked + retried + posted)
}

/// The entry of the step is a record in a transaction of the handler.
#[idempotent(key = "debit:{order}", ttl = "7d", store = app.store)]
async fn debit(app: &App, client: &mut Client, order: u64) -> Result<u64, BoxedError> {
    let attempt = current()?;
    let (tx, account) = (OpenTransaction::new(client.transaction().await?), format!("account of {order}"));
    let debit = attempt.step("debit").fingerprint(&account).timeout(Duration::from_secs(1));
    let debit = debit.on_undecodable(OnUndecodable::Migrate(migrate)).within(PostgresStore::within(&tx));
    let debited = debit
        .run(async |step| {
            let text = "INSERT INTO payments (account, step) VALUES ($1, $2)";
            Ok::<_, BoxedError>(tx.execute(text, &[&account, &step.name()]).await?)
        })
        .await?;
    tx.into_inner().commit().await?;
    Ok(debited)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
    let spawned = runtime.spawn(async {
        let app = App { store: MemoryStore::new(), rate: 10 };
        boxed(&app, 42).await.unwrap();
        fulfil(&app, 42, &["cup".to_owned(), "tea".to_owned()]).await
    });
    assert!(runtime.block_on(spawned).unwrap().unwrap() > 0);
    // Not called: there is no server here.
    let _ = |app: App, mut client: Client| runtime.spawn(async move { debit(&app, &mut client, 42).await });
}
