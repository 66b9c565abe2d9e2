//! A table of `PostgresStore` with `IDEM_BENCH_ROWS` records (default: a million), half of them due for the purge: a
//! plain table, and one with 16 hash partitions. The server loses nothing (`fsync` and `synchronous_commit` on).
//!
//! - *Purge*: `Store::purge` in batches of several sizes until no record is due, while first runs of new keys begin at
//!   planned times, 200 per second. The latency of a first run is measured from its planned time, so that it includes
//!   the time for which its call had to wait before it began. Another task reserves keys whose records the purge is
//!   about to remove.
//! - *Settings*: first runs under several fill factors, with renewals: the bench prints the share of updates that
//!   change no index, and the bytes of the table.
//!
//! The keys are random, so that writes reach all parts of the indexes, as with identifiers of clients.

#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Far below 2^52.
#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use idem_benches::{is_wanted, sized};
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Lease, Reservation, ReserveRequest, Verdict, renew_all};
use idem_runtime::{Json, Key, PostgresStore, Store};
use idem_tests::postgres::PostgresServer;
use tokio::task::JoinSet;
use tokio_postgres::Client;

const SETTINGS: [&str; 4] =
    ["shared_buffers=1GB", "max_wal_size=8GB", "checkpoint_timeout=15min", "track_io_timing=on"];
const WEEK: Duration = Duration::from_secs(7 * 86_400);
/// First runs per second during the purge.
const RATE: u32 = 200;

/// Creates the records with the numbers `first` to `last`. Records with numbers up to `due` are expired. Each record is
/// reserved and then completed, as by a call.
const FILL: &str = "CREATE FUNCTION named(n bigint) RETURNS text LANGUAGE sql IMMUTABLE RETURN
  'order:' || lpad(to_hex(n * 2654435761 % 4294967296), 8, '0') || '-7c4e-4d1a-9b0e-5f2a7d3c8e61';
CREATE PROCEDURE fill(first bigint, last bigint, due bigint) LANGUAGE plpgsql AS $$
DECLARE n bigint := first; upto bigint;
BEGIN
  WHILE n <= last LOOP
    upto := least(n + 255, last);
    INSERT INTO idem.records (key, owner, on_crash_fail, lease_ms, ttl_ms, holder, format, state, attempt, attempts_used,
                              first_seen_at, began_at, lapses_at, expires_at, listed_at)
    SELECT '1/shop::pay/' || named(i), decode(md5((i + 7)::text), 'hex'), false, 30000, 604800000,
           'worker-7.shop.internal/4711/', 1, 'pending', 1, 1, t, t, t + interval '30 s', t + interval '7 days 30 s',
           t + interval '7 days'
    FROM (SELECT i, now() - CASE WHEN i <= due THEN interval '9 days' ELSE interval '1 day' END + i * interval '5 ms' AS t
          FROM generate_series(n, upto) AS i) AS x;
    COMMIT;
    UPDATE idem.records AS r SET state = 'completed', lease_ms = NULL, ttl_ms = NULL, codec = 'json',
           result = convert_to(repeat(md5(i::text), 5), 'UTF8'), lapses_at = began_at + interval '200 ms',
           expires_at = began_at + interval '7 days 200 ms', listed_at = least(listed_at, began_at + interval '7 days 200 ms')
    FROM generate_series(n, upto) AS i WHERE r.key = '1/shop::pay/' || named(i);
    COMMIT;
    n := upto + 1;
  END LOOP;
END $$";

/// Query for the bytes of the heap, of the primary key and of the index of times, summed over all partitions.
const SIZES: &str = "SELECT coalesce(sum(pg_relation_size(c.oid)) FILTER (WHERE c.relkind = 'r'), 0)::int8, \
     coalesce(sum(pg_relation_size(c.oid)) FILTER (WHERE c.relname LIKE '%pkey'), 0)::int8, \
     coalesce(sum(pg_relation_size(c.oid)) FILTER (WHERE c.relname LIKE '%listed_at%'), 0)::int8 \
     FROM pg_class c WHERE c.relnamespace = 'idem'::regnamespace AND c.relkind IN ('r', 'i')";

struct Bench {
    server: PostgresServer,
    raw: Client,
    store: PostgresStore,
}

fn result(bytes: usize) -> Finish {
    // Random bytes, which the server can't compress.
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let bytes = Bytes::from((0..bytes).map(|_| next()).collect::<Vec<_>>());
    Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes })
}

async fn reserve(store: &PostgresStore, text: String) -> Reservation {
    let key = Key::new("shop::pay", text).expect("a valid key");
    let beats = store.context();
    let request = ReserveRequest::new(key, beats.new_owner(), Duration::from_secs(30), WEEK).holder(beats.holder());
    store.reserve(&request).await.expect("answers")
}

/// Makes a first run of the new key `text`, whose result has `bytes` bytes, with `beats` renewals.
async fn first_run(store: &PostgresStore, text: String, bytes: usize, beats: usize) {
    let Reservation::Granted { lease, .. } = reserve(store, text).await else { panic!("the key is new") };
    for _ in 0..beats {
        assert_eq!(renew_all(store, std::slice::from_ref(&lease)).await.expect("renews"), [Verdict::Applied]);
    }
    finish(store, &lease, bytes).await;
}

