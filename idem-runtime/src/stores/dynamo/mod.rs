//! Records in a DynamoDB table.
//!
//! A record is one item, with an attribute for each of its parts. Every write is conditional, and the answer to a
//! refused write contains the present item, so a replay is one call: the refused reservation. DynamoDB has no clock
//! that a condition could read. A writer writes times of its own clock. A machine treats a written time as passed only
//! when its own clock is later than that time by more than `max_clock_skew`.

mod answer;
mod failure;
mod item;
mod options;
mod table;
mod tries;

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::IdentityCache;
use aws_sdk_dynamodb::operation::delete_item::builders::DeleteItemFluentBuilder;
use aws_sdk_dynamodb::types::{AttributeValue, ReturnConsumedCapacity, ReturnValuesOnConditionCheckFailure};
use bytes::Bytes;

use self::answer::WriteOutcome;
use self::item::{
    ATTEMPT, ATTEMPTS_USED, Attributes, BEGAN_AT, BEGUN, CODEC, EXPIRES_AT, FIRST_SEEN_AT, FORMAT, FoundItem, KEY,
    LAPSES_AT, LEASE_MS, ON_CRASH_FAIL, OWNER, PURGE_AT, RESULT, RESULT_BYTES, STATE, TTL_MS, Times, binary, integer,
    number, text,
};
pub use self::options::DynamoOptions;
use self::tries::Tries;
use crate::clock::{Instant, Sleep, wall_millis};
use crate::combine::race;
use crate::key::Key;
use crate::kit::looks::{LOOKS, looked_in_vain, pause_before};
use crate::kit::waiting::WaiterTable;
use crate::record::format::FormatError;
use crate::record::{
    Admission, Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Parts, Record, Release, Reservation,
    ReserveRequest, Ruling, State, Verdict,
};
use crate::store::{
    Answers, Cursor, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture, store_of_shared,
};
use crate::sync::PerProcess;

/// Largest number of renewals in flight that have taken less than [`SLOW`].
const RENEWED_AT_ONCE: usize = 32;
/// Time after which a renewal in flight is slow. A slow renewal is not included in [`RENEWED_AT_ONCE`], so that it
/// delays no other renewal.
const SLOW: Duration = Duration::from_millis(250);
/// First pause of a waiting duplicate between two reads of its record; the pause grows up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A store in a DynamoDB table.
///
/// - *Atomicity*: one conditional write for each step; DynamoDB decides which write wins. All reads are consistent, and
///   no call of a handler scans the table. Use a table in one region only: two regions of a global table with eventual
///   consistency could both let an attempt run.
/// - *Clock*: the clocks of the machines that use the table, which may differ by
///   [`max_clock_skew`](DynamoOptions::max_clock_skew) (default: 1 s). A takeover waits for the lease and this skew. If
///   clocks differ by more, an attempt may be taken over while its lease still holds.
/// - *Durability*: DynamoDB stores a confirmed write on several disks and does not lose it.
/// - *Limits*: an item has at most 400 KB, including all attributes. A result that does not fit is refused before it is
///   sent ([`StoreErrorKind::TooLarge`]), and the operation is recorded without its result. A journal that does not
///   leave 4 KiB of the item free is refused, too: later writes of the record need this room. The TTL of the table
///   deletes records some days after their retention; until then the store treats expired records as absent.
/// - *Cost*: two calls for a first run; one for a replay, for a duplicate of a running attempt, and for each lease at
///   each beat; three for a takeover and for another attempt after a release. A refused write costs as much capacity as
///   a write of the present item. A renewal of a record with a journal costs as much as a write of the record with its
///   journal. A ping takes three calls, of which two are refused writes. A duplicate that waits for another process
///   reads the record after 50 ms, and then less and less often, down to once a second.
///
/// The user's client decides on region, credentials, HTTPS and retries. The table has a partition key `key` (a string),
/// no sort key, and the TTL attribute `purge_at`; [`CLOUDFORMATION`](DynamoStore::CLOUDFORMATION) is a template of this
/// table. The store needs the permissions `dynamodb:PutItem`, `dynamodb:UpdateItem` and `dynamodb:GetItem`. An operator
/// needs `dynamodb:DeleteItem` to forget records, and `dynamodb:Scan` to list them. DynamoDB reveals a missing
/// permission only to a request that needs the permission, and opening a store sends no request: `idem doctor` tries
/// each operation on a key that no record has.
///
/// A list is a `Scan` with consistent reads, page by page. A list or a count reads every item of the table with its
/// result. DynamoDB bills all these items (a read unit for each 4 KB), even the items that the filter leaves out.
///
/// Clones share the client, leases and waiting duplicates.
///
/// **Separate connections for leases.** Renewals and late writes run on a thread of the library, so that a handler that
/// blocks its runtime keeps its lease. The connections of renewals must not be opened on the handler's runtime: a
/// request over such a connection would wait for the blocked runtime. If your client was made without an HTTP client,
/// the store makes a second client for renewals and late writes, with the same settings but separate connections and
/// separately cached credentials. If your client was given an HTTP client (`http_client`), the second client would use
/// the same HTTP client. So pass a client with another HTTP client to [`upkeep_client`](DynamoOptions::upkeep_client).
///
/// **`fork`.** A forked child makes its own client, with the same settings but separate connections. If your client was
/// given an HTTP client, calls of the child may use connections of the parent: no answer arrives, and each such call
/// fails after [`response_timeout`](DynamoOptions::response_timeout), until all inherited connections have failed. So
/// make client and store in the child.
///
/// ```no_run
/// # fn open(client: aws_sdk_dynamodb::Client) {
/// use idem_runtime::DynamoStore;
/// // let client = aws_sdk_dynamodb::Client::new(&aws_config::load_from_env().await);
/// let store = DynamoStore::new(client, "idempotency");
/// # }
/// ```
#[derive(Clone)]
pub struct DynamoStore(Arc<DynamoInner>);

