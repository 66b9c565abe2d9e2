//! Rules of the protocol, stated in terms of grants, writes and answers, independently of the code that keeps the
//! rules.
//!
//! Every step of the model checks every rule. A broken rule is noted in the state, so that one search checks all rules.

use stateright::Property;

use super::config::{Config, Reaction};
use super::state::{
    Answer, Beat, Body, CALLS, Call, CallId, Class, Done, Entry, GUARDED, Journal, KEYS, Mail, MailFacts, ModelResult,
    ModelState, NOBODY, Phase, Progress, Request, RequestKind, STEPS, SeenRecord, Slot, Stage, StepDecision, World,
    holder, token,
};
use super::steps::{Trouble, is_fail, may_hear};
use super::store;

/// Rules that every state must obey.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub(crate) enum Rule {
    S1,
    S1Belief,
    S1Start,
    S2,
    S3,
    S4,
    S5,
    S6,
    S7,
    S7Retry,
    S8,
    LateEnd,
    SuccessHeld,
    Fingerprint,
    MaxAttempts,
    KeysApart,
    L1,
    L2,
    L3,
    L3Outage,
    L4,
    L6,
    L7,
    S11,
    S15,
    S12,
    S14,
    S17,
    S18,
    Told,
    EndsInTime,
    StepOwn,
    StepKept,
    StepTwice,
    StepOnce,
    StepReturned,
    StepBegun,
    StepFail,
    StepReconcile,
    StepUndone,
    StepVouched,
    StepOpen,
    StepDecision,
    MessageRecorded,
    MessageOnce,
    MessageOrder,
    MessageSent,
    MessageMarked,
    MarkKept,
}

impl Rule {
    pub(crate) const ALL: [Self; 49] = [
        Self::S1,
        Self::S1Belief,
        Self::S1Start,
        Self::S2,
        Self::S3,
        Self::S4,
        Self::S5,
        Self::S6,
        Self::S7,
        Self::S7Retry,
        Self::S8,
        Self::LateEnd,
        Self::SuccessHeld,
        Self::Fingerprint,
        Self::MaxAttempts,
        Self::KeysApart,
        Self::L1,
        Self::L2,
        Self::L3,
        Self::L3Outage,
        Self::L4,
        Self::L6,
        Self::L7,
        Self::S11,
        Self::S15,
        Self::S12,
        Self::S14,
        Self::S17,
        Self::S18,
        Self::Told,
        Self::EndsInTime,
        Self::StepOwn,
        Self::StepKept,
        Self::StepTwice,
        Self::StepOnce,
        Self::StepReturned,
        Self::StepBegun,
        Self::StepFail,
        Self::StepReconcile,
        Self::StepUndone,
        Self::StepVouched,
        Self::StepOpen,
        Self::StepDecision,
        Self::MessageRecorded,
        Self::MessageOnce,
        Self::MessageOrder,
        Self::MessageSent,
        Self::MessageMarked,
        Self::MarkKept,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::S1 => "S1 at most one attempt holds a live lease",
            Self::S1Belief => "S1 no call counts on a lease for longer than the store does",
            Self::S1Start => "S1 no body starts without a lease that its call counts on",
            Self::S2 => "S2 only its own attempt changes a pending record, and a former owner is refused",
            Self::S3 => "S3 a finished record never changes, and every replay is the same",
            Self::S4 => "S4 attempt numbers strictly increase",
            Self::S5 => "S5 under on_crash = fail no body begins after a body that did not return",
            Self::S6 => "S6 no body starts under a reservation that the store never made",
            Self::S7 => "S7 a caller gets Ok only after the result is recorded",
            Self::S7Retry => "S7 recording is repeated for one lease while the lease can be held",
            Self::S8 => "S8 a repeated request is recognised and changes nothing",
            Self::LateEnd => "a lapsed attempt may still end if no other attempt took over",
            Self::SuccessHeld => "a success that could not be recorded is never released",
            Self::Fingerprint => "a request with another payload gets a mismatch in every state",
            Self::MaxAttempts => {
                "max_attempts limits the bodies of a key, except for one body after a first attempt that lapsed"
            }
            Self::KeysApart => "a request for one key never changes the record of another key",
            Self::L1 => "L1 a lapsed lease blocks no call",
            Self::L2 => "L2 once no request is under way, no attempt that ended in order holds its key",
            Self::L3 => "L3 a duplicate that waits for an ended attempt is woken",
            Self::L3Outage => "L3 a temporary failure of the store ends no wait",
            Self::L6 => "L6 no lease lapses because a renewal was not sent or its answer not processed",
            Self::L7 => "L7 no lease is renewed for a body that has run for too long",
            Self::S11 => "S11 no body is polled beyond its lease",
            Self::S15 => "S15 a decision is applied only to the record that its operator saw",
            Self::S17 => "S17 the values of a body are dropped before its key is freed",
            Self::S18 => {
                "S18 no body begins while the effect of an earlier one is in doubt, and none beside a reconciler"
            }
            Self::Told => "no call whose result is recorded gets LeaseLost",
            Self::EndsInTime => "the end of an attempt is written within one lease, or given up",
            Self::StepOwn => {
                "only the attempt that holds the record journals a step, and nothing is journaled after its end"
            }
            Self::StepKept => "an entry of the journal stays in the record until the operation has finished",
            Self::StepTwice => "no two attempts journal the same step",
            Self::StepOnce => "no later attempt runs a step that is journaled",
            Self::StepReturned => "a step returns its value only after its entry is in the record",
            Self::StepBegun => {
                "the body of a step under fail or reconcile begins only after its beginning is in the record"
            }
            Self::StepFail => "no body of a step under fail begins while the effect of an earlier one is in doubt",
            Self::StepReconcile => {
                "no body of a step with a reconciler begins while the effect of an earlier one is in doubt"
            }
            Self::StepUndone => {
                "a step is journaled as undone only if its body has not begun, returned a certain error, or an operator said so"
            }
            Self::StepVouched => {
                "a step is journaled as ended only if its body returned its value, or its reconciler or an operator said so"
            }
            Self::StepOpen => "no error is recorded as the end of an operation while a step is in doubt",
            Self::StepDecision => {
                "a decision about a step is applied only to the journal that its operator saw, and not while an attempt runs"
            }
            Self::MessageRecorded => "a message is sent only after the result of its attempt is recorded",
            Self::MessageOnce => {
                "the messages of one attempt only are sent, unless an operator has discarded its result"
            }
            Self::MessageOrder => "the first sends of a destination are in the order in which its messages were pushed",
            Self::MessageSent => "no call is acknowledged while a message of its finished operation was never sent",
            Self::MessageMarked => "a message that is marked as sent was sent",
            Self::MarkKept => "a message that is marked as sent stays marked",
            Self::S12 => "S12 a call that is dropped leaves its key free, and interrupted only if its body has started",
            Self::S14 => "S14 no key is interrupted and no attempt counted for a body that did not begin",
            Self::L4 => "L4 a body whose lease was found lost does not run on",
        }
    }

    fn property(self) -> Property<Config> {
        /// Makes one function for each rule, because a property is a function pointer and can't capture a rule.
        macro_rules! kept {
            ($($rule:ident)*) => {
                match self {
                    $(Self::$rule => |_, world| !world.broken.has(Self::$rule),)*
                }
            };
        }
        let condition: fn(&Config, &World) -> bool = kept!(S1 S1Belief S1Start S2 S3 S4 S5 S6 S7 S7Retry S8 LateEnd SuccessHeld
            Fingerprint MaxAttempts KeysApart L1 L2 L3 L3Outage L4 L6 L7 S11 S15 S12 S14 S17 S18 Told EndsInTime
            StepOwn StepKept StepTwice StepOnce StepReturned StepBegun StepFail StepReconcile StepUndone StepVouched
            StepOpen StepDecision MessageRecorded MessageOnce MessageOrder MessageSent MessageMarked MarkKept);
        Property::always(self.name(), condition)
    }
}

