//! Checks of a Redis server.

use std::time::Duration;

use idem_runtime::redis::rights::{Purpose, RIGHTS};
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, Value};

use super::Findings;
use crate::report::Stop;
use crate::store::redis::{Servers, Topology};

pub(crate) async fn examine(
    servers: &Servers,
    namespace: &str,
    timeout: Duration,
    findings: &mut Findings,
) -> Result<(), Stop> {
    let mut server = servers.connect(timeout).await?;
    let info: String = match ask(&mut server, &["INFO", "everything"]).await {
        Ok(info) => info,
        Err(error) => {
            let remedy = "allow the login INFO, without which no store opens: `ACL SETUSER NAME +info`";
            findings.error("permissions", format!("INFO is refused: {error}"), "the store can't be opened", remedy);
            String::new()
        }
    };
    let info = Info(&info);
    version(&info, findings);
    if !info.0.is_empty() {
        persistence(&info, &mut server, findings).await;
        eviction(&info, findings);
        flushes(&info, findings);
        replicas(&info, servers, findings);
    }
    if let Topology::Cluster(_) = servers.topology {
        cluster(&mut server, findings).await;
    }
    permissions(&mut server, namespace, findings).await;
    Ok(())
}

/// The fields of `INFO`.
struct Info<'a>(&'a str);

impl<'a> Info<'a> {
    fn get(&self, name: &str) -> &'a str {
        let field = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        field.map_or("", str::trim)
    }

    fn number(&self, name: &str) -> u64 {
        self.get(name).parse().unwrap_or_default()
    }
}

async fn ask<T: FromRedisValue>(server: &mut MultiplexedConnection, words: &[&str]) -> redis::RedisResult<T> {
    let mut command = redis::cmd(words[0]);
    words[1..].iter().for_each(|word| {
        command.arg(word);
    });
    command.query_async(server).await
}

/// Returns a setting; `None` if the login may not read it.
async fn setting(server: &mut MultiplexedConnection, name: &str) -> Option<String> {
    let answer: Vec<String> = ask(server, &["CONFIG", "GET", name]).await.ok()?;
    answer.into_iter().nth(1)
}

fn version(info: &Info<'_>, findings: &mut Findings) {
    let (name, version, least) = match info.get("valkey_version") {
        "" => ("Redis", info.get("redis_version"), 7),
        version => ("Valkey", version, 8),
    };
    let major: u32 = version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or_default();
    match version {
        "" => {}
        version if major >= least => findings.ok("version", format!("{name} {version}")),
        version => findings.error(
            "version",
            format!("{name} {version}"),
            "the store refuses to open: the server lacks commands that it needs",
            "use Redis 7.0 or newer, or Valkey 8 or newer",
        ),
    }
}

async fn persistence(info: &Info<'_>, server: &mut MultiplexedConnection, findings: &mut Findings) {
    const AOF: &str = "`CONFIG SET appendonly yes` and `CONFIG REWRITE`";
    let check = "persistence";
    let fsync = setting(server, "appendfsync").await;
    let snapshots = setting(server, "save").await;
    // The settings of the append-only file decide which records a crash loses; if there is no append-only file, the
    // settings of snapshots decide this.
    match (info.get("aof_enabled"), fsync.as_deref(), snapshots.as_deref()) {
        ("1", Some("no"), _) => findings.warning(
            check,
            "appendonly is on, appendfsync is `no`",
            "a crash of the machine forgets up to half a minute of records, and their operations run again",
            "`CONFIG SET appendfsync everysec`, or `always` for payments",
        ),
        ("1", Some("everysec"), _) => {
            findings.ok(check, "appendonly, written to disk each second: a crash of the machine forgets one at most");
        }
        ("1", fsync, _) => findings.ok(check, format!("appendonly, appendfsync {}", fsync.unwrap_or("unknown"))),
        (_, _, Some("")) => findings.error(
            check,
            "nothing is written to disk",
            "a restart of the server forgets all records, and their operations run again",
            AOF,
        ),
        (_, _, Some(save)) => findings.warning(
            check,
            format!("snapshots only (save `{save}`)"),
            "a crash forgets everything since the last snapshot, minutes of records, and their operations run again",
            AOF,
        ),
        (_, _, None) => findings.warning(
            check,
            "appendonly is off; this login may not see whether there are snapshots",
            "a crash forgets minutes of records or all of them",
            AOF,
        ),
    }
    // The settings may be right while the last write to disk has failed.
    for (field, what) in
        [("aof_last_write_status", "the append-only file"), ("rdb_last_bgsave_status", "the last snapshot")]
    {
        if info.get(field) == "err" {
            findings.error(
                check,
                format!("{what} could not be written"),
                "the server may refuse all writes, and a restart forgets what is missing there",
                "look at the server's log; the disk is full or read-only",
            );
        }
    }
}

