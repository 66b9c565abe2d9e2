//! Calls that are dropped while their store does not answer for more than a lease.
//!
//! After the outage and all late writes, every key is free, recorded, or interrupted by a body that began and did not
//! return. Under `on_crash = retry` a key may be held until its lease has lapsed, because a clean-up or a release is
//! repeated for no longer than a lease. A record counts only attempts whose body began.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::{Inspection, StoreContext};
use idem_runtime::{Error, OnCrash, Store};

use crate::rigs::Rig;
use crate::scene::{Book, Calls, Failure, Load, Scene};

const LEASE: Duration = Duration::from_secs(1);
/// Time within which a store must answer: a little shorter than the interval of heartbeats.
pub const ANSWER: Duration = Duration::from_millis(300);
/// Number of calls in a scene.
const CALLS: usize = 240;
/// Number of keys that are checked concurrently.
const AT_ONCE: usize = 32;
/// Longest time for which a scene waits for late writes after an outage. The time is long, because the pauses between
/// the tries of a late write double.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

/// Kind of outage that a store can have.
#[derive(Clone, Copy, Debug)]
pub enum Outage {
    /// Requests take effect after the outage.
    Held,
    /// Requests take effect, and their answers get lost.
    Muted,
    /// Another process locks the file.
    Locked,
}

pub async fn play(store: &'static str, rig: Rig) {
    let seed = crate::seed();
    let (mut figures, mut problems) = (String::new(), String::new());
    let mut number = 0;
    for outage in rig.outages() {
        for on_crash in [OnCrash::Retry, OnCrash::Fail] {
            let how = match outage {
                Outage::Held => "held",
                Outage::Muted => "muted",
                Outage::Locked => "locked",
            };
            let mut scene = Scene::new(store, number, how, Load::Outage, (on_crash, LEASE));
            number += 1;
            let ways = (|| rig.cut_off(*outage, 2 * LEASE), || rig.go_on());
            scene.drop_calls_in_an_outage(&rig, seed, CALLS, ways).await;
            for handle in [&rig.store, &rig.peer] {
                StoreContext::flush(handle.context()).await;
            }
            scene.settle(&rig).await;
            writeln!(figures, "{scene}").expect("a text");
            scene.problems.iter().take(3).for_each(|problem| writeln!(problems, "  {problem}").expect("a text"));
        }
    }
    println!("{figures}");
    assert!(problems.is_empty(), "seed {seed}\n{figures}some of the problems:\n{problems}");
}

/// Problem that the check of a key has found.
enum Wrong {
    /// The state of the key is wrong, but may become right later: a lease has not lapsed, or a late write is under way.
    Yet(String),
    Interrupted(String),
    Otherwise(String),
}

