//! The kinds of operations that gather in batches: reservations, begins of bodies, journals, ends of attempts, and
//! marks of sent messages.

use std::collections::HashMap;
use std::sync::Arc;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::client::Database;
use super::failure::OpFailure;
use super::param::{HiddenParam, LeaseParams};
use super::sql::{self, Columns, Executor as _, LookupResult};
use super::statement_pool::StatementPool;
use crate::key::Key;
use crate::kit::replays::Replays;
use crate::kit::rows::{FoundRow, millis, number_of};
use crate::kit::work::{Effect, EndRow, JournalRow, LongestJournals, QueuedOp, Work, WriteTurns, by_key, in_turns};
use crate::record::{Lease, Parts, Record, ReserveRequest, Revision};

/// Largest number of operations in one batch.
const BATCH: usize = 128;

/// Reservations, as a kind of [`Work`].
pub(super) struct Reservations {
    server: Arc<StatementPool>,
    replays: Replays,
}

/// Returns whether `rows` answer each operation of a batch that was sent in this `order`.
fn answers(order: &[usize], rows: &[Row]) -> Vec<bool> {
    let mut answers = vec![false; order.len()];
    for (place, is_answered) in order.iter().zip(sql::answered(rows, order.len())) {
        answers[*place] = is_answered;
    }
    answers
}

