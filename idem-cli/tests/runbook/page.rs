//! Reads docs/operations.md: the incidents, and their commands with the expected output.

use std::process::{Command, Stdio};

use super::scene::Scene;

const PAGE: &str = include_str!("../../../docs/operations.md");

/// Host and process of the holder, as the page shows them.
const HOLDER: (&str, &str) = ("worker-3", "4711");

fn incidents() -> &'static str {
    let (_, rest) = PAGE.split_once("\n## Incidents\n").expect("the page has incidents");
    rest.split("\n## ").next().unwrap_or_default()
}

/// Returns the titles of the incidents.
pub(crate) fn titles() -> Vec<&'static str> {
    incidents().lines().filter_map(|line| line.strip_prefix("### ")).collect()
}

/// Returns the part above the first incident.
pub(crate) fn table() -> &'static str {
    incidents().split("\n### ").next().unwrap_or_default()
}

/// Returns the anchor of a heading.
pub(crate) fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '_' | '-'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// One incident of the page.
pub(crate) struct Section {
    title: &'static str,
    text: &'static str,
    /// The part of the text after the commands that have been run.
    rest: &'static str,
    /// Pairs of a revision on the page and the real revision.
    revisions: Vec<(String, String)>,
}

/// A command of the page, and its output on the page.
struct Line {
    command: &'static str,
    prints: Vec<&'static str>,
}

impl Section {
    pub(crate) fn named(title: &'static str) -> Self {
        let text = incidents().split("\n### ").find(|it| it.lines().next() == Some(title));
        let text = text.unwrap_or_else(|| panic!("the page has no incident `{title}`"));
        Self { title, text, rest: text, revisions: Vec::new() }
    }

    /// Returns the text of the entry with this name.
    pub(crate) fn entry(&self, name: &str) -> &'static str {
        let (_, entry) =
            self.text.split_once(&format!("\n- *{name}*: ")).unwrap_or_else(|| panic!("{}: no *{name}*", self.title));
        entry.split("\n- *").next().and_then(|entry| entry.split("\n\n").next()).unwrap_or_default()
    }

    /// Runs the next block of commands exactly as written, and compares their output.
    #[track_caller]
    pub(crate) fn play(&mut self, scene: &Scene) {
        let (_, rest) =
            self.rest.split_once("\n```console\n").unwrap_or_else(|| panic!("{}: no more commands", self.title));
        let (block, rest) = rest.split_once("\n```").expect("an end");
        self.rest = rest;
        for Line { command, prints } in lines(block) {
            let mut here = command.to_owned();
            for (shown, own) in &self.revisions {
                here = here.replace(shown, own);
            }
            let (status, printed) = run(&here, scene);
            // Revisions differ in each run, so a real revision is matched with a revision on the page by their order.
            let revisions = |lines: &mut dyn Iterator<Item = &str>| -> Vec<String> {
                lines.filter_map(|line| Some(line.strip_prefix("revision ")?.trim().to_owned())).collect()
            };
            let (shown, own) = (revisions(&mut prints.iter().copied()), revisions(&mut printed.lines()));
            let mut printed = printed;
            for (shown, own) in shown.into_iter().zip(own) {
                let without_mark =
                    |revision: &str| -> Vec<_> { revision.splitn(3, '-').take(2).map(str::to_owned).collect() };
                if without_mark(&shown) == without_mark(&own) {
                    printed = printed.replace(&own, &shown);
                    self.revisions.push((shown, own));
                }
            }

            let expected: Vec<_> = prints.iter().map(|line| tidy(line)).filter(|line| !line.is_empty()).collect();
            let lines: Vec<_> = printed.lines().map(tidy).filter(|line| !line.is_empty()).collect();
            assert!(
                agree(&expected, &lines),
                "{}: `{command}` prints\n\n{printed}\nand the page says\n\n{}\n\n{expected:#?}\n{lines:#?}",
                self.title,
                prints.join("\n")
            );
            let is_wrong = prints.iter().any(|line| line.starts_with("idem: ") || line.starts_with("error "));
            assert_eq!(status != 0, is_wrong, "{}: `{command}` ended with {status}: {printed}", self.title);
        }
    }

    /// Asserts that every block of commands was run.
    #[track_caller]
    pub(crate) fn ends(&self) {
        assert!(!self.rest.contains("\n```console\n"), "{}: these commands were not run:{}", self.title, self.rest);
        let names: Vec<_> = self.text.lines().filter_map(|line| line.strip_prefix("- *")?.split_once("*: ")).collect();
        let names: Vec<_> = names.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["Alert", "Dashboard", "Customer", "Cause", "Do"], "{}: all have the same shape", self.title);
    }
}

