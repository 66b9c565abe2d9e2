//! URLs of servers, and the clients that they describe.

use std::fmt::Write as _;

use redis::Client;

use super::failure::misconfigured;
use crate::store::StoreError;

const SERVER_FORM: &str = "redis://[user:password@]host[:port][/database]";
const SENTINEL_FORM: &str = "redis-sentinel://[user:password@]host[:port][,host…]/name[/database][?tls=true]\
                             [&sentinel_user=…][&sentinel_password=…]";
const CLUSTER_FORM: &str = "redis-cluster://[user:password@]host[:port][,host…][?tls=true]";

/// The servers that a URL names.
pub(super) enum UrlServers {
    One(Client),
    /// The primary that the sentinels call `name`. The address of `primary` is ignored.
    Sentinels {
        sentinels: Vec<Client>,
        name: String,
        primary: Client,
    },
    /// Some nodes of a cluster.
    Cluster(Vec<Client>),
}

impl UrlServers {
    pub(super) fn read(url: &str) -> Result<Self, StoreError> {
        match url.split_once("://") {
            Some(("redis-sentinel", rest)) => {
                let url = UrlList::read(rest, &["tls", "protocol", "sentinel_user", "sentinel_password"]);
                let url = url.map_err(|problem| unreadable(&problem, SENTINEL_FORM))?;
                let (name, database) = url.path.split_once('/').unwrap_or((url.path, "0"));
                let sentinels = url.clients(&url.sentinel_login(), 26_379, "0", SENTINEL_FORM)?;
                let primary = url.clients(url.login, 6379, database, SENTINEL_FORM)?.swap_remove(0);
                if name.is_empty() {
                    return Err(unreadable("the name of the primary is missing", SENTINEL_FORM));
                }
                Ok(Self::Sentinels { sentinels, name: name.to_owned(), primary })
            }
            Some(("redis-cluster", rest)) => {
                let url = UrlList::read(rest, &["tls", "protocol"]);
                let url = url.map_err(|problem| unreadable(&problem, CLUSTER_FORM))?;
                if !matches!(url.path, "" | "0") {
                    return Err(unreadable("a cluster has no databases", CLUSTER_FORM));
                }
                Ok(Self::Cluster(url.clients(url.login, 6379, "0", CLUSTER_FORM)?))
            }
            _ => Ok(Self::One(client(url, SERVER_FORM)?)),
        }
    }
}

fn unreadable(problem: &str, form: &str) -> StoreError {
    misconfigured(format!("the Redis URL can't be used: {problem}; write `{form}`"))
}

/// Makes the client that `url` describes.
fn client(url: &str, form: &str) -> Result<Client, StoreError> {
    if url.starts_with("rediss://") && cfg!(not(feature = "redis-tls")) {
        return Err(misconfigured("TLS (`rediss://`) needs the feature `redis-tls` of idem-runtime".to_owned()));
    }
    // The error of `redis` may quote the URL, and the URL may hold a password.
    Client::open(url).map_err(|error| match error.detail().filter(|_| !url.contains('@')) {
        Some(detail) => misconfigured(format!("the Redis URL can't be used: {detail}")),
        None => misconfigured(format!("the Redis URL can't be used: write `{form}`")),
    })
}

/// The parts of a URL that names several servers, as written.
struct UrlList<'a> {
    login: &'a str,
    hosts: Vec<&'a str>,
    path: &'a str,
    query: Vec<(&'a str, &'a str)>,
}

impl<'a> UrlList<'a> {
    /// Reads the part after `://`. `known` are the allowed parameters.
    fn read(rest: &'a str, known: &[&str]) -> Result<Self, String> {
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (servers, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = servers.rsplit_once('@').unwrap_or(("", servers));
        let hosts: Vec<&str> = hosts.split(',').collect();
        if hosts.iter().any(|host| host.is_empty()) {
            return Err("a host is missing".to_owned());
        }
        let query = query.split('&').filter(|parameter| !parameter.is_empty());
        let query: Vec<_> = query.map(|parameter| parameter.split_once('=').unwrap_or((parameter, ""))).collect();
        if query.iter().any(|(name, _)| !known.contains(name)) {
            return Err(format!("its parameters can only be `{}`", known.join("`, `")));
        }
        let several = Self { login, hosts, path, query };
        match several.parameter("tls") {
            None | Some("true" | "false") => Ok(several),
            Some(_) => Err("`tls` is `true` or `false`".to_owned()),
        }
    }

    fn parameter(&self, name: &str) -> Option<&'a str> {
        self.query.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn sentinel_login(&self) -> String {
        let (user, password) = (self.parameter("sentinel_user"), self.parameter("sentinel_password"));
        password.map(|password| format!("{}:{password}", user.unwrap_or_default())).unwrap_or_default()
    }

    /// Makes a client for each server, with this login.
    fn clients(&self, login: &str, port: u16, database: &str, form: &str) -> Result<Vec<Client>, StoreError> {
        let one = |host: &&str| {
            let scheme = if self.parameter("tls") == Some("true") { "rediss" } else { "redis" };
            let mut url = format!("{scheme}://");
            if !login.is_empty() {
                let _ = write!(url, "{login}@");
            }
            url.push_str(host);
            // An IPv6 address is in brackets and contains colons.
            if !host.rsplit(']').next().unwrap_or(host).contains(':') {
                let _ = write!(url, ":{port}");
            }
            let _ = write!(url, "/{database}");
            if let Some(protocol) = self.parameter("protocol") {
                let _ = write!(url, "?protocol={protocol}");
            }
            client(&url, form)
        };
        self.hosts.iter().map(one).collect()
    }
}
