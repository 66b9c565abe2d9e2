//! Checks that the documents agree with the sources, and that both follow this project's rules.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all files in `folder` and its subfolders that have the extension `ending`. Folders named `target` are left
/// out.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|it| it == ending) {
            found.push(path);
        } else if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            found.extend(files(&path, ending));
        }
    }
    found
}

/// Code of a file, without comments and without the tests at its end.
fn code(path: &Path) -> String {
    let text = read(path);
    let end = text.find("\n#[cfg(test)]\nmod ").or_else(|| text.find("\n#[cfg(all(test")).unwrap_or(text.len());
    let lines = text[..end].lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Names of the floors in ARCHITECTURE.md, from the top.
fn floors() -> Vec<String> {
    let architecture = read(&root().join("ARCHITECTURE.md"));
    let (_, rest) = architecture.split_once("<!-- floors, from the top -->").expect("the table begins");
    let (table, _) = rest.split_once("<!-- end of floors -->").expect("the table ends");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn each_module_imports_only_from_floors_below_its_own() {
    let sources = root().join("idem-runtime/src");
    let floors = floors();
    let height = |name: &str| floors.iter().rev().position(|floor| floor == name);
    let (mut imports, mut wrong) = (0, Vec::new());
    for path in files(&sources, "rs") {
        let relative =
            path.strip_prefix(&sources).expect("the file is in the source folder").to_str().expect("a name in ASCII");
        // The crate root has no floor. Modules that only the tests' scheduler runs are no part of the library.
        if relative == "lib.rs" || relative.ends_with("interleavings.rs") || relative.ends_with("shuttle.rs") {
            continue;
        }
        let name = relative.split('/').next().unwrap_or_default().trim_end_matches(".rs");
        let own = height(name).unwrap_or_else(|| panic!("{relative} is on no floor of ARCHITECTURE.md"));
        // A store imports only `kit` and the floors below, so that it can move to a crate of its own.
        let limit = if name == "stores" { height("kit").expect("a floor") + 1 } else { own };
        for rest in code(&path).split("crate::").skip(1) {
            let target: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            imports += 1;
            match height(&target) {
                // Exported macros are in the crate root.
                _ if target.starts_with("__") || target == name => {}
                Some(floor) if floor < limit => {}
                Some(_) => wrong.push(format!("{relative} imports `{target}`, which is on a higher floor")),
                None => wrong.push(format!("{relative} imports `{target}` through the crate root")),
            }
        }
    }
    assert!(imports > 250, "{imports} imports are too few: the check reads nothing");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The rows of the picture are in the order of the floors: no module of an upper row is below a module of a lower row.
/// The stores have their own column.
#[test]
fn the_picture_of_the_modules_agrees_with_the_table() {
    let page = read(&root().join("ARCHITECTURE.md"));
    let (_, rest) = page.split_once("## Modules").expect("the section");
    let picture = rest.split("```").nth(1).expect("the picture");
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect()
    };
    let (floors, drawn) = (floors(), words(picture));
    let missing: Vec<_> = floors.iter().filter(|floor| !drawn.contains(floor)).collect();
    assert!(missing.is_empty(), "not in the picture: {missing:?}");
    let mut from = 0;
    for row in ["doors", "protocol", "contract", "ground"] {
        let line = picture.lines().find_map(|line| line.trim_start().strip_prefix(row)).expect("a row");
        let modules = words(line).into_iter().filter(|word| !["stores", "kit"].contains(&word.as_str()));
        let heights: Vec<_> = modules.filter_map(|word| floors.iter().position(|floor| *floor == word)).collect();
        let (top, bottom) = (heights.iter().min().expect("modules"), heights.iter().max().expect("modules"));
        assert!(*top >= from, "a module of the row `{row}` is on a higher floor than a module of the row before");
        from = bottom + 1;
    }
}

/// Code takes its clock as an argument, because times of two clocks can't be compared, and a test controls only the
/// clock that it passes. `MADE` lists the files that make a clock; no change may add a file to this list.
#[test]
fn every_clock_is_passed_as_an_argument() {
    const MADE: [(&str, &str); 15] = [
        ("stores/memory/options.rs", "the default of a builder"),
        ("stores/sqlite/options.rs", "the default of a builder"),
        ("stores/mysql/options.rs", "the default of a builder"),
        ("stores/postgres/options.rs", "the default of a builder"),
        ("stores/redis/options.rs", "the default of a builder"),
        ("stores/dynamo/options.rs", "the default of a builder"),
        ("stores/nats/options.rs", "the default of a builder"),
        ("within/open.rs", "the default of `OpenTransaction::new` and `transact`"),
        ("http/client/key.rs", "a random key, made before there is a layer"),
        ("http/client/settings.rs", "the default of `RetryLayer`, which has no store"),
        ("engine/batch.rs", "the deadline of `observe_all`, whose deliveries may have any stores or none"),
        ("engine/budget.rs", "deliveries that reached no store"),
        ("stores/redis/wake.rs", "pauses of a subscription"),
        ("conformance/case.rs", "limits in real time, next to the clock of the store that is checked"),
        ("conformance/mod.rs", "limits in real time, next to the clock of the store that is checked"),
    ];
    let sources = root().join("idem-runtime/src");
    let mut found = BTreeSet::new();
    for path in files(&sources, "rs") {
        let relative =
            path.strip_prefix(&sources).expect("the file is in the source folder").to_str().expect("a name in ASCII");
        if !relative.starts_with("clock/") && code(&path).contains("SystemClock::") {
            found.insert(relative.to_owned());
        }
    }
    let known: BTreeSet<_> = MADE.iter().map(|(file, _)| (*file).to_owned()).collect();
    assert_eq!(found, known, "files that make a clock, and files that may make a clock");
}

/// Name and type of each `static` in a source.
fn statics(code: &str) -> impl Iterator<Item = (&str, &str)> {
    let declared = code.match_indices("static ").filter(|(at, _)| !code[..*at].ends_with(['\'', '_']));
    declared.filter_map(|(at, word)| {
        let (declared, _) = code[at + word.len()..].split_once(" =")?;
        let (name, of) = declared.split_once(':')?;
        name.chars().all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit()).then_some((name, of.trim()))
    })
}

#[test]
fn no_static_holds_a_lock_for_which_a_forked_child_would_wait() {
    // At the fork, a thread that does not exist in the child may hold any of these locks.
    const WAITS: [&str; 7] = ["Mutex", "RwLock", "LazyLock", "OnceLock", "Once<", "Condvar", "Notify"];
    // The exception: a forked child tries to lock `SLOTS` for about 0.1 s, and then returns an error.
    const ALLOWED: [(&str, &str); 1] = [("stores/sqlite/fork_guard.rs", "SLOTS")];
    let sources = root().join("idem-runtime/src");
    let (mut found, mut wrong) = (0, Vec::new());
    for path in files(&sources, "rs") {
        let relative =
            path.strip_prefix(&sources).expect("the file is in the source folder").to_str().expect("a name in ASCII");
        for (name, of) in statics(&code(&path)) {
            found += 1;
            // One thread or one process alone uses the value of such a cell, so a forked child waits for no lock in it.
            let is_own = ["PerProcess<", "Cell<", "RefCell<"].iter().any(|own| of.starts_with(own));
            let waits = WAITS.iter().any(|waits| of.replace("SharedOnce<", "").contains(waits));
            if waits && !is_own && !ALLOWED.contains(&(relative, name)) {
                wrong.push(format!("{relative}: `{name}: {of}`"));
            }
        }
    }
    assert!(found >= 25, "{found} statics are too few: the check reads nothing");
    assert!(wrong.is_empty(), "use `PerProcess`, `SharedOnce` or `SharedList` of `sync`: {wrong:#?}");
}

#[test]
fn each_file_of_a_store_is_in_the_table_of_architecture_md() {
    let architecture = read(&root().join("ARCHITECTURE.md"));
    let (_, rest) = architecture.split_once("<!-- files of the stores -->").expect("the table begins");
    let (table, _) = rest.split_once("<!-- end of the files of the stores -->").expect("the table ends");
    let mut told: Vec<String> = Vec::new();
    for row in table.lines().filter(|row| row.starts_with("| `") && !row.contains('…')) {
        let cells: Vec<&str> = row.split(" | ").collect();
        for store in cells[1].split(", ") {
            told.extend(quoted(cells[0]).map(|file| format!("{store}/{}", file.trim_end_matches('/'))));
        }
    }
    let stores = root().join("idem-runtime/src/stores");
    let mut there = Vec::new();
    for store in ["memory", "sqlite", "mysql", "postgres", "redis", "dynamo", "nats"] {
        for entry in fs::read_dir(stores.join(store)).expect("a folder for each store") {
            there.push(format!("{store}/{}", entry.expect("an entry").file_name().to_str().expect("a name in ASCII")));
        }
    }
    told.sort();
    there.sort();
    assert_eq!(told, there, "the table of ARCHITECTURE.md and the folders of the stores name the same files");
}

/// Texts between back quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Reports whether `text` may be the name of a test.
fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// All names in the sources that contain a `_`, and the names of the files.
fn names() -> HashSet<String> {
    let mut known = HashSet::new();
    for folder in ["idem-runtime/src", "idem-macros/src", "idem-cli", "tests", "examples", "benches", "fuzz/src"] {
        for path in files(&root().join(folder), "rs") {
            let text = read(&path);
            let word = |c: char| !(c.is_alphanumeric() || c == '_');
            known.extend(text.split(word).filter(|it| it.contains('_')).map(str::to_owned));
            known.extend(path.file_stem().and_then(|it| it.to_str()).map(str::to_owned));
        }
    }
    known
}

#[test]
fn the_tests_that_documents_name_exist() {
    let known = names();
    let (mut named, mut missing) = (0, Vec::new());
    let documents = fs::read_dir(root()).expect("the folder").map(|entry| entry.expect("an entry").path());
    let documents = documents.filter(|path| path.extension().is_some_and(|it| it == "md"));
    for path in documents.chain(files(&root().join("docs"), "md")).chain(files(&root().join("tests"), "md")) {
        let is_history = path.file_name().is_some_and(|it| it == "CHANGELOG.md");
        for name in quoted(&read(&path)).filter(|_| !is_history) {
            // A name of a test has at least three underscores. A shorter name may name a column, an option or a field.
            if is_name(name) && name.matches('_').count() >= 3 {
                named += 1;
                if !known.contains(name) {
                    missing.push(format!("{}: `{name}`", path.display()));
                }
            }
        }
    }
    assert!(named > 50, "{named} names are too few: the check reads nothing");
    assert!(missing.is_empty(), "documents name tests that do not exist: {missing:#?}");
}

/// Label of a row of a table of invariants, such as `S1` or `L10`.
fn label(row: &str) -> Option<&str> {
    let (label, _) = row.strip_prefix("| ")?.split_once(" | ")?;
    let (kind, number) = label.split_at_checked(1)?;
    (matches!(kind, "S" | "L") && number.parse::<u8>().is_ok()).then_some(label)
}

#[test]
fn every_invariant_has_tests() {
    let (architecture, proof) = (read(&root().join("ARCHITECTURE.md")), read(&root().join("docs/proof.md")));
    let (_, rest) = proof.split_once("<!-- index of invariants -->").expect("the index begins");
    let (index, _) = rest.split_once("<!-- end of the index -->").expect("the index ends");
    let labels = |text| -> Vec<&str> { str::lines(text).filter_map(label).collect() };
    assert_eq!(labels(index), labels(&architecture), "the index and ARCHITECTURE.md name the same rules");
    let known = names();
    for row in index.lines().filter(|row| label(row).is_some()) {
        // The first cells hold the label and the rule; the others name tests.
        let cells = row.split('|').skip(3);
        let tests: Vec<_> = cells.flat_map(quoted).filter(|name| is_name(name) && name.contains('_')).collect();
        assert!(!tests.is_empty(), "no test in {row}");
        for name in tests {
            assert!(known.contains(name), "no test is called `{name}`, in {row}");
        }
    }
}

#[test]
fn the_readme_names_the_versions_that_are_used() {
    let (readme, manifest) = (read(&root().join("README.md")), read(&root().join("Cargo.toml")));
    let (_, version) = manifest.split_once("rust-version = \"").expect("a version of Rust");
    let version = version.split('"').next().unwrap_or_default();
    for place in [format!("Rust-{version}_or_newer"), format!("\nRust {version} and tokio")] {
        assert!(readme.contains(&place), "README.md does not contain `{place}`");
    }
    let (_, rest) = readme.split_once("## Requirements").expect("the section");
    let (section, _) = rest.split_once("\n## ").expect("the next section");
    let mut drivers = 0;
    for cell in section.lines().filter_map(|row| row.split(" | ").nth(1)) {
        for driver in cell.split(", ").filter_map(|driver| driver.strip_prefix('`')) {
            let (name, version) = driver.split_once("` ").expect("a version");
            let is_used = |line: &str| {
                // A manifest renames a driver that it uses in several releases.
                let renamed = format!(" = {{ package = \"{name}\", version = ");
                let rest = line.strip_prefix(&format!("{name} = ")).or_else(|| Some(line.split_once(&renamed)?.1));
                let rest = rest.map(|rest| rest.trim_start_matches("{ version = ").trim_start_matches(['"', '>', '=']));
                // `0.39 to 0.43` in README.md is `>=0.39, <0.44` in the manifest.
                rest.is_some_and(|rest| rest.starts_with(version.split(' ').next().unwrap_or_default()))
            };
            assert!(manifest.lines().any(is_used), "Cargo.toml has another version than {name} {version}");
            drivers += 1;
        }
    }
    assert!(drivers >= 7, "{drivers} drivers are too few: the check reads nothing");
    assert!(readme.lines().count() <= 250, "README.md has more than 250 lines");
}

/// Programs on pages: the page, the example, and the code. The example names its page in a comment.
fn programs() -> Vec<(String, PathBuf, String)> {
    let examples = files(&root().join("examples"), "rs").into_iter();
    let programs = examples.filter_map(|path| {
        let source = read(&path);
        let (before, program) = source.split_once(" has the program from here on.\n")?;
        let (_, page) = before.rsplit_once("// ").expect("the name of a page");
        Some((page.to_owned(), path, program.to_owned()))
    });
    programs.collect()
}

#[test]
fn each_program_of_a_page_is_an_example() {
    let programs = programs();
    assert!(programs.len() >= 5, "{} programs are too few: the check reads nothing", programs.len());
    for (page, path, program) in &programs {
        let blocks = read(&root().join(page));
        let mut blocks = blocks.split("```rust").skip(1).filter_map(|rest| rest.split_once('\n')?.1.split_once("```"));
        assert!(blocks.any(|(block, _)| block == program), "{page} has not the program of {}", path.display());
    }
}

#[test]
fn the_first_programs_are_complete_and_short() {
    let page = read(&root().join("docs/start.md"));
    let there: Vec<_> = programs().into_iter().filter(|(page, ..)| page == "docs/start.md").collect();
    assert_eq!(page.matches("\n```rust").count(), there.len(), "each block of code in docs/start.md is an example");
    for (_, path, program) in there {
        let code = program.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        let lines = code.filter(|line| !line.starts_with("use ")).count();
        assert!(lines <= 45, "{} has {lines} lines without imports and comments", path.display());
        assert!(program.contains("fn main()"), "{} is a whole program", path.display());
    }
}

/// Name and documented default of each method in `source` that sets an option.
fn settings(source: &str) -> Vec<(String, String)> {
    let (mut comment, mut settings) = (String::new(), Vec::new());
    let mut lines = source.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if let Some(text) = line.strip_prefix("///") {
            comment += text;
        } else if let Some(rest) = line.strip_prefix("pub fn ") {
            let mut signature = rest.to_owned();
            while !signature.contains('{') {
                signature += lines.next().expect("the end of a signature");
            }
            let (name, arguments) = signature.split_once(['(', '<']).expect("arguments");
            if arguments.contains("self,") && arguments.contains("-> Self") {
                let default = comment.split_once("(default: ").map(|(_, rest)| rest);
                let default = default.unwrap_or_else(|| panic!("`{name}` names no default"));
                let end = default.find([')', ';', ',']).unwrap_or(default.len());
                // The parenthesis in `Profile::ietf()` does not end the default.
                let end = if default[end..].starts_with(")`") { end + 2 } else { end };
                settings.push((name.to_owned(), default[..end].to_owned()));
            }
            comment.clear();
        } else if !line.starts_with("#[") {
            comment.clear();
        }
    }
    settings
}

