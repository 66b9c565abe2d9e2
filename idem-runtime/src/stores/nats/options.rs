//! Settings, opening a store, and the check of its server and stream.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::{ConnectOptions, ServerAddr};

use super::access::{Access, NatsCore};
use super::bucket::{Bucket, StreamInfo, check_version};
use super::failure::{misconfigured, unexpected};
use super::link::ConnectPlan;
use super::message::HEADER_BYTES;
use super::outbox::Outbox;
use super::sender::NatsSender;
use super::subject::{MAX_BUCKET_BYTES, MAX_NAMESPACE_BYTES, prefix_of, subject_of};
use super::{NatsInner, NatsStore};
use crate::clock::{Clock, SystemClock};
use crate::key::Key;
use crate::kit::replays::Replays;
use crate::record::format::START_BYTES;
use crate::store::{StoreContext, StoreError};
use crate::sync::PerProcess;

/// Settings of a [`NatsStore`].
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::NatsStore;
/// let store = NatsStore::options()
///     .bucket("orders")
///     .num_replicas(3)
///     .response_timeout(Duration::from_millis(500))
///     .connect("nats://one.example.com,nats://two.example.com")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct NatsOptions {
    bucket: String,
    namespace: String,
    holder: String,
    response_timeout: Duration,
    num_replicas: Option<usize>,
    in_memory: bool,
    create_bucket: bool,
    certificates: Vec<PathBuf>,
    client_certificate: Option<(PathBuf, PathBuf)>,
    credentials_file: Option<PathBuf>,
    nkey: Option<String>,
    outbox: Outbox,
}

impl Default for NatsOptions {
    fn default() -> Self {
        Self {
            bucket: "idem".to_owned(),
            namespace: String::new(),
            holder: String::new(),
            response_timeout: Duration::from_secs(2),
            num_replicas: None,
            in_memory: false,
            create_bucket: true,
            certificates: Vec::new(),
            client_certificate: None,
            credentials_file: None,
            nkey: None,
            outbox: Outbox::default(),
        }
    }
}

impl fmt::Debug for NatsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsOptions")
            .field("bucket", &self.bucket)
            .field("namespace", &self.namespace)
            .field("num_replicas", &self.num_replicas)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

impl NatsOptions {
    /// Name of the key-value bucket (default: `idem`): letters, digits, `-` and `_`, at most 64 bytes. The records are
    /// the messages of the stream `KV_<bucket>`.
    #[must_use]
    pub fn bucket(self, bucket: impl Into<String>) -> Self {
        Self { bucket: bucket.into(), ..self }
    }

    /// Name of this application, in front of every key in the bucket (default: none), at most 128 bytes. Applications
    /// that share a bucket but must not share operations need different names.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). The name shows who holds a key;
    /// see [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Time limit of one call of the store, including the time in which a broken connection is opened again (default:
    /// 2 s). Keep this limit well below the shortest renewal interval (a third of the lease). After a time-out a write
    /// may have taken effect; the engine repeats the write with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Number of servers that keep each record (default: 1 if the store creates the stream, any number if the stream
    /// exists). A stream with fewer replicas is refused. With 3 replicas a majority of the servers has received each
    /// confirmed write, so the kill of one server, or the loss of its disk, loses no record. A machine that loses power
    /// can lose records unless `sync_interval` of the servers is `always`; see [`NatsStore`](NatsStore#).
    #[must_use]
    pub fn num_replicas(self, num_replicas: usize) -> Self {
        Self { num_replicas: Some(num_replicas), ..self }
    }

    /// Accepts, and creates, a stream that keeps its messages in memory (default: refused). A restart of its servers
    /// forgets all records, and every operation can run again.
    #[must_use]
    pub fn in_memory(self, in_memory: bool) -> Self {
        Self { in_memory, ..self }
    }

    /// Creates a missing stream (default: yes). Without this, [`connect`](Self::connect) refuses a missing stream, and
    /// the login does not need the right to create one; [`stream_settings`](Self::stream_settings) returns what to
    /// create.
    #[must_use]
    pub fn create_bucket(self, create_bucket: bool) -> Self {
        Self { create_bucket, ..self }
    }

    /// Returns the settings of the stream as JSON, for `nats stream add --config FILE`.
    ///
    /// ```
    /// use idem_runtime::NatsStore;
    ///
    /// let settings = NatsStore::options().bucket("orders").num_replicas(3).stream_settings();
    /// assert!(settings.contains(r#""name":"KV_orders""#) && settings.contains(r#""num_replicas":3"#));
    /// ```
    pub fn stream_settings(&self) -> String {
        self.wanted_bucket().settings(micros(&SystemClock::default()))
    }

    /// Returns the subject of the record of `key` in this bucket and namespace, for the tools of NATS.
    ///
    /// ```
    /// use idem_runtime::{Key, NatsStore};
    ///
    /// let key = Key::new("shop::pay", "order:42")?;
    /// let subject = NatsStore::options().bucket("orders").subject_of(&key);
    /// assert_eq!(subject, "$KV.orders.1.shop=3A=3Apay.order=3A42");
    /// # Ok::<(), idem_runtime::key::KeyError>(())
    /// ```
    pub fn subject_of(&self, key: &Key) -> String {
        subject_of(&prefix_of(&self.bucket, &self.namespace), key)
    }