impl DynamoStore {
    /// A CloudFormation template of the table:
    ///
    /// ```json
    #[doc = include_str!("table.json")]
    /// ```
    pub const CLOUDFORMATION: &'static str = include_str!("table.json");

    /// Makes a store in `table`. Sends no request: the first call reports a wrong table, wrong credentials or an
    /// unreachable network.
    pub fn new(client: Client, table: impl Into<String>) -> Self {
        Self::options().build(client, table)
    }

    /// Returns the default settings, to be changed before building a store.
    pub fn options() -> DynamoOptions {
        DynamoOptions::default()
    }

    /// Creates the table, billed by request, unless the table exists, and waits until the table can be used. Use this
    /// function in tests and for first steps. In production, create the table with
    /// [`CLOUDFORMATION`](DynamoStore::CLOUDFORMATION) or a similar template.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] if a table of that name has another primary key or another TTL attribute, or
    /// if the client may not create tables; otherwise the errors of any call.
    ///
    /// # Cancel safety
    /// The call may be repeated.
    pub async fn ensure_table(&self) -> Result<(), StoreError> {
        self.0.ensure_table().await
    }
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

store_of_shared!(DynamoStore);

struct DynamoInner {
    this: Weak<DynamoInner>,
    context: Arc<StoreContext>,
    client: Connections,
    /// The handle for upkeep, with separate connections; `None` in the handle for upkeep itself.
    upkeep: Option<Arc<DynamoInner>>,
    table: String,
    namespace: String,
    /// Largest clock skew, in milliseconds.
    skew: i64,
    response_timeout: Duration,
    waiting: Arc<WaiterTable>,
    /// True if the clock of this machine differed too much from DynamoDB's at the latest comparison.
    warned: Arc<AtomicBool>,
}

/// The client of each process: a forked child must not use its parent's connections.
struct Connections(PerProcess<Client>);

impl Connections {
    fn new(client: Client) -> Self {
        Self(PerProcess::new(client))
    }

    fn client(&self) -> &Client {
        self.0.here_or(apart_from)
    }
}

/// Returns a client that shares no connection with `client`. If `client` was given an HTTP client, the returned client
/// uses the same HTTP client.
fn apart_from(client: &Client) -> Client {
    match client.config().http_client() {
        Some(_) => client.clone(),
        // Each client makes its own default HTTP client. The cache of credentials is separate, too: if a blocked
        // runtime were filling a shared cache, this client would have to wait for that runtime.
        None => Client::from_conf(client.config().to_builder().identity_cache(IdentityCache::lazy().build()).build()),
    }
}

impl fmt::Debug for DynamoInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoStore")
            .field("table", &self.table)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// The attributes and values to which a condition or an update refers, as `#name` and `:name`.
#[derive(Default)]
struct Terms {
    names: Vec<&'static str>,
    values: Vec<(&'static str, AttributeValue)>,
}

impl Terms {
    fn names(mut self, names: &[&'static str]) -> Self {
        self.names.extend_from_slice(names);
        self
    }

    fn value(mut self, name: &'static str, value: AttributeValue) -> Self {
        self.values.push((name, value));
        self
    }
}

/// Adds the terms to a request. Requests refer to every attribute by `#name`, because some names are reserved words of
/// DynamoDB.
macro_rules! with_terms {
    ($request:expr, $terms:expr) => {{
        let Terms { names, values } = $terms;
        let request = names
            .into_iter()
            .fold($request, |request, name| request.expression_attribute_names(format!("#{name}"), name));
        values
            .into_iter()
            .fold(request, |request, (name, value)| request.expression_attribute_values(format!(":{name}"), value))
    }};
}

impl DynamoInner {
    fn name_of(&self, key: &Key) -> String {
        [&self.namespace, key.as_str()].concat()
    }

    fn now(&self) -> i64 {
        wall_millis(self.context.clock())
    }

    /// Returns the latest time that has passed by the clock of every machine.
    fn passed(&self, now: i64) -> i64 {
        // One more millisecond is subtracted, because a written time omits the fraction of a millisecond.
        now.saturating_sub(self.skew).saturating_sub(1)
    }

    /// Returns the duration until `time` has passed by the clock of every machine; zero only if it has passed.
    fn until(&self, time: i64, now: i64) -> Duration {
        Duration::from_millis(u64::try_from(time.saturating_sub(self.passed(now))).unwrap_or_default())
    }

    fn is_expired(&self, found: &FoundItem, now: i64) -> bool {
        found.expires_at <= self.passed(now)
    }

    /// Compares the clock of this machine with the `Date` of DynamoDB's answer. Warns once if the two clocks differ by
    /// more than `max_clock_skew`. `began` is the begin of the call, by the clock of this machine. No decision depends
    /// on this comparison.
    fn compare_clocks(&self, began: i64, tries: &Tries) {
        let Some(date) = tries.date() else { return };
        let earliest = date.saturating_mul(1000);
        let ahead = began.saturating_sub(earliest.saturating_add(999));
        let behind = earliest.saturating_sub(self.now());
        let off = ahead.max(behind);
        if off <= self.skew {
            self.warned.store(false, Ordering::Relaxed);
        } else if !self.warned.swap(true, Ordering::Relaxed) {
            let way = if ahead > behind { "ahead of" } else { "behind" };
            tracing::warn!(
                table = self.table,
                "the clock of this machine is at least {off} ms {way} DynamoDB's, more than `max_clock_skew` ({} ms): \
                 live leases may be taken over",
                self.skew
            );
        }
    }

    /// Returns the time at which a call of the store that begins now must end.
    fn deadline(&self) -> Instant {
        self.context.clock().now().saturating_add(self.response_timeout)
    }

