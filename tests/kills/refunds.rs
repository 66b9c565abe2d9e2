//! Program of docs/guide.md with an uncertain error and a reconciler, killed and cut off at random places and moments.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use idem_tests::chance::Chance;

use crate::bank::{Arrival, Bank, Fault, FaultKind, Place, Repetition};
use crate::broker::{End, Lane, RandomMoments};
use crate::rigs::{Rig, number};
use crate::{LANES, variable};

/// Places of a body and, behind them, those of a reconciler, which runs only after a fault.
const PLACES: [Place; 6] = [Place::Before, Place::OnItsWay, Place::Made, Place::After, Place::Asked, Place::Found];
const PLACES_OF_BODY: usize = 4;

/// Returns up to four faults of a refund.
fn faults(chance: &mut Chance) -> Vec<Fault> {
    let fault = |n, chance: &mut Chance| {
        let place = PLACES[chance.below(if n == 0 { PLACES_OF_BODY } else { PLACES.len() })];
        let is_of_bank = matches!(place, Place::OnItsWay | Place::Made | Place::Asked);
        let kind = match chance.below(if is_of_bank { 10 } else { 7 }) {
            0..5 => FaultKind::Kill,
            5..7 => FaultKind::CutOff,
            7..9 => FaultKind::NoAnswer,
            _ => FaultKind::NoHelp,
        };
        Fault { place, kind }
    };
    (0..=chance.below(4)).map(|n| fault(n, chance)).collect()
}

/// Counts of a run.
#[derive(Debug, Default)]
struct Tally {
    refunds: usize,
    killed: usize,
    cut_off: usize,
    without_answer: usize,
    /// Faults by place. The other faults happened at random moments.
    by_place: BTreeMap<Place, usize>,
    persons: usize,
}

impl Tally {
    fn faults(&self) -> usize {
        self.killed + self.cut_off + self.without_answer
    }
}

/// One run of refunds on one store.
struct Run<'a> {
    store: &'a str,
    rig: &'a Rig,
    bank: Bank,
    tally: RefCell<Tally>,
}

impl Run<'_> {
    /// Serves a refund without faults. Returns the time that it takes, including the start of the process.
    async fn pace(&self, lane: &mut Lane<'_>) -> Duration {
        let (id, begin) = (number(), Instant::now());
        let mut interventions = self.bank.open(id, Repetition::Refuses, Arrival::AfterSearch, []);
        lane.serve(id, &mut interventions, &mut RandomMoments::none()).await;
        assert_eq!(self.bank.close(id).effects.len(), 1, "{}: a refund without faults", self.store);
        begin.elapsed()
    }

    /// Serves a refund with faults. The refund happens once and its message ends; a person is asked only if the bank
    /// does not know the reference.
    async fn refund(&self, lane: &mut Lane<'_>, mut chance: Chance, within: Duration) {
        let id = number();
        let arrival = if chance.percent(50) { Arrival::AfterSearch } else { Arrival::AfterRequest };
        let mut interventions = self.bank.open(id, Repetition::Refuses, arrival, faults(&mut chance));
        let is_known = !chance.percent(5);
        if !is_known {
            self.bank.forget(id);
        }
        let left = if chance.percent(50) { 2 } else { 0 };
        let mut moments = RandomMoments { chance: chance.of(1), within, left };
        let end = lane.serve(id, &mut interventions, &mut moments).await;
        let duplicate = match &end {
            End::Acknowledged(_) => lane.serve(id, &mut interventions, &mut RandomMoments::none()).await,
            End::NeedsPerson => End::NeedsPerson,
        };
        let statement = self.bank.close(id);
        let context = format!("{}, message {id}: {end:?}, {statement:?}", self.store);
        // Only a request on its way may arrive after another one, so only then the bank refuses a request.
        let may_refuse = moments.left < left || statement.happened.iter().any(|it| it.place == Place::OnItsWay);
        assert!(may_refuse || statement.refused == 0, "a second request: {context}");
        assert_eq!(duplicate, end, "{context}");
        let mut tally = self.tally.borrow_mut();
        match &end {
            End::Acknowledged(receipt) => assert_eq!(statement.effects, [receipt.as_str()], "{context}"),
            End::NeedsPerson => {
                assert!(!is_known && statement.unanswered > 0, "the bank knows: {context}");
                assert!(statement.effects.len() <= 1, "{context}");
                tally.persons += 1;
            }
        }
        tally.refunds += 1;
        tally.killed += std::mem::take(&mut lane.killed);
        tally.cut_off += std::mem::take(&mut lane.cut_off);
        for fault in statement.happened {
            tally.without_answer += usize::from(fault.kind == FaultKind::NoAnswer);
            *tally.by_place.entry(fault.place).or_default() += 1;
        }
    }
}

/// Serves refunds until enough faults have happened.
pub async fn check(store: &str) {
    let (wanted, seed) = (variable("IDEM_KILLS_FAULTS", 40), variable("IDEM_KILLS_SEED", 26));
    let (chance, next) = (Chance::seeded(seed as u64), Cell::new(0));
    let rig = Rig::start(store).await;
    let run = Run { store, rig: &rig, bank: Bank::default(), tally: RefCell::default() };
    let port = run.bank.serve().await;
    let lanes = (0..LANES).map(async |_| {
        let mut lane = Lane::new(&run.rig.spec, "reconcile", port);
        let within = run.pace(&mut lane).await;
        while run.tally.borrow().faults() < wanted {
            let chance = chance.of(next.replace(next.get() + 1));
            run.refund(&mut lane, chance, within).await;
        }
    });
    join_all(lanes).await;
    println!("{store} refunds: {:?}", run.tally.borrow());
}
