//! Calls of tools: each in a task of its own, with progress notifications, and an answer for the model.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use idem_runtime::{Outcome, observe};
use rmcp::handler::server::tool::IntoCallToolResult;
use rmcp::model::{CallToolResponse, ProgressNotificationParam};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use tokio::sync::watch;

use crate::error::ToolError;

/// Runs the calls of a server's tools. Clones share the count of running calls.
#[derive(Clone, Debug)]
pub struct ToolCalls {
    running: watch::Sender<usize>,
    progress_every: Duration,
}

impl Default for ToolCalls {
    fn default() -> Self {
        Self::new()
    }
}

impl ToolCalls {
    /// Creates a runner of calls with the default settings.
    pub fn new() -> Self {
        Self { running: watch::Sender::new(0), progress_every: Duration::from_secs(10) }
    }

    /// Sets the time between two progress notifications (default: 10 s). A notification may come up to an eighth of
    /// this time early.
    #[must_use]
    pub fn progress_every(self, every: Duration) -> Self {
        Self { progress_every: every, ..self }
    }

    /// Runs `call` in a task of its own, and returns its answer to the model. `call` calls a function with
    /// `#[idempotent]`.
    ///
    /// A panic of `call` becomes an answer, too. The record keeps the trace of the request's `traceparent`. If the
    /// request has a progress token, the client gets progress notifications from the first wait of the call until the
    /// end of the call, or until the request is cancelled.
    ///
    /// # Errors
    /// If the runtime shuts down while the call runs, or if the value of `call` is itself an error of the protocol.
    ///
    /// # Panics
    /// Outside of a runtime of tokio.
    ///
    /// # Cancel safety
    /// Dropping the future drops the answer. The call goes on, and its result is recorded: the next call gets it.
    pub async fn run<T, F>(&self, context: &RequestContext<RoleServer>, call: F) -> Result<CallToolResponse, ErrorData>
    where
        T: IntoCallToolResult + Send + 'static,
        F: Future<Output = Result<T, ToolError>> + Send + 'static,
    {
        let running = CallCount::of(&self.running);
        let (context, every) = (context.clone(), self.progress_every);
        let task = tokio::spawn(async move {
            let answer = deliver(&context, every, call).await;
            drop(running);
            answer
        });
        match task.await {
            Ok(answer) => answer,
            Err(_) => Err(ErrorData::internal_error(
                "The server ends. Make the same call again, with the same arguments: an operation is not done twice.",
                None,
            )),
        }
    }

    /// Waits until no call runs. Call this function after the service has ended, and before the runtime ends, so that a
    /// client that leaves amid a call leaves no operation in doubt. Then flush the store, for calls that were dropped.
    ///
    /// # Cancel safety
    /// Cancel safe. Put a time limit around this function if a call may hang; the policy's `timeout` is such a limit
    /// for each call.
    pub async fn drain(&self) {
        // `self` holds a sender, so the channel is open.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }
}

/// Counts a call as running until it is dropped.
struct CallCount(watch::Sender<usize>);

impl CallCount {
    fn of(running: &watch::Sender<usize>) -> Self {
        running.send_modify(|running| *running += 1);
        Self(running.clone())
    }
}

impl Drop for CallCount {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

/// Runs `call` as a delivery, with progress notifications, and returns its answer.
async fn deliver<T, F>(
    context: &RequestContext<RoleServer>,
    every: Duration,
    call: F,
) -> Result<CallToolResponse, ErrorData>
where
    T: IntoCallToolResult,
    F: Future<Output = Result<T, ToolError>>,
{
    let trace = context.meta.get_traceparent().and_then(|trace| trace.parse().ok());
    let observed = observe(call).traceparent(trace);
    let (result, outcome): (_, Outcome) = match context.meta.get_progress_token() {
        None => observed.catch_panics().await,
        Some(token) => {
            let (peer, cancelled) = (context.peer.clone(), context.ct.clone());
            let told = observed.on_beat(every, move |beat| {
                let (peer, cancelled, token) = (peer.clone(), cancelled.clone(), token.clone());
                async move {
                    let elapsed = beat.elapsed().as_secs_f64();
                    let progress = ProgressNotificationParam::new(token, elapsed)
                        .with_message(format!("Still running after {elapsed:.0} s."));
                    // The client no longer waits for the answer. The call goes on without notifications.
                    if cancelled.is_cancelled() || peer.notify_progress(progress).await.is_err() {
                        beat.lost();
                    }
                    Ok::<_, fmt::Error>(())
                }
            });
            told.catch_panics().await
        }
    };
    match result {
        Ok(value) => value.into_call_tool_result(),
        Err(error) => Ok(error.into_response(outcome.disposition())),
    }
}

/// Returns the key that the client has sent in `_meta`, as the field `name` (a name with a prefix of your own, such as
/// `shop.example/idempotency-key`: names without a prefix belong to the protocol).
///
/// The client repeats the key when it repeats the call, and never uses one key for two operations. Such a key belongs
/// to its caller: make the caller a part of the stored key.
///
/// # Errors
/// An answer that tells the model that nothing was done, if the field is absent, is not a text, or is blank.
///
/// ```
/// use idem_rmcp::{ToolError, call_key};
/// use rmcp::RoleServer;
/// use rmcp::service::RequestContext;
///
/// fn key_of(caller: &str, context: &RequestContext<RoleServer>) -> Result<(String, String), ToolError> {
///     Ok((caller.to_owned(), call_key(context, "shop.example/idempotency-key")?.to_owned()))
/// }
/// ```
pub fn call_key<'a>(context: &'a RequestContext<RoleServer>, name: &str) -> Result<&'a str, ToolError> {
    let key = context.meta.0.0.get(name).and_then(|key| key.as_str()).filter(|key| !key.trim().is_empty());
    key.ok_or_else(|| {
        ToolError::answer(format!("Nothing was done: the client has to send a key as `{name}` in `_meta`."))
    })
}
