//! `redis://…`, `rediss://…`, `redis-cluster://…`, `redis-sentinel://…`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{RedisStore, Store};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo};

use super::{Access, Place, PlaceFuture, Server, parameters};
use crate::report::Stop;
use crate::shell;
use crate::tls;

/// Default namespace: the start of every key in Redis.
pub(crate) const NAMESPACE: &str = "idem:";

/// Servers that a URL names, and their roles.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Topology {
    /// One server, by its URL.
    One(String),
    /// Some nodes of a cluster, by their URLs.
    Cluster(Vec<String>),
    /// The primary that the sentinels at these URLs call `name`. `primary` is a template of the primary's URL, with
    /// `{}` for host and port.
    Sentinels { sentinels: Vec<String>, name: String, primary: String },
}

/// The servers that a URL names.
pub(crate) struct Servers {
    url: String,
    pub(crate) topology: Topology,
}

impl Servers {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let topology = match url.split_once("://") {
            Some((scheme @ ("redis-cluster" | "redis-sentinel"), _)) => several(scheme, url)?,
            _ => Topology::One(url.to_owned()),
        };
        let urls = match &topology {
            Topology::One(url) => std::slice::from_ref(url),
            Topology::Cluster(urls) | Topology::Sentinels { sentinels: urls, .. } => urls,
        };
        for url in urls {
            // The driver's error may contain the URL.
            url.as_str()
                .into_connection_info()
                .map_err(|_| "write `redis://[user:password@]host[:port][/database]`")?;
        }
        Ok(Self { url: url.to_owned(), topology })
    }

    /// Returns the command line of `redis-cli`, without the command for the server. `redis-cli` reads the password from
    /// the variable `REDISCLI_AUTH`.
    fn redis_cli(&self) -> String {
        match &self.topology {
            Topology::One(url) => client(url, None),
            Topology::Cluster(urls) => urls.first().map(|url| format!("{} -c", client(url, None))).unwrap_or_default(),
            Topology::Sentinels { sentinels, name, primary } => {
                // The sentinels know the address of the primary, which changes with each failover.
                let sentinel = sentinels.first().map(|url| client(url, None)).unwrap_or_default();
                let ask = |line: u8| {
                    let question = shell::line(["SENTINEL", "get-master-addr-by-name", name]);
                    format!("\"$({sentinel} {question} | sed -n {line}p)\"")
                };
                client(&primary.replace("{}", "primary:1"), Some([ask(1), ask(2)]))
            }
        }
    }

    /// Opens a plain connection: to the server, to the primary, or to the first node of a cluster that answers.
    pub(crate) async fn connect(&self, timeout: Duration) -> Result<MultiplexedConnection, Stop> {
        tls::provide();
        match &self.topology {
            Topology::One(url) => connect(url, timeout).await,
            Topology::Cluster(urls) => first(urls, timeout).await,
            Topology::Sentinels { sentinels, name, primary } => {
                let mut sentinel = first(sentinels, timeout).await?;
                let mut question = redis::cmd("SENTINEL");
                question.arg("get-master-addr-by-name").arg(name);
                let answer = question.query_async::<Option<(String, u16)>>(&mut sentinel).await;
                let found = answer.map_err(|error| Stop::Unreachable(format!("the sentinel failed: {error}")))?;
                let (host, port) = found.ok_or_else(|| Stop::Unreachable(format!("no sentinel knows `{name}`")))?;
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                connect(&primary.replace("{}", &format!("{host}:{port}")), timeout).await
            }
        }
    }
}

/// Returns the command line of `redis-cli` for the server at `url`. `address` holds the host and the port, as words of
/// a shell, if the URL does not name them.
fn client(url: &str, address: Option<[String; 2]>) -> String {
    let Ok(info) = url.into_connection_info() else { return "redis-cli".to_owned() };
    let word = |text: &str| shell::quoted(text).into_owned();
    let mut words = vec!["redis-cli".to_owned()];
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    let mut is_tls = false;
    match (info.addr(), address) {
        (ConnectionAddr::Unix(path), _) => option("-s", word(&path.to_string_lossy())),
        (ConnectionAddr::Tcp(host, port), None) => {
            option("-h", word(host));
            option("-p", port.to_string());
        }
        (ConnectionAddr::TcpTls { host, port, .. }, None) => {
            is_tls = true;
            option("-h", word(host));
            option("-p", port.to_string());
        }
        (known, Some([host, port])) => {
            is_tls = matches!(known, ConnectionAddr::TcpTls { .. });
            option("-h", host);
            option("-p", port);
        }
        _ => {}
    }
    let settings = info.redis_settings();
    if let Some(user) = settings.username() {
        option("--user", word(user));
    }
    if settings.db() != 0 {
        option("-n", settings.db().to_string());
    }
    if is_tls {
        words.push("--tls".to_owned());
    }
    words.join(" ")
}

