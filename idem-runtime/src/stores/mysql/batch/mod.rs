//! The kinds of operations that gather in batches: reservations, begins of bodies, journals, and ends of attempts.

use std::collections::HashMap;
use std::sync::Arc;

use super::client::MySqlPool;
use super::failure::OpFailure;
use super::sql::{self, AT_ONCE, Param, Row};
use super::statement_pool::StatementPool;
use crate::kit::replays::Replays;
use crate::kit::rows::FoundRow;
use crate::kit::work::{Effect, EndRow, JournalRow, LongestJournals, QueuedOp, Work, WriteTurns, by_key, in_turns};
use crate::record::format::FormatError;
use crate::record::{Lease, ReadExtent, ReserveRequest};

/// Answer for one key of a statement that reserves or reads records.
#[derive(Clone, Debug)]
pub(super) enum LookupResult {
    /// The key has a row: a record, or a row that can't be read. The record may be the one that this request made.
    Found(Result<Box<FoundRow>, FormatError>),
    /// The request made the record. Only a statement that returns no rows has this answer.
    Made,
    /// The key has no row: a purge has removed an expired row meanwhile, or the request was not sent.
    Unseen,
    /// The key has a record, whose result or journal the statement left out.
    LeftOut,
}

impl LookupResult {
    /// Reads a row of a statement about one record.
    fn whole(row: &Row) -> Self {
        Self::Found(sql::found(row, ReadExtent::Whole).map(Box::new))
    }

    /// Reads a row of a statement about many records.
    fn bounded(row: &Row) -> Self {
        if row.is_left_out() { Self::LeftOut } else { Self::whole(row) }
    }

    /// Returns whether a request gets the result of a finished record. A record whose result or journal was left out
    /// counts as finished, because almost no journal is that large.
    fn is_replay(&self) -> bool {
        matches!(self, Self::LeftOut) || matches!(self, Self::Found(Ok(found)) if found.record.is_finished())
    }
}

/// Reservations, as a kind of [`Work`].
pub(super) struct Reservations {
    server: Arc<StatementPool>,
    replays: Replays,
}

/// The requests for one key in a batch.
struct OfKey<'a> {
    places: &'a [usize],
    met: LookupResult,
}

