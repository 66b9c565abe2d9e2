//! `idem serve`: a local page that shows running and stuck records, one record, and counts, and lets a person decide.

mod decision;
mod form;
mod guard;
mod html;
mod page;
mod site;

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use self::guard::Guard;
use self::site::{ARRIVAL, Site};
use crate::list::Age;
use crate::records::user;
use crate::report::{Output, STATUSES, Stop};
use crate::scan::check_scan;
use crate::store::StoreArguments;
use crate::watch::LookArguments;

/// Largest number of connections at a time: a browser needs six.
const MOST_CONNECTIONS: usize = 64;

/// Serves a page for a browser on this machine: running and stuck records, one record, counts, and decisions.
///
/// Listens on 127.0.0.1 only, until Ctrl-C. The page is read-only unless `--allow-decisions` is given.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct ServeArguments {
    /// Port of the page (default: a free port)
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    port: u16,
    /// Allows decisions in one browser: prints a token that works once
    #[arg(long)]
    allow_decisions: bool,
    /// Person who decides (default: the name of the user)
    #[arg(long, value_name = "NAME", requires = "allow_decisions")]
    by: Option<String>,
    /// Allows a page to show the result of a record, on request; every user of this machine can open the page
    #[arg(long)]
    results: bool,
    /// Time between two loads of the first page once its refresh is switched on, as `5s` or `1m`
    #[arg(long, value_name = "TIME", default_value = "5s")]
    every: Age,
    #[command(flatten)]
    look: LookArguments,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints the address as a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) async fn main(arguments: &ServeArguments) -> Result<ExitCode, Stop> {
    check_scan(arguments.store.place()?.kind(), arguments.look.scan)?;
    let store = arguments.store.open().await?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, arguments.port)).await.map_err(|error| {
        Stop::Refused(format!("can't listen on 127.0.0.1:{}: {error}; choose another --port", arguments.port))
    })?;
    let port = listener.local_addr()?.port();
    let (guard, token) = Guard::new(port, arguments.allow_decisions)?;
    let url = format!("http://127.0.0.1:{port}/");
    let mut text = format!("{url}   (Ctrl-C ends it)");
    if let Some(token) = &token {
        text = format!("{text}\ntoken for decisions, works once: {token}");
    }
    Output { json: arguments.json }.line(&json!({ "url": url, "token": token }), &text)?;
    let site = Arc::new(Site {
        store,
        guard,
        by: arguments.by.clone().unwrap_or_else(user),
        shows_results: arguments.results,
        refresh: arguments.every.0.as_secs().max(1),
        look: arguments.look.clone(),
    });
    serve(listener, site).await
}

async fn serve(listener: TcpListener, site: Arc<Site>) -> Result<ExitCode, Stop> {
    let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = connections.clone().acquire_owned().await else { return Ok(ExitCode::SUCCESS) };
        let Ok((stream, _)) = listener.accept().await else {
            // The client has gone, or the process has no descriptor left for now.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let site = site.clone();
        tokio::spawn(async move {
            let answer = service_fn(|request| async { Ok::<_, std::convert::Infallible>(site.answer(request).await) });
            let mut connection = http1::Builder::new();
            connection.timer(TokioTimer::new()).header_read_timeout(ARRIVAL).max_buf_size(64 << 10);
            // A broken connection concerns only its browser.
            let _ = connection.serve_connection(TokioIo::new(stream), answer).await;
            drop(permit);
        });
    }
}
