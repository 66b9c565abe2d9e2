//! Idempotent tools for MCP servers of `rmcp` 3: an effect happens once, however often a model calls.
//!
//! A model that gets no answer calls again, with another id, over another connection, or with other arguments.
//! `#[idempotent]` on the function behind a tool runs its body once for each key. [`ToolCalls`] runs the call of that
//! function for a request:
//!
//! - *The effect finishes.* The call runs in a task of its own. A cancelled request (`notifications/cancelled`, or a
//!   closed response stream in the protocol of 2026-07-28), a client that leaves and a time-out around the tool end
//!   only the answer. [`ToolCalls::drain`] waits for running calls before the server ends.
//! - *The answer names the next step*: make the same call again after some seconds, or do not call again. A model that
//!   reads only "failed" tries another amount, another order or another key.
//! - *Progress*: while a call runs, the client gets a progress notification every 10 s, if it has sent a progress
//!   token.
//! - *Nothing but a result is recorded*: an error frees the key, and so does [`ToolError::InputRequired`], unless the
//!   function has `on_error = uncertain`.
//!
//! ```
//! use std::time::Duration;
//!
//! use idem_rmcp::{ToolCalls, ToolError};
//! use idem_runtime::{MemoryStore, Policy, current, idempotent};
//! use rmcp::handler::server::wrapper::Parameters;
//! use rmcp::model::CallToolResponse;
//! use rmcp::service::RequestContext;
//! use rmcp::{ErrorData, RoleServer, schemars, tool, tool_router};
//! use serde::{Deserialize, Serialize};
//!
//! const MONEY: Policy = Policy::new(Duration::from_secs(90 * 86_400));
//!
//! #[derive(Clone)]
//! struct Desk {
//!     tenant: String,
//!     store: MemoryStore,
//!     calls: ToolCalls,
//! }
//!
//! #[derive(Deserialize, schemars::JsonSchema)]
//! struct Refund {
//!     order: u64,
//!     cents: u64,
//! }
//!
//! #[derive(Serialize, Deserialize)]
//! struct Refunded {
//!     cents: u64,
//! }
//!
//! #[idempotent(key = "{desk.tenant}:{refund.order}", policy = MONEY, store = desk.store)]
//! async fn pay_back(desk: &Desk, refund: &Refund) -> Result<Refunded, ToolError> {
//!     let payment = current()?.child_key("refund");
//! #   let _ = payment;
//!     // The bank recognises a repeated payment by its key, and answers with the amount that it has paid for that key.
//!     Ok(Refunded { cents: refund.cents })
//! }
//!
//! #[tool_router(server_handler)]
//! impl Desk {
//!     #[tool(description = "Refunds an order once.", annotations(idempotent_hint = true, destructive_hint = true))]
//!     async fn refund(
//!         &self,
//!         context: RequestContext<RoleServer>,
//!         Parameters(call): Parameters<Refund>,
//!     ) -> Result<CallToolResponse, ErrorData> {
//!         let desk = self.clone();
//!         let refunding = async move {
//!             let refunded = pay_back(&desk, &call).await?;
//!             if refunded.cents != call.cents {
//!                 let text = format!("Order {} was refunded before: {} cents.", call.order, refunded.cents);
//!                 return Err(ToolError::answer(text));
//!             }
//!             Ok(format!("Refunded {} cents of order {}.", call.cents, call.order))
//!         };
//!         self.calls.run(&context, refunding).await
//!     }
//! }
//!
//! # async fn serve(desk: Desk) -> Result<(), Box<dyn std::error::Error>> {
//! # use idem_runtime::StoreExt as _;
//! # use rmcp::ServiceExt as _;
//! # let transport = tokio::io::duplex(1).0;
//! let (calls, store) = (desk.calls.clone(), desk.store.clone());
//! desk.serve(transport).await?.waiting().await?;
//! calls.drain().await;
//! store.flush().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Keys
//! The key is the tenant and the id of the operation in the business, such as the order. The caller is no part of such
//! a key: two agents of one shop refund an order once. The request's id is never a key, because every attempt has
//! another id. If two equal calls can be two operations, the client sends a key: [`call_key`]. Such a key belongs to
//! its caller, so the caller is a part of the stored key. The name in `clientInfo` is unverified, and identifies no
//! caller.
//!
//! # Arguments that change
//! A fingerprint of all arguments stays in the record after a try that failed without an effect, so a model that
//! corrects the amount would be refused. Without a fingerprint, compare the recorded result with the arguments, as
//! above. A try that died after the effect is repeated with the same key downstream ([`Attempt::child_key`]), so the
//! result must hold what the downstream system has done, and not the arguments of the latest call. Check arguments that
//! can't succeed before the idempotent call.
//!
//! # Unknown outcomes
//! A bank that does not answer in time may have paid. Give such an error `on_error = uncertain`, and let `on_crash =
//! reconcile(…)` ask the bank: the next call runs no body before the bank has answered; see [`Reconciliation`]. Until
//! the bank knows the outcome, the answer asks the model to make the same call later.
//!
//! # Input from the user
//! A tool that has to ask the user returns [`ToolError::InputRequired`], best before the idempotent call: inside of
//! that call, each round counts as an attempt for `max_attempts`.
//!
//! [`Attempt::child_key`]: idem_runtime::Attempt::child_key
//! [`Reconciliation`]: idem_runtime::Reconciliation

mod calls;
mod error;

pub use self::calls::{ToolCalls, call_key};
pub use self::error::ToolError;

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;
