//! Answers of the store, computed by the runtime's own functions in the same way as in `stores/memory`.
//!
//! `traces.rs` compares these answers with the memory store's answers.

use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::key::Fingerprint;
use idem_runtime::record::{Admission, Provenance, Record, Ruling, State, StoredResult};
use idem_runtime::store::{
    Action, Decision, Finish, Inspection, Journal as Written, OwnerToken, Reservation, ReserveRequest, UnsentMessages,
    Verdict,
};
use idem_runtime::{Key, OnCrash};
use idem_tests::decided;

use super::config::{Config, Plan};
use super::mutants::Mutant;
use super::state::{
    Answer, CallId, Done, Entry, GUARDED, Journal, MESSAGES, Mail, Met, ModelResult, ModelState, OPERATORS, Progress,
    ReleaseKind, Seen, SeenRecord, Slot, StepDecision, Token, token,
};

/// Real duration of one tick of model time.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// Retention that outlasts every configuration, because the end of a retention is an event of its own.
pub(crate) const TTL: Duration = Duration::from_secs(3600);
/// Names of the operators.
const NAMES: [&str; OPERATORS] = ["", "bob"];
const RESULTS: &[u8] = &[0, 1, 2, 3, 4, 5, 6, 7];
/// Result that an operator supplies.
pub(crate) const REPLACED: ModelResult = ModelResult::Stored(7);
/// Codec name of a result that is stored with messages.
const WITH_MESSAGES: &[u8] = b"idem:outbox";

/// Reservation of a call, as the engine sends it.
pub(crate) fn reserve(token: Token, plan: &Plan, lease: u8) -> ReserveRequest {
    ReserveRequest::new(
        Key::new("model", u32::from(plan.key)).expect("a key"),
        owner(token),
        TICK * u32::from(lease),
        TTL,
    )
    .fingerprint(plan.mark.map(fingerprint))
    .on_crash(plan.on_crash)
    .max_attempts(plan.max_attempts.and_then(|max| NonZeroU32::new(max.into())))
    .max_reconciliations(NonZeroU16::new(99).filter(|_| plan.may_ask()))
}

fn owner(token: Token) -> OwnerToken {
    OwnerToken::from_bytes([token; OwnerToken::BYTES])
}

fn fingerprint(mark: u8) -> Fingerprint {
    let mut bytes = [mark; Fingerprint::BYTES];
    bytes[0] = Fingerprint::VERSION;
    Fingerprint::from_bytes(bytes)
}

pub(crate) fn payload(kept: ModelResult) -> StoredResult {
    match kept {
        ModelResult::Stored(who) => {
            let at = usize::from(who);
            let codec = CodecName::new(b"model").expect("a name");
            StoredResult::Encoded { codec, bytes: Bytes::from_static(&RESULTS[at..=at]) }
        }
        ModelResult::TooLarge(who) => StoredResult::TooLarge { size: who.into() },
    }
}

/// Returns the result `kept` as it is stored with the messages of `mail`, in version 1 of this form. `apart`: each
/// message has its own destination.
pub(crate) fn payload_with(kept: ModelResult, mail: Mail, apart: bool) -> StoredResult {
    if mail == Mail::NONE {
        return payload(kept);
    }
    let (codec, size, result): (&[u8], u8, _) = match kept {
        ModelResult::Stored(who) => (b"model", 1, vec![0, who]),
        ModelResult::TooLarge(who) => (WITH_MESSAGES, who, vec![1]),
    };
    let text = |text: &[u8]| [&[0, 0, 0, small(text.len())], text].concat();
    let mut bytes = [&[1, 4, small(codec.len())], codec, &[0; 7], &[size], &result, &[1]].concat();
    for place in (0..MESSAGES).filter(|place| mail.has(*place)) {
        bytes.extend(text(destination(place, apart).as_bytes()).into_iter().chain(text(&[b'0' + place])));
        // The message has neither a key nor a header, was never refused and is not set aside.
        bytes.extend([[0; 3].as_slice(), &text(&[mail.by, place]), &[0; 5]].concat());
    }
    StoredResult::Encoded { codec: CodecName::new(WITH_MESSAGES).expect("a name"), bytes: bytes.into() }
}

/// Name of the destination of the message at this place.
pub(crate) fn destination(place: u8, apart: bool) -> String {
    if apart { format!("to {place}") } else { "to".to_owned() }
}

