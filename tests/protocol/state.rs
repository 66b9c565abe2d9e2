//! A state of the model: records, calls, requests under way, and the promises so far.
//!
//! All values are small numbers, so that millions of states fit in memory. The place of a call in the plan is also its
//! owner token, its payload and its result. [`Slot`] is a [`Record`](idem_runtime::record::Record) in that form;
//! `store.rs` converts in both directions.

use idem_runtime::OnCrash;
use idem_runtime::store::{Release, Verdict};

use super::properties::Broken;

/// Call, by its place in the plan.
pub(crate) type CallId = u8;
/// No call.
pub(crate) const NOBODY: CallId = u8::MAX;
/// Owner token. The token of a call's first attempts is its place in the plan. A call needs another token after it, or
/// an operator, has released its key.
pub(crate) type Token = u8;

/// Token of generation `generation` of `who`.
pub(crate) fn token(who: CallId, generation: u8) -> Token {
    who + generation * CALLS as CallId
}

/// Call that owns `token`.
pub(crate) fn holder(token: Token) -> CallId {
    if token == NOBODY { NOBODY } else { token % CALLS as CallId }
}
/// Largest number of calls in a configuration.
pub(crate) const CALLS: usize = 4;
/// Number of keys in the model.
pub(crate) const KEYS: usize = 2;
/// Largest number of operators that have looked at a record and not yet decided.
pub(crate) const OPERATORS: usize = 2;

/// One state of the model.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    /// True time. If clocks differ, no part of the modelled protocol can read it.
    pub(crate) now: u8,
    pub(crate) slots: [Option<Slot>; KEYS],
    pub(crate) calls: [Call; CALLS],
    /// Requests under way whose answer no call awaits: late ones, and duplicates. Sorted, so that their order makes no
    /// difference; they arrive in any order, or never.
    pub(crate) net: Vec<Request>,
    /// Number of events outside of the protocol that may still happen.
    pub(crate) left: Budget,
    /// Looks of operators that have not decided yet.
    pub(crate) sights: [Option<SeenRecord>; OPERATORS],
    pub(crate) history: [History; KEYS],
    pub(crate) broken: Broken,
}

/// Record as an operator saw it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SeenRecord {
    pub(crate) key: u8,
    pub(crate) operator: u8,
    pub(crate) slot: Slot,
    /// True if the lease was live at the look.
    pub(crate) live: bool,
    /// Number of decisions about the key that had been applied. The protocol never reads this.
    pub(crate) decided: u8,
}

/// Record, and the time at which its lease lapses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Slot {
    pub(crate) owner: Token,
    /// Number of decisions applied since the latest attempt began: each changes the owner token of the record.
    pub(crate) decisions: u8,
    /// Operator who decided last. 0 before a decision, and for the first operator, who gives no name.
    pub(crate) by: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    pub(crate) mark: Option<u8>,
    pub(crate) stand: ModelState,
    /// By the clock of the store; without one, by the clock of the call that wrote the record.
    pub(crate) lapses_at: u8,
    /// Number of renewals after the lease had lapsed. If senders set the times: number of all renewals that extended
    /// the lease.
    pub(crate) revived: u8,
}

impl Slot {
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.stand, ModelState::Pending { .. })
    }

    /// True if the record has the mark that its body has begun.
    pub(crate) fn begun(&self) -> bool {
        matches!(self.stand, ModelState::Pending { begun: true, .. })
    }

    pub(crate) fn result(&self) -> Option<ModelResult> {
        match self.stand {
            ModelState::Completed(kept) | ModelState::Failed(kept) => Some(kept),
            _ => None,
        }
    }
}

/// [`State`](idem_runtime::record::State) in small numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum ModelState {
    Pending { fail: bool, begun: bool },
    Released,
    Interrupted,
    Completed(ModelResult),
    Failed(ModelResult),
}

/// Recorded result: its call, and whether the store holds the bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum ModelResult {
    Stored(CallId),
    TooLarge(CallId),
}

/// Request of a call to the store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Request {
    pub(crate) who: CallId,
    pub(crate) token: Token,
    pub(crate) ask: RequestKind,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum RequestKind {
    /// `sent`: true time of the request if the senders' clocks count, else 0. The request inserts a record if there is
    /// none, or replaces the record `over` that its sender has seen.
    Reserve {
        sent: u8,
        over: Option<Met>,
    },
    /// `sent` as in `Reserve`, and the number of the attempt.
    Renew {
        sent: u8,
        attempt: u8,
    },
    /// Marks that the body begins. `sent` as in `Reserve`, and the number of the attempt.
    Begin {
        sent: u8,
        attempt: u8,
    },
    /// Number of the attempt. Its starts go into the record if records are written whole.
    Finish {
        kept: ModelResult,
        ok: bool,
        attempt: u8,
        starts: u8,
    },
    Release(ReleaseKind),
}

/// Record as a reservation saw it: the parts that a store compares before it replaces one.
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
pub(crate) enum ReleaseKind {
    Returned,
    NotStarted,
    Interrupted,
}

impl ReleaseKind {
    pub(crate) fn release(self) -> Release {
        match self {
            Self::Returned => Release::Returned,
            Self::NotStarted => Release::NotStarted,
            Self::Interrupted => Release::Interrupted,
        }
    }

    /// Release of an attempt whose body was dropped.
    pub(crate) fn dropped(on_crash: OnCrash) -> Self {
        if on_crash == OnCrash::Fail { Self::Interrupted } else { Self::Returned }
    }
}

/// Answer of the store.
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
        kept: ModelResult,
        ok: bool,
    },
    Mismatch,
    Interrupted,
    Exhausted,
    /// The owner of the request has already released the key.
    Released,
    /// The key is free. A second request has to replace its record, or to look again.
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

