//! State of the model: records, calls, requests under way, and facts that only the rules read.
//!
//! All values are small numbers, so that millions of states fit in memory. The index of a call in the plan is
//! also its first owner token and its result. [`Slot`] is a [`Record`](idem_runtime::record::Record) in small
//! numbers; `store.rs` converts in both directions.

use idem_runtime::OnCrash;
use idem_runtime::store::{Release, Verdict};

use super::properties::Broken;

/// Index of a call in the plan.
pub(crate) type CallId = u8;
/// Value of a [`CallId`] or a [`Token`] that means: no call.
pub(crate) const NOBODY: CallId = u8::MAX;
/// Owner token. A call's first token is its index in the plan. The call takes a new token after the call or an operator
/// has released its reservation.
pub(crate) type Token = u8;

/// Returns the owner token number `generation` of the call `who`.
pub(crate) fn token(who: CallId, generation: u8) -> Token {
    who + generation * CALLS as CallId
}

/// Returns the call that owns `token`.
pub(crate) fn holder(token: Token) -> CallId {
    if token == NOBODY { NOBODY } else { token % CALLS as CallId }
}
/// Largest number of calls in a configuration.
pub(crate) const CALLS: usize = 4;
/// Number of keys in the model.
pub(crate) const KEYS: usize = 2;
/// Largest number of steps of a body.
pub(crate) const STEPS: usize = 2;
/// Largest number of entries of a journal: a step whose beginning is journaled leaves two entries in each attempt.
const ENTRIES: usize = 8;
/// The only step with a [`Reaction`](super::config::Reaction) to a doubt: the first step of a body.
pub(crate) const GUARDED: u8 = 0;
/// Largest number of messages that a body pushes.
pub(crate) const MESSAGES: u8 = 2;
/// Largest number of operators that have seen a record and not decided yet.
pub(crate) const OPERATORS: usize = 2;

/// One state of the model.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    /// True time. If the processes' clocks differ, no modelled process can read this time.
    pub(crate) now: u8,
    pub(crate) slots: [Option<Slot>; KEYS],
    pub(crate) calls: [Call; CALLS],
    /// Requests under way whose answer no call awaits: late requests, and duplicates. Such requests arrive in any
    /// order, or never. The list is sorted, because its order has no meaning.
    pub(crate) net: Vec<Request>,
    /// Number of events outside of the protocol that may still happen.
    pub(crate) left: Budget,
    /// Records that operators have seen and not decided about yet.
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
    /// True if the lease was live when the operator saw the record.
    pub(crate) live: bool,
    /// Number of earlier decisions about the key. Only properties read this field.
    pub(crate) decided: u8,
}

/// Record, and the time at which its lease lapses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Slot {
    pub(crate) owner: Token,
    /// Number of decisions since the latest attempt began: each decision changes the owner token of the record.
    pub(crate) decisions: u8,
    /// Number of the operator who decided last. The number is 0 before the first decision, and for operator 0, who
    /// gives no name.
    pub(crate) by: u8,
    /// Number of questions to the reconciler since the last decision.
    pub(crate) asked: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    pub(crate) mark: Option<u8>,
    pub(crate) stand: ModelState,
    /// Time of the lapse by the clock of the store. A store without a clock uses the clock of the call that wrote the
    /// record.
    pub(crate) lapses_at: u8,
    /// Number of renewals after the lapse of the lease. If senders set the times, number of all renewals that extended
    /// the lease.
    pub(crate) revived: u8,
    pub(crate) journal: Journal,
    /// Messages that are not marked as sent.
    pub(crate) mail: Mail,
}

/// Messages of an attempt. The attempt that pushed a message and the place of the message stand for its id and body.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Mail {
    /// Attempt that pushed the messages; 0 if there are none.
    pub(crate) by: u8,
    /// Places of the messages, one bit for each.
    pub(crate) places: u8,
}

impl Mail {
    pub(crate) const NONE: Self = Self { by: 0, places: 0 };

    pub(crate) fn of(by: u8, places: u8) -> Self {
        if places == 0 { Self::NONE } else { Self { by, places } }
    }

    /// Returns the first `count` messages of the attempt `by`.
    pub(crate) fn pushed(by: u8, count: u8) -> Self {
        Self::of(by, (1 << count) - 1)
    }

