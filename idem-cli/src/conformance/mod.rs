//! `idem conformance`: does a server, or a store, keep the rules?

pub(crate) mod http;
pub(crate) mod store;
