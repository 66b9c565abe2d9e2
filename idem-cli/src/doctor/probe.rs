//! Runs all operations of a store on a probe key.

use std::time::{Duration, Instant};

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{
    Action, Decision, DecisionAnswer, Finish, Lease, Release, Reservation, ReserveRequest, Verdict, renew_all,
};
use idem_runtime::{Json, Key, Store, StoreError, StoreErrorKind};

use super::Findings;
use crate::report::{chain, human};

/// Lease for the probe: longer than a run, short enough that leftovers of a killed run vanish soon.
const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(60);
/// Duration from which the doctor reports an operation as slow.
const SLOW: Duration = Duration::from_millis(250);

/// Wrong answer of a store.
struct WrongAnswer {
    text: String,
    /// Kind of the store's error; `None` if the store answered, but not as expected.
    kind: Option<StoreErrorKind>,
}

impl From<StoreError> for WrongAnswer {
    fn from(error: StoreError) -> Self {
        Self { text: chain(&error), kind: Some(error.kind()) }
    }
}

/// Returns the remedy for an operation that failed with this kind of error.
fn remedy(kind: Option<StoreErrorKind>) -> &'static str {
    match kind {
        Some(StoreErrorKind::Full) => {
            "make room: give the server more memory or disk, or shorten `ttl` and results; `idem purge` removes expired \
             records from PostgreSQL and SQLite"
        }
        Some(StoreErrorKind::Misconfigured | StoreErrorKind::Unsupported) => {
            "correct the setting that the message names, or give the login the rights that docs/cli.md and `idem schema \
             print` list"
        }
        Some(StoreErrorKind::Unavailable | StoreErrorKind::Unconfirmed) => {
            "look at the network between here and the server, and at the server's load and log; then run this again"
        }
        _ => "`idem conformance store` shows which rule of the contract for stores the server breaks",
    }
}

/// A running probe: its store, the current step, the number of steps so far, and the slowest step.
struct Probe<'a> {
    store: &'a dyn Store,
    step: &'static str,
    slowest: (&'static str, Duration),
    steps: usize,
}

impl Probe<'_> {
    async fn ask<T>(
        &mut self,
        step: &'static str,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, WrongAnswer> {
        self.step = step;
        self.steps += 1;
        let began = Instant::now();
        let answer = call.await;
        let took = began.elapsed();
        if took > self.slowest.1 {
            self.slowest = (step, took);
        }
        Ok(answer?)
    }

    async fn run(&mut self, key: &Key) -> Result<(), WrongAnswer> {
        let store = self.store;
        let beats = store.context();
        let request = || ReserveRequest::new(key.clone(), beats.new_owner(), LEASE, TTL).holder(beats.holder());
        let lease = self.granted("reserve", &request()).await?;
        match self.ask("reserve again", store.reserve(&request())).await? {
            Reservation::InProgress { .. } => {}
            other => return Err(unexpected(&other)),
        }
        let renewed = self.ask("renew", renew_all(store, std::slice::from_ref(&lease))).await?;
        applied(renewed.first().copied())?;
        let released = self.ask("release", store.release(&lease, Release::NotStarted)).await?;
        applied(Some(released))?;
        let lease = self.granted("reserve anew", &request()).await?;
        let result = StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: Bytes::from_static(b"\"probe\"") };
        applied(Some(self.ask("finish", store.finish(&lease, &Finish::Completed(result))).await?))?;
        match self.ask("replay", store.reserve(&request())).await? {
            Reservation::Finished { record, .. } if record.state.result().is_some_and(|it| it.stored_bytes() == 7) => {}
            other => return Err(unexpected(&other)),
        }
        // Each decision names the record that was inspected just before.
        for (look, step, action) in
            [("inspect", "discard", Action::Discard), ("inspect again", "forget", Action::Forget)]
        {
            let found = match self.ask(look, store.inspect(key)).await? {
                Some(found) if found.attempt() == lease.attempt => found,
                other => return Err(unexpected(&other)),
            };
            decided(self.ask(step, store.decide(&Decision::new(key, &found, action))).await?)?;
        }
        match self.ask("inspect what is gone", store.inspect(key)).await? {
            None => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn granted(&mut self, step: &'static str, request: &ReserveRequest) -> Result<Lease, WrongAnswer> {
        match self.ask(step, self.store.reserve(request)).await? {
            Reservation::Granted { lease, .. } => Ok(lease),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(answer: &impl std::fmt::Debug) -> WrongAnswer {
    WrongAnswer { text: format!("unexpected answer {answer:?}"), kind: None }
}

fn applied(verdict: Option<Verdict>) -> Result<(), WrongAnswer> {
    match verdict {
        Some(Verdict::Applied) => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn decided(decided: DecisionAnswer) -> Result<(), WrongAnswer> {
    match decided {
        DecisionAnswer::Applied => Ok(()),
        other => Err(unexpected(&other)),
    }
}

pub(super) async fn probe(store: &dyn Store, findings: &mut Findings) {
    // The name of the key is unique, so that two concurrent probes use different keys.
    let owner = store.context().new_owner();
    let name = owner.as_bytes().iter().fold(String::from("probe:"), |name, byte| format!("{name}{byte:02x}"));
    let key = Key::new("idem-doctor", name).expect("a short key");
    let mut probe = Probe { store, step: "", slowest: ("", Duration::ZERO), steps: 0 };
    let done = probe.run(&key).await;
    let Probe { step, slowest: (slowest, took), steps, .. } = probe;
    match done {
        Ok(()) if took > SLOW => findings.warning(
            "probe",
            format!("{steps} operations done; `{slowest}` took {}", human(took)),
            "every call waits for this at least twice; a lease must be many times as long",
            "look at the network between here and the server, and at its load",
        ),
        Ok(()) => {
            findings.ok("probe", format!("{steps} operations done; the slowest, `{slowest}`, took {}", human(took)));
        }
        Err(WrongAnswer { text, kind }) => findings.error(
            "probe",
            format!("`{step}` failed: {text}"),
            "handlers meet the same failure; the probe's record expires within two minutes",
            remedy(kind),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_for_a_failed_probe_fits_the_kind_of_the_failure() {
        for (kind, says) in [
            (StoreErrorKind::Full, "make room"),
            (StoreErrorKind::Misconfigured, "the rights"),
            (StoreErrorKind::Unsupported, "the rights"),
            (StoreErrorKind::Unavailable, "network"),
            (StoreErrorKind::Unconfirmed, "network"),
            (StoreErrorKind::Corrupt, "`idem conformance store`"),
        ] {
            let advice = remedy(Some(kind));
            assert!(advice.contains(says), "{kind:?}: {advice}");
            assert_eq!(advice.contains("rights"), says == "the rights", "{kind:?}: {advice}");
        }
        assert!(remedy(None).contains("`idem conformance store`"));
    }
}
