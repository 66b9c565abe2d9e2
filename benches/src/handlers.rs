//! Generated crates of handlers, whose compilation is measured and counted.
//!
//! Each handler is turned into a `Pin<Box<dyn Future + Send>>`, so that a build generates its code, as for a handler
//! that is spawned.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const IDEMPOTENT: &str =
    r#"#[idem_runtime::idempotent(key = "order:{event.order_id}", ttl = "7d", store = app.store)]"#;
const BOOK: &str = "app.carrier.book(event.order_id, &event.address).await?";
const BOOK_IN_A_STEP: &str = r#"idem_runtime::current()?.step("book").run(async |_| {
        app.carrier.book(event.order_id, &event.address).await
    }).await?"#;

/// Handlers of one kind.
#[derive(Clone, Copy)]
pub struct Side {
    /// Name of the crate.
    pub name: &'static str,
    /// Attribute of each handler.
    attribute: &'static str,
    /// Call of another service.
    call: &'static str,
}

/// Handlers without an attribute.
pub const PLAIN: Side = Side { name: "plain", attribute: "", call: BOOK };
/// Handlers with `#[tracing::instrument]`.
pub const INSTRUMENTED: Side = Side { name: "instrumented", attribute: "#[tracing::instrument]", call: BOOK };
/// Handlers with `#[idempotent]`.
pub const ANNOTATED: Side = Side { name: "annotated", attribute: IDEMPOTENT, call: BOOK };
/// Handlers with `#[idempotent]` whose call of another service is a step.
pub const STEPPED: Side = Side { name: "stepped", attribute: IDEMPOTENT, call: BOOK_IN_A_STEP };

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

fn source(Side { attribute, call, .. }: Side, handlers: usize) -> String {
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
pub struct Workspace(PathBuf);

impl Workspace {
    /// Generates the workspace in `folder`, with a crate for each name, side and number of handlers.
    pub fn generate(folder: PathBuf, crates: &[(String, Side, usize)]) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|folder| folder.join("Cargo.lock").exists());
        let root = root.expect("the package lies in the workspace");
        let names: Vec<_> = crates.iter().map(|(name, ..)| name).collect();
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
        for (name, side, handlers) in crates {
            let manifest = format!(
                "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\npublish = false\n\n\
                 [dependencies]\nidem-runtime = {{ path = \"{}\" }}\nserde = {{ version = \"1\", features = [\"derive\"] }}\n\
                 tracing = {{ version = \"0.1\", default-features = false, features = [\"attributes\"] }}\n",
                root.join("idem-runtime").display(),
            );
            write(&format!("{name}/Cargo.toml"), &manifest);
            write(&format!("{name}/src/lib.rs"), &source(*side, *handlers));
        }
        // Cargo has downloaded the versions that this workspace locks, so it needs no network here.
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).expect("the workspace is locked");
        Self(folder)
    }

    /// Runs cargo for the crate `name`; `more` are arguments for rustc.
    pub fn cargo(&self, command: &str, name: &str, more: &[&str]) {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([command, "--quiet", "--offline", "--package", name]);
        if !more.is_empty() {
            cargo.arg("--").args(more);
        }
        let output = cargo
            .current_dir(&self.0)
            .env("CARGO_TARGET_DIR", self.target())
            .env("CARGO_INCREMENTAL", "0")
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env_remove("CARGO_BUILD_TARGET")
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Returns the folder with what is compiled.
    pub fn target(&self) -> PathBuf {
        self.0.join("target")
    }

    /// Returns the file with the handlers of the crate `name`.
    pub fn source(&self, name: &str) -> PathBuf {
        self.0.join(name).join("src/lib.rs")
    }
}
