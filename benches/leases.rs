//! Measures how much one renewal of 10 000 and of 100 000 leases costs a Redis server.
//!
//! The handlers are real and stay pending, and their store renews the leases as usual. The server's counters are read:
//! `scripts` is the server's time in `EVALSHA`, which includes the commands inside the scripts; `in all` is the
//! processor time of its main thread, including reading, parsing and answering. Both figures are scaled to as many
//! renewals as there are leases, because the number of leases that are due in a round varies. The hand-written side
//! renews each lease by its own script call, in pipelines of 500.

use std::sync::Arc;
use std::time::Duration;

use idem_benches::{Goal, Samples, Table, is_wanted, sized};
use idem_runtime::{Error, RedisStore, idempotent};
use idem_tests::server::{Kind, RedisServer};
use redis::aio::MultiplexedConnection;
use redis::cmd;
use tokio::sync::{Barrier, Semaphore};
use tokio::task::JoinSet;

const RENEW: &str = "\
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end \
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])";

struct Hall {
    entered: Barrier,
    /// Semaphore that the handlers wait for. Closing the semaphore at the end of the measurement lets the handlers
    /// return.
    leave: Semaphore,
}

#[idempotent(key = "{id}", ttl = "7d", store = store, scope = "bench::leases", lease = "3s")]
async fn hold(store: &RedisStore, id: usize, hall: &Hall) -> Result<(), Error> {
    hall.entered.wait().await;
    hall.leave.acquire().await.map_or(Ok(()), |_| Ok(()))
}

/// Counters of the server from its start until now.
#[derive(Clone, Copy, Debug)]
struct Counters {
    renewals: f64,
    script_ms: f64,
    cpu_ms: f64,
}

impl Counters {
    async fn read(connection: &mut MultiplexedConnection) -> Self {
        let info: String = cmd("INFO").arg("commandstats").arg("cpu").query_async(connection).await.expect("answers");
        let field = |line: &str, field: &str| -> f64 {
            let line = info.lines().find_map(|it| it.strip_prefix(line)).unwrap_or_default();
            let value = line.split(',').find_map(|it| it.strip_prefix(field)).unwrap_or("0");
            value.trim().parse().expect("a number")
        };
        let seconds = field("used_cpu_user_main_thread:", "") + field("used_cpu_sys_main_thread:", "");
        Self {
            renewals: field("cmdstat_pexpire:", "calls="),
            script_ms: field("cmdstat_evalsha:", "usec=") / 1e3,
            cpu_ms: seconds * 1e3,
        }
    }
}

/// Entry of the slow log: number, time, microseconds, command, client address, client name.
type Entry = (i64, i64, u32, Vec<redis::Value>, String, String);

/// Measurements, one for each round, in milliseconds: time in scripts, processor time, and the longest call.
#[derive(Default)]
struct Rounds {
    /// Number of leases. The figures are scaled to this number of renewals.
    beat: f64,
    script: Vec<f64>,
    cpu: Vec<f64>,
    longest: Vec<f64>,
}

impl Rounds {
    #[allow(clippy::cast_precision_loss)] // Far below 2^52.
    fn of(leases: usize) -> Self {
        Self { beat: leases as f64, ..Self::default() }
    }

    async fn measure(&mut self, connection: &mut MultiplexedConnection, round: impl Future<Output = ()>) {
        cmd("SLOWLOG").arg("RESET").exec_async(connection).await.expect("answers");
        let before = Counters::read(connection).await;
        round.await;
        let after = Counters::read(connection).await;
        let beats = (after.renewals - before.renewals) / self.beat;
        if beats < 0.01 {
            return;
        }
        self.script.push((after.script_ms - before.script_ms) / beats);
        self.cpu.push((after.cpu_ms - before.cpu_ms) / beats);
        let slow: Vec<Entry> = cmd("SLOWLOG").arg("GET").arg(-1).query_async(connection).await.expect("answers");
        let evalsha =
            |entry: &&Entry| matches!(entry.3.first(), Some(redis::Value::BulkString(name)) if name == b"EVALSHA");
        let longest = slow.iter().filter(evalsha).map(|entry| entry.2).max().unwrap_or_default();
        self.longest.push(f64::from(longest) / 1e3);
    }

