//! A state of the model: records, calls, requests under way, and the promises so far.
//!
//! All values are small numbers, so that millions of states fit. A call is identified by its place in the plan, which is
//! also its owner token, its payload and its result. [`Slot`] is a [`Record`](idem_runtime::record::Record) in that form;
//! `store.rs` converts in both directions.

use idem_runtime::OnCrash;
use idem_runtime::store::{Release, Verdict};

use super::properties::Broken;

/// A call, by its place in the plan.
pub(crate) type Who = u8;
/// No call.
pub(crate) const NOBODY: Who = u8::MAX;
/// An owner token. The token of a call's first attempts is its place in the plan. A call whose key was released, by itself
/// or by an operator, needs another one.
pub(crate) type Token = u8;

/// The token of generation `generation` of `who`.
pub(crate) fn token(who: Who, generation: u8) -> Token {
    who + generation * CALLS as Who
}

/// The call that the token belongs to.
pub(crate) fn holder(token: Token) -> Who {
    if token == NOBODY { NOBODY } else { token % CALLS as Who }
}
/// How many calls a configuration may plan.
pub(crate) const CALLS: usize = 4;
/// How many keys it may have.
pub(crate) const KEYS: usize = 2;
/// How many operators may have looked at a record and not yet decided.
pub(crate) const OPERATORS: usize = 2;

/// One state of the model.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    /// True time. No part of the modelled protocol knows it when clocks differ.
    pub(crate) now: u8,
    pub(crate) slots: [Option<Slot>; KEYS],
    pub(crate) calls: [Call; CALLS],
    /// Requests under way whose answer no call waits for: late ones, and duplicates. Sorted, so that their order makes no
    /// difference; they arrive in any order, or never.
    pub(crate) net: Vec<Request>,
    /// How many events outside of the protocol may still happen.
    pub(crate) left: Budget,
    /// What operators have seen and not yet decided about.
    pub(crate) sights: [Option<Sight>; OPERATORS],
    pub(crate) history: [History; KEYS],
    pub(crate) broken: Broken,
}

/// A record as an operator saw it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Sight {
    pub(crate) key: u8,
    pub(crate) operator: u8,
    pub(crate) slot: Slot,
    /// Whether its lease held.
    pub(crate) live: bool,
    /// How many decisions about the key had been applied. The protocol never reads this.
    pub(crate) decided: u8,
}

/// A record, and when its lease lapses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Slot {
    pub(crate) owner: Token,
    /// How many decisions were applied since the latest attempt began: each changes the owner token of the record.
    pub(crate) decisions: u8,
    /// The operator who decided last; the first one gives no name, nor is there any before a decision.
    pub(crate) by: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    pub(crate) mark: Option<u8>,
    pub(crate) stand: Stand,
    /// By the clock of the store; without one, by the clock of the call that wrote the record.
    pub(crate) lapses_at: u8,
    /// How often its lease was renewed after it had lapsed; how often it was renewed at all where senders set the times.
    pub(crate) revived: u8,
}

impl Slot {
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.stand, Stand::Pending { .. })
    }

    /// Whether its body has begun, as far as the record says.
    pub(crate) fn begun(&self) -> bool {
        matches!(self.stand, Stand::Pending { begun: true, .. })
    }

    pub(crate) fn result(&self) -> Option<Kept> {
        match self.stand {
            Stand::Completed(kept) | Stand::Failed(kept) => Some(kept),
            _ => None,
        }
    }
}

/// [`State`](idem_runtime::record::State) in small numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stand {
    Pending { fail: bool, begun: bool },
    Released,
    Interrupted,
    Completed(Kept),
    Failed(Kept),
}

/// The recorded result: the call it comes from, and whether the store holds it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Kept {
    Stored(Who),
    TooLarge(Who),
}

/// A request of a call to the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Request {
    pub(crate) who: Who,
    pub(crate) token: Token,
    pub(crate) ask: Ask,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Ask {
    /// With the true time at which it was sent, if the clocks of the senders count; 0 otherwise. It inserts a record where
    /// there is none, or replaces the record that its sender has met.
    Reserve {
        sent: u8,
        over: Option<Met>,
    },
    /// With the same time, and the number of the attempt.
    Renew {
        sent: u8,
        attempt: u8,
    },
    /// Marks that the body begins; with the same time, and the number of the attempt.
    Begin {
        sent: u8,
        attempt: u8,
    },
    /// With the number of the attempt. Its starts go into the record if records are written whole.
    Finish {
        kept: Kept,
        ok: bool,
        attempt: u8,
        starts: u8,
    },
    Release(How),
}

