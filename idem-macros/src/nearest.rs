//! "Did you mean": the candidate closest to a misspelt word.

/// Returns the closest of `candidates`, if it is close enough to be the intended word.
pub(crate) fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let word = word.to_lowercase();
    let scored = candidates.iter().map(|candidate| (distance(&word, candidate), *candidate));
    let (distance, candidate) = scored.min_by_key(|(distance, _)| *distance)?;
    // Up to a third of the letters may be wrong, and in a short word one letter: `tll` and `fingerprnit` are close to
    // an option, `abc` is not.
    (distance <= (candidate.len() / 3).max(1)).then_some(candidate)
}

/// Returns the number of letters to insert, remove, replace, or swap with their neighbour to turn `from` into `to`.
pub(crate) fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut table = vec![vec![0; to.len() + 1]; from.len() + 1];
    for i in 0..=from.len() {
        for j in 0..=to.len() {
            table[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = table[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
                let mut best = replaced.min(table[i - 1][j] + 1).min(table[i][j - 1] + 1);
                if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                    best = best.min(table[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    table[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_of_two_words_is_the_number_of_wrong_letters() {
        let cases =
            [("", "abc", 3), ("ttl", "ttl", 0), ("tll", "ttl", 1), ("recrod", "record", 1), ("leese", "lease", 1)];
        for (from, to, expected) in cases {
            assert_eq!(distance(from, to), expected, "{from} {to}");
        }
    }

    #[test]
    fn a_name_is_suggested_only_for_a_word_with_few_wrong_letters() {
        let options = ["key", "ttl", "store", "fingerprint"];
        assert_eq!(nearest("tll", &options), Some("ttl"));
        assert_eq!(nearest("KEY", &options), Some("key"));
        assert_eq!(nearest("fingreprnit", &options), Some("fingerprint"));
        assert_eq!(nearest("abc", &options), None);
        assert_eq!(nearest("abc", &[]), None);
    }
}