impl Reservations {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self { server, replays: Replays::new() }
    }

    /// Sends one request for each key whose record is `Unseen`: the first request whose caller still waits.
    async fn reserve_unseen(&self, batch: &[QueuedOp<Self>], keys: &mut [OfKey<'_>]) -> Result<(), OpFailure> {
        let ready = self.server.database.ready(&self.server.sql.reserve_many).await?;
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut asked: Vec<&ReserveRequest> = Vec::new();
        for (at, of_key) in keys.iter_mut().enumerate().filter(|(_, of_key)| matches!(of_key.met, LookupResult::Unseen))
        {
            of_key.asked = of_key.places.iter().copied().find(|place| batch[*place].is_wanted());
            if let Some(place) = of_key.asked {
                let request = &batch[place].operation;
                places.insert(request.key.as_str(), at);
                asked.push(request);
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let column = |of: fn(&ReserveRequest) -> i64| asked.iter().map(|it| of(it)).collect::<Vec<_>>();
        let names: Vec<&str> = asked.iter().map(|it| it.key.as_str()).collect();
        let owners: Vec<&[u8]> = asked.iter().map(|it| &it.owner.as_bytes()[..]).collect();
        let fingerprints: Vec<_> = asked.iter().map(|it| fingerprint(it)).collect();
        let on_crash_fail: Vec<bool> = asked.iter().map(|it| on_crash_fail(it)).collect();
        let (leases, ttls) = (column(|it| millis(it.lease)), column(|it| millis(it.ttl)));
        let holders: Vec<_> = asked.iter().map(|it| holder(it)).collect();
        let traceparents: Vec<_> = asked.iter().map(|it| it.provenance.traceparent_text()).collect();
        let params: [&(dyn ToSql + Sync); 8] = [
            &names,
            &HiddenParam(owners),
            &HiddenParam(fingerprints),
            &on_crash_fail,
            &leases,
            &ttls,
            &holders,
            &traceparents,
        ];
        for row in &ready.query(&params, Effect::Writes).await? {
            if let Some(at) = sql::key(row).and_then(|key| places.get(key)) {
                // If a purge removed the old row while this statement made a new row, the answer contains both. The new
                // row is the record.
                if !matches!(keys[*at].met, LookupResult::Made) {
                    keys[*at].met = sql::met_in_a_batch(row);
                }
            }
        }
        Ok(())
    }
}

/// The requests for one key in a batch.
struct OfKey<'a> {
    places: &'a [usize],
    /// Index in the batch of the request that was sent, if a request was sent.
    asked: Option<usize>,
    met: LookupResult,
}

/// Returns whether a request gets the result of a finished record. A record whose result or journal was left out counts
/// as finished, because almost no journal is that large.
fn is_replay(met: &LookupResult) -> bool {
    matches!(met, LookupResult::LeftOut) || matches!(met, LookupResult::Found(Ok(found)) if found.record.is_finished())
}

fn fingerprint(request: &ReserveRequest) -> Option<&[u8]> {
    request.fingerprint.as_ref().map(|fingerprint| &fingerprint.as_bytes()[..])
}

fn holder(request: &ReserveRequest) -> Option<&str> {
    request.provenance.holder().map(|holder| holder.as_str())
}

fn on_crash_fail(request: &ReserveRequest) -> bool {
    Parts::of(&Record::first(request)).on_crash_fail
}

impl Work for Reservations {
    type Operation = ReserveRequest;
    type Answer = LookupResult;
    type Failure = OpFailure;
    type Link = Database;

    const BATCH: usize = BATCH;
    const LANES: usize = 2;
    const OUTLIVES: bool = false;

    fn link(&self) -> &Database {
        &self.server.database
    }

    fn key(request: &ReserveRequest) -> &str {
        request.key.as_str()
    }

    fn turns(&self) -> Option<&WriteTurns> {
        // Replays write nothing, so batches of replays need not take turns with batches that have to be committed.
        (!self.replays.are_expected()).then_some(&self.server.turns)
    }

    fn bytes(request: &ReserveRequest) -> usize {
        request.key.as_str().len() + 80
    }

    async fn one(&self, request: &ReserveRequest) -> Result<LookupResult, OpFailure> {
        let key = request.key.as_str();
        if self.replays.are_expected() {
            let rows = self.server.rows(&self.server.sql.answer, &[&key], Effect::Reads).await?;
            if let Some(row) = rows.first() {
                let met = sql::met(row, Columns::Answer);
                self.replays.note(usize::from(is_replay(&met)), 1);
                return Ok(met);
            }
        }
        let params: [&(dyn ToSql + Sync); 8] = [
            &key,
            &HiddenParam(&request.owner.as_bytes()[..]),
            &HiddenParam(fingerprint(request)),
            &on_crash_fail(request),
            &millis(request.lease),
            &millis(request.ttl),
            &holder(request),
            &request.provenance.traceparent_text(),
        ];
        let rows = self.server.rows(&self.server.sql.reserve, &params, Effect::Writes).await?;
        let mut met = LookupResult::Unseen;
        for row in &rows {
            if !matches!(met, LookupResult::Made) {
                met = sql::met(row, Columns::Answer);
            }
        }
        self.replays.note(usize::from(is_replay(&met)), 1);
        Ok(met)
    }

    async fn many(&self, batch: &[QueuedOp<Self>]) -> Result<Vec<LookupResult>, OpFailure> {
        let order = by_key(batch, |it| it.operation.key.as_str());
        let same = |a: &usize, b: &usize| batch[*a].operation.key == batch[*b].operation.key;
        let groups = order.chunk_by(same);
        let mut keys: Vec<OfKey<'_>> =
            groups.map(|places| OfKey { places, asked: None, met: LookupResult::Unseen }).collect();
        if self.replays.are_expected() {
            let ready = self.server.database.ready(&self.server.sql.look_many).await?;
            let names: Vec<&str> = keys.iter().map(|it| batch[it.places[0]].operation.key.as_str()).collect();
            let places: HashMap<&str, usize> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
            for row in &ready.query(&[&names], Effect::Reads).await? {
                if let Some(at) = sql::key(row).and_then(|key| places.get(key)) {
                    keys[*at].met = sql::met_in_a_batch(row);
                }
            }
        }
        if keys.iter().any(|it| matches!(it.met, LookupResult::Unseen)) {
            self.reserve_unseen(batch, &mut keys).await?;
        }
        self.replays.note(keys.iter().filter(|it| is_replay(&it.met)).count(), keys.len());
        let mut answers: Vec<LookupResult> = batch.iter().map(|_| LookupResult::Unseen).collect();
        for OfKey { places, asked, met } in keys {
            for place in places {
                answers[*place] = match (&met, asked) {
                    // One request made the record; the other requests for the key find that record.
                    (LookupResult::Made, Some(asked)) if asked != *place => {
                        let first = &batch[asked].operation;
                        LookupResult::Found(Ok(Box::new(FoundRow::made(Record::first(first), first.lease))))
                    }
                    (met, _) => met.clone(),
                };
            }
        }
        Ok(answers)
    }
}

/// Marks for bodies that begin, as a kind of [`Work`].
pub(super) struct BeginMarks(Arc<StatementPool>);

impl BeginMarks {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self(server)
    }

    /// Writes into the records of `leases` that the bodies begin. Returns for each lease whether its record now shows
    /// that the body has begun. An attempt has one caller, so no attempt occurs twice in `leases`.
    async fn mark(&self, leases: &[&Lease]) -> Result<Vec<bool>, OpFailure> {
        let order = by_key(leases, |lease| lease.key.as_str());
        let sorted = LeaseParams::new(order.iter().map(|place| leases[*place]));
        let params: [&(dyn ToSql + Sync); 3] = [&sorted.keys, &sorted.owners, &sorted.attempts];
        Ok(answers(&order, &self.0.rows(&self.0.sql.begin, &params, Effect::Writes).await?))
    }
}

