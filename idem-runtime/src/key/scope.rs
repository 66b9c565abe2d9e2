//! Scopes: the names of handlers in keys.

use super::problem::{KeyProblem, MAX_SCOPE_BYTES, RESERVED_PREFIX, Site};
use crate::sync::{SharedList, SharedOnce};

/// Name of a handler in its keys. The attribute makes one `static` scope for each handler.
///
/// In one process, the first handler that uses a scope claims the scope. Another handler with the same scope is refused
/// with [`KeyProblem::SharedScope`], unless both scopes are [`shared`](Scope::shared). A key from
/// [`Key::new`](super::Key::new) claims no scope, because no handler makes this key. Scopes that begin with `idem::`
/// belong to the library, and are refused with [`KeyProblem::ReservedScope`].
#[derive(Debug)]
pub struct Scope {
    pub(super) name: &'static str,
    site: Site,
    shared: bool,
    /// True if the attribute made the scope, in a separate `static`. The address of that `static` then identifies the
    /// handler. The location does not identify the handler: all handlers from one `macro_rules!` expansion have the
    /// same location.
    attribute: bool,
    /// Type name of the handler's result, or the reason why the handler may not use this scope. The first use sets the
    /// value.
    claimed: SharedOnce<Result<&'static str, KeyProblem>>,
}

impl Scope {
    /// Makes a scope for one handler. The location of the handler is the caller of this function.
    #[track_caller]
    pub const fn named(name: &'static str) -> Self {
        Self::new(name, false, false)
    }

    /// Makes a scope for several handlers. Handlers with a shared scope replay each other's results if their keys are
    /// equal.
    #[track_caller]
    pub const fn shared(name: &'static str) -> Self {
        Self::new(name, true, false)
    }

    /// Makes the scope of a handler that has the attribute.
    #[track_caller]
    pub(crate) const fn of_handler(name: &'static str, shared: bool) -> Self {
        Self::new(name, shared, true)
    }

    #[track_caller]
    const fn new(name: &'static str, shared: bool, attribute: bool) -> Self {
        Self { name, site: Site::caller(), shared, attribute, claimed: SharedOnce::new() }
    }

    /// Checks that a handler whose result has the type name `result` may use the scope. Every call makes this check:
    /// one load and one comparison.
    #[inline]
    pub(super) fn check(&self, result: &'static str) -> Result<(), KeyProblem> {
        match self.claimed.get() {
            Some(Ok(first)) if std::ptr::eq(*first, result) => Ok(()),
            _ => self.check_anew(result),
        }
    }

    fn check_anew(&self, result: &'static str) -> Result<(), KeyProblem> {
        match self.claimed.get_or_init(|| self.claim(result)) {
            // Equal type names usually have the same address, but two crates may each have a copy of the text.
            Ok(first) if std::ptr::eq(*first, result) || self.shared || *first == result => Ok(()),
            Ok(other) => Err(KeyProblem::SharedByResults { site: self.site, other, this: result }),
            Err(problem) => Err(problem.clone()),
        }
    }

    #[cold]
    fn claim(&self, result: &'static str) -> Result<&'static str, KeyProblem> {
        /// All scopes that handlers of this process have claimed, in 32 lists. The sum of a scope's bytes selects its
        /// list, so that a search reads few scopes.
        static CLAIMED: [SharedList<ScopeClaim>; 32] = [const { SharedList::new() }; 32];
        check_own_scope(self.name)?;
        let handler = if self.attribute { Some(std::ptr::from_ref(self).addr()) } else { None };
        let claim = ScopeClaim { name: self.name, site: self.site, handler, shared: self.shared };
        let sum = self.name.bytes().fold(0, u8::wrapping_add);
        let claimed = &CLAIMED[usize::from(sum) % CLAIMED.len()];
        let first = *claimed.find_or_add(|claim| claim.name == self.name, || claim);
        if first == claim || first.shared && self.shared {
            Ok(result)
        } else {
            Err(KeyProblem::SharedScope { other: first.site, this: self.site })
        }
    }
}

/// Entry of a handler in the list of scopes that this process uses.
#[derive(Clone, Copy, PartialEq)]
struct ScopeClaim {
    name: &'static str,
    site: Site,
    /// Address of the scope's `static`; `None` for a scope that the attribute did not make.
    handler: Option<usize>,
    shared: bool,
}

/// Returns whether `scope` is a valid name of a scope.
pub(crate) const fn is_scope(scope: &str) -> bool {
    let bytes = scope.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        // In UTF-8 the control characters U+0080 to U+009F are two bytes: 0xC2, then a byte below 0xA0.
        let control = bytes[at] < b' ' || bytes[at] == 0x7f || at > 0 && bytes[at - 1] == 0xc2 && bytes[at] < 0xa0;
        if bytes[at] == b'/' || control {
            return false;
        }
        at += 1;
    }
    !bytes.is_empty() && bytes.len() <= MAX_SCOPE_BYTES
}

pub(super) fn check_scope(scope: &str) -> Result<(), KeyProblem> {
    if is_scope(scope) { Ok(()) } else { Err(KeyProblem::InvalidScope) }
}

