//! A bank that keeps a log of payments, and an MCP client that starts the server of the example `refund_tool`, leaves
//! it and kills it.
#![allow(clippy::disallowed_methods, reason = "a client waits for its server")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rmcp::model::{CallToolRequestParams, CallToolResult, ContentBlock, RequestMetaObject, RequestParamsMeta as _};
use rmcp::service::{RunningService, ServiceError};
use rmcp::{RoleClient, ServiceExt as _};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::time::sleep;

/// Name of the client's key in `_meta`. The name has our own prefix: names without a prefix belong to the protocol.
pub const KEY: &str = "shop.example/idempotency-key";
/// Environment variable with the name of the server's caller.
pub const CALLER: &str = "SHOP_CALLER";

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
    /// If the books can't be written.
    pub async fn pay(&self, what: &str, payment: &str) -> io::Result<()> {
        let mut asked = OpenOptions::new().create(true).append(true).open(self.0.join("asked"))?;
        asked.write_all(format!("{what}\n").as_bytes())?;
        // Each payment is a file. If the file exists already, the bank recognises that the payment is repeated.
        if let Err(error) = File::create_new(self.0.join(format!("paid {what} {}", payment.replace('/', " "))))
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        while self.is_slow() {
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    fn is_slow(&self) -> bool {
        self.0.join("slow").exists()
    }

    /// Makes the bank answer late (`true`) or immediately (`false`).
    ///
    /// # Errors
    /// If the books can't be written.
    pub fn slow(&self, is_slow: bool) -> io::Result<()> {
        if is_slow { File::create(self.0.join("slow")).map(drop) } else { fs::remove_file(self.0.join("slow")) }
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

/// A server process of the example, and the client's connection to this server.
pub struct Connection(Child, RunningService<RoleClient, ()>);

impl Connection {
    /// Starts a server for a caller of a shop.
    ///
    /// # Errors
    /// If the server does not start.
    pub async fn to(folder: &Path, caller: &str) -> Result<Self, Failure> {
        let mut server = Command::new(std::env::current_exe()?);
        server.arg(folder).env(CALLER, caller).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut server = server.spawn()?;
        let pipes = server.stdout.take().zip(server.stdin.take()).ok_or("no pipes")?;
        let client = ().serve(pipes).await?;
        Ok(Self(server, client))
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
        let mut call =
            CallToolRequestParams::new(tool).with_arguments(arguments.as_object().cloned().unwrap_or_default());
        if let Some(key) = key {
            call.set_meta(RequestMetaObject::from(json!({ KEY: key }).as_object().cloned().unwrap_or_default()));
        }
        let client = self.1.peer().clone();
        async move { client.call_tool(call).await }
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
            while bank.books(what).0 == 0 {
                sleep(Duration::from_millis(10)).await;
            }
            self.0.kill().await
        };
        let (reply, killed) = tokio::join!(call, kill);
        killed?;
        bank.slow(false)?;
        Ok(reply.is_err())
    }
}

/// A server's reply to a call.
pub type Reply = Result<CallToolResult, ServiceError>;

/// Returns the text of the reply, which the model reads.
#[must_use]
pub fn text(reply: &CallToolResult) -> &str {
    reply.content.first().and_then(ContentBlock::as_text).map_or("", |text| &text.text)
}