    /// Returns the answer of `call` if it arrives before `until`, otherwise an error.
    async fn bounded<T>(&self, until: Instant, call: impl Future<Output = T>, tries: &Tries) -> Result<T, StoreError> {
        let (began, clock) = (self.now(), self.context.clock());
        let answer = race(call, clock.sleep(until.saturating_since(clock.now()))).await;
        self.compare_clocks(began, tries);
        answer.ok_or_else(|| match tries.none_open() {
            true => {
                StoreError::new(StoreErrorKind::Unavailable, "DynamoDB refused or was unreachable until the time limit")
            }
            false => StoreError::new(StoreErrorKind::Unconfirmed, "DynamoDB did not answer in time"),
        })
    }

    /// Writes `item` if `condition` holds.
    async fn put(
        &self,
        until: Instant,
        item: Attributes,
        condition: &str,
        terms: Terms,
    ) -> Result<WriteOutcome, StoreError> {
        let tries = Tries::default();
        let request = self
            .client
            .client()
            .put_item()
            .table_name(&self.table)
            .set_item(Some(item))
            .condition_expression(condition)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
            .return_consumed_capacity(ReturnConsumedCapacity::Total);
        let call = with_terms!(request, terms).customize().interceptor(tries.clone()).send();
        answer::written(self.bounded(until, call, &tries).await?, &tries)
    }

    /// Changes the item `name` by `update` if `condition` holds.
    async fn update(
        &self,
        until: Instant,
        name: &str,
        update: &str,
        condition: &str,
        terms: Terms,
    ) -> Result<WriteOutcome, StoreError> {
        let tries = Tries::default();
        let request = self
            .client
            .client()
            .update_item()
            .table_name(&self.table)
            .key(KEY, text(name))
            .update_expression(update)
            .condition_expression(condition)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
            .return_consumed_capacity(ReturnConsumedCapacity::Total);
        let call = with_terms!(request, terms).customize().interceptor(tries.clone()).send();
        answer::written(self.bounded(until, call, &tries).await?, &tries)
    }

    /// Returns the item called `name` with these `attributes` only, or with all attributes if `attributes` is empty.
    async fn get(
        &self,
        until: Instant,
        name: &str,
        attributes: &[&'static str],
    ) -> Result<Option<Attributes>, StoreError> {
        let tries = Tries::default();
        let request = self
            .client
            .client()
            .get_item()
            .table_name(&self.table)
            .key(KEY, text(name))
            .consistent_read(true)
            .return_consumed_capacity(ReturnConsumedCapacity::Total);
        let request = attributes
            .iter()
            .fold(request, |request, name| request.expression_attribute_names(format!("#{name}"), *name));
        let projection: Vec<_> = attributes.iter().map(|name| format!("#{name}")).collect();
        let request = request.set_projection_expression(Some(projection.join(", ")).filter(|it| !it.is_empty()));
        let call = request.customize().interceptor(tries.clone()).send();
        let answer = self.bounded(until, call, &tries).await?.map_err(|error| failure::failed(&error, &tries))?;
        Ok(answer::genuine(answer)?.item)
    }

    /// Returns the item that made a conditional write fail. If the answer holds no item, reads the item, to be sure
    /// that there is none.
    async fn met(&self, until: Instant, name: &str, met: Option<Attributes>) -> Result<Option<Attributes>, StoreError> {
        match met {
            Some(met) => Ok(Some(met)),
            None => self.get(until, name, &[]).await,
        }
    }

    async fn try_reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let (name, until) = (self.name_of(&request.key), self.deadline());
        let mut changed = None;
        // Each round answers from the record that it finds, or tries to replace that record.
        for look in 0..LOOKS {
            pause_before(look, self.context.clock()).await;
            let met = match changed.take() {
                Some(met) => met,
                None => match self.put_first(until, &name, request).await? {
                    WriteOutcome::Done => {
                        return Ok(Record::first(request).grant(request, false));
                    }
                    WriteOutcome::Refused(met) => match self.met(until, &name, met).await? {
                        Some(met) => met,
                        // The item was deleted meanwhile.
                        None => continue,
                    },
                },
            };
            let found = item::read(met).map_err(corrupt)?;
            let now = self.now();
            if self.is_expired(&found, now) {
                continue;
            }
            match found.record.admit(request, self.until(found.lapses_at, now)) {
                Admission::Answer(answer) => return Ok(answer.aged(ago(now, found.began_at))),
                Admission::Replace { with, takeover } => {
                    let times = Times::of(&with, request.ttl, now, self.skew).since(found.first_seen_at, now);
                    let item = item::write(&name, &with, times);
                    match self.replace(until, &found, item).await? {
                        WriteOutcome::Done => {
                            self.waiting.wake(&name);
                            return Ok(with.grant(request, takeover));
                        }
                        WriteOutcome::Refused(met) => changed = met,
                    }
                }
            }
        }
        Err(changes_too_often())
    }

    /// Writes the record of a first attempt, unless there is a record within its retention.
    async fn put_first(
        &self,
        until: Instant,
        name: &str,
        request: &ReserveRequest,
    ) -> Result<WriteOutcome, StoreError> {
        let now = self.now();
        let first = Record::first(request);
        let item = item::write(name, &first, Times::of(&first, request.ttl, now, self.skew));
        // The condition requires the same format, because times of another version may have another meaning.
        let terms = Terms::default()
            .names(&[KEY, FORMAT, EXPIRES_AT])
            .value("format", number(Parts::VERSION))
            .value("passed", number(self.passed(now)));
        self.put(until, item, "attribute_not_exists(#key) OR (#format = :format AND #expires_at <= :passed)", terms)
            .await
    }

    /// Replaces the record `met` by `item`, if the record is unchanged.
    async fn replace(&self, until: Instant, met: &FoundItem, item: Attributes) -> Result<WriteOutcome, StoreError> {
        let (condition, terms) = Self::unchanged(met);
        self.put(until, item, &condition, terms).await
    }