#[test]
fn the_page_about_http_lists_every_setting_with_its_default() {
    let there = settings(&read(&root().join("idem-runtime/src/http/layer.rs")));
    let page = read(&root().join("docs/http.md"));
    let (_, rest) = page.split_once("## Settings").expect("the section");
    let (section, _) = rest.split_once("\n## ").expect("the next section");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let told: Vec<_> = rows
        .map(|row| {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_owned(), cells[2].to_owned())
        })
        .collect();
    assert!(there.len() > 15, "{} settings are too few: the check reads nothing", there.len());
    assert_eq!(told, there, "docs/http.md and layer.rs have the same settings, in one order");
}

/// A fenced block of a page.
struct Block {
    page: String,
    /// Text after the back quotes, such as `rust` or `sh`.
    tag: String,
    text: String,
}

/// Blocks of all pages that a user reads.
fn blocks() -> Vec<Block> {
    let pages = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "benches/README.md"].map(|page| root().join(page));
    let mut found = Vec::new();
    for path in pages.into_iter().chain(files(&root().join("docs"), "md")) {
        let page = path.strip_prefix(root()).expect("a page").to_str().expect("a name in ASCII").to_owned();
        let mut open: Option<Block> = None;
        for line in read(&path).lines() {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => found.extend(open.take()),
                (Some(tag), None) => {
                    open = Some(Block { page: page.clone(), tag: tag.trim().to_owned(), text: String::new() });
                }
                (None, Some(block)) => block.text.extend([line, "\n"]),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{page}: a block without end");
    }
    found
}

