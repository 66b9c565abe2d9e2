//! A server and a client of `rmcp` over a pipe: calls that are repeated, cancelled or abandoned, and their answers.
#![allow(clippy::disallowed_methods, reason = "a server that puts a time limit around its tools")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use idem_rmcp::{ToolCalls, ToolError, call_key};
use idem_runtime::{Key, MemoryStore, Policy, Reconciliation, StoreExt as _, current, idempotent};
use rmcp::handler::server::wrapper::Parameters;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResponse, CallToolResult, ClientRequest, ContentBlock,
    InputRequiredResult, ProgressNotificationParam, ProtocolVersion, RequestMetaObject, RequestParamsMeta as _,
    ServerResult,
};
use rmcp::service::{
    ClientLifecycleMode, ClientServiceExt as _, NotificationContext, PeerRequestOptions, RequestContext, RequestHandle,
    RunningService,
};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ClientHandler, ErrorData, RoleClient, RoleServer, ServiceExt as _, schemars, tool, tool_router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

/// Policy under which a run that was cut off leaves the operation in doubt.
const POLICY: Policy = Policy::new(Duration::from_secs(3600)).on_crash(idem_runtime::OnCrash::Fail);
const KEY: &str = "shop.example/idempotency-key";

#[derive(Clone, Debug)]
struct Desk {
    store: MemoryStore,
    calls: ToolCalls,
    /// Number of bodies that have started. Each body waits at `gate` before it goes on.
    bodies: watch::Sender<u32>,
    gate: Arc<Semaphore>,
    bank_is_away: Arc<AtomicU32>,
}

#[derive(Serialize, Deserialize, schemars::JsonSchema)]
struct Refund {
    order: u64,
    cents: u64,
}

#[derive(Serialize, Deserialize)]
struct Refunded {
    cents: u64,
}

#[idempotent(key = "{refund.order}", policy = POLICY, store = desk.store, scope = "refund")]
async fn pay_back(desk: &Desk, refund: &Refund) -> Result<Refunded, ToolError> {
    current()?;
    desk.bodies.send_modify(|bodies| *bodies += 1);
    desk.gate.acquire().await.expect("open").forget();
    match refund.order {
        13 => panic!("order 13"),
        // The user has not confirmed yet.
        14 if *desk.bodies.borrow() == 1 => Err(InputRequiredResult::from_request_state("confirm").into()),
        _ if desk.bank_is_away.load(Ordering::SeqCst) > 0 => {
            desk.bank_is_away.fetch_sub(1, Ordering::SeqCst);
            Err(ToolError::again("The bank does not answer."))
        }
        _ => Ok(Refunded { cents: refund.cents }),
    }
}

#[idempotent(
    key = "{key}", policy = POLICY, store = desk.store, scope = "credit", fingerprint = cents,
    on_error = uncertain, on_crash = reconcile(find_credit(desk, cents))
)]
async fn give(desk: &Desk, key: &str, cents: u64) -> Result<String, ToolError> {
    match cents {
        15 => Err(ToolError::again("The bank does not answer.")),
        _ => Ok(format!("{cents} cents more")),
    }
}

#[allow(clippy::unused_async, reason = "a bank is asked over a network")]
async fn find_credit(desk: &Desk, cents: u64) -> Result<Reconciliation<String>, ToolError> {
    if desk.bank_is_away.load(Ordering::SeqCst) == 0 {
        return Ok(Reconciliation::Done(format!("{cents} cents more, says the bank")));
    }
    desk.bank_is_away.fetch_sub(1, Ordering::SeqCst);
    Ok(Reconciliation::Unknown { ask_again: Duration::from_secs(5) })
}

#[tool_router(server_handler)]
impl Desk {
    #[tool(description = "Refunds an order once.", annotations(idempotent_hint = true, destructive_hint = true))]
    async fn refund(
        &self,
        context: RequestContext<RoleServer>,
        Parameters(call): Parameters<Refund>,
    ) -> Result<CallToolResponse, ErrorData> {
        let desk = self.clone();
        let refunding = async move {
            let refunded = pay_back(&desk, &call).await?;
            if refunded.cents != call.cents {
                return Err(ToolError::answer(format!("Refunded before: {} cents.", refunded.cents)));
            }
            Ok(format!("Refunded {} cents.", call.cents))
        };
        // The time-out is in the server, and outside of the call.
        match call_limit(&context) {
            Some(limit) => tokio::time::timeout(limit, self.calls.run(&context, refunding))
                .await
                .unwrap_or_else(|_| Ok(CallToolResult::error(vec![ContentBlock::text("Too late.")]).into())),
            None => self.calls.run(&context, refunding).await,
        }
    }