    pub(crate) fn has(self, place: u8) -> bool {
        self.places & 1 << place != 0
    }
}

/// Finished record as a call saw it before it marks messages in this record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Seen {
    pub(crate) owner: Token,
    pub(crate) decisions: u8,
    pub(crate) attempt: u8,
    /// True if the record was completed, and not failed.
    pub(crate) ok: bool,
}

/// Entry of a journal. The owner token and the attempt stand for the value of the step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Entry {
    pub(crate) step: u8,
    pub(crate) token: Token,
    pub(crate) attempt: u8,
    pub(crate) progress: Progress,
}

/// Progress of a step in an entry. The last entry of a step counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Progress {
    /// The body of the step is about to run. Its effect is in doubt until a later entry.
    Begun = 1,
    /// The body that had begun has had no effect.
    Undone,
    /// The step has ended with a value.
    Ended,
}

impl Entry {
    /// Packs the entry into two bytes, because each state has many journals. Never zero.
    const fn packed(self) -> u16 {
        self.progress as u16 | (self.step as u16) << 2 | (self.token as u16) << 3 | (self.attempt as u16) << 8
    }

    const fn unpacked(packed: u16) -> Option<Self> {
        let progress = match packed & 3 {
            1 => Progress::Begun,
            2 => Progress::Undone,
            3 => Progress::Ended,
            _ => return None,
        };
        let [step, token, attempt] = [packed >> 2 & 1, packed >> 3 & 31, packed >> 8];
        Some(Self { step: step as u8, token: token as u8, attempt: attempt as u8, progress })
    }
}

/// Entries of steps, in the order in which they were made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Journal {
    entries: [u16; ENTRIES],
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = self.entries().map(|it| format!("{:?} {} by {}/{}", it.progress, it.step, it.token, it.attempt));
        f.debug_list().entries(parts).finish()
    }
}

impl Journal {
    pub(crate) const EMPTY: Self = Self { entries: [0; ENTRIES] };

    pub(crate) fn entries(&self) -> impl DoubleEndedIterator<Item = Entry> + '_ {
        self.entries.iter().filter_map(|entry| Entry::unpacked(*entry))
    }

    pub(crate) fn len(&self) -> u8 {
        self.entries().map(|_| 1).sum()
    }

    /// Returns the last entry of `step`.
    pub(crate) fn latest(&self, step: u8) -> Option<Entry> {
        self.entries().rev().find(|entry| entry.step == step)
    }

    /// Returns the last entry of `step` if the step has ended.
    pub(crate) fn ended(&self, step: u8) -> Option<Entry> {
        self.latest(step).filter(|entry| entry.progress == Progress::Ended)
    }

    /// Returns the last entry of `step` if its effect is in doubt.
    pub(crate) fn doubt(&self, step: u8) -> Option<Entry> {
        self.latest(step).filter(|entry| entry.progress == Progress::Begun)
    }

    /// Returns whether this journal has all entries of `other`, and possibly more after them.
    pub(crate) fn continues(&self, other: &Self) -> bool {
        other.entries().zip(self.entries()).all(|(known, entry)| known == entry) && self.len() >= other.len()
    }

    /// Adds `entry`. A journal that is full, which only a mistake can fill, stays as it is.
    pub(crate) fn add(&mut self, entry: Entry) {
        assert!(usize::from(entry.step) < STEPS && entry.token < 32, "{entry:?} does not fit");
        if let Some(free) = self.entries.iter_mut().find(|entry| **entry == 0) {
            *free = entry.packed();
        }
    }

    /// Returns the journal of `entries`.
    pub(crate) fn of(entries: impl IntoIterator<Item = Entry>) -> Self {
        let mut journal = Self::EMPTY;
        entries.into_iter().for_each(|entry| journal.add(entry));
        journal
    }
}

impl Slot {
    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.stand, ModelState::Pending { .. })
    }

    /// True if the record is marked as begun.
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

