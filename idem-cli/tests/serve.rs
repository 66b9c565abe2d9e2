//! Tests of `idem serve`: over HTTP, and in a real browser (`./scripts/test -p idem-cli --test serve`).

#[path = "serve/browser.rs"]
mod browser;
#[path = "serve/keyboard.rs"]
mod keyboard;
#[path = "serve/pages.rs"]
mod pages;
#[path = "serve/server.rs"]
mod server;
#[path = "stores/support.rs"]
#[allow(dead_code, reason = "other tests use the other helpers")]
mod support;