    /// Removes the record `met`, if the record is unchanged.
    async fn remove(&self, until: Instant, name: &str, met: &FoundItem) -> Result<WriteOutcome, StoreError> {
        let (condition, terms) = Self::unchanged(met);
        self.delete(until, with_terms!(self.deletion(name).condition_expression(condition), terms)).await
    }

    /// Removes the unreadable item `met`, if all its attributes are unchanged and no attribute of a record was added.
    async fn remove_damaged(&self, until: Instant, name: &str, met: &Attributes) -> Result<WriteOutcome, StoreError> {
        let (mut request, mut conditions) = (self.deletion(name), Vec::new());
        for (n, (attribute, value)) in met.iter().enumerate() {
            request = request.expression_attribute_names(format!("#a{n}"), attribute);
            request = request.expression_attribute_values(format!(":a{n}"), value.clone());
            conditions.push(format!("#a{n} = :a{n}"));
        }
        let ours = item::LISTED.into_iter().chain([RESULT, PURGE_AT]);
        for (n, attribute) in ours.filter(|attribute| !met.contains_key(*attribute)).enumerate() {
            request = request.expression_attribute_names(format!("#b{n}"), attribute);
            conditions.push(format!("attribute_not_exists(#b{n})"));
        }
        self.delete(until, request.condition_expression(conditions.join(" AND "))).await
    }

    fn deletion(&self, name: &str) -> DeleteItemFluentBuilder {
        let request = self.client.client().delete_item().table_name(&self.table).key(KEY, text(name));
        request
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
            .return_consumed_capacity(ReturnConsumedCapacity::Total)
    }

    async fn delete(&self, until: Instant, request: DeleteItemFluentBuilder) -> Result<WriteOutcome, StoreError> {
        let tries = Tries::default();
        let call = request.customize().interceptor(tries.clone()).send();
        answer::written(self.bounded(until, call, &tries).await?, &tries)
    }

    /// Returns the condition that the record `met` is unchanged.
    fn unchanged(met: &FoundItem) -> (String, Terms) {
        const SAME: &str =
            "#owner = :owner AND #state = :state AND #attempt = :attempt AND #attempts_used = :attempts_used";
        let parts = Parts::of(&met.record);
        let terms = Terms::default()
            .names(&[OWNER, STATE, ATTEMPT, ATTEMPTS_USED])
            .value("owner", binary(parts.owner))
            .value("state", text(parts.state))
            .value("attempt", number(parts.attempt))
            .value("attempts_used", number(parts.attempts_used));
        // The journal of a record that is neither pending nor finished changes only together with the owner token.
        if !met.record.is_pending() && !met.record.is_finished() {
            return (SAME.to_owned(), terms);
        }
        let terms = terms.names(&[RESULT]);
        let (stored, terms) = match &parts.result {
            Some(stored) => ("size(#result) = :length", terms.value("length", length(stored))),
            None => ("attribute_not_exists(#result)", terms),
        };
        // Messages that are marked as sent leave a finished record without another change.
        if met.record.is_finished() {
            return (format!("{SAME} AND {stored}"), terms);
        }
        let terms = terms
            .names(&[BEGUN, LAPSES_AT])
            .value("begun", AttributeValue::Bool(parts.begun))
            .value("lapses_at", number(met.lapses_at));
        // The condition includes the end of the lease, and whether the body has begun: if one of these two has
        // changed, the owner of the record still runs. The condition includes the length of the journal, because an
        // append may change the journal alone, and the replacement would undo that append.
        (format!("{SAME} AND #begun = :begun AND #lapses_at = :lapses_at AND {stored}"), terms)
    }

    /// Returns the terms of [`OWNED`].
    fn owned_terms(&self, lease: &Lease, now: i64) -> Terms {
        Terms::default()
            .names(&[OWNER, STATE, EXPIRES_AT])
            .value("owner", binary(&lease.owner.as_bytes()[..]))
            .value("pending", text("pending"))
            .value("passed", number(self.passed(now)))
    }

    /// Returns the terms of [`held`].
    fn held_terms(&self, lease: &Lease, now: i64) -> Terms {
        self.owned_terms(lease, now).names(&[ATTEMPT]).value("attempt", number(lease.attempt.into()))
    }

    /// Returns the record that made a conditional write fail, unless its retention has ended. An earlier copy of the
    /// same write may have made this record.
    async fn refusing(
        &self,
        until: Instant,
        name: &str,
        met: Option<Attributes>,
    ) -> Result<Option<FoundItem>, StoreError> {
        // An unreadable item is not the record of this attempt.
        let found = self.met(until, name, met).await?.and_then(|met| item::read(met).ok());
        Ok(found.filter(|found| !self.is_expired(found, self.now())))
    }

    /// Returns the answer to a finish or a release whose condition failed.
    async fn ended(
        &self,
        until: Instant,
        name: &str,
        lease: &Lease,
        met: Option<Attributes>,
        finished: bool,
    ) -> Result<Verdict, StoreError> {
        let found = self.refusing(until, name, met).await?;
        Ok(found.map_or(Verdict::Refused, |found| found.record.ended(lease, finished)))
    }

    /// Returns the terms and the times of a write that renews the lease.
    fn keeping(&self, lease: &Lease, now: i64) -> (Terms, Times) {
        let times = Times::of(&pending(lease), lease.ttl, now, self.skew);
        let terms = self
            .held_terms(lease, now)
            .names(&[LAPSES_AT, PURGE_AT])
            .value("lapses_at", number(times.lapses_at))
            .value("expires_at", number(times.expires_at))
            .value("purge_at", number(times.purge_at));
        (terms, times)
    }

