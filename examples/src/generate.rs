//! Generates the bundled orders.

use crate::Order;

const FIRST_NAMES: &str = "Ada Bruno Chiara Dilan Edith Farid Greta Hugo Ines Jonas Keiko Léa Mateo Noor Olga Priya";
const LAST_NAMES: &str = "Almeida Berg Costa Dahl Eriksen Fontaine García Hansen Ito Jansen Kowalski Lindqvist Moreau \
                          Nguyen O'Brien Papadopoulos";
const CURRENCIES: [&str; 5] = ["EUR", "EUR", "EUR", "GBP", "USD"];
const PRICES: [u64; 12] = [499, 899, 1_250, 1_999, 2_495, 3_490, 4_999, 7_900, 12_900, 19_950, 34_900, 89_900];

/// Returns the content of the bundled file: 2 000 orders, which never change.
pub fn generate() -> String {
    let first_names: Vec<_> = FIRST_NAMES.split(' ').collect();
    let last_names: Vec<_> = LAST_NAMES.split(' ').collect();
    let mut draws = Draws(0);
    let mut lines = String::new();
    for number in 104_217..106_217 {
        let order = Order {
            order_id: format!("2025-{number}"),
            customer: format!("{} {}", draws.pick(&first_names), draws.pick(&last_names)),
            amount_cents: (0..*draws.pick(&[1, 1, 2, 3])).map(|_| *draws.pick(&PRICES)).sum(),
            currency: (*draws.pick(&CURRENCIES)).to_owned(),
        };
        lines.push_str(&order.to_string());
        lines.push('\n');
    }
    lines
}

/// `SplitMix64` (Steele, Lea and Flood 2014), whose state is a counter.
struct Draws(u64);

impl Draws {
    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [.., byte] = (x ^ (x >> 31)).to_be_bytes();
        &from[usize::from(byte) % from.len()]
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_bundled_file_equals_the_generated_orders_and_all_are_valid() {
        let bundled = crate::Source::Bundled.read().unwrap();
        assert!(bundled == super::generate().as_bytes(), "`cargo run --example generate > examples/data/orders.jsonl`");
        let (events, malformed) = crate::read(&bundled);
        assert_eq!((events.len(), malformed.len()), (2_000, 0));
    }
}