    #[tool(description = "Gives a credit for each key.")]
    async fn credit(
        &self,
        context: RequestContext<RoleServer>,
        Parameters(call): Parameters<Refund>,
    ) -> Result<CallToolResponse, ErrorData> {
        let desk = self.clone();
        let key = call_key(&context, KEY).map(str::to_owned);
        self.calls.run(&context, async move { give(&desk, &key?, call.cents).await }).await
    }
}

fn call_limit(context: &RequestContext<RoleServer>) -> Option<Duration> {
    context.meta.0.0.get("test/limit").and_then(Value::as_u64).map(Duration::from_millis)
}

impl Desk {
    fn new() -> Self {
        let bodies = watch::Sender::new(0);
        let gate = Arc::new(Semaphore::new(0));
        Self { store: MemoryStore::new(), calls: ToolCalls::new(), bodies, gate, bank_is_away: Arc::default() }
    }

    async fn started(&self, bodies: u32) {
        self.bodies.subscribe().wait_for(|it| *it == bodies).await.unwrap();
    }

    fn open(&self) {
        self.gate.add_permits(100);
    }

    /// Serves a client over a pipe.
    async fn connect<C: ClientHandler>(
        &self,
        client: C,
    ) -> (RunningService<RoleClient, C>, RunningService<RoleServer, Self>) {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (server, client) = tokio::join!(self.clone().serve(near), client.serve(far));
        (client.unwrap(), server.unwrap())
    }
}

fn request(tool: &'static str, arguments: &Value, meta: &Value) -> CallToolRequestParams {
    let mut call = CallToolRequestParams::new(tool).with_arguments(arguments.as_object().unwrap().clone());
    call.set_meta(RequestMetaObject::from(meta.as_object().unwrap().clone()));
    call
}

fn refund(order: u64, cents: u64) -> CallToolRequestParams {
    request("refund", &json!({ "order": order, "cents": cents }), &json!({}))
}

fn text(result: &CallToolResult) -> &str {
    result.content.first().and_then(ContentBlock::as_text).map_or("", |text| &text.text)
}

async fn answer<C: ClientHandler>(client: &RunningService<RoleClient, C>, call: CallToolRequestParams) -> String {
    let result = client.call_tool(call).await.unwrap();
    format!("{}{}", if result.is_error == Some(true) { "error: " } else { "" }, text(&result))
}

/// Sends a request, and does not wait for its response.
async fn send<C: ClientHandler>(
    client: &RunningService<RoleClient, C>,
    call: CallToolRequestParams,
) -> RequestHandle<RoleClient> {
    let request = ClientRequest::CallToolRequest(CallToolRequest::new(call));
    client.send_cancellable_request(request, PeerRequestOptions::no_options()).await.unwrap()
}

#[tokio::test]
async fn a_repeated_call_gets_the_recorded_result() {
    let desk = Desk::new();
    desk.open();
    let (client, _server) = desk.connect(()).await;
    for _ in 0..3 {
        assert_eq!(answer(&client, refund(1, 500)).await, "Refunded 500 cents.");
    }
    assert_eq!(*desk.bodies.borrow(), 1);
}

#[tokio::test]
async fn a_call_that_is_repeated_while_it_runs_is_told_to_come_again() {
    let desk = Desk::new();
    let (client, _server) = desk.connect(()).await;
    let first = send(&client, refund(1, 500)).await;
    desk.started(1).await;
    let second = answer(&client, refund(1, 500)).await;
    assert!(
        second.starts_with(
            "error: An earlier call for the same operation is still running. Make the same call again in "
        ),
        "{second}"
    );
    assert!(second.contains("Never use another key"), "{second}");
    desk.open();
    let ServerResult::CallToolResult(first) = first.await_response().await.unwrap() else { panic!("no result") };
    assert_eq!(text(&first), "Refunded 500 cents.");
}

#[tokio::test]
async fn a_cancelled_request_lets_the_effect_finish() {
    let desk = Desk::new();
    let (client, _server) = desk.connect(()).await;
    let call = send(&client, refund(1, 500)).await;
    desk.started(1).await;
    call.cancel(Some("the user is impatient".to_owned())).await.unwrap();
    // The server has handled the cancellation once it answers a later request.
    client.list_all_tools().await.unwrap();
    desk.open();
    desk.calls.drain().await;
    assert_eq!(answer(&client, refund(1, 500)).await, "Refunded 500 cents.");
    assert_eq!(*desk.bodies.borrow(), 1);
}

