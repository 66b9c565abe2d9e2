//! Tests of your own handlers: killed at each of their awaits, on simulated time.
//!
//! [`explore`] delivers a message to your handler, again and again. The first time nothing happens to it; that run tells at
//! which awaits it is pending, which calls its store gets, and which effects it has. Then each of these is a scenario: the
//! handler is cancelled there, its worker is killed, or stands still while another one takes over; requests and answers
//! get lost; duplicates arrive before, beside and after. The message is delivered again as a broker would, until it is
//! acknowledged. Every effect is counted, and what differs from the first run is a finding.
//!
//! ```
//! use idem_runtime::testing::{Problem, SimulatedStore, Worker, explore};
//! use idem_runtime::{current, idempotent};
//!
//! struct App {
//!     store: SimulatedStore, // An `Arc<dyn Store>` in your program, or generic.
//!     worker: Worker,        // A payment provider in your program.
//! }
//!
//! impl App {
//!     /// What a worker has when it starts.
//!     fn new(worker: Worker) -> Self {
//!         Self { store: worker.store(), worker }
//!     }
//! }
//!
//! #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
//! async fn charge(app: &App, order: u32) -> std::io::Result<u32> {
//!     app.worker.effect("charge").await.map_err(std::io::Error::other)?;
//!     Ok(order)
//! }
//!
//! // A worker that dies after the charge and before its record: the next one charges again.
//! let report = explore(|worker| async { charge(&App::new(worker), 42).await });
//! assert!(report.findings().iter().any(|finding| matches!(finding.problem(), Problem::Repeated { times: 2, .. })));
//! println!("{report}");
//!
//! #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
//! async fn charge_with_key(app: &App, order: u32) -> std::io::Result<u32> {
//!     let key = current().unwrap().child_key("charge"); // The same on every attempt.
//!     app.worker.effect("charge").key(key).await.map_err(std::io::Error::other)?;
//!     Ok(order)
//! }
//!
//! // What a test of your project says.
//! explore(|worker| async { charge_with_key(&App::new(worker), 42).await }).assert_once();
//! ```
//!
//! A finding tells its story, line by line, and how to play that scenario alone, for example under a debugger:
//! `Explorer::new().only("crash@await:4").explore(…)`.
//!
//! # What happens to the handler
//!
//! | scenario | what happens at that point to the first delivery | what it looks for |
//! |---|---|---|
//! | `cancel@await:n` | its future is dropped; its worker lives on | what is half done is done again |
//! | `crash@await:n`, `@effect:n`, `@return`, `@ack` | its worker dies, with its heartbeats, late writes and tasks | the same, one lease later; what was not waited for |
//! | `stop@await:n`, `@effect:n` | its worker stands still (at an effect: while the request is on its way); another one takes over and ends; it goes on | effects of an attempt that is over |
//! | `pause@await:n`, `@effect:n` | the same, but it goes on as soon as the other one has begun | two attempts at once |
//! | `overtake@await:n`, `@effect:n` | the same, but the other one dies when it has taken over | a lost lease that is taken for success |
//! | `request-lost@store:n`, `@effect:n` | the request does not arrive; the caller gets an error | errors that are swallowed |
//! | `answer-lost@store:n`, `@effect:n` | it is done; the caller gets an error | what is done again after an error |
//! | `down@store:n` | its store can't be reached from there on, for two leases | results that can't be recorded |
//! | `run` | nothing | |
//!
//! | with | a duplicate is delivered to another worker |
//! |---|---|
//! | `/duplicate:with` | together with the message |
//! | `/duplicate:during` | when the first delivery is at that await, and before anything happens to it |
//! | `/duplicate:after` | right after that has happened |
//! | `/duplicate:late` | when everything is over, as late as the broker may: [`Explorer::redelivered_within`] |
//!
//! Where workers run beside each other, each scenario is run in several orders (`/order:1`): [`Explorer::orders`].
//!
//! # What is expected
//!
//! - Each effect happens as often as in the run that nothing happens to. One that has an idempotency key of its own
//!   ([`Effect::key`]) happens once for each key. With [`Explorer::at_most_once`], for `on_crash = fail`, it may also be
//!   missing where the message was set aside.
//! - The message, and each duplicate, is acknowledged in the end; it is set aside only if it is where nothing happens.
//! - All deliveries get the same result.
//! - Nothing panics, waits for ever or spins.
//!
//! # What your test provides
//!
//! The closure is called for each delivery, and makes what a worker process has from its [`Worker`]: a store
//! ([`Worker::store`]), and fakes of what your handler calls, whose effects are counted ([`Worker::effect`]) and which may
//! share state ([`Worker::shared`]). It returns what your handler returns, or the [`Disposition`](crate::Disposition) that
//! your consumer has decided on.
//!
//! Time is simulated: `tokio::time` and [`Worker::clock`] follow it. Everything runs on one thread and repeats exactly, as
//! long as the handler itself does: `tokio::select!` needs `biased;` for that, real time and real input and output don't
//! belong here. A [`Simulation`] is that much alone, for tests of another shape.
//!
//! # What it does not show
//!
//! One thing happens in a scenario, and to the first worker ([`Explorer::twice`] cuts two deliveries); it is not every
//! interleaving of several faults. The awaits of a task that your handler spawns are not among the points, its effects and
//! its calls of the store are. Your fakes are as good as you make them. A crash is simulated inside of this process: the values of a handler that is killed are
//! dropped, and what their `Drop` does is done. And the store forgets nothing: what happens to your handler if a Redis
//! loses records in a failover is not among the scenarios.

mod explorer;
mod report;
mod scenario;
mod simulation;
mod time;
mod worker;

pub use explorer::{Delivered, Explorer, explore};
pub use report::{Finding, Problem, Report};
pub use simulation::{Killed, Random, Simulation, Stuck, Task};
pub use time::SimulatedClock;
pub use worker::{Effect, NoAnswer, SimulatedStore, Worker};
