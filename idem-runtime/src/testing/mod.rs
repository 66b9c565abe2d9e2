//! Tests for your own handlers: an explorer that kills a handler at each of its awaits, on simulated time, and a store
//! that fails when a test asks for it ([`FaultyStore`]).
//!
//! [`explore`] delivers a message to your handler many times. The first run, the *plain run*, has no fault. The plain
//! run collects points: the awaits at which the handler is pending, its store calls, and its effects. For each point,
//! the explorer then runs several scenarios. The handler is cancelled at the point. The worker is killed at the point,
//! or stands still while another worker takes over. Requests and answers get lost. Duplicates arrive before the point,
//! at the point and after it. The explorer redelivers the message, as a broker does, until the message is acknowledged.
//! Every effect is counted, and each difference from the plain run is a finding.
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
//!     /// Makes the parts of a worker that starts.
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
//! // A worker dies after the charge and before its record, so the next worker charges again.
//! let report = explore(|worker| async { charge(&App::new(worker), 42).await });
//! assert!(report.findings().iter().any(|finding| matches!(finding.problem(), Problem::Repeated { times: 2, .. })));
//! println!("{report}");
//!
//! #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
//! async fn charge_with_key(app: &App, order: u32) -> std::io::Result<u32> {
//!     let key = current()?.child_key("charge"); // The key is the same on every attempt.
//!     app.worker.effect("charge").key(key).await.map_err(std::io::Error::other)?;
//!     Ok(order)
//! }
//!
//! // A test of your project makes this assertion.
//! explore(|worker| async { charge_with_key(&App::new(worker), 42).await }).assert_once();
//! ```
//!
//! A finding contains its story line by line, and the name of its scenario. With this name you can run the scenario
//! alone, for example in a debugger: `Explorer::new().only("crash@await:4").explore(…)`.
//!
//! # Scenarios of a handler
//!
//! | scenario | fault at the named point of the first delivery | bugs it finds |
//! |---|---|---|
//! | `cancel@await:n` | the future is dropped; the worker lives on | half-done work is done again |
//! | `crash@await:n`, `@store:n`, `@effect:n`, `@return`, `@ack` | its worker dies (at a store call or an effect: right after it has happened), with its heartbeats, late writes and tasks | half-done work is done again, one lease later; work that the handler did not wait for |
//! | `stop@await:n`, `@effect:n` | its worker stands still (at an effect: while the request is on its way); another worker takes over and ends; the first worker goes on | effects of an attempt that is over |
//! | `pause@await:n`, `@effect:n` | as `stop`, but the first worker goes on once the other has begun | concurrent attempts |
//! | `overtake@await:n`, `@effect:n` | as `stop`, but the other worker takes over and dies | a lost lease taken for success |
//! | `request-lost@store:n`, `@effect:n` | the request does not arrive; the caller gets an error | errors that are swallowed |
//! | `answer-lost@store:n`, `@effect:n` | the request is done; the caller gets an error | work that is done again after an error |
//! | `late@effect:n` | the caller gets an error while the request is on its way, and the request arrives later | "not found" that is taken for "can't happen any more" |
//! | `crash-late@effect:n` | as `late`, but the worker dies | the same |
//! | `down@store:n` | the store is unreachable from that call on, for two leases | results that can't be recorded |
//! | `run` | no fault | |
//!
//! | suffix | a duplicate is delivered to another worker |
//! |---|---|
//! | `/duplicate:with` | together with the message |
//! | `/duplicate:during` | when the first delivery has reached the point, just before the fault |
//! | `/duplicate:after` | right after the fault |
//! | `/duplicate:late` | after the end of all deliveries, at the limit [`Explorer::redelivered_within`] |
//!
//! Scenarios with concurrent workers are run in several task orders (`/order:1`): [`Explorer::orders`]. A late request
//! arrives as late as possible: once the effect was repeated, or (in `/order:1`) right after a question about it, or
//! just before the request [expires](Effect::expires_after), or after the last delivery.
//!
//! # Steps
//!
//! A [step](crate::Attempt::step) has an await before and after each of its effects, and its journal entry is a store
//! call, `append`. So the explorer ends a delivery between the effect and the entry, and right before and after the
//! entry reaches the store. A later attempt gets the values of the steps whose entries the store has, as the story
//! shows. A step without an entry runs again. If its effect then happens again, because the other service does not
//! recognise the repetition by its key, the finding names the step ([`Problem::StepRepeated`]):
//!
//! ```
//! use idem_runtime::testing::{Problem, Worker, explore};
//! use idem_runtime::step::Step;
//! use idem_runtime::{Error, current, idempotent};
//!
//! /// A parcel service. Without a key, the service books a second parcel for a second request.
//! async fn book(worker: &Worker, key: Option<String>) -> Result<bool, Error> {
//!     let parcel = worker.effect("parcel");
//!     let booked = if let Some(key) = key { parcel.key(key).await } else { parcel.await };
//!     booked.map_err(|_| Error::NoAttempt)
//! }
//!
//! #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store())]
//! async fn fulfil(worker: &Worker, order: u32, keyed: bool) -> Result<u32, Error> {
//!     let attempt = current()?;
//!     let charge = worker.effect("charge");
//!     let paid = async |step: Step| charge.key(step.child_key()).await.map_err(|_| Error::NoAttempt);
//!     attempt.step("charge").run(paid).await?;
//!     attempt.step("book").run(async |step| book(worker, keyed.then(|| step.child_key())).await).await?;
//!     Ok(order)
//! }
//!
//! explore(|worker| async move { fulfil(&worker, 42, true).await }).assert_once();
//! let report = explore(|worker| async move { fulfil(&worker, 42, false).await });
//! let is_named = |it: &Problem| matches!(it, Problem::StepRepeated { step, .. } if step == "book");
//! assert!(report.findings().iter().all(|finding| is_named(finding.problem())));
//! assert!(report.to_string().contains("step `book` ran again without its key"));
//! ```
//!
//! An effect belongs to the step whose body or reconciler first polls it, also among concurrent steps. An effect in a
//! task that the body of a step spawns belongs to no step.
//!
//! A step with [`fail`](crate::step::StepBuilder::fail) or [`reconcile`](crate::step::StepBuilder::reconcile) that was
//! cut off is [in doubt](crate::Outcome::steps_in_doubt):
//!
//! - *Reconciler.* The next delivery asks the reconciler of the step, and the scenarios of [reconcilers](#reconcilers)
//!   apply to it.
//! - *Operator.* Under `fail`, the message is set aside. The operator of the scenario waits until no request is on its
//!   way, and decides by the effects that have happened: the step is done, with its value of the plain run, or it is
//!   not done. Then the message is delivered again. So a right handler makes each effect exactly once, and needs no
//!   option. If a step with several effects was cut off between them, no decision is true: the message stays set
//!   aside, which is a finding.
//! - *Certain errors.* An error of the body that counts as certain lets the step run again. If the effect had happened,
//!   or its request was on its way, the step needs `uncertain_errors` ([`Problem::CertainError`]).
//! - *Outside of a step.* An effect before or after its step is not protected by the step ([`Problem::Repeated`]).
//!
//! # Messages
//!
//! The store of a worker has a [sender](Worker::sender), so a handler may push to its [outbox](crate::Attempt::outbox).
//! Each sending of a message is an effect, with the awaits and faults of effects, and the write that marks messages as
//! sent is a store call, `mark_sent`. So the explorer ends a delivery before and after each sending, and right before
//! and after the mark reaches the store. The simulated broker counts messages by their ids. Messages with other ids
//! than in the first attempt are a finding ([`Problem::MessageRepeated`]), as for a handler that publishes in its body:
//!
//! ```
//! use idem_runtime::outbox::{OutgoingMessage, Sender};
//! use idem_runtime::testing::{Problem, Worker, explore};
//! use idem_runtime::{Error, current, idempotent};
//!
//! #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store())]
//! async fn pay(worker: &Worker, order: u32, with_outbox: bool) -> Result<u32, Error> {
//!     let attempt = current()?;
//!     let paid = OutgoingMessage::new("paid");
//!     if with_outbox {
//!         attempt.outbox().push("orders", paid)?;
//!     } else {
//!         let paid = paid.addressed("orders", format!("{order}-{}", attempt.number()));
//!         worker.sender().send(&paid).await.map_err(|_| Error::NoAttempt)?;
//!     }
//!     Ok(order)
//! }
//!
//! explore(|worker| async move { pay(&worker, 42, true).await }).assert_once();
//! let report = explore(|worker| async move { pay(&worker, 42, false).await });
//! let is_repeated = |it: &Problem| matches!(it, Problem::MessageRepeated { times: 2, .. });
//! assert!(report.findings().iter().any(|finding| is_repeated(finding.problem())));
//! ```
//!
//! # Reconcilers
//!
//! If an effect is in doubt, the next delivery asks the [reconciler](crate::Reconciliation) of the handler, or of the
//! step. The reconciler asks your fake, which asks [`Worker::happened`]. After each scenario in which an effect is in
//! doubt, the explorer also cancels and kills the delivery that asks, at each of its awaits (`/cancel@await:n`,
//! `/crash@await:n`). A reconciler that answers [`NotDone`](crate::Reconciliation::NotDone) after the effect, or while
//! a request is on its way, is a finding ([`Problem::FalseNotDone`]):
//!
//! ```
//! use idem_runtime::testing::{Explorer, NoAnswer, Problem, Worker};
//! use idem_runtime::{Reconciliation, current, idempotent};
//!
//! /// A bank. If `refuses_twice`, the bank refuses a second request with the same reference.
//! struct Bank {
//!     worker: Worker,
//!     refuses_twice: bool,
//! }
//!
//! impl Bank {
//!     async fn refund(&self, reference: String) -> Result<bool, NoAnswer> {
//!         let refund = self.worker.effect("refund");
//!         if self.refuses_twice { refund.key(reference).await } else { refund.await }
//!     }
//! }
//!
//! #[idempotent(
//!     key = "refund:{id}", ttl = "7d", store = bank.worker.store(), on_error = uncertain,
//!     on_crash = reconcile(find(bank, id))
//! )]
//! async fn refund(bank: &Bank, id: u32) -> std::io::Result<u32> {
//!     bank.refund(current()?.child_key("refund")).await.map_err(std::io::Error::other)?;
//!     Ok(id)
//! }
//!
//! async fn find(bank: &Bank, id: u32) -> std::io::Result<Reconciliation<u32>> {
//!     match bank.worker.happened("refund").await.map_err(std::io::Error::other)? {
//!         true => Ok(Reconciliation::Done(id)),
//!         // Right only if no request is on its way, or if the bank refuses a second one.
//!         false => Ok(Reconciliation::NotDone),
//!     }
//! }
//!
//! let explore = |refuses_twice| {
//!     let deliver = move |worker| async move { refund(&Bank { worker, refuses_twice }, 7).await };
//!     Explorer::new().explore(deliver)
//! };
//! explore(true).assert_once();
//! let report = explore(false);
//! assert!(report.findings().iter().any(|it| matches!(it.problem(), Problem::FalseNotDone { times: 2, .. })));
//! println!("{report}");
//! ```
//!
//! A reconciler of a handler that answers [`Unknown`](crate::Reconciliation::Unknown) leaves some effects to an
//! operator. Explore its handler with [`Explorer::at_most_once`].
//!
//! # Expectations
//!
//! - For each destination, as many messages with different ids arrive as in the plain run, and one id has one content.
//! - Each effect happens as often as in the plain run. An effect whose request has an idempotency key ([`Effect::key`])
//!   happens once for each key. With [`Explorer::at_most_once`], for `on_crash = fail`, an effect may also be missing
//!   if the message was set aside.
//! - The message and each duplicate are acknowledged in the end. The message is set aside only if the plain run sets it
//!   aside too, or until an operator has decided about its steps in doubt.
//! - All deliveries get the same result.
//! - No task panics, waits forever or spins.
//!
//! # Your part
//!
//! The explorer calls your closure for each delivery. From the [`Worker`], the closure builds the parts of a worker
//! process: a store ([`Worker::store`]), and fakes of the services that your handler calls. The fakes count their
//! effects ([`Worker::effect`]), and may share state ([`Worker::shared`]). The closure returns the `Result` of your
//! handler, or the [`Disposition`](crate::Disposition) that your consumer has computed.
//!
//! Time is simulated, and `tokio::time` and [`Worker::clock`] show the simulated time. All tasks run on one thread. A
//! run repeats exactly if the handler is deterministic: the handler must not use real time or real input and output,
//! and every `tokio::select!` needs `biased;`. For tests that the explorer can't express, use a [`Simulation`] alone.
//!
//! # Limits
//!
//! A scenario has one fault, which hits the first worker. Only the delivery that finds an effect in doubt is cut as a
//! second one ([`Explorer::twice`] cuts two deliveries of every handler). Other combinations of faults are not
//! covered. No fault hits the awaits of tasks that your handler spawns, but faults hit the effects and store calls of
//! such tasks. The results are only as good as your fakes. A crash is simulated inside of this process: the values of
//! a killed handler are dropped, so their `Drop` runs. The store never loses records, unlike a Redis in a failover.

