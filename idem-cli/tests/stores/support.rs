//! Helpers that run the program, and that write records.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Lease, Release, Reservation, ReserveRequest, Verdict};
use idem_runtime::{Error, Json, Key, OnCrash, Operation, Policy, SqliteStore, Store, current};
use idem_tests::sqlite::Folder;
use serde_json::Value;

/// Result of a run of the program.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) status: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    /// Returns the single line of JSON in the output.
    pub(crate) fn json(&self) -> Value {
        let lines: Vec<_> = self.out.lines().collect();
        assert_eq!(lines.len(), 1, "{self:?}");
        serde_json::from_str(lines[0]).unwrap()
    }

    /// Returns the error that the program printed as JSON.
    pub(crate) fn error(&self) -> Value {
        serde_json::from_str(&self.err).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the lines of JSON in the output.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[track_caller]
    pub(crate) fn ends(self, status: i32) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn says(self, text: &str) -> Self {
        assert!(self.out.contains(text), "no `{text}` in {self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn complains(self, text: &str) -> Self {
        assert!(self.err.contains(text), "no `{text}` in {self:?}");
        self
    }
}

/// Builds a command of the program, and removes the environment variables that the program would read.
pub(crate) fn command(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idem"));
    command.args(arguments).stdin(Stdio::null());
    for name in ["IDEM_STORE", "IDEM_NAMESPACE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"] {
        command.env_remove(name);
    }
    command
}

pub(crate) fn run(command: &mut Command) -> Run {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { status: status.code().expect("no signal"), out: text(stdout), err: text(stderr) }
}

/// Runs the program on the store at `url`.
pub(crate) fn idem_at(url: &str, arguments: &[&str]) -> Run {
    let credentials = [("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")];
    run(command(arguments).env("IDEM_STORE", url).env("USER", "alice").envs(credentials))
}

/// A SQLite file with records.
pub(crate) struct Records {
    pub(crate) folder: Folder,
    pub(crate) store: SqliteStore,
}

impl Records {
    pub(crate) async fn new() -> Self {
        let folder = Folder::new();
        let store = SqliteStore::open(folder.file()).await.unwrap();
        Self { folder, store }
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.folder.file().display())
    }

    pub(crate) fn idem(&self, arguments: &[&str]) -> Run {
        idem_at(&self.url(), arguments)
    }

    /// Returns the revision that `show` prints for this key.
    pub(crate) fn revision(&self, key: &str) -> String {
        revision(&self.url(), key)
    }

    /// Reads the revision of the key, then decides about the record with this revision, without a question.
    pub(crate) fn decides(&self, verb: &[&str], key: &str) -> Run {
        let seen = self.revision(key);
        self.idem(&[verb, &[key, "--seen", &seen, "--yes"]].concat())
    }

    /// Writes a file with this content.
    pub(crate) fn file(&self, content: &[u8]) -> PathBuf {
        file(self.folder.path(), content)
    }
}

/// Returns the revision that `show` prints for this key in the store at `url`.
pub(crate) fn revision(url: &str, key: &str) -> String {
    let shown = idem_at(url, &["show", key, "--json"]).ends(0).json();
    shown["revision"].as_str().expect("a revision").to_owned()
}

pub(crate) fn file(folder: &Path, content: &[u8]) -> PathBuf {
    let path = folder.join("result.json");
    std::fs::File::create(&path).unwrap().write_all(content).unwrap();
    path
}

const LONG: Duration = Duration::from_secs(3600);

pub(crate) fn key(text: &str) -> Key {
    format!("pay/{text}").parse().unwrap()
}

/// Reserves `pay/<text>` for an hour.
pub(crate) async fn pending(store: &dyn Store, text: &str) -> Lease {
    let beats = store.context();
    let request = ReserveRequest::new(key(text), beats.new_owner(), LONG, LONG).holder(beats.holder());
    match store.reserve(&request.on_crash(OnCrash::Fail)).await.unwrap() {
        Reservation::Granted { lease, .. } => {
            assert_eq!(store.begin(&lease).await.unwrap(), Verdict::Applied);
            lease
        }
        other => panic!("{other:?}"),
    }
}

/// Reserves `pay/<text>`, and ends its attempt as interrupted.
pub(crate) async fn interrupted(store: &dyn Store, text: &str) {
    let lease = pending(store, text).await;
    let _ = store.release(&lease, Release::Interrupted).await.unwrap();
}

/// Runs `pay/<text>` until it is interrupted: step `charge` ends with a card number, and the end of step `book` is not
/// known.
pub(crate) async fn doubtful(store: &dyn Store, text: &str) {
    let operation = Operation::new(store, Key::new("pay", text), Policy::new(LONG));
    let body = async {
        let attempt = current()?;
        let card = async |_| Ok::<_, Error>(BTreeMap::from([("card".to_owned(), "4111".to_owned())]));
        attempt.step("charge").fingerprint(&7).run(card).await?;
        let booking = attempt.step("book").fail().timeout(Duration::from_millis(1));
        booking.run(async |_| std::future::pending::<Result<String, Error>>().await).await
    };
    let error = operation.run(body).await.unwrap_err();
    assert!(matches!(error, Error::Step { .. }), "{error:?}");
    assert_eq!(state(store, text).await, Some("interrupted"));
}

/// Reserves `pay/<text>`, and completes it with this result.
pub(crate) async fn completed(store: &dyn Store, text: &str, result: &[u8]) {
    let lease = pending(store, text).await;
    let result = StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: Bytes::copy_from_slice(result) };
    let _ = store.finish(&lease, &Finish::Completed(result)).await.unwrap();
}

/// Creates a record whose retention has ended.
pub(crate) async fn expired(store: &dyn Store, text: &str) {
    let short = Duration::from_millis(1);
    let request = ReserveRequest::new(key(text), store.context().new_owner(), short, short);
    let Reservation::Granted { .. } = store.reserve(&request).await.unwrap() else { panic!("not new") };
}

/// Returns the name of the record's state.
pub(crate) async fn state(store: &dyn Store, text: &str) -> Option<&'static str> {
    store.inspect(&key(text)).await.unwrap().map(|found| found.record.state.name())
}

/// Runs a line of a shell on a terminal (made by `script`), with `typed` as its input.
pub(crate) fn on_terminal(line: &str, typed: &str) -> (i32, String) {
    let mut command = Command::new("script");
    command.args(["-qec", line, "/dev/null"]).env("TERM", "xterm");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("`script` of util-linux");
    child.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
}