/// Recorded result: the call whose body returned the result, and whether the store holds the bytes of the result.
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
    /// Inserts a record, or replaces the record `over` that the sender has seen. `sent`: true time of the request if
    /// the senders' clocks set the times, otherwise 0. `asks`: true if the sender has a reconciler that it will ask.
    Reserve {
        sent: u8,
        over: Option<Met>,
        asks: bool,
    },
    /// Renews the lease of the attempt with this number. [`Reserve`](Self::Reserve) explains `sent`.
    Renew {
        sent: u8,
        attempt: u8,
    },
    /// Marks the record as begun, for the attempt with this number. [`Reserve`](Self::Reserve) explains `sent`.
    Begin {
        sent: u8,
        attempt: u8,
    },
    /// Puts `journal` into the record, for the attempt with this number, and renews its lease.
    /// [`Reserve`](Self::Reserve) explains `sent`.
    Append {
        sent: u8,
        attempt: u8,
        journal: Journal,
    },
    /// Writes the result of the attempt with this number, and its first `pushed` messages. If stores write whole
    /// records, the write includes `starts`.
    Finish {
        kept: ModelResult,
        ok: bool,
        attempt: u8,
        starts: u8,
        pushed: u8,
    },
    /// Reads the record.
    Inspect,
    /// Marks the messages of the record `seen` as sent, except for those in `left`.
    Mark {
        seen: Seen,
        left: Mail,
    },
    Release(ReleaseKind),
}

/// Fields of a record that a store compares before a reservation replaces the record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Met {
    pub(crate) owner: Token,
    pub(crate) decisions: u8,
    pub(crate) attempt: u8,
    pub(crate) is_pending: bool,
    pub(crate) begun: bool,
    pub(crate) revived: u8,
    /// Number of entries of the journal.
    pub(crate) entries: u8,
}

/// [`Release`] with an order on its values, because the checker compares states.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum ReleaseKind {
    Returned,
    NotStarted,
    Interrupted,
    Unresolved,
}

impl ReleaseKind {
    pub(crate) fn release(self) -> Release {
        match self {
            Self::Returned => Release::Returned,
            Self::NotStarted => Release::NotStarted,
            Self::Interrupted => Release::Interrupted,
            Self::Unresolved => Release::Unresolved,
        }
    }

    /// Release of a reservation whose call ends before its body begins. An effect in doubt stays in doubt.
    pub(crate) fn unused(in_doubt: bool) -> Self {
        if in_doubt { Self::Unresolved } else { Self::NotStarted }
    }

    /// Release of an attempt whose body was dropped.
    pub(crate) fn dropped(on_crash: OnCrash) -> Self {
        if on_crash == OnCrash::Fail { Self::Interrupted } else { Self::Returned }
    }
}

/// Answer of the store to a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Answer {
    Reserved {
        attempt: u8,
        starts: u8,
        takeover: bool,
        in_doubt: bool,
        journal: Journal,
    },
    Pending {
        attempt: u8,
        lapses_in: u8,
    },
    /// The attempt with this number has finished. `unsent`: messages of the record are not marked as sent.
    Finished {
        kept: ModelResult,
        ok: bool,
        attempt: u8,
        unsent: bool,
    },
    /// Record that a request has read, and its messages.
    Found(Option<(Seen, Mail)>),
    Mismatch,
    Interrupted,
    Exhausted,
    /// The owner of this reservation has already released the key.
    Released,
    /// The key is free. The caller must replace this record by a second request.
    Free(Option<Met>),
    Write(Done),
    /// The store can't hold a result of this size.
    TooLarge,
}

/// [`Verdict`] with a hash, because the checker hashes states.
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

