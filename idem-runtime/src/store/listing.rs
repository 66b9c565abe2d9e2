//! Lists of records for operators, page by page, and counts of records.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use super::{Inspection, StoreError, StoreErrorKind};
use crate::key::Key;
use crate::record::StoredResult;
use crate::record::standing::Standing;

/// Selects the records that [`Store::list`](crate::Store::list) returns.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::store::{Filter, Standing};
///
/// let stuck = Filter::new().standing(Standing::Lapsed).scope("shop::pay").older_than(Duration::from_secs(300));
/// assert!(stuck.takes(Standing::Lapsed) && !stuck.takes(Standing::Running));
/// assert!(Filter::new().takes(Standing::Running), "without a standing, all of them");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Filter {
    /// Standings of the selected records; empty for all standings.
    pub standings: Vec<Standing>,
    /// Scope of the selected records; `None` for all scopes.
    pub scope: Option<Box<str>>,
    /// True if only records are selected that [wait for a decision](Inspection::waits_for_decision).
    pub undecided: bool,
    /// True if only finished records are selected that hold messages which are not marked as sent.
    pub unsent: bool,
    /// Shortest time since the latest attempt of a selected record began, by the store's clock.
    pub older_than: Option<Duration>,
    /// Part of the selected keys, as errors and logs show a key (`<scope>/<text>`); `None` for all keys.
    pub contains: Option<Box<str>>,
    /// Value of `max_attempts` that the selected records have exhausted; `None` for all records.
    pub attempts_exhausted: Option<NonZeroU32>,
    /// Largest number of records in a page. A page of a scan may hold more.
    pub limit: u32,
    /// Cursor of the previous page; `None` for the first page.
    pub after: Option<Cursor>,
    /// True if a store without an order of its keys may scan all keys.
    pub scan: bool,
}

impl Filter {
    /// Upper bound of [`limit`](Self::limit).
    pub const MAX_LIMIT: u32 = 1000;

    /// Selects all records, in pages of at most 100.
    pub const fn new() -> Self {
        Self {
            standings: Vec::new(),
            scope: None,
            undecided: false,
            unsent: false,
            older_than: None,
            contains: None,
            attempts_exhausted: None,
            limit: 100,
            after: None,
            scan: false,
        }
    }

    /// Selects only records with this standing. Several calls select several standings.
    pub fn standing(mut self, standing: Standing) -> Self {
        self.standings.push(standing);
        self
    }

    /// Selects only records whose effect may have happened although no result is recorded: lapsed, interrupted and
    /// damaged records.
    pub fn uncertain(self) -> Self {
        self.standing(Standing::Lapsed).standing(Standing::Interrupted).standing(Standing::Damaged)
    }

    /// Selects only records that [wait for the decision](Inspection::waits_for_decision) of an operator. SQLite and
    /// PostgreSQL find these records by an index of their own.
    pub fn undecided(self) -> Self {
        Self { undecided: true, ..self }
    }

    /// Selects only finished records with [messages](crate::Attempt::outbox) that are not marked as sent. No store has
    /// an index of these records: the scope and the age narrow the search down.
    pub fn unsent(self) -> Self {
        Self { unsent: true, ..self }
    }

    /// Selects only records under this scope.
    pub fn scope(self, scope: impl Into<Box<str>>) -> Self {
        Self { scope: Some(scope.into()), ..self }
    }

    /// Selects only records whose latest attempt began at least this long ago. Also selects damaged records, whose age
    /// is unknown.
    pub fn older_than(self, age: Duration) -> Self {
        Self { older_than: Some(age), ..self }
    }

    /// Selects only records whose key contains `text`, as errors and logs show a key (`<scope>/<text>`). The comparison
    /// is case-sensitive.
    pub fn contains(self, text: impl Into<Box<str>>) -> Self {
        Self { contains: Some(text.into()), ..self }
    }

    /// Selects only records whose next delivery ends with [`Error::AttemptsExhausted`](crate::Error::AttemptsExhausted)
    /// if the handler has this `max_attempts`. A record holds the number of its attempts, but not the limit.
    pub fn attempts_exhausted(self, max_attempts: NonZeroU32) -> Self {
        Self { attempts_exhausted: Some(max_attempts), ..self }
    }

