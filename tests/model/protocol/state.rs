//! What there is at one moment: records, calls, messages under way, and what was promised so far.
//!
//! Everything is small numbers, so that millions of states fit: a call is known by its place in the plan, and that place
//! is its owner token, its payload and its result. [`Slot`] is a [`Record`](idem_runtime::Record) in that form; see
//! `store.rs` for the way there and back.

use idem_runtime::{OnCrash, Release, Write};

use super::properties::Broken;

/// A place in the plan: which call.
pub(crate) type Who = u8;
/// Nobody.
pub(crate) const NOBODY: Who = u8::MAX;
/// An owner token: that of the first attempts of a call is its place in the plan. A call that has released the key, or for which
/// an operator has, needs another one.
pub(crate) type Token = u8;

/// The token of generation `generation` of `who`.
pub(crate) fn token(who: Who, generation: u8) -> Token {
    who + generation * CALLS as Who
}

/// Whose token it is.
pub(crate) fn holder(token: Token) -> Who {
    if token == NOBODY { NOBODY } else { token % CALLS as Who }
}
/// How many calls a configuration may plan.
pub(crate) const CALLS: usize = 4;
/// How many keys it may have.
pub(crate) const KEYS: usize = 2;

/// One state of the model.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    /// True time. Nobody in the model knows it where clocks differ.
    pub(crate) now: u8,
    pub(crate) slots: [Option<Slot>; KEYS],
    pub(crate) calls: [Call; CALLS],
    /// Requests that are under way although nobody waits for an answer any more: late ones, and duplicates. Sorted, so
    /// that their order makes no difference; they arrive in any order, or never.
    pub(crate) net: Vec<Request>,
    /// How much may still go wrong.
    pub(crate) left: Budget,
    pub(crate) history: [History; KEYS],
    pub(crate) broken: Broken,
}

/// A record, and when its lease lapses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Slot {
    pub(crate) owner: Token,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    pub(crate) mark: Option<u8>,
    pub(crate) stand: Stand,
    /// By the clock of the store; where it has none, by the clock of whoever wrote the record.
    pub(crate) lapses_at: u8,
    /// How often its lease was renewed after it had lapsed; where the times are the senders', how often it was renewed.
    pub(crate) revived: u8,
}

impl Slot {
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.stand, Stand::Pending { .. })
    }

    pub(crate) fn result(&self) -> Option<Kept> {
        match self.stand {
            Stand::Completed(kept) | Stand::Failed(kept) => Some(kept),
            _ => None,
        }
    }
}

/// [`State`](idem_runtime::State) in small numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stand {
    Pending { fail: bool },
    Released,
    Interrupted,
    Completed(Kept),
    Failed(Kept),
}

/// The recorded result: whose, and whether it is there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Kept {
    Stored(Who),
    TooLarge(Who),
}

/// What a call asks the store for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Request {
    pub(crate) who: Who,
    pub(crate) token: Token,
    pub(crate) ask: Ask,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Ask {
    /// With the true time it was sent at, where the clocks of the senders count; 0 elsewhere. It makes a record where there
    /// is none, or replaces the one that its sender has met.
    Reserve {
        sent: u8,
        over: Option<Met>,
    },
    /// As above, with the number of the attempt.
    Renew {
        sent: u8,
        attempt: u8,
    },
    /// With the number of the attempt; its starts go into the record where records are written whole.
    Finish {
        kept: Kept,
        ok: bool,
        attempt: u8,
        starts: u8,
    },
    Release(How),
}

/// A record as a reservation met it: what a store compares before it replaces one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Met {
    pub(crate) owner: Token,
    pub(crate) attempt: u8,
    pub(crate) is_pending: bool,
    pub(crate) revived: u8,
}

/// [`Release`], in order.
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

    /// How a body that is dropped ends its attempt.
    pub(crate) fn dropped(on_crash: OnCrash) -> Self {
        if on_crash == OnCrash::Fail { Self::Interrupted } else { Self::Returned }
    }
}

/// What the store answers.
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
    /// The owner of the request has released the key already.
    Released,
    /// The key is free, and its record is to be replaced by a request of its own, or to be looked at again.
    Free(Option<Met>),
    Write(Done),
    /// The result is larger than the store can hold.
    TooLarge,
}

/// [`Write`], with a hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Done {
    Done,
    Refused,
}

impl From<Write> for Done {
    fn from(write: Write) -> Self {
        match write {
            Write::Done => Self::Done,
            Write::Refused => Self::Refused,
        }
    }
}