async fn first(urls: &[String], timeout: Duration) -> Result<MultiplexedConnection, Stop> {
    let mut last = Stop::Unreachable("no server is named".to_owned());
    for url in urls {
        match connect(url, timeout).await {
            Ok(connection) => return Ok(connection),
            Err(stop) => last = stop,
        }
    }
    Err(last)
}

async fn connect(url: &str, timeout: Duration) -> Result<MultiplexedConnection, Stop> {
    let unreachable = |error: redis::RedisError| Stop::Unreachable(format!("the server can't be reached: {error}"));
    let client = Client::open(url).map_err(unreachable)?;
    let config = AsyncConnectionConfig::new().set_connection_timeout(Some(timeout)).set_response_timeout(Some(timeout));
    client.get_multiplexed_async_connection_with_config(&config).await.map_err(unreachable)
}

/// Parses a URL that names several hosts, in the same way as `RedisStore::connect`.
fn several(scheme: &str, url: &str) -> Result<Topology, String> {
    let (rest, query) = parameters(url.split_once("://").map_or("", |(_, rest)| rest));
    let (servers, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, hosts) = servers.rsplit_once('@').unwrap_or(("", servers));
    let parameter = |name: &str| query.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    let tls = if parameter("tls") == Some("true") { "rediss" } else { "redis" };
    let one = |login: &str, host: &str, port: Option<u16>, database: &str| {
        let mut url = format!("{tls}://");
        if !login.is_empty() {
            let _ = write!(url, "{login}@");
        }
        url.push_str(host);
        if let Some(port) = port.filter(|_| !host.rsplit(']').next().unwrap_or(host).contains(':')) {
            let _ = write!(url, ":{port}");
        }
        let _ = write!(url, "/{database}");
        url
    };
    let hosts: Vec<&str> = hosts.split(',').collect();
    if hosts.iter().any(|host| host.is_empty()) {
        return Err("a host is missing".to_owned());
    }
    if scheme == "redis-cluster" {
        return Ok(Topology::Cluster(hosts.iter().map(|host| one(login, host, Some(6379), "0")).collect()));
    }
    let (name, database) = path.split_once('/').unwrap_or((path, "0"));
    if name.is_empty() {
        return Err("the name of the primary is missing: write `redis-sentinel://host[,host…]/name`".to_owned());
    }
    let (user, password) = (parameter("sentinel_user"), parameter("sentinel_password"));
    let own = password.map(|password| format!("{}:{password}", user.unwrap_or_default())).unwrap_or_default();
    let sentinels = hosts.iter().map(|host| one(&own, host, Some(26_379), "0")).collect();
    Ok(Topology::Sentinels { sentinels, name: name.to_owned(), primary: one(login, "{}", None, database) })
}

impl Place for Servers {
    fn kind(&self) -> &'static str {
        "redis"
    }

    fn look_up(&self, namespace: Option<&str>, key: &str) -> (String, String) {
        let name = format!("{}{key}", namespace.unwrap_or(NAMESPACE));
        let command = format!("{} {}", self.redis_cli(), shell::line(["PTTL", &name]));
        (name, command)
    }

    fn open(&self, namespace: Option<String>, timeout: Duration, _: Access) -> PlaceFuture<'_, Arc<dyn Store>> {
        let options = RedisStore::options().response_timeout(timeout);
        let options = options.namespace(namespace.unwrap_or_else(|| NAMESPACE.to_owned()));
        Box::pin(async move { Ok(Arc::new(options.connect(&self.url).await?) as _) })
    }

    fn create(&self, _: Option<u16>, _: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(std::future::ready(Err(no_schema())))
    }

    fn differences(&self, _: Option<u16>, _: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        Box::pin(std::future::ready(Err(no_schema())))
    }

    fn server(&self) -> Server<'_> {
        Server::Redis(self)
    }
}

fn no_schema() -> Stop {
    Stop::Usage("Redis has no schema, so nothing can be missing; `idem doctor` looks at its settings".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_several_servers_are_parsed() {
        let of = |url: &str| Servers::parse(url).map(|servers| servers.topology);
        let cluster = Topology::Cluster(vec!["redis://u:p@a:6379/0".to_owned(), "redis://u:p@b:7000/0".to_owned()]);
        assert_eq!(of("redis-cluster://u:p@a,b:7000"), Ok(cluster));
        let sentinels = Topology::Sentinels {
            sentinels: vec!["rediss://:s@a:26379/0".to_owned()],
            name: "main".to_owned(),
            primary: "rediss://u:p@{}/2".to_owned(),
        };
        assert_eq!(of("redis-sentinel://u:p@a/main/2?tls=true&sentinel_password=s"), Ok(sentinels));
        for wrong in ["redis-sentinel://a", "redis-cluster://a,,b", "redis://h:no/0"] {
            let problem = of(wrong).unwrap_err();
            assert!(!problem.contains("h:no"), "{problem}");
        }
    }
}
