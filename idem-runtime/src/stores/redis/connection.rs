//! One multiplexed connection, reopened when it breaks.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Client, Cmd, ConnectionAddr, ErrorKind, Pipeline, RedisError, ServerError, Value};
use tokio::sync::watch;

use super::failure::ExchangeFailure;
use super::stream::{self, OpenedStream, Pulse};
use super::task::OwnedTask;
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::kit::metered::Meter;
use crate::sync::{Process, lock};

/// Pause after a failed try to connect. A caller during this pause gets the error of that try.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);
/// Largest number of new connections that one exchange waits for: a primary may be replaced while its connection is
/// being opened.
const CONNECTIONS: usize = 4;
/// Longest duration of an exchange while bytes move on its connection, as a multiple of the time limit.
const LONGEST: u32 = 15;
/// Delay of a timer above which the runtime must have been busy, and so has read no answer either.
const LATE: Duration = Duration::from_millis(100);

/// A connection that the user opened. All clones of the connection share one socket.
trait SharedConnection: ConnectionLike + Send + Sync {
    fn boxed_clone(&self) -> Box<dyn SharedConnection>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> SharedConnection for C {
    fn boxed_clone(&self) -> Box<dyn SharedConnection> {
        Box::new(self.clone())
    }
}

/// The user's own connection, which reconnects without the store's help, and the process that opened it.
pub(super) struct UserConnection {
    connection: Box<dyn SharedConnection>,
    process: Process,
    pulse: Arc<Pulse>,
}

impl UserConnection {
    pub(super) fn new<C>(connection: C, clock: &Arc<dyn Clock>) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self { connection: Box::new(connection), process: Process::this(), pulse: Arc::new(Pulse::new(clock)) }
    }
}

impl Clone for UserConnection {
    fn clone(&self) -> Self {
        Self { connection: self.connection.boxed_clone(), process: self.process, pulse: Arc::clone(&self.pulse) }
    }
}

/// Location of a server. The server may move to another address.
pub(super) trait Place: Send + Sync + 'static {
    /// Returns the number of addresses found so far; 0 for a fixed address.
    fn version(&self) -> u64;

    /// Returns a client of the present address, and the version of that address.
    fn client(&self) -> impl Future<Output = Result<(Client, u64), RedisError>> + Send;

    /// Checks the server behind a connection that was just opened.
    fn check(&self, connection: &mut MultiplexedConnection) -> impl Future<Output = Result<(), RedisError>> + Send;
}

/// A client, as the location of a server whose address never changes.
impl Place for Client {
    fn version(&self) -> u64 {
        0
    }

    async fn client(&self) -> Result<(Client, u64), RedisError> {
        Ok((self.clone(), 0))
    }

    async fn check(&self, _: &mut MultiplexedConnection) -> Result<(), RedisError> {
        Ok(())
    }
}

/// A connection, with time limits, to the server at a [`Place`].
pub(super) struct Connection<P> {
    clock: Arc<dyn Clock>,
    timeout: Duration,
    process: Process,
    end: End<P>,
}

enum End<P> {
    Theirs(UserConnection),
    Ours(Arc<Own<P>>),
}

/// A connection that this store opens, and reopens after it broke or did not answer in time. Without the time limit, a
/// connection over a network that silently drops packets would stay open until the operating system gives up, many
/// minutes later.
struct Own<P> {
    clock: Arc<dyn Clock>,
    timeout: Duration,
    place: P,
    open: Mutex<OpenState>,
    /// Copy of `OpenState::generation`, which can be read without the lock.
    opened: AtomicU64,
}

#[derive(Default)]
struct OpenState {
    /// Number of connections opened so far.
    generation: u64,
    way: Option<OpenConnection>,
    /// Time and error of the last failed try to connect.
    failed: Option<(Instant, RedisError)>,
    /// Channel of the task that is opening a connection for all callers, if there is such a task. The channel is closed
    /// when that task has succeeded or failed.
    connecting: Option<watch::Receiver<()>>,
}

/// An open connection.
#[derive(Clone)]
struct OpenConnection {
    generation: u64,
    /// Version of the server's address at the time when this connection was opened.
    version: u64,
    connection: MultiplexedConnection,
    pulse: Arc<Pulse>,
    sees_bytes: bool,
    /// The task that reads and writes; `None` if the client has started its own task. The task ends with the last clone
    /// of this connection.
    _driver: Option<Arc<OwnedTask>>,
}

impl OpenConnection {
    fn new(
        generation: u64,
        version: u64,
        OpenedStream { connection, pulse, sees_bytes, driver }: OpenedStream,
    ) -> Self {
        Self { generation, version, connection, pulse, sees_bytes, _driver: driver.map(Arc::new) }
    }
}

impl<P: Place> Connection<P> {
    /// Wraps the user's own connection.
    pub(super) fn theirs(theirs: UserConnection, clock: Arc<dyn Clock>, timeout: Duration) -> Self {
        Self { clock, timeout, process: theirs.process, end: End::Theirs(theirs) }
    }

