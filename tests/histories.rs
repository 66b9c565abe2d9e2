//! Random histories, in which every answer of a store is compared with the answer of a simple reference.
//!
//! `IDEM_HISTORIES_SEED` (64 hexadecimal digits, which a failure prints) repeats a run. `IDEM_HISTORIES_TIMES=10` makes
//! the run ten times as long.

use std::fmt::Write as _;
use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::clock::{Clock, ManualClock, SystemClock};
use idem_runtime::codec::CodecName;
use idem_runtime::key::Fingerprint;
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::{
    Action, Decision, Finish, Inspection, Lease, OwnerToken, Release, Reservation, ReserveRequest, Revision, Verdict,
    renew_all,
};
use idem_runtime::{Key, MemoryStore, OnCrash, RedisStore, Store};
use idem_tests::decided;
use idem_tests::server::Kind;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

#[path = "histories/reference.rs"]
mod reference;

use reference::{Answer, Ask, Entry, Phase, Reference, Sight};

/// Length of a lease or retention that ends during a history, in milliseconds.
const SHORT: u64 = 40;
/// Length of a lease or retention that doesn't end during a history on real time, in milliseconds.
const LONG: u64 = 600_000;

/// Clock of the store, and the way in which its time passes.
enum Time {
    /// The test advances the clock, so every answer is predicted to the nanosecond.
    ByHand(ManualClock),
    /// The machine's clock runs. A step that begins a short lease or retention is followed by a pause in which the
    /// lease or retention ends, so that no answer depends on the speed of the machine. The remaining time of a long
    /// lease is checked only roughly.
    Real,
}

impl Time {
    async fn pass(&self, millis: u64) {
        match self {
            Self::ByHand(clock) => clock.advance(Duration::from_millis(millis)),
            Self::Real => SystemClock::default().sleep(Duration::from_millis(millis)).await,
        }
    }
}

/// Step of a history. `back` selects an attempt by the number of attempts that the history has requested after it.
#[derive(Clone, Debug)]
enum Step {
    Reserve {
        key: usize,
        lease: u64,
        ttl: u64,
        fingerprint: Option<u8>,
        on_crash: OnCrash,
        max_attempts: Option<u32>,
        /// Limit of the questions to a reconciler; 0 for a caller without a reconciler.
        max_reconciliations: u16,
    },
    ReserveAgain {
        back: usize,
    },
    Renew {
        backs: Vec<usize>,
    },
    Begin {
        back: usize,
    },
    Finish {
        back: usize,
        finish: Finish,
    },
    Release {
        back: usize,
        release: Release,
    },
    /// An operator inspects a key.
    Look {
        key: usize,
    },
    /// An operator decides about a record that was inspected before.
    Decide {
        back: usize,
        action: Action,
    },
    Pass {
        millis: u64,
    },
}

