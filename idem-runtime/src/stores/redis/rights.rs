//! The commands that a login must be allowed.

/// A command that the store sends, directly or in a script.
#[derive(Clone, Copy, Debug)]
pub struct Right {
    /// The command, in a form that changes nothing: a server checks the rights of the login before the arguments.
    command: &'static [&'static str],
    /// Purpose of the command.
    pub purpose: Purpose,
}

/// Purpose of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Opens a store.
    Opening,
    /// Serves a call or a renewal.
    Calls,
    /// Serves a store with `min_replicas`. A store without `min_replicas` uses only one of these commands:
    /// `PEXPIRETIME`, to show operators when an attempt began.
    Replicas,
    /// Wakes the duplicates that wait for a completion.
    Wakes,
    /// Lists records for an operator.
    Lists,
}

/// Placeholder for a key.
const KEY: &str = "KEY";

/// The commands of a store on one server. Stores with sentinels or clusters send further commands.
pub const RIGHTS: &[Right] = &[
    Right { command: &["INFO"], purpose: Purpose::Opening },
    Right { command: &["SCRIPT", "LOAD", "return 1"], purpose: Purpose::Opening },
    Right { command: &["PING"], purpose: Purpose::Opening },
    Right { command: &["SET", KEY, "", "PX", "0"], purpose: Purpose::Calls },
    Right { command: &["GET", KEY], purpose: Purpose::Calls },
    Right { command: &["MGET", KEY], purpose: Purpose::Calls },
    Right { command: &["PTTL", KEY], purpose: Purpose::Calls },
    Right { command: &["PEXPIRE", KEY, "-"], purpose: Purpose::Calls },
    Right { command: &["GETRANGE", KEY, "0", "0"], purpose: Purpose::Calls },
    Right { command: &["SETRANGE", KEY, "-", ""], purpose: Purpose::Calls },
    Right { command: &["EVAL", "return 1", "1", KEY], purpose: Purpose::Calls },
    Right { command: &["EVALSHA", "-", "1", KEY], purpose: Purpose::Calls },
    Right { command: &["WAIT", "0", "-"], purpose: Purpose::Replicas },
    Right { command: &["PEXPIRETIME", KEY], purpose: Purpose::Replicas },
    Right { command: &["PEXPIREAT", KEY, "-"], purpose: Purpose::Replicas },
    Right { command: &["PERSIST", KEY], purpose: Purpose::Replicas },
    Right { command: &["DEL", KEY], purpose: Purpose::Replicas },
    Right { command: &["PUBLISH", KEY, ""], purpose: Purpose::Wakes },
    Right { command: &["SUBSCRIBE", KEY], purpose: Purpose::Wakes },
    Right { command: &["SCAN", "0"], purpose: Purpose::Lists },
    Right { command: &["STRLEN", KEY], purpose: Purpose::Lists },
];

impl Right {
    /// Returns the name of the command.
    pub fn name(&self) -> &'static str {
        self.command[0]
    }

    /// Returns the words of the command for `key`, which must not exist.
    pub fn words<'a>(&self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.command.iter().map(move |word| if *word == KEY { key } else { word })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_command_in_a_redis_script_is_in_the_list_of_rights() {
        let mut commands = Vec::new();
        for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/stores/redis/scripts")).unwrap() {
            let script = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            let calls = script.split("call('").skip(1).chain(script.split("call(\"").skip(1));
            let calls = calls.chain(script.split("pcall, '").skip(1));
            commands.extend(calls.filter_map(|call| Some(call.split_once(['\'', '"'])?.0.to_owned())));
        }
        assert!(commands.len() > 15, "{commands:?}");
        commands.retain(|name| RIGHTS.iter().all(|right| right.name() != name));
        assert!(commands.is_empty(), "no right is listed for {commands:?}");
    }

    #[test]
    fn a_ping_sends_each_redis_command_of_calls() {
        let script = include_str!("scripts/ping.lua");
        for right in RIGHTS.iter().filter(|right| right.purpose == Purpose::Calls && !right.name().starts_with("EVAL"))
        {
            assert!(script.contains(&format!("redis.pcall('{}', key", right.name())), "{}", right.name());
        }
    }

    #[test]
    fn the_guide_names_each_redis_command_that_a_login_must_be_allowed() {
        let guide = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide.md")).unwrap();
        let about = guide.split("with few rights needs").nth(1).and_then(|rest| rest.split("`connect` names").next());
        let words = about.expect("the paragraph about rights").split(|it: char| it.is_whitespace() || it == '`');
        let named: BTreeSet<_> = words.filter_map(|word| word.strip_prefix('+')).collect();
        let mut expected: BTreeSet<_> = ["role", "cluster|info", "cluster|slots", "asking", "script|load"].into();
        let commands: Vec<_> = RIGHTS.iter().map(|right| right.name().to_ascii_lowercase()).collect();
        expected.extend(commands.iter().map(String::as_str).filter(|command| *command != "script"));
        assert_eq!(named, expected);
    }
}