    /// Writes into the record that the body of the attempt begins. The clock of this machine decides whether the lease
    /// holds, because a condition can't read DynamoDB's clock.
    async fn try_begin(&self, lease: &Lease) -> Result<Verdict, StoreError> {
        let (name, until) = (self.name_of(&lease.key), self.deadline());
        let now = self.now();
        let (terms, times) = self.keeping(lease, now);
        let terms = terms.names(&[BEGUN]).value("true", AttributeValue::Bool(true)).value("now", number(now));
        let update = "SET #begun = :true, #lapses_at = :lapses_at, #expires_at = :expires_at, #purge_at = :purge_at";
        // A late arrival of this write must not shorten a lease that a renewal has extended.
        let condition = format!("{} AND #lapses_at <= :lapses_at AND (#begun = :true OR #lapses_at > :now)", held());
        let met = match self.update(until, &name, update, &condition, terms).await? {
            WriteOutcome::Done => return Ok(Verdict::Applied),
            WriteOutcome::Refused(met) => met,
        };
        let found = self.refusing(until, &name, met).await?;
        if !found.is_some_and(|found| found.record.is_of(lease) && found.lapses_at > times.lapses_at) {
            return Ok(Verdict::Refused);
        }
        let terms = self.held_terms(lease, now).names(&[BEGUN]).value("true", AttributeValue::Bool(true));
        match self.update(until, &name, "SET #begun = :true", &held(), terms).await? {
            WriteOutcome::Done => Ok(Verdict::Applied),
            WriteOutcome::Refused(_) => Ok(Verdict::Refused),
        }
    }

    async fn renew_one(&self, until: Instant, lease: &Lease) -> Result<Verdict, StoreError> {
        let name = self.name_of(&lease.key);
        let (terms, times) = self.keeping(lease, self.now());
        let update = "SET #lapses_at = :lapses_at, #expires_at = :expires_at, #purge_at = :purge_at";
        // A delayed renewal must not shorten a lease that a later renewal has extended.
        let condition = format!("{} AND #lapses_at <= :lapses_at", held());
        match self.update(until, &name, update, &condition, terms).await? {
            WriteOutcome::Done => Ok(Verdict::Applied),
            WriteOutcome::Refused(met) => {
                let held = self.refusing(until, &name, met).await?.is_some_and(|found| {
                    found.record.is_of(lease) && found.record.is_pending() && found.lapses_at > times.lapses_at
                });
                Ok(if held { Verdict::Applied } else { Verdict::Refused })
            }
        }
    }

    /// Puts `journal` into the record, unless the record has a journal that is as long or longer, and renews the lease.
    async fn try_append(&self, lease: &Lease, journal: &Journal) -> Result<Verdict, StoreError> {
        let (name, until) = (self.name_of(&lease.key), self.deadline());
        let now = self.now();
        let (terms, times) = self.keeping(lease, now);
        let record = Record { journal: Some(journal.clone()), ..pending(lease) };
        // The journal leaves room in the item: a later attempt may have a longer holder, an operator's decision adds a
        // reason, and DynamoDB counts more bytes for an update than for the item.
        check_size(&item::write(&name, &record, times.since(now, now)), item::MAX_BYTES - BESIDE)?;
        let journaling = |terms: Terms| {
            let terms = terms.names(&[RESULT]).value("journal", binary(journal.bytes().clone()));
            terms.value("length", length(journal.bytes()))
        };
        let update =
            "SET #result = :journal, #lapses_at = :lapses_at, #expires_at = :expires_at, #purge_at = :purge_at";
        // A late arrival of this write must not shorten a lease that a renewal has extended.
        let condition = format!("{} AND #lapses_at <= :lapses_at AND {SHORTER}", held());
        let met = match self.update(until, &name, update, &condition, journaling(terms)).await? {
            WriteOutcome::Done => return Ok(Verdict::Applied),
            WriteOutcome::Refused(met) => met,
        };
        let is_held = |found: &FoundItem| found.record.is_of(lease) && found.record.is_pending();
        let mut found = self.refusing(until, &name, met).await?.filter(is_held);
        if found.as_ref().is_some_and(|found| !holds(found, journal) && found.lapses_at > times.lapses_at) {
            // A renewal of this lease has overtaken the append, so the update writes the journal alone.
            let (condition, terms) = (format!("{} AND {SHORTER}", held()), self.held_terms(lease, now));
            match self.update(until, &name, "SET #result = :journal", &condition, journaling(terms)).await? {
                WriteOutcome::Done => return Ok(Verdict::Applied),
                WriteOutcome::Refused(met) => found = self.refusing(until, &name, met).await?.filter(is_held),
            }
        }
        match found {
            // An earlier copy of this request, or a later request, has written the entry. The lease is renewed as well.
            Some(found) if holds(&found, journal) => self.renew_one(until, lease).await,
            _ => Ok(Verdict::Refused),
        }
    }

    /// Renews `leases`, a limited number at a time. A slow renewal delays no other renewal.
    async fn renew_each(&self, leases: &[Lease], answer: &Answers<'_>) -> Result<(), StoreError> {
        let clock = self.context.clock();
        let mut waiting = leases.iter().enumerate();
        let mut under_way: Vec<Renewal<'_>> = Vec::new();
        let mut outcome = Ok(());
        poll_fn(|cx| {
            loop {
                // Polls the calls in flight. A call that has taken [`SLOW`] goes on, but another call may start.
                under_way.retain_mut(|renewal| match renewal.call.as_mut().poll(cx) {
                    Poll::Ready(Ok(write)) => {
                        answer(renewal.at, write);
                        false
                    }
                    Poll::Ready(Err(error)) => {
                        outcome = Err(error);
                        false
                    }
                    Poll::Pending => {
                        if let Some(quick) = &mut renewal.quick
                            && quick.as_mut().poll(cx).is_ready()
                        {
                            renewal.quick = None;
                        }
                        true
                    }
                });
                // Starts further calls, up to [`RENEWED_AT_ONCE`] quick calls in flight.
                let quick = under_way.iter().filter(|renewal| renewal.quick.is_some()).count();
                let before = under_way.len();
                let more = waiting.by_ref().take(RENEWED_AT_ONCE.saturating_sub(quick));
                under_way.extend(more.map(|(at, lease)| Renewal {
                    at,
                    call: Box::pin(self.renew_one(self.deadline(), lease)),
                    quick: Some(clock.sleep(SLOW)),
                }));
                // If calls were added, the loop polls them before this future waits.
                if under_way.len() == before {
                    return if under_way.is_empty() { Poll::Ready(()) } else { Poll::Pending };
                }
            }
        })
        .await;
        outcome
    }