/// Every call ends. The model has no cycle (`no_configuration_has_a_cycle`), so every path leads to a state without
/// further steps, and a call that has ended stays ended. Therefore the checker may treat two paths to one state as
/// the same path.
pub(crate) const ENDS: &str = "every call ends";

/// Set of the rules that were broken on the way to a state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Broken(u64);

impl Broken {
    pub(crate) fn has(self, rule: Rule) -> bool {
        self.0 & (1 << rule as u32) != 0
    }

    fn note(&mut self, rule: Rule, broken: bool) {
        self.0 |= u64::from(broken) << rule as u32;
    }
}

impl std::fmt::Debug for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(Rule::ALL.into_iter().filter(|rule| self.has(*rule))).finish()
    }
}

/// Event that must occur in some history of a configuration. If the event never occurred, the rules about it would
/// hold trivially.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scene {
    Replay,
    Takeover,
    LeaseLost,
    Unrecorded,
    LateCompletion,
    Waits,
    Interrupted,
    Exhausted,
    Mismatch,
    InProgress,
    StoreFailed,
    Unprotected,
    TooLarge,
    ErrorRecorded,
    BelievesAfterRenewal,
    TimedOut,
    PolledAgain,
    Shortened,
    Reconciled,
    BodyAfterDoubt,
    Unresolved,
    StepContinued,
    StepInterrupts,
    StepReconciled,
    StepAgain,
    StepDecided,
    Unsent,
    SendsForAnother,
    ReplacedUnsent,
}

