//! The bank of the example `stripe_refund`: a client of the API of Stripe, for a server that ignores idempotency keys,
//! and a network in front of this server that loses requests and answers.
#![allow(clippy::disallowed_methods, reason = "a network takes its time")]

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{self, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

/// Time after which the client of a refund hangs up.
const TIMEOUT: Duration = Duration::from_millis(250);
/// Time after which the client of any other request hangs up.
const PATIENCE: Duration = Duration::from_secs(5);
/// Delay of a late request, which arrives although its client has hung up.
const LATE: Duration = Duration::from_millis(350);
/// Time for which a request may be under way at most: the network delivers no older request.
pub const DEADLINE: Duration = Duration::from_secs(1);

/// Refund that the bank has made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refund {
    /// Number that the bank gave it.
    pub id: String,
}

/// Failure of a call of the bank.
#[derive(Debug, Serialize, Deserialize)]
pub enum BankError {
    /// The bank has refused the call, and always will.
    Refused(String),
    /// The bank was not reached: nothing has happened.
    Unreachable(String),
    /// The request was sent, and no answer came. It may have taken effect, or still may.
    Unanswered(String),
    /// The idempotency library returned an error.
    Idempotency(String),
}

impl fmt::Display for BankError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, why) = match self {
            Self::Refused(why) => ("the bank refuses", why),
            Self::Unreachable(why) => ("the bank can't be reached", why),
            Self::Unanswered(why) => ("the bank does not answer", why),
            Self::Idempotency(why) => ("not done", why),
        };
        write!(f, "{what}: {why}")
    }
}

impl std::error::Error for BankError {}

impl From<idem_runtime::Error> for BankError {
    fn from(error: idem_runtime::Error) -> Self {
        Self::Idempotency(error.to_string())
    }
}

/// Client of the bank.
#[derive(Clone, Debug)]
pub struct Bank {
    http: Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

impl Bank {
    /// Returns a client of the bank at `address`.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        // A client that repeats requests on its own would make doubles that no handler sees.
        let mut builder = Client::builder(TokioExecutor::new());
        let http = builder.retry_canceled_requests(false).pool_max_idle_per_host(0).build_http();
        Self { http, address }
    }

    /// Sends a request, and returns the status and the JSON of the answer.
    async fn send(&self, method: Method, path: &str, form: String) -> Result<(StatusCode, Value), BankError> {
        let limit = if method == Method::POST && path == "refunds" { TIMEOUT } else { PATIENCE };
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}/v1/{path}", self.address))
            .header("authorization", "Bearer sk_test_shop")
            .header("content-type", "application/x-www-form-urlencoded")
            .header("connection", "close")
            .body(Full::from(form))
            .map_err(|error| BankError::Unreachable(error.to_string()))?;
        let unanswered = |error: &dyn std::error::Error| BankError::Unanswered(crate::explain(error));
        let answered = async {
            let answer = self.http.request(request).await.map_err(|error| match error.is_connect() {
                true => BankError::Unreachable(crate::explain(&error)),
                false => unanswered(&error),
            })?;
            let status = answer.status();
            let body = answer.into_body().collect().await.map_err(|error| unanswered(&error))?.to_bytes();
            let json = serde_json::from_slice(&body).map_err(|error| unanswered(&error))?;
            Ok((status, json))
        };
        timeout(limit, answered).await.unwrap_or_else(|late| Err(unanswered(&late)))
    }

    /// Sends a form, and returns the id of the new object.
    async fn create(&self, path: &str, form: String) -> Result<String, BankError> {
        let (status, answer) = self.send(Method::POST, path, form).await?;
        match (status.is_success(), status.is_server_error(), answer["id"].as_str()) {
            (true, _, Some(id)) => Ok(id.to_owned()),
            (_, false, _) => Err(BankError::Refused(answer["error"]["message"].to_string())),
            _ => Err(BankError::Unanswered(status.to_string())),
        }
    }

    /// Charges a card.
    ///
    /// # Errors
    /// If the bank does not answer with a charge.
    pub async fn charge(&self, cents: u64) -> Result<String, BankError> {
        let card = "type=card&card[number]=4242424242424242&card[exp_month]=12&card[exp_year]=2040&card[cvc]=123";
        let card = self.create("payment_methods", card.to_owned()).await?;
        self.create("charges", format!("amount={cents}&currency=eur&source={card}")).await
    }

    /// Refunds a charge, each time that it is called. `reference` is kept with the refund.
    ///
    /// # Errors
    /// If the bank does not answer with a refund. [`BankError::Unanswered`] is in doubt.
    pub async fn refund(&self, charge: &str, reference: &str) -> Result<Refund, BankError> {
        let form = format!("charge={charge}&metadata[reference]={reference}");
        Ok(Refund { id: self.create("refunds", form).await? })
    }

    /// Returns the refunds of a charge, with their references.
    ///
    /// # Errors
    /// If the bank does not answer.
    pub async fn refunds(&self, charge: &str) -> Result<Vec<(Refund, String)>, BankError> {
        let (status, answer) =
            self.send(Method::GET, &format!("refunds?charge={charge}&limit=100"), String::new()).await?;
        let refund = |refund: &Value| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            (Refund { id: text(&refund["id"]) }, text(&refund["metadata"]["reference"]))
        };
        match (status, answer["data"].as_array()) {
            (StatusCode::OK, Some(refunds)) => Ok(refunds.iter().map(refund).collect()),
            // The bank has no such charge.
            (StatusCode::NOT_FOUND, _) => Ok(Vec::new()),
            _ => Err(BankError::Unanswered(status.to_string())),
        }
    }
}

