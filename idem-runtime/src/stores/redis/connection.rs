//! One multiplexed connection, made anew when it breaks.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ErrorKind, IntoConnectionInfo, Pipeline, RedisError};
use redis::{ServerError, Value};
use tokio::task::AbortHandle;

use super::sentinel::Sentinels;
use crate::clock::{Clock, Instant, race};
use crate::sync::lock;

/// How many commands the driver of the connection takes over before callers queue for it.
const DRIVER_QUEUE: usize = 1024;
/// After a connection could not be made, nobody tries again for this long.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// Why an exchange brought no answer of the server.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The server refused this operation: nothing was written by it.
    Refused(Refusal),
    /// No connection, or none that took the operation in time: nothing was sent.
    NotSent(Arc<str>),
    /// The exchange broke off: it may have landed.
    Broken(Arc<RedisError>),
    /// No answer in time: it may have landed.
    TimedOut,
    /// The runtime dropped the exchange, the answer makes no sense, or it came from a server that had been replaced by
    /// then: it may have landed.
    Lost,
    /// This is what the server answered, but too few replicas have it: it may get lost with the server.
    Unreplicated(Box<Value>),
}

/// An error that the server answered.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) code: Arc<str>,
    pub(super) message: Arc<str>,
}

impl From<&ServerError> for Refusal {
    fn from(error: &ServerError) -> Self {
        Self { code: error.code().into(), message: error.details().unwrap_or_default().into() }
    }
}

impl From<&ServerError> for Failure {
    fn from(error: &ServerError) -> Self {
        Self::Refused(error.into())
    }
}

impl Failure {
    /// Whether the server has forgotten a script: nothing was written.
    pub(super) fn is_unknown_script(&self) -> bool {
        matches!(self, Self::Refused(refusal) if &*refusal.code == "NOSCRIPT")
    }

    /// Without a connection nothing was sent, whatever kept it from being made; the server may have said why.
    fn not_opened(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::Server(_) => Self::of(error),
            _ => Self::NotSent(error.to_string().into()),
        }
    }

    /// What a failed exchange means. A reply of the server is no error here, except while a connection is being set up;
    /// either way nothing was written.
    fn of(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::Server(_) => Self::Refused(Refusal {
                code: error.code().unwrap_or_default().into(),
                message: error.detail().unwrap_or_default().into(),
            }),
            ErrorKind::AuthenticationFailed
            | ErrorKind::InvalidClientConfig
            | ErrorKind::Client
            | ErrorKind::RESP3NotSupported => Self::NotSent(error.to_string().into()),
            _ if error.is_connection_refusal() => Self::NotSent(error.to_string().into()),
            _ if error.is_timeout() => Self::TimedOut,
            // A closed connection looks the same whether or not the command was written before.
            _ => Self::Broken(Arc::new(error)),
        }
    }
}

/// A user's connection: multiplexed, so that clones share it.
trait Multiplexed: ConnectionLike + Send + Sync {
    fn boxed_clone(&self) -> Box<dyn Multiplexed>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Multiplexed for C {
    fn boxed_clone(&self) -> Box<dyn Multiplexed> {
        Box::new(self.clone())
    }
}

/// A way to the server, with a time limit for every exchange.
pub(super) struct Connection {
    clock: Arc<dyn Clock>,
    timeout: Duration,
    line: Line,
}

enum Line {
    /// The user's own, which looks after itself.
    Theirs(Box<dyn Multiplexed>),
    Ours(Box<Own>),
}

/// Where a server is.
#[derive(Clone)]
pub(super) enum Place {
    /// Where the client says.
    At(Box<Client>),
    /// Wherever the sentinels say that the primary is.
    Primary(Arc<Sentinels>),
}

impl Place {
    /// Counts the servers that were found here, as far as is known.
    fn version(&self) -> u64 {
        match self {
            Self::At(_) => 0,
            Self::Primary(sentinels) => sentinels.version(),
        }
    }
}

/// A task that ends with its owner.
pub(super) struct Background(pub(super) AbortHandle);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A connection that this store makes, and makes anew after it broke or did not answer in time: what is behind a line
/// that swallows everything would otherwise stay there until the system gives up, many minutes later.
struct Own {
    place: Place,
    open: Mutex<Open>,
    /// Held while a connection is being made, so that one is made for all.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Open {
    /// Counts the connections that were made.
    generation: u64,
    way: Option<Way>,
    /// When the last try failed, and why.
    failed: Option<(Instant, RedisError)>,
}

/// An open connection.
#[derive(Clone)]
struct Way {
    generation: u64,
    /// The version of its place when it was made.
    version: u64,
    connection: MultiplexedConnection,
}

impl Connection {
    /// The user's own connection.
    pub(super) fn theirs<C>(connection: C, clock: Arc<dyn Clock>, timeout: Duration) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self { clock, timeout, line: Line::Theirs(Box::new(connection)) }
    }

