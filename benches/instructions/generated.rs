//! Code that the compiler generates for each handler, counted in LLVM's intermediate language and compared with the
//! table in benches/README.md.
//!
//! The time of a build depends on the machine and on what else it does; the number of lines does not. Two crates with
//! different numbers of handlers are compiled; the difference is the code of the handlers between them, and the rest is
//! the code that a crate has once.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::handlers::{ANNOTATED, INSTRUMENTED, STEPPED, Side, Workspace};
use crate::{is_near, replace_table};

const START: &str = "<!-- generated code -->";
const END: &str = "<!-- end of generated code -->";
const SIDES: [(&str, Side); 3] = [
    ("`#[tracing::instrument]`", INSTRUMENTED),
    ("`#[idempotent]`", ANNOTATED),
    ("`#[idempotent]` with a step", STEPPED),
];
/// Numbers of handlers of the two crates.
const HANDLERS: [usize; 2] = [10, 30];

/// Functions and lines of a crate.
type Code = [usize; 2];

fn name(side: Side, handlers: usize) -> String {
    format!("{}_{handlers}", side.name)
}

/// Compiles the crate `name`, and counts its code.
fn code(workspace: &Workspace, name: &str) -> Code {
    let deps = workspace.target().join("debug/deps");
    let is_code = |path: &Path| {
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        file.starts_with(&format!("{name}-")) && path.extension().is_some_and(|extension| extension == "ll")
    };
    let files = || {
        let entries = fs::read_dir(&deps).into_iter().flatten().filter_map(Result::ok);
        entries.map(|entry| entry.path()).filter(|path| is_code(path)).collect::<Vec<_>>()
    };
    // The file of an earlier version of the runtime has another name. Cargo would not write a removed file again, so
    // the source is touched.
    for old in files() {
        fs::remove_file(old).expect("the target directory can be written to");
    }
    let source = fs::read_to_string(workspace.source(name)).expect("was generated");
    fs::write(workspace.source(name), source).expect("the target directory can be written to");
    workspace.cargo("rustc", name, &["--emit=llvm-ir", "-Ccodegen-units=1", "-Cdebuginfo=0"]);
    let files = files();
    let [file] = &files[..] else { panic!("rustc wrote {files:?}") };
    let code = fs::read_to_string(file).expect("was written just now");
    [code.lines().filter(|line| line.starts_with("define ")).count(), code.lines().count()]
}

/// Compares the counts with the table, and returns whether they agree.
pub(crate) fn compare() -> bool {
    // The program lies in a folder of the target directory.
    let program = std::env::current_exe().expect("a path");
    let target = program.parent().and_then(Path::parent).expect("the target directory");
    let crates = SIDES.map(|(_, side)| HANDLERS.map(|handlers| (name(side, handlers), side, handlers)));
    let workspace = Workspace::generate(target.join("tmp/generated_code"), crates.as_flattened());
    let mut table =
        "\n| handlers | functions for each | lines for each | functions once | lines once |\n|---|---|---|---|---|\n"
            .to_owned();
    replace_table([START, END], |old| {
        println!("\n### Generated code\n{table}");
        let mut agrees = true;
        for (row, side) in SIDES {
            let [few, many] = HANDLERS.map(|handlers| code(&workspace, &name(side, handlers)));
            let between = HANDLERS[1] - HANDLERS[0];
            // Rounded to whole functions and lines.
            let each = [0, 1].map(|of| (many[of] - few[of] + between / 2) / between);
            let once = [0, 1].map(|of| few[of].saturating_sub(each[of] * HANDLERS[0]));
            let now = [each[0], each[1], once[0], once[1]];
            let line = format!("| {row} | {} | {} | {} | {} |", now[0], now[1], now[2], now[3]);
            let was = old.lines().find_map(|line| line.strip_prefix(&format!("| {row} | ")));
            let was: Vec<f64> =
                was.into_iter().flat_map(|was| was.split(" |")).filter_map(|was| was.trim().parse().ok()).collect();
            let now = now.map(|count| f64::from(u32::try_from(count).expect("a small crate")));
            let is_near = was.len() == now.len() && now.iter().zip(&was).all(|(now, was)| is_near(*now, *was));
            agrees &= is_near;
            println!("{line}{}", if is_near { String::new() } else { format!(" differs from {was:?}") });
            let _ = writeln!(table, "{line}");
        }
        (agrees, table)
    })
}