/// Call of an idempotent function: from its delivery to its result, and on to its late write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Call {
    pub(crate) phase: Phase,
    /// Number of owner tokens that the call has used up.
    pub(crate) generation: u8,
    /// Time at which the last confirmed reservation or renewal was sent.
    pub(crate) asked_at: u8,
    /// Time of the first reservation without an answer: it may have landed, or may yet.
    pub(crate) unanswered: Option<u8>,
    /// Time at which a waiting call gives up; 0 before it waits.
    pub(crate) give_up_at: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    /// True if heartbeats renew the lease.
    pub(crate) registered: bool,
    /// Time at which the body reaches its time-out; 0 for never.
    pub(crate) stop_at: u8,
    /// Time since which the end of the attempt could not be written.
    pub(crate) fails_since: Option<u8>,
    /// True if a renewal sent after `fails_since` was confirmed before the last write was sent.
    pub(crate) renewed: bool,
    pub(crate) beat: Beat,
    /// True if the heartbeat has found the lease lost.
    pub(crate) lost: bool,
    /// True if the store has permanently refused to renew the lease.
    pub(crate) refused: bool,
    /// True if the record may have the mark that the body has begun.
    pub(crate) marked: bool,
    pub(crate) deed: CallFacts,
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
        deed: CallFacts {
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
    /// A reservation is under way. `landed`: an unanswered try may have taken effect.
    Reserving { tries: u8, landed: bool, what: Reserving, line: Line },
    /// The reservation was answered after its lease: a renewal, sent at `at`, must confirm it before the body may
    /// start.
    Confirming { at: u8, line: Line },
    /// The record must get the mark, sent at `at`, that the body begins.
    Marking { tries: u8, at: u8, line: Line },
    /// The mark was refused: the call releases its reservation, and reserves with another owner token.
    GivingBack { line: Line },
    /// Waiting for another attempt to end.
    Waiting { attempt: u8, until: u8, woken: bool },
    /// The body is being polled, and may block there; or it waits for the next poll.
    Body { polled: bool },
    /// The body has ended early, and its values are being dropped. Then the end is written; the caller got `told`.
    Dropping { ending: Ending, told: Class },
    /// The last write. `late` is the answer to the caller, if the caller no longer waits for the write.
    Ending { ending: Ending, late: Option<Class>, line: Line },
    /// The call has no more steps.
    Over(Class),
    /// The process died.
    Dead,
}

/// Progress of a request whose sender awaits the answer.
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
    /// Record that the request replaces.
    pub(crate) over: Option<Met>,
    /// Time of the request if the senders' clocks count; 0 otherwise.
    pub(crate) at: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Beat {
    None,
    Sent { at: u8 },
    Answered { at: u8, done: Done },
}

/// Last write of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Ending {
    Finish {
        kept: ModelResult,
        ok: bool,
    },
    Release(ReleaseKind),
    /// A release in place of an error that the store can't hold; repeated as the completion that it replaces.
    Instead,
    /// The completion without its result, or a release in place of an error, tried in addition to the whole end.
    Shortened {
        ok: bool,
    },
    /// The same for a result that the store can't hold, at its first try.
    LeftOut {
        ok: bool,
    },
    /// Clean-up after a reservation without an answer, whose request may have taken effect, or still may. The clean-up
    /// reserves the key again and then releases the key.
    CleanUp(Reserving),
    /// Releases the key that the clean-up has reserved.
    GiveBack,
    /// Releases the key that an unanswered clean-up may have reserved.
    TryRelease,
}

/// Answer to the caller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Class {
    /// Value of the body.
    Ok,
    /// Error of the body.
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

/// Facts about a call, including those that the call can't observe. The protocol never reads this; only the properties
/// do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct CallFacts {
    pub(crate) body: Body,
    /// The body has values.
    pub(crate) values: bool,
    /// The store has granted an attempt to the call.
    pub(crate) granted: bool,
    /// The result was recorded.
    pub(crate) recorded: bool,
    /// The reservation was released.
    pub(crate) released: bool,
    /// The call has given up its last write: the store can't do the write, or stayed unreachable for the length of a
    /// lease. A shadow gives up immediately.
    pub(crate) abandoned: bool,
    /// Time until which the store has promised to keep other attempts out.
    pub(crate) promised_until: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Body {
    NotStarted,
    Running,
    Returned {
        ok: bool,
    },
    /// The body started and will not return: crashed, cancelled, panicked, or stopped because the lease was lost.
    Gone,
    /// An operator, or the end of the retention, has closed the attempt, whether or not its body had started.
    Forgiven,
}

/// Events of a key since its record was last absent or reopened. The protocol never reads this.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct History {
    /// Owner token of the latest attempt.
    pub(crate) holder: Token,
    /// Number of the latest attempt.
    pub(crate) attempt: u8,
    /// Payload of the key.
    pub(crate) mark: Option<u8>,
    /// First recorded result.
    pub(crate) result: Option<ModelResult>,
    /// Number of bodies that started.
    pub(crate) bodies: u8,
    /// Whether the body of the first attempt began, and its lease lapsed before its end was recorded: it is then not
    /// counted.
    pub(crate) spared: bool,
    /// Number of applied decisions of operators.
    pub(crate) decided: u8,
}

impl History {
    pub(crate) const NONE: Self =
        Self { holder: NOBODY, attempt: 0, mark: None, result: None, bodies: 0, spared: false, decided: 0 };
}

/// Number of events outside of the protocol that may happen.
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
    /// Records that an operator looks at, and then reopens.
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