/// Returns whether `scope` belongs to the library, which keeps records of its own there.
pub(crate) const fn is_reserved(scope: &str) -> bool {
    let (bytes, prefix) = (scope.as_bytes(), RESERVED_PREFIX.as_bytes());
    let mut at = 0;
    while at < prefix.len() {
        if at >= bytes.len() || bytes[at] != prefix[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// Checks that a key of the user may have this scope. A parsed key may have any scope, because an operator also looks
/// at the records of the library.
pub(crate) fn check_own_scope(scope: &str) -> Result<(), KeyProblem> {
    if is_reserved(scope) { Err(KeyProblem::ReservedScope) } else { check_scope(scope) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Key, KeyBuilder};

    #[track_caller]
    fn claim(scope: &Scope, result: &'static str) -> Result<(), KeyProblem> {
        let mut builder = KeyBuilder::of_results(scope, result);
        builder.text("x");
        builder.build().map(drop).map_err(|error| error.problem)
    }

    #[test]
    fn a_scope_belongs_to_one_handler() {
        static FIRST: Scope = Scope::of_handler("test::claimed", false);
        static SECOND: Scope = Scope::of_handler("test::claimed", false);
        static SHARED: Scope = Scope::of_handler("test::claimed", true);
        assert_eq!(claim(&FIRST, "u8"), Ok(()));
        for other in [&SECOND, &SHARED, &Scope::named("test::claimed"), &Scope::shared("test::claimed")] {
            let problem = claim(other, "u8").unwrap_err();
            assert_eq!(problem, KeyProblem::SharedScope { other: FIRST.site, this: other.site });
            assert!(problem.is_misconfiguration());
            let shown = problem.to_string();
            assert!(shown.contains(&FIRST.site.to_string()) && shown.contains(&other.site.to_string()), "{shown}");
            assert!(shown.contains("`scope = shared(\"…\")` on both"), "{shown}");
        }
        assert_eq!(claim(&FIRST, "u8"), Ok(()));
    }

    #[test]
    fn two_handlers_at_one_location_do_not_share_a_scope() {
        macro_rules! scopes {
            ($($name:ident)*) => { $( static $name: Scope = Scope::of_handler("test::one place", false); )* };
        }
        scopes!(ONE TWO);
        assert_eq!(ONE.site, TWO.site);
        assert_eq!(claim(&ONE, ""), Ok(()));
        assert_eq!(claim(&TWO, ""), Err(KeyProblem::SharedScope { other: ONE.site, this: TWO.site }));
    }

    #[test]
    fn a_scope_is_shared_only_by_declaration() {
        static FIRST: Scope = Scope::of_handler("test::shared", true);
        static SECOND: Scope = Scope::of_handler("test::shared", true);
        for scope in [&FIRST, &SECOND, &Scope::shared("test::shared")] {
            assert_eq!(claim(scope, "u8"), Ok(()));
            assert_eq!(claim(scope, "u16"), Ok(()));
        }
        let claimed = claim(&Scope::named("test::shared"), "u8");
        assert!(matches!(claimed, Err(KeyProblem::SharedScope { .. })), "{claimed:?}");
    }

    #[test]
    fn a_scope_made_without_the_attribute_belongs_to_the_location_that_made_it() {
        let make = || Scope::named("test::by hand");
        let (first, again) = (make(), make());
        assert_eq!(claim(&first, ""), Ok(()));
        assert_eq!(claim(&again, ""), Ok(()));
        assert!(matches!(claim(&Scope::named("test::by hand"), ""), Err(KeyProblem::SharedScope { .. })));
    }

    #[test]
    fn a_generic_handler_has_one_result_type_for_each_scope() {
        static SCOPE: Scope = Scope::of_handler("test::generic", false);
        assert_eq!(claim(&SCOPE, "alloc::string::String"), Ok(()));
        let problem = claim(&SCOPE, "u32").unwrap_err();
        assert!(problem.is_misconfiguration());
        let shown = problem.to_string();
        assert!(shown.contains("`alloc::string::String` before and returns `u32`"), "{shown}");
        // Equal type names at different addresses denote the same type.
        let text: &'static str = String::from("alloc::string::String").leak();
        assert_eq!(claim(&SCOPE, text), Ok(()));
    }

    #[test]
    fn a_scope_of_the_library_is_refused() {
        for name in ["idem::", "idem::steps", "idem::outbox", "idem::later", "idem::a/b"] {
            let refused = KeyProblem::ReservedScope;
            assert_eq!(claim(&Scope::named(name), "u8"), Err(refused.clone()), "{name}");
            assert_eq!(claim(&Scope::shared(name), "u8"), Err(refused.clone()), "{name}");
            assert_eq!(Key::new(name, 1).map_err(|error| error.problem), Err(refused.clone()), "{name}");
            assert!(refused.is_misconfiguration());
        }
        for name in ["idem", "idem:", "idem:steps", "idem-doctor", "Idem::steps", "my::idem::steps", "idem_steps"] {
            assert!(Key::new(name, 1).is_ok(), "{name}");
        }
        let shown = Key::new("idem::steps", 1).unwrap_err().to_string();
        assert!(shown.contains("`idem::steps`") && shown.contains("belong to the library"), "{shown}");
    }

    #[test]
    fn a_key_of_the_library_can_be_read_back() {
        let key = Key::of_library("idem::steps", "order:42").unwrap();
        assert_eq!(key.scope(), "idem::steps");
        assert_eq!(key.as_str().parse(), Ok(key.clone()));
        assert_eq!(key.to_string().parse(), Ok(key));
    }

    #[test]
    fn is_scope_refuses_empty_and_long_names_slashes_and_control_characters() {
        for text in ["a", "shop::ship", "a b", "é", "Â\u{a0}", "\u{a0}", "x".repeat(MAX_SCOPE_BYTES).as_str()] {
            assert!(is_scope(text) && !text.contains(char::is_control), "{text:?}");
        }
        let long = "x".repeat(MAX_SCOPE_BYTES + 1);
        for text in ["", "/", "a/b", "\0", "a\nb", "\u{7f}", "\u{80}", "é\u{9f}", &long] {
            assert!(!is_scope(text), "{text:?}");
        }
    }
}