impl Scene {
    fn property(self) -> Property<Config> {
        fn told(world: &World, told: Class) -> bool {
            world.calls.iter().any(|call| call.phase == Phase::Over(told))
        }
        fn any(world: &World, is: impl Fn(&Slot) -> bool) -> bool {
            world.slots.iter().flatten().any(is)
        }
        // Each event has a name, and a condition that shows the event in a state.
        let (name, condition): (_, fn(&Config, &World) -> bool) = match self {
            Self::Replay => ("a result is replayed", |_, world| told(world, Class::Replayed)),
            Self::Takeover => ("a body runs after a crash", |config, world| {
                (0..config.count()).any(|who| {
                    let crashed = |other: CallId| {
                        let call = world.call(other);
                        call.phase == Phase::Dead && call.deed.body == Body::Gone
                    };
                    matches!(world.call(who).phase, Phase::Body { .. }) && (0..config.count()).any(crashed)
                })
            }),
            Self::LeaseLost => ("an attempt learns that it lost its lease", |_, world| told(world, Class::LeaseLost)),
            Self::Unrecorded => ("a result can't be recorded", |_, world| told(world, Class::Unrecorded)),
            Self::LateCompletion => ("an attempt completes after its lease lapsed", |config, world| {
                (0..config.count()).any(|who| {
                    let call = world.call(who);
                    let asked = matches!(call.phase, Phase::Ending { late: None, .. });
                    asked && call.deed.recorded && call.asked_at == 0
                })
            }),
            Self::Waits => ("a waiting duplicate is woken and replays", |config, world| {
                let waits = |call: &Call| matches!(call.phase, Phase::Waiting { woken: true, .. });
                config.plans.iter().any(|plan| plan.wait.is_some()) && world.calls.iter().any(waits)
            }),
            Self::Interrupted => ("an interrupted operation is refused", |_, world| told(world, Class::Interrupted)),
            Self::Exhausted => ("attempts are exhausted", |_, world| told(world, Class::Exhausted)),
            Self::Mismatch => ("another payload is refused", |_, world| told(world, Class::Mismatch)),
            Self::InProgress => ("a duplicate is refused", |_, world| told(world, Class::InProgress)),
            Self::StoreFailed => ("a store failure is told", |_, world| told(world, Class::StoreFailed)),
            Self::Unprotected => ("a body runs unprotected", |_, world| told(world, Class::Unprotected)),
            Self::TooLarge => ("a completion is recorded without its result", |_, world| {
                any(world, |slot| matches!(slot.stand, ModelState::Completed(ModelResult::TooLarge(_))))
            }),
            Self::ErrorRecorded => {
                ("an error is recorded", |_, world| any(world, |slot| matches!(slot.stand, ModelState::Failed(_))))
            }
            Self::TimedOut => ("a body runs for too long", |_, world| told(world, Class::TimedOut)),
            Self::PolledAgain => {
                ("a body is polled again after its lease has lapsed and was renewed", |config, world| {
                    let renewed = |who| world.believed(config, who) > 0 && world.call(who).asked_at >= config.span();
                    (0..config.count()).any(|who| {
                        let call = world.call(who);
                        call.phase == Phase::Body { polled: true }
                            && renewed(who)
                            && world.left.polls < config.budget.polls
                    })
                })
            }
            Self::Reconciled => ("a call returns the answer of its reconciler", |_, world| {
                world.calls.iter().any(|call| {
                    call.phase == Phase::Over(Class::Ok) && call.deed.recorded && call.deed.body == Body::NotStarted
                })
            }),
            Self::BodyAfterDoubt => ("a body runs after a reconciler has found nothing", |_, world| {
                let settled = world.calls.iter().any(|call| call.deed.body == Body::Forgiven);
                settled && world.calls.iter().any(|call| matches!(call.phase, Phase::Body { .. }))
            }),
            Self::Unresolved => ("a reconciler does not know", |_, world| told(world, Class::Unresolved)),
            Self::StepContinued => ("an attempt continues after the steps of an earlier attempt", |config, world| {
                (0..config.count()).any(|who| {
                    let call = world.call(who);
                    let earlier = call.steps.journal.ended(0).is_some_and(|entry| holder(entry.token) != who);
                    earlier && call.steps.next > 0 && matches!(call.phase, Phase::Body { .. })
                })
            }),
            Self::StepInterrupts => ("a step in doubt interrupts its operation", |_, world| {
                any(world, |slot| slot.stand == ModelState::Interrupted && slot.journal.doubt(GUARDED).is_some())
            }),
            Self::StepReconciled => ("a step gets its value from its reconciler", |_, world| {
                any(world, |slot| {
                    let begun = slot.journal.entries().find(|entry| entry.progress == Progress::Begun);
                    let ended = slot.journal.ended(GUARDED);
                    begun.zip(ended).is_some_and(|(begun, ended)| begun.attempt != ended.attempt)
                        && slot.journal.len() == 2
                })
            }),
            Self::StepAgain => ("a body of a step runs after an earlier one had no effect", |config, world| {
                (0..config.count()).any(|who| {
                    let call = world.call(who);
                    let begun = |entry: &Entry| entry.progress == Progress::Begun && holder(entry.token) != who;
                    call.steps.stage == Stage::Runs && call.steps.journal.entries().any(|entry| begun(&entry))
                })
            }),
            Self::StepDecided => ("an attempt gets the value of a step from an operator", |config, world| {
                (0..config.count()).any(|who| {
                    let call = world.call(who);
                    let [first, last] = [call.steps.journal.entries().next(), call.steps.journal.ended(GUARDED)];
                    let resolved = |(first, last): (Entry, Entry)| Entry { progress: Progress::Ended, ..first } == last;
                    let earlier = |(first, _): &(Entry, Entry)| holder(first.token) != who;
                    let by_operator = first.zip(last).filter(earlier).is_some_and(resolved);
                    by_operator && config.step_decisions && world.left.reopens < config.budget.reopens
                })
            }),
            Self::Unsent => ("a call reports messages that are not sent", |_, world| told(world, Class::Unsent)),
            Self::SendsForAnother => ("a call sends the messages of another call", |_, world| {
                world.calls.iter().any(|call| matches!(call.phase, Phase::Sending { post } if !post.ran))
            }),
            Self::ReplacedUnsent => ("a replaced record has messages that are not sent", |_, world| {
                any(world, |slot| slot.result() == Some(store::REPLACED) && slot.mail != Mail::NONE)
            }),
            Self::Shortened => {
                ("a completion is recorded without a result that the store could hold", |config, world| {
                    any(world, |slot| match slot.stand {
                        ModelState::Completed(ModelResult::TooLarge(who)) => !config.plans[usize::from(who)].too_large,
                        _ => false,
                    })
                })
            }
            Self::BelievesAfterRenewal => ("a renewal prolongs a lease", |config, world| {
                let renewed = |who| world.believed(config, who) > 0 && world.call(who).asked_at > 0;
                world.now >= config.span()
                    && (0..config.count()).any(|who| world.holds_in_body_or_end(who) && renewed(who))
            }),
        };
        Property::sometimes(name, condition)
    }
}

/// All properties of a configuration.
pub(crate) fn all(config: &Config) -> Vec<Property<Config>> {
    let ends = Property::eventually(ENDS, |config: &Config, world: &World| {
        (0..config.count()).all(|who| world.call(who).is_over())
    });
    let rules = Rule::ALL.into_iter().map(Rule::property);
    let scenes = config.scenes.iter().map(|scene| scene.property());
    rules.chain([ends]).chain(scenes).collect()
}

