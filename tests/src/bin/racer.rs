//! One of several processes that race for the same keys; `idem_tests::race` starts and kills it.
//!
//! Arguments: store, file of effects, number of keys, the key to begin with.
#![allow(clippy::disallowed_methods)] // A consumer loop sleeps.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use idem_runtime::{Disposition, Error, InProgress, Json, Operation, Policy, current, observe, record_values, run};
use idem_tests::{race, stores};

const POLICY: Policy = Policy::new(Duration::from_secs(3600))
    .lease(Duration::from_millis(500))
    .in_progress(InProgress::Wait(Duration::from_secs(2)));

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, effects, keys, begin] = &args[..] else { panic!("store, effects, number of keys, first key") };
    let (keys, begin): (usize, usize) = (keys.parse().unwrap(), begin.parse().unwrap());
    let store = stores::open(spec).await;
    let effects = File::options().append(true).open(effects).unwrap();
    for n in (0..keys).map(|n| (begin + n) % keys) {
        loop {
            let operation = Operation::new(&*store, Ok(race::key(n)), POLICY);
            let body = async {
                let number = current().unwrap().number();
                // The effect is not idempotent: every run leaves a trace. One write is one line, whoever else appends.
                (&effects).write_all(format!("{n} {number}\n").as_bytes()).unwrap();
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