/// One call of an idempotent function: from its delivery to its result, and to its late write beyond that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Call {
    pub(crate) phase: Phase,
    /// How many owner tokens it has had before this one.
    pub(crate) generation: u8,
    /// When the last confirmed reservation or renewal was asked for.
    pub(crate) asked_at: u8,
    /// When the first reservation was asked for that got no answer: it may have landed, or may yet.
    pub(crate) unanswered: Option<u8>,
    /// When a waiting call gives up; 0 until it has begun to wait.
    pub(crate) give_up_at: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    /// Whether its lease is kept alive.
    pub(crate) registered: bool,
    /// When its body has run for too long; 0 if that is never.
    pub(crate) stop_at: u8,
    /// Since when its end could not be written.
    pub(crate) fails_since: Option<u8>,
    /// Whether a renewal that was asked for since then was confirmed before its last write was sent.
    pub(crate) renewed: bool,
    pub(crate) beat: Beat,
    /// Whether the heartbeat has found the lease lost.
    pub(crate) lost: bool,
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
        deed: Deed {
            body: Body::NotStarted,
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
    /// Asking for the key. `landed` says whether an unanswered try may have taken effect.
    Reserving { tries: u8, landed: bool, what: Reserving, line: Line },
    /// The reservation was answered after its lease: renewing it, since `at`, before the body may start.
    Confirming { at: u8, line: Line },
    /// Waiting for another attempt to end.
    Waiting { attempt: u8, until: u8, woken: bool },
    /// The body is being polled, and may block in there; or it waits to be polled.
    Body { polled: bool },
    /// The last write. `late` is what the caller was told already, if nobody waits for the write.
    Ending { ending: Ending, late: Option<Class>, line: Line },
    /// Nothing is left to do.
    Over(Class),
    /// The process died.
    Dead,
}

/// Where a request stands whose sender waits for the answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Line {
    /// The request is under way.
    Sent,
    /// The store has done it, and the answer is under way.
    Answered(Answer),
    /// The connection broke before the answer came.
    Cut,
}

/// One message of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Reserving {
    /// The record that it replaces.
    pub(crate) over: Option<Met>,
    /// When it was sent, where the clocks of the senders count; 0 elsewhere.
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
    /// A release in place of an error that the store can't hold: tried again as the completion it stands for.
    Instead,
    /// The completion without its result, or a release in place of an error, tried beside the whole one.
    Shortened {
        ok: bool,
    },
    /// The same for a result that the store can't hold, tried for the first time.
    LeftOut {
        ok: bool,
    },
    /// Of a reservation of which nobody knows whether it landed, or will: reserves again, to have what is then released.
    CleanUp(Reserving),
    /// Releases what the clean-up has reserved.
    GiveBack,
    /// Releases what a clean-up may have reserved that got no answer.
    TryRelease,
}

/// What the caller gets.
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

/// What a call has done, whether or not it knows. Nothing in the protocol reads this; the properties do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Deed {
    pub(crate) body: Body,
    /// The store has granted it an attempt.
    pub(crate) granted: bool,
    /// Its result was recorded.
    pub(crate) recorded: bool,
    /// Its reservation was released.
    pub(crate) released: bool,
    /// What was left to write was given up: the store can't do it, or could not be reached for a lease.
    pub(crate) abandoned: bool,
    /// Until when the store has promised to let nobody else in.
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
    /// An operator, or the end of the retention, has drawn a line under the attempt, whether or not its body had started.
    Forgiven,
}

/// What has happened to a key since its record was last absent or reopened. Nothing in the protocol reads this.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct History {
    /// The owner token that was granted the latest attempt.
    pub(crate) holder: Token,
    /// The latest attempt that was granted.
    pub(crate) attempt: u8,
    /// The payload the key stands for.
    pub(crate) mark: Option<u8>,
    /// The first result that was recorded.
    pub(crate) result: Option<Kept>,
    /// How many bodies started.
    pub(crate) bodies: u8,
}

impl History {
    pub(crate) const NONE: Self = Self { holder: NOBODY, attempt: 0, mark: None, result: None, bodies: 0 };
}

/// How much may happen that is not the protocol's own doing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Budget {
    /// Calls of the store that fail: the request or the answer is lost or late, or the store refuses to work.
    pub(crate) faults: u8,
    /// Requests that arrive twice.
    pub(crate) duplicates: u8,
    /// Processes that die.
    pub(crate) crashes: u8,
    /// Futures that are dropped, or bodies that panic.
    pub(crate) cancels: u8,
    /// Heartbeats.
    pub(crate) beats: u8,
    /// Polls of a body that end before it does.
    pub(crate) polls: u8,
    /// Steps of time.
    pub(crate) ticks: u8,
    /// Ends of retention.
    pub(crate) ends: u8,
    /// Records that an operator reopens.
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