impl Scene {
    /// Waits until every key is in its promised state, and makes a call for each key.
    async fn settle(&mut self, rig: &Rig) {
        let calls = Arc::clone(self.calls());
        let mut open: BTreeSet<usize> = (0..calls.books().len()).collect();
        let since = Instant::now();
        let mut wrong = Vec::new();
        while !open.is_empty() {
            let is_late = since.elapsed() > PATIENCE;
            let looks = open.iter().map(|key| {
                let (calls, rig, key) = (&calls, rig, *key);
                async move { (key, look(calls, rig, key).await) }
            });
            let looks: Vec<_> = futures::stream::iter(looks).buffer_unordered(AT_ONCE).collect().await;
            for (key, looked) in looks {
                match looked {
                    Err(Wrong::Yet(_)) if !is_late => {}
                    looked => {
                        open.remove(&key);
                        wrong.extend(looked.err().map(|what| (key, what)));
                    }
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        for (key, what) in wrong {
            let what = match what {
                Wrong::Yet(what) => {
                    self.held.insert(key);
                    what
                }
                Wrong::Interrupted(what) => {
                    self.interrupted.insert(key);
                    what
                }
                Wrong::Otherwise(what) => {
                    self.others += 1;
                    what
                }
            };
            self.problems.push(format!("{}: {what}; {:?}", calls.key(key), calls.books().of(key).runs));
        }
    }
}

/// Checks the record of a key, and then makes a fresh call.
async fn look(calls: &Arc<Calls>, rig: &Rig, key: usize) -> Result<(), Wrong> {
    let found = match rig.peer.inspect(&calls.key(key)).await {
        Ok(found) => found,
        Err(error) => return Err(Wrong::Yet(error.to_string())),
    };
    judge(&calls.books().of(key), calls.on_crash(), found.as_ref())?;
    let store = if key.is_multiple_of(2) { &rig.store } else { &rig.peer };
    try_again(calls, store, key).await
}

/// Checks that the runs of bodies that `book` lists explain the record in `found`.
fn judge(book: &Book, on_crash: OnCrash, found: Option<&Inspection>) -> Result<(), Wrong> {
    let otherwise = |what: &str| Err(Wrong::Otherwise(format!("{what}: {found:?}")));
    if !book.runs.is_sorted_by(|one, next| one.attempt < next.attempt) {
        return otherwise("attempts repeat");
    }
    let fail = on_crash == OnCrash::Fail;
    let interrupted = fail && book.unreturned();
    let successes = book.runs.iter().filter(|run| run.returned == Some(true)).count();
    if fail && successes > 1 {
        return otherwise("two bodies of the key succeeded");
    }
    if interrupted && book.runs.last().is_some_and(|run| run.returned.is_some()) {
        return otherwise("a body began after an interrupted body");
    }
    let Some(found) = found else {
        return if book.runs.is_empty() { Ok(()) } else { otherwise("the record is missing") };
    };
    let mut counted = found.record.attempts_used as usize;
    match &found.record.state {
        State::Pending { .. } if found.lapses_in.is_none_or(|left| !left.is_zero()) => {
            return Err(Wrong::Yet(format!("held: {found:?}")));
        }
        // A process repeats the write of an attempt's end, and the removal of the mark of a body that never began, for
        // as long as the process lives.
        State::Pending { begun: true, .. } if fail && !interrupted => {
            return Err(Wrong::Yet(format!("interrupted without a body that began and did not return: {found:?}")));
        }
        State::Pending { begun: false, .. } if interrupted => return otherwise("not marked"),
        State::Pending { begun, .. } => counted -= usize::from(!begun),
        State::Interrupted if interrupted => {}
        State::Interrupted => return Err(Wrong::Interrupted(format!("interrupted: {found:?}"))),
        State::Released if !fail || (!interrupted && successes == 0) => {}
        State::Completed(StoredResult::Encoded { bytes, .. }) => {
            let recorded = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
            if !recorded.is_some_and(|attempt| book.succeeded(attempt)) {
                return otherwise("the recorded result is not that of a body");
            }
        }
        _ => return otherwise("the state of the record does not follow from its bodies"),
    }
    // Under `retry` the record has no mark that a body began, and a lapsed attempt is not counted.
    let began = book.runs.len();
    if counted > began || (fail && counted < began) {
        return otherwise("the number of counted attempts is not that of the bodies that began");
    }
    Ok(())
}

/// Makes a new call, which must run its body, or return the key's recorded result or `Interrupted`.
async fn try_again(calls: &Arc<Calls>, store: &Arc<dyn Store>, key: usize) -> Result<(), Wrong> {
    let book = calls.books().of(key);
    let interrupted = calls.on_crash() == OnCrash::Fail && book.unreturned();
    let (result, outcome) = calls.fresh(store, key).await;
    match result {
        Ok(attempt) if outcome.replayed() && book.succeeded(attempt) => Ok(()),
        Ok(_) if outcome.executed() && !interrupted => Ok(()),
        Err(Failure::Of(Error::Interrupted { .. })) if interrupted => Ok(()),
        // On a busy machine, a store may not answer in time.
        Err(Failure::Of(
            error @ (Error::Store { .. }
            | Error::InProgress { .. }
            | Error::Unrecorded { .. }
            | Error::LeaseLost { .. }),
        )) => Err(Wrong::Yet(error.to_string())),
        result => Err(Wrong::Otherwise(format!("a fresh call returns {result:?}"))),
    }
}