/// Messages of `mail` in the runtime's type.
pub(crate) fn messages(mail: Mail) -> Option<UnsentMessages> {
    let state = State::Completed(payload_with(ModelResult::Stored(0), mail, false));
    Inspection::new(Record::new(owner(0), 1, state), TTL, None).unsent_messages()
}

/// Messages of `record` that are not marked as sent.
pub(crate) fn mail(record: &Record) -> Mail {
    let Some(messages) = Inspection::new(record.clone(), TTL, None).unsent_messages() else { return Mail::NONE };
    let each = messages.messages().iter().map(|unsent| match *unsent.message().body().as_ref() {
        [by, place] => Mail::of(by, 1 << place),
        ref other => unreachable!("no message of the model is {other:?}"),
    });
    each.reduce(|all, one| Mail::of(one.by, all.places | one.places)).unwrap_or(Mail::NONE)
}

pub(crate) fn kept(payload: &StoredResult) -> ModelResult {
    match payload {
        StoredResult::Encoded { codec, bytes } if codec.as_str().as_bytes() == WITH_MESSAGES => {
            // The header ends with the size of the result, the lowest byte of which is enough. One byte follows that
            // says whether the result is stored.
            let size = 3 + usize::from(bytes[2]) + 7;
            match bytes[size + 1] {
                0 => ModelResult::Stored(bytes[size + 2]),
                _ => ModelResult::TooLarge(bytes[size]),
            }
        }
        StoredResult::Encoded { bytes, .. } => ModelResult::Stored(bytes[0]),
        StoredResult::TooLarge { size } => ModelResult::TooLarge(small(*size)),
        other => unreachable!("no configuration writes {other:?}"),
    }
}

impl Journal {
    /// Converts this journal to the runtime's type. The runtime's store compares only the length of a journal.
    pub(crate) fn written(&self) -> Option<Written> {
        let parts = |it: Entry| [it.step, it.token, it.attempt, it.progress as u8];
        Written::new(self.entries().flat_map(parts).collect::<Vec<_>>())
    }

    fn read(journal: Option<&Written>) -> Self {
        let bytes = journal.map_or(&[][..], |journal| journal.bytes());
        let entries = bytes.chunks(4).map(|entry| match *entry {
            [step, token, attempt, progress @ 1..=3] => {
                let progress = [Progress::Begun, Progress::Undone, Progress::Ended][usize::from(progress) - 1];
                Entry { step, token, attempt, progress }
            }
            _ => unreachable!("no journal of the model is {bytes:?}"),
        });
        Self::of(entries)
    }
}

fn small<N: TryInto<u8>>(number: N) -> u8 {
    number.try_into().ok().expect("numbers of the model are small")
}

fn ticks(duration: Duration) -> u8 {
    small(duration.as_secs())
}

impl ModelState {
    pub(crate) fn state(self, lease: Duration) -> State {
        match self {
            Self::Pending { fail, begun } => {
                let on_crash = if fail { OnCrash::Fail } else { OnCrash::Retry };
                State::Pending { lease, ttl: TTL, on_crash, begun }
            }
            Self::Released => State::Released,
            Self::Interrupted => State::Interrupted,
            Self::Completed(kept) => State::Completed(payload(kept)),
            Self::Failed(kept) => State::Failed(payload(kept)),
        }
    }
}

impl From<&State> for ModelState {
    fn from(state: &State) -> Self {
        match state {
            State::Pending { on_crash, begun, .. } => Self::Pending { fail: *on_crash == OnCrash::Fail, begun: *begun },
            State::Released => Self::Released,
            State::Interrupted => Self::Interrupted,
            State::Completed(payload) => Self::Completed(kept(payload)),
            State::Failed(payload) => Self::Failed(kept(payload)),
            other => unreachable!("{other:?}"),
        }
    }
}

impl Slot {
    /// Converts this record to the runtime's type.
    pub(crate) fn record(&self, lease: u8) -> Record {
        let owner = decided(owner(self.owner), self.decisions.into());
        let state = match self.stand {
            ModelState::Completed(kept) => State::Completed(payload_with(kept, self.mail, false)),
            ModelState::Failed(kept) => State::Failed(payload_with(kept, self.mail, false)),
            open => open.state(TICK * u32::from(lease)),
        };
        let mut record = Record::new(owner, self.attempt.into(), state);
        record.attempts_used = self.starts.into();
        record.fingerprint = self.mark.map(fingerprint);
        record.journal = self.journal.written();
        record.provenance = match self.asked {
            0 => Provenance::default().with_decision(NAMES[usize::from(self.by)], ""),
            asked => Provenance::default().with_decision("reconciler", &format!("question {asked}")),
        };
        record
    }