    fn print(self, table: &Table, name: &str, script: Goal, cpu: Goal, longest: Goal) {
        let lines = [("scripts", self.script, script), ("in all", self.cpu, cpu)];
        for (what, samples, goal) in lines {
            let samples = Samples::from(samples);
            table.value(&format!("{name}: {what}"), &samples, samples.median(), goal);
        }
        let samples = Samples::from(self.longest);
        table.value(&format!("{name}: longest call"), &samples, samples.max(), longest);
    }
}

async fn by_hand(connection: &mut MultiplexedConnection, script: &str, leases: usize) {
    for from in (0..leases).step_by(500) {
        let mut pipeline = redis::pipe();
        for lease in from..leases.min(from + 500) {
            pipeline.cmd("EVALSHA").arg(script).arg(1).arg(format!("hand:{lease}")).arg("owner").arg(604_800_000);
        }
        let done: Vec<u32> = pipeline.query_async(connection).await.expect("answers");
        assert!(done.iter().all(|done| *done == 1), "a lease was lost");
    }
}

async fn bench(table: &Table) {
    let (leases, rounds) = (sized(10_000, 500), sized(12, 2));
    let server = RedisServer::start(Kind::Redis);
    let mut connection = server.raw().await;
    // The slow log records every call, so that the longest call can be found.
    for (name, value) in [("slowlog-log-slower-than", 20), ("slowlog-max-len", 100_000)] {
        cmd("CONFIG").arg("SET").arg(name).arg(value).exec_async(&mut connection).await.expect("answers");
    }

    if is_wanted("by hand") {
        let script: String = cmd("SCRIPT").arg("LOAD").arg(RENEW).query_async(&mut connection).await.expect("loads");
        for lease in 0..leases {
            let set = cmd("SET").arg(format!("hand:{lease}")).arg("owner").exec_async(&mut connection).await;
            set.expect("answers");
        }
        let mut measured = Rounds::of(leases);
        for _ in 0..rounds {
            let mut connection = connection.clone();
            let mut counting = connection.clone();
            measured.measure(&mut counting, by_hand(&mut connection, &script, leases)).await;
        }
        measured.print(table, "for comparison, one call a lease by hand", Goal::None, Goal::None, Goal::None);
    }

    // The library's own heartbeats renew the leases, in intervals of a second.
    let goals = [(10_000, Goal::AtMost(25.0), Goal::AtMost(3.0)), (100_000, Goal::None, Goal::None)];
    for (beat, cpu, longest) in goals {
        let name = format!("one beat of {} 000 leases", beat / 1000);
        if !is_wanted(&name) {
            continue;
        }
        let leases = sized(beat, 500);
        let store = RedisStore::connect(&server.url()).await.expect("connects");
        let hall = Arc::new(Hall { entered: Barrier::new(leases + 1), leave: Semaphore::new(0) });
        let mut handlers = JoinSet::new();
        for id in 0..leases {
            let (store, hall) = (store.clone(), Arc::clone(&hall));
            handlers.spawn(async move { hold(&store, beat + id, &hall).await });
        }
        hall.entered.wait().await;
        let mut measured = Rounds::of(leases);
        // The first beat may include work from the start of the handlers, so one round is added at the beginning and
        // not counted.
        for round in 0..=rounds {
            let mut each = Rounds::of(leases);
            // On a busy machine a beat may come late, so that no lease is renewed in this second.
            while each.script.is_empty() {
                each.measure(&mut connection, pause(Duration::from_secs(1))).await;
            }
            if round > 0 {
                measured.script.extend(each.script);
                measured.cpu.extend(each.cpu);
                measured.longest.extend(each.longest);
            }
        }
        hall.leave.close();
        for held in handlers.join_all().await {
            held.expect("no lease was lost");
        }
        measured.print(table, &name, Goal::None, cpu, longest);
    }
}

async fn pause(duration: Duration) {
    #[allow(clippy::disallowed_methods, reason = "a bench waits for real beats")]
    tokio::time::sleep(duration).await;
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let table = Table::new("Leases on Redis, processor time of the server", "ms", "result");
    runtime.expect("a runtime can be built").block_on(bench(&table));
}
