//! Charges of a payment provider, in a file.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{Charges, Order};

/// Charges that outlive the process, one per line.
#[derive(Default, Debug)]
pub struct Ledger {
    charges: Charges,
    file: Option<File>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    payment_key: String,
    order: Order,
}

impl Ledger {
    /// Opens the ledger in the file at `path`, or creates it. The [`Default`] of a ledger has no file.
    ///
    /// # Errors
    /// The error of the file, or an error if the file is not a ledger.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = File::options().read(true).append(true).create(true).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        // An incomplete last line was written by a process that was killed meanwhile. Its charge does not count as
        // made.
        let whole = text.rfind('\n').map_or(0, |at| at + 1);
        file.set_len(whole as u64)?;
        file.seek(io::SeekFrom::End(0))?;
        let mut charges = Charges::default();
        for line in text[..whole].lines() {
            let Line { payment_key, order } = serde_json::from_str(line)?;
            charges.charge(payment_key, &order);
        }
        Ok(Self { charges, file: Some(file) })
    }

    /// Charges the customer of `order`, unless a charge under `payment_key` exists.
    ///
    /// # Errors
    /// The error of the file. In this case the ledger has no new charge.
    pub fn charge(&mut self, payment_key: String, order: &Order) -> io::Result<bool> {
        if self.charges.contains(&payment_key) {
            return Ok(false);
        }
        if let Some(file) = &mut self.file {
            let line = Line { payment_key: payment_key.clone(), order: order.clone() };
            file.write_all(format!("{}\n", serde_json::to_string(&line)?).as_bytes())?;
        }
        Ok(self.charges.charge(payment_key, order))
    }

    /// Returns all charges in the ledger.
    pub fn into_charges(self) -> Charges {
        self.charges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn charges_outlive_the_process() {
        let path = std::env::temp_dir().join(format!("idem-ledger-{}", std::process::id()));
        let order =
            |id: &str| Order { order_id: id.into(), customer: "Ada".into(), amount_cents: 5, currency: "EUR".into() };
        let mut ledger = Ledger::open(&path).unwrap();
        assert!(ledger.charge("1".into(), &order("A")).unwrap());
        assert!(!ledger.charge("1".into(), &order("A")).unwrap());
        // The file of a process that was killed in the middle of a line.
        fs::write(&path, fs::read_to_string(&path).unwrap() + "{\"payment").unwrap();
        let mut ledger = Ledger::open(&path).unwrap();
        assert!(!ledger.charge("1".into(), &order("A")).unwrap());
        assert!(ledger.charge("2".into(), &order("B")).unwrap());
        let mut ledger = Ledger::open(&path).unwrap();
        assert!(!ledger.charge("2".into(), &order("B")).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        fs::remove_file(path).unwrap();
    }
}