    /// Converts `record` to small numbers.
    pub(crate) fn of(record: &Record, lapses_at: u8) -> Self {
        // All bytes of a model's token are equal. Each decision of an operator changes the token.
        let origin = |decisions: &u8| {
            let tokens = 0..=Token::MAX;
            tokens.into_iter().find(|token| decided(owner(*token), (*decisions).into()) == record.owner)
        };
        let first = record.owner.as_bytes()[0];
        let (owner, decisions) = match owner(first) == record.owner {
            true => (first, 0),
            // A trace has fewer than 60 steps, and so fewer than 60 decisions.
            false => (1..60).find_map(|n| Some((origin(&n)?, n))).expect("a token of the model"),
        };
        Self {
            owner,
            decisions,
            by: small(
                NAMES
                    .iter()
                    .position(|name| *name == record.provenance.decided_by().unwrap_or_default())
                    .unwrap_or_default(),
            ),
            asked: small(record.provenance.reconciliations()),
            attempt: small(record.attempt),
            starts: small(record.attempts_used),
            mark: record.fingerprint.map(|mark| mark.as_bytes()[1]),
            stand: ModelState::from(&record.state),
            lapses_at: if record.is_pending() { lapses_at } else { 0 },
            revived: 0,
            journal: Journal::read(record.journal.as_ref()),
            mail: if record.is_finished() { mail(record) } else { Mail::NONE },
        }
    }
}

impl Met {
    fn of(slot: &Slot) -> Self {
        let Slot { owner, decisions, attempt, revived, .. } = *slot;
        let (is_pending, begun, entries) = (slot.is_pending(), slot.begun(), slot.journal.len());
        Self { owner, decisions, attempt, is_pending, begun, revived, entries }
    }
}

/// Converts an answer of the runtime's store to the model's type.
pub(crate) fn answer(reservation: &Reservation) -> Answer {
    match reservation {
        Reservation::Granted { lease, takeover, in_doubt, journal, .. } => Answer::Reserved {
            attempt: small(lease.attempt),
            starts: small(lease.attempts_used),
            takeover: *takeover,
            in_doubt: *in_doubt,
            journal: Journal::read(journal.as_ref()),
        },
        Reservation::InProgress { attempt, lapses_in, .. } => {
            Answer::Pending { attempt: small(*attempt), lapses_in: ticks(*lapses_in) }
        }
        Reservation::Finished { record, .. } => {
            let (attempt, unsent) = (small(record.attempt), mail(record) != Mail::NONE);
            match &record.state {
                State::Completed(payload) => Answer::Finished { kept: kept(payload), ok: true, attempt, unsent },
                State::Failed(payload) => Answer::Finished { kept: kept(payload), ok: false, attempt, unsent },
                other => unreachable!("{other:?} is not finished"),
            }
        }
        Reservation::FingerprintMismatch { .. } => Answer::Mismatch,
        Reservation::Interrupted { .. } => Answer::Interrupted,
        Reservation::AttemptsExhausted { .. } => Answer::Exhausted,
        Reservation::Released { .. } => Answer::Released,
        other => unreachable!("{other:?} is not in the model"),
    }
}

/// Reading of the store's clock, or of a client's clock if the store has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// Time of the clock.
    pub(crate) now: u8,
    /// Additional time that must pass before a point in time counts as past, because clocks differ; `None` for the
    /// store's own clock.
    pub(crate) skew: Option<u8>,
}

impl Reading {
    /// Time until `time` has passed by every clock; zero only if `time` has passed.
    pub(crate) fn until(self, time: u8, mutant: Option<Mutant>) -> u8 {
        match (self.skew, mutant) {
            (None, _) | (Some(_), Some(Mutant::SkewIgnored)) => time.saturating_sub(self.now),
            // The mistake: the store waits one tick too few, because it forgets the fraction of a tick that the
            // writer's clock reading has dropped.
            (Some(skew), Some(Mutant::SkewNotRoundedUp)) => time.saturating_sub(self.now.saturating_sub(skew)),
            (Some(skew), _) => time.saturating_sub(self.now.saturating_sub(skew).saturating_sub(1)),
        }
    }
}

