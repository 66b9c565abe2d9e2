//! The few connections of one runtime, which all operations of the runtime share.

use std::collections::HashMap;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool::managed::Manager as _;
use deadpool_postgres::{ClientWrapper, Object, Pool, PoolError};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::AbortHandle;
use tokio_postgres::config::{Host, SslMode, SslNegotiation};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_postgres::{Client, Config, Error, NoTls, Socket};

use super::failure::OpFailure;
use super::sql::Statement;
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::kit::lookup;
use crate::kit::metered::{Meter, Metered, Moment};
use crate::kit::work::{WorkFailure as _, unless_stuck};
use crate::store::StoreErrorKind;
use crate::sync::lock;

/// Number of broken connections in a row that the user's pool may hand out before an operation fails.
const CONNECTIONS: usize = 64;
/// Longest duration of an exchange whose bytes keep arriving, as a multiple of the time limit.
pub(super) const LONGEST: u32 = 12;

/// Encryption of connections.
#[derive(Clone)]
pub(super) enum Tls {
    Off,
    #[cfg(feature = "postgres-tls")]
    On(tokio_postgres_rustls::MakeRustlsConnect),
}

/// Source of connections.
#[derive(Clone)]
pub(super) enum ConnectionSource {
    /// Connections that this store opens.
    Config(Box<Config>, Tls),
    /// Connections of the user's own pool.
    Pool(Pool),
    /// Connections that this store opens with the settings of the user's own pool.
    LikePool(Pool),
}

/// Time of the latest exchange of bytes, on one connection and on all connections of its runtime.
#[derive(Clone)]
pub(super) struct LastExchange {
    clock: Arc<dyn Clock>,
    on_connection: Arc<Moment>,
    /// Time of the latest exchange of bytes on any connection of the runtime.
    on_any: Arc<Moment>,
}

impl LastExchange {
    fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, on_connection: Arc::default(), on_any: Arc::default() }
    }

    /// Returns a copy for another connection of the runtime.
    fn another(&self) -> Self {
        Self { on_connection: Arc::default(), ..self.clone() }
    }
}

impl Meter for LastExchange {
    fn heard(&self) {
        let now = self.clock.now();
        self.on_connection.set(now);
        self.on_any.set(now);
    }

    fn sent(&self, _: usize) {
        self.heard();
    }
}

/// A connection, and the statements that are prepared in its session.
pub(super) struct Session {
    client: SomeClient,
    prepared: Mutex<HashMap<usize, tokio_postgres::Statement>>,
    exchanged: LastExchange,
}

enum SomeClient {
    Ours(Client, AbortHandle),
    /// A client of the user's pool. The drop of this client ends the task of its connection.
    Theirs(ClientWrapper),
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        match &self.client {
            SomeClient::Ours(client, _) => client,
            SomeClient::Theirs(client) => client,
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The task is aborted immediately, because no caller waits for anything in flight on the connection.
        if let SomeClient::Ours(_, task) = &self.client {
            task.abort();
        }
    }
}

/// The connections of one runtime.
pub(super) struct Sessions {
    source: ConnectionSource,
    /// The connection that became idle last is used first: a lone task then always uses the same process of the server,
    /// whose caches are warm.
    idle: Mutex<Vec<Session>>,
    size: usize,
    room: Semaphore,
    limit: Duration,
    exchanged: LastExchange,
}

impl Sessions {
    pub(super) fn new(source: ConnectionSource, size: usize, limit: Duration, clock: Arc<dyn Clock>) -> Self {
        let (room, exchanged) = (Semaphore::new(size), LastExchange::new(clock));
        Self { source, idle: Mutex::default(), size, room, limit, exchanged }
    }

    /// Returns the largest number of connections. If the connections belong to the user's own pool, other work may use
    /// some of them.
    pub(super) fn size(&self) -> usize {
        match &self.source {
            ConnectionSource::Pool(pool) => pool.status().max_size,
            _ => self.size,
        }
    }

    fn clock(&self) -> &dyn Clock {
        &*self.exchanged.clock
    }

    /// Returns the time of the latest exchange of bytes on any connection.
    pub(super) fn moved(&self) -> Instant {
        self.exchanged.on_any.get()
    }

