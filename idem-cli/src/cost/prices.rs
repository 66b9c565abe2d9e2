//! The user's prices of units.

use std::path::Path;

use crate::report::Stop;

/// Prices by the name of the unit.
pub(super) struct Prices(Vec<(String, f64)>);

impl Prices {
    /// Reads prices from a file with one per line, and from the command line. The command line wins.
    pub(super) fn read(given: &[String], file: Option<&Path>, known: &[&str]) -> Result<Self, Stop> {
        let text = match file {
            None => String::new(),
            Some(path) => std::fs::read_to_string(path)
                .map_err(|error| Stop::Usage(format!("the prices in {}: {error}", path.display())))?,
        };
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        let lines = lines.filter(|line| !line.is_empty()).chain(given.iter().map(String::as_str));
        let mut prices = Vec::new();
        for line in lines {
            let price = line.split_once('=').map(|(name, price)| (name.trim(), price.trim().parse::<f64>()));
            let Some((name, Ok(price))) = price else {
                return Err(Stop::Usage(format!("`{line}` is no price: write `NAME=NUMBER`")));
            };
            if !price.is_finite() || price < 0.0 {
                return Err(Stop::Usage(format!("`{line}` is no price: it is 0 or more")));
            }
            if !known.contains(&name) {
                return Err(Stop::Usage(format!("`{name}` has no price here; what has one: {}", known.join(", "))));
            }
            prices.push((name.to_owned(), price));
        }
        Ok(Self(prices))
    }

    /// Returns the last price of this unit.
    pub(super) fn of(&self, name: &str) -> Option<f64> {
        self.0.iter().rev().find(|(known, _)| known == name).map(|(_, price)| *price)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_read_in_order() {
        let folder = std::env::temp_dir().join(format!("idem-prices-{}", std::process::id()));
        std::fs::write(&folder, "# ours\n\nwrite_units = 0.7 # a million\ngb_month=0.3\n").unwrap();
        let known = ["write_units", "gb_month"];
        let prices = Prices::read(&["write_units=0.5".to_owned()], Some(&folder), &known).unwrap();
        std::fs::remove_file(&folder).unwrap();
        assert_eq!((prices.of("write_units"), prices.of("gb_month"), prices.of("other")), (Some(0.5), Some(0.3), None));
        for wrong in ["write_units", "write_units=a", "gb_month=-1", "other=1", "gb_month=inf"] {
            assert!(matches!(Prices::read(&[wrong.to_owned()], None, &known), Err(Stop::Usage(_))), "{wrong}");
        }
    }
}
