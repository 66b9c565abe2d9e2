//! Shows an agent's tools that use `#[idempotent]` and `idem_rmcp`: the model repeats calls, changes its mind and gives
//! up, the client leaves, and the server is killed.
//!
//! `cargo run --example refund_tool --features rmcp` is an MCP client that starts this program again as its server,
//! over stdio, and kills it in the middle of a refund. Records are in a SQLite file.
//!
//! - *Key*: the tenant and the object of the operation, if this object identifies the operation: an order is refunded
//!   once, however often a model calls, and whichever agent of the shop calls. Otherwise the key comes from `_meta`: a
//!   customer may get two credits, so a key that the client sets identifies the credit whose call is repeated. Such a
//!   key belongs to the caller. The call's id can't be a key: it differs in each attempt, and starts at 1 in each
//!   connection.
//! - *Tenant and caller*: over stdio, the user who started the server; over HTTP, the claims of the token. The name in
//!   `clientInfo` is unverified, and identifies no caller.
//! - *Amount*: the amount is no part of the fingerprint, so that a failed try with a wrong amount does not prevent a
//!   try with the right one. The record holds the amount that the bank has paid, and the tool compares it with the
//!   amount of the call.
//! - *Answers*: an error is an answer to the model (`is_error`), and names the next step, which is usually to repeat
//!   the call. A model that reads only "failed" tries another amount, another order or another key.
//! - *Effects finish*: each call runs in a task of its own, and the server waits for its calls before it ends.
#![allow(clippy::disallowed_methods, reason = "a client waits for its server")]

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs};

use idem_examples::Claims;
use idem_examples::agent::{Bank, CALLER, Connection, Failure, KEY, text};
use idem_runtime::{Disposition, Error, Policy, SqliteStore, current, idempotent};
use rmcp::handler::server::wrapper::Parameters;
use rmcp::model::{ContentBlock, IntoContents, RequestMetaObject, ServerCapabilities, ServerConfig};
use rmcp::{ServerHandler, ServiceExt as _, schemars, tool, tool_handler, tool_router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(2);
const MONEY: Policy = Policy::new(Duration::from_secs(90 * 86_400)).lease(LEASE);

#[derive(Deserialize, schemars::JsonSchema)]
struct Refund {
    /// The order to be refunded.
    order: u64,
    /// The amount.
    cents: u64,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Credit {
    /// The customer.
    customer: u64,
    /// The amount.
    cents: u64,
}

/// Refunds each order once: the bank recognises the key of the payment, even after a crash.
#[idempotent(key = "{desk.caller}:{refund.order}", policy = MONEY, store = desk.store, fingerprint = (refund.order, refund.cents))]
async fn refund(desk: &Desk, refund: &Refund) -> Result<String, Answer> {
    let payment = current()?.child_key("refund");
    desk.bank.pay(&format!("order {}", refund.order), &payment).await?;
    Ok(format!("Refunded {} cents of order {}.", refund.cents, refund.order))
}

/// Gives one credit for each key of a caller. The ledger of credits has no keys: after a crash a person has to check
/// it.
#[idempotent(key = "{desk.caller}:{key}", policy = MONEY, store = desk.store, on_crash = fail, fingerprint = (credit.customer, credit.cents))]
async fn give_credit(desk: &Desk, key: &str, credit: &Credit) -> Result<String, Answer> {
    let payment = current()?.child_key("credit");
    desk.bank.pay(&format!("customer {}", credit.customer), &payment).await?;
    Ok(format!("Customer {} has {} cents more.", credit.customer, credit.cents))
}

/// Text for the model when a call has no result. The example needs its own type, because the errors of `rmcp` and of
/// this library belong to other crates, so it can't implement `From` between them.
#[derive(Debug)]
struct Answer(String);

impl From<Error> for Answer {
    fn from(error: Error) -> Self {
        // The details of the error go only to the log, because they contain the key, which names the caller.
        eprintln!("server {}: {error}", std::process::id());
        let again = match error.disposition() {
            Disposition::Retry { after } => {
                format!("Make the same call again in {} s, with the same arguments.", after.as_secs() + 1)
            }
            _ => "Don't call again. Tell the user that a person has to look at it.".to_owned(),
        };
        let happened = match &error {
            Error::InProgress { .. } => "An earlier call is still at it.",
            Error::FingerprintMismatch { .. } => "Nothing was paid: an earlier call had other arguments.",
            error if error.is_uncertain() => "In doubt: it may have been paid, or not.",
            _ => "There is no result.",
        };
        Self(format!("{happened} {again} Never use another key or other arguments instead: it could be paid twice."))
    }
}

impl From<io::Error> for Answer {
    fn from(error: io::Error) -> Self {
        Self(format!("The bank does not answer ({error}). Make the same call again, with the same arguments."))
    }
}

impl IntoContents for Answer {
    fn into_contents(self) -> Vec<ContentBlock> {
        vec![ContentBlock::text(self.0)]
    }
}

#[derive(Clone)]
struct Desk {
    caller: String,
    store: SqliteStore,
    bank: Bank,
}

#[tool_router]
impl Desk {
    #[tool(description = "Refunds an order. Calling it again with the same arguments is safe, and pays nothing twice.")]
    async fn refund(&self, Parameters(call): Parameters<Refund>) -> Result<String, Answer> {
        refund(self, &call).await
    }

    #[tool(
        description = "Gives a customer a credit. Repeat a call that was not answered with the same key in `_meta`."
    )]
    async fn credit(&self, meta: RequestMetaObject, Parameters(call): Parameters<Credit>) -> Result<String, Answer> {
        let key = meta.0.0.get(KEY).and_then(Value::as_str);
        let missing = || Answer(format!("Nothing was paid: the client has to send a key as `{KEY}` in `_meta`."));
        give_credit(self, key.ok_or_else(missing)?, &call).await
    }
}

