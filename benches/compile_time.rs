//! Time to compile 200 annotated handlers, compared with the same 200 under `#[tracing::instrument]`, and with the same
//! 200 whose call of another service is a step.
//!
//! Generates a workspace in the target directory, with one crate of handlers for each side and one without any
//! attribute. The dependencies are compiled first and not measured; a measured build compiles one of the crates anew,
//! without incremental compilation.

use std::fs;
use std::path::Path;

use idem_benches::handlers::{ANNOTATED, INSTRUMENTED, PLAIN, STEPPED, Side, Workspace};
use idem_benches::{Goal, Table, alternate, is_wanted, sized, timed};

const SIDES: [Side; 4] = [PLAIN, INSTRUMENTED, ANNOTATED, STEPPED];

/// Compiles only the crate `name`. Returns the elapsed time and the processor time, in milliseconds.
fn compile(workspace: &Workspace, command: &str, name: &str) -> (f64, f64) {
    let path = workspace.source(name);
    let source = fs::read_to_string(&path).expect("was generated");
    fs::write(&path, source).expect("the target directory can be written to");
    let before = children_cpu_ms();
    let took = timed(|| workspace.cargo(command, name, &[]));
    (took.as_secs_f64() * 1e3, children_cpu_ms() - before)
}

/// Returns the processor time of all ended child processes, in milliseconds. The system counts it in ticks of 10 ms.
fn children_cpu_ms() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    fields.split(' ').skip(13).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * 10.0
}

fn main() {
    let handlers = sized(200, 5);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compile_time");
    let workspace = Workspace::generate(folder, &SIDES.map(|side| (side.name.to_owned(), side, handlers)));
    let table = Table::new(&format!("Compile time of {handlers} handlers"), "ms", "times");
    for command in sized(&["check", "build"][..], &["check"]) {
        if !is_wanted(command) {
            continue;
        }
        for side in SIDES {
            workspace.cargo(command, side.name, &[]);
        }
        let (mut cpu, rounds) = (SIDES.map(|_| Vec::new()), sized(7, 1));
        let measure = |side: usize, cpu: &mut Vec<f64>| {
            let (took, on_cpu) = compile(&workspace, command, SIDES[side].name);
            cpu.push(on_cpu);
            took
        };
        let [plain_cpu, instrumented_cpu, annotated_cpu, stepped_cpu] = &mut cpu;
        let [plain, instrumented, annotated, stepped] = alternate(
            rounds,
            [
                &mut || measure(0, plain_cpu),
                &mut || measure(1, instrumented_cpu),
                &mut || measure(2, annotated_cpu),
                &mut || measure(3, stepped_cpu),
            ],
        );
        let [plain_cpu, instrumented_cpu, annotated_cpu, stepped_cpu] = cpu.map(|mut values| {
            values.remove(0);
            idem_benches::Samples::from(values)
        });
        let times = |idem: f64, raw: f64| idem / raw;
        let row = |what: &str| format!("cargo {command}, {what}");
        let goal = Goal::AtMost(if *command == "check" { 0.7 } else { 0.9 });
        table.line(&row("elapsed"), &instrumented, &annotated, times, goal);
        table.line(&row("processor time"), &instrumented_cpu, &annotated_cpu, times, goal);
        table.line(&row("elapsed, against no attribute"), &plain, &annotated, times, Goal::None);
        table.line(&row("processor time, against no attribute"), &plain_cpu, &annotated_cpu, times, Goal::None);
        table.line(&row("elapsed, with a step against without"), &annotated, &stepped, times, Goal::None);
        table.line(
            &row("processor time, with a step against without"),
            &annotated_cpu,
            &stepped_cpu,
            times,
            Goal::None,
        );
    }
}