impl Work for BeginMarks {
    type Operation = Lease;
    /// True if the record now shows that the body has begun.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = Database;

    const BATCH: usize = BATCH;
    const LANES: usize = 1;
    const OUTLIVES: bool = false;

    fn link(&self) -> &Database {
        &self.0.database
    }

    fn key(lease: &Lease) -> &str {
        lease.key.as_str()
    }

    fn turns(&self) -> Option<&WriteTurns> {
        Some(&self.0.turns)
    }

    fn bytes(lease: &Lease) -> usize {
        lease.key.as_str().len() + 80
    }

    async fn one(&self, lease: &Lease) -> Result<bool, OpFailure> {
        Ok(self.mark(&[lease]).await?.contains(&true))
    }

    async fn many(&self, leases: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        self.mark(&leases.iter().map(|it| &it.operation).collect::<Vec<_>>()).await
    }
}

/// Journals of attempts, as a kind of [`Work`].
pub(super) struct JournalWrites(Arc<StatementPool>);

impl JournalWrites {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self(server)
    }

    /// Writes the journals, and renews the leases of their attempts. Returns for each journal whether the record of its
    /// attempt now has this journal or a longer one.
    async fn write(&self, rows: &[&JournalRow]) -> Result<Vec<bool>, OpFailure> {
        let journals = LongestJournals::new(rows);
        let longest = journals.rows();
        let leases = LeaseParams::new(longest.iter().map(|row| &row.lease));
        let written: Vec<&[u8]> = longest.iter().map(|row| &row.journal.bytes()[..]).collect();
        let params: [&(dyn ToSql + Sync); 4] = [&leases.keys, &leases.owners, &leases.attempts, &HiddenParam(written)];
        let bytes = longest.iter().map(|row| Self::bytes(row)).sum();
        let answer = self.0.rows(&self.0.sql.append_many, &params, Effect::Records(bytes)).await?;
        Ok(journals.answers(sql::answered(&answer, longest.len())))
    }
}

impl Work for JournalWrites {
    type Operation = JournalRow;
    /// True if the record has the journal or a longer one, and its lease was renewed.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = Database;

    const BATCH: usize = BATCH;
    const LANES: usize = 1;
    // The entries of a caller that is gone leave with the next journal of its attempt, if the attempt goes on.
    const OUTLIVES: bool = false;

    fn link(&self) -> &Database {
        &self.0.database
    }

    fn key(row: &JournalRow) -> &str {
        row.lease.key.as_str()
    }

    fn turns(&self) -> Option<&WriteTurns> {
        Some(&self.0.turns)
    }

    fn bytes(row: &JournalRow) -> usize {
        row.bytes()
    }

    async fn one(&self, row: &JournalRow) -> Result<bool, OpFailure> {
        let JournalRow { lease, journal } = row;
        let params: [&(dyn ToSql + Sync); 4] = [
            &lease.key.as_str(),
            &HiddenParam(&lease.owner.as_bytes()[..]),
            &i64::from(lease.attempt),
            &HiddenParam(&journal.bytes()[..]),
        ];
        let effect = Effect::Records(journal.bytes().len());
        Ok(!self.0.rows(&self.0.sql.append, &params, effect).await?.is_empty())
    }

    async fn many(&self, rows: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        self.write(&rows.iter().map(|it| &it.operation).collect::<Vec<_>>()).await
    }
}

/// Marks of finished operations whose messages are all sent, as a kind of [`Work`].
pub(super) struct SentMarks(Arc<StatementPool>);

/// The mark of one operation: the record that the sender of its messages saw.
pub(super) struct SentRow {
    pub(super) key: Key,
    pub(super) seen: Revision,
}

impl SentMarks {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self(server)
    }

    /// Removes the messages from the records of `rows`. Returns for each row whether this statement removed them.
    async fn mark(&self, rows: &[&SentRow]) -> Result<Vec<bool>, OpFailure> {
        let order = by_key(rows, |row| row.key.as_str());
        let sorted: Vec<&SentRow> = order.iter().map(|place| rows[*place]).collect();
        let keys: Vec<&str> = sorted.iter().map(|row| row.key.as_str()).collect();
        let owners: Vec<&[u8]> = sorted.iter().map(|row| &row.seen.owner[..]).collect();
        let attempts: Vec<i64> = sorted.iter().map(|row| row.seen.attempt.into()).collect();
        let states: Vec<&str> = sorted.iter().map(|row| row.seen.standing.name()).collect();
        let params: [&(dyn ToSql + Sync); 4] = [&keys, &HiddenParam(owners), &attempts, &states];
        Ok(answers(&order, &self.0.rows(&self.0.sql.sent, &params, Effect::Writes).await?))
    }
}

