//! `nats://[user:password@]host[:port][,host…][/BUCKET]`.

use std::sync::Arc;
use std::time::Duration;

use async_nats::ConnectOptions;
use idem_runtime::nats::NatsOptions;
use idem_runtime::{Key, NatsStore, Store, StoreErrorKind};

use super::{Access, Place, PlaceFuture, Server, parameters};
use crate::report::Stop;
use crate::shell;

/// Default bucket of a store.
pub(crate) const BUCKET: &str = "idem";

/// A bucket, and its servers.
pub(crate) struct Bucket {
    /// URLs of the servers, separated by commas.
    servers: String,
    pub(crate) name: String,
    credentials: Option<String>,
}

impl Bucket {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let (url, given) = parameters(url);
        let rest = url.strip_prefix("nats://").ok_or("write `nats://[user:password@]host[:port][,host…][/BUCKET]`")?;
        let (hosts, bucket) = rest.rsplit_once('/').unwrap_or((rest, BUCKET));
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if bucket.is_empty() || bucket.len() > 64 || !bucket.chars().all(is_name) {
            return Err("the name of a bucket has 1 to 64 letters, digits, `_` and `-`".to_owned());
        }
        let mut credentials = None;
        for (parameter, value) in given {
            match parameter {
                "credentials" if !value.is_empty() => credentials = Some(value.to_owned()),
                _ => return Err("its parameter is `credentials`, the path of a `.creds` file".to_owned()),
            }
        }
        // The login stands in front of the first host, and is for all of them.
        let (login, hosts) =
            hosts.rsplit_once('@').map_or((String::new(), hosts), |(it, hosts)| (format!("{it}@"), hosts));
        let servers: Vec<_> = hosts.split(',').map(|host| format!("nats://{login}{host}")).collect();
        if hosts.contains('/') || servers.iter().any(|url| url.parse::<async_nats::ServerAddr>().is_err()) {
            return Err("write `nats://[user:password@]host[:port][,host…][/BUCKET]`".to_owned());
        }
        Ok(Self { servers: servers.join(","), name: bucket.to_owned(), credentials })
    }

    fn options(&self, timeout: Duration) -> NatsOptions {
        let options = NatsStore::options().bucket(&self.name).response_timeout(timeout);
        match &self.credentials {
            Some(file) => options.credentials_file(file),
            None => options,
        }
    }

    /// Opens the store, which must exist.
    async fn open_store(&self, namespace: Option<String>, timeout: Duration) -> Result<NatsStore, Stop> {
        let options = self.options(timeout).namespace(namespace.unwrap_or_default()).create_bucket(false);
        Ok(options.connect(&self.servers).await?)
    }

    /// Returns the answer to a question about the stream.
    pub(crate) async fn describe(&self, timeout: Duration) -> Result<serde_json::Value, Stop> {
        let asked = async {
            let client = self.client().await?;
            let subject = format!("$JS.API.STREAM.INFO.KV_{}", self.name);
            let answer = client.request(subject, Vec::new().into()).await.map_err(|error| unreachable(&error))?;
            serde_json::from_slice(&answer.payload).map_err(|_| unreachable(&"the answer is not JetStream's"))
        };
        tokio::time::timeout(timeout, asked).await.map_err(|_| unreachable(&"no answer in time"))?
    }

    /// Opens a plain connection.
    pub(crate) async fn client(&self) -> Result<async_nats::Client, Stop> {
        crate::tls::provide();
        let mut options = ConnectOptions::new();
        if let Some(file) = &self.credentials {
            options =
                options.credentials_file(file).await.map_err(|_| unreachable(&"the credentials can't be read"))?;
        }
        let servers: Result<Vec<async_nats::ServerAddr>, _> = self.servers.split(',').map(str::parse).collect();
        let servers = servers.map_err(|_| Stop::Usage("the URL of the store can't be used".to_owned()))?;
        // The driver ignores the login in a URL.
        if let Some(server) = servers.first()
            && let Some(user) = server.username()
        {
            options = match server.password() {
                Some(password) => options.user_and_password(user.to_owned(), password.to_owned()),
                None => options.token(user.to_owned()),
            };
        }
        options.connect(servers).await.map_err(|error| unreachable(&error.kind()))
    }

    /// Returns the command line of `nats` for this bucket. `nats` reads the login from its context or the environment.
    fn nats(&self, words: &[&str]) -> String {
        let hosts: Vec<_> =
            self.servers.split(',').map(|url| url.rsplit(['@', '/']).next().unwrap_or_default()).collect();
        let hosts = hosts.join(",");
        shell::line(["nats", "--server", &hosts].into_iter().chain(words.iter().copied()))
    }
}

pub(crate) fn unreachable(why: &impl std::fmt::Display) -> Stop {
    Stop::Unreachable(format!("NATS can't be used: {why}"))
}

impl Place for Bucket {
    fn kind(&self) -> &'static str {
        "nats"
    }

    fn look_up(&self, namespace: Option<&str>, key: &str) -> (String, String) {
        let options = NatsStore::options().bucket(&self.name).namespace(namespace.unwrap_or_default());
        let subject = key.parse::<Key>().map(|key| options.subject_of(&key)).unwrap_or_default();
        let command = self.nats(&["stream", "get", &format!("KV_{}", self.name), "--last-for", &subject]);
        (subject, command)
    }

    fn open(&self, namespace: Option<String>, timeout: Duration, _: Access) -> PlaceFuture<'_, Arc<dyn Store>> {
        Box::pin(async move { Ok(Arc::new(self.open_store(namespace, timeout).await?) as _) })
    }

    fn create(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(async move {
            match self.options(timeout).connect(&self.servers).await {
                // The comparison that follows says what is wrong with an existing stream.
                Err(error) if error.kind() != StoreErrorKind::Misconfigured => Err(error.into()),
                _ => Ok(()),
            }
        })
    }

    fn differences(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        Box::pin(async move {
            let described = self.describe(timeout).await?;
            if described["error"]["err_code"] == 10059 {
                return Ok(None);
            }
            match self.options(timeout).create_bucket(false).connect(&self.servers).await {
                Ok(_) => Ok(Some(Vec::new())),
                Err(error) if error.kind() == StoreErrorKind::Misconfigured => Ok(Some(vec![error.to_string()])),
                Err(error) => Err(error.into()),
            }
        })
    }

    fn server(&self) -> Server<'_> {
        Server::Nats(self)
    }
}
