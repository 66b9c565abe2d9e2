//! Faults that can happen to a handler, and the points at which they happen.

use std::fmt;

use self::Duplicate::{After, During, Late, Never, With};

/// Fault of the first delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// No fault happens.
    Nothing,
    /// The handler's future is dropped, and the worker lives on.
    Cancel,
    /// The worker dies.
    Crash,
    /// The worker stands still until another worker has handled the message.
    Stop,
    /// The worker stands still until another worker has taken over, and then runs concurrently with that worker.
    Pause,
    /// The worker stands still until another worker has taken over and then died.
    Overtake,
    /// A request does not reach the store or the service.
    RequestLost,
    /// A request takes effect, but its answer gets lost.
    AnswerLost,
    /// The worker can't reach the store, from this call on and for longer than a lease.
    Down,
    /// The caller of an effect gets an error while the request is on its way. The request arrives later.
    Late,
    /// The worker dies while the request of an effect is on its way. The request arrives later.
    CrashLate,
}

impl Cut {
    /// Returns whether the worker stands still for some time.
    pub(super) fn stands_still(self) -> bool {
        matches!(self, Self::Stop | Self::Pause | Self::Overtake)
    }

    /// Returns whether the request of an effect arrives after its caller has given up or died.
    pub(super) fn arrives_late(self) -> bool {
        matches!(self, Self::Late | Self::CrashLate)
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "run",
            Self::Cancel => "cancel",
            Self::Crash => "crash",
            Self::Stop => "stop",
            Self::Pause => "pause",
            Self::Overtake => "overtake",
            Self::RequestLost => "request-lost",
            Self::AnswerLost => "answer-lost",
            Self::Down => "down",
            Self::Late => "late",
            Self::CrashLate => "crash-late",
        })
    }
}

/// Point of the fault in the first delivery. The first await, store call or effect has the number 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Point {
    Nowhere,
    /// The delivery is pending for the n-th time.
    Await(usize),
    /// The delivery has returned, and the message is not acknowledged yet.
    Return,
    /// The message has been acknowledged.
    Ack,
    /// The delivery makes its n-th call of the store. A crash happens right after the call has taken effect.
    Store(usize),
    /// The delivery makes its n-th effect. If the worker stands still at this point, the request of the effect has
    /// already been sent.
    Effect(usize),
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nowhere => Ok(()),
            Self::Await(n) => write!(f, "@await:{n}"),
            Self::Return => f.write_str("@return"),
            Self::Ack => f.write_str("@ack"),
            Self::Store(n) => write!(f, "@store:{n}"),
            Self::Effect(n) => write!(f, "@effect:{n}"),
        }
    }
}

/// Time at which duplicates of the message are delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Duplicate {
    Never,
    /// The duplicates are delivered together with the message.
    With,
    /// The duplicates are delivered just before the fault.
    During,
    /// The duplicates are delivered right after the fault.
    After,
    /// The duplicates are delivered after all other deliveries have ended, at the latest time at which the broker may
    /// deliver.
    Late,
}

impl fmt::Display for Duplicate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => Ok(()),
            Self::With => f.write_str("/duplicate:with"),
            Self::During => f.write_str("/duplicate:during"),
            Self::After => f.write_str("/duplicate:after"),
            Self::Late => f.write_str("/duplicate:late"),
        }
    }
}

/// A run of the message through the workers. The text of a scenario identifies it, so that the run can be repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Scenario {
    pub(super) cut: Cut,
    pub(super) point: Point,
    pub(super) duplicate: Duplicate,
    /// Fault of a later delivery, and the number of the await at which it happens.
    pub(super) then: Option<(Cut, usize)>,
    /// Number, from 0, of the order of tasks in which the scenario runs
    /// ([`Explorer::orders`](super::Explorer::orders)). The explorer adds this number to the seed.
    pub(super) order: u32,
}

impl Scenario {
    /// The plain run, which has no fault.
    pub(super) const PLAIN: Self =
        Self { cut: Cut::Nothing, point: Point::Nowhere, duplicate: Never, then: None, order: 0 };

    /// Returns whether the renewals of a stopped worker are delayed, so that its handler goes on before a renewal shows
    /// that the lease is lost.
    pub(super) fn renews_late(self) -> bool {
        self.cut.stands_still() && self.order.is_multiple_of(2)
    }

