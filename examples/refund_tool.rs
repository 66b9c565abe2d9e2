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

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs, io};

use idem_examples::Claims;
use idem_examples::agent::{Bank, CALLER, Connection, Failure, KEY, TENANT, text};
use idem_rmcp::{ToolCalls, ToolError, call_key};
use idem_runtime::{Policy, SqliteStore, StoreExt as _, current, idempotent};
use rmcp::handler::server::wrapper::Parameters;
use rmcp::model::{CallToolResponse, ServerCapabilities, ServerConfig};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt as _, schemars, tool, tool_handler, tool_router};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(2);
const MONEY: Policy = Policy::new(Duration::from_secs(90 * 86_400)).lease(LEASE);
/// Time that is longer than `rmcp` waits for running calls when a client leaves.
const PATIENCE_OF_RMCP: Duration = Duration::from_secs(6);

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

/// Payment that the bank has made.
#[derive(Serialize, Deserialize)]
struct Paid {
    cents: u64,
}

/// Refunds each order of a tenant once: the bank recognises the key of the payment, even after a crash.
#[idempotent(key = "{desk.tenant}:{refund.order}", policy = MONEY, store = desk.store)]
async fn pay_back(desk: &Desk, refund: &Refund) -> Result<Paid, ToolError> {
    let payment = current()?.child_key("refund");
    let paid = desk.bank.pay(&format!("{} order {}", desk.tenant, refund.order), refund.cents, &payment).await;
    // If an earlier try has paid before its server was killed, the bank answers with the amount that it paid then.
    Ok(Paid { cents: paid.map_err(|error| no_answer(&error))? })
}

/// Gives one credit for each key of a caller. The ledger of credits has no keys: after a crash a person has to check
/// it.
#[idempotent(key = "{desk.tenant}:{desk.caller}:{key}", policy = MONEY, store = desk.store, on_crash = fail)]
async fn give_credit(desk: &Desk, key: &str, credit: &Credit) -> Result<Paid, ToolError> {
    let payment = current()?.child_key("credit");
    let paid = desk.bank.pay(&format!("{} customer {}", desk.tenant, credit.customer), credit.cents, &payment).await;
    Ok(Paid { cents: paid.map_err(|error| no_answer(&error))? })
}

fn no_answer(error: &io::Error) -> ToolError {
    ToolError::again(format!("The bank does not answer ({error})."))
}

/// Returns the answer to a call that asked for `cents`.
fn answer(paid: &Paid, cents: u64, done: String) -> Result<String, ToolError> {
    match paid.cents == cents {
        true => Ok(done),
        false => Err(ToolError::answer(format!(
            "Nothing was paid now: {} cents were paid before. Do not call again. Tell the user.",
            paid.cents
        ))),
    }
}

#[derive(Clone)]
struct Desk {
    tenant: String,
    caller: String,
    store: SqliteStore,
    bank: Bank,
    calls: ToolCalls,
}

#[tool_router]
impl Desk {
    #[tool(
        description = "Refunds an order. Calling it again is safe: an order is refunded once.",
        annotations(idempotent_hint = true, destructive_hint = true)
    )]
    async fn refund(
        &self,
        context: RequestContext<RoleServer>,
        Parameters(call): Parameters<Refund>,
    ) -> Result<CallToolResponse, ErrorData> {
        let desk = self.clone();
        let refunding = async move {
            // This check comes before the idempotent call, so a refund that can't succeed leaves no record.
            if call.cents == 0 {
                return Err(ToolError::answer("Nothing was paid: the amount is zero."));
            }
            let paid = pay_back(&desk, &call).await?;
            answer(&paid, call.cents, format!("Refunded {} cents of order {}.", call.cents, call.order))
        };
        self.calls.run(&context, refunding).await
    }

    #[tool(
        description = "Gives a customer a credit. Repeat a call that was not answered with the same key in `_meta`.",
        annotations(idempotent_hint = false, destructive_hint = true)
    )]
    async fn credit(
        &self,
        context: RequestContext<RoleServer>,
        Parameters(call): Parameters<Credit>,
    ) -> Result<CallToolResponse, ErrorData> {
        let desk = self.clone();
        let key = call_key(&context, KEY).map(str::to_owned);
        let giving = async move {
            let paid = give_credit(&desk, &key?, &call).await?;
            answer(&paid, call.cents, format!("Customer {} has {} cents more.", call.customer, call.cents))
        };
        self.calls.run(&context, giving).await
    }
}

