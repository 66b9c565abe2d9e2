//! `idem conformance`: checks whether a server, or a store, follows the rules.

pub(crate) mod http;
pub(crate) mod store;
