//! Offsets that may be committed, compared with a simple model that keeps all events.

use std::collections::BTreeMap;

use idem_runtime::brokers::{OffsetTracker, StartedMessage};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    /// A consumer receives the next message of a partition; `gap` offsets before it have no message.
    Receive { partition: u8, gap: i64 },
    /// A handler ends; `which` is the index of the handler among all started handlers.
    Settle { which: prop::sample::Index },
    /// A rebalance takes the partition away from this consumer.
    Revoke { partition: u8 },
    /// A rebalance assigns the partition to this consumer, with or without a revocation before. Other consumers have
    /// handled `others` messages meanwhile.
    Assign { partition: u8, others: i64 },
    /// The consumer's position moves back by `by` messages, without the tracker's knowledge.
    Rewind { partition: u8, by: i64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_u8, 0..3_i64).prop_map(|(partition, gap)| Step::Receive { partition, gap }),
        6 => any::<prop::sample::Index>().prop_map(|which| Step::Settle { which }),
        1 => (0..3_u8).prop_map(|partition| Step::Revoke { partition }),
        1 => (0..3_u8, 0..4_i64).prop_map(|(partition, others)| Step::Assign { partition, others }),
        1 => (0..3_u8, 1..5_i64).prop_map(|(partition, by)| Step::Rewind { partition, by }),
    ]
}

/// Message that a handler has started, and whether the handler has ended.
#[derive(Debug)]
struct Fact {
    partition: u8,
    generation: u32,
    offset: i64,
    settled: bool,
}

/// Simple model of the tracker: it keeps all facts, and computes each answer anew.
#[derive(Default)]
struct Account {
    facts: Vec<Fact>,
    /// Number of assignments so far.
    generations: u32,
    /// For each partition that this consumer is assigned, the number of the present assignment.
    generation: BTreeMap<u8, u32>,
    /// Offset that was last committed for each partition, by this consumer or another one.
    committed: BTreeMap<u8, i64>,
}

impl Account {
    fn present(&self, partition: u8) -> impl Iterator<Item = &Fact> {
        let generation = self.generation.get(&partition).copied();
        self.facts.iter().filter(move |fact| fact.partition == partition && Some(fact.generation) == generation)
    }

    /// Returns the offset that may be committed. If a handler of this assignment has not ended, this is the offset of
    /// the first message without an ended handler; otherwise it is the offset after the last message.
    fn position(&self, partition: u8) -> i64 {
        let unsettled = self.present(partition).filter(|fact| !fact.settled).map(|fact| fact.offset).min();
        let behind_all = || self.present(partition).map(|fact| fact.offset + 1).max().expect("a message was settled");
        unsettled.unwrap_or_else(behind_all)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_commit_passes_the_offset_of_an_unsettled_message(steps in prop::collection::vec(step(), 1..120)) {
        let mut tracker = OffsetTracker::new();
        let mut account = Account::default();
        let mut started: Vec<Option<StartedMessage>> = Vec::new();
        let mut next = [0_i64; 3];
        for step in steps {
            match step {
                Step::Receive { partition, gap } => {
                    let place = usize::from(partition);
                    let offset = next[place] + gap;
                    let ticket = tracker.started(&partition, offset);
                    let generation = account.generation.get(&partition).copied();
                    prop_assert_eq!(ticket.is_some(), generation.is_some(), "a ticket needs an assignment");
                    let Some(generation) = generation else { continue };
                    next[place] = offset + 1;
                    // The first message of an assignment sets the offset from which the assignment commits.
                    if account.present(partition).next().is_none() {
                        account.committed.insert(partition, offset);
                    }
                    started.push(ticket);
                    account.facts.push(Fact { partition, generation, offset, settled: false });
                }
                Step::Settle { which } if !started.is_empty() => {
                    let which = which.index(started.len());
                    let Some(ticket) = started[which].take() else { continue };
                    account.facts[which].settled = true;
                    let Fact { partition, generation, offset, .. } = account.facts[which];
                    prop_assert_eq!(ticket.offset(), offset);
                    let answer = tracker.settled(ticket);
                    // A ticket of an earlier assignment must commit nothing.
                    if Some(generation) != account.generation.get(&partition).copied() {
                        prop_assert_eq!(answer, None, "another consumer has or had the partition");
                        continue;
                    }
                    let position = account.position(partition);
                    let committed = account.committed.get_mut(&partition).expect("the partition was assigned");
                    prop_assert_eq!(answer, (position > *committed).then_some(position));
                    *committed = (*committed).max(position);
                }
                Step::Settle { .. } => {}
                Step::Revoke { partition } => {
                    tracker.revoked(&partition);
                    account.generation.remove(&partition);
                }
                Step::Assign { partition, others } => {
                    tracker.assigned(&partition);
                    account.generations += 1;
                    account.generation.insert(partition, account.generations);
                    // The consumer starts at the committed offset.
                    let committed = account.committed.entry(partition).or_default();
                    *committed += others;
                    next[usize::from(partition)] = *committed;
                }
                Step::Rewind { partition, by } => {
                    let place = usize::from(partition);
                    next[place] = (next[place] - by).max(0);
                }
            }
            // After each step, exactly the unsettled messages of the present assignment are in flight.
            for partition in 0..3 {
                let open = account.present(partition).filter(|fact| !fact.settled).count();
                prop_assert_eq!(tracker.in_flight(&partition), open);
            }
        }
    }
}

#[test]
fn a_message_of_an_earlier_assignment_commits_no_offset() {
    for is_revoked in [false, true] {
        let mut tracker = OffsetTracker::new();
        tracker.assigned(&"orders");
        let old = tracker.started(&"orders", 5).unwrap();
        if is_revoked {
            tracker.revoked(&"orders");
            assert_eq!(tracker.started(&"orders", 6), None, "another consumer has the partition");
        }
        // Another consumer has committed offset 8 meanwhile.
        tracker.assigned(&"orders");
        let new = tracker.started(&"orders", 8).unwrap();
        let behind = tracker.started(&"orders", 9).unwrap();
        assert_eq!(tracker.settled(behind), None);
        assert_eq!(tracker.settled(old), None, "a commit of offset 6 would move the group back");
        assert_eq!(tracker.settled(new), Some(10));
    }
}

#[test]
fn a_partition_that_was_never_assigned_commits_no_offset() {
    let mut tracker = OffsetTracker::new();
    assert_eq!(tracker.started(&"orders", 5), None);
    assert_eq!(tracker.in_flight(&"orders"), 0);
}

#[test]
fn a_dropped_ticket_stops_commits_and_uses_no_memory() {
    let mut tracker = OffsetTracker::new();
    tracker.assigned(&0);
    let _ = tracker.started(&0, 0);
    for offset in 1..100_000 {
        let started = tracker.started(&0, offset).unwrap();
        assert_eq!(tracker.settled(started), None);
    }
    assert_eq!(tracker.in_flight(&0), 1);
}