    /// A connection to the server at `place`, made when it is first needed.
    pub(super) fn ours(place: Place, clock: Arc<dyn Clock>, timeout: Duration) -> Result<Self, RedisError> {
        let place = match place {
            Place::At(client) => Place::At(Box::new(tuned(&client)?)),
            place @ Place::Primary(_) => place,
        };
        let (open, connecting) = (Mutex::default(), tokio::sync::Mutex::default());
        Ok(Self { clock, timeout, line: Line::Ours(Box::new(Own { place, open, connecting })) })
    }

    /// One command.
    pub(super) async fn one(&self, command: &Cmd) -> Result<Value, Failure> {
        let answer = match &self.line {
            Line::Theirs(connection) => {
                let mut connection = connection.boxed_clone();
                self.in_time(connection.req_packed_command(command)).await
            }
            Line::Ours(own) => {
                let mut way = self.open(own).await.map_err(Failure::not_opened)?;
                let answer = way.connection.req_packed_command(command).await.map_err(Failure::of);
                own.look_after(&way, answer.as_ref().map(std::slice::from_ref))?;
                answer
            }
        };
        match answer? {
            Value::ServerError(error) => Err(Failure::from(&error)),
            value => Ok(value),
        }
    }

    /// Many commands in one write. Errors of single commands are values, in their places.
    pub(super) async fn many(&self, commands: &Pipeline) -> Result<Vec<Value>, Failure> {
        // Not `query_async`: that turns one error of the server into the failure of the whole pipeline.
        let count = commands.len();
        let answers = match &self.line {
            Line::Theirs(connection) => {
                let mut connection = connection.boxed_clone();
                self.in_time(connection.req_packed_commands(commands, 0, count)).await
            }
            Line::Ours(own) => {
                let mut way = self.open(own).await.map_err(Failure::not_opened)?;
                let answers = way.connection.req_packed_commands(commands, 0, count).await.map_err(Failure::of);
                own.look_after(&way, answers.as_deref())?;
                answers
            }
        };
        answers.and_then(|answers| if answers.len() == count { Ok(answers) } else { Err(Failure::Lost) })
    }

    /// A user's connection may have no time limit of its own.
    async fn in_time<T>(&self, exchange: impl Future<Output = Result<T, RedisError>>) -> Result<T, Failure> {
        match race(exchange, self.clock.sleep(self.timeout)).await {
            Some(answer) => answer.map_err(Failure::of),
            None => Err(Failure::TimedOut),
        }
    }

