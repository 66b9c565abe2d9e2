//! The claims of an example, checked while it runs.

use std::fmt;
use std::process::ExitCode;

/// Prints claims and remembers whether all of them hold.
#[derive(Default, Debug)]
pub struct Claims {
    broken: u32,
}

impl Claims {
    /// Prints `claim`, and whether it holds.
    pub fn check(&mut self, claim: &str, holds: bool) {
        println!("{} {claim}", if holds { "ok" } else { "NO" });
        self.broken += u32::from(!holds);
    }

    /// Returns the exit code of an example that ended with `result`: 0 if it succeeded and all its claims hold,
    /// otherwise 1.
    pub fn exit_code<E: fmt::Display>(self, result: &Result<(), E>) -> ExitCode {
        if let Err(error) = result {
            eprintln!("failed: {error}");
        }
        ExitCode::from(u8::from(result.is_err() || self.broken > 0))
    }
}
