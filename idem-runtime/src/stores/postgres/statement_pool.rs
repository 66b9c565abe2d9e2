//! The connections of a runtime, and the statements of its store.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::client::Database;
use super::failure::OpFailure;
use super::sql::{Executor, Statement, Statements};
use crate::kit::work::Effect;

/// The connections of a runtime, and the statements of its store.
#[derive(Debug)]
pub(super) struct StatementPool {
    pub(super) database: Database,
    pub(super) sql: Arc<Statements>,
    /// Single permit for batches that write, so that only one such batch is in flight: a batch of reservations (unless
    /// replays are expected), of begun bodies, of journals, or of ends of attempts. Meanwhile the operations of all
    /// tasks gather for the next batches, which halves the number of commits.
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
