//! Revisions: names for the version of a record that a person saw.

use std::error::Error;
use std::fmt;
use std::str::FromStr;

use super::standing::Standing;

/// Name for the version of a record that a person saw. A [`Decision`](crate::store::Decision) names a revision, and is
/// refused once the record has changed.
///
/// A revision holds the number of the latest attempt, the standing of the operation, and a mark that each attempt and
/// each decision changes. For a record that can't be read, the number is 0, and every write changes the mark. The text
/// of a revision can be copied from one command to the next:
///
/// ```
/// use idem_runtime::store::Revision;
///
/// let seen: Revision = "1-interrupted-5f0c2a9d11e4b0aa".parse()?;
/// assert_eq!(seen.attempt(), 1);
/// assert_eq!(seen.to_string(), "1-interrupted-5f0c2a9d11e4b0aa");
/// # Ok::<(), idem_runtime::store::RevisionError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Revision {
    /// First half of the owner token. For a damaged record, the beginning of a digest of all its stored bytes.
    pub(crate) owner: [u8; 8],
    pub(crate) attempt: u32,
    pub(crate) standing: Standing,
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

    /// Returns the same revision with another attempt number, for tests of stores.
    #[must_use]
    pub const fn with_attempt(self, attempt: u32) -> Self {
        Self { attempt, ..self }
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{:016x}", self.attempt, self.standing, u64::from_be_bytes(self.owner))
    }
}

impl FromStr for Revision {
    type Err = RevisionError;

    fn from_str(text: &str) -> Result<Self, RevisionError> {
        let mut parts = text.trim().split('-');
        let (Some(attempt), Some(standing), Some(owner), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(RevisionError(()));
        };
        let attempt = attempt.parse().map_err(|_| RevisionError(()))?;
        let standing = Standing::ALL.into_iter().find(|it| it.name() == standing).ok_or(RevisionError(()))?;
        let is_hex = owner.len() == 16 && owner.bytes().all(|byte| byte.is_ascii_hexdigit());
        let owner = u64::from_str_radix(owner, 16).ok().filter(|_| is_hex).ok_or(RevisionError(()))?;
        Ok(Self { owner: owner.to_be_bytes(), attempt, standing })
    }
}

/// Error for a text that is not a [`Revision`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RevisionError(());

impl fmt::Display for RevisionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a revision is an attempt, a standing and 16 hexadecimal digits, as `1-interrupted-5f0c2a9d11e4b0aa`",
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
                let revision = Revision { owner, attempt, standing };
                assert_eq!(revision.to_string().parse(), Ok(revision));
            }
        }
        for wrong in ["", "1", "1-lapsed", "1-stuck-0000000000000000", "1-lapsed-00", "1-lapsed-+000000000000000", "x"]
        {
            assert!(wrong.parse::<Revision>().is_err(), "{wrong}");
        }
    }
}