    /// The open connection, or a new one.
    async fn open(&self, own: &Own) -> Result<Way, RedisError> {
        if let Some(open) = own.get() {
            return Ok(open);
        }
        let asked_at = self.clock.now();
        let _connecting = own.connecting.lock().await;
        if let Some(open) = own.get() {
            return Ok(open);
        }
        if let Some((failed_at, error)) = &lock(&own.open).failed
            && failed_at.saturating_add(CONNECT_PAUSE) > asked_at
        {
            return Err(error.clone());
        }
        let connected = self.connect(own).await;
        let mut open = lock(&own.open);
        match connected {
            Ok((connection, version)) => {
                open.generation += 1;
                open.failed = None;
                let way = Way { generation: open.generation, version, connection };
                open.way = Some(way.clone());
                Ok(way)
            }
            Err(error) => {
                open.failed = Some((self.clock.now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Opens a connection, for the errors that only the first one can have.
    pub(super) async fn try_open(&self) -> Result<(), RedisError> {
        match &self.line {
            Line::Theirs(_) => Ok(()),
            Line::Ours(own) => self.open(own).await.map(|_| ()),
        }
    }

    /// A new connection, and the version of the place that it leads to.
    async fn connect(&self, own: &Own) -> Result<(MultiplexedConnection, u64), RedisError> {
        match &own.place {
            Place::At(client) => Ok((self.connect_to(client).await?, own.place.version())),
            Place::Primary(sentinels) => {
                let (client, version) = sentinels.primary().await?;
                let mut connection = self.connect_to(&tuned(&client)?).await?;
                is_primary(&mut connection).await?;
                Ok((connection, version))
            }
        }
    }

    async fn connect_to(&self, client: &Client) -> Result<MultiplexedConnection, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_pipeline_buffer_size(DRIVER_QUEUE)
            .set_response_timeout(Some(self.timeout));
        let connecting = client.get_multiplexed_async_connection_with_config(&config);
        // The limit above ends with the TCP connection; the login can hang as well.
        race(connecting, self.clock.sleep(self.timeout)).await.unwrap_or_else(|| {
            Err(RedisError::from(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer to the login")))
        })
    }
}

impl Own {
    fn get(&self) -> Option<Way> {
        let version = self.place.version();
        lock(&self.open).way.clone().filter(|way| way.version == version)
    }

    /// Gives up a connection if its answers say so. Whoever still waits for an answer on it keeps it.
    ///
    /// Fails if another server is the primary by now: what the old one answered may be gone with it.
    fn look_after(&self, way: &Way, answers: Result<&[Value], &Failure>) -> Result<(), Failure> {
        let replaced = self.place.version() != way.version;
        let broken = match answers {
            // A primary that became a replica: a new connection may lead to the new primary.
            Ok(answers) => {
                answers.iter().any(|answer| matches!(answer, Value::ServerError(error) if error.code() == "READONLY"))
            }
            Err(Failure::Broken(_) | Failure::TimedOut | Failure::NotSent(_)) => true,
            Err(_) => false,
        };
        if broken || replaced {
            let mut open = lock(&self.open);
            if open.generation == way.generation {
                open.way = None;
            }
        }
        if replaced && answers.is_ok() { Err(Failure::Lost) } else { Ok(()) }
    }
}

/// The client with the settings of its connections.
fn tuned(client: &Client) -> Result<Client, RedisError> {
    let info = client.get_connection_info().clone();
    // On loopback the kernel gathers small writes at no cost; over a network that would cost a round trip each.
    let nodelay = !matches!(info.addr(), ConnectionAddr::Tcp(host, _) if is_loopback(host));
    let info = match info.addr() {
        // The certificates of the user's client are in it, so it is left as it is.
        ConnectionAddr::TcpTls { .. } => None,
        _ => Some({
            let tcp = info.tcp_settings().clone().set_nodelay(nodelay);
            info.set_tcp_settings(tcp).into_connection_info()?
        }),
    };
    info.map_or_else(|| Ok(client.clone()), Client::open)
}

/// Whether the server says of itself that it is a primary; sentinels may name one that has been demoted.
async fn is_primary(connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
    let role = connection.req_packed_command(&redis::cmd("ROLE")).await?;
    match role.extract_error()? {
        Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(role)) if role == b"master") => Ok(()),
        _ => Err((ErrorKind::Io, "the server that the sentinels name does not say that it is the primary").into()),
    }
}

/// A client of the server at `host` and `port`, in all else like the one of `info`.
pub(super) fn elsewhere(info: &redis::ConnectionInfo, host: &str, port: u16) -> Result<Client, RedisError> {
    let host = host.to_owned();
    let addr = match info.addr().clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Client::open(info.clone().set_addr(addr))
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
