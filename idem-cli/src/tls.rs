//! TLS for the connections that this program opens itself, without a driver.

use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Returns a TLS connector that trusts the certificates of this system, or the certificates in the file that
/// `SSL_CERT_FILE` names.
pub(crate) fn connector() -> Result<TlsConnector, String> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(format!("this machine trusts no certificate{why}; name a file of them in SSL_CERT_FILE"));
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    Ok(TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth())))
}

/// Installs a cryptography provider for the drivers, unless one is installed already: without a provider, the drivers
/// would panic.
#[cfg(any(feature = "mysql", feature = "nats", feature = "postgres", feature = "redis"))]
pub(crate) fn provide() {
    let _ = ring::default_provider().install_default();
}
