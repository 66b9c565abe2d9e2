//! The least that a step can cost on a server, by hand: the limit of the lines "step" of the bench `matrix`.
//!
//! Each side makes its writes for 64 records, and the figure is the time of the write of a step against the mean of
//! both writes of a first run. On Redis and MariaDB the 64 records share a script or a statement, as those of 64 tasks
//! do; reservations on Redis share a pipeline. On DynamoDB each record has a request of its own. Every write of a step
//! compares the owner and renews the lease, as the write of a result compares the owner. The figure of Redis is
//! processor time of the server, because there the pipeline costs the client more than the server.

#![allow(clippy::cast_precision_loss)] // Numbers of records are far below 2^52.
#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::sync::LazyLock;
use std::time::Instant;

use idem_benches::{Goal, Receipt, Samples, Table, is_wanted, sized};
use idem_tests::server::{Kind, RedisServer};
use redis::aio::MultiplexedConnection;

/// Number of records that share a write.
const RECORDS: usize = 64;
const LEASE_MS: u64 = 30_000;
const TTL_MS: u64 = 7 * 86_400_000;
/// Journal with the first of three steps, as long as the library's.
const JOURNAL: [u8; 60] = [b'j'; 60];

/// A server, and the writes of one batch of records on it.
trait ByHand {
    /// Creates pending records of the batch.
    async fn reserve(&mut self, batch: u64);
    /// Writes a journal into each record.
    async fn append(&mut self, batch: u64);
    /// Writes a result into each record.
    async fn complete(&mut self, batch: u64);
    /// Returns the seconds so far: of the clock, or of the server's processor.
    async fn now(&mut self) -> f64 {
        static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);
        STARTED.elapsed().as_secs_f64()
    }
}

fn key(batch: u64, record: usize) -> String {
    format!("bench::ship:order:{batch}:{record}")
}

fn owner(batch: u64, record: usize) -> String {
    format!("{batch:012}{record:04}")
}

fn result() -> Vec<u8> {
    serde_json::to_vec(&Receipt::of(1)).expect("encodes")
}

// Redis

const APPEND: &str = "\
    local found = redis.call('MGET', unpack(KEYS)) \
    for i = 1, #KEYS do \
      local record = found[i] \
      if not record or string.sub(record, 1, 16) ~= ARGV[3 * i - 2] then return redis.error_reply('refused') end \
      redis.call('SET', KEYS[i], record .. ARGV[3 * i - 1], 'PX', ARGV[3 * i]) \
    end \
    return #KEYS";
const COMPLETE: &str = "\
    local found = redis.call('MGET', unpack(KEYS)) \
    for i = 1, #KEYS do \
      local record = found[i] \
      if not record or string.sub(record, 1, 16) ~= ARGV[3 * i - 2] then return redis.error_reply('refused') end \
      redis.call('SET', KEYS[i], ARGV[3 * i - 1], 'PX', ARGV[3 * i]) \
    end \
    return #KEYS";

struct Redis {
    connection: MultiplexedConnection,
    append: String,
    complete: String,
}

impl Redis {
    async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).expect("a valid URL");
        let mut connection = client.get_multiplexed_async_connection().await.expect("connects");
        let [mut append, mut complete] = [APPEND, COMPLETE].map(str::to_owned);
        for script in [&mut append, &mut complete] {
            let loaded = redis::cmd("SCRIPT").arg("LOAD").arg(&**script).query_async(&mut connection).await;
            *script = loaded.expect("loads");
        }
        Self { connection, append, complete }
    }

    async fn call(&mut self, script: &str, batch: u64, value: &[u8], kept: u64) {
        let mut call = redis::cmd("EVALSHA");
        call.arg(script).arg(RECORDS);
        for record in 0..RECORDS {
            call.arg(key(batch, record));
        }
        for record in 0..RECORDS {
            call.arg(owner(batch, record)).arg(value).arg(kept);
        }
        let done: usize = call.query_async(&mut self.connection).await.expect("answers");
        assert_eq!(done, RECORDS);
    }
}

impl ByHand for Redis {
    async fn reserve(&mut self, batch: u64) {
        let mut pipeline = redis::pipe();
        for record in 0..RECORDS {
            let set = pipeline.cmd("SET").arg(key(batch, record)).arg(owner(batch, record));
            set.arg("NX").arg("GET").arg("PX").arg(LEASE_MS + TTL_MS);
        }
        let before: Vec<Option<Vec<u8>>> = pipeline.query_async(&mut self.connection).await.expect("answers");
        assert!(before.iter().all(Option::is_none));
    }

    async fn append(&mut self, batch: u64) {
        let script = self.append.clone();
        self.call(&script, batch, &JOURNAL, LEASE_MS + TTL_MS).await;
    }