    /// Makes a connection to the server at `place`, opened at first use.
    pub(super) fn ours(place: P, clock: Arc<dyn Clock>, timeout: Duration) -> Self {
        let own = Own { clock: Arc::clone(&clock), timeout, place, open: Mutex::default(), opened: AtomicU64::new(0) };
        Self { clock, timeout, process: Process::this(), end: End::Ours(Arc::new(own)) }
    }

    /// Returns the clock of the time limits.
    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Sends one command.
    pub(super) async fn one(&self, command: &Cmd) -> Result<Value, ExchangeFailure> {
        self.check_process()?;
        let answer = match &self.end {
            End::Theirs(theirs) => {
                let mut connection = theirs.connection.boxed_clone();
                self.in_time(&theirs.pulse, true, connection.req_packed_command(command)).await
            }
            End::Ours(own) => {
                let mut way = own.open().await.map_err(ExchangeFailure::not_opened)?;
                let exchange = way.connection.req_packed_command(command);
                let answer = self.in_time(&way.pulse, !way.sees_bytes, exchange).await;
                own.look_after(&way, answer.as_ref().map(std::slice::from_ref))?;
                answer
            }
        };
        match answer? {
            Value::ServerError(error) => Err(ExchangeFailure::from(&error)),
            value => Ok(value),
        }
    }

    /// Sends the commands in one write. The error of a single command is one of the returned values.
    pub(super) async fn many(&self, commands: &Pipeline) -> Result<Vec<Value>, ExchangeFailure> {
        // `query_async` is not used, because it turns the error of one command into the failure of the whole pipeline.
        let count = commands.len();
        self.check_process()?;
        let answers = match &self.end {
            End::Theirs(theirs) => {
                let mut connection = theirs.connection.boxed_clone();
                self.in_time(&theirs.pulse, true, connection.req_packed_commands(commands, 0, count)).await
            }
            End::Ours(own) => {
                let mut way = own.open().await.map_err(ExchangeFailure::not_opened)?;
                let exchange = way.connection.req_packed_commands(commands, 0, count);
                let answers = self.in_time(&way.pulse, !way.sees_bytes, exchange).await;
                own.look_after(&way, answers.as_deref())?;
                answers
            }
        };
        answers.and_then(|answers| if answers.len() == count { Ok(answers) } else { Err(ExchangeFailure::Lost) })
    }

    /// Returns the time that an operation may wait to be sent. This time is longer while bytes still move on the
    /// connection: the server works, but slowly.
    pub(super) fn patience(&self) -> Duration {
        let pulse = match &self.end {
            End::Theirs(theirs) => Some(Arc::clone(&theirs.pulse)),
            End::Ours(own) => lock(&own.open).way.as_ref().map(|way| Arc::clone(&way.pulse)),
        };
        let moves = pulse
            .is_some_and(|pulse| self.clock.now().saturating_since(pulse.moved_at()) <= pulse.patience(self.timeout));
        if moves { self.timeout.saturating_mul(LONGEST) } else { self.timeout }
    }

    /// Returns the number of the present connection, counted from 1. A connection with another number may lead to
    /// another server.
    pub(super) fn generation(&self) -> u64 {
        match &self.end {
            End::Theirs(_) => 1,
            End::Ours(own) => own.opened.load(Ordering::Relaxed).max(1),
        }
    }

    /// Refuses to use a connection of a parent process: a forked child must not write to its parent's socket.
    fn check_process(&self) -> Result<(), ExchangeFailure> {
        if self.process.is_this() {
            return Ok(());
        }
        let reason = "the connection was opened before a fork, by the parent process; use a new runtime here, and a \
                      new connection if you opened it yourself";
        Err(ExchangeFailure::Unusable(reason.into()))
    }

