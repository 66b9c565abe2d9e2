//! Records as a person looks through them: page by page, and counted.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{Inspection, StoreError, StoreErrorKind};
use crate::key::Key;
use crate::record::request::Standing;

/// Which records [`Store::list`](crate::Store::list) shows.
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
    /// Only records that stand like one of these; empty for all.
    pub standings: Vec<Standing>,
    /// Only records under this scope.
    pub scope: Option<Box<str>>,
    /// Only records whose latest attempt began at least this long ago, by the store's clock.
    pub older_than: Option<Duration>,
    /// How many records a page has at most, unless it is one of a scan.
    pub limit: u32,
    /// Where the page begins: at the end of the page that had this cursor.
    pub after: Option<Cursor>,
    /// Whether a store without any order of its keys may walk through all of them.
    pub scan: bool,
}

impl Filter {
    /// The most records of a page.
    pub const MAX_LIMIT: u32 = 1000;

    /// All records, a hundred in a page.
    pub const fn new() -> Self {
        Self { standings: Vec::new(), scope: None, older_than: None, limit: 100, after: None, scan: false }
    }

    /// Only records that stand like this; called more than once, like one of these.
    pub fn standing(mut self, standing: Standing) -> Self {
        self.standings.push(standing);
        self
    }

    /// Only records whose effect may have happened without their knowing: lapsed, interrupted and damaged ones.
    pub fn uncertain(self) -> Self {
        self.standing(Standing::Lapsed).standing(Standing::Interrupted).standing(Standing::Damaged)
    }

    /// Only records under this scope.
    pub fn scope(self, scope: impl Into<Box<str>>) -> Self {
        Self { scope: Some(scope.into()), ..self }
    }

    /// Only records whose latest attempt began at least this long ago, and damaged ones, whose age is unknown.
    pub fn older_than(self, age: Duration) -> Self {
        Self { older_than: Some(age), ..self }
    }

    /// How many records a page has at most (default: 100): 1 to [`MAX_LIMIT`](Self::MAX_LIMIT). A page of a
    /// [`scan`](Self::scan) has what one step of it finds.
    pub fn limit(self, limit: u32) -> Self {
        Self { limit: limit.clamp(1, Self::MAX_LIMIT), ..self }
    }

    /// The page that follows the one with this cursor; `None` for the first one.
    pub fn after(self, cursor: impl Into<Option<Cursor>>) -> Self {
        Self { after: cursor.into(), ..self }
    }

    /// Lets a store without any order of its keys walk through all of them, as Redis does with `SCAN`. Records that are
    /// written meanwhile may then be missed, and others may be shown twice.
    pub fn scan(self) -> Self {
        Self { scan: true, ..self }
    }

    /// Whether a record that stands like this is shown.
    pub fn takes(&self, standing: Standing) -> bool {
        self.standings.is_empty() || self.standings.contains(&standing)
    }

    /// Whether a record is shown that was looked at like this, under this key. The page is not asked about.
    pub fn matches(&self, key: &Key, inspection: &Inspection) -> bool {
        let in_scope = self.scope.as_deref().is_none_or(|scope| key.scope() == scope);
        let is_old = self.older_than.is_none_or(|age| match inspection.began {
            Some(began) => began >= age,
            None => inspection.damage.is_some(),
        });
        in_scope && is_old && self.takes(inspection.standing())
    }

    /// How many records a page has at most, as a number of items.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn most(&self) -> usize {
        self.limit.clamp(1, Self::MAX_LIMIT) as usize
    }

    /// What every stored key in question begins with.
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

/// Where a page ends and the next one begins. A text of the store's own: it may be kept and read again, and means nothing to
/// another store. It holds a key, or a place.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Cursor(Box<str>);

impl Cursor {
    /// A cursor of a store.
    pub fn new(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The error of a store that did not make this cursor.
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

/// Some of the records that a [`Filter`] asks for.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Page {
    /// The records, without their results ([`StoredResult::LeftOut`](crate::record::StoredResult::LeftOut)). A page may have
    /// fewer than the limit, or none, although more follow.
    pub records: Vec<(Key, Inspection)>,
    /// The number of entries that were passed over because another program keeps them: they are no records.
    pub unreadable: u64,
    /// Where the next page begins; `None` after the last one.
    pub next: Option<Cursor>,
}

impl Page {
    /// A page with these records, and where the next one begins.
    pub const fn new(records: Vec<(Key, Inspection)>, next: Option<Cursor>) -> Self {
        Self { records, unreadable: 0, next }
    }

    /// The keys of the records in it that can't be read. A list reads no results, so a store looks at each of these once more.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn damaged(&self) -> Vec<Key> {
        self.records.iter().filter(|(_, found)| found.damage.is_some()).map(|(key, _)| key.clone()).collect()
    }

    /// Shows the record of `key` as it was found when it was looked at once more, if `filter` still asks for it.
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

    /// Adds the entry that a store has under the key `stored`, if `filter` asks for it. `Ok(None)` is an expired one.
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

/// How many records a store has, by scope and by how they stand.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// The counts of each scope.
    pub scopes: BTreeMap<Box<str>, Counts>,
    /// The number of entries that another program keeps: they are no records.
    pub unreadable: u64,
    /// Where the counting ended; `None` if all records were counted.
    pub next: Option<Cursor>,
}

impl Stats {
    /// The counts of all scopes together.
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

/// How many records stand how.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts([u64; Standing::ALL.len()]);

impl Counts {
    /// How many stand like this.
    pub fn of(&self, standing: Standing) -> u64 {
        self.0[standing as usize]
    }

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OwnerToken, Record, State};

    #[test]
    fn counts_are_by_scope_and_standing() {
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
        ] {
            let matching = page.records.iter().filter(|(key, found)| filter.matches(key, found)).count();
            assert_eq!(matching, shown, "{filter:?}");
        }
    }
}