impl Work for SentMarks {
    type Operation = SentRow;
    /// True if this statement removed the messages of the record.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = Database;

    const BATCH: usize = BATCH;
    const LANES: usize = 1;
    const OUTLIVES: bool = false;

    fn link(&self) -> &Database {
        &self.0.database
    }

    fn key(row: &SentRow) -> &str {
        row.key.as_str()
    }

    fn turns(&self) -> Option<&WriteTurns> {
        Some(&self.0.turns)
    }

    fn bytes(row: &SentRow) -> usize {
        row.key.as_str().len() + 80
    }

    async fn one(&self, row: &SentRow) -> Result<bool, OpFailure> {
        Ok(self.mark(&[row]).await?.contains(&true))
    }

    async fn many(&self, rows: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        self.mark(&rows.iter().map(|it| &it.operation).collect::<Vec<_>>()).await
    }
}

/// Ends of attempts, as a kind of [`Work`].
pub(super) struct EndWrites(Arc<StatementPool>);

impl EndWrites {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self(server)
    }

    async fn distinct(&self, ends: &[&EndRow]) -> Result<Vec<bool>, OpFailure> {
        let places: HashMap<&str, usize> = ends.iter().enumerate().map(|(i, it)| (it.key.as_str(), i)).collect();
        let keys: Vec<&str> = ends.iter().map(|it| it.key.as_str()).collect();
        let parts: Vec<Parts<'_>> = ends.iter().map(|it| Parts::of(&it.record)).collect();
        let owners: Vec<&[u8]> = parts.iter().map(|it| it.owner).collect();
        let states: Vec<&str> = parts.iter().map(|it| it.state).collect();
        let refunds: Vec<i64> = ends.iter().map(|it| it.refund).collect();
        let codecs: Vec<Option<&str>> = parts.iter().map(|it| it.codec).collect();
        let results: Vec<Option<&[u8]>> = parts.iter().map(|it| it.result.as_deref()).collect();
        let sizes: Vec<Option<i64>> = parts.iter().map(|it| it.result_bytes).collect();
        let ttls: Vec<i64> = ends.iter().map(|it| millis(it.ttl)).collect();
        let numbers: Vec<Option<i64>> = ends.iter().map(|it| number_of(&it.record)).collect();
        let params: [&(dyn ToSql + Sync); 9] =
            [&keys, &HiddenParam(owners), &states, &refunds, &codecs, &HiddenParam(results), &sizes, &ttls, &numbers];
        let mut done = vec![false; ends.len()];
        let bytes = ends.iter().map(|it| Self::bytes(it)).sum();
        for row in &self.0.rows(&self.0.sql.end_many, &params, Effect::Records(bytes)).await? {
            if let Some(i) = row.try_get::<_, &str>(0).ok().and_then(|key| places.get(key)) {
                done[*i] = true;
            }
        }
        Ok(done)
    }
}

impl Work for EndWrites {
    type Operation = EndRow;
    /// True if the write ended a pending record.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = Database;

    const BATCH: usize = BATCH;
    const LANES: usize = 1;
    // The end of an attempt must be written even if its caller is gone.
    const OUTLIVES: bool = true;

    fn link(&self) -> &Database {
        &self.0.database
    }

    fn key(end: &EndRow) -> &str {
        end.key.as_str()
    }

    fn turns(&self) -> Option<&WriteTurns> {
        Some(&self.0.turns)
    }

    fn bytes(end: &EndRow) -> usize {
        end.bytes()
    }

    async fn one(&self, end: &EndRow) -> Result<bool, OpFailure> {
        let sql = &self.0.sql;
        sql.end_pending(&*self.0, end.key.as_str(), &end.record, end.refund, end.ttl).await
    }

    async fn many(&self, ends: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        let ends: Vec<&EndRow> = ends.iter().map(|it| &it.operation).collect();
        let mut done = vec![false; ends.len()];
        for (turn, some) in in_turns(&ends).into_iter().enumerate() {
            let distinct: Vec<&EndRow> = some.iter().map(|i| ends[*i]).collect();
            let ended = match self.distinct(&distinct).await {
                // The failure answers all ends of the batch, also those that an earlier statement has written.
                Err(failure) if turn > 0 => return Err(failure.after_writes()),
                ended => ended?,
            };
            for (i, was_done) in some.iter().zip(ended) {
                done[*i] = was_done;
            }
        }
        Ok(done)
    }
}