/// Checks the store's answer to a request, and the change of the record.
pub(crate) fn audit(
    config: &Config,
    world: &mut World,
    before: &[Option<Slot>; KEYS],
    request: Request,
    answer: Answer,
) {
    let Request { who, token, ask } = request;
    let plan = &config.plans[usize::from(who)];
    let key = usize::from(plan.key);
    let (old, new) = (before[key], world.slots[key]);
    let others = (0..KEYS).any(|other| other != key && before[other] != world.slots[other]);
    let changed = old != new;
    let past = world.history[key];
    let deed = world.call(who).deed;
    let was_finished = old.is_some_and(|old| old.result().is_some());
    let was_pending = old.is_some_and(|old| old.is_pending());
    // A late copy of the call's reservation may have started a later attempt for the call without its knowledge. So the
    // rules use the attempt number that the request names.
    let named = match ask {
        RequestKind::Begin { attempt, .. }
        | RequestKind::Renew { attempt, .. }
        | RequestKind::Append { attempt, .. }
        | RequestKind::Finish { attempt, .. } => attempt,
        RequestKind::Mark { .. } | RequestKind::Inspect => return audit_outbox(world, key, (old, new), others),
        RequestKind::Reserve { .. } | RequestKind::Release(_) => past.attempt,
    };
    let holds = past.holder == token && past.attempt == named;
    let broken = &mut world.broken;
    // The rules `KeysApart` and `S3` hold for every request.
    broken.note(Rule::KeysApart, others);
    broken.note(Rule::S3, was_finished && changed);
    // The rules below depend on the kind of request.
    match ask {
        RequestKind::Reserve { .. } => {
            audit_reservation(config, world, old, request, answer);
            return;
        }
        RequestKind::Mark { .. } | RequestKind::Inspect => unreachable!("see above"),
        RequestKind::Begin { .. } => {
            let done = answer == Answer::Write(Done::Done);
            broken.note(Rule::S2, !was_pending && done);
            // The store must refuse a mark that arrives after the lapse of the lease. This rule does not apply if the
            // senders of requests set the times.
            let late = old.is_some_and(|old| !old.begun() && old.lapses_at <= world.now);
            broken.note(Rule::S14, done && late && config.skew.is_none());
        }
        RequestKind::Renew { .. } => {
            broken.note(Rule::S2, !was_pending && answer == Answer::Write(Done::Done));
        }
        RequestKind::Append { .. } => {
            let journaled = old.map(|old| old.journal) != new.map(|new| new.journal);
            let done = answer == Answer::Write(Done::Done);
            broken.note(Rule::StepOwn, (done || journaled) && (!was_pending || !holds));
        }
        RequestKind::Finish { .. } => {
            let repeated = holds && was_finished && deed.recorded;
            broken.note(Rule::S8, repeated && answer == Answer::Write(Done::Refused));
            let failed = new.is_some_and(|new| matches!(new.stand, ModelState::Failed(_)));
            // The step has ended once its body, its reconciler or an operator has said so, even before its entry.
            let in_doubt = past.begun.is_some_and(|(_, since)| past.vouched[usize::from(GUARDED)] >> since == 0);
            broken.note(Rule::StepOpen, changed && failed && in_doubt);
        }
        RequestKind::Release(_) => {
            let is_released =
                old.is_some_and(|old| matches!(old.stand, ModelState::Released | ModelState::Interrupted));
            let repeated = holds && is_released && deed.released;
            broken.note(Rule::S8, repeated && (answer == Answer::Write(Done::Refused) || changed));
            broken.note(Rule::SuccessHeld, changed && deed.body == Body::Returned { ok: true });
            let freed = new.is_some_and(|new| new.stand == ModelState::Released);
            let in_doubt = plan.doubts && matches!(deed.body, Body::Returned { ok: false } | Body::Doubted);
            broken.note(Rule::S18, changed && freed && in_doubt);
        }
    }
    // The rules below hold for every request that presents an owner token.
    let done = answer == Answer::Write(Done::Done);
    broken.note(Rule::S2, changed && !was_finished && (!was_pending || !holds));
    broken.note(Rule::S2, done && !holds);
    let begins = matches!(ask, RequestKind::Begin { .. });
    broken.note(Rule::LateEnd, was_pending && holds && !begins && answer == Answer::Write(Done::Refused));
    broken.note(Rule::S4, new.is_none_or(|new| new.attempt < past.attempt) && changed);
    if !done || !was_pending || !holds {
        return;
    }
    let ends = matches!(ask, RequestKind::Finish { .. } | RequestKind::Release(_));
    broken.note(Rule::S17, deed.values && ends);
    // The store has applied the write, so its effect is noted for later checks.
    let promised = promise(config, world, who, ask);
    let deed = &mut world.call_mut(who).deed;
    match ask {
        RequestKind::Begin { .. } | RequestKind::Renew { .. } | RequestKind::Append { .. } => {
            deed.promised_until = deed.promised_until.max(promised);
        }
        RequestKind::Finish { kept, attempt, .. } => {
            (deed.promised_until, deed.recorded) = (0, true);
            // Messages count from the return of their body on, whether or not the write has them.
            let returned = deed.body == Body::Returned { ok: true } && !plan.shadow;
            let pushed = if returned { plan.messages } else { 0 };
            world.history[key].result.get_or_insert(kept);
            world.history[key].mail.recorded |= MailFacts::bits(Mail::pushed(attempt, pushed));
        }
        _ => {
            (deed.promised_until, deed.released) = (0, true);
            if plan.doubts && deed.body == (Body::Returned { ok: false }) {
                deed.body = Body::Doubted;
                world.history[key].doubt = true;
            }
        }
    }
}

/// Checks a request that reads a finished record or marks its messages. Such a request changes only messages. Every
/// call may send it.
fn audit_outbox(world: &mut World, key: usize, (old, new): (Option<Slot>, Option<Slot>), others: bool) {
    let without = |slot: Option<Slot>| slot.map(|slot| Slot { mail: Mail::NONE, ..slot });
    let [before, after] = [old, new].map(|slot| slot.map_or(Mail::NONE, |slot| slot.mail)).map(MailFacts::bits);
    let arrived = world.history[key].mail.arrived;
    let broken = &mut world.broken;
    broken.note(Rule::KeysApart, others);
    broken.note(Rule::S3, without(old) != without(new));
    broken.note(Rule::MessageMarked, before & !after & !arrived != 0);
    broken.note(Rule::MarkKept, after & !before != 0);
}