fn eviction(info: &Info<'_>, findings: &mut Findings) {
    const NOEVICTION: &str =
        "`CONFIG SET maxmemory-policy noeviction` and `CONFIG REWRITE`; caches belong in another server";
    let (policy, most, used) = (info.get("maxmemory_policy"), info.number("maxmemory"), info.number("used_memory"));
    match policy {
        "noeviction" | "" => findings.ok("eviction", "maxmemory-policy noeviction"),
        policy if most == 0 => findings.warning(
            "eviction",
            format!("maxmemory-policy {policy}, without a limit of memory"),
            "as soon as an operator sets a limit, records are evicted, and their operations run again",
            NOEVICTION,
        ),
        policy => findings.error(
            "eviction",
            format!("maxmemory-policy {policy}"),
            "a server that is full evicts records before their retention ends, and their operations run again",
            NOEVICTION,
        ),
    }
    match info.number("evicted_keys") {
        0 => {}
        evicted => findings.error(
            "evicted keys",
            format!("{evicted} since the server started"),
            "if records were among them, their operations run again",
            NOEVICTION,
        ),
    }
    let percent = used.saturating_mul(100).checked_div(most).unwrap_or_default();
    let found = format!("{} MiB used", used >> 20);
    match percent {
        100.. if matches!(policy, "noeviction" | "") => findings.error(
            "memory",
            format!("{found}, {percent} % of maxmemory"),
            "the server refuses new keys: no handler runs",
            "give it more memory (`CONFIG SET maxmemory` and `CONFIG REWRITE`), or shorten `ttl` and results",
        ),
        90.. => findings.warning(
            "memory",
            format!("{found}, {percent} % of maxmemory"),
            "a full server refuses new keys: no handler runs",
            "give it more memory, or shorten `ttl` and results",
        ),
        _ => findings.ok("memory", found),
    }
}

/// Checks whether `FLUSHALL` or `FLUSHDB` has deleted all records since the server started.
fn flushes(info: &Info<'_>, findings: &mut Findings) {
    let calls = |command: &str| {
        let calls = info.get(&format!("cmdstat_{command}")).strip_prefix("calls=");
        calls.and_then(|calls| calls.split(',').next()?.parse::<u64>().ok()).unwrap_or_default()
    };
    match calls("flushall") + calls("flushdb") {
        0 => {}
        times => findings.warning(
            "flushes",
            format!("FLUSHALL or FLUSHDB ran since the server started, calls: {times}"),
            "all records of that time are gone, and their operations run again",
            "forbid them to all logins but one: `ACL SETUSER NAME -flushall -flushdb`",
        ),
    }
}

fn replicas(info: &Info<'_>, servers: &Servers, findings: &mut Findings) {
    let role = info.get("role");
    if role != "master" && !matches!(servers.topology, Topology::Cluster(_)) {
        findings.error(
            "replication",
            format!("the server's role is `{role}`"),
            "it takes no writes, and the store refuses to open",
            "connect to the primary, or through its sentinels with `redis-sentinel://`",
        );
        return;
    }
    match info.number("connected_slaves") {
        0 => findings.warning(
            "replication",
            "no replica is connected",
            "if this machine is lost, so are all records, and their operations run again",
            "add a replica, and a way to fail over (Sentinel, Cluster)",
        ),
        count => findings.ok(
            "replication",
            format!(
                "{count} replicas; a failover forgets what had not reached them, unless the store has `min_replicas`"
            ),
        ),
    }
}

async fn cluster(server: &mut MultiplexedConnection, findings: &mut Findings) {
    match ask::<String>(server, &["CLUSTER", "INFO"]).await {
        Ok(info) if Info(&info).get("cluster_state") == "ok" => findings.ok("cluster", "cluster_state ok"),
        Ok(info) => findings.error(
            "cluster",
            format!("cluster_state {}", Info(&info).get("cluster_state")),
            "keys whose slot has no node can't be reserved",
            "`redis-cli --cluster check`, and bring the missing node back",
        ),
        Err(error) => findings.error(
            "cluster",
            format!("CLUSTER INFO is refused: {error}"),
            "the store can't find the node of a key",
            "connect with `redis://` if this is no cluster; otherwise allow the login `+cluster`",
        ),
    }
}

async fn permissions(server: &mut MultiplexedConnection, namespace: &str, findings: &mut Findings) {
    let check = "permissions";
    let Ok(user) = ask::<String>(server, &["ACL", "WHOAMI"]).await else {
        findings.unknown(check, "this login may not ask (`ACL WHOAMI`)", "the probe below tests most rights");
        return;
    };
    let key = format!("{namespace}probe");
    let mut refused = Vec::new();
    // `ACL DRYRUN` tests each command for this login without running it.
    for right in RIGHTS {
        let words: Vec<_> = ["ACL", "DRYRUN", &user].into_iter().chain(right.words(&key)).collect();
        match ask::<Value>(server, &words).await {
            Ok(Value::Okay) => {}
            Ok(_) => refused.push(right),
            Err(_) => {
                findings.unknown(check, "this login may not ask (`ACL DRYRUN`)", "the probe below tests most rights");
                return;
            }
        }
    }
    let lacks = |purposes: &[Purpose]| {
        let names = refused.iter().filter(|right| purposes.contains(&right.purpose)).map(|right| right.name());
        Some(names.collect::<Vec<_>>().join(", ")).filter(|names| !names.is_empty())
    };
    let found = |names: &str| format!("`{user}` may not send {names}");
    let remedy = format!("`ACL SETUSER NAME ~{namespace}* &{namespace}* +COMMAND` for each of these commands");
    // Calls fail without these rights. The rights checked below are needed only for replicas and lists.
    match lacks(&[Purpose::Opening, Purpose::Calls, Purpose::Wakes]) {
        None => findings.ok(check, format!("`{user}` may send each command that calls need")),
        Some(names) => findings.error(
            check,
            found(&names),
            "operations that need them fail, or duplicates that wait are not woken",
            &remedy,
        ),
    }
    for (check, purpose, consequence) in [
        (
            "permissions for replicas",
            Purpose::Replicas,
            "a store with `min_replicas` refuses to open; without PEXPIRETIME it is unknown since when a record is held",
        ),
        ("permissions for lists", Purpose::Lists, "`idem list`, `stats` and `watch` fail"),
    ] {
        if let Some(names) = lacks(&[purpose]) {
            findings.warning(check, found(&names), consequence, &remedy);
        }
    }
}