    /// Publishes messages of the [outbox](crate::Attempt::outbox) on these subjects of the bucket's stream, such as
    /// `orders.>`, and keeps each message for `kept`. The store is then its own sender, for all destinations that begin
    /// with the name before `.>`. Several calls add several subjects.
    ///
    /// A message for `orders.paid` has the subject `orders.paid.<id>`, so that the stream, which keeps one message on
    /// each subject, keeps all of them. Its headers are those of the message, `Idem-Message-Id` and `Idem-Message-Key`.
    /// A consumer with the filter `orders.paid.*` reads it from the stream `KV_<bucket>`, or from another stream that
    /// has this one as its source. The message is stored once, also if it is sent again within `kept`.
    ///
    /// If the stream has replicas and the servers are NATS 2.14 or newer, the messages and their record are stored in
    /// one step, and no further write follows. Otherwise the messages leave after the record, as with any sender. No
    /// other program may publish on these subjects: it would replace messages, or be replaced. The login needs the
    /// right to publish on them.
    ///
    /// An existing stream must listen on the subjects, and should have `allow_atomic`; see
    /// [`stream_settings`](Self::stream_settings).
    ///
    /// ```no_run
    /// # async fn connect() -> Result<(), idem_runtime::StoreError> {
    /// # use std::time::Duration;
    /// use idem_runtime::NatsStore;
    /// let week = Duration::from_secs(7 * 86_400);
    /// let options = NatsStore::options().bucket("shop").num_replicas(3).outbox("orders.>", week);
    /// let store = options.connect("nats://localhost:4222").await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn outbox(mut self, subjects: impl Into<String>, kept: Duration) -> Self {
        self.outbox.add(subjects.into(), kept);
        self
    }

    fn wanted_bucket(&self) -> Bucket {
        Bucket {
            replicas: self.num_replicas,
            in_memory: self.in_memory,
            outbox: self.outbox.filters().map(str::to_owned).collect(),
            ..Bucket::new(&self.bucket)
        }
    }

    /// Trusts the certificates in this file (PEM) in place of those that the system trusts. Several calls add several
    /// files. Use `tls://` URLs, or a server that requires TLS.
    #[must_use]
    pub fn root_certificates(mut self, file: impl Into<PathBuf>) -> Self {
        self.certificates.push(file.into());
        self
    }

    /// Presents this certificate to the server. Both files are in the form PEM.
    #[must_use]
    pub fn client_certificate(self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { client_certificate: Some((certificate.into(), key.into())), ..self }
    }

    /// Logs in with the credentials in this file (`.creds`: a JWT and the seed of its key), which is read once, by
    /// [`connect`](Self::connect). Another login is a user and password, or a token, in the URL.
    #[must_use]
    pub fn credentials_file(self, file: impl Into<PathBuf>) -> Self {
        Self { credentials_file: Some(file.into()), ..self }
    }

    /// Logs in with the key of this seed (an `NKey`, `SU…`).
    #[must_use]
    pub fn nkey(self, seed: impl Into<String>) -> Self {
        Self { nkey: Some(seed.into()), ..self }
    }

    /// Connects to the servers at `url`; see [`NatsStore::connect`].
    ///
    /// # Errors
    /// The errors of [`NatsStore::connect`].
    ///
    /// # Cancel safety
    /// The call may be repeated.
    pub async fn connect(self, url: &str) -> Result<NatsStore, StoreError> {
        let bucket = self.checked_bucket()?;
        let plan = self.plan(url)?;
        let (clock, prefix) = (Arc::new(SystemClock::default()), prefix_of(&self.bucket, &self.namespace));
        let waiting = Arc::default();
        let core = |max_message: usize| {
            // A journal leaves room for the other parts of the record, and for the longer provenance of a later
            // attempt.
            let journal = max_message.saturating_sub(HEADER_BYTES + 2 * START_BYTES);
            let context = StoreContext::new("nats", Arc::<SystemClock>::clone(&clock)).system("nats");
            NatsCore {
                context: Arc::new(context.held_by(&self.holder).max_journal_bytes(journal)),
                plan: plan.clone(),
                bucket: bucket.clone(),
                namespace: self.namespace.clone(),
                prefix: prefix.clone(),
                response_timeout: self.response_timeout,
                max_message,
                outbox: self.outbox.clone(),
                batches: AtomicBool::new(false),
                direct: AtomicBool::new(true),
                server_clock: PerProcess::default(),
                held: PerProcess::default(),
                waiting: Arc::clone(&waiting),
                replays: Replays::new(),
            }
        };
        // The limit of messages belongs to the state of the store, but only the server knows it. So a first handle asks
        // the server, and its connection and clock become those of the store.
        let probe = NatsInner::new(Arc::new(core(0)), None);
        let access = probe.access()?;
        let max_message = prepare(&access, self.create_bucket).await?;
        let core = core(max_message);
        core.direct.store(access.core.direct.load(Ordering::Relaxed), Ordering::Relaxed);
        core.batches.store(access.core.batches.load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(sample) = access.core.server_clock.here().latest() {
            core.server_clock.here().note(sample);
        }
        let store = NatsInner::new(Arc::new(core), Some(access.link));
        if !self.outbox.is_empty() {
            store.core.context.set_sender(Arc::new(NatsSender(Arc::downgrade(&store))));
        }
        Ok(NatsStore(store))
    }

    fn checked_bucket(&self) -> Result<Bucket, StoreError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let Self { bucket, namespace, .. } = self;
        if bucket.is_empty() || bucket.len() > MAX_BUCKET_BYTES || !bucket.bytes().all(is_plain) {
            return Err(misconfigured(format!(
                "`{bucket}` is no name of a bucket: use up to {MAX_BUCKET_BYTES} letters, digits, `-` and `_`"
            )));
        }
        if namespace.len() > MAX_NAMESPACE_BYTES {
            return Err(misconfigured(format!(
                "the namespace has {} bytes, {MAX_NAMESPACE_BYTES} are allowed",
                namespace.len()
            )));
        }
        self.outbox.check()?;
        Ok(self.wanted_bucket())
    }

    fn plan(&self, url: &str) -> Result<ConnectPlan, StoreError> {
        let servers: Result<Vec<ServerAddr>, _> = url.split(',').map(|url| url.trim().parse()).collect();
        // The error is left out, because it may quote the URL with its password.
        let servers = servers.map_err(|_| misconfigured("the URL of NATS can't be read: write `nats://host:4222`"))?;
        provide_cryptography();
        let named = if self.holder.is_empty() { "idem".to_owned() } else { format!("idem {}", self.holder) };
        let mut options = ConnectOptions::new().name(named);
        // The driver ignores the login in a URL.
        if let Some((user, password)) = servers.iter().find_map(login_of) {
            options = match password {
                Some(password) => options.user_and_password(user, password),
                None => options.token(user),
            };
        }
        if let Some(seed) = &self.nkey {
            options = options.nkey(seed.clone());
        }
        if let Some(file) = &self.credentials_file {
            let unreadable = |error| misconfigured(format!("{} can't be read: {error}", file.display()));
            let credentials = std::fs::read_to_string(file).map_err(unreadable)?;
            options = options
                .credentials(&credentials)
                .map_err(|_| misconfigured(format!("{} holds no credentials", file.display())))?;
        }
        for file in &self.certificates {
            options = options.add_root_certificates(file.clone());
        }
        if let Some((certificate, key)) = &self.client_certificate {
            options = options.add_client_certificate(certificate.clone(), key.clone());
        }
        Ok(ConnectPlan { servers, options })
    }
}