fn step(by_hand: bool) -> impl Strategy<Value = Step> {
    let time = if by_hand {
        prop_oneof![1..5 * SHORT, Just(LONG)].boxed()
    } else {
        prop_oneof![Just(SHORT), Just(LONG)].boxed()
    };
    // In real time, each pause is long enough for short leases and retentions to end.
    let pause =
        if by_hand { prop_oneof![1..5 * SHORT, Just(LONG), Just(2 * LONG)].boxed() } else { Just(4 * SHORT).boxed() };
    let on_crash = prop_oneof![3 => Just(OnCrash::Retry), 1 => Just(OnCrash::Fail)];
    let fingerprint = prop_oneof![3 => Just(None), 3 => Just(Some(1)), 1 => Just(Some(2))];
    let max_attempts = prop_oneof![2 => Just(None), 1 => (1..4_u32).prop_map(Some)];
    // Most steps use one of the latest attempts, because the store refuses the writes of earlier ones.
    let back = || prop_oneof![4 => Just(0_usize), 2 => Just(1_usize), 1 => 2..8_usize];
    let payload = prop_oneof![
        4 => proptest::collection::vec(any::<u8>(), 0..4).prop_map(|bytes| StoredResult::Encoded {
            codec: CodecName::new(b"model").unwrap(),
            bytes: Bytes::from(bytes),
        }),
        1 => any::<u64>().prop_map(|size| StoredResult::TooLarge { size }),
        1 => Just(StoredResult::Unencodable),
    ];
    // Operators decide in every way, and attempts end in every way.
    let finish = (payload, any::<bool>())
        .prop_map(|(payload, ok)| if ok { Finish::Completed(payload) } else { Finish::Failed(payload) })
        .boxed();
    let action = prop_oneof![
        Just(Action::Reopen),
        Just(Action::Discard),
        finish.clone().prop_map(Action::Resolve),
        finish.clone().prop_map(Action::Replace),
        Just(Action::BreakLease),
        Just(Action::Forget),
    ];
    let release = prop_oneof![
        3 => Just(Release::Returned),
        2 => Just(Release::NotStarted),
        1 => Just(Release::Interrupted),
        1 => Just(Release::Unresolved),
    ];
    let max_reconciliations = prop_oneof![2 => Just(0_u16), 1 => 1..4_u16];
    // Reservations and pauses are the most frequent steps.
    prop_oneof![
        6 => (0..2_usize, time.clone(), time, fingerprint, on_crash, max_attempts, max_reconciliations).prop_map(
            |(key, lease, ttl, fingerprint, on_crash, max_attempts, max_reconciliations)| Step::Reserve {
                key, lease, ttl, fingerprint, on_crash, max_attempts, max_reconciliations,
            }
        ),
        1 => back().prop_map(|back| Step::ReserveAgain { back }),
        2 => proptest::collection::vec(back(), 0..4).prop_map(|backs| Step::Renew { backs }),
        3 => back().prop_map(|back| Step::Begin { back }),
        2 => (back(), finish).prop_map(|(back, finish)| Step::Finish { back, finish }),
        3 => (back(), release).prop_map(|(back, release)| Step::Release { back, release }),
        2 => (0..2_usize).prop_map(|key| Step::Look { key }),
        2 => (back(), action).prop_map(|(back, action)| Step::Decide { back, action }),
        3 => pause.prop_map(|millis| Step::Pass { millis }),
    ]
}

/// Running history: the store, the reference, and the attempts so far.
struct History<'a> {
    store: &'a dyn Store,
    time: &'a Time,
    reference: Reference,
    keys: [Key; 2],
    asks: Vec<(Ask, ReserveRequest, Lease)>,
    /// Records that operators have inspected: key, revision in the store, and revision in the reference.
    seen: Vec<(usize, Revision, Sight)>,
}

impl<'a> History<'a> {
    fn new(store: &'a dyn Store, time: &'a Time) -> Self {
        let run = store.context().new_owner().as_bytes().iter().fold(String::new(), |mut run, byte| {
            write!(run, "{byte:02x}").unwrap();
            run
        });
        let keys = [0, 1].map(|n| Key::new("model", format!("{run}:{n}")).unwrap());
        Self { store, time, reference: Reference::default(), keys, asks: Vec::new(), seen: Vec::new() }
    }

    /// Index of the attempt that was requested `back` attempts before the latest one.
    fn nth(&self, back: usize) -> Option<usize> {
        self.asks.len().checked_sub(back + 1)
    }

    fn owner(&self, index: usize) -> OwnerToken {
        self.asks[index].1.owner
    }

    /// Reports whether `found` is an acceptable remaining time if the reference computes `expected`.
    fn is_left(&self, found: Duration, expected: u64) -> bool {
        let expected = Duration::from_millis(expected);
        match self.time {
            Time::ByHand(_) => found == expected,
            Time::Real => found <= expected + Duration::from_millis(5) && found.is_zero() == expected.is_zero(),
        }
    }

