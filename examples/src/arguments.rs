//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

const BUNDLED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/orders.jsonl");

/// The command line of an example.
#[derive(PartialEq, Eq, Debug)]
pub struct Arguments {
    /// Place from which the orders are read.
    pub source: Source,
    /// False for `--without-idempotency`.
    pub idempotent: bool,
    /// True for `--fresh`: the run forgets the records and charges of earlier runs.
    pub fresh: bool,
    /// Number of charges after which the process is killed.
    pub die_after: Option<u64>,
}

/// Source of order events.
#[derive(PartialEq, Eq, Debug)]
pub enum Source {
    /// The file bundled with the examples.
    Bundled,
    /// A file of the user.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

impl Arguments {
    /// Reads the command line, without the program's name. Returns `None` if the user asks for help.
    ///
    /// # Errors
    /// Returns a message about the invalid argument.
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Option<Self>, String> {
        let mut arguments = Self { source: Source::Bundled, idempotent: true, fresh: false, die_after: None };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            match arg.to_str() {
                Some("-h" | "--help") => return Ok(None),
                Some("--without-idempotency") => arguments.idempotent = false,
                Some("--fresh") => arguments.fresh = true,
                Some("--die-after") => {
                    let charges = args.next().and_then(|charges| charges.to_str()?.parse().ok());
                    arguments.die_after = Some(charges.ok_or("`--die-after` needs a number behind it")?);
                }
                Some(flag) if flag.starts_with('-') && flag != "-" => return Err(format!("unknown option `{flag}`")),
                _ if arguments.source != Source::Bundled => {
                    return Err(format!("one file is enough; what is `{}`?", arg.display()));
                }
                Some("-") => arguments.source = Source::Stdin,
                _ => arguments.source = Source::File(arg.into()),
            }
        }
        Ok(Some(arguments))
    }
}

impl Source {
    /// Reads all orders.
    ///
    /// # Errors
    /// Returns the error of the file or of standard input.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        match self {
            Self::Bundled => fs::read(BUNDLED),
            Self::File(path) => fs::read(path),
            Self::Stdin => {
                let mut input = Vec::new();
                io::Read::read_to_end(&mut io::stdin(), &mut input)?;
                Ok(input)
            }
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bundled => write!(f, "`{BUNDLED}`"),
            Self::File(path) => write!(f, "`{}`", Path::display(path)),
            Self::Stdin => f.write_str("standard input"),
        }
    }
}

/// The text of `--help`.
pub(crate) fn usage(name: &str) -> String {
    format!(
        "Delivers order events at least once, and charges every order exactly once.\n\
         \n\
         Usage: {name} [--without-idempotency] [--fresh] [--die-after N] [FILE]\n\
         \n\
         \x20 FILE                   order events as JSON lines, `-` for standard input; by default a bundled file\n\
         \x20 --without-idempotency  what the same deliveries do to a bare handler\n\
         \x20 --fresh                forget earlier runs with the same orders\n\
         \x20 --die-after N          be killed (SIGKILL) right after N charges; run it again to see what that does\n\
         \x20 --help                 this text\n\
         \n\
         A line: {{\"order_id\":\"A-1\",\"customer\":\"Ada Berg\",\"amount_cents\":1999,\"currency\":\"EUR\"}}\n\
         Exit status: 0 every order was charged exactly once, 1 one was not, 2 nothing to work with.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Option<Arguments>, String> {
        Arguments::parse(args.iter().map(OsString::from))
    }

    #[test]
    fn each_option_sets_its_field() {
        let bundled = || Arguments { source: Source::Bundled, idempotent: true, fresh: false, die_after: None };
        assert_eq!(parse(&[]), Ok(Some(bundled())));
        let all = Arguments { source: Source::File("a.jsonl".into()), idempotent: false, ..bundled() };
        assert_eq!(parse(&["--without-idempotency", "a.jsonl"]), Ok(Some(all)));
        let kept = Arguments { fresh: true, die_after: Some(7), ..bundled() };
        assert_eq!(parse(&["--fresh", "--die-after", "7"]), Ok(Some(kept)));
        assert_eq!(parse(&["-"]).unwrap().unwrap().source, Source::Stdin);
        assert_eq!(parse(&["a.jsonl", "--help"]), Ok(None));
    }

    #[test]
    fn an_error_names_the_argument_that_is_not_understood() {
        assert_eq!(parse(&["--fast"]).unwrap_err(), "unknown option `--fast`");
        assert_eq!(parse(&["a", "b"]).unwrap_err(), "one file is enough; what is `b`?");
        assert_eq!(parse(&["--url", "redis://x"]).unwrap_err(), "unknown option `--url`");
        assert_eq!(parse(&["--die-after", "soon"]).unwrap_err(), "`--die-after` needs a number behind it");
    }

    #[test]
    fn an_unreadable_source_is_an_error_that_names_it() {
        assert!(Source::File("no/such/file".into()).read().is_err());
        assert!(!Source::Bundled.read().unwrap().is_empty());
    }
}