/// Returns whether the record `met` is the record `over`, which the sender of a reservation has seen.
fn is_seen(config: &Config, over: Option<Met>, met: &Slot) -> bool {
    let mut seen = Met::of(met);
    if let (Some(Mutant::ReplacesUnseenJournal), Some(over)) = (config.mutant, over) {
        seen.entries = over.entries;
    }
    over == Some(seen)
}

fn in_one_step(config: &Config) -> bool {
    config.one_step || config.mutant == Some(Mutant::ReplacesUnseen)
}

/// Reserves the key of `slot` for `token`: replaces the record `over`, or inserts a record if `over` is `None`.
///
/// A store either decides in one step, or compares the record with `over`, which the sender has seen. With a
/// comparison, a late request changes no record that its sender has not seen.
pub(crate) fn reserves(
    config: &Config,
    slot: &mut Option<Slot>,
    token: Token,
    (over, asks): (Option<Met>, bool),
    reading: Reading,
) -> Answer {
    let mut request = config.request(token);
    request.max_reconciliations = request.max_reconciliations.filter(|_| asks);
    let request = &request;
    let lapses_at = reading.now + config.lease;
    let reserved = |slot: &mut Option<Slot>, record: &Record, takeover| {
        *slot = Some(Slot::of(record, lapses_at));
        answer(&record.grant(request, takeover))
    };
    let Some(met) = *slot else {
        return match over {
            None => reserved(slot, &Record::first(request), false),
            Some(_) => Answer::Free(None),
        };
    };
    let mut record = met.record(config.lease);
    let mut lapses_in = reading.until(met.lapses_at, config.mutant);
    let mut asked = request.clone();
    if let Some(mutant) = config.mutant {
        mutant.before_meeting(&met, &mut record, &mut asked, &mut lapses_in);
    }
    match record.admit(&asked, TICK * u32::from(lapses_in)) {
        Admission::Answer(told) => answer(&told),
        Admission::Replace { .. } if !in_one_step(config) && !is_seen(config, over, &met) => {
            Answer::Free(Some(Met::of(&met)))
        }
        Admission::Replace { mut with, takeover } => {
            if let Some(mutant) = config.mutant {
                mutant.before_replacing(&met, &mut with, takeover);
                // A store that compares the journal replaces no other journal than the one that the sender saw.
                if let (Mutant::ReplacesUnseenJournal, Some(over)) = (mutant, over) {
                    with.journal = Journal::of(met.journal.entries().take(over.entries.into())).written();
                }
            }
            reserved(slot, &with, takeover)
        }
    }
}

/// Returns the answer to another call with the policy of `who` that finds `slot` after the lease has lapsed by every
/// clock.
pub(crate) fn after_its_lease(config: &Config, slot: Slot, who: CallId) -> Answer {
    /// Generation of owner tokens that no call of the plan reaches.
    const ANOTHER: u8 = 10;
    /// Time that no trace reaches.
    const LATE: u8 = 200;
    let reading = Reading { now: LATE, skew: config.skew };
    reserves(config, &mut Some(slot), token(who, ANOTHER), (Some(Met::of(&slot)), true), reading)
}

/// Write that ends an attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) stand: ModelState,
    /// Number of attempts that the write takes off the count for `max_attempts`.
    pub(crate) refund: u8,
    /// Number of the attempt, and number of the attempts that count; `None` for a release, which names no attempt.
    pub(crate) numbers: Option<(u8, u8)>,
    pub(crate) now: u8,
    /// Messages that the write records.
    pub(crate) mail: Mail,
}

impl End {
    pub(crate) fn finish(kept: ModelResult, ok: bool, numbers: (u8, u8), now: u8) -> Self {
        let stand = if ok { ModelState::Completed(kept) } else { ModelState::Failed(kept) };
        Self { stand, refund: 0, numbers: Some(numbers), now, mail: Mail::NONE }
    }

    /// Returns this end with the first `pushed` messages of its attempt.
    pub(crate) fn with_messages(self, pushed: u8) -> Self {
        let by = self.numbers.map_or(0, |(attempt, _)| attempt);
        Self { mail: Mail::pushed(by, pushed), ..self }
    }

    pub(crate) fn release(how: ReleaseKind, now: u8) -> Self {
        let refund = u8::from(!how.release().counts());
        let stand = ModelState::from(&how.release().state());
        Self { stand, refund, numbers: None, now, mail: Mail::NONE }
    }
}