/// Checks a message that arrives at the broker: the attempt that pushed it, and its place.
pub(crate) fn message_arrives(config: &Config, world: &mut World, who: CallId, (by, place): (u8, u8)) {
    let key = usize::from(config.plans[usize::from(who)].key);
    let message = MailFacts::bit(by, place);
    let facts = &mut world.history[key].mail;
    let is_earlier = |other: &u8| config.destination(*other) == config.destination(place);
    let earlier = (0..place).filter(is_earlier).map(|other| MailFacts::bit(by, other));
    let overtakes = earlier.fold(0, |all, bit| all | bit) & !facts.arrived != 0;
    let others = facts.arrived & !facts.discarded & !MailFacts::of(by) != 0;
    let [is_recorded, is_discarded] = [facts.recorded, facts.discarded].map(|messages| messages & message != 0);
    facts.arrived |= message;
    world.broken.note(Rule::MessageRecorded, !is_recorded);
    // After the operator's decision another attempt may send its own messages.
    world.broken.note(Rule::MessageOnce, others && !is_discarded);
    world.broken.note(Rule::MessageOrder, overtakes);
}

/// Checks an operator who replaces the result of the record `met`, which keeps its messages, or drops its messages
/// (`drops`).
pub(crate) fn audit_correction(world: &mut World, met: &Slot, sight: &SeenRecord, drops: bool) {
    let at = usize::from(sight.key);
    let parts = |slot: &Slot| (slot.owner, slot.attempt, slot.stand);
    let is_seen = parts(met) == parts(&sight.slot) && world.history[at].decided == sight.decided;
    world.broken.note(Rule::S15, !is_seen);
    let past = &mut world.history[at];
    past.decided += 1;
    match drops {
        true => past.mail.discarded |= MailFacts::bits(met.mail),
        false => past.result = Some(store::REPLACED),
    }
}

/// Time until which the store promises to keep other attempts out if it executes `ask` now.
fn promise(config: &Config, world: &World, who: CallId, ask: RequestKind) -> u8 {
    let from = match (config.skew, ask) {
        // The promise counts from the time of the request, because the sender counts its lease from that time.
        (
            Some(_),
            RequestKind::Reserve { sent, .. }
            | RequestKind::Begin { sent, .. }
            | RequestKind::Renew { sent, .. }
            | RequestKind::Append { sent, .. },
        ) => sent,
        (Some(_), _) => world.call(who).asked_at,
        (None, _) => world.now,
    };
    from + config.span()
}

fn audit_reservation(config: &Config, world: &mut World, old: Option<Slot>, request: Request, answer: Answer) {
    let Request { who, token, ask } = request;
    let plan = &config.plans[usize::from(who)];
    let key = usize::from(plan.key);
    let new = world.slots[key];
    let past = world.history[key];
    let now = world.now;
    let was = |is: fn(&Slot) -> bool| old.as_ref().is_some_and(is);
    let was_pending = was(Slot::is_pending);
    let repeated = was_pending && past.holder == token;
    let before = holder(past.holder);
    let mut broken = world.broken;

    // A request with another payload gets a mismatch in every state of the record. No other request gets a mismatch.
    let differs = old.is_some() && past.mark.is_some() && plan.mark.is_some() && past.mark != plan.mark;
    broken.note(Rule::Fingerprint, differs != (answer == Answer::Mismatch) || (differs && old != new));
    match answer {
        Answer::Reserved { .. } if repeated => broken.note(Rule::S8, old != new),
        Answer::Reserved { attempt, in_doubt, .. } => {
            broken.note(Rule::S3, was(|old| old.result().is_some()));
            broken.note(Rule::S4, attempt <= past.attempt);
            let promised = |other: CallId| {
                let same_key = config.plans[usize::from(other)].key == plan.key;
                other != who && same_key && world.call(other).deed.promised_until > now
            };
            broken.note(Rule::S1, (0..config.count()).any(promised));
            let dead_under_fail = before != NOBODY && is_fail(&config.plans[usize::from(before)]);
            // If the previous attempt is under `fail` and not marked, its body did not begin, and a
            // takeover is allowed.
            let interrupted = if dead_under_fail { was(Slot::begun) } else { is_fail(plan) };
            // A call with a reconciler gets the key of an operation in doubt, and of no other operation.
            let interrupted = (was_pending && interrupted) || was(|old| old.stand == ModelState::Interrupted);
            broken.note(Rule::S5, interrupted && !in_doubt);
            broken.note(Rule::S18, in_doubt && (!plan.may_ask() || !interrupted));
        }
        Answer::Pending { .. } => {
            broken.note(Rule::S8, repeated);
            // If clocks differ, `slack` is the longest time from the lapse of a lease until every process sees the
            // lapse.
            let slack = config.skew.map_or(0, |skew| config.unit() * (2 * skew + 2));
            let until = world.call(before.min(who)).deed.promised_until;
            let until = if before == NOBODY { 0 } else { world.call(before).deed.promised_until.max(until) };
            let sent = match ask {
                RequestKind::Reserve { sent, .. } if config.skew.is_some() => sent,
                _ => now,
            };
            broken.note(Rule::L1, !was_pending || until + slack <= sent);
        }
        Answer::Exhausted if config.counts_bodies() => {
            // A marked attempt counts before its body begins: the call is about to start the body, or its process died.
            let it = world.call(before.min(CALLS as CallId - 1));
            let open = it.deed.body == Body::NotStarted && (it.is_active() || it.phase == Phase::Dead);
            let begun = past.bodies + u8::from(open && was(Slot::begun));
            broken.note(Rule::S14, plan.max_attempts.is_some_and(|max| begun < max));
        }
        Answer::Finished { kept, .. } => broken.note(Rule::S3, past.result != Some(kept)),
        Answer::Interrupted => {
            // A call that was dropped before its body started must not leave its key interrupted.
            let it = world.call(before.min(CALLS as CallId - 1));
            let started = it.deed.body != Body::NotStarted;
            // A call whose body did not start may leave its key interrupted in two cases: its process died after the
            // mark, or its clean-up is under way.
            let open = it.is_active() || (it.phase == Phase::Dead && was(Slot::begun));
            // Under `retry`, a body may begin without a mark. A caller under `fail` must then get `Interrupted`.
            let unmarked = before == NOBODY || !is_fail(&config.plans[usize::from(before)]);
            // A reconciler without an answer leaves its key interrupted.
            broken.note(Rule::S14, !started && !open && !unmarked && !past.doubt);
            broken.note(Rule::L1, matches!(ask, RequestKind::Reserve { asks: true, .. }));
            let fail = is_fail(plan) || before == NOBODY || is_fail(&config.plans[usize::from(before)]);
            broken.note(Rule::L1, !fail && was(|old| old.stand != ModelState::Interrupted));
        }
        _ => {}
    }
    world.broken = broken;
    // The store has granted the reservation, so the attempt, and the time until which it is protected, are noted for
    // later checks.
    if let Answer::Reserved { attempt, .. } = answer {
        let promised = promise(config, world, who, ask);
        let deed = &mut world.call_mut(who).deed;
        deed.granted = true;
        deed.promised_until = if repeated { deed.promised_until } else { promised };
        let past = &mut world.history[key];
        (past.holder, past.attempt) = (token, attempt);
        past.doubt |= matches!(answer, Answer::Reserved { in_doubt: true, .. });
        let first_lapsed = old.is_some_and(|old| was_pending && old.attempt == 1 && !old.begun());
        past.spared |= first_lapsed && past.bodies > 0;
        past.mark = past.mark.or(plan.mark);
        if !repeated {
            world.call_mut(who).deed.released = false;
        }
    }
}