    /// Takes a connection for exclusive use.
    pub(super) async fn take(&self) -> Result<TakenSession<'_>, OpFailure> {
        if let Some(taken) = self.take_idle() {
            return Ok(taken);
        }
        let late = || Err(OpFailure::not_sent("no connection became free or could be opened in time"));
        let taken = unless_stuck(self.clock(), self.limit, || self.moved(), async {
            match &self.source {
                ConnectionSource::Pool(pool) => self.take_theirs(pool).await,
                _ => self.take_ours().await,
            }
        });
        taken.await.unwrap_or_else(late)
    }

    /// Takes an idle connection, if that needs no waiting.
    fn take_idle(&self) -> Option<TakenSession<'_>> {
        let room = self.room.try_acquire().ok()?;
        let session = lock(&self.idle).pop().filter(|session| !session.is_closed())?;
        Some(TakenSession(SessionKind::Ours { session: Some(session), sessions: self, _room: room }))
    }

    async fn take_ours(&self) -> Result<TakenSession<'_>, OpFailure> {
        let closed = || OpFailure::not_sent("the connections are closed");
        let room = self.room.acquire().await.map_err(|_| closed())?;
        loop {
            let idle = lock(&self.idle).pop();
            let session = match idle {
                // A connection that broke while it was idle has sent nothing, so another connection can be tried.
                Some(session) if session.is_closed() => continue,
                Some(session) => session,
                None => self.connect().await?,
            };
            return Ok(TakenSession(SessionKind::Ours { session: Some(session), sessions: self, _room: room }));
        }
    }

    async fn take_theirs(&self, pool: &Pool) -> Result<TakenSession<'_>, OpFailure> {
        for _ in 0..CONNECTIONS {
            let object = pool.get().await.map_err(|error| match error {
                PoolError::Backend(error) => OpFailure::not_connected(&error),
                PoolError::NoRuntimeSpecified => {
                    OpFailure::new(StoreErrorKind::Misconfigured, format!("the pool can't be used: {error}"))
                }
                error => OpFailure::not_sent(&error.to_string()),
            })?;
            if !object.is_closed() {
                return Ok(TakenSession(SessionKind::Theirs { object: Some(object) }));
            }
            drop(Object::take(object));
        }
        Err(OpFailure::not_sent("every new connection broke immediately"))
    }

    async fn connect(&self) -> Result<Session, OpFailure> {
        let exchanged = self.exchanged.another();
        let no_thread = |error: io::Error| OpFailure::not_sent(&error.to_string());
        let client = match &self.source {
            ConnectionSource::Config(config, tls) => {
                lookup::check(hosts(config)).map_err(no_thread)?;
                let (client, task) = match tls {
                    Tls::Off => connect_plain(config, &exchanged).await,
                    #[cfg(feature = "postgres-tls")]
                    Tls::On(tls) => spawn(config, TimedTls { tls: tls.clone(), exchanged: exchanged.clone() }).await,
                }
                .map_err(|error| OpFailure::not_connected(&error))?;
                SomeClient::Ours(client, task)
            }
            ConnectionSource::Pool(pool) | ConnectionSource::LikePool(pool) => {
                // The pool does not reveal its host, so this check assumes that the host's name must be looked up on a
                // thread.
                lookup::check(std::iter::once("")).map_err(no_thread)?;
                let client = pool.manager().create().await;
                SomeClient::Theirs(client.map_err(|error| OpFailure::not_connected(&error))?)
            }
        };
        Ok(Session { client, prepared: Mutex::default(), exchanged })
    }

    /// Asks the server to cancel the statement on a connection that was given up.
    fn cancel(&self, session: Session) {
        let ConnectionSource::Config(config, tls) = &self.source else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (token, tls, limit) = (session.cancel_token(), tls.clone(), self.limit);
        let (exchanged, plain) = (LastExchange::new(Arc::clone(&self.exchanged.clock)), is_metered(config));
        runtime.spawn(async move {
            let cancel = async {
                match tls {
                    Tls::Off if plain => {
                        token.cancel_query(TimedTls { tls: PlainTls, exchanged: exchanged.clone() }).await
                    }
                    Tls::Off => token.cancel_query(NoTls).await,
                    #[cfg(feature = "postgres-tls")]
                    Tls::On(tls) => token.cancel_query(tls).await,
                }
            };
            race(cancel, exchanged.clock.sleep(limit)).await;
            drop(session);
        });
    }
}

/// A connection that one exchange uses, and that becomes idle again afterwards.
pub(super) struct TakenSession<'a>(SessionKind<'a>);

enum SessionKind<'a> {
    // Fields drop in order: the permit is returned only after the connection.
    Ours { session: Option<Session>, sessions: &'a Sessions, _room: SemaphorePermit<'a> },
    Theirs { object: Option<Object> },
}

impl Deref for TakenSession<'_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        const THERE: &str = "there until it is given up";
        match &self.0 {
            SessionKind::Ours { session, .. } => session.as_ref().expect(THERE),
            SessionKind::Theirs { object } => object.as_ref().expect(THERE),
        }
    }
}

