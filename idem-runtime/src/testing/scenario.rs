//! The faults that can happen to a handler, and their points.

use std::fmt;

use self::Duplicate::{After, During, Late, Never, With};

/// The fault of the first delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// No fault.
    Nothing,
    /// The handler's future is dropped; the worker lives on.
    Cancel,
    /// The worker dies.
    Crash,
    /// The worker stands still until another worker has handled the message.
    Stop,
    /// The worker stands still until another worker has taken over, and then runs concurrently with it.
    Pause,
    /// The worker stands still until another worker has taken over, and has died of this same scenario.
    Overtake,
    /// A request does not reach the store or the service.
    RequestLost,
    /// A request takes effect, and its answer gets lost.
    AnswerLost,
    /// The worker can't reach the store, from this call on and for longer than a lease.
    Down,
}

impl Cut {
    /// Returns whether the worker stands still for a while.
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
    /// The delivery is pending for the n-th time.
    Await(usize),
    /// The delivery has returned, and the message is not acknowledged yet.
    Return,
    /// The message has been acknowledged.
    Ack,
    /// The n-th call of the store.
    Store(usize),
    /// The n-th effect. A worker that stands still there has already sent the request.
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
    /// Together with the message.
    With,
    /// At the point of the fault, just before it.
    During,
    /// Right after the fault.
    After,
    /// After all deliveries have ended, as late as the broker may deliver again.
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

/// One run of the message through the workers. Its text is enough to repeat it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Scenario {
    pub(super) cut: Cut,
    pub(super) point: Point,
    pub(super) duplicate: Duplicate,
    /// The fault of a later delivery, and the number of the await at which it happens.
    pub(super) then: Option<(Cut, usize)>,
    /// Number of the task order, from 0.
    pub(super) order: u32,
}

impl Scenario {
    /// The plain run: no fault.
    pub(super) const PLAIN: Self =
        Self { cut: Cut::Nothing, point: Point::Nowhere, duplicate: Never, then: None, order: 0 };

    /// Returns whether a stopped worker's renewal is delayed, so that its handler goes on before the heartbeat finds
    /// the lease lost.
    pub(super) fn renews_late(self) -> bool {
        self.cut.stands_still() && self.order.is_multiple_of(2)
    }

    /// Returns whether a stopped worker's handler is delayed, so that the heartbeat finds the lease lost first.
    pub(super) fn goes_on_late(self) -> bool {
        self.cut.stands_still() && !self.order.is_multiple_of(2)
    }

    /// Lists every scenario for a handler with this many awaits, store calls and effects.
    pub(super) fn all(awaits: usize, store_calls: usize, effects: usize, orders: u32) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |cut, point, duplicates: &[Duplicate]| {
            for &duplicate in duplicates {
                let first = Self { cut, point, duplicate, ..Self::PLAIN };
                let orders = match duplicate {
                    // Without concurrency there is only one order of tasks.
                    Never if !first.cut.stands_still() => 1,
                    Late => 1,
                    _ => orders.max(1),
                };
                all.extend((0..orders).map(|order| Self { order, ..first }));
            }
        };
        // Duplicates without a fault.
        add(Cut::Nothing, Point::Nowhere, &[With, Late]);
        // At an await, the worker itself fails.
        for n in 1..=awaits {
            let point = Point::Await(n);
            add(Cut::Nothing, point, &[During]);
            add(Cut::Cancel, point, &[Never, With, During, After]);
            add(Cut::Crash, point, &[Never, With, During, After]);
            add(Cut::Stop, point, &[Never]);
            add(Cut::Pause, point, &[Never]);
            add(Cut::Overtake, point, &[Never]);
        }
        // Between the handler's end and the acknowledgement, and after it.
        add(Cut::Crash, Point::Return, &[Never, With, After]);
        add(Cut::Crash, Point::Ack, &[Never, After]);
        // At a call of the store, messages get lost, or the store is down.
        for n in 1..=store_calls {
            let point = Point::Store(n);
            add(Cut::RequestLost, point, &[Never, With]);
            add(Cut::AnswerLost, point, &[Never, With]);
            add(Cut::Down, point, &[Never, After]);
        }
        // At an effect, both the worker and the messages may fail.
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

    /// Lists every scenario in which two deliveries are cut, one after the other.
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