/// Call of an idempotent function, from its delivery to its result and its late write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Call {
    pub(crate) phase: Phase,
    /// Number of owner tokens that the call no longer uses.
    pub(crate) generation: u8,
    /// Time at which the last confirmed reservation or renewal was sent.
    pub(crate) asked_at: u8,
    /// Time of the first reservation without an answer. It may have taken effect, or may still take effect.
    pub(crate) unanswered: Option<u8>,
    /// Time at which a waiting call gives up; 0 before it waits.
    pub(crate) give_up_at: u8,
    pub(crate) attempt: u8,
    pub(crate) starts: u8,
    /// True if heartbeats renew the lease.
    pub(crate) registered: bool,
    /// Time of the body's time-out; 0 for never.
    pub(crate) stop_at: u8,
    /// Time of the first failed write of the attempt's end; `None` if no write has failed.
    pub(crate) fails_since: Option<u8>,
    /// Number of writes of the attempt's end that failed, each after another renewal; two at most.
    pub(crate) refusals: u8,
    /// Time of the renewal before the last such write; `fails_since` if there is none.
    pub(crate) counted: u8,
    /// Time of the latest renewal that was confirmed before the write under way was sent; 0 before a write has failed.
    pub(crate) renewed_at: u8,
    pub(crate) beat: Beat,
    /// True if the heartbeat has found the lease lost.
    pub(crate) lost: bool,
    /// True if the store has permanently refused to renew the lease.
    pub(crate) refused: bool,
    /// True once the call has requested a mark: from then on the record may be marked as begun.
    pub(crate) marked: bool,
    /// True if the effect of an earlier attempt is in doubt, and the call has not settled the doubt.
    pub(crate) in_doubt: bool,
    pub(crate) steps: StepsOfCall,
    /// Number of messages that the body has pushed.
    pub(crate) pushed: u8,
    pub(crate) deed: CallFacts,
}

/// Steps of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct StepsOfCall {
    /// Journal that the next write brings to the store: the journal of the reservation, and the entries of the steps
    /// that this attempt has run.
    pub(crate) journal: Journal,
    /// Number of entries that the store has confirmed.
    pub(crate) confirmed: u8,
    /// Next step of the body.
    pub(crate) next: u8,
    /// Time of the first append of the present try; `None` if no append is under way.
    pub(crate) since: Option<u8>,
    pub(crate) append: Append,
    pub(crate) stage: Stage,
    /// True if an error of the body must not end the operation: a step has no value, or is in doubt.
    pub(crate) failed: bool,
    /// True if an operator has to decide about a step in doubt.
    pub(crate) interrupts: bool,
}

impl StepsOfCall {
    pub(crate) const NONE: Self = Self {
        journal: Journal::EMPTY,
        confirmed: 0,
        next: 0,
        since: None,
        append: Append::None,
        stage: Stage::None,
        failed: false,
        interrupts: false,
    };
}

/// Stage of a step whose beginning is journaled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stage {
    None,
    /// The beginning of the body is being journaled. `again`: the reconciler has found no effect of an earlier body.
    Begins {
        again: bool,
    },
    /// The body of the step runs.
    Runs,
    /// The reconciler of the step runs.
    Asks,
}

/// End of the body of a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum StepEnd {
    Value,
    /// An error after which the effect has certainly not happened.
    Error,
    /// An error whose effect is in doubt.
    Doubtful,
}

/// Decision of an operator about the steps of a record.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum StepDecision {
    /// The effect of the step in doubt happened.
    Done,
    /// The effect of the step in doubt did not happen.
    NotDone,
    /// The operation runs again from the first step on.
    FromFirst,
    /// The operation runs again without a journal.
    WithoutSteps,
}

/// State of the append whose answer the body awaits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Append {
    None,
    Sent {
        at: u8,
        journal: Journal,
    },
    Answered {
        at: u8,
        journal: Journal,
        done: Done,
    },
    /// The connection broke before the answer came.
    Cut,
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
        refusals: 0,
        counted: 0,
        renewed_at: 0,
        beat: Beat::None,
        lost: false,
        refused: false,
        marked: false,
        in_doubt: false,
        steps: StepsOfCall::NONE,
        pushed: 0,
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
    /// The message of the call is not delivered yet.
    Idle,
    /// A reservation is under way. `landed`: an earlier try without an answer may have taken effect.
    Reserving { tries: u8, landed: bool, what: Reserving, line: Line },
    /// The reservation was answered after the lapse of its lease. A renewal, sent at `at`, must confirm the lease
    /// before the body may start. Answers that come after the lease count as tries.
    Confirming { tries: u8, at: u8, line: Line },
    /// The record is being marked as begun. The request was sent at `at`.
    Marking { tries: u8, at: u8, line: Line },
    /// The mark was refused. The call releases its reservation, and then reserves with another owner token.
    GivingBack { line: Line },
    /// The call waits for another attempt to end.
    Waiting { attempt: u8, until: u8, woken: bool },
    /// The reconciler runs, before the body may run.
    Asking,
    /// The body is being polled, and may block in this poll; or the body waits for its next poll.
    Body { polled: bool },
    /// The body was ended before it returned, and its values are being dropped. Then `ending` is written, and the
    /// caller gets `told`.
    Dropping { ending: Ending, told: Class },
    /// The end of the attempt is being written. `late`: answer that the caller got, if the caller no longer waits.
    Ending { ending: Ending, late: Option<Class>, line: Line },
    /// The call reads the record of attempt `attempt`, which has finished, and whose messages are not all sent.
    Inspecting { attempt: u8, line: Line },
    /// The call sends messages.
    Sending { post: Post },
    /// The call marks the messages that it has sent.
    MarkingSent { post: Post, line: Line },
    /// The call has no more steps.
    Over(Class),
    /// The process died.
    Dead,
}

