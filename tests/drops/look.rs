//! State that every key must have after all late writes.

use std::sync::Arc;

use futures::StreamExt as _;
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::{Error, OnCrash, Outcome, Store};

use crate::rigs::Rig;
use crate::scene::{Book, Calls, Failure, Scene};

/// Number of keys that are checked concurrently.
const AT_ONCE: usize = 32;

/// Key in a wrong state.
enum Wrong {
    /// The key is held although no call is under way.
    Held(String),
    /// The key is interrupted although every body returned.
    Interrupted(String),
    Otherwise(String),
}

impl Scene {
    /// Checks all keys concurrently, and makes a call for every second key.
    pub async fn look(&mut self, rig: &Rig) {
        self.each(rig, async |calls, rig, key| {
            let record = inspect(&rig.peer, calls, key).await;
            let book = calls.books().of(key);
            judge(&book, calls.on_crash(), record.as_ref())?;
            if key % 2 == 0 {
                calls.books().looked(key, Some(record));
                return Ok(());
            }
            let store = if key % 4 == 1 { &rig.store } else { &rig.peer };
            try_again(calls, store, key, &book).await
        })
        .await;
    }

    /// Checks all keys again. A key for which [`look`](Self::look) made no call must still have the same record,
    /// because all late writes had ended. Makes a call for each of these keys.
    pub async fn look_again(&mut self, rig: &Rig) {
        self.each(rig, async |calls, rig, key| {
            let record = inspect(&rig.peer, calls, key).await;
            let book = calls.books().of(key);
            judge(&book, calls.on_crash(), record.as_ref())?;
            let Some(first) = &book.first_look else { return Ok(()) };
            if *first != record {
                return Err(Wrong::Otherwise(format!("became {record:?}")));
            }
            calls.books().looked(key, None);
            try_again(calls, &rig.peer, key, &book).await
        })
        .await;
    }

    async fn each(&mut self, rig: &Rig, look: impl AsyncFn(&Arc<Calls>, &Rig, usize) -> Result<(), Wrong>) {
        let (calls, look) = (self.calls(), &look);
        let looks = (0..calls.books().len()).map(|key| async move { (key, look(calls, rig, key).await) });
        let mut looks: Vec<_> = futures::stream::iter(looks).buffer_unordered(AT_ONCE).collect().await;
        looks.sort_unstable_by_key(|(key, _)| *key);
        for (key, looked) in looks {
            let what = match looked {
                Ok(()) => continue,
                Err(Wrong::Held(what)) => {
                    self.held.insert(key);
                    what
                }
                Err(Wrong::Interrupted(what)) => {
                    self.interrupted.insert(key);
                    what
                }
                Err(Wrong::Otherwise(what)) => {
                    self.others += 1;
                    what
                }
            };
            let (name, book) = (self.calls().key(key), self.calls().books().of(key));
            self.problems.push(format!("{name}: {what}; {:?}, first {:?}", book.runs, book.first_look));
        }
    }
}

/// Makes a new call, which must immediately run its body, or return the key's recorded result or `Interrupted`.
async fn try_again(calls: &Arc<Calls>, store: &Arc<dyn Store>, key: usize, book: &Book) -> Result<(), Wrong> {
    let (result, outcome) = calls.fresh(store, key).await;
    let last = book.runs.last().map_or(0, |run| run.attempt);
    let interrupted = calls.on_crash() == OnCrash::Fail && book.unreturned();
    let as_expected = match (&result, book.result()) {
        (Ok(attempt), Some(recorded)) => outcome.replayed() && *attempt == recorded,
        (Ok(attempt), None) => !interrupted && ran(&outcome) && *attempt > last,
        (Err(Failure::Of(Error::Interrupted { .. })), None) => interrupted,
        _ => false,
    };
    match result {
        _ if as_expected => Ok(()),
        Err(Failure::Of(Error::InProgress { .. })) => Err(Wrong::Held("a fresh call is refused".to_owned())),
        result => Err(Wrong::Otherwise(format!("a fresh call returns {result:?}"))),
    }
}

fn ran(outcome: &Outcome) -> bool {
    outcome.executed() && outcome.recorded() && !outcome.took_over()
}

async fn inspect(store: &Arc<dyn Store>, calls: &Calls, key: usize) -> Option<Record> {
    let found = store.inspect(&calls.key(key)).await.expect("answers");
    found.map(|inspection| inspection.record)
}

/// Checks that the runs of bodies that `book` lists explain the state of `record`.
fn judge(book: &Book, on_crash: OnCrash, record: Option<&Record>) -> Result<(), Wrong> {
    let otherwise = |what: &str| Err(Wrong::Otherwise(format!("{what}: {record:?}")));
    let numbers: Vec<u32> = book.runs.iter().map(|run| run.attempt).collect();
    if !numbers.is_sorted_by(|one, next| one < next) {
        return otherwise("attempts repeat");
    }
    if book.runs.iter().filter(|run| run.returned == Some(true)).count() > 1 {
        return otherwise("two bodies of the key succeeded");
    }
    let interrupted = on_crash == OnCrash::Fail && book.unreturned();
    if interrupted && book.runs.last().is_some_and(|run| run.returned.is_some()) {
        return otherwise("a body began after an interrupted body");
    }
    let Some(record) = record else {
        return if book.runs.is_empty() { Ok(()) } else { otherwise("the record is missing") };
    };
    match (&record.state, book.result()) {
        (State::Pending { .. }, _) => return Err(Wrong::Held(format!("held: {record:?}"))),
        (State::Interrupted, None) if interrupted => {}
        (State::Interrupted, _) => return Err(Wrong::Interrupted(format!("interrupted: {record:?}"))),
        (State::Released, None) if !interrupted => {}
        (State::Completed(StoredResult::Encoded { bytes, .. }), Some(attempt)) => {
            if **bytes != *attempt.to_string().as_bytes() {
                return otherwise("the recorded result is not that of a body");
            }
        }
        _ => return otherwise("the state of the record does not follow from its bodies"),
    }
    if numbers.last().is_some_and(|last| record.attempt < *last) {
        return otherwise("an attempt was forgotten");
    }
    if record.attempts_used as usize != book.runs.len() {
        return otherwise("the number of counted attempts is not that of the bodies that began");
    }
    Ok(())
}
