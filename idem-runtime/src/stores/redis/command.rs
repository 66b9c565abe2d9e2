//! Commands other than `SET`, and the names of keys in commands.

use std::fmt;

use redis::{Cmd, RedisWrite};

use super::scripts::Script;

/// The name of a key at the server, in two parts that are joined only when a command is encoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name<'a> {
    pub(super) prefix: &'a str,
    pub(super) key: &'a str,
}

impl Name<'_> {
    pub(super) fn len(&self) -> usize {
        self.prefix.len() + self.key.len()
    }

    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.prefix.as_bytes());
        bytes.extend_from_slice(self.key.as_bytes());
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.prefix)?;
        f.write_str(self.key)
    }
}

/// A command, and the properties that decide how it is sent.
#[derive(Clone)]
pub(super) struct RedisCommand {
    pub(super) command: Cmd,
    /// Source of the script that the command calls, to be sent if the server has forgotten the script; `None` for a
    /// command that calls no script.
    pub(super) source: Option<&'static str>,
    /// True if the answer may be a record.
    pub(super) returns_record: bool,
    /// True if the command is sent even if its caller has dropped its future.
    pub(super) is_kept: bool,
    /// True if the command may share one call of its script with other such commands. The script answers with a letter
    /// for each key.
    pub(super) joins: bool,
    /// Size of the value that the server may refuse as too large, in bytes; 0 if the command has no such value.
    pub(super) value_len: usize,
}

impl RedisCommand {
    /// Makes a command that calls no script.
    pub(super) fn plain(command: Cmd) -> Self {
        Self { command, source: None, returns_record: false, is_kept: false, joins: false, value_len: 0 }
    }

    /// Makes the command that calls `script` with these keys and arguments.
    pub(super) fn script<'n>(
        script: &Script,
        keys: impl ExactSizeIterator<Item = Name<'n>>,
        args: impl FnOnce(&mut Cmd),
    ) -> Self {
        let mut command = Cmd::with_capacity(3 + 3 * keys.len(), 64 + 128 * keys.len());
        command.arg("EVALSHA").arg(&script.sha).arg(keys.len());
        keys.for_each(|key| command.write_arg_fmt(key));
        args(&mut command);
        Self { source: Some(script.source), ..Self::plain(command) }
    }

    /// Marks the answer as one that may be a record.
    pub(super) fn returns_record(self) -> Self {
        Self { returns_record: true, ..self }
    }

    /// Lets the command share one call of its script, which takes any number of keys, with other such commands.
    pub(super) fn joins(self) -> Self {
        Self { joins: true, ..self }
    }

    /// Notes that the command contains a value of `bytes` bytes, which the server may refuse as too large.
    pub(super) fn with_value(self, bytes: usize) -> Self {
        Self { value_len: bytes, ..self }
    }

    /// Marks the command to be sent even if its caller has dropped its future.
    pub(super) fn keep_if_dropped(self) -> Self {
        Self { is_kept: true, ..self }
    }
}

/// Makes one call of the script that all of `calls` call, each with one key.
pub(super) fn joined<'a>(calls: impl ExactSizeIterator<Item = &'a Cmd> + Clone) -> Cmd {
    let mut command = Cmd::with_capacity(3 + 4 * calls.len(), 0);
    if let Some(first) = calls.clone().next() {
        command.arg("EVALSHA").arg(argument(first, 1)).arg(calls.len());
    }
    for call in calls.clone() {
        command.arg(argument(call, KEY_AT));
    }
    for call in calls {
        for argument in call.args_iter().skip(KEY_AT + 1) {
            if let redis::Arg::Simple(argument) = argument {
                command.arg(argument);
            }
        }
    }
    command
}

/// Converts an `EVALSHA` command into the `EVAL` command with the same keys and arguments. The server loads the script
/// from `source`.
pub(super) fn with_source(call: &Cmd, source: &str) -> Cmd {
    let mut command = Cmd::new();
    command.arg("EVAL").arg(source);
    for argument in call.args_iter().skip(2) {
        if let redis::Arg::Simple(argument) = argument {
            command.arg(argument);
        }
    }
    command
}

/// Index of the first key in the call of a script.
const KEY_AT: usize = 3;

/// Returns the first key that a command names.
pub(super) fn key_of(command: &Cmd) -> &[u8] {
    match argument(command, 0) {
        b"EVAL" | b"EVALSHA" => argument(command, KEY_AT),
        _ => argument(command, 1),
    }
}

/// Returns argument `at` of a command; empty if the command has fewer arguments. Argument 0 is the command's name.
pub(super) fn argument(command: &Cmd, at: usize) -> &[u8] {
    match command.args_iter().nth(at) {
        Some(redis::Arg::Simple(argument)) => argument,
        _ => b"",
    }
}
