//! Words of commands that a person pastes into a shell.

use std::borrow::Cow;

/// Returns `word` as a POSIX shell reads it back: unchanged if no character has a meaning for a shell, otherwise
/// between single quotes.
pub(crate) fn quoted(word: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-@%+=:,./".contains(c);
    // Some shells replace a word that begins with `=`.
    if !word.is_empty() && !word.starts_with('=') && word.chars().all(is_plain) {
        return Cow::Borrowed(word);
    }
    Cow::Owned(format!("'{}'", word.replace('\'', r"'\''")))
}

/// Joins words to a command line.
#[allow(dead_code, reason = "a build without stores names no client")]
pub(crate) fn line<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_each_quoted_word_back() {
        let words =
            ["pay/order:42", "", "a b", "it's", "$HOME `id` \"x\" \\", "a\nb", "=ls", "~", "*?[a]", "ü#!;&|<>()"];
        let command = format!("printf '%s\\0' {}", line(words));
        let output = std::process::Command::new("sh").args(["-c", &command]).output().expect("a shell");
        let read = String::from_utf8(output.stdout).unwrap();
        assert_eq!(read.split_terminator('\0').collect::<Vec<_>>(), words);
        assert_eq!(quoted("1/shop::pay/a%3Ab"), "1/shop::pay/a%3Ab");
    }
}
