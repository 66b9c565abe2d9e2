//! DynamoDB in tests: two emulators, and an HTTP client that counts requests and can answer instead of the emulator.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::http::{HttpRequest, HttpResponse};
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::{
    BehaviorVersion, Config, Credentials, HttpClient, Region, RuntimeComponents, StalledStreamProtectionConfig,
};
use aws_sdk_dynamodb::error::{BoxError, ConnectorError};
use aws_sdk_dynamodb::types::AttributeValue;
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use idem_runtime::conformance::Subject;
use idem_runtime::dynamodb::DynamoOptions;
use idem_runtime::{DynamoStore, Key, StoreErrorKind};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::server::{Env, forever, free_port, keep, signal};

/// Table that tests use.
pub const TABLE: &str = "idempotency";
/// Largest difference between the clocks of two processes of one machine, with a reserve.
pub const SKEW: Duration = Duration::from_millis(5);

/// Kind of emulator. An environment variable names its program; `scripts/test` sets these variables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The emulator dynoxide; `IDEM_TEST_DYNOXIDE` is the path of the program.
    Dynoxide,
    /// The emulator ministack; `IDEM_TEST_MINISTACK` is the path of the program.
    Ministack,
}

impl Kind {
    fn program(self) -> PathBuf {
        let variable = match self {
            Self::Dynoxide => "IDEM_TEST_DYNOXIDE",
            Self::Ministack => "IDEM_TEST_MINISTACK",
        };
        let program = std::env::var_os(variable);
        program.unwrap_or_else(|| panic!("`{variable}` names no emulator; run ./scripts/test")).into()
    }

    /// Endpoint of the emulator that the whole test process shares. The emulator has the table of records.
    pub fn shared(self) -> String {
        static EMULATORS: OnceLock<Mutex<Vec<(Kind, String)>>> = OnceLock::new();
        let mut emulators = EMULATORS.get_or_init(Mutex::default).lock().unwrap();
        if let Some((_, endpoint)) = emulators.iter().find(|(kind, _)| *kind == self) {
            return endpoint.clone();
        }
        let endpoint = forever(move || {
            let emulator = Emulator::start(self);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(emulator.ensure_table());
            keep(emulator, Emulator::endpoint)
        });
        emulators.push((self, endpoint.clone()));
        endpoint
    }

    /// Stores for the conformance suite: one on the shared emulator, and a second handle as another process would open
    /// it.
    #[expect(clippy::unused_async, reason = "as for every other store")]
    pub async fn subject(self) -> Subject {
        let endpoint = self.shared();
        let nobody = client(&Wire::to("http://127.0.0.1:1"));
        let raw = client(&Wire::to(&endpoint));
        let spoil = move |key: Key| {
            let raw = raw.clone();
            async move {
                let request = raw.put_item().table_name(TABLE).item("key", AttributeValue::S(key.as_str().to_owned()));
                request.item("hello", AttributeValue::S(crate::nonsense())).send().await.expect("puts");
            }
        };
        Subject::new(open(&endpoint, TABLE))
            .peer(open(&endpoint, TABLE))
            .unreachable(DynamoStore::new(nobody, TABLE))
            .spoil(spoil)
            .largest_result(400_000)
            // The emulators are compiled without optimisation, and serve one request at a time.
            .patience(Duration::from_secs(200))
    }
}

/// Store with a small allowed clock skew, for processes of one machine: a takeover comes a moment after the lapse.
pub fn open(endpoint: &str, table: &str) -> DynamoStore {
    options().build(client(&Wire::to(endpoint)), table)
}

/// Options with a small allowed clock skew, for processes of one machine.
pub fn options() -> DynamoOptions {
    DynamoStore::options().max_clock_skew(SKEW).response_timeout(Duration::from_secs(60))
}

/// Reports whether an HTTP server answers on this port. A program may listen before it answers.
fn answers(port: u16) -> bool {
    let ask = || -> io::Result<bool> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut start = [0; 5];
        stream.read_exact(&mut start)?;
        Ok(&start == b"HTTP/")
    };
    ask().unwrap_or(false)
}

/// Emulator process; killed when dropped.
#[derive(Debug)]
pub struct Emulator {
    kind: Kind,
    port: u16,
    folder: PathBuf,
    durable: bool,
    env: Env,
    child: Option<Child>,
}

impl Emulator {
    /// Starts an emulator that has no table yet, and keeps tables in memory.
    pub fn start(kind: Kind) -> Self {
        Self::start_with(kind, false, &Vec::new())
    }

    /// Starts a dynoxide that keeps its tables on disk, and creates the table of records.
    pub async fn durable() -> Self {
        Self::durable_in(&Vec::new()).await
    }

    /// Starts a dynoxide on disk with this environment, and creates the table of records.
    pub async fn durable_in(env: &Env) -> Self {
        let emulator = Self::start_with(Kind::Dynoxide, true, env);
        emulator.ensure_table().await;
        emulator
    }