/// Checks an operator's change of the record `met`.
pub(crate) fn audit_reopen(config: &Config, world: &mut World, met: &Slot, sight: &SeenRecord) {
    let (key, at) = (sight.key, usize::from(sight.key));
    let is_live = met.is_pending() && met.lapses_at > world.now;
    let parts = |slot: &Slot| (slot.owner, slot.attempt, slot.stand);
    let same = parts(met) == parts(&sight.slot) && is_live == sight.live;
    world.broken.note(Rule::S15, !same || world.history[at].decided != sight.decided);
    world.history[at].decided += 1;
    let live = |who: CallId| {
        let call = world.call(who);
        config.plans[usize::from(who)].key == key && call.deed.promised_until > world.now
    };
    let live = met.is_pending() && (0..config.count()).any(live);
    world.broken.note(Rule::S1, live);
    world.broken.note(Rule::S4, world.slots[at].is_none_or(|slot| slot.attempt < world.history[at].attempt));
    let past = &mut world.history[at];
    (past.result, past.bodies, past.spared, past.doubt) = (None, 0, false, false);
    // The steps of a discarded operation may run again.
    if met.result().is_some() {
        past.mail.discarded |= past.mail.recorded & MailFacts::of(met.attempt);
        (past.journaled, past.journal) = ([None; STEPS], Journal::EMPTY);
        (past.begun, past.vouched) = (None, [0; STEPS]);
    }
}

/// Checks an operator's decision about the steps of the record `met`, and notes what the operator has said.
pub(crate) fn audit_step_decision(world: &mut World, met: &Slot, sight: &SeenRecord, decision: StepDecision) {
    let at = usize::from(sight.key);
    let is_live = met.is_pending() && met.lapses_at > world.now;
    world.broken.note(Rule::StepDecision, is_live || met.journal != sight.slot.journal);
    let journal = world.slots[at].map_or(Journal::EMPTY, |slot| slot.journal);
    let past = &mut world.history[at];
    past.journal = journal;
    past.begun = None;
    match decision {
        StepDecision::NotDone => {}
        StepDecision::Done => {
            let doubt = sight.slot.journal.doubt(GUARDED).expect("a step in doubt");
            past.vouched[usize::from(GUARDED)] |= 1 << doubt.attempt;
        }
        StepDecision::FromFirst | StepDecision::WithoutSteps => {
            for (step, journaled) in (0..).zip(&mut past.journaled) {
                *journaled = journal.ended(step);
            }
        }
    }
}

/// Checks the start of a step.
pub(crate) fn step_runs(config: &Config, world: &mut World, who: CallId, step: u8) {
    let key = usize::from(config.plans[usize::from(who)].key);
    let call = world.call(who);
    // The body of an attempt that was stopped may still run a step after a later attempt has journaled the step.
    let earlier = world.history[key].journaled[usize::from(step)].filter(|entry| entry.attempt < call.attempt);
    let is_closed = call.deed.body == Body::Forgiven;
    let (attempt, token) = (call.attempt, token(who, call.generation));
    world.broken.note(Rule::StepOnce, earlier.is_some() && !is_closed);
    let plan = &config.plans[usize::from(who)];
    let past = &mut world.history[key];
    if !plan.guards(step) {
        // The effect of a plain step happens at its start.
        past.vouched[usize::from(step)] |= 1 << attempt;
        return;
    }
    let begun = past.journal.doubt(step).map(|entry| (entry.token, entry.attempt));
    let (is_journaled, in_doubt) = (begun == Some((token, attempt)), past.begun.is_some());
    past.begun = Some((token, attempt));
    world.broken.note(Rule::StepBegun, !is_journaled && !is_closed);
    let rule = if plan.reaction == Reaction::Fail { Rule::StepFail } else { Rule::StepReconcile };
    world.broken.note(rule, in_doubt);
}

/// Notes that the body of the guarded step, or its reconciler, has said that the effect happened.
pub(crate) fn step_vouched(config: &Config, world: &mut World, who: CallId) {
    let (key, attempt) = (usize::from(config.plans[usize::from(who)].key), world.call(who).attempt);
    world.history[key].vouched[usize::from(GUARDED)] |= 1 << attempt;
}

/// Notes that the body of the guarded step has returned an error that is certain.
pub(crate) fn step_undone(config: &Config, world: &mut World, who: CallId) {
    let key = usize::from(config.plans[usize::from(who)].key);
    let own = (token(who, world.call(who).generation), world.call(who).attempt);
    let past = &mut world.history[key];
    past.begun = past.begun.filter(|begun| *begun != own);
}