    fn inspection(&self, found: FoundItem, now: i64) -> Inspection {
        let expires_in = self.until(found.expires_at, now);
        let lapses_in = found.record.is_pending().then(|| self.until(found.lapses_at, now));
        let [first_seen, began] = [found.first_seen_at, found.began_at].map(|at| Some(ago(now, at)));
        Inspection::new(found.record, expires_in, lapses_in).since(first_seen, began)
    }

    /// Reads one page of a scan. DynamoDB bills the size of all items that the page reads, including their results.
    async fn scan(&self, filter: &Filter) -> Result<Page, StoreError> {
        if filter.undecided && !filter.scan {
            let message = "DynamoDB has no index of undecided records: ask for a scan of all items (`Filter::scan`), for \
                           which it charges";
            return Err(StoreError::new(StoreErrorKind::Unsupported, message));
        }
        let tries = Tries::default();
        let prefix = [&self.namespace, &*filter.prefix()].concat();
        let is_selective = filter.scope.is_some() || filter.is_selective();
        let request = self
            .client
            .client()
            .scan()
            .table_name(&self.table)
            .consistent_read(true)
            .limit(if is_selective { READ_AT_ONCE } else { i32::try_from(filter.most()).unwrap_or(READ_AT_ONCE) })
            .filter_expression("begins_with(#key, :prefix)")
            .expression_attribute_values(":prefix", text(&prefix))
            .projection_expression(item::LISTED.map(|name| format!("#{name}")).join(", "))
            .return_consumed_capacity(ReturnConsumedCapacity::Total);
        let request = item::LISTED
            .iter()
            .fold(request, |request, name| request.expression_attribute_names(format!("#{name}"), *name));
        let request =
            filter.after.iter().fold(request, |request, after| request.exclusive_start_key(KEY, text(after.as_str())));
        let call = request.customize().interceptor(tries.clone()).send();
        let answer = self.bounded(self.deadline(), call, &tries).await?;
        let answer = answer::genuine(answer.map_err(|error| failure::failed(&error, &tries))?)?;
        let (now, mut page) = (self.now(), Page::default());
        for item in answer.items.unwrap_or_default() {
            if page.records.len() == filter.most() {
                // The page is full. A scan can begin after any key, so the next page begins after the last listed key.
                page.next = page.records.last().map(|(key, _)| Cursor::new(self.name_of(key)));
                return self.examined(filter, page).await;
            }
            let name = item.get(KEY).and_then(|name| name.as_s().ok()).cloned().unwrap_or_default();
            let found = item::read_without_result(item)
                .map(|found| (!self.is_expired(&found, now)).then(|| self.inspection(found, now)))
                .or_else(|why| Ok::<_, StoreError>(Some(Inspection::unexamined(&why))));
            page.add(filter, name.strip_prefix(&self.namespace).unwrap_or_default(), found);
        }
        let last = answer.last_evaluated_key.and_then(|mut last| last.remove(KEY));
        page.next = last.and_then(|last| last.as_s().ok().map(|last| Cursor::new(last.as_str())));
        self.examined(filter, page).await
    }

    /// Completes `page`: a scan leaves out results, so the whole item of each unreadable record is read separately.
    async fn examined(&self, filter: &Filter, mut page: Page) -> Result<Page, StoreError> {
        for key in page.damaged() {
            let found = self.examine(self.deadline(), &self.name_of(&key)).await?;
            page.show(filter, &key, found.map(|(found, _)| found));
        }
        Ok(page)
    }

    /// Ends an attempt with the result in `record`, by an update. An update keeps the time at which the key was first
    /// seen: the lease does not contain that time.
    async fn finish_in_place(
        &self,
        until: Instant,
        name: &str,
        lease: &Lease,
        record: &Record,
        times: Times,
        now: i64,
    ) -> Result<WriteOutcome, StoreError> {
        let parts = Parts::of(record);
        let terms = self
            .held_terms(lease, now)
            .names(&[PURGE_AT, LAPSES_AT, LEASE_MS, TTL_MS, ON_CRASH_FAIL, BEGUN])
            .value("state", text(parts.state))
            .value("expires_at", number(times.expires_at))
            .value("purge_at", number(times.purge_at));
        // The attribute `result` of the pending record is its journal. A stored result replaces the journal; otherwise
        // the update removes the journal.
        let terms = terms.names(&[RESULT]);
        let (result, journal, terms) = match (parts.codec, parts.result, parts.result_bytes) {
            (Some(codec), Some(result), _) => (
                ", #codec = :codec, #result = :result",
                "",
                terms.names(&[CODEC]).value("codec", text(codec)).value("result", binary(result)),
            ),
            (_, _, Some(bytes)) => (
                ", #result_bytes = :result_bytes",
                ", #result",
                terms.names(&[RESULT_BYTES]).value("result_bytes", number(bytes)),
            ),
            _ => ("", ", #result", terms),
        };
        let update = format!(
            "SET #state = :state, #expires_at = :expires_at, #purge_at = :purge_at{result} \
             REMOVE #lapses_at, #lease_ms, #ttl_ms, #on_crash_fail, #begun{journal}"
        );
        self.update(until, name, &update, &held(), terms).await
    }

