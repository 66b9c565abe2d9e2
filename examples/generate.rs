//! Where do the bundled orders come from?
//!
//! `cargo run --example generate > examples/data/orders.jsonl`

fn main() {
    print!("{}", idem_examples::generate());
}