#[tokio::test]
async fn a_time_out_around_the_tool_lets_the_effect_finish() {
    let desk = Desk::new();
    let (client, _server) = desk.connect(()).await;
    let hurried = request("refund", &json!({ "order": 1, "cents": 500 }), &json!({ "test/limit": 10 }));
    let call = send(&client, hurried).await;
    desk.started(1).await;
    let ServerResult::CallToolResult(late) = call.await_response().await.unwrap() else { panic!("no result") };
    assert_eq!(text(&late), "Too late.");
    desk.open();
    desk.calls.drain().await;
    assert_eq!(answer(&client, refund(1, 500)).await, "Refunded 500 cents.");
    assert_eq!(*desk.bodies.borrow(), 1);
}

/// Returns a call over HTTP in the protocol of 2026-07-28, in which each request stands alone.
fn post(id: u32) -> http::Request<Full<Bytes>> {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let params = json!({ "name": "refund", "arguments": { "order": 1, "cents": 500 }, "_meta": meta });
    let call = json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params });
    http::Request::post("http://localhost/mcp")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .header("mcp-protocol-version", "2026-07-28")
        .header("mcp-method", "tools/call")
        .header("mcp-name", "refund")
        .body(Full::from(call.to_string()))
        .unwrap()
}

#[tokio::test]
async fn a_closed_response_stream_lets_the_effect_finish() {
    let desk = Desk::new();
    let shared = desk.clone();
    let server = StreamableHttpService::new(
        move || Ok(shared.clone()),
        Arc::new(LocalSessionManager::default()),
        StreamableHttpServerConfig::default().with_sse_keep_alive(None),
    );
    let first = server.clone();
    let response = tokio::spawn(async move { first.handle(post(1)).await.into_body().collect().await });
    desk.started(1).await;
    response.abort();
    assert!(response.await.unwrap_err().is_cancelled());
    desk.open();
    desk.calls.drain().await;
    let answer = server.handle(post(2)).await.into_body().collect().await.unwrap().to_bytes();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.contains("Refunded 500 cents."), "{answer}");
    assert_eq!(*desk.bodies.borrow(), 1);
}

/// The server gives up its client before the body ends, so only `drain` waits for the body.
#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_amid_a_call_leaves_no_doubt() {
    let desk = Desk::new();
    let (client, server) = desk.connect(()).await;
    let call = send(&client, refund(1, 500)).await;
    desk.started(1).await;
    client.cancel().await.unwrap();
    drop(call);
    server.waiting().await.unwrap();
    let drained = tokio::spawn({
        let calls = desk.calls.clone();
        async move { calls.drain().await }
    });
    tokio::task::yield_now().await;
    assert!(!drained.is_finished());
    desk.open();
    drained.await.unwrap();
    desk.store.flush().await;
    let (client, _server) = desk.connect(()).await;
    assert_eq!(answer(&client, refund(1, 500)).await, "Refunded 500 cents.");
    assert_eq!(*desk.bodies.borrow(), 1);
}

#[tokio::test]
async fn a_try_without_an_effect_does_not_bind_its_arguments() {
    let desk = Desk::new();
    desk.open();
    desk.bank_is_away.store(1, Ordering::SeqCst);
    let (client, _server) = desk.connect(()).await;
    let failed = answer(&client, refund(1, 900)).await;
    assert_eq!(failed, "error: The bank does not answer. Make the same call again, with the same arguments.");
    assert_eq!(answer(&client, refund(1, 500)).await, "Refunded 500 cents.");
    // A call with another amount shows the amount that was paid.
    assert_eq!(answer(&client, refund(1, 900)).await, "error: Refunded before: 500 cents.");
    assert_eq!(*desk.bodies.borrow(), 2);
}

#[tokio::test]
async fn an_operation_in_doubt_is_never_called_again() {
    let desk = Desk::new();
    desk.open();
    let (client, _server) = desk.connect(()).await;
    let doubt = "In doubt: the operation may have been done, or not. ";
    let panicked = answer(&client, refund(13, 500)).await;
    assert!(panicked.starts_with(&format!("error: {doubt}")), "{panicked}");
    let again = answer(&client, refund(13, 500)).await;
    assert!(again.starts_with(&format!("error: {doubt}Do not call again.")), "{again}");
    assert!(!again.contains("13"), "the key is no business of the model: {again}");
    assert_eq!(*desk.bodies.borrow(), 1);
}