    /// Ends an attempt like [`finish_in_place`](Self::finish_in_place), if the record is nearly as large as an item can
    /// be. DynamoDB counts more bytes for an update than for the resulting item, so this function reads the times of
    /// the item, and then writes the whole item.
    async fn finish_anew(
        &self,
        until: Instant,
        name: &str,
        lease: &Lease,
        record: &Record,
        times: Times,
        now: i64,
    ) -> Result<WriteOutcome, StoreError> {
        let found = self.get(until, name, &[FIRST_SEEN_AT, BEGAN_AT]).await?.unwrap_or_default();
        let time = |name: &str| found.get(name).and_then(integer).unwrap_or(now);
        let item = item::write(name, record, times.since(time(FIRST_SEEN_AT), time(BEGAN_AT)));
        check_size(&item, item::MAX_BYTES)?;
        self.put(until, item, &held(), self.held_terms(lease, now)).await
    }

    async fn try_finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        let (name, until) = (self.name_of(&lease.key), self.deadline());
        let now = self.now();
        let record = Record::after(lease, finish.state());
        let times = Times::of(&record, lease.ttl, now, self.skew);
        let item = item::write(&name, &record, times);
        check_size(&item, item::MAX_BYTES)?;
        let written = match item::size(&item) > item::MAX_BYTES - BESIDE {
            false => self.finish_in_place(until, &name, lease, &record, times, now).await?,
            true => self.finish_anew(until, &name, lease, &record, times, now).await?,
        };
        match written {
            WriteOutcome::Done => {
                self.waiting.wake(&name);
                Ok(Verdict::Applied)
            }
            WriteOutcome::Refused(met) => self.ended(until, &name, lease, met, true).await,
        }
    }

    async fn try_release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        let (name, until) = (self.name_of(&lease.key), self.deadline());
        let now = self.now();
        let state = release.state();
        let state_name = text(state.name());
        // The update does not set the attempt number, because a caller that never got the answer to its reservation
        // does not know that number. The attribute `result` remains: it is the journal, for the next attempt.
        let times = Times::of(&Record::after(lease, state), lease.ttl, now, self.skew);
        let terms = self
            .owned_terms(lease, now)
            .names(&[ATTEMPTS_USED, PURGE_AT, LAPSES_AT, LEASE_MS, TTL_MS, ON_CRASH_FAIL, BEGUN])
            .value("state", state_name)
            .value("refund", number(i64::from(!release.counts())))
            .value("expires_at", number(times.expires_at))
            .value("purge_at", number(times.purge_at));
        let update = "SET #state = :state, #attempts_used = #attempts_used - :refund, #expires_at = :expires_at, \
                      #purge_at = :purge_at REMOVE #lapses_at, #lease_ms, #ttl_ms, #on_crash_fail, #begun";
        match self.update(until, &name, update, OWNED, terms).await? {
            WriteOutcome::Done => {
                self.waiting.wake(&name);
                Ok(Verdict::Applied)
            }
            WriteOutcome::Refused(met) => self.ended(until, &name, lease, met, false).await,
        }
    }

    async fn try_decide(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        let (name, until) = (self.name_of(&decision.key), self.deadline());
        let mut met = self.get(until, &name, &[]).await?;
        for look in 0..LOOKS {
            pause_before(look, self.context.clock()).await;
            let Some(item) = met else { return Ok(DecisionAnswer::NoRecord) };
            let Ok(found) = item::read(item) else { return self.decide_damaged(decision).await };
            let now = self.now();
            if self.is_expired(&found, now) {
                return Ok(DecisionAnswer::NoRecord);
            }
            let written = match found.record.decide(decision, self.until(found.lapses_at, now)) {
                Ruling::Answer(refused) => return Ok(refused),
                Ruling::Replace(with) => {
                    let times = Times::until(found.expires_at, self.skew).since(found.first_seen_at, found.began_at);
                    let item = item::write(&name, &with, times);
                    check_size(&item, item::MAX_BYTES)?;
                    self.replace(until, &found, item).await?
                }
                Ruling::Remove => self.remove(until, &name, &found).await?,
            };
            met = match written {
                WriteOutcome::Done => {
                    self.waiting.wake(&name);
                    return Ok(DecisionAnswer::Applied);
                }
                WriteOutcome::Refused(met) => self.met(until, &name, met).await?,
            };
        }
        Err(changes_too_often())
    }

    /// Applies an operator's decision to an unreadable item.
    async fn decide_damaged(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        let (name, until) = (self.name_of(&decision.key), self.deadline());
        for look in 0..LOOKS {
            pause_before(look, self.context.clock()).await;
            let Some((found, item)) = self.examine(until, &name).await? else { return Ok(DecisionAnswer::NoRecord) };
            match found.decide(decision) {
                Ruling::Answer(refused) => return Ok(refused),
                Ruling::Remove if found.damage.is_some() => {
                    if let WriteOutcome::Done = self.remove_damaged(until, &name, &item).await? {
                        self.waiting.wake(&name);
                        return Ok(DecisionAnswer::Applied);
                    }
                }
                // The item is readable now, so the operator has to repeat the decision.
                Ruling::Remove | Ruling::Replace(_) => break,
            }
        }
        Err(changes_too_often())
    }

    /// Returns the record called `name` as an operator sees it, and its item; `None` if the record has expired.
    async fn examine(&self, until: Instant, name: &str) -> Result<Option<(Inspection, Attributes)>, StoreError> {
        let Some(item) = self.get(until, name, &[]).await? else { return Ok(None) };
        let now = self.now();
        // A copy is read, because reading an item removes its result.
        let found = match item::read(item.clone()) {
            Ok(found) if self.is_expired(&found, now) => return Ok(None),
            Ok(found) => self.inspection(found, now),
            Err(why) => item::damaged(&item, why),
        };
        Ok(Some((found, item)))
    }

