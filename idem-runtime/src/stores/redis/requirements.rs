//! The requirements on a server: its version and role, the rights of the login, the scripts, and the largest value.

use redis::{Pipeline, Value};

use super::command::RedisCommand;
use super::failure::{ErrorReply, ExchangeFailure, failed, misconfigured, unexpected};
use super::limits::Limits;
use super::place::ServerConnection;
use super::rights::{Purpose, RIGHTS, Right};
use super::scripts::{Script, Scripts};
use crate::clock::Clock;
use crate::store::{StoreError, StoreErrorKind};

/// The properties of a server that passed the check.
pub(super) struct CheckedServer {
    pub(super) scripts: Scripts,
    /// True if the server supports `SET … IFEQ`.
    pub(super) compares: bool,
}

/// Checks the server and the rights of the login, loads the scripts, and asks for the largest size of a value.
pub(super) async fn prepare(
    connection: &ServerConnection,
    cluster: bool,
    prefix: &str,
    replicas: bool,
) -> Result<(CheckedServer, Limits), StoreError> {
    // The check sends each command that the store needs, in a form that changes nothing, for a key that does not exist.
    let is_needed = |right: &&Right| match right.purpose {
        Purpose::Calls => true,
        Purpose::Replicas => replicas,
        Purpose::Opening | Purpose::Wakes | Purpose::Lists => false,
    };
    let rights: Vec<&Right> = RIGHTS.iter().filter(is_needed).collect();
    let probe = probe_key(prefix, connection.clock());
    // The answers are read in the order of the questions.
    let mut answers = connection.many(&questions(&rights, &probe)).await.map_err(failed)?.into_iter();
    let mut answer = || match answers.next() {
        Some(Value::ServerError(error)) => Err(failed(ExchangeFailure::from(&error))),
        answer => Ok(answer.unwrap_or(Value::Nil)),
    };
    let info = match answer()? {
        Value::BulkString(info) => String::from_utf8_lossy(&info).into_owned(),
        Value::VerbatimString { text, .. } => text,
        _ => return Err(misconfigured("the server is not Redis: it answers `INFO` differently".to_owned())),
    };
    let server = ServerInfo::read(&info);
    server.check(cluster)?;
    let mut scripts = Scripts::SOURCES.map(|source| Script { source, sha: String::new() });
    for script in &mut scripts {
        script.sha = match answer()? {
            Value::BulkString(sha) => String::from_utf8_lossy(&sha).into_owned(),
            Value::SimpleString(sha) => sha,
            _ => return Err(misconfigured("the server is not Redis: it answers `SCRIPT LOAD` differently".to_owned())),
        };
    }
    // If the login may not send `CONFIG GET`, the limit stays unknown here, and the store learns the limit from
    // failures.
    let [value, request] = LIMITS.map(|_| answer().ok().and_then(|answer| setting(&answer)));
    // `client-query-buffer-limit` applies to the whole request, so the other parts of the request are subtracted.
    let request = request.map(|bytes| bytes.saturating_sub(BESIDE));
    let limits = Limits::default();
    value.into_iter().chain(request).for_each(|most| limits.configure(most));
    check_rights(rights.into_iter().map(|right| (right, answer())))?;
    Ok((CheckedServer { scripts: Scripts::new(scripts), compares: server.compares() }, limits))
}

/// Makes one pipeline of all questions, so that opening a store takes one round trip.
fn questions(rights: &[&Right], probe: &str) -> Pipeline {
    let mut questions = Pipeline::new();
    questions.cmd("INFO");
    for source in Scripts::SOURCES {
        questions.cmd("SCRIPT").arg("LOAD").arg(source);
    }
    for setting in LIMITS {
        questions.cmd("CONFIG").arg("GET").arg(setting);
    }
    for right in rights {
        let question = questions.cmd(right.name());
        right.words(probe).skip(1).for_each(|word| _ = question.arg(word));
    }
    questions
}

/// Fails if the server refuses a command of the needed rights. The error names all refused commands, with the first
/// reason.
fn check_rights<'a>(answers: impl Iterator<Item = (&'a Right, Result<Value, StoreError>)>) -> Result<(), StoreError> {
    let (mut refused, mut first) = (Vec::new(), None);
    for (right, answer) in answers {
        if let Some(error) = answer.err().filter(|error| error.kind() == StoreErrorKind::Misconfigured) {
            refused.push(right.name().to_ascii_lowercase());
            first.get_or_insert(error);
        }
    }
    let Some(first) = first else { return Ok(()) };
    Err(misconfigured(format!("the login may not send `{}`: {first}", refused.join("`, `"))).with_source(first))
}

