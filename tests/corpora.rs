//! Runs every target of `fuzz/` over the inputs that the fuzzer has found to matter.

// Bodies of the targets, which the fuzzer's programs use as well.
#[path = "../fuzz/src/lib.rs"]
#[allow(unreachable_pub)] // The programs are another crate.
mod targets;

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

/// Memory that an input may take beyond the peak of all inputs before it: 512 bytes hold no more, even if they are
/// compressed.
const MAX_KIB: u64 = 16 * 1024;

fn main() {
    let names: Vec<_> = targets::TARGETS.iter().map(|(name, _)| *name).collect();
    for folder in ["corpus", "fuzz_targets"] {
        let files: Vec<_> = files(folder).iter().map(|file| file.file_stem().unwrap().to_owned()).collect();
        assert_eq!(files, names, "each target has a corpus and a program");
    }
    for (name, target) in targets::TARGETS {
        // A first run on an empty input, so that memory allocated once does not count.
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

/// Largest address space that this process has had, on systems that report it.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmPeak:")?.trim().strip_suffix(" kB")?.trim().parse().ok())
}