    /// Runs `exchange`. Gives up when no byte has moved on its connection for the time limit, or after [`LONGEST`] time
    /// limits. Time in which the runtime was busy is not included. If `is_news`, the bytes of this connection can't be
    /// observed, and its successful answers are noted as moved bytes.
    async fn in_time<T>(
        &self,
        pulse: &Pulse,
        is_news: bool,
        exchange: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, ExchangeFailure> {
        let started = self.clock.now();
        let mut end = started.saturating_add(self.timeout.saturating_mul(LONGEST));
        let mut until = started.saturating_add(self.timeout);
        let (mut exchange, mut now) = (pin!(exchange), started);
        loop {
            let limit = self.clock.sleep(until.saturating_since(now));
            if let Some(answer) = race(exchange.as_mut(), limit).await {
                if is_news && answer.is_ok() {
                    pulse.heard();
                }
                return answer.map_err(ExchangeFailure::of);
            }
            now = self.clock.now();
            let late = now.saturating_since(until);
            let silent = if late > LATE {
                end = end.saturating_add(late);
                now.saturating_add(self.timeout)
            } else {
                pulse.moved_at().max(started).saturating_add(pulse.patience(self.timeout))
            };
            until = silent.min(end);
            if until <= now {
                return Err(ExchangeFailure::TimedOut);
            }
        }
    }

    /// Opens the connection. Returns the error of the client unchanged, so that the caller can find mistakes in the
    /// settings: some of these mistakes show only at the first connection.
    pub(super) async fn try_open(&self) -> Result<(), RedisError> {
        match &self.end {
            End::Theirs(_) => Ok(()),
            End::Ours(own) => own.open().await.map(|_| ()),
        }
    }
}

impl<P: Place> Own<P> {
    /// Returns the open connection, or opens a new one.
    async fn open(self: &Arc<Self>) -> Result<OpenConnection, RedisError> {
        if let Some(way) = self.get() {
            return Ok(way);
        }
        let asked_at = self.clock.now();
        for _ in 0..CONNECTIONS {
            let mut connecting = {
                let mut open = lock(&self.open);
                if let Some(way) = self.usable(&open) {
                    return Ok(way);
                }
                if let Some((failed_at, error)) = &open.failed
                    && failed_at.saturating_add(CONNECT_PAUSE) > asked_at
                {
                    return Err(error.clone());
                }
                // If `connecting` holds a closed channel, a runtime has dropped the task that was opening the
                // connection.
                match open.connecting.clone().filter(|connecting| connecting.has_changed().is_ok()) {
                    Some(connecting) => connecting,
                    None => {
                        let (done, connecting) = watch::channel(());
                        open.connecting = Some(connecting.clone());
                        // A spawned task opens the connection for all callers. If a caller opened the connection and
                        // were no longer polled, all other callers would wait.
                        tokio::spawn(Arc::clone(self).connect(done));
                        connecting
                    }
                }
            };
            // The channel is closed when the task ends.
            let _ = connecting.changed().await;
        }
        Err((ErrorKind::Io, "every new connection was replaced immediately").into())
    }

    fn get(&self) -> Option<OpenConnection> {
        self.usable(&lock(&self.open))
    }

    fn usable(&self, open: &OpenState) -> Option<OpenConnection> {
        let version = self.place.version();
        open.way.clone().filter(|way| way.version == version)
    }

    /// Opens a new connection. Drops `done` at the end.
    async fn connect(self: Arc<Self>, done: watch::Sender<()>) {
        let connected = self.try_connect().await;
        let mut open = lock(&self.open);
        match connected {
            Ok((opened, version)) => {
                open.generation += 1;
                self.opened.store(open.generation, Ordering::Relaxed);
                open.failed = None;
                open.way = Some(OpenConnection::new(open.generation, version, opened));
            }
            Err(error) => open.failed = Some((self.clock.now(), error)),
        }
        open.connecting = None;
        drop(open);
        drop(done);
    }

    /// Opens a new connection. Returns the connection, and the version of the server's address.
    async fn try_connect(&self) -> Result<(OpenedStream, u64), RedisError> {
        let (client, version) = self.place.client().await?;
        let connecting = async {
            let mut opened = stream::open(&client, &self.clock).await?;
            self.place.check(&mut opened.connection).await?;
            Ok(opened)
        };
        Ok((self.in_time(connecting).await?, version))
    }

    async fn in_time<T>(&self, connecting: impl Future<Output = Result<T, RedisError>>) -> Result<T, RedisError> {
        race(connecting, self.clock.sleep(self.timeout)).await.unwrap_or_else(|| {
            Err(RedisError::from(std::io::Error::new(std::io::ErrorKind::TimedOut, "no connection in time")))
        })
    }

    /// Forgets the connection if its answers show that it is unusable. Callers that still wait for an answer keep their
    /// clone of the connection.
    ///
    /// Returns an error if another server is the primary by now: the write that the old primary answered may be lost.
    fn look_after(
        &self,
        way: &OpenConnection,
        answers: Result<&[Value], &ExchangeFailure>,
    ) -> Result<(), ExchangeFailure> {
        let replaced = self.place.version() != way.version;
        let broken = match answers {
            Ok(answers) => answers.iter().any(|answer| matches!(answer, Value::ServerError(error) if ends(error))),
            Err(ExchangeFailure::Broken(_) | ExchangeFailure::TimedOut | ExchangeFailure::NotSent(_)) => true,
            Err(_) => false,
        };
        if broken || replaced {
            let mut open = lock(&self.open);
            if open.generation == way.generation {
                open.way = None;
            }
        }
        if replaced && answers.is_ok() { Err(ExchangeFailure::Lost) } else { Ok(()) }
    }
}

/// Returns whether the connection is unusable after this error.
fn ends(error: &ServerError) -> bool {
    // `READONLY` means that the primary became a replica: a new connection may lead to the new primary. After a
    // `Protocol error` the server closes the connection, because it could not read a request.
    error.code() == "READONLY" || error.details().is_some_and(|details| details.starts_with("Protocol error"))
}

/// Returns a client of the server at `host` and `port`, with all other settings from `info`.
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