    /// Returns whether the handler of a stopped worker is delayed, so that a renewal shows first that the lease is
    /// lost.
    pub(super) fn goes_on_late(self) -> bool {
        self.cut.stands_still() && !self.order.is_multiple_of(2)
    }

    /// Returns whether a late request arrives right after a question about its effect, and so before the effect can be
    /// repeated.
    pub(super) fn arrives_after_question(self) -> bool {
        !self.order.is_multiple_of(2)
    }

    /// Returns every scenario for a handler with this number of awaits, store calls and effects.
    pub(super) fn all(awaits: usize, store_calls: usize, effects: usize, orders: u32) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |cut, point, duplicates: &[Duplicate]| {
            for &duplicate in duplicates {
                let first = Self { cut, point, duplicate, ..Self::PLAIN };
                let orders = match duplicate {
                    // Without concurrent workers and late requests there is only one order of steps.
                    Never if !first.cut.stands_still() && !first.cut.arrives_late() => 1,
                    Late => 1,
                    _ => orders.max(1),
                };
                all.extend((0..orders).map(|order| Self { order, ..first }));
            }
        };
        // Scenarios with duplicates and without a fault.
        add(Cut::Nothing, Point::Nowhere, &[With, Late]);
        // Scenarios with a fault of the worker at an await.
        for n in 1..=awaits {
            let point = Point::Await(n);
            add(Cut::Nothing, point, &[During]);
            add(Cut::Cancel, point, &[Never, With, During, After]);
            add(Cut::Crash, point, &[Never, With, During, After]);
            add(Cut::Stop, point, &[Never]);
            add(Cut::Pause, point, &[Never]);
            add(Cut::Overtake, point, &[Never]);
        }
        // Scenarios whose worker dies after the return of the handler, before or after the acknowledgement.
        add(Cut::Crash, Point::Return, &[Never, With, After]);
        add(Cut::Crash, Point::Ack, &[Never, After]);
        // Scenarios with a fault at a call of the store: a message gets lost, or the store is unreachable.
        for n in 1..=store_calls {
            let point = Point::Store(n);
            add(Cut::RequestLost, point, &[Never, With]);
            add(Cut::AnswerLost, point, &[Never, With]);
            add(Cut::Down, point, &[Never, After]);
            add(Cut::Crash, point, &[Never]);
        }
        // Scenarios with a fault at an effect: the worker fails, or a message gets lost.
        for n in 1..=effects {
            let point = Point::Effect(n);
            add(Cut::RequestLost, point, &[Never, With]);
            add(Cut::AnswerLost, point, &[Never, With]);
            add(Cut::Crash, point, &[Never]);
            add(Cut::Stop, point, &[Never]);
            add(Cut::Pause, point, &[Never]);
            add(Cut::Overtake, point, &[Never]);
            add(Cut::Late, point, &[Never]);
            add(Cut::CrashLate, point, &[Never]);
        }
        all
    }

    /// Returns whether a later delivery may find an effect in doubt that has happened, has not happened, or is on its
    /// way. The explorer then also cuts that delivery.
    pub(super) fn leaves_doubt(self) -> bool {
        let is_effect = matches!(self.point, Point::Effect(_));
        is_effect && !self.cut.stands_still() && self.duplicate == Never && self.then.is_none()
    }

    /// Returns the scenarios in which a later delivery is also cut, at each of its first `awaits` awaits.
    pub(super) fn cut_again(self, awaits: usize) -> impl Iterator<Item = Self> {
        let cuts = (1..=awaits).flat_map(|at| [Cut::Cancel, Cut::Crash].map(|cut| (cut, at)));
        cuts.map(move |then| Self { then: Some(then), ..self })
    }

    /// Returns every scenario in which two deliveries are cut, one after the other.
    pub(super) fn twice(awaits: usize) -> impl Iterator<Item = Self> {
        let cuts = (1..=awaits).flat_map(|at| [Cut::Cancel, Cut::Crash].map(|cut| (cut, at)));
        cuts.flat_map(move |(cut, at)| Self { cut, point: Point::Await(at), ..Self::PLAIN }.cut_again(awaits))
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cut, point, duplicate, then, order } = self;
        write!(f, "{cut}{point}{duplicate}")?;
        if let Some((cut, at)) = then {
            write!(f, "/{cut}{}", Point::Await(*at))?;
        }
        if *order > 0 {
            write!(f, "/order:{order}")?;
        }
        Ok(())
    }
}
