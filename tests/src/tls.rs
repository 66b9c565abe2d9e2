//! Certificates for servers that speak TLS.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::race::Orders;

/// Certificate of the host `localhost`, signed by itself, and its key. A process trusts it only if the variable
/// `SSL_CERT_FILE` names it. The files are deleted when dropped.
#[derive(Debug)]
pub struct Certificate(PathBuf);

impl Certificate {
    /// Makes a certificate and its key.
    ///
    /// # Panics
    /// If `openssl` fails.
    #[expect(clippy::new_without_default, reason = "runs a program")]
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("idem-test-tls-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let made = Self(folder);
        let output = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
            .args(["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"])
            .args(["-keyout", &made.key(), "-out", &made.file()])
            .output()
            .expect("openssl runs; ./scripts/test installs it");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Some servers run as another user.
        std::fs::set_permissions(made.key(), Permissions::from_mode(0o644)).expect("ours");
        made
    }

    /// Path of the certificate, in PEM form.
    pub fn file(&self) -> String {
        self.path("cert.pem")
    }

    /// Path of the key, in PEM form.
    pub fn key(&self) -> String {
        self.path("key.pem")
    }

    /// Runs the program `racer` on three keys of the store `spec`, with its effects in `folder`. The store runs in
    /// another process, because trusted certificates come from environment variables.
    ///
    /// # Panics
    /// If the program does not start.
    pub fn race(&self, racer: &str, spec: String, folder: &Path, is_trusted: bool) -> Output {
        let effects = folder.join("effects");
        std::fs::write(&effects, "").expect("a file for the effects");
        let mut racer = Command::new(racer);
        racer.args(Orders::plain(spec, effects, 3).words());
        if is_trusted {
            racer.env("SSL_CERT_FILE", self.file());
        }
        racer.output().expect("the racer starts")
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a text").to_owned()
    }
}

impl Drop for Certificate {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}