/// Makes the script call that tries each command of calls on one server, and changes nothing.
pub(super) fn probe(scripts: &Scripts, prefix: &str, clock: &dyn Clock) -> RedisCommand {
    // With `min_replicas`, the exchange also writes to the first key of its script. This script names no key, so the
    // empty argument stands in place of the key.
    RedisCommand::script(&scripts.ping, std::iter::empty(), |command| {
        command.arg("").arg(probe_key(prefix, clock));
    })
}

/// Fails if an answer to [`probe`] shows that the server refuses calls.
pub(super) fn check_probe(answer: &Value) -> Result<(), StoreError> {
    let Value::Array(errors) = answer else { return Err(unexpected(answer)) };
    for error in errors {
        let text = match error {
            Value::BulkString(text) => String::from_utf8_lossy(text),
            Value::SimpleString(text) => text.into(),
            other => return Err(unexpected(other)),
        };
        let refusal = ErrorReply::read(text.trim_start_matches('-'));
        // A node of a cluster refuses a key of another node; rights, memory and role were checked before.
        if !refusal.is_about_arguments() {
            return Err(failed(ExchangeFailure::Refused(refusal)));
        }
    }
    Ok(())
}

/// Returns a key under which there is no record.
fn probe_key(prefix: &str, clock: &dyn Clock) -> String {
    format!("{prefix}probe/{:032x}", clock.entropy())
}

/// Settings that limit the size of a value, and of a request.
const LIMITS: [&str; 2] = ["proto-max-bulk-len", "client-query-buffer-limit"];
/// Bytes in the server's query buffer other than the value: the key, and requests that the server reads with the value.
const BESIDE: usize = 64 * 1024;

/// Reads the number in an answer of `CONFIG GET`.
fn setting(answer: &Value) -> Option<usize> {
    let value = match answer {
        Value::Array(parts) => parts.get(1),
        Value::Map(parts) => parts.first().map(|(_, value)| value),
        _ => None,
    };
    match value? {
        Value::BulkString(number) => String::from_utf8_lossy(number).parse().ok(),
        Value::SimpleString(number) => number.parse().ok(),
        _ => None,
    }
}

/// Servers that speak the protocol of Redis but are not supported.
const OTHERS: [&str; 4] = ["dragonfly", "kvrocks", "garnet", "keydb"];

/// The fields of `INFO` about the server.
#[derive(Debug, PartialEq, Eq)]
struct ServerInfo<'a> {
    name: &'a str,
    version: &'a str,
    role: &'a str,
    cluster: bool,
    maxmemory_policy: &'a str,
    maxmemory: &'a str,
}

impl<'a> ServerInfo<'a> {
    fn read(info: &'a str) -> Self {
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map_or("", str::trim);
        // Servers that imitate Redis also report a version of Redis; a version field with their own name identifies
        // them.
        let other =
            OTHERS.iter().map(|name| (*name, field(&format!("{name}_version")))).find(|(_, own)| !own.is_empty());
        let (name, version) = match (field("server_name"), other) {
            (_, Some(other)) => other,
            ("valkey", None) => ("Valkey", field("valkey_version")),
            ("" | "redis", None) => ("Redis", field("redis_version")),
            (name, None) => (name, field("redis_version")),
        };
        Self {
            name,
            version,
            role: field("role"),
            // Valkey 9 calls the field `server_mode`.
            cluster: [field("redis_mode"), field("server_mode")].contains(&"cluster"),
            maxmemory_policy: field("maxmemory_policy"),
            maxmemory: field("maxmemory_human"),
        }
    }