    /// Sets the largest number of records in a page (default: 100), from 1 to [`MAX_LIMIT`](Self::MAX_LIMIT). A page of
    /// a [`scan`](Self::scan) holds all records that one step of the scan finds.
    pub fn limit(self, limit: u32) -> Self {
        Self { limit: limit.clamp(1, Self::MAX_LIMIT), ..self }
    }

    /// Selects the page that follows the page with this cursor; `None` selects the first page.
    pub fn after(self, cursor: impl Into<Option<Cursor>>) -> Self {
        Self { after: cursor.into(), ..self }
    }

    /// Lets a store without an order of its keys scan all keys, as Redis does with `SCAN`. A scan may miss records that
    /// are written meanwhile, and may return the same record twice.
    pub fn scan(self) -> Self {
        Self { scan: true, ..self }
    }

    /// Returns whether the filter selects records with this standing.
    pub fn takes(&self, standing: Standing) -> bool {
        self.standings.is_empty() || self.standings.contains(&standing)
    }

    /// Returns whether the filter selects a record with this key and inspection. [`limit`](Self::limit) and
    /// [`after`](Self::after) have no influence.
    pub fn matches(&self, key: &Key, inspection: &Inspection) -> bool {
        let in_scope = self.scope.as_deref().is_none_or(|scope| key.scope() == scope);
        let is_old = self.older_than.is_none_or(|age| match inspection.began {
            Some(began) => began >= age,
            None => inspection.damage.is_some(),
        });
        let has_text = self.contains.as_deref().is_none_or(|text| key.shown_whole().contains(text));
        let is_exhausted = self.attempts_exhausted.is_none_or(|max_attempts| {
            inspection.damage.is_none()
                && inspection.record.is_exhausted(max_attempts, inspection.lapses_in.unwrap_or_default())
        });
        let is_wanted = (!self.undecided || inspection.waits_for_decision())
            && (!self.unsent || inspection.record.state.result().is_some_and(StoredResult::has_messages));
        in_scope && is_old && has_text && is_exhausted && is_wanted && self.takes(inspection.standing())
    }

    /// Returns whether the filter may leave out many of the records under its [prefix](Self::prefix). A store then
    /// reads more records for a page than the page holds.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn is_selective(&self) -> bool {
        !self.standings.is_empty()
            || self.undecided
            || self.unsent
            || self.older_than.is_some()
            || self.contains.is_some()
            || self.attempts_exhausted.is_some()
    }

    /// Largest number of records in a page, as a `usize`.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn most(&self) -> usize {
        self.limit.clamp(1, Self::MAX_LIMIT) as usize
    }

    /// Returns the common beginning of all stored keys that the filter may select.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn prefix(&self) -> String {
        match &self.scope {
            Some(scope) => format!("{}{scope}/", Key::STORED),
            None => Key::STORED.to_owned(),
        }
    }
}

impl Default for Filter {
    fn default() -> Self {
        Self::new()
    }
}

/// End of a page and start of the next page. A cursor is a text of one store: the text can be stored and parsed again,
/// but has no meaning for another store. A cursor contains a key or a position.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Cursor(Box<str>);

impl Cursor {
    /// Makes a cursor from a store's text.
    pub fn new(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// Text of the cursor.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the error for a cursor that another store made.
    pub fn is_foreign(&self) -> StoreError {
        let message = "the cursor is not of this store; begin without one";
        StoreError::new(StoreErrorKind::Unsupported, message)
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Cursor {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self::new(text))
    }
}

/// A page of the records that a [`Filter`] selects.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Page {
    /// Records without their results ([`StoredResult::LeftOut`](crate::record::StoredResult::LeftOut)). A page may hold
    /// fewer records than the limit, or no record, although more pages follow.
    pub records: Vec<(Key, Inspection)>,
    /// Number of skipped entries that are not records: another program wrote them.
    pub unreadable: u64,
    /// Start of the next page; `None` after the last page.
    pub next: Option<Cursor>,
}

impl Page {
    /// Makes a page with these records. `next` is the start of the next page.
    pub const fn new(records: Vec<(Key, Inspection)>, next: Option<Cursor>) -> Self {
        Self { records, unreadable: 0, next }
    }