/// Returns the user and the password in a URL, or a token.
fn login_of(server: &ServerAddr) -> Option<(String, Option<String>)> {
    let user = server.username().map(decoded)?;
    Some((user, server.password().map(decoded)))
}

/// Returns `text` without the percent encoding of URLs.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Installs a cryptography provider unless the application has chosen one: without any provider, TLS would panic. Any
/// server may require TLS, also at a `nats://` URL, and says so only after the connection is open.
fn provide_cryptography() {
    let _ = async_nats::rustls::crypto::ring::default_provider().install_default();
}

/// Checks the server, creates the stream unless it exists (if `creates` is true), and returns the largest message that
/// both take, in bytes.
async fn prepare(access: &Access<'_>, creates: bool) -> Result<usize, StoreError> {
    let server = access.client().await?.server_info();
    check_version(&server.version)?;
    if !server.headers {
        return Err(misconfigured("the server does not support headers of messages"));
    }
    let bucket = &access.core.bucket;
    let checked = match access.find_stream(|info, _| bucket.check(info)).await? {
        Some(checked) => checked,
        None => {
            if creates {
                create(access).await?;
            }
            access.ask_stream(|info, _| bucket.check(info)).await?
        }
    };
    // A login without the right to read directly asks the leader.
    let core = access.core;
    if core.direct.load(Ordering::Relaxed) {
        let probe = access.get_directly(&format!("{}probe", core.prefix)).await;
        core.direct.store(probe.is_ok(), Ordering::Relaxed);
    }
    Ok(checked.unwrap_or(usize::MAX).min(server.max_payload))
}

/// Returns the microseconds since 1970.
fn micros(clock: &dyn Clock) -> u64 {
    u64::try_from(clock.wall().as_micros()).unwrap_or(u64::MAX)
}

/// Creates the stream. Another process may have created it meanwhile; the check of its settings follows.
async fn create(access: &Access<'_>) -> Result<(), StoreError> {
    let bucket = &access.core.bucket;
    let answer = access.ask_api(&bucket.api("CREATE"), bucket.settings(micros(access.clock()))).await?;
    let info: StreamInfo<'_> = serde_json::from_slice(&answer).map_err(|_| unexpected("settings of a stream"))?;
    match info.error {
        Some(error) if !error.is_name_in_use() => Err(error.failed()),
        _ => Ok(()),
    }
}
