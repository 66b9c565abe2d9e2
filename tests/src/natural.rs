//! Statements of docs/natural.md, for tests that run them on real databases.

/// The page.
pub const PAGE: &str = include_str!("../../docs/natural.md");

/// Tables of the page.
pub const TABLES: [&str; 5] = ["orders", "payments", "prices", "points", "movements"];

/// Rows of table `prices` after all blocks: the article and its price, in their order.
pub const PRICES: [(i64, i64); 2] = [(1, 130), (2, 250)];

/// Block of SQL of the page.
#[derive(Debug)]
pub struct Block {
    /// Its statements.
    pub sql: &'static str,
    /// False if the page shows the block as a counterexample.
    pub is_idempotent: bool,
}

/// Returns the block that creates the tables, and the other blocks in their order.
pub fn blocks() -> (&'static str, Vec<Block>) {
    let mut blocks = PAGE.split("\n```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let tables = blocks.next().expect("the block of the tables");
    let block = |sql: &'static str| Block { sql, is_idempotent: !sql.contains("-- Not idempotent.") };
    (tables, blocks.map(block).collect())
}