mod crash;
#[cfg(feature = "testing")]
mod effects;
#[cfg(feature = "testing")]
mod explorer;
mod faulty;
#[cfg(feature = "testing")]
mod operator;
#[cfg(feature = "testing")]
mod problem;
#[cfg(feature = "testing")]
mod random;
#[cfg(feature = "testing")]
mod report;
#[cfg(feature = "testing")]
mod run;
#[cfg(feature = "testing")]
mod scenario;
#[cfg(feature = "testing")]
mod simulation;
#[cfg(feature = "testing")]
mod tasks;
#[cfg(feature = "testing")]
mod time;
#[cfg(feature = "testing")]
mod worker;

pub use crash::crash;
#[cfg(feature = "testing")]
pub use explorer::{DeliveryOutput, Explorer, explore};
pub use faulty::{Fault, FaultyStore, StoreCall};
#[cfg(feature = "testing")]
pub use problem::{Finding, Problem};
#[cfg(feature = "testing")]
pub use random::Random;
#[cfg(feature = "testing")]
pub use report::Report;
#[cfg(feature = "testing")]
pub use simulation::{KilledTask, Simulation, SimulationStuck, Task};
#[cfg(feature = "testing")]
pub use time::SimulatedClock;
#[cfg(feature = "testing")]
pub use worker::{Effect, NoAnswer, SimulatedSender, SimulatedStore, Worker};
