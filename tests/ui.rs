//! The attribute's messages about mistakes, and code that it must accept silently.

/// People review `.stderr` files like prose. Rewrite them by `TRYBUILD=overwrite cargo test -p idem-tests --test ui`.
#[test]
fn ui() {
    let cases = trybuild::TestCases::new();
    cases.pass("ui/pass/*.rs");
    cases.compile_fail("ui/fail/*.rs");
}