    /// Returns the major and the minor version of the server.
    fn release(&self) -> [u32; 2] {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or_default());
        [(); 2].map(|()| parts.next().unwrap_or_default())
    }

    /// Returns whether the server supports `SET … IFEQ`.
    fn compares(&self) -> bool {
        match self.name {
            "Redis" => self.release() >= [8, 4],
            "Valkey" => self.release() >= [8, 1],
            _ => false,
        }
    }

    fn check(&self, cluster: bool) -> Result<(), StoreError> {
        let Self { name, version, .. } = self;
        let [major, _] = self.release();
        let least = match *name {
            "Redis" => 7,
            "Valkey" => 8,
            _ => u32::MAX,
        };
        if major < least {
            return Err(misconfigured(format!(
                "the server is {name} {version}; Redis 7.0 or newer or Valkey 8 or newer is needed"
            )));
        }
        match (self.cluster, cluster) {
            (true, false) => {
                return Err(misconfigured("the server is a cluster node; connect with `redis-cluster://`".to_owned()));
            }
            (false, true) => {
                return Err(misconfigured("the server is not a cluster node; connect with `redis://`".to_owned()));
            }
            _ => {}
        }
        // A cluster replica is fine: it redirects to the primary of the slot.
        if self.role != "master" && !cluster {
            return Err(misconfigured(format!(
                "the server is a read-only replica (role `{}`); connect to the primary",
                self.role
            )));
        }
        if !matches!(self.maxmemory_policy, "noeviction" | "") {
            tracing::warn!(
                maxmemory_policy = self.maxmemory_policy,
                maxmemory = self.maxmemory,
                "the server may evict records before their retention ends, and an evicted operation runs again; \
                 set `maxmemory-policy noeviction`"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(lines: &[&str]) -> String {
        let base =
            ["# Server", "role:master", "redis_mode:standalone", "maxmemory_policy:noeviction", "gcc_version:12.2.0"];
        base.iter().chain(lines).flat_map(|line| [line, "\r\n"]).collect()
    }

    fn check(lines: &[&str]) -> Result<(), String> {
        ServerInfo::read(&info(lines)).check(false).map_err(|error| error.to_string())
    }

    #[test]
    fn supported_servers_are_accepted() {
        assert_eq!(check(&["redis_version:7.0.15"]), Ok(()));
        assert_eq!(check(&["redis_version:8.4.0"]), Ok(()));
        assert_eq!(check(&["redis_version:7.2.4", "server_name:valkey", "valkey_version:8.0.1"]), Ok(()));
    }

    #[test]
    fn servers_that_support_ifeq_are_recognised() {
        let compares = |lines: &[&str]| ServerInfo::read(&info(lines)).compares();
        let valkey = |version: &str| {
            compares(&["redis_version:7.2.4", "server_name:valkey", &format!("valkey_version:{version}")])
        };
        for (version, expected) in [("8.0.9", false), ("8.1.0", true), ("8.10.0", true), ("9.0.1", true)] {
            assert_eq!(valkey(version), expected, "{version}");
        }
        for (version, expected) in
            [("7.4.2", false), ("8.2.3", false), ("8.4.0", true), ("8.10.0", true), ("9.0.0", true)]
        {
            assert_eq!(compares(&[&format!("redis_version:{version}")]), expected, "{version}");
        }
    }

    #[test]
    fn unsupported_servers_are_refused_by_name() {
        let refused = |lines: &[&str], words: &str| {
            let error = check(lines).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(&["redis_version:6.2.14"], "Redis 6.2.14");
        refused(&["redis_version:7.2.4", "server_name:valkey", "valkey_version:7.2.5"], "Valkey 7.2.5");
        refused(&["redis_version:7.4.0", "dragonfly_version:df-v1.2"], "dragonfly df-v1.2");
        refused(&["redis_version:7.0.0", "kvrocks_version:2.9.0"], "kvrocks 2.9.0");
        refused(&[], "Redis ");
    }

    #[test]
    fn a_replica_or_a_server_of_another_topology_is_refused() {
        let refused = |from: &str, to: &str, words: &str| {
            let text = info(&["redis_version:7.0.15"]).replace(from, to);
            let error = ServerInfo::read(&text).check(false).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused("role:master", "role:slave", "read-only replica");
        refused("redis_mode:standalone", "redis_mode:cluster", "redis-cluster://");
        refused("redis_mode:standalone", "server_mode:cluster", "redis-cluster://");
        let error = ServerInfo::read(&info(&["redis_version:7.0.15"])).check(true).unwrap_err().to_string();
        assert!(error.contains("`redis://`"), "{error}");
    }
}