fn lines(block: &'static str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), lines.last_mut()) {
            (Some(command), _) => lines.push(Line { command, prints: Vec::new() }),
            (None, Some(last)) => last.prints.push(line),
            (None, None) => panic!("`{line}` is printed by no command"),
        }
    }
    lines
}

/// Runs a command line in a shell. Returns its exit status, and its output with the names that the page uses.
fn run(command: &str, scene: &Scene) -> (i32, String) {
    // `--yes` replaces the confirmation, because the test has no terminal.
    let changes =
        ["resolve", "reopen", "forget", "release"].iter().any(|verb| command.contains(&format!("idem {verb}")));
    let yes = if changes { " --yes" } else { "" };
    let programs = std::path::Path::new(env!("CARGO_BIN_EXE_idem")).parent().expect("a folder");
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("sh")
        .args(["-c", &format!("{command}{yes}")])
        .current_dir(scene.folder.path())
        .envs([("PATH", path.as_str()), ("IDEM_STORE", &scene.url), ("USER", "alice")])
        .env_remove("IDEM_NAMESPACE")
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let mut printed = String::from_utf8(output.stdout).expect("text");
    printed.push_str(std::str::from_utf8(&output.stderr).expect("text"));
    let (host, process) = HOLDER;
    let (own, number) = (&scene.host, scene.process.get());
    for (own, shown) in [
        (format!("({own}/{number}/"), format!("({host}/{process}/")),
        (format!(" {own}, process {number}"), format!(" {host}, process {process}")),
        // Folder of this test, and the folder on the page.
        (scene.folder.path().display().to_string(), "/var/lib/shop".to_owned()),
    ] {
        printed = printed.replace(&own, &shown);
    }
    (output.status.code().expect("no signal"), printed)
}

/// Normalises a line: single spaces, and `TIME` for each duration, because durations differ in each run.
fn tidy(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut tokens = line.split_whitespace().peekable();
    while let Some(word) = tokens.next() {
        let unit = tokens.peek().map_or("", |unit| unit.trim_end_matches([',', ';', ')', '.']));
        if word.parse::<f64>().is_err() || !["ms", "s", "min", "h", "d"].contains(&unit) {
            words.push(word.to_owned());
            continue;
        }
        // `1 min 30 s` is a single duration.
        if words.last().is_some_and(|last| last == "TIME") {
            words.pop();
        }
        words.push(format!("TIME{}", &tokens.next().unwrap_or_default()[unit.len()..]));
    }
    words.join(" ")
}

/// Returns whether the output matches the page. A line `…` on the page matches any number of lines, and `…` inside of a
/// line matches any text.
fn agree(expected: &[String], printed: &[String]) -> bool {
    match (expected.split_first(), printed.split_first()) {
        (None, None) => true,
        (Some((any, rest)), _) if any == "…" => (0..=printed.len()).any(|at| agree(rest, &printed[at..])),
        (Some((line, expected)), Some((is, printed))) => {
            let same = line.split_once('…').map_or(line == is, |(begin, end)| {
                is.len() >= begin.len() + end.len() && is.starts_with(begin) && is.ends_with(end)
            });
            same && agree(expected, printed)
        }
        _ => false,
    }
}

#[test]
fn only_durations_in_the_output_of_a_command_are_replaced() {
    assert_eq!(tidy("running     1 min 30 s  attempt 1"), "running TIME attempt 1");
    assert_eq!(tidy("lease        30.0 s, lapses in 1.0 s unless"), "lease TIME, lapses in TIME unless");
    let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    assert!(agree(&lines(&["a", "…", "c …"]), &lines(&["a", "b", "b", "c 7"])));
    assert!(!agree(&lines(&["a", "…", "c"]), &lines(&["a", "b"])) && !agree(&lines(&["a"]), &lines(&["a", "b"])));
}
