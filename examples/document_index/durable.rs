//! An index of documents: a service that downloads documents, indexes their pages, and answers questions from them.
//!
//! This is the program of `plain.rs` with steps: a request that is repeated after a failure downloads and indexes only
//! the documents whose step has not ended.
//!
//! ```sh
//! cargo run --example document_index --features documents
//! ```

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use futures::future::join_all;
use idem_examples::documents::{demonstrate, download, folder};
use idem_runtime::{SqliteStore, current, idempotent};
use rusqlite::Connection;
use serde::{Deserialize, Serialize};

type AnyError = Box<dyn Error + Send + Sync>;

/// State of the service.
struct App {
    index: Mutex<Connection>,
    records: SqliteStore,
}

impl App {
    async fn open(folder: &Path) -> Result<Self, AnyError> {
        let index = Connection::open(folder.join("index.db"))?;
        index.execute_batch("CREATE VIRTUAL TABLE IF NOT EXISTS pages USING fts5 (url UNINDEXED, page)")?;
        Ok(Self { index: Mutex::new(index), records: SqliteStore::open(folder.join("records.db")).await? })
    }

    fn insert(&self, url: &str, page: &str) -> Result<(), AnyError> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        index.execute("INSERT INTO pages (url, page) VALUES (?1, ?2)", (url, page))?;
        Ok(())
    }

    /// Returns the pages that match `question`, the best page first.
    fn find(&self, question: &str) -> Result<Vec<String>, AnyError> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        let mut best = index.prepare("SELECT page FROM pages WHERE pages MATCH ?1 ORDER BY rank")?;
        let pages = best.query_map([question], |row| row.get(0))?;
        Ok(pages.collect::<Result<_, _>>()?)
    }
}

/// Documents to index.
#[derive(Deserialize)]
struct Batch {
    id: String,
    urls: Vec<String>,
}

/// Indexes all documents at the same time, and returns the number of their pages.
#[idempotent(key = "{batch.id}", ttl = "7d", store = app.records)]
async fn index_documents(app: &App, batch: &Batch) -> Result<usize, AnyError> {
    let attempt = current()?;
    let step = |url| attempt.step(("document", url));
    let documents = batch.urls.iter().map(|url| step(url).run(async |_| index_document(app, url).await));
    let pages = join_all(documents).await.into_iter().sum::<Result<usize, _>>()?;
    println!("indexed {} documents with {pages} pages", batch.urls.len());
    Ok(pages)
}

/// Indexes the pages of one document, and returns their number.
async fn index_document(app: &App, url: &str) -> Result<usize, AnyError> {
    let text = download(url).await?;
    let pages: Vec<_> = text.split('\x0c').collect();
    for page in &pages {
        app.insert(url, page)?;
    }
    Ok(pages.len())
}

async fn index(State(app): State<Arc<App>>, Json(batch): Json<Batch>) -> StatusCode {
    match index_documents(&app, &batch).await {
        Ok(_) => StatusCode::NO_CONTENT,
        Err(error) => {
            println!("the documents are not all indexed: {error}");
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

#[derive(Deserialize)]
struct Question {
    message: String,
}

#[derive(Serialize)]
struct Answer {
    pages: Vec<String>,
}

async fn chat(State(app): State<Arc<App>>, Json(question): Json<Question>) -> Result<Json<Answer>, StatusCode> {
    let pages = app.find(&question.message).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(Json(Answer { pages }))
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let app = Arc::new(App::open(&folder("durable")?).await?);
    let service = Router::new().route("/index", post(index)).route("/chat", post(chat)).with_state(app);
    demonstrate(service).await
}
