//! Runs an operation for one key after the other, and prints each key whose result is recorded. Tests kill this
//! process.
//!
//! Arguments: the text that names the store, and the number of keys.

use std::time::Duration;

use idem_runtime::{Error, Operation, Policy};
use idem_tests::{race, stores};

const POLICY: Policy = Policy::new(Duration::from_secs(3600)).lease(race::LEASE);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, keys] = &args[..] else { panic!("store, number of keys") };
    let store = stores::open(spec, race::LEASE).await;
    for n in 0..keys.parse::<usize>().unwrap() {
        let operation = Operation::new(&*store, Ok(race::key(n)), POLICY);
        operation.run(async { Ok::<_, Error>(n) }).await.unwrap();
        println!("{n}");
    }
}