    fn record(&self, entry: &Entry) -> Record {
        let millis = Duration::from_millis;
        {
            let mut record = Record::new(
                decided(self.owner(entry.owner), entry.decisions),
                entry.attempt,
                match &entry.phase {
                    Phase::Pending { lease, ttl, on_crash, begun, .. } => {
                        let [lease, ttl] = [lease, ttl].map(|time| millis(*time));
                        State::Pending { lease, ttl, on_crash: *on_crash, begun: *begun }
                    }
                    Phase::Released => State::Released,
                    Phase::Interrupted => State::Interrupted,
                    Phase::Finished(finish) => finish.state(),
                },
            );
            record.attempts_used = entry.starts;
            record.fingerprint = entry.fingerprint.map(fingerprint);
            if entry.asked > 0 {
                record.provenance = record.provenance.reconciling(entry.asked);
            }
            record
        }
    }

    fn is_expected(&self, found: &Reservation, expected: &Answer, request: &ReserveRequest) -> bool {
        match (found, expected) {
            (
                Reservation::Granted { lease, takeover, in_doubt, .. },
                Answer::Reserved { attempt, starts, fingerprint: mark, takeover: took, in_doubt: doubt },
            ) => {
                let mut expected = Lease::new(request, *attempt);
                expected.attempts_used = *starts;
                expected.fingerprint = mark.map(fingerprint);
                // `compare` checks the provenance of the record.
                expected.provenance = lease.provenance.clone();
                *lease == expected && takeover == took && in_doubt == doubt
            }
            (
                Reservation::InProgress { attempt, lapses_in, .. },
                Answer::Pending { attempt: running, lapses_in: left },
            ) => attempt == running && self.is_left(*lapses_in, *left),
            (Reservation::Finished { record, .. }, Answer::Finished(entry)) => {
                // Some stores leave the provenance out of a replay.
                let mut expected = self.record(entry);
                expected.provenance = record.provenance.clone();
                *record == expected
            }
            (Reservation::FingerprintMismatch { attempt: found }, Answer::Mismatch { attempt: expected })
            | (Reservation::Interrupted { attempt: found }, Answer::Interrupted { attempt: expected })
            | (Reservation::AttemptsExhausted { attempts: found }, Answer::Exhausted { attempts: expected })
            | (Reservation::Released { attempt: found }, Answer::Released { attempt: expected }) => found == expected,
            _ => false,
        }
    }

    async fn reserve(&mut self, ask: &Ask, request: &ReserveRequest) -> Result<Option<Lease>, TestCaseError> {
        let expected = self.reference.reserve(ask);
        let found = self.store.reserve(request).await.unwrap();
        prop_assert!(self.is_expected(&found, &expected, request), "should be {expected:?}, is {found:?}");
        match found {
            Reservation::Granted { lease, .. } => Ok(Some(lease)),
            _ => Ok(None),
        }
    }

