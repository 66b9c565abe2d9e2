//! A bank that keeps a log of payments, and an MCP client that starts the server of the example `refund_tool`, leaves
//! it and kills it.
#![allow(clippy::disallowed_methods, reason = "a client waits for its server")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResult, ClientRequest, ContentBlock, ProgressNotificationParam,
    RequestMetaObject, RequestParamsMeta as _,
};
use rmcp::service::{NotificationContext, PeerRequestOptions, RequestHandle, RunningService, ServiceError};
use rmcp::{ClientHandler, RoleClient, ServiceExt as _};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::sleep;

/// Name of the client's key in `_meta`. The name has our own prefix: names without a prefix belong to the protocol.
pub const KEY: &str = "shop.example/idempotency-key";
/// Environment variable with the name of the server's caller.
pub const CALLER: &str = "SHOP_CALLER";
/// Environment variable with the name of the caller's shop.
pub const TENANT: &str = "SHOP_TENANT";

/// Error after which the example can't go on.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A bank that pays once for each key, and remembers payments as files in a folder (its books).
#[derive(Clone)]
pub struct Bank(PathBuf);

impl Bank {
    /// Opens a bank whose books are in this folder.
    #[must_use]
    pub fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// Pays once for each `payment` key. Returns the amount that was paid for that key.
    ///
    /// # Errors
    /// If the bank is away, and has paid nothing, or if the books can't be written.
    pub async fn pay(&self, what: &str, cents: u64, payment: &str) -> io::Result<u64> {
        let mut asked = OpenOptions::new().create(true).append(true).open(self.0.join("asked"))?;
        asked.write_all(format!("{what}\n").as_bytes())?;
        if self.is_set("away") {
            return Err(io::Error::other("it is closed"));
        }
        // Each payment is a file with its amount. If the file exists already, the bank recognises that the payment is
        // repeated. The link makes the file appear together with its amount, so a killed process leaves no file without
        // an amount.
        let paid = self.0.join(format!("paid {what} {}", payment.replace('/', " ")));
        let draft = self.0.join(format!("draft {} {}", std::process::id(), payment.replace('/', " ")));
        fs::write(&draft, cents.to_string())?;
        if let Err(error) = fs::hard_link(&draft, &paid)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        while self.is_set("slow") {
            sleep(Duration::from_millis(10)).await;
        }
        fs::read_to_string(paid)?.parse().map_err(io::Error::other)
    }

    fn is_set(&self, switch: &str) -> bool {
        self.0.join(switch).exists()
    }

    fn set(&self, switch: &str, is_on: bool) -> io::Result<()> {
        if is_on { File::create(self.0.join(switch)).map(drop) } else { fs::remove_file(self.0.join(switch)) }
    }

    /// Makes the bank answer late (`true`) or immediately (`false`).
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn slow(&self, is_slow: bool) -> io::Result<()> {
        self.set("slow", is_slow)
    }

    /// Makes the bank refuse every payment (`true`), or accept payments again (`false`).
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn away(&self, is_away: bool) -> io::Result<()> {
        self.set("away", is_away)
    }

    /// Waits until the bank has been asked for `what`.
    pub async fn asked_for(&self, what: &str) {
        while self.books(what).0 == 0 {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Returns how many requests to pay `what` the bank has received, and how many payments it has made.
    #[must_use]
    pub fn books(&self, what: &str) -> (usize, usize) {
        let asked = fs::read_to_string(self.0.join("asked")).unwrap_or_default();
        let names = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|file| file.file_name());
        let paid = names.filter(|name| name.to_string_lossy().starts_with(&format!("paid {what} "))).count();
        (asked.lines().filter(|line| *line == what).count(), paid)
    }
}

/// A client that counts notifications of progress.
#[derive(Clone, Default)]
struct Progress(watch::Sender<usize>);

impl ClientHandler for Progress {
    async fn on_progress(&self, _: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        self.0.send_modify(|count| *count += 1);
    }
}

/// A server process of the example, and the client's connection to this server.
pub struct Connection {
    server: Child,
    client: RunningService<RoleClient, Progress>,
    progress: Progress,
}

impl Connection {
    /// Starts a server for a caller of a shop.
    ///
    /// # Errors
    /// If the server does not start.
    pub async fn to(folder: &Path, tenant: &str, caller: &str) -> Result<Self, Failure> {
        let mut server = Command::new(std::env::current_exe()?);
        server.arg(folder).env(TENANT, tenant).env(CALLER, caller);
        server.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut server = server.spawn()?;
        let pipes = server.stdout.take().zip(server.stdin.take()).ok_or("no pipes")?;
        let progress = Progress::default();
        let client = progress.clone().serve(pipes).await?;
        Ok(Self { server, client, progress })
    }

