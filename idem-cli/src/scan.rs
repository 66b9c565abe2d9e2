//! Reads records page by page.

use idem_runtime::operator::Operator;
use idem_runtime::store::{Cursor, Filter, Inspection};
use idem_runtime::{Key, Store};

use crate::report::Stop;

/// Refuses a scan of a whole store, which may cost more than the user expects, unless the user passed `--scan`.
pub(crate) fn check_scan(kind: &str, scan: bool) -> Result<(), Stop> {
    let cost = match kind {
        _ if scan => return Ok(()),
        "redis" => {
            "Redis has no order of keys: `SCAN` walks through everything it holds, may miss records and repeat others"
        }
        "dynamodb" => "DynamoDB reads the whole table and bills it: half a read unit for each 4 KB, results included",
        "nats" => {
            "a stream has no order of keys: the list walks through all its messages, results included, and may repeat records"
        }
        _ => return Ok(()),
    };
    Err(Stop::Refused(format!("{cost}; add --scan if that is meant")))
}

/// End of a listing.
#[derive(Default)]
pub(crate) struct ListEnd {
    pub(crate) next: Option<Cursor>,
    /// Number of entries of other programs, which are not records.
    pub(crate) unreadable: u64,
}

impl ListEnd {
    /// Returns whether there may be more records.
    pub(crate) fn goes_on(&self) -> bool {
        self.next.is_some()
    }
}

/// Passes each record that `filter` selects to `take`, until there are no more records or `take` returns false.
pub(crate) async fn each<S: Store + ?Sized>(
    operator: &Operator<'_, S>,
    mut filter: Filter,
    mut take: impl FnMut(&Key, &Inspection) -> Result<bool, Stop>,
) -> Result<ListEnd, Stop> {
    let mut end = ListEnd::default();
    loop {
        let page = operator.list(&filter).await?;
        end.unreadable += page.unreadable;
        let mut wants_more = true;
        for (key, found) in &page.records {
            wants_more = take(key, found)?;
        }
        end.next = page.next;
        match &end.next {
            Some(next) if wants_more => filter = filter.after(next.clone()),
            _ => return Ok(end),
        }
    }
}
