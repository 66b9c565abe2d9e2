//! Runs an operation for one key after the other, and prints each key whose result is recorded. Tests kill this
//! process.
//!
//! Arguments: the text that names the store, the number after the last key, and optionally the first key (default: 0)
//! and a destination. Each body then pushes a message for it, with its key.

use std::time::Duration;

use idem_runtime::outbox::OutgoingMessage;
use idem_runtime::{Error, InProgress, Operation, Policy, current};
use idem_tests::{race, stores};

/// A successor of a killed process waits for its lease to lapse.
const POLICY: Policy =
    Policy::new(Duration::from_secs(3600)).lease(race::LEASE).in_progress(InProgress::Wait(Duration::from_secs(60)));

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, end, more @ ..] = &args[..] else { panic!("store, number after the last key") };
    let (first, destination) = (more.first().map_or("0", |first| first), more.get(1));
    let store = stores::open(spec, race::LEASE).await;
    for n in first.parse::<usize>().unwrap()..end.parse().unwrap() {
        let body = async {
            if let Some(destination) = destination {
                current()?.outbox().push(destination, OutgoingMessage::new(n.to_string()).key(n))?;
            }
            Ok::<_, Error>(n)
        };
        Operation::new(&*store, Ok(race::key(n)), POLICY).run(body).await.unwrap();
        println!("{n}");
    }
}