/// Each block is a part of an example, or a doc test of tests/src/lib.rs without lines that rustdoc hides.
#[test]
fn every_block_of_rust_is_compiled_as_it_stands() {
    let harness = read(&root().join("tests/src/lib.rs"));
    let examples: Vec<_> = files(&root().join("examples"), "rs").iter().map(|path| read(path)).collect();
    let blocks = blocks();
    let blocks: Vec<_> = blocks.iter().filter(|block| block.tag.starts_with("rust")).collect();
    assert!(blocks.len() > 15, "{} blocks are too few: the check reads nothing", blocks.len());
    let mut wrong = BTreeSet::new();
    for Block { page, tag, text } in blocks {
        let is_included = harness.contains(&format!("include_str!(\"../../{page}\")"));
        let is_whole = !text.lines().any(|line| line == "#" || line.starts_with("# "));
        let is_test = is_included && is_whole && ["rust", "rust,no_run"].contains(&tag.as_str());
        if !is_test && !examples.iter().any(|example| example.contains(text.as_str())) {
            wrong.insert(page.as_str());
        }
    }
    assert!(wrong.is_empty(), "pages with blocks of Rust that no test compiles: {wrong:?}");
}

#[test]
fn the_commands_of_pages_name_examples_features_and_scripts_that_exist() {
    let manifest = read(&root().join("examples/Cargo.toml"));
    let (_, features) = manifest.split_once("\n[features]\n").expect("the features");
    let features = features.split("\n[").next().unwrap_or_default();
    let is_feature = |name: &str| features.lines().any(|line| line.starts_with(&format!("{name} = ")));
    let (mut count, mut wrong) = (0, Vec::new());
    for Block { page, tag, text } in blocks() {
        if !["sh", "console"].contains(&tag.as_str()) {
            continue;
        }
        for line in text.lines() {
            let line = line.strip_prefix("$ ").unwrap_or(line).split(" # ").next().unwrap_or_default();
            let words: Vec<_> = line.split_whitespace().collect();
            let after = |option: &str| words.iter().position(|word| *word == option).map(|at| words[at + 1]);
            if let Some(script) = words.first().and_then(|word| word.strip_prefix("./scripts/")) {
                count += 1;
                if !root().join("scripts").join(script).is_file() {
                    wrong.push(format!("{page}: {line}"));
                }
            }
            let Some(example) = after("--example") else { continue };
            count += 1;
            let is_there = root().join(format!("examples/{example}.rs")).is_file();
            let mut named = after("--features").into_iter().flat_map(|features| features.split(','));
            if !is_there || !named.all(is_feature) {
                wrong.push(format!("{page}: {line}"));
            }
        }
    }
    assert!(count > 10, "{count} commands are too few: the check reads nothing");
    assert!(wrong.is_empty(), "commands of things that do not exist: {wrong:#?}");
}

