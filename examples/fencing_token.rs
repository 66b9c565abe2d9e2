//! Keeps a paused worker from overwriting its successor's work.
//!
//! A request that a paused worker has already sent may arrive after another worker has taken over. No library can call
//! such a request back, but its receiver can refuse it: `attempt.number()` grows with each attempt for a key, and the
//! receiver stores the highest number so far. `cargo run --example fencing_token` shows this situation step by step.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_examples::Claims;
use idem_runtime::clock::ManualClock;
use idem_runtime::{MemoryStore, current, idempotent, observe};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::yield_now;

type AnyError = Box<dyn Error + Send + Sync>;

/// A request to write a price, on its way to the storage service.
struct Request {
    token: u32,
    price: u32,
    reply: oneshot::Sender<Result<(), String>>,
}

/// A storage service, and the requests that are still on their way to it.
#[derive(Default)]
struct Storage {
    under_way: VecDeque<Request>,
    highest_token: u32,
    price: u32,
}

impl Storage {
    fn receive(&mut self, Request { token, price, reply }: Request) {
        // In SQL: UPDATE prices SET price = $1, token = $2 WHERE token <= $2
        let answer = if token >= self.highest_token {
            (self.highest_token, self.price) = (token, price);
            Ok(())
        } else {
            Err(format!("token {token} is older than {}", self.highest_token))
        };
        println!("   the storage receives {price} under token {token}: {answer:?}");
        let _ = reply.send(answer);
    }
}

/// The handler, which sets the price of an article. The request contains the number of the handler's attempt.
#[idempotent(key = "price:{article}", ttl = "7d", store = store, scope = "set_price")]
async fn set_price(store: &MemoryStore, storage: &Mutex<Storage>, article: u32, price: u32) -> Result<u32, AnyError> {
    let token = current()?.number();
    let (reply, answer) = oneshot::channel();
    lock(storage).under_way.push_back(Request { token, price, reply });
    answer.await??;
    Ok(price)
}

fn run(claims: &mut Claims) -> Result<(), AnyError> {
    let clock = ManualClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    let storage = Arc::new(Mutex::new(Storage::default()));
    // Each worker has its own runtime and its own store handle, like a separate process.
    let (first, second) = (runtime()?, runtime()?);
    let call = |price| {
        let (store, storage) = (store.peer(), Arc::clone(&storage));
        async move { observe(set_price(&store, &storage, 7, price)).await }
    };

    let paused = first.spawn(call(100));
    let late = first.block_on(request(&storage));
    // No thread drives the first runtime now: its worker is paused. The worker's lease (30 s) is not renewed, and
    // lapses.
    clock.advance(Duration::from_secs(31));

    let successor = second.spawn(call(120));
    let in_time = second.block_on(request(&storage));
    lock(&storage).receive(in_time);
    let (price, outcome) = second.block_on(successor)?;
    claims.check("another worker takes over as attempt 2", outcome.took_over() && outcome.attempt() == Some(2));
    claims.check("its write is accepted", price? == 120);

    // The first worker's request arrives, and the worker goes on.
    lock(&storage).receive(late);
    claims.check("the late write of attempt 1 is refused", lock(&storage).price == 120);
    let (price, outcome) = first.block_on(paused)?;
    println!("   the first worker: {}", price.as_ref().map_or_else(ToString::to_string, ToString::to_string));
    claims.check("the first worker does not report success", price.is_err() && !outcome.recorded());
    Ok(())
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_time().build()
}

/// Waits until a request is under way, and takes it.
async fn request(storage: &Mutex<Storage>) -> Request {
    loop {
        if let Some(request) = lock(storage).under_way.pop_front() {
            return request;
        }
        yield_now().await;
    }
}

fn lock(storage: &Mutex<Storage>) -> MutexGuard<'_, Storage> {
    storage.lock().unwrap_or_else(PoisonError::into_inner)
}

fn main() -> ExitCode {
    let mut claims = Claims::default();
    let result = run(&mut claims);
    claims.exit_code(&result)
}
