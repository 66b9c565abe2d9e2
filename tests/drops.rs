//! Thousands of dropped calls, at each of their awaits and at any other moment, on every real store.
//!
//! A call is dropped by its caller (a time-out, a `select!`), with its task, with its runtime, or on a thread without a
//! runtime. The call runs alone, among 64 tasks, or among replays, and over proxies ("lines") that may let a request
//! overtake a request of another connection. After all late writes, every key must be free, recorded, or interrupted by
//! a body that did not return, and must stay in this state. Then calls are dropped while their store does not answer
//! for two leases.
//!
//! `IDEM_DROPS_SEED` repeats the random choices of a run, but not the order in which the servers work.
#![allow(
    clippy::option_option,
    clippy::unused_async,
    reason = "looked at or not, and found or not; a store in memory opens at once"
)]
// The futures of these tests are deep: they contain a store, its lanes and its connection.
#![recursion_limit = "256"]
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]
#![allow(missing_docs, unreachable_pub, reason = "only this test uses the module")]

#[path = "drops/look.rs"]
mod look;
#[path = "drops/outage.rs"]
mod outage;
#[path = "drops/rigs.rs"]
mod rigs;
#[path = "drops/scene.rs"]
mod scene;

use std::fmt::Write as _;
use std::time::Duration;

use idem_runtime::OnCrash;
use idem_runtime::store::StoreContext;
use idem_tests::proxy::Line;

use rigs::Rig;
use scene::{Load, Scene};

/// Lease of scenes without an outage. The lease is so long that it does not lapse while calls are dropped, or before a
/// store has answered. A body whose lease lapses before its first renewal is not counted, so a lapse would change the
/// numbers that are checked.
const LEASE: Duration = Duration::from_secs(20);
/// Time within which a store must answer, also an emulator on a busy machine.
const ANSWER: Duration = Duration::from_secs(10);
const EVEN: Line = Line::Pass;
/// Line that delays each piece of data by a random time of up to 4 ms, so that a request may overtake a request of
/// another connection.
const UNEVEN: Line = Line::Uneven(Duration::from_millis(4));

/// Defines a test for each store, with its lines and the number of calls in each scene under load.
macro_rules! stores {
    ($($store:ident: $lines:expr, $calls:literal;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $store() {
            play(stringify!($store), rigs::$store(ANSWER).await, &$lines, $calls).await;
            // The scenes of outages run in the same test, so that fewer tests run concurrently.
            outage::play(stringify!($store), rigs::$store(outage::ANSWER).await).await;
        }
    )*};
}

stores! {
    memory: [EVEN], 3000;
    sqlite: [EVEN], 900;
    redis: [EVEN, UNEVEN], 900;
    valkey: [EVEN, UNEVEN], 900;
    cluster: [EVEN, UNEVEN], 700;
    sentinel: [EVEN, UNEVEN], 700;
    cached: [EVEN, UNEVEN], 700;
    mysql: [EVEN, UNEVEN], 700;
    postgres: [EVEN, UNEVEN], 700;
    pgbouncer: [EVEN, UNEVEN], 700;
    nats: [EVEN, UNEVEN], 700;
    // DynamoDB has two emulators, and both are slow.
    dynoxide: [EVEN], 256;
    ministack: [UNEVEN], 256;
}

fn seed() -> u64 {
    std::env::var("IDEM_DROPS_SEED").map_or(1, |seed| seed.parse().expect("a number"))
}

async fn play(store: &'static str, rig: Rig, lines: &[Line], calls: usize) {
    let seed = seed();
    assert!(LEASE > rig.store.response_timeout(), "the lease must exceed a store call's time limit");
    let mut scenes = Vec::new();
    for line in lines {
        rig.lines.iter().for_each(|proxy| proxy.set(*line));
        for load in [Load::Lone, Load::Busy, Load::Replays] {
            for on_crash in [OnCrash::Retry, OnCrash::Fail] {
                let mut scene = Scene::new(store, scenes.len(), how(*line), load, (on_crash, LEASE));
                scene.drop_calls(&rig, seed, if load == Load::Lone { calls / 5 } else { calls }).await;
                for handle in [&rig.store, &rig.peer] {
                    StoreContext::flush(handle.context()).await;
                }
                scene.look(&rig).await;
                scenes.push(scene);
            }
        }
    }
    // Every late write has taken effect after this pause.
    tokio::time::sleep(LEASE).await;
    let (mut figures, mut problems) = (String::new(), String::new());
    for scene in &mut scenes {
        scene.look_again(&rig).await;
        writeln!(figures, "{scene}").expect("a text");
        scene.problems.iter().take(3).for_each(|problem| writeln!(problems, "  {problem}").expect("a text"));
    }
    println!("{figures}");
    assert!(problems.is_empty(), "seed {seed}\n{figures}some of the problems:\n{problems}");
}

/// Returns the word by which messages name the behaviour of `line`.
fn how(line: Line) -> &'static str {
    if line == EVEN { "even" } else { "uneven" }
}