#[test]
fn the_lines_that_axum_payments_prints_are_those_of_the_page_about_http() {
    let (example, page) = (read(&root().join("examples/axum_payments.rs")), read(&root().join("docs/http.md")));
    let (_, lines) = example.split_once("const LINES: &str = r#\"\n").expect("the lines");
    let (lines, _) = lines.split_once("\"#;").expect("their end");
    assert!(page.contains(&format!("```sh\n{lines}```\n")), "docs/http.md does not contain these lines:\n{lines}");
}

#[test]
fn the_page_about_steps_counts_the_lines_of_its_application() {
    let lines = |name: &str| {
        let program = read(&root().join("examples/document_index").join(name));
        let counts = |line: &&str| !line.trim().is_empty() && !line.starts_with("//!");
        program.lines().filter(counts).map(str::to_owned).collect::<Vec<_>>()
    };
    let (plain, durable) = (lines("plain.rs"), lines("durable.rs"));
    let changed = durable.iter().filter(|line| !plain.contains(line)).count();
    let page = read(&root().join("docs/steps.md")).replace('\n', " ");
    for count in [format!("Rust has {} lines in", plain.len()), format!("adds or changes {changed} lines")] {
        assert!(page.contains(&count), "docs/steps.md does not contain `{count}`");
    }
}