/// Ends the attempt of `token`: changes the pending record, or recognises that the same end was written before.
pub(crate) fn ends(config: &Config, slot: &mut Option<Slot>, token: Token, end: End) -> Done {
    let End { stand, refund, numbers, now, mail } = end;
    let mutant = config.mutant;
    let Some(met) = slot.as_mut() else { return Done::Refused };
    let with_result = matches!(stand, ModelState::Completed(_) | ModelState::Failed(_));
    // Only the attempt that owns the record may end it, and only if no operator has decided.
    let own = met.owner == token && met.decisions == 0;
    if !mutant.is_some_and(|mutant| mutant.ends_anybodys(met, with_result)) && !own {
        return Done::Refused;
    }
    // The attempt in the record has ended. The runtime's own function decides whether this write repeats that end.
    if !met.is_pending() && !mutant.is_some_and(|mutant| mutant.ends_an_ended_attempt(met, with_result)) {
        if mutant == Some(Mutant::RefundRepeated) {
            met.starts = met.starts.saturating_sub(refund);
        }
        if mutant == Some(Mutant::RepeatedFinishBringsBack) && with_result {
            met.mail = mail;
        }
        return match mutant {
            Some(Mutant::RepeatedFinishRefused) if with_result => Done::Refused,
            Some(Mutant::RepeatedReleaseRefused) if !with_result => Done::Refused,
            _ => {
                let attempt = numbers.map_or(met.attempt, |(attempt, _)| attempt);
                let request = &config.request(token);
                let lease = {
                    let mut lease = Record::first(request).lease(request);
                    lease.attempt = attempt.into();
                    lease
                };
                met.record(config.lease).ended(&lease, with_result).into()
            }
        };
    }
    if mutant == Some(Mutant::LapsedOwnerRefused) && met.lapses_at <= now {
        return Done::Refused;
    }
    // A completion names its attempt, which must be the attempt of the record.
    let anyones = mutant.is_some_and(|mutant| mutant.ends_any_attempt(met, with_result));
    if !anyones && numbers.is_some_and(|(attempt, _)| attempt != met.attempt) {
        return Done::Refused;
    }
    if mutant == Some(Mutant::ReleaseForgets) && !with_result {
        *slot = None;
        return Done::Done;
    }
    // The end is applied.
    met.starts = met.starts.saturating_sub(refund);
    met.stand = stand;
    (met.lapses_at, met.revived) = (0, 0);
    // A release keeps the journal for the next attempt.
    if with_result || mutant == Some(Mutant::ReleaseDropsJournal) {
        met.journal = Journal::EMPTY;
    }
    if let (true, Some((attempt, starts))) = (config.whole, numbers) {
        // A store whose record is one value writes the whole record from the values in the request.
        let request = &config.request(token);
        let lease = {
            let mut lease = Record::first(request).lease(request);
            lease.attempt = attempt.into();
            lease.attempts_used = starts.into();
            lease.fingerprint = met.mark.map(fingerprint);
            lease
        };
        *met = Slot::of(&Record::after(&lease, stand.state(request.lease)), 0);
    }
    met.mail = mail;
    Done::Done
}

/// Returns the record as a call sees it that wants to send its messages.
pub(crate) fn inspects(slot: Option<Slot>) -> Option<(Seen, Mail)> {
    let Slot { owner, decisions, attempt, stand, mail, .. } = slot?;
    Some((Seen { owner, decisions, attempt, ok: matches!(stand, ModelState::Completed(_)) }, mail))
}

/// Marks the messages of the record as sent, except for those in `left`, if it is the record that the sender saw.
pub(crate) fn marks_sent(config: &Config, slot: &mut Option<Slot>, seen: Seen, left: Mail, reading: Reading) -> Done {
    let Some(met) = slot.as_mut() else { return Done::Refused };
    let result = ModelResult::Stored(0);
    let stand = if seen.ok { ModelState::Completed(result) } else { ModelState::Failed(result) };
    let Seen { owner, decisions, attempt, .. } = seen;
    let mut shown = Slot { owner, decisions, attempt, stand, mail: Mail::NONE, ..*met };
    if config.mutant == Some(Mutant::MarkOfAnyAttempt) {
        shown = *met;
    }
    let lapses_in = TICK * u32::from(if met.is_pending() { reading.until(met.lapses_at, config.mutant) } else { 0 });
    let seen = Inspection::new(shown.record(config.lease), TTL, Some(Duration::ZERO)).revision();
    let decision = Decision::mark_sent(&Key::new("model", 0_u32).expect("a key"), seen, messages(left));
    let Ruling::Replace(with) = met.record(config.lease).decide(&decision, lapses_in) else { return Done::Refused };
    let mail = match config.mutant {
        Some(Mutant::MarkReplacesList) => left,
        _ => Slot::of(&with, met.lapses_at).mail,
    };
    // The runtime's function changes nothing but the messages, which the rules check.
    *met = Slot { mail, ..Slot::of(&with, met.lapses_at) };
    Done::Done
}

