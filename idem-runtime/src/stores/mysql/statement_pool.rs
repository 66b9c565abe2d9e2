//! The connections of a runtime, and the statements of its store.

use std::sync::{Arc, OnceLock};

use super::client::{Answer, MySqlPool};
use super::failure::OpFailure;
use super::sql::{self, AT_ONCE, Param, Row, SizeLimit, Statement, Statements};
use crate::kit::rows::{FoundRow, corrupt};
use crate::kit::waiting::WaiterTable;
use crate::kit::work::{Effect, WriteTurns};
use crate::record::{ReadExtent, ReserveRequest};
use crate::store::StoreError;
use crate::sync::PerProcess;

/// Properties of the server, which the check at `connect` reads.
#[derive(Debug)]
pub(super) struct ServerTraits {
    /// True if an insert can return rows: MariaDB.
    pub(super) returns_rows: bool,
    pub(super) size_limit: SizeLimit,
}

/// The connections of a runtime, and the statements of its store.
pub(super) struct StatementPool {
    pub(super) database: MySqlPool,
    pub(super) sql: Arc<Statements>,
    pub(super) traits: Arc<OnceLock<ServerTraits>>,
    /// Duplicates in this process that wait for running attempts.
    pub(super) waiters: Arc<PerProcess<WaiterTable>>,
    /// Turns of the batches that write.
    pub(super) turns: WriteTurns,
}

impl StatementPool {
    /// Runs `statement` for one row of parameters.
    pub(super) async fn one(
        &self,
        statement: &Statement,
        params: Vec<Param>,
        effect: Effect,
    ) -> Result<Answer, OpFailure> {
        self.database.run(statement, &[params], effect).await
    }

    /// Returns the row of `key`.
    pub(super) async fn row(&self, key: &str) -> Result<Option<Row>, OpFailure> {
        Ok(self.one(&self.sql.look, vec![key.into()], Effect::Reads).await?.rows.pop())
    }

    /// Returns the record of `key`, expired or not.
    pub(super) async fn look(&self, key: &str) -> Result<Option<FoundRow>, StoreError> {
        let row = self.row(key).await?;
        row.map(|row| sql::found(&row, ReadExtent::Whole).map_err(corrupt)).transpose()
    }

    /// Replaces the record `met` if the record is still unchanged. Returns whether the record was replaced.
    pub(super) async fn replace(
        &self,
        request: &ReserveRequest,
        met: &FoundRow,
        with: &crate::record::Record,
    ) -> Result<bool, OpFailure> {
        let params = sql::replace(request, met, with);
        let is_replaced = self.one(&self.sql.replace, params, Effect::Writes).await?.affected > 0;
        if is_replaced {
            self.wake(request.key.as_str());
        }
        Ok(is_replaced)
    }

    /// Wakes the duplicates of this process that wait for `key`.
    pub(super) fn wake(&self, key: &str) {
        self.waiters.here().wake(key);
    }

    /// Runs `statement`, which writes one record for each row or skips it, for `rows` with distinct keys. Returns for
    /// each row whether its record was written.
    ///
    /// The servers report only how many records were written. If these are not all, the two halves of the rows are sent
    /// again, as the rows that can't be written are few. A statement that has another effect if it is repeated must
    /// therefore write [all records or none](Statement::is_all_or_none).
    pub(super) async fn write_many(
        &self,
        statement: &Statement,
        rows: &[Vec<Param>],
        effect: Effect,
        is_renewal: bool,
    ) -> Result<Vec<bool>, OpFailure> {
        let mut written = vec![false; rows.len()];
        let mut open = vec![(0, rows.len())];
        let mut has_written = false;
        while let Some((from, to)) = open.pop() {
            let some = &rows[from..to];
            let answer = if is_renewal {
                self.database.renew(statement, some, effect).await
            } else {
                self.database.run(statement, some, effect).await
            };
            let affected = match answer {
                Err(failure) if has_written => return Err(failure.after_writes()),
                answer => answer?.affected,
            };
            has_written |= affected > 0;
            if affected >= some.len() {
                written[from..to].fill(true);
            } else if some.len() > 1 && (affected > 0 || statement.is_all_or_none) {
                let middle = from + some.len() / 2;
                open.extend([(from, middle), (middle, to)]);
            }
        }
        Ok(written)
    }

    /// Returns the rows of `statement`, which reads many records.
    pub(super) async fn read_many(&self, statement: &Statement, rows: &[Vec<Param>]) -> Result<Vec<Row>, OpFailure> {
        let mut found = Vec::new();
        for some in rows.chunks(AT_ONCE) {
            found.extend(self.database.run(statement, some, Effect::Reads).await?.rows);
        }
        Ok(found)
    }
}