impl Reservations {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self { server, replays: Replays::new() }
    }

    fn returns_rows(&self) -> bool {
        self.server.traits.get().is_some_and(|traits| traits.returns_rows)
    }

    /// Sends one request for each key whose record is `Unseen`: the first request whose caller still waits. All
    /// requests for a key then find the same record, which is pending for the one that was sent if that one made it.
    async fn reserve_unseen(&self, batch: &[QueuedOp<Self>], keys: &mut [OfKey<'_>]) -> Result<(), OpFailure> {
        let ready = self.server.database.ready().await?;
        let mut asked: Vec<Vec<Param>> = Vec::new();
        for of_key in keys.iter().filter(|of_key| matches!(of_key.met, LookupResult::Unseen)) {
            if let Some(place) = of_key.places.iter().find(|place| batch[**place].is_wanted()) {
                asked.push(sql::reserve(&batch[*place].operation));
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let statements = &self.server.sql;
        let rows = if self.returns_rows() {
            ready.run(&statements.reserve_many_returning, &asked, Effect::Writes).await?.rows
        } else {
            ready.run(&statements.reserve_many, &asked, Effect::Writes).await?;
            let names: Vec<_> = asked.into_iter().map(|params| params[..1].to_vec()).collect();
            let read = self.server.read_many(&statements.look_many, &names).await;
            read.map_err(OpFailure::after_writes)?
        };
        Self::fill(batch, keys, &rows);
        Ok(())
    }

    /// Puts the rows of a statement to their keys.
    fn fill(batch: &[QueuedOp<Self>], keys: &mut [OfKey<'_>], rows: &[Row]) {
        let mut places = HashMap::new();
        for (at, of_key) in keys.iter().enumerate() {
            places.insert(batch[of_key.places[0]].operation.key.as_str().as_bytes(), at);
        }
        for row in rows {
            if let Some(at) = row.key().and_then(|key| places.get(key)) {
                keys[*at].met = LookupResult::bounded(row);
            }
        }
    }
}

impl Work for Reservations {
    type Operation = ReserveRequest;
    type Answer = LookupResult;
    type Failure = OpFailure;
    type Link = MySqlPool;

    const BATCH: usize = AT_ONCE;
    const LANES: usize = 2;
    const OUTLIVES: bool = false;

    fn link(&self) -> &MySqlPool {
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
        let (server, key) = (&self.server, request.key.as_str());
        if self.replays.are_expected()
            && let Some(row) = server.row(key).await?
        {
            let met = LookupResult::whole(&row);
            self.replays.note(usize::from(met.is_replay()), 1);
            return Ok(met);
        }
        let statement = if self.returns_rows() { &server.sql.reserve_returning } else { &server.sql.reserve };
        let met = match server.one(statement, sql::reserve(request), Effect::Writes).await {
            Ok(answer) if self.returns_rows() => answer.rows.first().map_or(LookupResult::Unseen, LookupResult::whole),
            Ok(_) => LookupResult::Made,
            Err(failure) if failure.is_duplicate => {
                server.row(key).await?.map_or(LookupResult::Unseen, |row| LookupResult::whole(&row))
            }
            Err(failure) => {
                // The insert has waited for a lock, for which a replay need not wait: the next one reads first.
                if failure.is_locked
                    && let Some(row) = server.row(key).await?
                {
                    self.replays.note(usize::from(LookupResult::whole(&row).is_replay()), 1);
                }
                return Err(failure);
            }
        };
        self.replays.note(usize::from(met.is_replay()), 1);
        Ok(met)
    }

    async fn many(&self, batch: &[QueuedOp<Self>]) -> Result<Vec<LookupResult>, OpFailure> {
        let order = by_key(batch, |it| it.operation.key.as_str());
        let same = |a: &usize, b: &usize| batch[*a].operation.key == batch[*b].operation.key;
        let groups = order.chunk_by(same);
        let mut keys: Vec<OfKey<'_>> = groups.map(|places| OfKey { places, met: LookupResult::Unseen }).collect();
        if self.replays.are_expected() {
            let names: Vec<_> = keys.iter().map(|it| vec![batch[it.places[0]].operation.key.as_str().into()]).collect();
            let rows = self.server.read_many(&self.server.sql.look_many, &names).await?;
            Self::fill(batch, &mut keys, &rows);
        }
        if keys.iter().any(|it| matches!(it.met, LookupResult::Unseen)) {
            self.reserve_unseen(batch, &mut keys).await?;
        }
        self.replays.note(keys.iter().filter(|it| it.met.is_replay()).count(), keys.len());
        let mut answers: Vec<LookupResult> = batch.iter().map(|_| LookupResult::Unseen).collect();
        for OfKey { places, met } in keys {
            for place in places {
                answers[*place] = met.clone();
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
}

impl Work for BeginMarks {
    type Operation = Lease;
    /// True if the record now shows that the body has begun.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = MySqlPool;

    const BATCH: usize = AT_ONCE;
    const LANES: usize = 1;
    const OUTLIVES: bool = false;

    fn link(&self) -> &MySqlPool {
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
        Ok(self.0.one(&self.0.sql.begin, sql::attempt(lease), Effect::Writes).await?.affected > 0)
    }

    async fn many(&self, leases: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        let order = by_key(leases, |it| it.operation.key.as_str());
        // An attempt has one caller, so only attempts of different records, or outdated ones, are in a batch.
        let rows: Vec<_> = order.iter().map(|place| sql::attempt(&leases[*place].operation)).collect();
        let marked = self.0.write_many(&self.0.sql.begin_many, &rows, Effect::Writes, false).await?;
        let mut answers = vec![false; leases.len()];
        for (place, is_marked) in order.into_iter().zip(marked) {
            answers[place] = is_marked;
        }
        Ok(answers)
    }
}

/// Journals of attempts, as a kind of [`Work`].
pub(super) struct JournalWrites(Arc<StatementPool>);

impl JournalWrites {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self(server)
    }
}

impl Work for JournalWrites {
    type Operation = JournalRow;
    /// True if the record has the journal or a longer one, and its lease was renewed.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = MySqlPool;

    const BATCH: usize = AT_ONCE;
    const LANES: usize = 1;
    const MOST_SHARED: usize = sql::MOST_SHARED;
    // The entries of a caller that is gone leave with the next journal of its attempt, if the attempt goes on.
    const OUTLIVES: bool = false;

    fn link(&self) -> &MySqlPool {
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

    async fn one(&self, JournalRow { lease, journal }: &JournalRow) -> Result<bool, OpFailure> {
        let effect = Effect::Records(journal.bytes().len());
        Ok(self.0.one(&self.0.sql.append, sql::append(lease, journal), effect).await?.affected > 0)
    }

    async fn many(&self, batch: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        let rows: Vec<&JournalRow> = batch.iter().map(|it| &it.operation).collect();
        let journals = LongestJournals::new(&rows);
        let longest = journals.rows();
        let params: Vec<_> = longest.iter().map(|row| sql::append(&row.lease, &row.journal)).collect();
        let effect = Effect::Records(longest.iter().map(|row| Self::bytes(row)).sum());
        let of_attempts = self.0.write_many(&self.0.sql.append_many, &params, effect, false).await?;
        Ok(journals.answers(of_attempts))
    }
}

/// Ends of attempts, as a kind of [`Work`].
pub(super) struct EndWrites(Arc<StatementPool>);

impl EndRow {
    fn params(&self) -> Vec<Param> {
        sql::end(self.key.as_str(), &self.record, self.refund, self.ttl)
    }
}

impl EndWrites {
    pub(super) fn new(server: Arc<StatementPool>) -> Self {
        Self(server)
    }

    /// Writes ends of distinct keys. Returns for each end whether it was written.
    async fn distinct(&self, ends: &[&EndRow]) -> Result<Vec<bool>, OpFailure> {
        let rows: Vec<_> = ends.iter().map(|end| end.params()).collect();
        let effect = Effect::Records(ends.iter().map(|it| Self::bytes(it)).sum());
        let have_ended = self.0.write_many(&self.0.sql.end_many, &rows, effect, false).await?;
        for (end, _) in ends.iter().zip(&have_ended).filter(|(_, has_ended)| **has_ended) {
            self.0.wake(end.key.as_str());
        }
        Ok(have_ended)
    }
}

impl Work for EndWrites {
    type Operation = EndRow;
    /// True if the write ended a pending record.
    type Answer = bool;
    type Failure = OpFailure;
    type Link = MySqlPool;

    const BATCH: usize = AT_ONCE;
    const LANES: usize = 1;
    const MOST_SHARED: usize = sql::MOST_SHARED;
    // The end of an attempt must be written even if its caller is gone.
    const OUTLIVES: bool = true;

    fn link(&self) -> &MySqlPool {
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
        let effect = Effect::Records(Self::bytes(end));
        let has_ended = self.0.one(&self.0.sql.end, end.params(), effect).await?.affected > 0;
        if has_ended {
            self.0.wake(end.key.as_str());
        }
        Ok(has_ended)
    }

    async fn many(&self, ends: &[QueuedOp<Self>]) -> Result<Vec<bool>, OpFailure> {
        let ends: Vec<&EndRow> = ends.iter().map(|it| &it.operation).collect();
        let mut done = vec![false; ends.len()];
        for (turn, some) in in_turns(&ends).into_iter().enumerate() {
            let distinct: Vec<&EndRow> = some.iter().map(|i| ends[*i]).collect();
            let have_ended = match self.distinct(&distinct).await {
                // The failure answers all ends of the batch, also those that an earlier statement has written.
                Err(failure) if turn > 0 => return Err(failure.after_writes()),
                ended => ended?,
            };
            for (i, has_ended) in some.into_iter().zip(have_ended) {
                done[i] = has_ended;
            }
        }
        Ok(done)
    }
}