async fn finish(store: &PostgresStore, lease: &Lease, bytes: usize) {
    assert_eq!(store.finish(lease, &result(bytes)).await.expect("finishes"), Verdict::Applied);
}

/// Converts a time to milliseconds.
fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Formats a list of times in milliseconds as their number, median, 99th percentile and maximum.
fn spread(mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times.get(((times.len() as f64 - 1.0) * share) as usize).copied().unwrap_or_default();
    format!("{:>6} calls: p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms", times.len(), at(0.5), at(0.99), at(1.0))
}

impl Bench {
    async fn new(partitions: u16) -> Self {
        let server = PostgresServer::start_with(&SETTINGS);
        let options = PostgresStore::options().ensure_schema().partitions(partitions);
        let store = options.connect(&server.url()).await.expect("connects");
        let raw = server.raw().await;
        Self { server, raw, store }
    }

    async fn number(&self, query: &str) -> i64 {
        self.raw.query_one(query, &[]).await.expect("answers").get(0)
    }

    async fn fill(&self, rows: i64) {
        self.raw.batch_execute(FILL).await.expect("can be created");
        // The planner settings are fixed: a procedure keeps the plans that were made for an empty table.
        let settings = "SET synchronous_commit = off; SET enable_seqscan = off; SET enable_bitmapscan = off; \
                        SET enable_hashjoin = off; SET enable_mergejoin = off";
        self.raw.batch_execute(settings).await.expect("can be set");
        let began = Instant::now();
        self.raw.batch_execute(&format!("CALL fill(1, {rows}, {})", rows / 2)).await.expect("fills");
        for statement in ["VACUUM ANALYZE idem.records", "CHECKPOINT"] {
            self.raw.batch_execute(statement).await.expect("done");
        }
        println!("filled with {rows} records, half of them due, in {:.0} s", began.elapsed().as_secs_f64());
    }

    async fn sizes(&self, when: &str) {
        let row = self.raw.query_one(SIZES, &[]).await.expect("answers");
        let mb = |at: usize| row.get::<_, i64>(at) as f64 / 1e6;
        let live = self.number("SELECT count(*) FROM idem.records").await;
        println!(
            "{when}: {live} records; heap {:.0} MB, primary key {:.0} MB, index of times {:.0} MB",
            mb(0),
            mb(1),
            mb(2)
        );
    }

    /// Makes first runs of new keys, `RATE` per second, until `over` is set. Returns the latency of each first run,
    /// counted from its planned start.
    fn load(&self, name: &'static str, over: &Arc<AtomicBool>) -> tokio::task::JoinHandle<Vec<f64>> {
        let (store, over) = (self.store.clone(), Arc::clone(over));
        tokio::spawn(async move {
            let (began, mut calls, mut times) = (tokio::time::Instant::now(), JoinSet::new(), Vec::new());
            for n in 0.. {
                let at = began + Duration::from_secs(1) * n / RATE;
                tokio::time::sleep_until(at).await;
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let store = store.clone();
                calls.spawn(async move {
                    first_run(&store, format!("{name}:{n}"), 160, 0).await;
                    ms(at.elapsed())
                });
                while let Some(took) = calls.try_join_next() {
                    times.push(took.expect("done"));
                }
            }
            while let Some(took) = calls.join_next().await {
                times.push(took.expect("done"));
            }
            times
        })
    }

    /// Purges `rows` records in batches of `batch`, and prints the speed.
    async fn purge(&self, name: &'static str, batch: u32, rows: u64, purged: &Arc<AtomicU64>) {
        let over = Arc::new(AtomicBool::new(false));
        let load = self.load(name, &over);
        // Another task reserves keys that the purge is about to remove. This task has its own store, because calls in
        // one store would wait for the same batch.
        let met = {
            let (over, purged) = (Arc::clone(&over), Arc::clone(purged));
            let store = PostgresStore::connect(&self.server.url()).await.expect("connects");
            tokio::spawn(async move {
                let mut times = Vec::new();
                for n in 0_u64.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let next = purged.load(Ordering::Relaxed) + 1 + n * 37 % (2 * u64::from(batch));
                    let began = Instant::now();
                    reserve(&store, named(next)).await;
                    times.push(ms(began.elapsed()));
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                times
            })
        };
        let (began, mut gone, mut statements) = (Instant::now(), 0, Vec::new());
        while gone < rows {
            let asked = Instant::now();
            let count = self.store.purge(batch).await.expect("purges");
            statements.push(ms(asked.elapsed()));
            if count == 0 {
                break;
            }
            gone += count;
            purged.fetch_add(count, Ordering::Relaxed);
        }
        let took = began.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        println!("purge, batches of {batch}: {gone} records, {:.0} a second", gone as f64 / took);
        println!("    purge statements        {}", spread(statements));
        println!("    first runs beside it    {}", spread(load.await.expect("done")));
        println!("    keys that are purged    {}", spread(met.await.expect("done")));
    }