/// Marks attempt `attempt` of `token` as begun, and renews its lease. Refuses if the lease has lapsed.
pub(crate) fn begins(config: &Config, slot: &mut Option<Slot>, token: Token, attempt: u8, reading: Reading) -> Done {
    let Some(met) = slot.as_mut().filter(|met| met.owner == token && met.attempt == attempt) else {
        return Done::Refused;
    };
    let late = met.lapses_at <= reading.now && config.mutant != Some(Mutant::MarkedAfterLapse);
    match &mut met.stand {
        ModelState::Pending { begun, .. } if *begun || !late => *begun = true,
        _ => return Done::Refused,
    }
    renews(config, slot, token, attempt, reading)
}

/// Renews the lease of attempt `attempt` of `token`, if this attempt still owns the record.
pub(crate) fn renews(config: &Config, slot: &mut Option<Slot>, token: Token, attempt: u8, reading: Reading) -> Done {
    let Some(met) = slot.as_mut() else { return Done::Refused };
    let held = match config.mutant {
        Some(Mutant::RenewAnybodys) => true,
        Some(Mutant::RenewAnyAttempt) => met.owner == token,
        _ => met.owner == token && met.attempt == attempt,
    };
    if !met.is_pending() || !held {
        return Done::Refused;
    }
    let lapses_at = reading.now + config.lease;
    // If the senders of requests set the times, a late renewal must not shorten the lease that a later renewal
    // has confirmed.
    if config.mutant == Some(Mutant::LateRenewalCutsShort) || met.lapses_at <= lapses_at {
        let revives = met.lapses_at <= reading.now || (reading.skew.is_some() && met.lapses_at < lapses_at);
        met.revived += u8::from(revives && config.mutant != Some(Mutant::ReplacesRevived));
        met.lapses_at = lapses_at;
    }
    Done::Done
}

/// Puts `journal` into the record of attempt `attempt` of `token`, unless the record has a journal that is as long or
/// longer, and renews the lease.
pub(crate) fn appends(
    config: &Config,
    slot: &mut Option<Slot>,
    token: Token,
    (attempt, journal): (u8, Journal),
    reading: Reading,
) -> Done {
    let mutant = config.mutant;
    let Some(met) = slot.as_mut() else { return Done::Refused };
    let held = match mutant {
        Some(Mutant::AppendAnybodys) => true,
        Some(Mutant::AppendAnyAttempt) => met.owner == token,
        Some(Mutant::BegunByAnybody) if journal.doubt(GUARDED) == journal.entries().last() => true,
        _ => met.owner == token && met.attempt == attempt,
    };
    let open = match mutant {
        Some(Mutant::AppendAfterFinish) => met.is_pending() || met.result().is_some(),
        Some(Mutant::AppendAfterRelease) => met.result().is_none(),
        _ => met.is_pending(),
    };
    if !open || !held {
        if mutant == Some(Mutant::RefusedAppendExtends) && met.is_pending() {
            met.lapses_at = met.lapses_at.max(reading.now + config.lease);
        }
        return Done::Refused;
    }
    let kept = match (met.journal.written(), journal.written()) {
        (Some(known), Some(sent)) if mutant != Some(Mutant::ShorterJournalReplaces) => Some(known.later(sent)),
        (known, sent) => sent.or(known),
    };
    met.journal = Journal::read(kept.as_ref());
    if met.is_pending() {
        let (token, attempt) = (met.owner, met.attempt);
        renews(config, slot, token, attempt, reading);
    }
    Done::Done
}

/// Record of `key` as an operator sees it.
pub(crate) fn sees(key: u8, operator: u8, slot: Slot, reading: Reading) -> SeenRecord {
    let live = slot.is_pending() && reading.until(slot.lapses_at, None) > 0;
    SeenRecord { key, operator, slot, live, decided: 0 }
}

