//! One of several processes that race for the same keys; the test `processes_race_for_the_same_keys` starts and kills it.
//!
//! Arguments: URL, prefix, number of keys, the key to begin with.
#![allow(clippy::disallowed_methods)] // A consumer loop sleeps.

use std::time::Duration;

use idem_runtime::{
    Disposition, Error, InProgress, Json, Key, Operation, Policy, RedisStore, current, observe, record_values, run,
};
use redis::AsyncCommands;

const POLICY: Policy = Policy::new(Duration::from_secs(3600))
    .lease(Duration::from_millis(500))
    .in_progress(InProgress::Wait(Duration::from_secs(2)));

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, prefix, keys, begin] = &args[..] else { panic!("URL, prefix, number of keys, first key") };
    let (keys, begin): (usize, usize) = (keys.parse().unwrap(), begin.parse().unwrap());
    let store = RedisStore::options().prefix(prefix).connect(url).await.unwrap();
    let effects = idem_tests::server::raw(url).await;
    for n in (0..keys).map(|n| (begin + n) % keys) {
        loop {
            let operation = Operation::new(&store, Key::new("race", n), POLICY);
            let mut effects = effects.clone();
            let body = async move {
                let number = current().unwrap().number();
                // The effect is not idempotent: every run leaves a trace.
                let _: usize = effects.rpush(format!("{prefix}effects:{n}"), number).await.unwrap();
                Ok::<_, Error>(number)
            };
            let (_, outcome) = observe(run(operation, record_values::<Json>(), body)).await;
            match outcome.disposition() {
                Disposition::Ack => break,
                Disposition::Retry { .. } => tokio::time::sleep(Duration::from_millis(20)).await,
                Disposition::DeadLetter => panic!("key {n}: {outcome:?}"),
            }
        }
    }
}