#[tool_handler]
impl ServerHandler for Desk {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }
}

async fn serve(folder: &Path) -> Result<(), Failure> {
    let caller = env::var(CALLER)?;
    let store = SqliteStore::open(folder.join("idem.db")).await?;
    let desk = Desk { caller, store, bank: Bank::at(folder) };
    desk.serve(rmcp::transport::stdio()).await?.waiting().await?;
    Ok(())
}

/// Makes the calls that an MCP client makes for its model.
async fn ask(claims: &mut Claims, folder: &Path) -> Result<(), Failure> {
    let bank = Bank::at(folder);
    let alice = Connection::to(folder, "alice").await?;
    let arguments = json!({ "order": 1, "cents": 500 });
    // 1. The model repeats a call, and then changes its arguments.
    let first = alice.call("refund", &arguments, None).await?;
    let second = alice.call("refund", &arguments, None).await?;
    claims.check("a call that is repeated is answered alike", first == second && text(&first).starts_with("Refunded"));
    let other = alice.call("refund", &json!({ "order": 1, "cents": 900 }), None).await?;
    let refused = other.is_error == Some(true) && text(&other).starts_with("Nothing was paid");
    claims.check("the same refund with another amount is refused", refused);
    claims.check("order 1 was refunded once, by one body", bank.books("order 1") == (1, 1));

    // 3. The model repeats a call while its first call still runs.
    bank.slow(true)?;
    let arguments = json!({ "order": 2, "cents": 500 });
    let running = tokio::spawn(alice.call("refund", &arguments, None));
    while bank.books("order 2").0 == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    let again = alice.call("refund", &arguments, None).await?;
    println!("   while it runs: {}", text(&again));
    let told = again.is_error == Some(true) && text(&again).contains("same call again");
    claims.check("while it runs, the model is told to make the same call again", told);
    bank.slow(false)?;
    claims.check("the first call gets its result", text(&running.await??).starts_with("Refunded"));

    // 3. The server is killed in the middle of a refund, and another one takes over.
    let arguments = json!({ "order": 3, "cents": 500 });
    let call = alice.call("refund", &arguments, None);
    claims.check("the server is killed while it refunds", alice.call_and_kill(&bank, call, "order 3").await?);
    let alice = Connection::to(folder, "alice").await?;
    let waits = alice.call("refund", &arguments, None).await?;
    claims.check("the next one waits for the lease of the dead", text(&waits).starts_with("An earlier call"));
    sleep(LEASE).await;
    let done = alice.call("refund", &arguments, None).await?;
    claims.check("then it refunds", text(&done).starts_with("Refunded"));
    claims.check("order 3 was refunded once, although the bank was asked twice", bank.books("order 3") == (2, 1));

    // 7. Credits: the arguments do not identify the operation, so each credit needs a key.
    let arguments = json!({ "customer": 7, "cents": 300 });
    let without = alice.call("credit", &arguments, None).await?;
    claims.check("a credit without a key is refused", without.is_error == Some(true));
    for key in ["call-1", "call-1", "call-2"] {
        alice.call("credit", &arguments, Some(key)).await?;
    }
    claims.check("two keys are two credits, and one key is one", bank.books("customer 7") == (2, 2));
    let mallory = Connection::to(folder, "mallory").await?;
    mallory.call("credit", &json!({ "customer": 8, "cents": 300 }), Some("call-1")).await?;
    claims.check("another caller's key is another operation", bank.books("customer 8") == (1, 1));

    // 8. The server is killed in the middle of a credit. A credit is given at most once (`on_crash = fail`), so no
    // attempt repeats it: a person has to check it.
    let arguments = json!({ "customer": 9, "cents": 300 });
    let call = alice.call("credit", &arguments, Some("call-3"));
    claims.check("the server is killed while it credits", alice.call_and_kill(&bank, call, "customer 9").await?);
    sleep(LEASE).await;
    let alice = Connection::to(folder, "alice").await?;
    let doubt = alice.call("credit", &arguments, Some("call-3")).await?;
    println!("   in doubt: {}", text(&doubt));
    let told = text(&doubt).starts_with("In doubt") && text(&doubt).contains("Never use another key");
    claims.check("in doubt, the model is told so, and not to try with another key", told);
    claims.check("customer 9 was credited once", bank.books("customer 9") == (1, 1));
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let mut claims = Claims::default();
    if let Some(folder) = env::args_os().nth(1) {
        return claims.exit_code(&serve(Path::new(&folder)).await);
    }
    let folder = env::temp_dir().join(format!("idem-example-{}", std::process::id()));
    let asked = match fs::create_dir_all(&folder) {
        Ok(()) => ask(&mut claims, &folder).await,
        Err(error) => Err(error.into()),
    };
    let _ = fs::remove_dir_all(&folder);
    claims.exit_code(&asked)
}
