//! The offsets that may be committed, against a plain account of all that has happened.

use std::collections::BTreeMap;

use idem_runtime::brokers::{OffsetTracker, Started};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    /// The consumer receives the next message of a partition, after a gap.
    Receive { partition: u8, gap: i64 },
    /// One of the handlers ends, by its place among all that were ever started.
    Settle { which: prop::sample::Index },
    /// A rebalance takes the partition away; it comes back at what has been committed.
    Revoke { partition: u8 },
    /// The consumer is sent back by some messages, and tells nobody.
    Rewind { partition: u8, by: i64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_u8, 0..3_i64).prop_map(|(partition, gap)| Step::Receive { partition, gap }),
        6 => any::<prop::sample::Index>().prop_map(|which| Step::Settle { which }),
        1 => (0..3_u8).prop_map(|partition| Step::Revoke { partition }),
        1 => (0..3_u8, 1..5_i64).prop_map(|(partition, by)| Step::Rewind { partition, by }),
    ]
}

/// One message that was started: everything there is to know about it.
#[derive(Debug)]
struct Fact {
    partition: u8,
    assignment: u32,
    offset: i64,
    settled: bool,
}

/// The plain reference: all facts, and no cleverness.
#[derive(Default)]
struct Account {
    facts: Vec<Fact>,
    assignment: BTreeMap<u8, u32>,
    committed: BTreeMap<u8, i64>,
}

impl Account {
    fn present(&self, partition: u8) -> impl Iterator<Item = &Fact> {
        let assignment = self.assignment.get(&partition).copied().unwrap_or_default();
        self.facts.iter().filter(move |fact| fact.partition == partition && fact.assignment == assignment)
    }

    /// Everything before it is settled, of what this assignment has started.
    fn position(&self, partition: u8) -> i64 {
        let unsettled = self.present(partition).filter(|fact| !fact.settled).map(|fact| fact.offset).min();
        let behind_all = || self.present(partition).map(|fact| fact.offset + 1).max().expect("one was settled");
        unsettled.unwrap_or_else(behind_all)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_commit_passes_a_message_that_is_not_settled(steps in prop::collection::vec(step(), 1..120)) {
        let mut tracker = OffsetTracker::new();
        let mut account = Account::default();
        let mut started: Vec<Option<Started>> = Vec::new();
        let mut next = [0_i64; 3];
        for step in steps {
            match step {
                Step::Receive { partition, gap } => {
                    let place = usize::from(partition);
                    let offset = next[place] + gap;
                    next[place] = offset + 1;
                    let assignment = account.assignment.get(&partition).copied().unwrap_or_default();
                    if account.present(partition).next().is_none() {
                        account.committed.insert(partition, offset);
                    }
                    started.push(Some(tracker.started(&partition, offset)));
                    account.facts.push(Fact { partition, assignment, offset, settled: false });
                }
                Step::Settle { which } if !started.is_empty() => {
                    let which = which.index(started.len());
                    let Some(ticket) = started[which].take() else { continue };
                    account.facts[which].settled = true;
                    let Fact { partition, assignment, offset, .. } = account.facts[which];
                    prop_assert_eq!(ticket.offset(), offset);
                    let answer = tracker.settled(ticket);
                    if assignment != account.assignment.get(&partition).copied().unwrap_or_default() {
                        prop_assert_eq!(answer, None, "the partition is somebody else's");
                        continue;
                    }
                    let position = account.position(partition);
                    let committed = account.committed.get_mut(&partition).expect("it has started");
                    prop_assert_eq!(answer, (position > *committed).then_some(position));
                    *committed = (*committed).max(position);
                }
                Step::Settle { .. } => {}
                Step::Revoke { partition } => {
                    tracker.revoked(&partition);
                    *account.assignment.entry(partition).or_default() += 1;
                    // Whoever has it next begins where this one has committed.
                    next[usize::from(partition)] = account.committed.get(&partition).copied().unwrap_or_default();
                }
                Step::Rewind { partition, by } => {
                    let place = usize::from(partition);
                    next[place] = (next[place] - by).max(0);
                }
            }
            for partition in 0..3 {
                let open = account.present(partition).filter(|fact| !fact.settled).count();
                prop_assert_eq!(tracker.in_flight(&partition), open);
            }
        }
    }
}

#[test]
fn what_was_started_before_a_rebalance_commits_nothing_after_it() {
    let mut tracker = OffsetTracker::new();
    let old = tracker.started(&"orders", 5);
    tracker.revoked(&"orders");
    let new = tracker.started(&"orders", 5);
    let behind = tracker.started(&"orders", 6);
    assert_eq!(tracker.settled(behind), None);
    assert_eq!(tracker.settled(old), None, "another consumer may have had it in between");
    assert_eq!(tracker.settled(new), Some(7));
}

#[test]
fn a_message_that_is_dropped_holds_the_commit_and_no_memory() {
    let mut tracker = OffsetTracker::new();
    drop(tracker.started(&0, 0));
    for offset in 1..100_000 {
        let started = tracker.started(&0, offset);
        assert_eq!(tracker.settled(started), None);
    }
    assert_eq!(tracker.in_flight(&0), 1);
}