    async fn complete(&mut self, batch: u64) {
        let script = self.complete.clone();
        self.call(&script, batch, &result(), TTL_MS).await;
    }

    async fn now(&mut self) -> f64 {
        let info: String = redis::cmd("INFO").arg("cpu").query_async(&mut self.connection).await.expect("answers");
        let seconds = |name: &str| -> f64 {
            let value = info.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().parse().ok()).expect("a number")
        };
        seconds("used_cpu_user_main_thread:") + seconds("used_cpu_sys_main_thread:")
    }
}

// MariaDB and MySQL

#[cfg(feature = "mysql")]
mod mysql {
    use idem_benches::by_hand::mysql::NOW;
    use idem_runtime::MySqlStore;
    use mysql_async::prelude::Queryable as _;
    use mysql_async::{Conn, Opts, OptsBuilder, Value};

    use super::{ByHand, JOURNAL, LEASE_MS, RECORDS, TTL_MS, key, owner, result};

    pub(crate) struct MySql {
        connection: Conn,
        reserve: String,
        append: String,
        complete: String,
    }

    impl MySql {
        pub(crate) async fn connect(url: &str) -> Self {
            let opts = OptsBuilder::from_opts(Opts::from_url(url).expect("a valid URL")).prefer_socket(false);
            let mut connection = Conn::new(opts).await.expect("connects");
            connection.query_drop(MySqlStore::schema_sql("hand_records")).await.expect("makes the table");
            let lapses = format!("{NOW} + {LEASE_MS} * 1000");
            let expires = format!("{NOW} + {} * 1000", LEASE_MS + TTL_MS);
            let row = format!(
                "(?, ?, 1, 'pending', 1, 1, 0, {LEASE_MS}, {TTL_MS}, {NOW}, {NOW}, {lapses}, {expires}, {NOW})"
            );
            let reserve = format!(
                "INSERT INTO hand_records (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, \
                 lease_ms, ttl_ms, first_seen_at, began_at, lapses_at, expires_at, listed_at) VALUES {}",
                vec![row; RECORDS].join(", ")
            );
            let rows = vec!["SELECT ? AS `key`, ? AS `owner`, ? AS `value`"; RECORDS].join(" UNION ALL ");
            let update = |set: &str| {
                format!(
                    "UPDATE ({rows}) AS u STRAIGHT_JOIN hand_records AS r FORCE INDEX (PRIMARY) ON r.`key` = u.`key` \
                     SET r.`result` = u.`value`, {set} WHERE r.`owner` = u.`owner` AND r.`state` = 'pending'"
                )
            };
            let append = update(&format!("r.`lapses_at` = {lapses}, r.`expires_at` = {expires}"));
            let complete = update(&format!(
                "r.`state` = 'completed', r.`codec` = 'json', r.`lease_ms` = NULL, r.`ttl_ms` = NULL, \
                 r.`expires_at` = {NOW} + {TTL_MS} * 1000"
            ));
            Self { connection, reserve, append, complete }
        }

        async fn write(&mut self, batch: u64, value: Option<&[u8]>) {
            let statement = match value {
                None => &self.reserve,
                Some(value) if value == JOURNAL => &self.append,
                Some(_) => &self.complete,
            };
            let row = |record| {
                let named = [key(batch, record).into_bytes(), owner(batch, record).into_bytes()];
                named.into_iter().chain(value.map(<[u8]>::to_vec)).map(Value::Bytes)
            };
            let params: Vec<Value> = (0..RECORDS).flat_map(row).collect();
            self.connection.exec_drop(&**statement, params).await.expect("answers");
            assert_eq!(self.connection.affected_rows(), RECORDS as u64);
        }
    }

    impl ByHand for MySql {
        async fn reserve(&mut self, batch: u64) {
            self.write(batch, None).await;
        }

        async fn append(&mut self, batch: u64) {
            self.write(batch, Some(&JOURNAL)).await;
        }

        async fn complete(&mut self, batch: u64) {
            self.write(batch, Some(&result())).await;
        }
    }
}

// DynamoDB

#[cfg(feature = "dynamodb")]
mod dynamodb {
    use std::collections::HashMap;

    use aws_sdk_dynamodb::Client;
    use aws_sdk_dynamodb::primitives::Blob;
    use aws_sdk_dynamodb::types::AttributeValue;
    use idem_tests::dynamo::{Emulator, TABLE, Wire, client};

    use super::{ByHand, JOURNAL, LEASE_MS, RECORDS, key, owner, result};

    pub(crate) struct Dynamo(Client);

    impl Dynamo {
        pub(crate) fn connect(emulator: &Emulator) -> Self {
            Self(client(&Wire::to(&emulator.endpoint())))
        }