    async fn at_size(rows: i64, partitions: u16) {
        println!("\n### {rows} records, {}\n", kind(partitions));
        let bench = Self::new(partitions).await;
        bench.fill(rows).await;
        bench.sizes("before").await;
        let over = Arc::new(AtomicBool::new(false));
        let load = bench.load("alone", &over);
        tokio::time::sleep(sized(Duration::from_secs(20), Duration::from_millis(300))).await;
        over.store(true, Ordering::Relaxed);
        println!("    first runs alone        {}", spread(load.await.expect("done")));
        let (due, purged) = (rows as u64 / 2, Arc::new(AtomicU64::new(0)));
        for (name, batch, rows) in [("small", 500, due / 4), ("middle", 1000, due / 4), ("large", 5000, due / 4)] {
            bench.purge(name, batch, rows, &purged).await;
        }
        bench.purge("rest", 500, u64::MAX, &purged).await;
        let left = bench.number("SELECT count(*) FROM idem.records WHERE expires_at < now()").await;
        println!("expired records that are left: {left}");
        bench.sizes("after").await;
        let began = Instant::now();
        bench.raw.batch_execute("VACUUM idem.records").await.expect("vacuums");
        println!("a vacuum of what autovacuum left: {:.0} s", began.elapsed().as_secs_f64());
        bench.sizes("vacuumed").await;
        // The server adds the counts of its sessions to its statistics within about a second.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let stats = "SELECT coalesce(sum(idx_scan), 0)::int8, coalesce(sum(n_tup_hot_upd * 1000) / nullif(sum(n_tup_upd), 0), 0)::int8, \
                     coalesce(sum(autovacuum_count), 0)::int8 FROM pg_stat_user_tables WHERE schemaname = 'idem'";
        let row = bench.raw.query_one(stats, &[]).await.expect("answers");
        let [scans, hot, vacuums] = [0, 1, 2].map(|at| row.get::<_, i64>(at));
        println!("index scans {scans}; of 1000 updates {hot} changed no index; autovacuum ran {vacuums} times");
    }

    async fn settings(fill_factor: u32, bytes: usize, calls: u64) {
        let bench = Self::new(0).await;
        let set = format!("ALTER TABLE idem.records SET (fillfactor = {fill_factor}, autovacuum_enabled = off)");
        bench.raw.batch_execute(&set).await.expect("can be set");
        let position = "SELECT (pg_current_wal_insert_lsn() - '0/0')::int8";
        let (log, began) = (bench.number(position).await, Instant::now());
        let mut tasks = JoinSet::new();
        for task in 0..64 {
            let store = bench.store.clone();
            tasks.spawn(async move {
                for n in 0..calls / 64 {
                    // One in eight handlers runs for two beats.
                    first_run(&store, format!("{task}:{n}"), bytes, if n % 8 == 0 { 2 } else { 0 }).await;
                }
            });
        }
        tasks.join_all().await;
        let took = began.elapsed().as_secs_f64();
        let log = bench.number(position).await - log;
        let Self { server, raw, store } = bench;
        drop(store);
        let stats = "SELECT n_tup_upd, n_tup_hot_upd, pg_relation_size(relid), pg_indexes_size(relid), n_tup_ins \
                     FROM pg_stat_user_tables WHERE schemaname = 'idem' AND n_tup_upd >= n_tup_ins";
        let row = loop {
            match raw.query_opt(stats, &[]).await.expect("answers") {
                Some(row) if row.get::<_, i64>(4) as u64 >= calls / 64 * 64 => break row,
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let [updates, hot, heap, indexes, made] = [0, 1, 2, 3, 4].map(|at| row.get::<_, i64>(at) as f64);
        println!(
            "| {fill_factor} | {bytes} | {:.1} % | {:.0} | {:.0} | {:.0} | {:.1} |",
            hot / updates * 100.0,
            heap / made,
            indexes / made,
            log as f64 / made,
            made / took / 1e3,
        );
        drop(server);
    }
}

fn kind(partitions: u16) -> String {
    if partitions == 0 { "a plain table".to_owned() } else { format!("{partitions} partitions") }
}

/// Names a record as [`FILL`] does: the names of successive records share no leading digits.
fn named(n: u64) -> String {
    format!("order:{:08x}-7c4e-4d1a-9b0e-5f2a7d3c8e61", n * 2_654_435_761 % (1 << 32))
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    let rows = std::env::var("IDEM_BENCH_ROWS").ok().map_or(1_000_000, |rows| rows.parse().expect("a number"));
    for partitions in [0, 16] {
        if is_wanted(&format!("purge, {}", kind(partitions))) {
            Bench::at_size(sized(rows, 20_000), partitions).await;
        }
    }
    if is_wanted("settings") {
        println!("\n### Fill factor\n");
        println!(
            "| fill factor | bytes of a result | updates that change no index | bytes of heap a record | of indexes | of log a first run | thousand first runs a second |"
        );
        println!("|---|---|---|---|---|---|---|");
        for bytes in [160, 1000, 4000] {
            for fill_factor in [20, 30, 50, 70, 100] {
                Bench::settings(fill_factor, bytes, sized(50_000, 640)).await;
            }
        }
    }
}