/// Notes that the reconciler of the guarded step has found no effect of earlier attempts.
pub(crate) fn step_settled(config: &Config, world: &mut World, who: CallId) {
    let (key, own) = (usize::from(config.plans[usize::from(who)].key), world.call(who).attempt);
    let past = &mut world.history[key];
    past.begun = past.begun.filter(|(_, attempt)| *attempt >= own);
}

/// Checks a step that returns the value of `entry` to its body.
pub(crate) fn step_returns(config: &Config, world: &mut World, who: CallId, entry: Entry) {
    let key = usize::from(config.plans[usize::from(who)].key);
    let is_journaled = world.history[key].journaled[usize::from(entry.step)] == Some(entry);
    // An operator, or the end of the retention, may have closed the attempt since the append.
    let is_closed = world.call(who).deed.body == Body::Forgiven;
    world.broken.note(Rule::StepReturned, !is_journaled && !is_closed);
}

/// Checks the journal of a record, and notes its new entries.
fn journal(world: &mut World, key: u8, broken: &mut Broken) {
    let Some(slot) = world.slots[usize::from(key)] else { return };
    let past = &mut world.history[usize::from(key)];
    for entry in slot.journal.entries().filter(|entry| entry.progress == Progress::Ended) {
        let first = past.journaled[usize::from(entry.step)].get_or_insert(entry);
        broken.note(Rule::StepTwice, *first != entry);
        broken.note(Rule::StepVouched, past.vouched[usize::from(entry.step)] & 1 << entry.attempt == 0);
    }
    if slot.result().is_some() {
        past.journal = slot.journal;
        return;
    }
    broken.note(Rule::StepKept, !slot.journal.continues(&past.journal));
    let new = slot.journal.entries().skip(past.journal.len().into());
    let is_in_doubt = |entry: &Entry| past.begun == Some((entry.token, entry.attempt));
    let mut undone = new.filter(|entry| entry.progress == Progress::Undone);
    broken.note(Rule::StepUndone, undone.any(|entry| is_in_doubt(&entry)));
    past.journal = slot.journal;
}

/// Checks a reconciler's answer that no effect has happened or can happen. The earlier bodies of the key need not
/// return.
pub(crate) fn settles(config: &Config, world: &mut World, who: CallId) {
    let key = config.plans[usize::from(who)].key;
    world.broken.note(Rule::S1Start, world.believed(config, who) == 0);
    world.history[usize::from(key)].doubt = false;
    for (other, (plan, call)) in (0..).zip(config.plans.iter().zip(&mut world.calls)) {
        let open = matches!(call.deed.body, Body::Running | Body::Gone | Body::Doubted);
        if other != who && plan.key == key && open {
            call.deed.body = Body::Forgiven;
        }
    }
}

/// Checks a body that `max_attempts` forbids after its reconciler has found nothing.
pub(crate) fn exhausts(config: &Config, world: &mut World, who: CallId) {
    let plan = &config.plans[usize::from(who)];
    let begun = world.history[usize::from(plan.key)].bodies;
    world.broken.note(Rule::S14, plan.max_attempts.is_some_and(|max| begun < max));
}

/// Checks the start of a body.
pub(crate) fn body_starts(config: &Config, world: &mut World, who: CallId) {
    let plan = &config.plans[usize::from(who)];
    let key = usize::from(plan.key);
    let unreturned = |other: CallId| {
        let its = &config.plans[usize::from(other)];
        let open = matches!(world.call(other).deed.body, Body::Running | Body::Gone);
        other != who && its.key == plan.key && is_fail(its) && open
    };
    let followed = (0..config.count()).any(unreturned);
    let doubted = |other: CallId| {
        let its = &config.plans[usize::from(other)];
        let runs = its.asks && world.call(other).phase == Phase::Asking && world.believed(config, other) > 0;
        other != who && its.key == plan.key && (world.call(other).deed.body == Body::Doubted || runs)
    };
    let doubted = (0..config.count()).any(doubted) || (plan.may_ask() && followed);
    // If an operator closed an attempt before its body began, the operator is responsible for the overlap.
    let is_closed = world.call(who).deed.body == Body::Forgiven;
    world.broken.note(Rule::S5, followed && !plan.may_ask() && !is_closed);
    world.broken.note(Rule::S18, doubted && !is_closed);
    world.broken.note(Rule::S6, !world.call(who).deed.granted);
    world.broken.note(Rule::S1Start, world.believed(config, who) == 0);
    world.history[key].bodies += 1;
    let bodies = world.history[key].bodies;
    // A first attempt is not marked, unless it is the only allowed attempt. If its lease lapses, it is therefore
    // not counted.
    let spared = |max| u8::from(max > 1 && world.history[key].spared);
    let exceeds = plan.max_attempts.is_some_and(|max| bodies > max + spared(max));
    world.broken.note(Rule::MaxAttempts, exceeds);
    if !config.counts_bodies() {
        world.history[key].bodies = 0;
    }
}

/// Checks a further poll of a body.
pub(crate) fn polls(config: &Config, world: &mut World, who: CallId) {
    let enforced = !config.plans[usize::from(who)].shadow;
    world.broken.note(Rule::S11, enforced && world.believed(config, who) == 0);
}

/// Checks the rules that hold before each tick of time.
pub(crate) fn passes(config: &Config, world: &mut World) {
    for who in 0..config.count() {
        let call = world.call(who);
        let plan = &config.plans[usize::from(who)];
        let lapses = world.holds_in_body_or_end(who) && world.believed(config, who) == 1;
        // A body needs no renewal after its time-out.
        let is_over = call.stop_at > 0 && call.stop_at <= world.now;
        let held_up = matches!(call.beat, Beat::Answered { .. }) && !may_hear(config, world);
        let tried = !held_up && (call.beat != Beat::None || call.lost || call.registered);
        world.broken.note(Rule::L6, lapses && !tried && !is_over && !plan.shadow);
    }
}

/// Checks that the end of an attempt, whose write has failed since `since`, may still be tried again.
pub(crate) fn tries_again(config: &Config, world: &mut World, since: u8) {
    let limit = since + config.span();
    world.broken.note(Rule::EndsInTime, world.now >= limit);
}