    /// Returns the keys of the records in the page that can't be read. The store must inspect a damaged record again,
    /// because a list reads no results.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn damaged(&self) -> Vec<Key> {
        self.records.iter().filter(|(_, found)| found.damage.is_some()).map(|(key, _)| key.clone()).collect()
    }

    /// Replaces the entry of `key` by `now`, the record that a second read found. Removes the entry if the record is
    /// gone or `filter` no longer selects it.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn show(&mut self, filter: &Filter, key: &Key, now: Option<Inspection>) {
        let now = now.filter(|now| filter.matches(key, now));
        self.records.retain_mut(|(shown, found)| match &now {
            _ if shown != key => true,
            Some(now) => {
                found.clone_from(now);
                true
            }
            None => false,
        });
    }

    /// Adds the entry that a store holds under the key `stored`, if `filter` selects the entry. `Ok(None)` is an
    /// expired entry.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn add<E>(&mut self, filter: &Filter, stored: &str, entry: Result<Option<Inspection>, E>) {
        let key = Some(stored).filter(|key| key.starts_with(Key::STORED)).and_then(|key| key.parse::<Key>().ok());
        match (key, entry) {
            (_, Ok(None)) => {}
            (Some(key), Ok(Some(inspection))) => {
                if filter.matches(&key, &inspection) {
                    self.records.push((key, inspection));
                }
            }
            _ => self.unreadable += 1,
        }
    }
}

/// Number of records of a store, by scope and by standing.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Counts of each scope.
    pub scopes: BTreeMap<Box<str>, Counts>,
    /// Number of entries that are not records: another program wrote them.
    pub unreadable: u64,
    /// Position at which the count stopped; `None` if all records were counted.
    pub next: Option<Cursor>,
}

impl Stats {
    /// Returns the counts of all scopes together.
    pub fn total(&self) -> Counts {
        let mut total = Counts::default();
        for counts in self.scopes.values() {
            for (all, of_scope) in total.0.iter_mut().zip(counts.0) {
                *all += of_scope;
            }
        }
        total
    }

    pub(super) fn count(&mut self, page: &Page) {
        self.unreadable += page.unreadable;
        for (key, inspection) in &page.records {
            let counts = match self.scopes.get_mut(key.scope()) {
                Some(counts) => counts,
                None => self.scopes.entry(key.scope().into()).or_default(),
            };
            counts.0[inspection.standing() as usize] += 1;
        }
    }
}

/// Number of records by standing.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts([u64; Standing::ALL.len()]);

impl Counts {
    /// Number of records with this standing.
    pub fn of(&self, standing: Standing) -> u64 {
        self.0[standing as usize]
    }

    /// Number of all records.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OwnerToken, Record, State};

    #[test]
    fn records_are_counted_by_scope_and_standing() {
        let inspection = |state| {
            let record = Record::new(OwnerToken::from_bytes([1; 16]), 1, state);
            Inspection::new(record, Duration::from_secs(1), None).since(None, Some(Duration::from_secs(9)))
        };
        let mut page = Page::default();
        let all = Filter::new();
        for (key, state) in [("1/a/x", State::Released), ("1/a/y", State::Interrupted), ("1/b/x", State::Released)] {
            page.add::<()>(&all, key, Ok(Some(inspection(state))));
        }
        page.add::<()>(&all, "1/a/gone", Ok(None));
        page.add(&all, "1/a/damaged", Err(()));
        page.add::<()>(&all, "no key", Ok(Some(inspection(State::Released))));
        let mut stats = Stats::default();
        stats.count(&page);
        stats.count(&page);
        assert_eq!((stats.scopes.len(), stats.unreadable), (2, 4));
        assert_eq!(stats.scopes["a"].of(Standing::Released), 2);
        assert_eq!((stats.total().of(Standing::Interrupted), stats.total().total()), (2, 6));
        for (filter, shown) in [
            (Filter::new().uncertain(), 1),
            (Filter::new().scope("a"), 2),
            (Filter::new().scope("a").standing(Standing::Completed), 0),
            (Filter::new().older_than(Duration::from_secs(9)), 3),
            (Filter::new().older_than(Duration::from_secs(10)), 0),
            (Filter::new().contains("a/x"), 1),
            (Filter::new().contains("1/a"), 0),
            (Filter::new().attempts_exhausted(NonZeroU32::MIN), 2),
            (Filter::new().attempts_exhausted(NonZeroU32::MIN.saturating_add(1)), 0),
        ] {
            let matching = page.records.iter().filter(|(key, found)| filter.matches(key, found)).count();
            assert_eq!(matching, shown, "{filter:?}");
        }
    }
}