/// State of a request whose sender awaits the answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Line {
    /// The request is under way.
    Sent,
    /// The store has executed the request, and the answer is under way.
    Answered(Answer),
    /// The connection broke before the answer came.
    Cut,
}

/// Messages on their way to the broker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Post {
    pub(crate) seen: Seen,
    pub(crate) mail: Mail,
    /// Places of the messages that the broker has confirmed.
    pub(crate) sent: u8,
    /// Destinations for which no further message is sent, one bit for each.
    pub(crate) blocked: u8,
    /// Place of the message that is sent now.
    pub(crate) next: u8,
    /// True if the body of this call pushed the messages.
    pub(crate) ran: bool,
}

impl Post {
    pub(crate) fn new(seen: Seen, mail: Mail, ran: bool) -> Self {
        Self { seen, mail, sent: 0, blocked: 0, next: 0, ran }
    }

    /// Messages that the broker has not confirmed.
    pub(crate) fn left(self) -> Mail {
        Mail::of(self.mail.by, self.mail.places & !self.sent)
    }
}

/// One request of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Reserving {
    /// Record that the request replaces; `None` to insert one.
    pub(crate) over: Option<Met>,
    /// True time of the request if the senders' clocks set the times; 0 otherwise.
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
    /// Release in place of an error that is too large for the store. The call retries the release for as long as it
    /// would retry a completion.
    Instead,
    /// Completion without its result, or release in place of an error. The call tries this shorter write by turns with
    /// the complete write.
    Shortened {
        ok: bool,
    },
    /// First try of a completion without its result, after the store refused the result because it is too large.
    LeftOut {
        ok: bool,
    },
    /// Clean-up after a reservation without an answer: reserves the key again, and then releases the key. The first
    /// reservation may have taken effect, or may still take effect.
    CleanUp(Reserving),
    /// Release of the key that the clean-up has reserved.
    GiveBack,
    /// Release of the key that a clean-up without an answer may have reserved.
    TryRelease,
}

/// Answer to the caller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Class {
    /// The body returned a value.
    Ok,
    /// The body returned an error.
    Err,
    /// The call replayed a recorded value or error.
    Replayed,
    InProgress,
    Mismatch,
    Interrupted,
    /// The reconciler has ended without an answer.
    Unresolved,
    Exhausted,
    LeaseLost,
    Unrecorded,
    StoreFailed,
    /// A message of the finished operation is not sent, or not marked as sent.
    Unsent,
    TimedOut,
    /// The body ran without a reservation (`on_store_error = run`).
    Unprotected,
    /// The caller dropped the call.
    Dropped,
}

/// Facts about a call, including facts that the call can't observe. Only properties read these facts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct CallFacts {
    pub(crate) body: Body,
    /// True if values of the body have not been dropped yet.
    pub(crate) values: bool,
    /// True if the store has granted an attempt to the call.
    pub(crate) granted: bool,
    /// True if the result was recorded.
    pub(crate) recorded: bool,
    /// True if the reservation was released.
    pub(crate) released: bool,
    /// True if the call has given up its last write: the store can't execute the write, or was unreachable for the
    /// length of a lease. A call in shadow mode gives up immediately.
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
    /// The body returned an error in doubt, and the store has recorded the doubt.
    Doubted,
    /// The body started and will not return: its process died, it was cancelled, it panicked, or its lease was lost.
    Gone,
    /// An operator, or the end of the retention, closed the attempt, whether or not its body had started.
    Forgiven,
}

