//! The connections of a runtime, and the statements of its store.

use std::sync::Arc;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::client::Database;
use super::failure::OpFailure;
use super::sql::{Executor, Statement, Statements};
use crate::kit::work::{Effect, WriteTurns};

/// The connections of a runtime, and the statements of its store.
#[derive(Debug)]
pub(super) struct StatementPool {
    pub(super) database: Database,
    pub(super) sql: Arc<Statements>,
    /// Turns of the batches that write: of reservations (unless replays are expected), of begun bodies, of journals,
    /// and of ends of attempts.
    pub(super) turns: WriteTurns,
}

impl Executor for StatementPool {
    type Row = Row;
    type Error = OpFailure;

    async fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<Row>, OpFailure> {
        self.database.query(statement, params, effect).await
    }
}
