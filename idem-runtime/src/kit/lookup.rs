//! Look-up of host names without tokio's blocking pool: that pool panics where no thread can be started.

use std::io;
use std::net::IpAddr;
#[cfg(feature = "redis")]
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::thread;

fn is_address(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok()
}

fn start(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let started = thread::Builder::new().name("idem-lookup".to_owned()).spawn(work);
    started.map(drop).map_err(|error| io::Error::new(error.kind(), format!("no thread can be started: {error}")))
}

/// Looks up the addresses of `host`.
#[cfg(feature = "redis")]
pub(crate) async fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if is_address(host) {
        return (host, port).to_socket_addrs().map(Iterator::collect);
    }
    let (tell, told) = tokio::sync::oneshot::channel();
    let host = host.to_owned();
    start(move || {
        let _ = tell.send((&*host, port).to_socket_addrs().map(Iterator::collect));
    })?;
    told.await.unwrap_or_else(|_| Err(io::Error::other("the thread that looks up the host has ended")))
}

/// Returns an error if a driver's own look-up of `hosts` would panic.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "nats"))]
pub(crate) fn check<'a>(mut hosts: impl Iterator<Item = &'a str>) -> io::Result<()> {
    if hosts.all(is_address) { Ok(()) } else { start(|| ()) }
}