/// Sentences of a page, or of the comments in a source, without code.
fn sentences(text: &str, is_page: bool) -> Vec<String> {
    let (mut paragraphs, mut is_code) = (vec![String::new()], false);
    for line in text.lines() {
        let line = line.trim_start();
        let comment = ["///", "//!", "//"].iter().find_map(|mark| line.strip_prefix(mark));
        let Some(line) = (if is_page { Some(line) } else { comment }) else {
            paragraphs.push(String::new());
            is_code = false;
            continue;
        };
        let line = line.trim();
        is_code ^= line.starts_with("```");
        let begins = line.is_empty() || line.starts_with(['-', '|', '#']) || line.starts_with("```");
        if begins {
            paragraphs.push(String::new());
        }
        if !is_code && let Some(paragraph) = paragraphs.last_mut() {
            *paragraph += line.trim_start_matches(['-', '#', '>', ' ', '`']);
            *paragraph += " ";
        }
    }
    let ends = |c: char| matches!(c, '.' | ':' | ';' | '?' | '|');
    paragraphs.iter().flat_map(|it| it.split_inclusive(ends)).map(|it| it.trim().to_owned()).collect()
}

/// Folders with Rust code.
const SOURCES: [&str; 10] = [
    "idem-runtime",
    "idem-macros",
    "idem-apalis",
    "idem-rmcp",
    "idem-ruststream",
    "idem-cli",
    "tests",
    "examples",
    "benches",
    "fuzz",
];

