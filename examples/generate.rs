//! Generates the bundled orders.
//!
//! `cargo run --example generate > examples/data/orders.jsonl`

fn main() {
    print!("{}", idem_examples::generate());
}
