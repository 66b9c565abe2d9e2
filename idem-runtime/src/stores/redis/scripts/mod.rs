//! The scripts that change or read records, and the hashes that name the scripts at a server.

use std::fmt;

/// Error code of a script that found a damaged record.
pub(super) const DAMAGED: &str = "DAMAGED";
/// Script that writes to a key, but leaves its value and its expiry as they are.
pub(super) const TOUCH: &str = include_str!("touch.lua");

/// A script, and the hash that names it at the server.
pub(super) struct Script {
    pub(super) source: &'static str,
    pub(super) sha: String,
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sha)
    }
}

/// The scripts, as loaded into the server.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) append: Script,
    pub(super) begin: Script,
    pub(super) decide: Script,
    pub(super) finish: Script,
    pub(super) finish_one: Script,
    pub(super) glance: Script,
    pub(super) inspect: Script,
    pub(super) ping: Script,
    pub(super) release: Script,
    pub(super) remove: Script,
    pub(super) renew: Script,
    pub(super) take: Script,
    pub(super) watch: Script,
}

impl Scripts {
    pub(super) const SOURCES: [&str; 13] = [
        concat!(include_str!("times.lua"), include_str!("append.lua")),
        concat!(include_str!("times.lua"), include_str!("begin.lua")),
        concat!(include_str!("times.lua"), include_str!("decide.lua")),
        concat!(include_str!("times.lua"), include_str!("finish.lua")),
        concat!(include_str!("times.lua"), include_str!("finish_one.lua")),
        include_str!("glance.lua"),
        include_str!("inspect.lua"),
        include_str!("ping.lua"),
        concat!(include_str!("times.lua"), include_str!("release.lua")),
        include_str!("remove.lua"),
        concat!(include_str!("times.lua"), include_str!("renew.lua")),
        concat!(include_str!("times.lua"), include_str!("take.lua")),
        include_str!("watch.lua"),
    ];

    /// Gives each loaded script its name. `scripts` are in the order of [`Scripts::SOURCES`].
    pub(super) fn new(scripts: [Script; 13]) -> Self {
        let [append, begin, decide, finish, finish_one, glance, inspect, ping, release, remove, renew, take, watch] =
            scripts;
        Self { append, begin, decide, finish, finish_one, glance, inspect, ping, release, remove, renew, take, watch }
    }
}
