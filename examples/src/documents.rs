//! A server of documents, of which one can't be had at first, and a client that indexes them and asks a question.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use tokio::net::TcpListener;

type AnyError = Box<dyn Error + Send + Sync>;

/// Documents by name. A form feed separates two pages.
const DOCUMENTS: [(&str, &str); 3] = [
    ("annual", "The cup costs 4 euros.\x0cThe tea costs 3 euros."),
    ("quarter", "The pot costs 9 euros.\x0cThe spoon costs 2 euros."),
    ("press", "The company sells a new cup."),
];
/// Document that is unavailable at its first download.
const LATE: &str = "quarter";

/// Number of downloads of each document.
type Downloads = Arc<Mutex<BTreeMap<String, u32>>>;

/// Returns an empty folder for the files of the service `name`.
///
/// # Errors
/// The folder can't be made.
pub fn folder(name: &str) -> io::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("idem-documents-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Downloads the text at `url`.
///
/// # Errors
/// The server does not answer, or answers with a failure.
pub async fn download(url: &str) -> Result<String, AnyError> {
    exchange(Request::get(url).body(Full::default())?).await
}

async fn exchange(request: Request<Full<Bytes>>) -> Result<String, AnyError> {
    let answer = Client::builder(TokioExecutor::new()).build_http().request(request).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    match status.is_success() {
        true => Ok(String::from_utf8(body.to_vec())?),
        false => Err(format!("the answer is {status}").into()),
    }
}

async fn document(State(downloads): State<Downloads>, Path(name): Path<String>) -> Result<&'static str, StatusCode> {
    let count = {
        let mut downloads = downloads.lock().unwrap_or_else(PoisonError::into_inner);
        let count = downloads.entry(name.clone()).or_default();
        *count += 1;
        *count
    };
    let found = DOCUMENTS.iter().find(|(other, _)| *other == name).ok_or(StatusCode::NOT_FOUND)?;
    if name == LATE && count == 1 { Err(StatusCode::SERVICE_UNAVAILABLE) } else { Ok(found.1) }
}

async fn serve(routes: Router) -> io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok(address)
}

async fn send(address: &str, path: &str, body: &serde_json::Value) -> Result<String, AnyError> {
    let request = Request::post(format!("{address}{path}")).header("content-type", "application/json");
    exchange(request.body(Full::from(body.to_string()))?).await
}

/// Serves `service`, asks it to index the documents until it has, and asks it one question. Prints how often each
/// document was downloaded, and how many pages answer the question.
///
/// # Errors
/// The service does not index the documents, or does not answer.
pub async fn demonstrate(service: Router) -> Result<(), AnyError> {
    let downloads = Downloads::default();
    let documents = serve(Router::new().route("/{name}", get(document)).with_state(Arc::clone(&downloads))).await?;
    let service = serve(service).await?;
    let urls: Vec<_> = DOCUMENTS.iter().map(|(name, _)| format!("{documents}/{name}")).collect();
    let batch = json!({ "id": "batch-1", "urls": urls });
    let mut tries = 1;
    while let Err(error) = send(&service, "/index", &batch).await {
        println!("the client repeats its request: {error}");
        tries += 1;
        if tries > 10 {
            return Err(error);
        }
    }
    for (name, count) in &*downloads.lock().unwrap_or_else(PoisonError::into_inner) {
        println!("document `{name}` was downloaded {count} times");
    }
    let answer: serde_json::Value =
        serde_json::from_str(&send(&service, "/chat", &json!({ "message": "cup" })).await?)?;
    let pages = answer["pages"].as_array().map_or(0, Vec::len);
    println!("{pages} pages of the index mention a cup");
    Ok(())
}
