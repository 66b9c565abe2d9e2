//! The attribute's messages about mistakes, and code that it must accept silently.

/// `.stderr` files are reviewed like prose. After a change: `TRYBUILD=overwrite cargo test -p idem-tests --test ui`.
#[test]
fn ui() {
    let cases = trybuild::TestCases::new();
    cases.pass("ui/pass/*.rs");
    cases.compile_fail("ui/fail/*.rs");
}
