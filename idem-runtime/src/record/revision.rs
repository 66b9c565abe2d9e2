//! Revisions: names for the version of a record that a person saw.

use std::error::Error;
use std::fmt;
use std::str::FromStr;

use super::standing::Standing;

/// Name for the version of a record that a person saw. A [`Decision`](crate::store::Decision) names a revision, and is
/// refused once the record has changed.
///
/// A revision holds the number of the latest attempt, the standing of the operation, a mark that each attempt and each
/// decision changes, and the size of the journal if the record has one. Only a decision that changes the journal
/// compares that size. For a record that can't be read, the number is 0, and every write changes the mark. A list reads
/// no journals, so the revision of a listed record has no size. The text of a revision can be copied from one command
/// to the next:
///
/// ```
/// use idem_runtime::store::Revision;
///
/// let seen: Revision = "1-interrupted-5f0c2a9d11e4b0aa".parse()?;
/// assert_eq!(seen.attempt(), 1);
/// assert_eq!(seen.to_string(), "1-interrupted-5f0c2a9d11e4b0aa");
/// let with_a_journal: Revision = "1-interrupted-5f0c2a9d11e4b0aa-64".parse()?;
/// assert_ne!(seen, with_a_journal);
/// # Ok::<(), idem_runtime::store::RevisionError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Revision {
    /// First half of the owner token. For a damaged record, the beginning of a digest of all its stored bytes.
    pub(crate) owner: [u8; 8],
    pub(crate) attempt: u32,
    pub(crate) standing: Standing,
    /// Size of the journal in bytes; zero if the record has no journal, or a list has left the journal out.
    pub(crate) journal: u64,
}

impl Revision {
    /// Number of the latest attempt when the person saw the record.
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Standing of the operation when the person saw the record.
    pub const fn standing(&self) -> Standing {
        self.standing
    }

    /// Size in bytes of the journal that the person saw; zero if the record had no journal, or was listed.
    pub const fn journal_bytes(&self) -> u64 {
        self.journal
    }

    /// Returns the same revision with another attempt number, for tests of stores.
    #[must_use]
    pub const fn with_attempt(self, attempt: u32) -> Self {
        Self { attempt, ..self }
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{:016x}", self.attempt, self.standing, u64::from_be_bytes(self.owner))?;
        match self.journal {
            0 => Ok(()),
            journal => write!(f, "-{journal}"),
        }
    }
}

impl FromStr for Revision {
    type Err = RevisionError;

    fn from_str(text: &str) -> Result<Self, RevisionError> {
        let mut parts = text.trim().split('-');
        let (Some(attempt), Some(standing), Some(owner), journal, None) =
            (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(RevisionError(()));
        };
        let attempt = attempt.parse().map_err(|_| RevisionError(()))?;
        let standing = Standing::ALL.into_iter().find(|it| it.name() == standing).ok_or(RevisionError(()))?;
        let is_hex = owner.len() == 16 && owner.bytes().all(|byte| byte.is_ascii_hexdigit());
        let owner = u64::from_str_radix(owner, 16).ok().filter(|_| is_hex).ok_or(RevisionError(()))?;
        let journal = match journal {
            None => 0,
            // One text for each revision: the size has no sign and no leading zero.
            Some(size) if size.starts_with(|first: char| matches!(first, '1'..='9')) => {
                size.parse().map_err(|_| RevisionError(()))?
            }
            Some(_) => return Err(RevisionError(())),
        };
        Ok(Self { owner: owner.to_be_bytes(), attempt, standing, journal })
    }
}

/// Error for a text that is not a [`Revision`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RevisionError(());

impl fmt::Display for RevisionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a revision is an attempt, a standing, 16 hexadecimal digits and perhaps the size of a journal, as \
             `1-interrupted-5f0c2a9d11e4b0aa`",
        )
    }
}

impl Error for RevisionError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_is_read_back_as_written() {
        for standing in Standing::ALL {
            for (attempt, owner) in [(0, [0; 8]), (u32::MAX, [0xff; 8]), (1, [0, 1, 2, 3, 4, 5, 6, 7])] {
                for journal in [0, 1, u64::MAX] {
                    let revision = Revision { owner, attempt, standing, journal };
                    assert_eq!(revision.to_string().parse(), Ok(revision));
                }
            }
        }
        for wrong in ["", "1", "1-lapsed", "1-stuck-0000000000000000", "1-lapsed-00", "1-lapsed-+000000000000000", "x"]
        {
            assert!(wrong.parse::<Revision>().is_err(), "{wrong}");
        }
        for wrong in ["", "0", "01", "+1", "a", "1-1", "18446744073709551616"] {
            let wrong = format!("1-lapsed-0000000000000000-{wrong}");
            assert!(wrong.parse::<Revision>().is_err(), "{wrong}");
        }
    }
}