/// A record as a reservation met it: the parts that a store compares before it replaces one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Met {
    pub(crate) owner: Token,
    pub(crate) decisions: u8,
    pub(crate) attempt: u8,
    pub(crate) is_pending: bool,
    pub(crate) begun: bool,
    pub(crate) revived: u8,
}

/// [`Release`] with an order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum How {
    Returned,
    NotStarted,
    Interrupted,
}

impl How {
    pub(crate) fn release(self) -> Release {
        match self {
            Self::Returned => Release::Returned,
            Self::NotStarted => Release::NotStarted,
            Self::Interrupted => Release::Interrupted,
        }
    }

    /// How a dropped body ends its attempt.
    pub(crate) fn dropped(on_crash: OnCrash) -> Self {
        if on_crash == OnCrash::Fail { Self::Interrupted } else { Self::Returned }
    }
}

/// An answer of the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Answer {
    Reserved {
        attempt: u8,
        starts: u8,
        takeover: bool,
    },
    Pending {
        attempt: u8,
        lapses_in: u8,
    },
    Finished {
        kept: Kept,
        ok: bool,
    },
    Mismatch,
    Interrupted,
    Exhausted,
    /// The owner of the request has already released the key.
    Released,
    /// The key is free. Its record is to be replaced by a second request, or looked at again.
    Free(Option<Met>),
    Write(Done),
    /// The result is larger than the store can hold.
    TooLarge,
}

/// [`Verdict`] with a hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Done {
    Done,
    Refused,
}

impl From<Verdict> for Done {
    fn from(write: Verdict) -> Self {
        match write {
            Verdict::Applied => Self::Done,
            Verdict::Refused => Self::Refused,
        }
    }
}

/// One call of an idempotent function: from its delivery to its result, and on to its late write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Call {
    pub(crate) phase: Phase,
    /// How many owner tokens it has had before this one.
    pub(crate) generation: u8,
    /// When the last confirmed reservation or renewal was asked for.
    pub(crate) asked_at: u8,
    /// When the first reservation without an answer was sent: it may have landed, or may yet.
    pub(crate) unanswered: Option<u8>,
    /// When a waiting call gives up; 0 before it waits.
    pub(crate) give_up_at: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    /// Whether its lease is kept alive.
    pub(crate) registered: bool,
    /// When its body reaches its time-out; 0 for never.
    pub(crate) stop_at: u8,
    /// Since when its end could not be written.
    pub(crate) fails_since: Option<u8>,
    /// Whether a renewal sent since then was confirmed before its last write was sent.
    pub(crate) renewed: bool,
    pub(crate) beat: Beat,
    /// Whether the heartbeat has found the lease lost.
    pub(crate) lost: bool,
    /// Whether the store has refused for good to renew its lease.
    pub(crate) refused: bool,
    /// Whether its record may say that its body has begun.
    pub(crate) marked: bool,
    pub(crate) deed: Deed,
}

impl Call {
    pub(crate) const IDLE: Self = Self {
        phase: Phase::Idle,
        generation: 0,
        asked_at: 0,
        unanswered: None,
        give_up_at: 0,
        attempt: 0,
        starts: 0,
        registered: false,
        stop_at: 0,
        fails_since: None,
        renewed: false,
        beat: Beat::None,
        lost: false,
        refused: false,
        marked: false,
        deed: Deed {
            body: Body::NotStarted,
            values: false,
            granted: false,
            recorded: false,
            released: false,
            abandoned: false,
            promised_until: 0,
        },
    };

    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_) | Phase::Dead)
    }

    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Over(_) | Phase::Dead)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Phase {
    /// Not delivered yet.
    Idle,
    /// Asking for the key. `landed`: an unanswered try may have taken effect.
    Reserving { tries: u8, landed: bool, what: Reserving, line: Line },
    /// The reservation was answered after its lease: it is renewed, since `at`, before the body may start.
    Confirming { at: u8, line: Line },
    /// The record is to say, since `at`, that the body begins.
    Marking { tries: u8, at: u8, line: Line },
    /// Its mark was refused: it releases its reservation, and asks as another.
    GivingBack { line: Line },
    /// Waiting for another attempt to end.
    Waiting { attempt: u8, until: u8, woken: bool },
    /// The body is being polled, and may block there; or it waits to be polled.
    Body { polled: bool },
    /// The body has ended early, and its values are being dropped. Then the end is written; the caller was told `told`.
    Dropping { ending: Ending, told: Class },
    /// The last write. `late` is what the caller was told, if no caller waits for the write any more.
    Ending { ending: Ending, late: Option<Class>, line: Line },
    /// Nothing is left to do.
    Over(Class),
    /// The process died.
    Dead,
}

/// The progress of a request whose sender waits for the answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Line {
    /// The request is under way.
    Sent,
    /// The store has executed it, and the answer is under way.
    Answered(Answer),
    /// The connection broke before the answer came.
    Cut,
}