    fn start_with(kind: Kind, durable: bool, env: &Env) -> Self {
        let port = free_port();
        let folder = std::env::temp_dir().join(format!("idem-test-dynamo-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the emulator");
        let mut emulator = Self { kind, port, folder, durable, env: env.clone(), child: None };
        emulator.run();
        emulator
    }

    /// Starts an emulator that keeps tables in memory, and creates the table of records.
    pub async fn with_table(kind: Kind) -> Self {
        let emulator = Self::start(kind);
        emulator.ensure_table().await;
        emulator
    }

    /// Port of the emulator.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// URL at which the emulator listens.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Creates the table unless it exists. Repeats failed requests: a new emulator may reset its first connections.
    pub async fn ensure_table(&self) {
        let store = open(&self.endpoint(), TABLE);
        let mut tries = 20;
        loop {
            match store.ensure_table().await {
                Err(error) if error.kind() == StoreErrorKind::Unavailable && tries > 0 => tries -= 1,
                done => return done.expect("creates the table"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Starts the process, also after a kill, and waits until the emulator answers.
    pub fn run(&mut self) {
        let program = self.kind.program();
        // `setpriv` has the kernel kill the emulator if this process dies first.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(&program).current_dir(&self.folder).envs(self.env.iter().cloned());
        match self.kind {
            Kind::Dynoxide => {
                command.args(["--port", &self.port.to_string()]);
                match self.durable {
                    true => command.arg("--db-path").arg(self.folder.join("dynoxide.db")),
                    false => &mut command,
                }
            }
            Kind::Ministack => command.env("BIND_HOST", "127.0.0.1").env("GATEWAY_PORT", self.port.to_string()),
        };
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child =
            child.unwrap_or_else(|error| panic!("{} can't be started: {error}; run ./scripts/test", program.display()));
        self.child = Some(child);
        for _ in 0..3000 {
            // If the emulator has ended, an answer would come from another process that has taken its port.
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "{} ended at once on port {}: {ended:?}", program.display(), self.port);
            if answers(self.port) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} does not answer on port {}", program.display(), self.port);
    }

    /// Kills the process (`kill -9`).
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Stops or continues the process.
    pub fn signal(&self, how: &str) {
        assert!(signal(self.child.as_ref().expect("running").id(), how), "the process has ended");
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Returns the size of the largest item of [`TABLE`] in bytes, by the rules of DynamoDB's bill: the names of the
/// attributes count, and a number has a byte for two digits, and one more.
pub async fn largest_item(emulator: &Emulator) -> usize {
    let wire = Wire::to(&emulator.endpoint());
    let page = client(&wire).scan().table_name(TABLE).send().await.expect("answers");
    let size = |value: &AttributeValue| match value {
        AttributeValue::S(text) => text.len(),
        AttributeValue::N(digits) => digits.len() / 2 + 1,
        AttributeValue::B(bytes) => bytes.as_ref().len(),
        _ => 1,
    };
    let item = |item: &HashMap<String, AttributeValue>| item.iter().map(|(name, value)| name.len() + size(value)).sum();
    page.items().iter().map(item).max().expect("an item")
}

/// Client that sends each request over `wire` once.
pub fn client(wire: &Wire) -> Client {
    client_with(wire, RetryConfig::disabled())
}

/// Client that sends its requests over `wire`, and repeats them as `retries` says.
pub fn client_with(wire: &Wire, retries: RetryConfig) -> Client {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .region(Region::new("eu-central-1"))
        .endpoint_url(wire.0.endpoint.clone())
        .retry_config(retries)
        // With this protection off, only the store's own time limit ends a stalled request.
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .http_client(wire.clone());
    Client::from_conf(config.build())
}

/// Treatment of a request, for the script of a [`Wire`].
#[derive(Clone, Debug)]
pub enum Reply {
    /// The client gets the emulator's answer.
    Pass,
    /// The client gets this status and body, and the emulator never gets the request.
    Instead(u16, String),
    /// The emulator executes the request, but the client gets this status and body.
    After(u16, String),
    /// The emulator executes the request, and the connection breaks before the answer arrives.
    Lost,
    /// The emulator executes the request, and no answer ever comes.
    Silence,
    /// The emulator executes the request once the semaphore has a permit.
    Once(Arc<Semaphore>),
}

impl Reply {
    /// Refusal in DynamoDB's format, which the client gets instead of an answer of the emulator.
    pub fn error(status: u16, code: &str) -> Self {
        let body = format!("{{\"__type\":\"com.amazonaws.dynamodb.v20120810#{code}\",\"message\":\"as scripted\"}}");
        Self::Instead(status, body)
    }
}

/// Idle connections, and the id of the process that made them.
#[derive(Default)]
struct Idle {
    process: u32,
    connections: Vec<BufReader<TcpStream>>,
}

impl Idle {
    /// Idle connections of this process. A forked child leaks the inherited connections, because a close would affect
    /// its parent.
    fn of_this_process(&mut self) -> &mut Vec<BufReader<TcpStream>> {
        let this = std::process::id();
        if self.process != this {
            std::mem::forget(std::mem::take(&mut self.connections));
            self.process = this;
        }
        &mut self.connections
    }
}

/// Plain HTTP client of one endpoint, which counts its requests and treats them by a script.
#[derive(Clone)]
pub struct Wire(Arc<Shared>);

struct Shared {
    endpoint: String,
    idle: Mutex<Idle>,
    script: Mutex<VecDeque<Reply>>,
    seen: Mutex<Vec<String>>,
}

impl Wire {
    /// Returns a client of `endpoint` without a script.
    pub fn to(endpoint: &str) -> Self {
        let endpoint = endpoint.to_owned();
        Self(Arc::new(Shared { endpoint, idle: Mutex::default(), script: Mutex::default(), seen: Mutex::default() }))
    }

    /// Sets the fate of the next requests. Later requests get the emulator's answer.
    pub fn script(&self, replies: impl IntoIterator<Item = Reply>) {
        *self.0.script.lock().unwrap() = replies.into_iter().collect();
    }

    /// Number of entries left in the script.
    pub fn left(&self) -> usize {
        self.0.script.lock().unwrap().len()
    }

    /// Returns the names of the operations that were requested since the last call, in order.
    pub fn seen(&self) -> Vec<String> {
        std::mem::take(&mut self.0.seen.lock().unwrap())
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire({})", self.0.endpoint)
    }
}

impl HttpClient for Wire {
    fn http_connector(&self, _: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

impl HttpConnector for Wire {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let shared = Arc::clone(&self.0);
        HttpConnectorFuture::new(async move { shared.answer(&request).await.map_err(ConnectorError::io) })
    }
}

impl Shared {
    async fn answer(&self, request: &HttpRequest) -> Result<HttpResponse, BoxError> {
        let target = request.headers().get("x-amz-target").unwrap_or_default();
        self.seen.lock().unwrap().push(target.rsplit('.').next().unwrap_or_default().to_owned());
        if target.ends_with("GetItem") {
            let body = String::from_utf8_lossy(request.body().bytes().expect("in memory"));
            assert!(body.contains("\"ConsistentRead\":true"), "a read that may be stale: {body}");
        }
        let reply = self.script.lock().unwrap().pop_front().unwrap_or(Reply::Pass);
        let scripted =
            |status: u16, body: String| Ok(HttpResponse::new(status.try_into().expect("a status"), body.into()));
        match reply {
            Reply::Pass => self.exchange(request).await,
            Reply::Instead(status, body) => scripted(status, body),
            Reply::After(status, body) => {
                self.exchange(request).await?;
                scripted(status, body)
            }
            Reply::Lost => {
                self.exchange(request).await?;
                Err(io::Error::from(io::ErrorKind::ConnectionReset).into())
            }
            Reply::Silence => {
                self.exchange(request).await?;
                std::future::pending().await
            }
            Reply::Once(may) => {
                may.acquire().await?.forget();
                self.exchange(request).await
            }
        }
    }

    /// Exchanges one request and answer with the emulator, on a connection that no other exchange uses meanwhile.
    async fn exchange(&self, request: &HttpRequest) -> Result<HttpResponse, BoxError> {
        let address = self.endpoint.strip_prefix("http://").expect("plain HTTP");
        let idle = self.idle.lock().unwrap().of_this_process().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                BufReader::new(stream)
            }
        };
        let body = request.body().bytes().expect("in memory");
        let mut bytes = format!("POST / HTTP/1.1\r\nhost: {address}\r\n");
        for (name, value) in request.headers().iter().filter(|(name, _)| !name.eq_ignore_ascii_case("host")) {
            bytes.extend([name, ": ", value, "\r\n"]);
        }
        bytes.push_str("\r\n");
        stream.write_all(&[bytes.as_bytes(), body].concat()).await?;
        let (status, headers, body) = read_answer(&mut stream).await?;
        self.idle.lock().unwrap().of_this_process().push(stream);
        let mut response = HttpResponse::new(status.try_into()?, body.into());
        for (name, value) in headers {
            response.headers_mut().append(name, value);
        }
        Ok(response)
    }
}

async fn read_answer(stream: &mut BufReader<TcpStream>) -> Result<(u16, Vec<(String, String)>, Vec<u8>), BoxError> {
    let first = line(stream).await?;
    let status = first.split(' ').nth(1).ok_or("no status")?.parse()?;
    let (mut headers, mut length) = (Vec::new(), 0);
    loop {
        let line = line(stream).await?;
        let Some((name, value)) = line.split_once(':') else { break };
        let (name, value) = (name.to_lowercase(), value.trim().to_owned());
        if name == "content-length" {
            length = value.parse()?;
        }
        assert_ne!(name, "transfer-encoding", "the answers of the emulators have a `content-length`");
        headers.push((name, value));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok((status, headers, body))
}

async fn line(stream: &mut BufReader<TcpStream>) -> Result<String, BoxError> {
    let mut line = String::new();
    match stream.read_line(&mut line).await? {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        _ => Ok(line.trim_end().to_owned()),
    }
}
