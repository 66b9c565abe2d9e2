//! The attribute's messages about mistakes, and code that it must accept silently.

/// People review `.stderr` files like prose. Rewrite them by `TRYBUILD=overwrite cargo test -p idem-ui`.
#[test]
fn ui() {
    let cases = trybuild::TestCases::new();
    cases.pass("pass/*.rs");
    cases.compile_fail("fail/*.rs");
}