#[test]
fn sentences_begin_with_their_subject() {
    const CLAUSES: [&str; 8] = ["What", "How", "Who", "Whoever", "Whatever", "Nobody", "Somebody", "Those who"];
    let sources = SOURCES.iter().flat_map(|folder| files(&root().join(folder), "rs"));
    let pages = fs::read_dir(root()).expect("the folder").map(|entry| entry.expect("an entry").path());
    let pages = pages.filter(|path| path.extension().is_some_and(|it| it == "md"));
    let pages = pages.chain(files(&root().join("docs"), "md")).chain([root().join("benches/README.md")]);
    let texts = sources.map(|path| (path, false)).chain(pages.map(|path| (path, true)));
    let (mut count, mut wrong) = (0, Vec::new());
    for (path, is_page) in texts {
        for sentence in sentences(&read(&path), is_page) {
            count += 1;
            let begins_with = |word: &str| {
                sentence.strip_prefix(word).is_some_and(|rest| rest.starts_with(' ') && !rest.ends_with('?'))
            };
            if CLAUSES.into_iter().any(begins_with) {
                wrong.push(format!("{}: {sentence}", path.display()));
            }
        }
    }
    assert!(count > 10_000, "{count} sentences are too few: the check reads nothing");
    assert!(wrong.is_empty(), "{} sentences begin with a clause: {wrong:#?}", wrong.len());
}

#[test]
fn comments_are_at_most_120_columns_wide() {
    let (mut count, mut wrong) = (0, Vec::new());
    for path in SOURCES.iter().flat_map(|folder| files(&root().join(folder), "rs")) {
        let mut is_code = false;
        for (number, line) in read(&path).lines().enumerate() {
            let Some((_, comment)) = line.split_once("//").filter(|(code, _)| code.trim().is_empty()) else {
                is_code = false;
                continue;
            };
            count += 1;
            is_code ^= comment.contains("```");
            // Tables, rulers and examples in code can't be wrapped.
            let is_whole = is_code || comment.contains("| ") || comment.contains("----");
            if line.chars().count() > 120 && !is_whole {
                wrong.push(format!("{}:{}", path.display(), number + 1));
            }
        }
    }
    assert!(count > 10_000, "{count} lines are too few: the check reads nothing");
    assert!(wrong.is_empty(), "comments of more than 120 columns: {wrong:#?}");
}

/// Types that the code of a crate defines, each with its file. Associated types and types inside of macros are left
/// out.
fn types(sources: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for path in files(sources, "rs") {
        for line in read(&path).lines() {
            let line =
                line.trim_start_matches("pub ").trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            if let (Some("struct" | "enum" | "trait" | "type" | "union"), Some(name)) = (words.next(), words.next()) {
                found.push((name.to_owned(), path.clone()));
            }
        }
    }
    found
}

/// A reader who meets a name that many types share must open the file to find out which type is meant.
#[test]
fn a_type_name_occurs_twice_at_most_in_a_crate() {
    for package in ["idem-runtime", "idem-macros", "idem-cli"] {
        let mut places = BTreeMap::<_, HashSet<_>>::new();
        for (name, path) in types(&root().join(package).join("src")) {
            places.entry(name).or_default().insert(path);
        }
        assert!(places.len() > 10, "{package}: the check reads nothing");
        places.retain(|_, files| files.len() > 2);
        assert!(places.is_empty(), "{package}: names of more than two types: {places:#?}");
    }
}