/// Returns `seen` with the decision about its steps; `None` if no step of `seen` allows the decision.
pub(crate) fn decided_journal(seen: &Journal, decision: StepDecision) -> Option<Journal> {
    let resolved = |progress| {
        let mut journal = *seen;
        journal.add(Entry { progress, ..seen.doubt(GUARDED)? });
        Some(journal)
    };
    match decision {
        StepDecision::Done => resolved(Progress::Ended),
        StepDecision::NotDone => resolved(Progress::Undone),
        // The steps that the operator sees before the first one keep their entries.
        StepDecision::FromFirst => {
            let is_before = |entry: &Entry| seen.entries().skip_while(|it| it != entry).any(|it| it.step == GUARDED);
            seen.latest(GUARDED)?;
            let others = seen.entries().filter(|entry| entry.step != GUARDED);
            Some(Journal::of(others.filter(is_before)))
        }
        StepDecision::WithoutSteps => (seen.len() > 0).then_some(Journal::EMPTY),
    }
}

/// Reopens or discards the record, if it is the record that the operator saw. `steps`: decision about its steps.
pub(crate) fn reopens(
    config: &Config,
    slot: &mut Option<Slot>,
    sight: &SeenRecord,
    steps: Option<StepDecision>,
    reading: Reading,
) -> Verdict {
    let Some(met) = slot.as_mut() else { return Verdict::Refused };
    let lapses_in = |left: u8| TICK * u32::from(left);
    let (mut seen, seen_left) = (sight.slot, u8::from(sight.live));
    if config.mutant == Some(Mutant::DecidesUnseen) && seen.attempt == met.attempt {
        seen = *met;
    }
    let action = match steps {
        Some(steps) => {
            let Some(journal) = decided_journal(&seen.journal, steps) else { return Verdict::Refused };
            Action::ReopenWith(journal.written())
        }
        None if seen.result().is_some() => Action::Discard,
        None => Action::Reopen,
    };
    if steps.is_some() && config.mutant == Some(Mutant::StepsDecidedUnseen) {
        seen.journal = met.journal;
    }
    let mut left = if met.is_pending() { reading.until(met.lapses_at, config.mutant) } else { 0 };
    let mut seen_left = if config.mutant == Some(Mutant::DecidesUnseen) { left } else { seen_left };
    if config.mutant == Some(Mutant::ReopenLive)
        || (steps.is_some() && config.mutant == Some(Mutant::StepsDecidedWhileRunning))
    {
        (left, seen_left) = (0, 0);
    }
    let left = lapses_in(left);
    let seen = Inspection::new(seen.record(config.lease), TTL, Some(lapses_in(seen_left))).revision();
    let key = Key::new("model", u32::from(sight.key)).expect("a key");
    let decision = Decision::new(&key, seen, action).by(NAMES[usize::from(sight.operator)]);
    let Ruling::Replace(with) = met.record(config.lease).decide(&decision, left) else {
        return Verdict::Refused;
    };
    let mut with = Slot::of(&with, 0);
    match config.mutant {
        Some(Mutant::ReopenForgetsNumber) => with.attempt = 0,
        Some(Mutant::ReopenDropsJournal) => with.journal = Journal::EMPTY,
        Some(Mutant::DecisionKeepsOwner) => with.decisions = met.decisions,
        _ => {}
    }
    *met = with;
    Verdict::Applied
}

/// Replaces the result of the record, or drops its messages (`drops`), if it is the record that the operator saw.
pub(crate) fn corrects(config: &Config, slot: &mut Option<Slot>, sight: &SeenRecord, drops: bool) -> Verdict {
    let Some(met) = slot.as_mut() else { return Verdict::Refused };
    let seen = Inspection::new(sight.slot.record(config.lease), TTL, Some(Duration::ZERO)).revision();
    let key = Key::new("model", u32::from(sight.key)).expect("a key");
    let action = if drops { Action::DropMessages } else { Action::Replace(Finish::Completed(payload(REPLACED))) };
    let decision = Decision::new(&key, seen, action).by(NAMES[usize::from(sight.operator)]);
    let Ruling::Replace(with) = met.record(config.lease).decide(&decision, Duration::ZERO) else {
        return Verdict::Refused;
    };
    *met = Slot::of(&with, 0);
    if !drops && config.mutant == Some(Mutant::ReplaceDropsMessages) {
        met.mail = Mail::NONE;
    }
    Verdict::Applied
}
