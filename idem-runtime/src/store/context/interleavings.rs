//! Tests of leases that are registered and deregistered while the renewal task runs, in many orders of their steps.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use shuttle::future::block_on;

use super::leases::{LONGEST_SLEEP, Leases, NEVER};
use super::{LeaseStanding, Limits, StoreContext};
use crate::clock::Clock;
use crate::key::Key;
use crate::record::{Lease, Release, Reservation, ReserveRequest, Verdict};
use crate::store::Store;
use crate::stores::memory::MemoryStore;
use crate::sync::atomic::{AtomicBool as Flag, AtomicUsize, Ordering};
use crate::sync::{TestClock, explore, join_all};

const LEASE: Duration = Duration::from_secs(6);
const TIMEOUT: Duration = Duration::from_secs(3600);

/// State of one process: a store in memory, its test clock, and the number of running bodies.
#[derive(Clone)]
struct World {
    clock: TestClock,
    store: Arc<dyn Store>,
    /// Number of running tasks that are bodies; every other task of the clock renews leases.
    bodies: Arc<AtomicUsize>,
}

impl World {
    fn new() -> Self {
        let clock = TestClock::default();
        Self { store: MemoryStore::options().clock(clock.clone()).build().handle(), clock, bodies: Arc::default() }
    }

    fn context(&self) -> &StoreContext {
        self.store.context()
    }

    fn leases(&self) -> &Arc<Leases> {
        self.context().leases()
    }

    fn reserve(&self, key: u32, lease: Duration) -> Lease {
        let request = ReserveRequest::new(
            Key::new("interleavings", key).expect("a key"),
            self.context().new_owner(),
            lease,
            TIMEOUT,
        );
        match block_on(self.store.reserve(&request)) {
            Ok(Reservation::Granted { lease, .. }) => lease,
            other => panic!("should be reserved, is {other:?}"),
        }
    }

    fn register(&self, key: u32, lease: Duration) -> Lease {
        self.register_for(key, lease, TIMEOUT)
    }

    fn register_for(&self, key: u32, lease: Duration, timeout: Duration) -> Lease {
        let asked_at = self.clock.now();
        let lease = self.reserve(key, lease);
        let limits = Limits::new(timeout, Some(timeout));
        self.leases().register(&self.store, &lease, asked_at, limits, None, true);
        lease
    }

    /// Advances the clock by `duration`. Panics if one of `leases` lapses meanwhile.
    async fn hold(&self, leases: &[Lease], duration: Duration) {
        let check = |step| {
            for lease in leases {
                let left = self.leases().lease_remaining(lease.owner);
                assert!(left > step, "the lease of {} was not renewed in time", lease.key.as_str());
            }
            let renewing = self.clock.tasks.alive() - self.bodies.load(Ordering::SeqCst);
            assert!(renewing <= 1, "more than one renewal task");
        };
        self.clock.pass(duration, check).await;
    }

    /// Advances the clock until the renewal task ends. The task ends only if no lease is registered.
    async fn rest(&self) {
        assert_eq!(self.context().live(), 0);
        self.clock.pass(3 * LONGEST_SLEEP, |_| {}).await;
        assert_eq!(self.clock.tasks.alive(), 0, "the renewal task does not end");
        assert!(!self.leases().running.load(Ordering::SeqCst));
        assert_eq!(self.leases().next_beat.load(Ordering::SeqCst), NEVER);
    }

    /// Starts a body that waits until `until` returns true for the standing of its lease. The returned flag is true
    /// once the body has ended.
    fn body(&self, lease: &Lease, until: impl Fn(LeaseStanding) -> bool + Send + Sync + 'static) -> Arc<Flag> {
        let (world, owner, met) = (self.clone(), lease.owner, Arc::new(Flag::new(false)));
        let body = {
            let met = Arc::clone(&met);
            async move {
                poll_fn(|cx| match until(world.leases().standing(owner, cx.waker())) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                })
                .await;
                met.store(true, Ordering::SeqCst);
                world.bodies.fetch_sub(1, Ordering::SeqCst);
            }
        };
        self.bodies.fetch_add(1, Ordering::SeqCst);
        self.clock.tasks.spawn(body);
        met
    }
}

/// Several leases are registered concurrently, and a lease that is registered later has an earlier beat. Each lease is
/// renewed in time.
#[test]
fn each_lease_is_renewed_in_time() {
    explore(|| {
        let world = World::new();
        let registering: Vec<_> = [LEASE, LEASE / 3, LEASE / 2]
            .into_iter()
            .zip(0..)
            .map(|(lease, key)| {
                let world = world.clone();
                shuttle::thread::spawn(move || world.register(key, lease))
            })
            .collect();
        let leases: Vec<_> = registering.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        block_on(async {
            world.hold(&leases, LEASE + LEASE / 2).await;
            for lease in &leases {
                world.leases().deregister(lease.owner);
            }
            world.rest().await;
        });
    });
}

/// A lease is registered while the renewal task scans the leases, and is due long before the next scan.
#[test]
fn a_lease_registered_while_the_renewal_task_scans_is_renewed() {
    explore(|| {
        let world = World::new();
        let first = world.register(0, 8 * LONGEST_SLEEP);
        block_on(world.clock.tasks.idle());
        world.clock.advance(LONGEST_SLEEP);
        let second = world.register(1, LEASE);
        block_on(world.hold(&[first, second], 2 * LEASE));
    });
}

