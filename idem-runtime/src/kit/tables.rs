//! Statements of the tables that calls in transactions use.

use std::sync::{Arc, Mutex};

use crate::sync::{PerProcess, lock};

/// Number of tables whose statements are kept. An application with one table per tenant may need another table at each
/// call.
const TABLES: usize = 16;

/// The statements of a table.
pub(crate) struct NamedTable<T> {
    pub(crate) statements: T,
    /// Name of the table, or of its schema.
    pub(crate) name: String,
}

/// The recently used tables of a kind of store, the latest one first. Each call of a handler needs the statements of
/// its table.
pub(crate) struct RecentTables<T: 'static>(PerProcess<Mutex<Vec<Arc<NamedTable<T>>>>>);

impl<T: Send + Sync> RecentTables<T> {
    pub(crate) const fn empty() -> Self {
        Self(PerProcess::empty())
    }

    /// Returns the table `name`. If the table was not used recently, `make` makes its statements.
    pub(crate) fn of(&self, name: &str, make: impl FnOnce(&str) -> T) -> Arc<NamedTable<T>> {
        let mut latest = lock(self.0.here());
        if let Some(at) = latest.iter().position(|table| table.name == name) {
            // Moves the table to the front. Most programs have one table, which is already there.
            let table = Arc::clone(&latest[at]);
            latest[..=at].rotate_right(1);
            return table;
        }
        let table = Arc::new(NamedTable { statements: make(name), name: name.to_owned() });
        latest.truncate(TABLES - 1);
        latest.insert(0, Arc::clone(&table));
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_statements_of_recent_tables_are_kept() {
        let tables = RecentTables::<usize>::empty();
        let of = |n: usize| tables.of(&format!("tenant {n}"), |_| n);
        let first = of(0);
        for n in 0..10 * TABLES {
            of(n);
            assert!(Arc::ptr_eq(&first, &of(0)), "the statements of a used table were built again");
            assert!(lock(tables.0.here()).len() <= TABLES);
        }
        assert_eq!(Arc::strong_count(&first), 2);
        for n in 1..=TABLES {
            of(n);
        }
        assert_eq!(Arc::strong_count(&first), 1, "the statements of an unused table are still kept");
    }
}