    async fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Reserve { key, lease, ttl, fingerprint: mark, on_crash, max_attempts, max_reconciliations } => {
                let max_reconciliations = NonZeroU16::new(*max_reconciliations);
                let request = ReserveRequest::new(
                    self.keys[*key].clone(),
                    self.store.context().new_owner(),
                    Duration::from_millis(*lease),
                    Duration::from_millis(*ttl),
                )
                .fingerprint(mark.map(fingerprint))
                .on_crash(*on_crash)
                .max_attempts(max_attempts.and_then(NonZeroU32::new))
                .max_reconciliations(max_reconciliations);
                let ask = Ask {
                    key: *key,
                    owner: self.asks.len(),
                    lease: *lease,
                    ttl: *ttl,
                    fingerprint: *mark,
                    on_crash: *on_crash,
                    max_attempts: *max_attempts,
                    max_reconciliations: max_reconciliations.map(NonZeroU16::get),
                };
                let granted = self.reserve(&ask, &request).await?;
                // A refused caller may still send writes, with this lease.
                let lease = granted.unwrap_or_else(|| Record::first(&request).lease(&request));
                self.asks.push((ask, request, lease));
            }
            Step::ReserveAgain { back } => {
                if let Some(index) = self.nth(*back) {
                    let (ask, request, _) = self.asks[index].clone();
                    if let Some(lease) = self.reserve(&ask, &request).await? {
                        // A repeated request may have given the owner a second attempt, so both leases are kept.
                        self.asks.push((ask, request, lease));
                    }
                }
            }
            // One call renews all these leases, as a heartbeat does.
            Step::Renew { backs } => {
                let indices: Vec<_> = backs.iter().filter_map(|back| self.nth(*back)).collect();
                let leases: Vec<_> = indices.iter().map(|index| self.asks[*index].2.clone()).collect();
                let asks = indices.iter().map(|index| (&self.asks[*index].0, self.asks[*index].2.attempt));
                let reference = &mut self.reference;
                let expected: Vec<_> =
                    asks.map(|(ask, attempt)| reference.renew(ask.key, ask.owner, attempt)).collect();
                prop_assert_eq!(renew_all(self.store, &leases).await.unwrap(), expected);
            }
            // The owner writes, whether or not it still holds the key.
            Step::Begin { back } => {
                if let Some(index) = self.nth(*back) {
                    let (ask, _, lease) = &self.asks[index];
                    let expected = self.reference.begin(ask.key, ask.owner, lease.attempt);
                    prop_assert_eq!(self.store.begin(lease).await.unwrap(), expected);
                }
            }
            Step::Finish { back, finish } => {
                if let Some(index) = self.nth(*back) {
                    let (ask, _, lease) = &self.asks[index];
                    let expected = self.reference.finish(ask, lease.attempt, finish, &[]);
                    prop_assert_eq!(self.store.finish(lease, finish).await.unwrap(), expected);
                }
            }
            Step::Release { back, release } => {
                if let Some(index) = self.nth(*back) {
                    let (ask, _, lease) = &self.asks[index];
                    let expected = self.reference.release(ask, *release);
                    prop_assert_eq!(self.store.release(lease, *release).await.unwrap(), expected);
                }
            }
            // An operator inspects a record, and may decide about it later.
            Step::Look { key } => {
                let found = self.store.inspect(&self.keys[*key]).await.unwrap();
                self.seen.extend(found.map(|found| {
                    let entry = self.reference.look(*key).expect("a listed record exists in the reference");
                    let (owner, decisions, attempt) = (entry.owner, entry.decisions, entry.attempt);
                    (
                        *key,
                        found.revision(),
                        Sight { owner, decisions, attempt, standing: found.standing(), journal: 0 },
                    )
                }));
            }
            Step::Decide { back, action } => {
                if let Some(at) = self.seen.len().checked_sub(back + 1) {
                    let (key, seen, sight) = &self.seen[at];
                    let decision = Decision::new(&self.keys[*key], *seen, action.clone());
                    let expected = self.reference.decide(*key, sight, action, "");
                    prop_assert_eq!(Verdict::from(self.store.decide(&decision).await.unwrap()), expected);
                }
            }
            Step::Pass { millis } => self.pass(*millis).await,
        }
        self.settle().await;
        self.compare().await
    }

    async fn pass(&mut self, millis: u64) {
        self.time.pass(millis).await;
        self.reference.now += millis;
    }

    /// In real time, waits until short leases and retentions have ended.
    async fn settle(&mut self) {
        let now = self.reference.now;
        let soon = |at: u64| now < at && at - now < LONG / 2;
        let is_short = |entry: &Entry| {
            soon(entry.forgotten_at) || matches!(entry.phase, Phase::Pending { lapses_at, .. } if soon(lapses_at))
        };
        if matches!(self.time, Time::Real) && (0..2).any(|key| self.reference.look(key).is_some_and(is_short)) {
            self.pass(4 * SHORT).await;
        }
    }

    /// Compares every record with the reference.
    async fn compare(&self) -> Result<(), TestCaseError> {
        for (key, name) in self.keys.iter().enumerate() {
            let found = self.store.inspect(name).await.unwrap();
            let expected = self.reference.look(key);
            let (Some(Inspection { record, expires_in, lapses_in, .. }), Some(entry)) = (&found, expected) else {
                prop_assert!(found.is_none() && expected.is_none(), "should be {expected:?}, is {found:?}");
                continue;
            };
            prop_assert_eq!(record, &self.record(entry));
            let now = self.reference.now;
            prop_assert!(self.is_left(*expires_in, entry.forgotten_at - now), "{found:?} at {now}: {entry:?}");
            let lapse = match entry.phase {
                Phase::Pending { lapses_at, .. } => Some(lapses_at.saturating_sub(now)),
                _ => None,
            };
            let is_left = match (lapses_in, lapse) {
                (Some(found), Some(expected)) => self.is_left(*found, expected),
                (None, None) => true,
                _ => false,
            };
            prop_assert!(is_left, "{found:?} at {now}: {entry:?}");
        }
        Ok(())
    }
}

