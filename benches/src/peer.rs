//! Other libraries, each in a separate process that gets its work line by line.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Process of a peer, which waits for work and is killed when this value is dropped. `benches/peers` contains the
/// programs, and `benches/peers/sides.py` defines the lines that these programs read and write.
#[derive(Debug)]
pub struct Peer {
    name: &'static str,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Returns the folder in which `scripts/bench peers` installs the peers, unless `IDEM_BENCH_PEERS` names another one.
fn folder() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-peers");
    std::env::var_os("IDEM_BENCH_PEERS").map_or_else(default, Into::into)
}

impl Peer {
    /// Starts a peer in Python: a script in `benches/peers`, with these arguments.
    pub fn python(name: &'static str, script: &str, args: &[&str]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(script);
        let program = folder().join("venv/bin/python");
        Self::start(name, &program, [&["-W", "ignore", &script.to_string_lossy()], args].concat())
    }

    /// Starts a peer in Rust: a program of `benches/peers`, with these arguments.
    pub fn rust(name: &'static str, program: &str, args: &[&str]) -> Self {
        Self::start(name, &folder().join("rust/release").join(program), args.to_vec())
    }

    /// Starts this bench program with these arguments, for a side that a separate process must measure.
    pub fn this(name: &'static str, args: &[&str]) -> Self {
        Self::start(name, &std::env::current_exe().expect("a bench is a file"), args.to_vec())
    }

    fn start(name: &'static str, program: &Path, args: Vec<&str>) -> Self {
        let program = std::path::absolute(program).expect("there is a working folder");
        assert!(program.exists(), "{name} needs {}: run ./scripts/bench peers", program.display());
        // `setpriv` makes the kernel kill the peer if this process dies first.
        let started = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(&program)
            .args(args)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = started.unwrap_or_else(|error| panic!("{name} can't be started: {error}"));
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut peer = Self { name, child, input, output };
        assert_eq!(peer.read(), "ready", "{name}");
        peer
    }

    /// Returns the next line of the peer's output.
    pub fn read(&mut self) -> String {
        let mut line = String::new();
        let read = self.output.read_line(&mut line);
        assert!(read.is_ok_and(|bytes| bytes > 0), "{} has ended: see above", self.name);
        line.trim_end().to_owned()
    }

    /// Lets the peer make calls for `count` orders, from the order `first` on, and returns thousands of calls per
    /// second. `work` is "first" or "replay". The calls are made by `threads` threads (or tasks) in each of `processes`
    /// processes.
    pub fn run(&mut self, work: &str, count: u64, (processes, threads): (u64, u64), first: u64) -> f64 {
        writeln!(self.input, "{work} {count} {processes} {threads} {first}").expect("listens");
        let said = self.read();
        said.parse().unwrap_or_else(|_| panic!("{} said {said}", self.name))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
