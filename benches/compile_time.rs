//! Time to compile 200 annotated handlers, compared with the same 200 under `#[tracing::instrument]`, and with the same
//! 200 whose call of another service is a step.
//!
//! Generates a workspace in the target directory, with one crate of handlers for each side and one without any
//! attribute. The dependencies are compiled first and not measured; a measured build compiles one of the crates anew,
//! without incremental compilation. Each handler is turned into a `Pin<Box<dyn Future + Send>>`, so that `cargo build`
//! generates its code, as for a handler that is spawned.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use idem_benches::{Goal, Table, alternate, is_wanted, sized, timed};

const IDEMPOTENT: &str =
    r#"#[idem_runtime::idempotent(key = "order:{event.order_id}", ttl = "7d", store = app.store)]"#;
const BOOK: &str = "app.carrier.book(event.order_id, &event.address).await?";
const BOOK_IN_A_STEP: &str = r#"idem_runtime::current()?.step("book").run(async |_| {
        app.carrier.book(event.order_id, &event.address).await
    }).await?"#;

/// Sides: name, attribute of each handler, and its call of another service.
const SIDES: [(&str, &str, &str); 4] = [
    ("plain", "", BOOK),
    ("instrumented", "#[tracing::instrument]", BOOK),
    ("annotated", IDEMPOTENT, BOOK),
    ("stepped", IDEMPOTENT, BOOK_IN_A_STEP),
];

const PRELUDE: &str = r#"
use std::future::Future;
use std::pin::Pin;

#[derive(Debug)]
pub struct App {
    pub store: idem_runtime::MemoryStore,
    pub carrier: Carrier,
}

#[derive(Debug)]
pub struct Carrier;

impl Carrier {
    pub async fn book(&self, order_id: u64, address: &str) -> Result<Shipment, ShipError> {
        Ok(Shipment { tracking: format!("{order_id}-{address}"), cents: 490 })
    }
}

#[derive(Debug)]
pub struct OrderPaid {
    pub order_id: u64,
    pub address: String,
    pub cents: u64,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Shipment {
    pub tracking: String,
    pub cents: u64,
}

#[derive(Debug)]
pub enum ShipError {
    TooCheap,
    Idempotency(idem_runtime::Error),
}

impl From<idem_runtime::Error> for ShipError {
    fn from(error: idem_runtime::Error) -> Self {
        Self::Idempotency(error)
    }
}
"#;

fn source(attribute: &str, call: &str, handlers: usize) -> String {
    let mut source = PRELUDE.to_owned();
    for i in 0..handlers {
        write!(
            source,
            r"
{attribute}
pub async fn ship_{i}(app: &App, event: &OrderPaid) -> Result<Shipment, ShipError> {{
    if event.cents <= {i} {{
        return Err(ShipError::TooCheap);
    }}
    let shipment = {call};
    let cents = shipment.cents + event.cents;
    Ok(Shipment {{ cents, ..shipment }})
}}
"
        )
        .expect("a string takes everything");
    }
    source.push_str(
        "\npub type Shipping<'a> = Pin<Box<dyn Future<Output = Result<Shipment, ShipError>> + Send + 'a>>;\n\n\
         pub fn all<'a>(app: &'a App, event: &'a OrderPaid) -> Vec<Shipping<'a>> {\n    vec![\n",
    );
    for i in 0..handlers {
        writeln!(source, "        Box::pin(ship_{i}(app, event)),").expect("a string takes everything");
    }
    source.push_str("    ]\n}\n");
    source
}

/// A workspace with a crate for each side.
struct Workspace(PathBuf);

impl Workspace {
    fn generate(handlers: usize) -> Self {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace").to_owned();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compile_time");
        let names = SIDES.map(|(name, ..)| name);
        let write = |path: &str, text: &str| {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().expect("in the folder")).expect("the target directory can be written to");
            fs::write(path, text).expect("the target directory can be written to");
        };
        write(
            "Cargo.toml",
            &format!(
                "[workspace]\nresolver = \"3\"\nmembers = {names:?}\n\n[profile.dev.package.\"*\"]\ndebug = false\n"
            ),
        );
        for (name, attribute, call) in SIDES {
            let manifest = format!(
                "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\npublish = false\n\n\
                 [dependencies]\nidem-runtime = {{ path = \"{}\" }}\nserde = {{ version = \"1\", features = [\"derive\"] }}\n\
                 tracing = {{ version = \"0.1\", default-features = false, features = [\"attributes\"] }}\n",
                root.join("idem-runtime").display(),
            );
            write(&format!("{name}/Cargo.toml"), &manifest);
            write(&format!("{name}/src/lib.rs"), &source(attribute, call, handlers));
        }
        // Cargo has downloaded the versions that this workspace locks, so it needs no network here.
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).expect("the workspace is locked");
        Self(folder)
    }

    fn cargo(&self, command: &str, name: &str) {
        let output = Command::new(env!("CARGO"))
            .args([command, "--quiet", "--offline", "--package", name])
            .current_dir(&self.0)
            .env("CARGO_TARGET_DIR", self.0.join("target"))
            .env("CARGO_INCREMENTAL", "0")
            .env_remove("RUSTFLAGS")
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Compiles only the crate `name`. Returns the elapsed time and the processor time, in milliseconds.
    fn compile(&self, command: &str, name: &str) -> (f64, f64) {
        let path = self.0.join(name).join("src/lib.rs");
        let source = fs::read_to_string(&path).expect("was generated");
        fs::write(&path, source).expect("the target directory can be written to");
        let before = children_cpu_ms();
        let took = timed(|| self.cargo(command, name));
        (took.as_secs_f64() * 1e3, children_cpu_ms() - before)
    }
}

/// Returns the processor time of all ended child processes, in milliseconds. The system counts it in ticks of 10 ms.
fn children_cpu_ms() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    fields.split(' ').skip(13).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * 10.0
}

fn main() {
    let handlers = sized(200, 5);
    let workspace = Workspace::generate(handlers);
    let table = Table::new(&format!("Compile time of {handlers} handlers"), "ms", "times");
    for command in sized(&["check", "build"][..], &["check"]) {
        if !is_wanted(command) {
            continue;
        }
        for (name, ..) in SIDES {
            workspace.cargo(command, name);
        }
        let (mut cpu, rounds) = (SIDES.map(|_| Vec::new()), sized(7, 1));
        let measure = |side: usize, cpu: &mut Vec<f64>| {
            let (took, on_cpu) = workspace.compile(command, SIDES[side].0);
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
        table.line(&row("elapsed"), &instrumented, &annotated, times, Goal::AtMost(1.5));
        table.line(&row("processor time"), &instrumented_cpu, &annotated_cpu, times, Goal::AtMost(1.5));
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
