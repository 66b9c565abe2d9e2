//! The faults that can happen to a handler, and where.

use std::fmt;

use self::Duplicate::{After, During, Late, Never, With};

/// The fault of the first delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// Nothing.
    Nothing,
    /// Its future is dropped; the worker lives on.
    Cancel,
    /// Its worker dies.
    Crash,
    /// Its worker stands still until another worker has handled the message.
    Stop,
    /// Its worker stands still until another worker has taken over, and goes on beside it.
    Pause,
    /// Its worker stands still until another worker has taken over and died of it.
    Overtake,
    /// A request gets lost on its way.
    RequestLost,
    /// A request is done, and its answer gets lost.
    AnswerLost,
    /// The worker can't reach the store, from this call on and for longer than a lease.
    Down,
}

impl Cut {
    /// Whether the worker stands still for a while.
    pub(super) fn stands_still(self) -> bool {
        matches!(self, Self::Stop | Self::Pause | Self::Overtake)
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
        })
    }
}

/// The point of the fault; numbers count from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Point {
    Nowhere,
    /// When the delivery is pending for the n-th time.
    Await(usize),
    /// When it has returned, before the message is acknowledged.
    Return,
    /// When the message has been acknowledged.
    Ack,
    /// At a call of the store.
    Store(usize),
    /// At an effect. A worker that stands still there does so while the request is on its way.
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

/// When duplicates of the message are delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Duplicate {
    Never,
    /// Together with the message.
    With,
    /// When the message has reached the point of the fault, just before it.
    During,
    /// Right after the fault.
    After,
    /// When all deliveries have ended, as late as the broker may deliver again.
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

/// One run of the message through the workers. Its text repeats it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Scenario {
    pub(super) cut: Cut,
    pub(super) point: Point,
    pub(super) duplicate: Duplicate,
    /// The fault of a later delivery, and at which of its awaits.
    pub(super) then: Option<(Cut, usize)>,
    /// Which of several orders of the tasks.
    pub(super) order: u32,
}

impl Scenario {
    /// The plain run: no fault.
    pub(super) const PLAIN: Self =
        Self { cut: Cut::Nothing, point: Point::Nowhere, duplicate: Never, then: None, order: 0 };

    /// Whether a worker that stood still goes on before its heartbeat finds the lease lost.
    pub(super) fn renews_late(self) -> bool {
        self.cut.stands_still() && self.order.is_multiple_of(2)
    }

    /// Whether it goes on after that.
    pub(super) fn goes_on_late(self) -> bool {
        self.cut.stands_still() && !self.order.is_multiple_of(2)
    }

    /// Every scenario for a handler with so many awaits, store calls and effects.
    pub(super) fn all(awaits: usize, store_calls: usize, effects: usize, orders: u32) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |cut, point, duplicates: &[Duplicate]| {
            for &duplicate in duplicates {
                let first = Self { cut, point, duplicate, ..Self::PLAIN };
                let orders = match duplicate {
                    // One task at a time has only one order.
                    Never if !first.cut.stands_still() => 1,
                    Late => 1,
                    _ => orders.max(1),
                };
                all.extend((0..orders).map(|order| Self { order, ..first }));
            }
        };
        add(Cut::Nothing, Point::Nowhere, &[With, Late]);
        for n in 1..=awaits {
            let point = Point::Await(n);
            add(Cut::Nothing, point, &[During]);
            add(Cut::Cancel, point, &[Never, With, During, After]);
            add(Cut::Crash, point, &[Never, With, During, After]);
            add(Cut::Stop, point, &[Never]);
            add(Cut::Pause, point, &[Never]);
            add(Cut::Overtake, point, &[Never]);
        }
        add(Cut::Crash, Point::Return, &[Never, With, After]);
        add(Cut::Crash, Point::Ack, &[Never, After]);
        for n in 1..=store_calls {
            let point = Point::Store(n);
            add(Cut::RequestLost, point, &[Never, With]);
            add(Cut::AnswerLost, point, &[Never, With]);
            add(Cut::Down, point, &[Never, After]);
        }
        for n in 1..=effects {
            let point = Point::Effect(n);
            add(Cut::RequestLost, point, &[Never, With]);
            add(Cut::AnswerLost, point, &[Never, With]);
            add(Cut::Crash, point, &[Never]);
            add(Cut::Stop, point, &[Never]);
            add(Cut::Pause, point, &[Never]);
            add(Cut::Overtake, point, &[Never]);
        }
        all
    }

    /// Every scenario in which two deliveries are cut, one after the other.
    pub(super) fn twice(awaits: usize) -> impl Iterator<Item = Self> {
        let cuts = move || (1..=awaits).flat_map(|at| [Cut::Cancel, Cut::Crash].map(|cut| (cut, at)));
        cuts().flat_map(move |(cut, at)| {
            cuts().map(move |then| Self { cut, point: Point::Await(at), then: Some(then), ..Self::PLAIN })
        })
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