/// Faults that refunds met on their way.
#[derive(Default, Debug)]
pub struct Faults {
    posts: AtomicU32,
    /// Requests that did not arrive.
    pub lost_requests: AtomicU32,
    /// Answers that did not arrive, with an end of the connection.
    pub lost_answers: AtomicU32,
    /// Answers for which the client waited in vain.
    pub withheld_answers: AtomicU32,
    /// Requests that arrived after their client had hung up.
    pub late_requests: AtomicU32,
}

/// Starts a network between clients and the bank, which loses parts of two thirds of the refunds. Returns its address.
///
/// # Errors
/// If no port is free.
pub async fn bad_network(bank: SocketAddr, faults: Arc<Faults>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let faults = Arc::clone(&faults);
            tokio::spawn(async move { carry(client, bank, &faults).await });
        }
    });
    Ok(address)
}

/// Carries one request and its answer.
async fn carry(mut client: TcpStream, bank: SocketAddr, faults: &Faults) -> io::Result<()> {
    let sent = Instant::now();
    let request = request(&mut client).await?;
    let is_refund = request.starts_with(b"POST /v1/refunds");
    // After two faults a refund passes, so that the last open order ends soon.
    let fault =
        if is_refund { [0, 1, 2, 0, 3, 4][faults.posts.fetch_add(1, Ordering::Relaxed) as usize % 6] } else { 0 };
    let count = |counter: &AtomicU32| counter.fetch_add(1, Ordering::Relaxed);
    match fault {
        1 => {
            count(&faults.lost_requests);
            return Ok(());
        }
        4 => {
            count(&faults.late_requests);
            sleep(LATE).await;
        }
        _ => {}
    }
    if is_refund && sent.elapsed() > DEADLINE / 2 {
        return Ok(());
    }
    let mut server = TcpStream::connect(bank).await?;
    server.write_all(&request).await?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await?;
    match fault {
        2 => {
            count(&faults.lost_answers);
        }
        3 => {
            count(&faults.withheld_answers);
            // Until the client hangs up.
            client.read_to_end(&mut Vec::new()).await?;
        }
        _ => client.write_all(&answer).await?,
    }
    Ok(())
}

/// Reads a request with its body.
async fn request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    loop {
        if client.read_buf(&mut request).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some(head) = request.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
        if request.len() >= head + 4 + length {
            return Ok(request);
        }
    }
}