    /// Calls a tool, with the client's key in `_meta`.
    ///
    /// # Errors
    /// If the connection is lost, or the server refuses the call.
    pub fn call(
        &self,
        tool: &'static str,
        arguments: &Value,
        key: Option<&str>,
    ) -> impl Future<Output = Reply> + use<> {
        let call = request(tool, arguments, key);
        let client = self.client.peer().clone();
        async move { client.call_tool(call).await }
    }

    /// Calls a tool, and does not wait for its reply.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn start(
        &self,
        tool: &'static str,
        arguments: &Value,
        key: Option<&str>,
    ) -> Result<RequestHandle<RoleClient>, ServiceError> {
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(request(tool, arguments, key)));
        self.client.send_cancellable_request(request, PeerRequestOptions::no_options()).await
    }

    /// Repeats a call of a tool until the reply shows that no earlier call runs.
    ///
    /// # Errors
    /// If the connection is lost, or the server refuses the call.
    pub async fn finished(&self, tool: &'static str, arguments: &Value, key: Option<&str>) -> Reply {
        loop {
            let reply = self.call(tool, arguments, key).await?;
            if !text(&reply).contains("still running") {
                return Ok(reply);
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the hints of a tool: idempotent, destructive.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn hints(&self, tool: &str) -> Result<Option<(bool, bool)>, ServiceError> {
        let tools = self.client.list_all_tools().await?;
        let annotations = tools.into_iter().find(|it| it.name == tool).and_then(|it| it.annotations);
        Ok(annotations.and_then(|it| it.idempotent_hint.zip(it.destructive_hint)))
    }

    /// Waits for a notification of progress.
    pub async fn progress(&self) {
        let mut seen = self.progress.0.subscribe();
        let _ = seen.wait_for(|count| *count > 0).await;
    }

    /// Closes the connection, and waits for the end of the server.
    ///
    /// # Errors
    /// If the server ends with an error.
    pub async fn leave(mut self) -> Result<(), Failure> {
        self.client.cancel().await?;
        let status = self.server.wait().await?;
        if status.success() { Ok(()) } else { Err(format!("the server did not end well: {status}").into()) }
    }

    /// Makes a call, and kills the server (SIGKILL) once the bank has been asked for `what`. Returns whether the call
    /// failed.
    ///
    /// # Errors
    /// If the server can't be killed.
    pub async fn call_and_kill(
        mut self,
        bank: &Bank,
        call: impl Future<Output = Reply>,
        what: &str,
    ) -> Result<bool, Failure> {
        bank.slow(true)?;
        let kill = async {
            bank.asked_for(what).await;
            // The bank makes the payment after it has noted the request.
            while bank.books(what).1 == 0 {
                sleep(Duration::from_millis(10)).await;
            }
            self.server.kill().await
        };
        let (reply, killed) = tokio::join!(call, kill);
        killed?;
        bank.slow(false)?;
        Ok(reply.is_err())
    }
}

fn request(tool: &'static str, arguments: &Value, key: Option<&str>) -> CallToolRequestParams {
    let mut call = CallToolRequestParams::new(tool).with_arguments(arguments.as_object().cloned().unwrap_or_default());
    if let Some(key) = key {
        call.set_meta(RequestMetaObject::from(json!({ KEY: key }).as_object().cloned().unwrap_or_default()));
    }
    call
}

/// A server's reply to a call.
pub type Reply = Result<CallToolResult, ServiceError>;

/// Returns the text of the reply, which the model reads.
#[must_use]
pub fn text(reply: &CallToolResult) -> &str {
    reply.content.first().and_then(ContentBlock::as_text).map_or("", |text| &text.text)
}
