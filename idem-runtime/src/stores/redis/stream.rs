//! Opens a stream to a server, and notes the time at which bytes last moved on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::select_ok;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2};
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::task::OwnedTask;
use crate::clock::{Clock, Instant};
use crate::kit::lookup;
use crate::kit::metered::{Meter, Metered, Moment, SENT_IN_TIME};

/// Number of commands that the driver of a connection accepts before further callers wait.
const DRIVER_QUEUE: usize = 1024;

/// Time at which bytes last moved on a connection.
#[derive(Debug)]
pub(super) struct Pulse {
    clock: Arc<dyn Clock>,
    moved_at: Moment,
    /// Number of bytes sent since the last byte arrived.
    unheard: AtomicU64,
}

impl Pulse {
    pub(super) fn new(clock: &Arc<dyn Clock>) -> Self {
        let pulse = Self { clock: Arc::clone(clock), moved_at: Moment::default(), unheard: AtomicU64::new(0) };
        pulse.heard();
        pulse
    }

    pub(super) fn moved_at(&self) -> Instant {
        self.moved_at.get()
    }

    /// Returns the time without moving bytes after which an exchange with this `timeout` is given up. This time grows
    /// with the number of bytes that still have to reach the server.
    pub(super) fn patience(&self, timeout: Duration) -> Duration {
        let more = self.unheard.load(Ordering::Relaxed) / SENT_IN_TIME as u64;
        timeout.saturating_mul(u32::try_from(more).unwrap_or(u32::MAX).saturating_add(1))
    }
}

impl Meter for Pulse {
    fn heard(&self) {
        self.unheard.store(0, Ordering::Relaxed);
        self.moved_at.set(self.clock.now());
    }

    fn sent(&self, bytes: usize) {
        self.unheard.fetch_add(bytes as u64, Ordering::Relaxed);
        self.moved_at.set(self.clock.now());
    }
}

/// A connection that was just opened.
pub(super) struct OpenedStream {
    pub(super) connection: MultiplexedConnection,
    pub(super) pulse: Arc<Pulse>,
    /// True if the pulse notes each byte that moves, false if it notes only complete answers.
    pub(super) sees_bytes: bool,
    /// The task that reads and writes; `None` if the client has started its own task.
    pub(super) driver: Option<OwnedTask>,
}

/// Opens a connection to the address of `client`, on the current runtime.
pub(super) async fn open(client: &Client, clock: &Arc<dyn Clock>) -> Result<OpenedStream, RedisError> {
    let info = client.get_connection_info();
    match info.addr() {
        ConnectionAddr::Tcp(host, port) => {
            let stream = tcp(host, *port, info.tcp_settings()).await?;
            over(info, clock, |pulse| std::future::ready(Ok(Metered { stream, meter: pulse }))).await
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => {
            let stream = tokio::net::UnixStream::connect(path).await?;
            over(info, clock, |pulse| std::future::ready(Ok(Metered { stream, meter: pulse }))).await
        }
        #[cfg(feature = "redis-tls")]
        ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None } if tls::trusts_somebody() => {
            let stream = tcp(host, *port, info.tcp_settings()).await?;
            over(info, clock, |pulse| tls::connect(host, Metered { stream, meter: pulse })).await
        }
        // The certificates of a user's client can't be read, so that client opens the connection.
        _ => {
            let connection = client.get_multiplexed_async_connection_with_config(&config()).await?;
            Ok(OpenedStream { connection, pulse: Arc::new(Pulse::new(clock)), sees_bytes: false, driver: None })
        }
    }
}

/// Returns settings without the client's time limits: the store applies its own time limits.
fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(DRIVER_QUEUE)
}

/// Opens a connection over the stream that `stream` opens. The argument of `stream` is the pulse, which must note when
/// bytes move on the stream.
async fn over<S, F>(
    info: &ConnectionInfo,
    clock: &Arc<dyn Clock>,
    stream: impl FnOnce(Arc<Pulse>) -> F,
) -> Result<OpenedStream, RedisError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    F: Future<Output = Result<S, RedisError>>,
{
    let pulse = Arc::new(Pulse::new(clock));
    let stream = stream(Arc::clone(&pulse)).await?;
    let (connection, driver) = MultiplexedConnection::new_with_config(info.redis_settings(), stream, config()).await?;
    let driver = Some(OwnedTask(tokio::spawn(driver).abort_handle()));
    Ok(OpenedStream { connection, pulse, sees_bytes: true, driver })
}

async fn tcp(host: &str, port: u16, settings: &TcpSettings) -> Result<TcpStream, RedisError> {
    let addresses = lookup::addresses(host, port).await?;
    let tries: Vec<_> = addresses.into_iter().map(|address| Box::pin(TcpStream::connect(address))).collect();
    if tries.is_empty() {
        return Err((ErrorKind::InvalidClientConfig, "the host has no address").into());
    }
    let (stream, _) = select_ok(tries).await?;
    // On loopback, the kernel may gather small writes at no cost. Over a network, a gathered write would wait for a
    // round trip.
    let loopback = stream.peer_addr().is_ok_and(|address| address.ip().is_loopback());
    stream.set_nodelay(settings.nodelay() || !loopback)?;
    let socket = socket2::SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    if let Some(timeout) = settings.user_timeout() {
        socket.set_tcp_user_timeout(Some(timeout))?;
    }
    Ok(stream)
}

#[cfg(feature = "redis-tls")]
mod tls {
    use std::io;
    use std::sync::Arc;

    use redis::{ErrorKind, RedisError};
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, RootCertStore};
    use tokio::io::{AsyncRead, AsyncWrite};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;

    /// Returns whether the operating system trusts any certificate authority. If not, the client opens the connection,
    /// because the client's own list may still contain authorities.
    pub(super) fn trusts_somebody() -> bool {
        !rustls_native_certs::load_native_certs().certs.is_empty()
    }

    pub(super) async fn connect<S>(host: &str, stream: S) -> Result<TlsStream<S>, RedisError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| RedisError::from((ErrorKind::InvalidClientConfig, "TLS can't check the name of the host")))?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|error| match error.kind() {
            // A retry does not help against an untrusted certificate.
            io::ErrorKind::InvalidData => (ErrorKind::InvalidClientConfig, "TLS", error.to_string()).into(),
            _ => error.into(),
        })
    }
}