#[test]
fn types_are_named_by_nouns() {
    /// Participles without the ending `-ed` or `-ing`.
    const IRREGULAR: [&str; 24] = [
        "Begun", "Broken", "Done", "Found", "Given", "Gone", "Held", "Hidden", "Kept", "Known", "Left", "Lost", "Made",
        "Met", "Read", "Said", "Seen", "Sent", "Shown", "Taken", "Told", "Undone", "Woken", "Written",
    ];
    /// Nouns that look like participles, and errors that state a condition.
    const NOUNS: [&str; 8] =
        ["Finding", "LeaseStanding", "NotRecorded", "OnBeatLost", "Recording", "Ruling", "Setting", "Standing"];
    /// Wrappers, for which participles are usual (`Buffered`, `Limited`), and the usual name of a private trait.
    const USUAL: [&str; 5] = ["Cached", "Compressed", "Metered", "Offloaded", "Sealed"];
    let mut wrong = Vec::new();
    for package in ["idem-runtime", "idem-macros", "idem-cli"] {
        for (name, path) in types(&root().join(package).join("src")) {
            let start = name.rfind(char::is_uppercase).unwrap_or_default();
            let last = &name[start..];
            // The compiler prints the names of these traits in messages, for example `ResultWanted`.
            let is_text = path.ends_with("private.rs");
            let is_participle = last.ends_with("ed") || last.ends_with("ing") || IRREGULAR.contains(&last);
            if is_participle && !is_text && !NOUNS.contains(&&*name) && !USUAL.contains(&&*name) {
                wrong.push(format!("{name} in {}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "types that are named by a participle: {wrong:#?}");
}

/// Modules of a crate by their paths, each with the paths that it imports. The flag of a path is true if the module
/// re-exports the path.
struct Imports(BTreeMap<Vec<String>, Vec<(Vec<String>, bool)>>);

impl Imports {
    fn of(sources: &Path) -> Self {
        let mut modules = BTreeMap::new();
        for path in files(sources, "rs") {
            let relative = path.strip_prefix(sources).expect("the file is in the source folder").with_extension("");
            let mut module: Vec<_> = relative.iter().map(|part| part.to_str().expect("ASCII").to_owned()).collect();
            let name = module.last().expect("a file").clone();
            // Modules that only the tests' scheduler runs are no part of the library.
            if ["interleavings", "shuttle"].contains(&&*name) {
                continue;
            }
            if name == "mod" || (module.len() == 1 && (name == "lib" || name == "main")) {
                module.pop();
            }
            let (mut imports, code) = (Vec::new(), code(&path));
            for statement in code.split(';') {
                let lines = statement.lines().rev().collect::<Vec<_>>();
                // An indented `use` is inside an inline module, and is left out.
                let Some(first) = lines.iter().position(|line| line.starts_with("use ") || line.starts_with("pub"))
                else {
                    continue;
                };
                let statement = lines[..=first].iter().rev().copied().collect::<String>();
                let Some((before, tree)) = statement.split_once("use ") else { continue };
                let mut paths = Vec::new();
                leaves(tree, &[], &mut paths);
                // A module that re-exports items of its children does not use them.
                let hands_on = !before.is_empty();
                imports.extend(paths.into_iter().map(|path| (path, hands_on)));
            }
            modules.insert(module, imports);
        }
        Self(modules)
    }

    /// Returns the module that defines the item at `path`, as seen from `module`; `None` for an item of another crate.
    fn target(&self, module: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
        let mut base = if path[0] == "crate" { Vec::new() } else { module.to_vec() };
        let mut rest = path;
        while let [first, others @ ..] = rest {
            match first.as_str() {
                "crate" | "self" => {}
                "super" => drop(base.pop()),
                _ => break,
            }
            rest = others;
        }
        if rest.len() == path.len() && !self.0.contains_key(&[module, &path[..1]].concat()) {
            return None;
        }
        while let [first, others @ ..] = rest {
            let inner = [&base[..], std::slice::from_ref(first)].concat();
            if !self.0.contains_key(&inner) {
                break;
            }
            (base, rest) = (inner, others);
        }
        // If the module at `base` imports the item, the search goes on in the module that the import names.
        let taken = |(path, _): &&(Vec<String>, bool)| rest.len() == 1 && path.last() == rest.first();
        match self.0[&base].iter().find(taken) {
            Some((further, _)) if depth < 9 => self.target(&base, further, depth + 1).or(Some(base)),
            _ => Some(base),
        }
    }

    /// Returns the modules that import each other, directly or through other modules.
    fn in_rings(&self) -> Vec<String> {
        let mut reached: BTreeMap<&Vec<String>, BTreeSet<Vec<String>>> = BTreeMap::new();
        for (module, paths) in &self.0 {
            let used = paths.iter().filter(|(_, hands_on)| !hands_on);
            let targets = used.filter_map(|(path, _)| self.target(module, path, 0));
            // The crate root imports all modules.
            reached.insert(module, targets.filter(|it| it != module && !it.is_empty()).collect());
        }
        loop {
            let before: usize = reached.values().map(BTreeSet::len).sum();
            for module in self.0.keys() {
                let further: Vec<_> = reached[module].iter().flat_map(|it| reached[it].clone()).collect();
                reached.get_mut(module).expect("each module has an entry").extend(further);
            }
            if reached.values().map(BTreeSet::len).sum::<usize>() == before {
                break;
            }
        }
        let in_a_ring = self.0.keys().filter(|module| reached[module].contains(*module));
        in_a_ring.map(|module| module.join("/")).collect()
    }
}

/// Collects the paths of a `use` statement.
fn leaves(tree: &str, before: &[String], found: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some((head, inner)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap_or_default();
        let path: Vec<_> = name.split("::").map(|part| part.trim().to_owned()).collect();
        let path = [before, &path].concat();
        found.extend((!tree.is_empty()).then_some(path));
        return;
    };
    let head: Vec<_> = head.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let before = [before, &head].concat();
    let inner = inner.rsplit_once('}').map_or(inner, |(inner, _)| inner);
    let (mut depth, mut start) = (0, 0);
    for (at, sign) in inner.char_indices() {
        match sign {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                leaves(&inner[start..at], &before, found);
                start = at + 1;
            }
            _ => {}
        }
    }
    leaves(&inner[start..], &before, found);
}

/// Files that import each other can be understood only together. `LEFT` lists such files; no change may add a file to
/// this list.
#[test]
fn no_files_import_each_other() {
    const LEFT: [(&str, &[&str]); 3] = [("idem-runtime", &[]), ("idem-cli", &[]), ("idem-macros", &[])];
    for (package, left) in LEFT {
        let imports = Imports::of(&root().join(package).join("src"));
        assert!(imports.0.values().map(Vec::len).sum::<usize>() > 40, "{package}: the check reads nothing");
        assert_eq!(imports.in_rings(), left, "{package}: files that import each other");
    }
}

#[test]
fn readme_and_architecture_stay_below_a_number_of_words() {
    for (page, most) in [("README.md", 1400), ("ARCHITECTURE.md", 3000)] {
        let (mut words, mut is_code) = (0, false);
        for line in read(&root().join(page)).lines() {
            is_code ^= line.starts_with("```");
            words += if is_code { 0 } else { line.split_whitespace().filter(|word| *word != "|").count() };
        }
        assert!(words <= most, "{page} has {words} words, more than {most}");
    }
}

#[test]
fn the_diagrams_are_those_that_their_script_draws() {
    let run = std::process::Command::new("python3").arg(root().join("scripts/diagrams")).arg("--check").output();
    let run = run.expect("python3 runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

/// Texts with the keyword `Description` in a PNG.
fn descriptions(path: &Path) -> Vec<String> {
    let image = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (mut at, mut found) = (8, Vec::new());
    while let Some(head) = image.get(at..at + 8) {
        let length = u32::from_be_bytes(head[..4].try_into().expect("four bytes")) as usize;
        let content = &image[at + 8..at + 8 + length];
        if let Some(text) = content.strip_prefix(b"Description\0\0\0\0\0").filter(|_| &head[4..] == b"iTXt") {
            found.push(String::from_utf8_lossy(text).into_owned());
        }
        at += length + 12;
    }
    found
}

#[test]
fn the_pictures_of_the_dashboard_show_each_of_its_panels() {
    let dashboard: serde_json::Value =
        serde_json::from_str(&read(&root().join("ops/grafana.json"))).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter().filter(|panel| panel["type"] != "row");
    let panels: Vec<_> = panels.map(|panel| panel["title"].as_str().expect("a title")).collect();
    let pictures = ["dashboard-calls", "dashboard-store"];
    let texts = pictures.iter().flat_map(|name| descriptions(&root().join(format!("docs/pictures/{name}.png"))));
    let texts: Vec<_> = texts.collect();
    let shown: Vec<_> = texts.iter().flat_map(|text| text.lines()).collect();
    assert!(panels.len() > 20, "{} panels are too few: the check reads nothing", panels.len());
    assert_eq!(shown, panels, "run scripts/pictures");
}
