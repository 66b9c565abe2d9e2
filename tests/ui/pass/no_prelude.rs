//! Generated code compiles in a module without a prelude, because it names every item by a path from the root.
#![no_implicit_prelude]
#![deny(warnings)]

#[::idem_runtime::idempotent(
    key = "{id}:{name}",
    ttl = "7d",
    store = store,
    in_progress = wait("1s"),
    on_error = release,
    on_crash = fail,
    max_attempts = 3,
    fingerprint = (id, name),
    missing_key = run,
    on_store_error = run
)]
async fn handler(
    store: ::idem_runtime::MemoryStore,
    id: u32,
    name: &str,
) -> ::std::result::Result<usize, ::idem_runtime::Error> {
    ::std::mem::drop((id, store));
    ::std::result::Result::Ok(name.len())
}

fn main() {
    ::std::mem::drop(handler(::idem_runtime::MemoryStore::new(), 1, "name"));
}