/// Checks the answer that the caller gets.
pub(crate) fn caller_hears(config: &Config, world: &mut World, who: CallId, told: Class) {
    let deed = world.call(who).deed;
    world.broken.note(Rule::Told, told == Class::LeaseLost && deed.recorded);
    let (enforced, key) = (!config.plans[usize::from(who)].shadow, usize::from(config.plans[usize::from(who)].key));
    world.broken.note(Rule::S7, enforced && told == Class::Ok && !deed.recorded);
    let (is_acknowledged, attempt) = (matches!(told, Class::Ok | Class::Replayed), world.call(who).attempt);
    if enforced && is_acknowledged && config.publishes() {
        let MailFacts { recorded, arrived, discarded } = world.history[key].mail;
        let missing = recorded & !arrived & !discarded & MailFacts::of(attempt);
        world.broken.note(Rule::MessageSent, missing != 0);
    }
}

/// Checks a call that gives up the last write of its attempt. The call may give up only after an outage of more than a
/// lease, or after a permanent refusal. `is_late` is true if no caller waits for the write.
pub(crate) fn gives_up(config: &Config, world: &mut World, who: CallId, trouble: Trouble, is_late: bool) {
    let held = world.may_be_held(config, who) > 0;
    let since = world.call(who).fails_since.unwrap_or(world.now);
    let in_time = world.now < since + config.span();
    let too_early = held && in_time && trouble != Trouble::Fatal;
    let rule = match world.call(who).deed.body {
        _ if !is_late => Rule::S7Retry,
        Body::NotStarted | Body::Gone => Rule::S12,
        _ => Rule::L2,
    };
    world.broken.note(rule, too_early);
}

/// Checks a call that stops waiting because the store has failed.
pub(crate) fn ends_wait(world: &mut World, who: CallId, trouble: Trouble) {
    let may_wait = world.call(who).give_up_at > world.now;
    world.broken.note(Rule::L3Outage, may_wait && trouble.is_transient());
}

/// Checks the rules that hold after each step.
pub(crate) fn look(config: &Config, world: &mut World) {
    let mut broken = world.broken;
    let mut quiet = world.net.is_empty();
    // Checks four rules for each call: a body that lost its lease is not polled; no renewal follows a time-out; a
    // waiting call waits for a running attempt; and the store protects each lease on which a call relies.
    for who in 0..config.count() {
        let call = world.call(who);
        let key = usize::from(config.plans[usize::from(who)].key);
        let slot = world.slots[key];
        quiet &= !call.is_active();
        let enforced = !config.plans[usize::from(who)].shadow;
        broken.note(Rule::L4, enforced && call.phase == Phase::Body { polled: false } && call.lost);
        let runs_over = call.stop_at > 0 && matches!(call.phase, Phase::Body { .. });
        broken.note(Rule::L7, runs_over && call.asked_at >= call.stop_at);
        if let Phase::Waiting { attempt, woken: false, .. } = call.phase {
            let runs = slot.is_some_and(|slot| slot.is_pending() && slot.attempt == attempt);
            broken.note(Rule::L3, !runs);
        }
        if world.holds_in_body_or_end(who) && world.believed(config, who) > 0 {
            let mine = slot.is_some_and(|slot| {
                let live = config.skew.is_some() || slot.lapses_at > world.now;
                slot.is_pending() && live && world.history[key].holder == token(who, call.generation)
            });
            let ended = call.deed.recorded || call.deed.released;
            broken.note(Rule::S1Belief, !mine && !ended);
        }
    }
    for key in 0..config.keys {
        journal(world, key, &mut broken);
    }
    if quiet {
        for key in 0..config.keys {
            rests(config, world, key, &mut broken);
        }
    }
    debug_assert!(world.calls.iter().all(|call| call.is_active() || call.beat == Beat::None));
    world.broken = broken;
}

/// Checks a record when no call and no request is under way. Late, lost and reordered messages may have come before.
/// Only a crash, or an outage of more than a lease, may leave a key held, and only until its lease lapses.
fn rests(config: &Config, world: &World, key: u8, broken: &mut Broken) {
    let past = world.history[usize::from(key)];
    let Some(slot) = world.slots[usize::from(key)] else { return };
    let who = holder(slot.owner);
    let (call, plan) = (world.call(who), &config.plans[usize::from(who)]);
    let (is_dead, has_begun) = (call.phase == Phase::Dead, call.deed.body != Body::NotStarted);
    // Whether the body was polled is unknown if its process died after the mark.
    let may_have_begun = has_begun || past.doubt || (is_dead && slot.begun());
    broken.note(Rule::S14, slot.stand == ModelState::Interrupted && !has_begun && !past.doubt);
    if !slot.is_pending() {
        return;
    }
    broken.note(Rule::S14, slot.begun() && !may_have_begun);
    // If the store decides in one step, a late reservation may replace a record that its sender has not seen.
    let follows = config.one_step && config.count() > 1;
    let is_gone = call.phase == Phase::Over(Class::Dropped) || !has_begun;
    let holds = !is_dead && !call.deed.abandoned && !follows;
    broken.note(if is_gone { Rule::S12 } else { Rule::L2 }, holds);
    // The answer that another call with the same policy gets after the lapse of the lease must be allowed.
    match store::after_its_lease(config, slot, who) {
        Answer::Interrupted => {
            broken.note(Rule::S14, !may_have_begun);
            broken.note(Rule::L1, !is_fail(plan));
        }
        Answer::Exhausted if config.counts_bodies() => {
            let begun = past.bodies + u8::from(is_dead && !has_begun && slot.begun());
            broken.note(Rule::S14, plan.max_attempts.is_some_and(|max| begun < max));
        }
        Answer::Exhausted | Answer::Mismatch | Answer::Reserved { .. } | Answer::Free(_) => {}
        _ => broken.note(Rule::L1, true),
    }
}
