//! Runs every target of `fuzz/` with the inputs that the fuzzer has found to reach different code.

// The fuzzer's programs include the same targets.
#[path = "../fuzz/src/lib.rs"]
#[allow(unreachable_pub)] // The fuzzer's programs, which are another crate, use these items.
mod targets;

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

/// Largest amount, in KiB, by which one input may raise the peak of this process's memory. An input has at most 512
/// bytes, and even compressed input must not expand to more data than this memory holds.
const MAX_KIB: u64 = 16 * 1024;

fn main() {
    let names: Vec<_> = targets::TARGETS.iter().map(|(name, _)| *name).collect();
    for folder in ["corpus", "fuzz_targets"] {
        let files: Vec<_> = files(folder).iter().map(|file| file.file_stem().unwrap().to_owned()).collect();
        assert_eq!(files, names, "each target has a corpus and a fuzzing program");
    }
    for (name, target) in targets::TARGETS {
        // The first run has an empty input, so that memory that is allocated only once is not attributed to another
        // input.
        target(&[]);
        let files = files(&format!("corpus/{name}"));
        assert!(!files.is_empty(), "{name} has no corpus");
        for file in &files {
            let input = std::fs::read(file).unwrap();
            let before = peak_kib();
            assert!(catch_unwind(|| target(&input)).is_ok(), "{}", file.display());
            if let (Some(before), Some(after)) = (before, peak_kib()) {
                assert!(after - before < MAX_KIB, "{} takes {} KiB", file.display(), after - before);
            }
        }
        println!("{name}: {} inputs survived", files.len());
    }
}

fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

/// Largest address space that this process has had; `None` if the system does not report the size.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmPeak:")?.trim().strip_suffix(" kB")?.trim().parse().ok())
}
