//! Shares settings between several handlers, and changes the mode of all of them at run time.
//!
//! A `Policy` is a value that several handlers can name; an option of a handler's own attribute applies to that handler
//! alone. A `ModeSwitch` is a `static` that an admin endpoint can set. `cargo run --example shared_policy` shows both.

use std::error::Error as StdError;
use std::process::ExitCode;
use std::time::Duration;

use idem_examples::Claims;
use idem_runtime::policy::Backoff;
use idem_runtime::{Error, MemoryStore, Mode, ModeSwitch, Policy, Refusal, idempotent, observe};

type AnyError = Box<dyn StdError + Send + Sync>;

/// Mode of all payment handlers.
static PAYMENTS_MODE: ModeSwitch = ModeSwitch::new(Mode::Enforce);

/// Settings of all payment handlers. The settings are a `static`, because they refer to the switch; settings without a
/// switch can be a `const`.
static PAYMENTS: Policy = Policy::new(Duration::from_secs(30 * 86_400))
    .lease(Duration::from_secs(60))
    .max_attempts(2)
    .backoff(Backoff::new(Duration::from_millis(500), Duration::from_secs(60)))
    .mode_switch(&PAYMENTS_MODE);
// A lease or a retention that can't be honoured is a compile error here, not an error of each call.
const _: () = assert!(PAYMENTS.check().is_ok());

#[idempotent(key = "order:{order}", policy = PAYMENTS, store = store, scope = "charge")]
async fn charge(store: &MemoryStore, order: u32, bank: Bank) -> Result<u32, AnyError> {
    bank.answer(order)
}

/// Refunds an order, with the shared settings and a limit on attempts of its own.
#[idempotent(key = "order:{order}", policy = PAYMENTS, max_attempts = 5, store = store, scope = "refund")]
async fn refund(store: &MemoryStore, order: u32, bank: Bank) -> Result<u32, AnyError> {
    bank.answer(order)
}

#[derive(Clone, Copy)]
enum Bank {
    Answers,
    IsAway,
}

impl Bank {
    fn answer(self, order: u32) -> Result<u32, AnyError> {
        match self {
            Self::Answers => Ok(order),
            Self::IsAway => Err("the bank does not answer".into()),
        }
    }
}

async fn run(claims: &mut Claims) -> Result<(), AnyError> {
    let store = MemoryStore::new();
    for _delivery in 0..2 {
        let _ = charge(&store, 1, Bank::IsAway).await;
        let _ = refund(&store, 1, Bank::IsAway).await;
    }
    let charged = charge(&store, 1, Bank::Answers).await;
    let exhausted = charged.is_err_and(|error| matches!(error.downcast_ref(), Some(Error::AttemptsExhausted { .. })));
    claims.check("`max_attempts` of the policy limits the handler that says nothing else", exhausted);
    let refunded = refund(&store, 1, Bank::Answers).await;
    claims.check("an option beside the policy overrides it", refunded.is_ok());

    charge(&store, 2, Bank::Answers).await?;
    PAYMENTS_MODE.set(Mode::Shadow);
    let (_, outcome) = observe(charge(&store, 2, Bank::Answers)).await;
    claims.check("in shadow mode a duplicate runs", outcome.executed());
    claims.check("and the outcome says that it would have been replayed", outcome.bypassed() == Some(Refusal::Replay));
    PAYMENTS_MODE.set(Mode::Enforce);
    let (_, outcome) = observe(charge(&store, 2, Bank::Answers)).await;
    claims.check("the switch enforces again, for calls that begin from then on", outcome.replayed());
    Ok(())
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let mut claims = Claims::default();
    let result = runtime.block_on(run(&mut claims));
    claims.exit_code(&result)
}