fn fingerprint(mark: u8) -> Fingerprint {
    let mut bytes = [mark; Fingerprint::BYTES];
    bytes[0] = Fingerprint::VERSION;
    Fingerprint::from_bytes(bytes)
}

/// Plays `cases` random histories. `open` returns a store and its clock for each history.
fn agrees_with_the_reference(cases: u32, by_hand: bool, open: impl AsyncFn() -> (Arc<dyn Store>, Time)) {
    let seed = std::env::var("IDEM_HISTORIES_SEED").map_or_else(|_| new_seed(), |text| parse_seed(&text));
    let times: u32 = std::env::var("IDEM_HISTORIES_TIMES").map_or(1, |text| text.parse().expect("a whole number"));
    let config = Config {
        cases: cases.saturating_mul(times),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let histories = proptest::collection::vec(step(by_hand), 1..if by_hand { 60 } else { 25 });
    let result = runner.run(&histories, |steps| {
        runtime.block_on(async {
            let (store, time) = open().await;
            let mut history = History::new(&*store, &time);
            for (n, step) in steps.iter().enumerate() {
                let compared = history.step(step).await;
                compared.map_err(|error| TestCaseError::fail(format!("step {n}, {step:?}: {error}")))?;
            }
            Ok(())
        })
    });
    let seed = seed.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, steps)) => {
            panic!("{reason}\nhistory: {steps:#?}\nrun again with IDEM_HISTORIES_SEED={seed}")
        }
        Err(TestError::Abort(reason)) => panic!("{reason}\nrun again with IDEM_HISTORIES_SEED={seed}"),
    }
}

fn new_seed() -> [u8; 32] {
    let half = || SystemClock::default().entropy().to_be_bytes();
    [half(), half()].concat().try_into().unwrap()
}

fn parse_seed(text: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<_>> = (0..32).map(|n| byte(2 * n)).collect();
    bytes.and_then(|bytes| bytes.try_into().ok()).expect("IDEM_HISTORIES_SEED has 64 hexadecimal digits")
}

#[test]
fn memory_agrees_with_the_reference_in_simulated_time() {
    agrees_with_the_reference(2_000, true, async || {
        let clock = ManualClock::seeded(1);
        (Arc::new(MemoryStore::options().clock(clock.clone()).build()) as Arc<dyn Store>, Time::ByHand(clock))
    });
}

/// The store can hold so few records that each reservation runs the clean-up.
#[test]
fn a_full_memory_store_agrees_with_the_reference() {
    agrees_with_the_reference(2_000, true, async || {
        let clock = ManualClock::seeded(1);
        (
            Arc::new(MemoryStore::options().max_records(2).clock(clock.clone()).build()) as Arc<dyn Store>,
            Time::ByHand(clock),
        )
    });
}

