//! Faults of the machine that affected processes can't see: a failing disk, a clock that is set, and limits of threads
//! and descriptors.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use idem_tests::server::Env;

/// File whose content sets the behaviour of a preloaded library in other processes; deleted when dropped.
#[derive(Debug)]
struct Switch(PathBuf);

impl Switch {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("idem-switch-{}-{number}", std::process::id())))
    }

    fn set(&self, text: &str) {
        // The text is written to a draft that is then renamed, so that readers see the old text or the new one.
        let draft = self.0.with_extension("draft");
        std::fs::write(&draft, text).expect("can be written");
        std::fs::rename(draft, &self.0).expect("can be written");
    }

    fn unset(&self) {
        std::fs::remove_file(&self.0).ok();
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.unset();
    }
}

/// Folder in which the writes of some processes can fail.
#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
    switch: Switch,
}

/// Error of a full disk (`ENOSPC`).
pub const FULL: u32 = 28;
/// Error of a file system that is mounted read-only (`EROFS`).
pub const READ_ONLY: u32 = 30;

impl Disk {
    /// Returns a working disk under `folder`.
    pub fn of(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), switch: Switch::new() }
    }

    /// Environment of the processes that use this disk.
    pub fn env(&self) -> Env {
        vec![
            ("LD_PRELOAD".to_owned(), library().into()),
            ("IDEM_DISK".to_owned(), self.folder.clone().into()),
            ("IDEM_DISK_FAULT".to_owned(), self.switch.0.clone().into()),
        ]
    }

    /// Makes writes fail with this error from now on.
    pub fn fail(&self, error: u32) {
        self.switch.set(&error.to_string());
    }

    /// Lets writes succeed again.
    pub fn heal(&self) {
        self.switch.unset();
    }
}

/// Path of the library that is compiled from `disk.c`.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let name = |ending: &str| std::env::temp_dir().join(format!("idem-disk-{}.{ending}", std::process::id()));
        let (source, library) = (name("c"), name("so"));
        std::fs::write(&source, include_str!("disk.c")).expect("can be written");
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl");
        let output = compile.output().unwrap_or_else(|error| panic!("cc: {error}; run ./scripts/test"));
        assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
        std::fs::remove_file(source).ok();
        library
    })
}

/// Wall clock of some processes, which a test can set.
#[derive(Debug)]
pub struct WallClock(Switch);

impl WallClock {
    /// Returns a clock that shows the right time.
    pub fn new() -> Self {
        let clock = Self(Switch::new());
        clock.step(0);
        clock
    }

    /// Environment of the processes that use this clock.
    pub fn env(&self) -> Env {
        let set = |name: &str, value: &str| (name.to_owned(), value.into());
        vec![
            ("LD_PRELOAD".to_owned(), libfaketime().into()),
            ("FAKETIME_TIMESTAMP_FILE".to_owned(), self.0.0.clone().into()),
            set("FAKETIME_NO_CACHE", "1"),
            // A set wall clock must not change the monotonic clock.
            set("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ]
    }

    /// Sets the clock this many seconds ahead of the right time.
    pub fn step(&self, seconds: i64) {
        self.0.set(&format!("{seconds:+}\n"));
    }
}

/// Library at `IDEM_TEST_FAKETIME`, or at the path to which Debian installs it.
fn libfaketime() -> PathBuf {
    if let Some(library) = std::env::var_os("IDEM_TEST_FAKETIME") {
        return library.into();
    }
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let mut libraries = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    libraries.find(|library| library.exists()).expect("there is no libfaketime; run ./scripts/test")
}

/// Words that a command line needs in front of a program's name so that the program can start no thread. The kernel
/// does not apply this limit to root, so if the test runs as root, the program runs as another user.
pub fn without_threads() -> Vec<String> {
    /// Number of users so far. A limit of threads applies to all processes of a user, so each worker runs as another
    /// user.
    static USERS: AtomicU32 = AtomicU32::new(0);
    let mut words = match user_of(std::process::id()) {
        0 => as_user(1_000_000 + 64 * std::process::id() + USERS.fetch_add(1, Ordering::Relaxed)),
        _ => Vec::new(),
    };
    words.extend(["prlimit", "--nproc=1:"].map(ToOwned::to_owned));
    words
}

fn user_of(process: u32) -> u32 {
    std::fs::metadata(format!("/proc/{process}")).expect("it runs").uid()
}

/// Arguments with which `setpriv` runs a program as `user`.
fn as_user(user: u32) -> Vec<String> {
    let user = user.to_string();
    ["--reuid", &user, "--regid", &user, "--clear-groups"].map(ToOwned::to_owned).to_vec()
}

/// Lets `worker` start threads.
pub fn allow_threads(worker: u32) {
    limit(worker, "--nproc=500:");
}

/// Number of threads that `worker` has.
pub fn threads(worker: u32) -> usize {
    std::fs::read_dir(format!("/proc/{worker}/task")).expect("it runs").count()
}

/// Lowers the limit of descriptors so that `worker` has none left.
pub fn take_descriptors(worker: u32) {
    // The kernel gives out the smallest free number, so the limit must not exceed this number.
    let is_open = |number: &u32| std::fs::symlink_metadata(format!("/proc/{worker}/fd/{number}")).is_ok();
    let free = (0..u32::MAX).find(|number| !is_open(number)).expect("a number");
    limit(worker, &format!("--nofile={free}:"));
}

/// Lets `worker` open descriptors.
pub fn allow_descriptors(worker: u32) {
    limit(worker, "--nofile=1024:");
}

/// Sets a soft limit of the running process `worker`.
fn limit(worker: u32, limit: &str) {
    let mut command = Command::new("setpriv");
    // Root may set limits of other users' processes only with a capability that it may lack.
    if user_of(worker) != user_of(std::process::id()) {
        command.args(as_user(user_of(worker)));
    }
    let set = command.args(["prlimit", "--pid", &worker.to_string(), limit]).output().expect("util-linux");
    assert!(set.status.success(), "prlimit {limit}: {}", String::from_utf8_lossy(&set.stderr));
}