/// One request of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Reserving {
    /// The record that it replaces.
    pub(crate) over: Option<Met>,
    /// When it was sent, if the clocks of the senders count; 0 otherwise.
    pub(crate) at: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Beat {
    None,
    Sent { at: u8 },
    Answered { at: u8, done: Done },
}

/// How an attempt ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Ending {
    Finish {
        kept: Kept,
        ok: bool,
    },
    Release(How),
    /// A release in place of an error that the store can't hold; tried again as the completion that it replaces.
    Instead,
    /// The completion without its result, or a release in place of an error, tried beside the whole one.
    Shortened {
        ok: bool,
    },
    /// The same for a result that the store can't hold, tried for the first time.
    LeftOut {
        ok: bool,
    },
    /// For a reservation that may have landed, or may yet: reserves again, and then releases what it holds.
    CleanUp(Reserving),
    /// Releases the key that the clean-up has reserved.
    GiveBack,
    /// Releases the key that an unanswered clean-up may have reserved.
    TryRelease,
}

/// The answer to the caller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Class {
    /// The body's own value.
    Ok,
    /// The body's own error.
    Err,
    /// A recorded value, or a recorded error.
    Replayed,
    InProgress,
    Mismatch,
    Interrupted,
    Exhausted,
    LeaseLost,
    Unrecorded,
    StoreFailed,
    TimedOut,
    /// The body ran without a reservation (`on_store_error = run`).
    Unprotected,
    /// The caller is gone.
    Dropped,
}

/// What a call has done, whether or not it knows. The protocol never reads this; only the properties do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Deed {
    pub(crate) body: Body,
    /// Its body has values.
    pub(crate) values: bool,
    /// The store has granted it an attempt.
    pub(crate) granted: bool,
    /// Its result was recorded.
    pub(crate) recorded: bool,
    /// Its reservation was released.
    pub(crate) released: bool,
    /// Its last write was given up: the store can't do it, or could not be reached for a lease. A shadow gives up
    /// immediately.
    pub(crate) abandoned: bool,
    /// The time until which the store has promised to keep others out.
    pub(crate) promised_until: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Body {
    NotStarted,
    Running,
    Returned {
        ok: bool,
    },
    /// It started and will not return: crashed, cancelled, panicked, or stopped because the lease was lost.
    Gone,
    /// An operator, or the end of the retention, has closed the attempt, whether or not its body had started.
    Forgiven,
}

/// The events of a key since its record was last absent or reopened. The protocol never reads this.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct History {
    /// The owner token of the latest attempt.
    pub(crate) holder: Token,
    /// The number of the latest attempt.
    pub(crate) attempt: u8,
    /// The payload of the key.
    pub(crate) mark: Option<u8>,
    /// The first result that was recorded.
    pub(crate) result: Option<Kept>,
    /// How many bodies started.
    pub(crate) bodies: u8,
    /// Whether the body of the first attempt began, and its lease lapsed before its end was recorded: it is then not
    /// counted.
    pub(crate) spared: bool,
    /// How many decisions of operators were applied.
    pub(crate) decided: u8,
}

impl History {
    pub(crate) const NONE: Self =
        Self { holder: NOBODY, attempt: 0, mark: None, result: None, bodies: 0, spared: false, decided: 0 };
}

/// How many events outside of the protocol may happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Budget {
    /// Store calls that fail: the request or the answer is lost or late, or the store refuses to work.
    pub(crate) faults: u8,
    /// Requests that arrive twice.
    pub(crate) duplicates: u8,
    /// Processes that die.
    pub(crate) crashes: u8,
    /// Futures that are dropped, or bodies that panic.
    pub(crate) cancels: u8,
    /// Heartbeats.
    pub(crate) beats: u8,
    /// Polls of a body that leave it pending.
    pub(crate) polls: u8,
    /// Steps of time.
    pub(crate) ticks: u8,
    /// Ends of retention.
    pub(crate) ends: u8,
    /// Records that an operator looks at, and then lets run again.
    pub(crate) reopens: u8,
    /// Restarts of the store, or breaks of all connections.
    pub(crate) restarts: u8,
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { faults, duplicates, crashes, cancels, beats, polls, ticks, ends, reopens, restarts } = *self;
        let parts = [
            (faults, "failed calls"),
            (duplicates, "doubled requests"),
            (crashes, "crashes"),
            (cancels, "drops"),
            (beats, "beats"),
            (polls, "polls"),
            (ticks, "ticks"),
            (ends, "ends of retention"),
            (reopens, "reopenings"),
            (restarts, "restarts"),
        ];
        let shown: Vec<_> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, name)| format!("{name} {count}")).collect();
        f.write_str(&shown.join(", "))
    }
}