#[test]
fn memory_agrees_with_the_reference_in_real_time() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    agrees_with_the_reference(8, false, async || (Arc::clone(&store), Time::Real));
}

#[test]
fn redis_agrees_with_the_reference_in_real_time() {
    agrees_with_the_reference(8, false, async || {
        let store = RedisStore::connect(&Kind::Redis.shared()).await.expect("connects");
        (Arc::new(store) as Arc<dyn Store>, Time::Real)
    });
}

#[cfg(feature = "dynamodb")]
#[test]
fn dynamo_agrees_with_the_reference_in_real_time() {
    agrees_with_the_reference(8, false, async || {
        let store = idem_tests::dynamo::open(&idem_tests::dynamo::Kind::Dynoxide.shared(), idem_tests::dynamo::TABLE);
        (Arc::new(store) as Arc<dyn Store>, Time::Real)
    });
}

#[cfg(feature = "mysql")]
#[test]
fn mysql_agrees_with_the_reference_in_real_time() {
    let (url, table) = idem_tests::mysql::shared_table();
    agrees_with_the_reference(8, false, async || {
        let options = idem_runtime::MySqlStore::options().table(&table).ensure_schema();
        let store = options.connect(&url).await.expect("connects");
        (Arc::new(store) as Arc<dyn Store>, Time::Real)
    });
}

#[cfg(feature = "nats")]
#[test]
fn nats_agrees_with_the_reference_in_real_time() {
    agrees_with_the_reference(8, false, async || {
        let store = idem_runtime::NatsStore::connect(&idem_tests::nats::shared()).await.expect("connects");
        (Arc::new(store) as Arc<dyn Store>, Time::Real)
    });
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_agrees_with_the_reference_in_real_time() {
    let (url, schema) = idem_tests::postgres::shared_schema();
    agrees_with_the_reference(8, false, async || {
        let options = idem_runtime::PostgresStore::options().schema(&schema).ensure_schema();
        let store = options.connect(&url).await.expect("connects");
        (Arc::new(store) as Arc<dyn Store>, Time::Real)
    });
}

#[cfg(feature = "sqlite")]
#[test]
fn sqlite_agrees_with_the_reference_in_real_time() {
    let folder = idem_tests::sqlite::Folder::new();
    agrees_with_the_reference(8, false, async || {
        let store = idem_runtime::SqliteStore::open(folder.file()).await.expect("opens");
        (Arc::new(store) as Arc<dyn Store>, Time::Real)
    });
}

/// The wrappers offload and compress results of any size. In one of two runs the cache drops most entries.
#[cfg(feature = "wrappers")]
#[test]
fn wrappers_agree_with_the_reference_in_simulated_time() {
    use idem_runtime::{Cached, Compressed, Offloaded};
    use object_store::memory::InMemory;

    for max_entries in [2, 1000] {
        agrees_with_the_reference(1_000, true, async || {
            let clock = ManualClock::seeded(1);
            let store = MemoryStore::options().clock(clock.clone()).build();
            let store = Offloaded::options().above(0).wrap(store, Arc::new(InMemory::new()));
            let store = Compressed::options().above(0).wrap(store);
            let store = Cached::options().max_entries(max_entries).wrap(store);
            (Arc::new(store) as Arc<dyn Store>, Time::ByHand(clock))
        });
    }
}

/// The comparison can fail: the clock of this store stands still.
#[test]
#[should_panic(expected = "run again with IDEM_HISTORIES_SEED=")]
fn a_store_that_forgets_no_record_disagrees_with_the_reference() {
    agrees_with_the_reference(2_000, true, async || {
        let store = MemoryStore::options().clock(ManualClock::seeded(1)).build();
        (Arc::new(store) as Arc<dyn Store>, Time::ByHand(ManualClock::new()))
    });
}