/// A body that never checks its lease registers the lease while the renewal task ends. The lease is still renewed.
#[test]
fn a_lease_registered_while_the_renewal_task_ends_is_renewed() {
    explore(|| {
        let world = World::new();
        let first = world.register(0, LEASE);
        let threads = block_on(async {
            world.hold(&[first.clone()], Duration::from_secs(1)).await;
            world.leases().deregister(first.owner);
            // The sleep of the renewal task ends, and the task finds no lease.
            let came = world.clone();
            let coming = shuttle::thread::spawn(move || vec![came.register(1, 4 * LONGEST_SLEEP)]);
            let came = world.clone();
            let going = shuttle::thread::spawn(move || {
                let lease = came.register(2, LEASE);
                came.leases().deregister(lease.owner);
                vec![]
            });
            world.clock.advance(LONGEST_SLEEP);
            [coming, going]
        });
        let came = threads.into_iter().flat_map(|thread| thread.join().expect("no panic"));
        let mut leases: Vec<_> = came.collect();
        block_on(async {
            world.clock.tasks.idle().await;
            leases.push(world.register(3, 2 * LONGEST_SLEEP));
            world.hold(&leases, 5 * LONGEST_SLEEP).await;
            for lease in &leases {
                world.leases().deregister(lease.owner);
            }
            world.rest().await;
        });
    });
}

/// The runtime of the renewal task shuts down. A body that waits on another runtime, or a new body, then starts a new
/// renewal task.
#[test]
fn a_new_renewal_task_replaces_a_dropped_one() {
    explore(|| {
        let world = World::new();
        let lease = world.register(0, LEASE);
        let renewing = world.clock.tasks.clone();
        let dropping = shuttle::thread::spawn(move || renewing.drop_first());
        let body = world.body(&lease, |standing| standing != LeaseStanding::Held);
        dropping.join().expect("no panic");
        block_on(async {
            world.hold(&[lease.clone()], 2 * LEASE).await;
            assert!(!body.load(Ordering::SeqCst));
            let released = world.store.release(&lease, Release::Returned).await;
            assert_eq!(released.expect("released"), Verdict::Applied);
            world.clock.pass(LEASE, |_| {}).await;
            assert!(body.load(Ordering::SeqCst), "the body was not woken when its lease was lost");
            world.leases().deregister(lease.owner);
            world.rest().await;
        });
    });
}

/// A waiting body is woken when its time limit is over, when its lease is lost, and when its lapsed lease is renewed.
#[test]
fn a_waiting_body_is_woken_when_its_lease_changes() {
    explore(|| {
        let world = World::new();
        let hangs = world.register_for(0, LEASE, LEASE);
        let loses = world.register(1, LEASE);
        let lapses = world.register(2, LEASE);
        let hung = world.body(&hangs, |standing| standing == LeaseStanding::TimedOut);
        let lost = world.body(&loses, |standing| standing == LeaseStanding::Lost);
        let was_lapsed = Arc::new(Flag::new(false));
        let held = {
            let was_lapsed = Arc::clone(&was_lapsed);
            world.body(&lapses, move |standing| {
                was_lapsed.fetch_or(standing == LeaseStanding::Lapsed, Ordering::SeqCst)
                    && standing == LeaseStanding::Held
            })
        };
        block_on(async {
            let released = world.store.release(&loses, Release::Returned).await;
            assert_eq!(released.expect("released"), Verdict::Applied);
            // The clock jumps by more than a lease, as if the process had been suspended.
            world.clock.advance(LEASE + Duration::from_secs(1));
            // The renewal task may have read the clock just before the jump.
            world.clock.pass(LEASE, |_| {}).await;
            assert!(hung.load(Ordering::SeqCst), "the body was not woken at its time limit");
            assert!(lost.load(Ordering::SeqCst), "the body was not woken when its lease was lost");
            // The lease may be renewed before its body sees that it has lapsed.
            let told = held.load(Ordering::SeqCst) || !was_lapsed.load(Ordering::SeqCst);
            assert!(told, "the body was not woken when its lease was renewed");
        });
    });
}

/// `flush` waits until all writes and renewals under way have ended, and then returns.
#[test]
fn flush_returns_when_all_writes_have_ended() {
    explore(|| {
        let world = World::new();
        let over = Arc::new([Flag::new(false), Flag::new(false)]);
        let works: Vec<_> = (0..2)
            .map(|at| {
                let (under_way, over) = (world.context().late_writes().under_way(), Arc::clone(&over));
                shuttle::thread::spawn(move || {
                    over[at].store(true, Ordering::SeqCst);
                    drop(under_way);
                })
            })
            .collect();
        let lease = world.register(0, LEASE);
        let flushing: Vec<_> = (0..2)
            .map(|_| {
                let (world, over) = (world.clone(), Arc::clone(&over));
                shuttle::thread::spawn(move || {
                    block_on(world.context().flush());
                    assert!(over.iter().all(|over| over.load(Ordering::SeqCst)), "flushed too early");
                })
            })
            .collect();
        world.clock.advance(LEASE / 3);
        join_all(flushing.into_iter().chain(works));
        block_on(async {
            world.hold(&[lease], LEASE).await;
            world.context().flush().await;
        });
        assert!(world.context().late_writes().is_flushed());
    });
}