#[tool_handler]
impl ServerHandler for Desk {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }
}

async fn serve(folder: &Path) -> Result<(), Failure> {
    let store = SqliteStore::open(folder.join("idem.db")).await?;
    let calls = ToolCalls::new().progress_every(Duration::from_millis(200));
    let (tenant, caller) = (env::var(TENANT)?, env::var(CALLER)?);
    let desk = Desk { tenant, caller, store: store.clone(), bank: Bank::at(folder), calls: calls.clone() };
    // A client closes the pipe to end its server, and sends SIGTERM if the server does not end.
    let mut terminate = signal(SignalKind::terminate())?;
    let server = desk.serve(rmcp::transport::stdio()).await?;
    let end = server.cancellation_token();
    tokio::select! {
        ended = server.waiting() => drop(ended?),
        _ = terminate.recv() => end.cancel(),
    }
    // The client is gone. Running calls still finish, so that no operation is left in doubt.
    calls.drain().await;
    store.flush().await;
    Ok(())
}

/// Makes the calls that an MCP client makes for its model.
async fn ask(claims: &mut Claims, folder: &Path) -> Result<(), Failure> {
    let bank = Bank::at(folder);
    let alice = Connection::to(folder, "shop", "alice").await?;
    let hints = alice.hints("refund").await?;
    claims.check("the refund tool says that calls may be repeated, and that it pays", hints == Some((true, true)));

    // 1. The model repeats a call, and then changes its arguments.
    let arguments = json!({ "order": 1, "cents": 500 });
    let first = alice.call("refund", &arguments, None).await?;
    let second = alice.call("refund", &arguments, None).await?;
    claims.check("a call that is repeated is answered alike", first == second && text(&first).starts_with("Refunded"));
    let other = alice.call("refund", &json!({ "order": 1, "cents": 900 }), None).await?;
    let refused = other.is_error == Some(true) && text(&other).contains("500 cents were paid before");
    claims.check("the same refund with another amount pays nothing, and shows what was paid", refused);
    let bob = Connection::to(folder, "shop", "bob").await?;
    let again = bob.call("refund", &arguments, None).await?;
    claims.check("another agent of the shop gets the same answer", again == first);
    claims.check("order 1 was refunded once, by one body", bank.books("shop order 1") == (1, 1));
    let elsewhere = Connection::to(folder, "kiosk", "alice").await?;
    elsewhere.call("refund", &arguments, None).await?;
    claims.check("order 1 of another shop is another order", bank.books("kiosk order 1") == (1, 1));

    // 2. A try that fails without an effect does not fix the amount.
    bank.away(true)?;
    let failed = alice.call("refund", &json!({ "order": 4, "cents": 900 }), None).await?;
    bank.away(false)?;
    claims.check("a bank that is away is an error", text(&failed).starts_with("The bank does not answer"));
    let corrected = alice.call("refund", &json!({ "order": 4, "cents": 400 }), None).await?;
    claims.check("then the amount can be corrected", text(&corrected).starts_with("Refunded 400"));
    claims.check("order 4 was refunded once", bank.books("shop order 4").1 == 1);

    // 3. The model repeats a call while its first call still runs.
    bank.slow(true)?;
    let arguments = json!({ "order": 2, "cents": 500 });
    let running = tokio::spawn(alice.call("refund", &arguments, None));
    bank.asked_for("shop order 2").await;
    let again = alice.call("refund", &arguments, None).await?;
    println!("   while it runs: {}", text(&again));
    let told = again.is_error == Some(true) && text(&again).contains("same call again");
    claims.check("while it runs, the model is told to make the same call again", told);
    alice.progress().await;
    claims.check("while it runs, the client sees progress", true);
    bank.slow(false)?;
    claims.check("the first call gets its result", text(&running.await??).starts_with("Refunded"));

    // 4. The user cancels a call whose refund has begun.
    bank.slow(true)?;
    let arguments = json!({ "order": 5, "cents": 500 });
    let call = alice.start("refund", &arguments, None).await?;
    bank.asked_for("shop order 5").await;
    call.cancel(Some("the user has cancelled".to_owned())).await?;
    bank.slow(false)?;
    let after = alice.finished("refund", &arguments, None).await?;
    claims
        .check("a cancelled call has still refunded, and its repetition says so", text(&after).starts_with("Refunded"));
    claims.check("order 5 was refunded once, by one body", bank.books("shop order 5") == (1, 1));

    // 5. The client leaves in the middle of a credit, which is given at most once.
    bank.slow(true)?;
    let arguments = json!({ "customer": 6, "cents": 300 });
    let _call = bob.start("credit", &arguments, Some("call-1")).await?;
    bank.asked_for("shop customer 6").await;
    let leaving = tokio::spawn(bob.leave());
    sleep(PATIENCE_OF_RMCP).await;
    bank.slow(false)?;
    leaving.await??;
    let bob = Connection::to(folder, "shop", "bob").await?;
    let given = bob.call("credit", &arguments, Some("call-1")).await?;
    claims.check("a client that leaves leaves no credit in doubt", text(&given).starts_with("Customer 6 has 300"));
    claims.check("customer 6 was credited once", bank.books("shop customer 6") == (1, 1));

    // 6. The server is killed in the middle of a refund, and another one takes over.
    let arguments = json!({ "order": 3, "cents": 500 });
    let call = alice.call("refund", &arguments, None);
    claims.check("the server is killed while it refunds", alice.call_and_kill(&bank, call, "shop order 3").await?);
    let alice = Connection::to(folder, "shop", "alice").await?;
    let waits = alice.call("refund", &arguments, None).await?;
    claims.check("the next one waits for the lease of the dead", text(&waits).starts_with("An earlier call"));
    sleep(LEASE).await;
    // The model now asks for another amount. The bank answers with the amount that it has paid.
    let other = alice.call("refund", &json!({ "order": 3, "cents": 900 }), None).await?;
    claims.check("then it tells what was paid", text(&other).contains("500 cents were paid before"));
    let done = alice.call("refund", &arguments, None).await?;
    claims.check("and the same call gets its result", text(&done).starts_with("Refunded"));
    claims.check("order 3 was refunded once, although the bank was asked twice", bank.books("shop order 3") == (2, 1));

    // 7. Credits: the arguments do not identify the operation, so each credit needs a key.
    let arguments = json!({ "customer": 7, "cents": 300 });
    let without = alice.call("credit", &arguments, None).await?;
    claims.check("a credit without a key is refused", without.is_error == Some(true));
    for key in ["call-1", "call-1", "call-2"] {
        alice.call("credit", &arguments, Some(key)).await?;
    }
    claims.check("two keys are two credits, and one key is one", bank.books("shop customer 7") == (2, 2));
    bob.call("credit", &json!({ "customer": 8, "cents": 300 }), Some("call-2")).await?;
    claims.check("another caller's key is another operation", bank.books("shop customer 8") == (1, 1));

    // 8. The server is killed in the middle of a credit. A credit is given at most once (`on_crash = fail`), so no
    // attempt repeats it: a person has to check it.
    let arguments = json!({ "customer": 9, "cents": 300 });
    let call = alice.call("credit", &arguments, Some("call-3"));
    claims.check("the server is killed while it credits", alice.call_and_kill(&bank, call, "shop customer 9").await?);
    sleep(LEASE).await;
    let alice = Connection::to(folder, "shop", "alice").await?;
    let doubt = alice.call("credit", &arguments, Some("call-3")).await?;
    println!("   in doubt: {}", text(&doubt));
    let told = text(&doubt).starts_with("In doubt") && text(&doubt).contains("Never use another key");
    claims.check("in doubt, the model is told so, and not to try with another key", told);
    claims.check("customer 9 was credited once", bank.books("shop customer 9") == (1, 1));
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let mut claims = Claims::default();
    if let Some(folder) = env::args_os().nth(1) {
        let served = serve(Path::new(&folder)).await;
        if let Err(error) = &served {
            eprintln!("server {}: {error}", std::process::id());
        }
        // A return would wait for the thread that reads the client's pipe, so the process exits here.
        std::process::exit(i32::from(served.is_err()));
    }
    let folder = env::temp_dir().join(format!("idem-example-{}", std::process::id()));
    let asked = match fs::create_dir_all(&folder) {
        Ok(()) => ask(&mut claims, &folder).await,
        Err(error) => Err(error.into()),
    };
    let _ = fs::remove_dir_all(&folder);
    claims.exit_code(&asked)
}