impl TakenSession<'_> {
    /// Returns `statement` as prepared in this session. Prepares the statement at its first use.
    pub(super) async fn prepare(&self, statement: &Statement) -> Result<tokio_postgres::Statement, Error> {
        match &self.0 {
            SessionKind::Ours { session: Some(session), .. } => {
                let known = lock(&session.prepared).get(&statement.place).cloned();
                if let Some(known) = known {
                    return Ok(known);
                }
                let prepared = session.prepare_typed(&statement.text, statement.types).await?;
                lock(&session.prepared).insert(statement.place, prepared.clone());
                Ok(prepared)
            }
            SessionKind::Theirs { object: Some(object) } => {
                object.prepare_typed_cached(&statement.text, statement.types).await
            }
            _ => unreachable!("given up"),
        }
    }

    /// Returns the time of the latest exchange of bytes on the connection; zero for a connection of the user's pool,
    /// whose bytes can't be observed.
    pub(super) fn moved(&self) -> Instant {
        match &self.0 {
            SessionKind::Ours { session: Some(session), .. } => session.exchanged.on_connection.get(),
            _ => Instant::new(Duration::ZERO),
        }
    }

    /// Closes the connection. With `cancel`, also asks the server to stop the statement on it.
    pub(super) fn give_up(mut self, cancel: bool) {
        match &mut self.0 {
            SessionKind::Ours { session, sessions, .. } => match session.take() {
                Some(session) if cancel => sessions.cancel(session),
                session => drop(session),
            },
            SessionKind::Theirs { object } => drop(object.take().map(Object::take)),
        }
    }
}

impl Drop for TakenSession<'_> {
    fn drop(&mut self) {
        if let SessionKind::Ours { session, sessions, .. } = &mut self.0
            && let Some(session) = session.take()
            && !session.is_closed()
        {
            lock(&sessions.idle).push(session);
        }
    }
}

/// Returns the hosts that the driver looks up.
pub(super) fn hosts(config: &Config) -> impl Iterator<Item = &str> {
    let names = config.get_hosts().iter().filter(|_| config.get_hostaddrs().is_empty());
    names.filter_map(|host| match host {
        Host::Tcp(name) => Some(&**name),
        #[cfg(unix)]
        Host::Unix(_) => None,
    })
}

/// Connects, and spawns the task that drives the connection.
async fn spawn<T>(config: &Config, tls: T) -> Result<(Client, AbortHandle), Error>
where
    T: MakeTlsConnect<Socket>,
    T::Stream: Send + 'static,
{
    let (client, connection) = config.connect(tls).await?;
    let task = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to PostgreSQL broke");
        }
    });
    Ok((client, task.abort_handle()))
}

/// Returns whether the bytes of an unencrypted connection can be metered: at least one host is configured, and each
/// host is a TCP host, not a Unix socket.
fn is_metered(config: &Config) -> bool {
    !config.get_hosts().is_empty() && config.get_hosts().iter().all(|host| matches!(host, Host::Tcp(_)))
}

async fn connect_plain(config: &Config, exchanged: &LastExchange) -> Result<(Client, AbortHandle), Error> {
    if !is_metered(config) {
        return spawn(config, NoTls).await;
    }
    // The driver passes its socket only to an encryption layer. [`PlainTls`] is such a layer, but sends the bytes
    // unchanged.
    let mut config = config.clone();
    config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
    spawn(&config, TimedTls { tls: PlainTls, exchanged: exchanged.clone() }).await
}

/// The socket of a connection, below the encryption if there is any. Notes the time of each exchange of bytes.
type Stream = Metered<Socket, LastExchange>;

/// An encryption layer that leaves the connection unchanged.
#[derive(Clone, Copy)]
struct PlainTls;

impl MakeTlsConnect<Stream> for PlainTls {
    type Stream = Stream;
    type TlsConnect = Self;
    type Error = io::Error;

    fn make_tls_connect(&mut self, _: &str) -> io::Result<Self> {
        Ok(Self)
    }
}

impl TlsConnect<Stream> for PlainTls {
    type Stream = Stream;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Stream>>;

    fn connect(self, stream: Stream) -> Self::Future {
        std::future::ready(Ok(stream))
    }
}

impl TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

/// Encrypts a socket with `tls`, and notes the time of each exchange of bytes on that socket.
#[derive(Clone)]
struct TimedTls<T> {
    tls: T,
    exchanged: LastExchange,
}

impl<T: MakeTlsConnect<Stream>> MakeTlsConnect<Socket> for TimedTls<T> {
    type Stream = T::Stream;
    type TlsConnect = TimedTls<T::TlsConnect>;
    type Error = T::Error;

    fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, T::Error> {
        Ok(TimedTls { tls: self.tls.make_tls_connect(domain)?, exchanged: self.exchanged.clone() })
    }
}

impl<C: TlsConnect<Stream>> TlsConnect<Socket> for TimedTls<C> {
    type Stream = C::Stream;
    type Error = C::Error;
    type Future = C::Future;

    fn connect(self, stream: Socket) -> Self::Future {
        self.tls.connect(Metered { stream, meter: self.exchanged })
    }
}
