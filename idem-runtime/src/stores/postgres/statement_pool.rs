//! The connections of a runtime, and the statements sent over them.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::client::Database;
use super::failure::OpFailure;
use super::param::Effect;
use super::sql::{Executor, Statement, Statements};

/// The connections, and the statements sent over them.
#[derive(Debug)]
pub(super) struct StatementPool {
    pub(super) database: Database,
    pub(super) sql: Arc<Statements>,
    /// Held by the batch of first runs, or of their ends, that is in flight. The two take turns, so that each batch
    /// gathers the operations of all tasks. That halves the number of commits.
    pub(super) turn: Semaphore,
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