#[tokio::test]
async fn a_tool_whose_bank_timed_out_is_called_again_and_asks_the_bank() {
    let desk = Desk::new();
    desk.bank_is_away.store(1, Ordering::SeqCst);
    let (client, _server) = desk.connect(()).await;
    let credit = || request("credit", &json!({ "order": 1, "cents": 15 }), &json!({ KEY: "a" }));
    let timed_out = answer(&client, credit()).await;
    assert_eq!(timed_out, "error: The bank does not answer. Make the same call again, with the same arguments.");
    let unknown = answer(&client, credit()).await;
    let doubt = "error: In doubt: the operation may have been done, or not. Make the same call again in 6 s";
    assert!(unknown.starts_with(doubt), "{unknown}");
    for _ in 0..2 {
        assert_eq!(answer(&client, credit()).await, "15 cents more, says the bank");
    }
}

#[tokio::test]
async fn a_key_of_the_client_names_one_operation() {
    let desk = Desk::new();
    let (client, _server) = desk.connect(()).await;
    let credit = |cents: u64, meta: Value| request("credit", &json!({ "order": 1, "cents": cents }), &meta);
    assert_eq!(answer(&client, credit(5, json!({ KEY: "a" }))).await, "5 cents more");
    let refused = answer(&client, credit(6, json!({ KEY: "a" }))).await;
    assert!(refused.starts_with("error: Nothing was done: an earlier call"), "{refused}");
    assert!(refused.contains("Do not call again."), "{refused}");
    for meta in [json!({}), json!({ KEY: 7 }), json!({ KEY: " " })] {
        let missing = answer(&client, credit(5, meta)).await;
        assert_eq!(missing, format!("error: Nothing was done: the client has to send a key as `{KEY}` in `_meta`."));
    }
    let key = Key::new("credit", "a").unwrap();
    assert!(desk.store.operator().inspect(&key).await.unwrap().is_some());
}

/// A client that notes progress.
#[derive(Clone, Default)]
struct Watcher(watch::Sender<Vec<f64>>);

impl ClientHandler for Watcher {
    async fn on_progress(&self, progress: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        assert!(progress.message.is_some_and(|message| message.starts_with("Still running after ")));
        self.0.send_modify(|seen| seen.push(progress.progress));
    }
}

#[tokio::test]
async fn a_running_call_sends_progress_until_it_ends() {
    let mut desk = Desk::new();
    desk.calls = ToolCalls::new().progress_every(Duration::from_millis(10));
    let watcher = Watcher::default();
    let (client, _server) = desk.connect(watcher.clone()).await;
    let call = send(&client, refund(1, 500)).await;
    watcher.0.subscribe().wait_for(|seen| seen.len() >= 3).await.unwrap();
    desk.open();
    call.await_response().await.unwrap();
    let seen = watcher.0.borrow().clone();
    assert!(seen.windows(2).all(|two| two[0] < two[1]), "{seen:?}");
}

#[tokio::test]
async fn a_request_for_input_is_never_recorded() {
    let desk = Desk::new();
    desk.open();
    let (near, far) = tokio::io::duplex(1 << 16);
    let modern = ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] };
    // Without an `initialize`, the server is set up by the first call.
    let server = desk.clone();
    let _serving = tokio::spawn(async move { server.serve(near).await.unwrap().waiting().await });
    let client = ().serve_with_lifecycle(far, modern).await.unwrap();
    let CallToolResponse::InputRequired(asked) = client.call_tool_once(refund(14, 500)).await.unwrap() else {
        panic!("no request for input");
    };
    assert_eq!(asked.request_state.as_deref(), Some("confirm"));
    assert_eq!(answer(&client, refund(14, 500)).await, "Refunded 500 cents.");
    assert_eq!(answer(&client, refund(14, 500)).await, "Refunded 500 cents.");
    assert_eq!(*desk.bodies.borrow(), 2);
}

#[tokio::test]
async fn a_tool_tells_its_client_that_it_may_be_repeated() {
    let desk = Desk::new();
    let (client, _server) = desk.connect(()).await;
    let tools = client.list_all_tools().await.unwrap();
    let hints = tools.iter().find(|tool| tool.name == "refund").and_then(|tool| tool.annotations.clone()).unwrap();
    assert_eq!((hints.idempotent_hint, hints.destructive_hint), (Some(true), Some(true)));
}