        fn item(batch: u64, record: usize) -> HashMap<String, AttributeValue> {
            let texts = [("key", key(batch, record)), ("owner", owner(batch, record))];
            let numbers = [("lapses_at", LEASE_MS), ("expires_at", 1 << 40), ("purge_at", 1 << 40)];
            let texts = texts.map(|(name, text)| (name, AttributeValue::S(text)));
            let numbers = numbers.map(|(name, number)| (name, AttributeValue::N(number.to_string())));
            texts.into_iter().chain(numbers).map(|(name, value)| (name.to_owned(), value)).collect()
        }
    }

    impl ByHand for Dynamo {
        async fn reserve(&mut self, batch: u64) {
            for record in 0..RECORDS {
                let put = self.0.put_item().table_name(TABLE).set_item(Some(Self::item(batch, record)));
                let put =
                    put.condition_expression("attribute_not_exists(#key)").expression_attribute_names("#key", "key");
                put.send().await.expect("is new");
            }
        }

        async fn append(&mut self, batch: u64) {
            let set = "SET #result = :journal, #lapses_at = :at, #expires_at = :at, #purge_at = :at";
            for record in 0..RECORDS {
                let mut update =
                    self.0.update_item().table_name(TABLE).key("key", AttributeValue::S(key(batch, record)));
                for name in ["owner", "result", "lapses_at", "expires_at", "purge_at"] {
                    update = update.expression_attribute_names(format!("#{name}"), name);
                }
                let update = update.update_expression(set).condition_expression("#owner = :owner");
                let update = update
                    .expression_attribute_values(":owner", AttributeValue::S(owner(batch, record)))
                    .expression_attribute_values(":at", AttributeValue::N((1_u64 << 40).to_string()))
                    .expression_attribute_values(":journal", AttributeValue::B(Blob::new(JOURNAL)));
                update.send().await.expect("has the owner");
            }
        }

        async fn complete(&mut self, batch: u64) {
            for record in 0..RECORDS {
                let mut item = Self::item(batch, record);
                item.insert("result".to_owned(), AttributeValue::B(Blob::new(result())));
                let put = self.0.put_item().table_name(TABLE).set_item(Some(item));
                let put = put.condition_expression("#owner = :owner").expression_attribute_names("#owner", "owner");
                let put = put.expression_attribute_values(":owner", AttributeValue::S(owner(batch, record)));
                put.send().await.expect("has the owner");
            }
        }
    }
}

/// Measures rounds of `batches` batches each, and prints the line.
async fn measure(table: &Table, name: &str, server: &mut impl ByHand, rounds: u64, batches: u64) {
    let (mut runs, mut steps) = (Vec::new(), Vec::new());
    // The first round is not counted.
    for round in 0..=rounds {
        let batches_of_round = || round * batches..(round + 1) * batches;
        let begun = server.now().await;
        for batch in batches_of_round() {
            server.reserve(batch).await;
        }
        let reserved = server.now().await;
        for batch in batches_of_round() {
            server.append(batch).await;
        }
        let appended = server.now().await;
        for batch in batches_of_round() {
            server.complete(batch).await;
        }
        let (run, step) = (reserved - begun + (server.now().await - appended), appended - reserved);
        if round > 0 {
            let each = |seconds: f64| seconds * 1e6 / (batches as f64 * RECORDS as f64);
            runs.push(each(run) / 2.0);
            steps.push(each(step));
        }
    }
    table.line(name, &Samples::from(runs), &Samples::from(steps), |step, half| step / half, Goal::None);
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
    let table = Table::new("Limit of a step", "µs (raw: half a first run; idem: a step)", "halves of a first run");
    let rounds = sized(21, 1);
    runtime.block_on(async {
        if is_wanted("Redis") {
            let server = RedisServer::start(Kind::Redis);
            let mut by_hand = Redis::connect(&server.url()).await;
            measure(&table, "Redis", &mut by_hand, rounds, sized(200, 2)).await;
        }
        #[cfg(feature = "mysql")]
        if is_wanted("MariaDB") {
            let server = idem_tests::mysql::MySqlServer::start();
            let mut by_hand = mysql::MySql::connect(&server.url()).await;
            measure(&table, "MariaDB", &mut by_hand, rounds, sized(40, 2)).await;
        }
        #[cfg(feature = "dynamodb")]
        if is_wanted("DynamoDB (emulator)") {
            let emulator = idem_tests::dynamo::Emulator::with_table(idem_tests::dynamo::Kind::Dynoxide).await;
            let mut by_hand = dynamodb::Dynamo::connect(&emulator);
            measure(&table, "DynamoDB (emulator)", &mut by_hand, rounds, sized(10, 1)).await;
        }
    });
}
