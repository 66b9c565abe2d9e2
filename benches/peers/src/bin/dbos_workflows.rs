//! The crate `dbos` on PostgreSQL, as a child process of the bench `peers`: workflows whose id is the order, without
//! steps and with three. The argument is the URL of the server.

use dbos::{Config, DBOS, Error, RunOptions, WorkflowRef, step};
use peers::{Peer, Receipt, Work, serve};

struct Dbos {
    ship: WorkflowRef<u64, Receipt>,
    fulfil: WorkflowRef<u64, Receipt>,
}

impl Peer for Dbos {
    async fn call(&self, work: Work, order_id: u64) {
        let (id, workflow) = match work {
            Work::Steps => (format!("fulfil:{order_id}"), &self.fulfil),
            Work::First | Work::Replay => (format!("order:{order_id}"), &self.ship),
        };
        let options = RunOptions { workflow_id: Some(&id), ..RunOptions::default() };
        let receipt = workflow.run_with(order_id, options).await.expect("ships");
        assert_eq!(receipt.order_id, order_id);
    }
}

async fn fulfil(order_id: u64) -> Result<Receipt, Error> {
    let work = move || async move { Ok::<_, Error>(Receipt::of(order_id)) };
    step("charge", work).await?;
    step("reserve", work).await?;
    step("book", work).await
}

fn main() {
    let url = std::env::args().nth(1).expect("a URL");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let config = Config {
        // As many as the library's own pool.
        max_connections: 16,
        app_version: Some("1".to_owned()),
        executor_id: Some(std::process::id().to_string()),
        ..Config::new("bench", url)
    };
    let dbos = DBOS::new(config);
    let ship = dbos.register_workflow("ship", |order_id| async move { Ok::<_, Error>(Receipt::of(order_id)) }).expect("registers");
    let fulfil = dbos.register_workflow("fulfil", fulfil).expect("registers");
    runtime.block_on(dbos.launch()).expect("launches");
    serve(&runtime, Dbos { ship, fulfil });
}