/// Events of a key since its record was last absent or reopened. Only properties read these events.
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
    /// True if the body of the first attempt began without a mark and the lease of this attempt lapsed, so that the
    /// attempt is not counted.
    pub(crate) spared: bool,
    /// Number of applied decisions of operators.
    pub(crate) decided: u8,
    /// True while an effect is in doubt: a reconciler was asked, or the store has recorded an uncertain error.
    pub(crate) doubt: bool,
    /// First journaled end of each step.
    pub(crate) journaled: [Option<Entry>; STEPS],
    /// Journal of the record after the last step of the model; empty after the end of the operation.
    pub(crate) journal: Journal,
    /// Owner token and attempt of the body of the [`GUARDED`] step whose effect may have happened: the body has begun,
    /// and neither an error that is certain, nor a reconciler, nor an operator has said that nothing happened.
    pub(crate) begun: Option<(Token, u8)>,
    /// Attempts in which the body of a step returned its value, or whose effect a reconciler or an operator has
    /// confirmed: one bit for each attempt.
    pub(crate) vouched: [u16; STEPS],
    pub(crate) mail: MailFacts,
}

/// Messages of the attempts of a key, in bits that [`MailFacts::bit`] explains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct MailFacts {
    /// Messages that were recorded with the result of their attempt.
    pub(crate) recorded: u16,
    /// Messages that have arrived at the broker.
    pub(crate) arrived: u16,
    /// Messages that an operator has dropped, or whose result an operator has discarded.
    pub(crate) discarded: u16,
}

impl MailFacts {
    pub(crate) const NONE: Self = Self { recorded: 0, arrived: 0, discarded: 0 };

    /// Bit of the message that the attempt `by` pushed at this place. No configuration has eight attempts.
    pub(crate) fn bit(by: u8, place: u8) -> u16 {
        1 << (by % 8 * MESSAGES + place)
    }

    /// Bits of the messages of `mail`.
    pub(crate) fn bits(mail: Mail) -> u16 {
        (0..MESSAGES).filter(|place| mail.has(*place)).map(|place| Self::bit(mail.by, place)).sum()
    }

    /// Bits of all messages of an attempt.
    pub(crate) fn of(by: u8) -> u16 {
        Self::bits(Mail::pushed(by, MESSAGES))
    }
}

impl History {
    pub(crate) const NONE: Self = Self {
        holder: NOBODY,
        attempt: 0,
        mark: None,
        result: None,
        bodies: 0,
        spared: false,
        decided: 0,
        doubt: false,
        journaled: [None; STEPS],
        journal: Journal::EMPTY,
        begun: None,
        vouched: [0; STEPS],
        mail: MailFacts::NONE,
    };
}

/// Number of events outside of the protocol that may happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Budget {
    /// Store calls that fail: the request or the answer is lost or late, or the store refuses the request.
    pub(crate) faults: u8,
    /// Requests that arrive twice.
    pub(crate) duplicates: u8,
    /// Processes that die.
    pub(crate) crashes: u8,
    /// Calls that are dropped, or whose bodies panic.
    pub(crate) cancels: u8,
    /// Heartbeats that are sent.
    pub(crate) beats: u8,
    /// Polls of a body that leave it pending.
    pub(crate) polls: u8,
    /// Steps of time.
    pub(crate) ticks: u8,
    /// Records whose retention ends.
    pub(crate) ends: u8,
    /// Records that an operator inspects and then reopens.
    pub(crate) reopens: u8,
    /// Restarts of the store, or losses of all connections.
    pub(crate) restarts: u8,
    /// Messages that the broker does not confirm.
    pub(crate) unconfirmed: u8,
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { faults, duplicates, crashes, cancels, beats, polls, ticks, ends, reopens, restarts, unconfirmed } =
            *self;
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
            (unconfirmed, "unconfirmed messages"),
        ];
        let shown: Vec<_> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, name)| format!("{name} {count}")).collect();
        f.write_str(&shown.join(", "))
    }
}