    /// Returns the record called `name`, unless it has expired.
    async fn look(&self, name: &str) -> Result<Option<Inspection>, StoreError> {
        let Some(item) = self.get(self.deadline(), name, &[]).await? else { return Ok(None) };
        let found = item::read(item).map_err(corrupt)?;
        let now = self.now();
        Ok((!self.is_expired(&found, now)).then(|| self.inspection(found, now)))
    }

    /// Reads the record again and again until attempt number `attempt` is no longer pending. Returns the last record
    /// read.
    async fn watch(&self, name: &str, attempt: u32) -> Result<Option<Inspection>, StoreError> {
        let waiter = self.waiting.join(name);
        let mut pause = FIRST_PAUSE;
        loop {
            // The wake-up is enabled before the read, so that an end of the attempt in between is not missed.
            let mut woken = pin!(waiter.woken());
            woken.as_mut().enable();
            match self.look(name).await {
                Ok(Some(found)) if found.record.is_pending() && found.attempt() == attempt => {}
                Ok(found) => return Ok(found),
                Err(error) if error.is_transient() => {}
                Err(error) => return Err(error),
            }
            race(woken, self.context.clock().sleep(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// A renewal in flight. `at` is the index of the renewed lease.
struct Renewal<'a> {
    at: usize,
    call: Pin<Box<dyn Future<Output = Result<Verdict, StoreError>> + Send + 'a>>,
    /// Timer that ends when the renewal has taken [`SLOW`]; `None` afterwards.
    quick: Option<Sleep>,
}

/// Number of bytes that DynamoDB may count for an update in addition to the size of the item.
const BESIDE: usize = 4 * 1024;
/// Largest journal of a record: it leaves room for the other attributes of the item, and for what an update counts.
const MAX_JOURNAL_BYTES: usize = item::MAX_BYTES - 2 * BESIDE;
/// Number of items that one page of a list reads if the filter may leave items out.
const READ_AT_ONCE: i32 = 1000;

/// Returns the time from `at` to `now`, both in milliseconds since 1970; zero if `at` is later.
fn ago(now: i64, at: i64) -> Duration {
    Duration::from_millis(u64::try_from(now.saturating_sub(at)).unwrap_or_default())
}

const OWNED: &str = "#owner = :owner AND #state = :pending AND #expires_at > :passed";
/// Condition of an append that the present journal is shorter. A longer journal is a later one, and a late copy of an
/// earlier request must not replace it.
const SHORTER: &str = "(attribute_not_exists(#result) OR size(#result) < :length)";

/// Returns the condition that the item is the pending record of this attempt, for a renewal or a finish.
fn held() -> String {
    format!("{OWNED} AND #attempt = :attempt")
}

/// Returns the record of `lease` while its attempt runs.
fn pending(lease: &Lease) -> Record {
    let Lease { duration, ttl, on_crash, .. } = *lease;
    Record::after(lease, State::Pending { lease: duration, ttl, on_crash, begun: false })
}

/// Returns whether the journal in `found` has the entries of `journal`: it is at least as long.
fn holds(found: &FoundItem, journal: &Journal) -> bool {
    found.record.journal.as_ref().is_some_and(|present| present.bytes().len() >= journal.bytes().len())
}

/// Returns the length of a journal, as a condition compares it with `size(#result)`.
fn length(journal: &Bytes) -> AttributeValue {
    number(i64::try_from(journal.len()).unwrap_or(i64::MAX))
}

impl Store for DynamoInner {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.upkeep.as_ref().map_or_else(|| self.handle(), |upkeep| Arc::clone(upkeep) as _)
    }

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    fn context(&self) -> &StoreContext {
        &self.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_begin(lease))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(self.renew_each(leases, answer))
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_append(lease, journal))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_finish(lease, finish))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_release(lease, release))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let name = self.name_of(key);
            match race(self.watch(&name, attempt), self.context.clock().sleep(at_most)).await {
                Some(ended) => ended,
                None => self.look(&name).await,
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let name = self.name_of(key);
            match self.look(&name).await {
                Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                    Ok(self.examine(self.deadline(), &name).await?.map(|(found, _)| found))
                }
                found => found,
            }
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(self.try_decide(decision))
    }

    /// Does nothing: DynamoDB removes expired records, by the time-to-live of the table.
    fn purge(&self, _: u32) -> StoreFuture<'_, u64> {
        StoreFuture::ready(Ok(0))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(self.scan(filter))
    }

    /// Reads a key that no record has, and sends two conditional writes, which DynamoDB refuses.
    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            let (name, until) = ([&self.namespace, "ping"].concat(), self.deadline());
            // Each kind of request needs a separate permission. DynamoDB checks the permission before the condition,
            // which never holds, so nothing is written.
            let never = "attribute_exists(#key) AND attribute_not_exists(#key)";
            let terms = || Terms::default().names(&[KEY]);
            self.put(until, Attributes::from([(KEY.to_owned(), text(&name))]), never, terms()).await?;
            self.update(until, &name, "REMOVE #lapses_at", never, terms().names(&[LAPSES_AT])).await?;
            self.get(until, &name, &[KEY]).await?;
            Ok(())
        })
    }
}

/// Refuses an item of more than `at_most` bytes.
fn check_size(item: &Attributes, at_most: usize) -> Result<(), StoreError> {
    let size = item::size(item);
    if size > at_most {
        let message = format!("the record would have {size} bytes, and may have {at_most}");
        return Err(StoreError::new(StoreErrorKind::TooLarge, message));
    }
    Ok(())
}

fn changes_too_often() -> StoreError {
    looked_in_vain(StoreErrorKind::Unavailable, "kept changing")
}

fn corrupt(error: FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// Returns the record in an untrusted item, the time at which its lease lapses and the end of its retention. For tests.
///
/// # Errors
/// If the item is no record.
#[cfg(feature = "conformance")]
pub fn read_item(item: Attributes) -> Result<(Record, i64, i64), StoreError> {
    item::read(item).map(|found| (found.record, found.lapses_at, found.expires_at)).map_err(corrupt)
}
