//! `dynamodb://TABLE?region=NAME[&endpoint=URL]`.
//!
//! This program uses the SDK without its HTTP client and without its search for credentials, because these two parts
//! would be larger than the whole program. A plain HTTP/1.1 client is enough for a command, and the program reads
//! credentials from the usual environment variables.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::{BehaviorVersion, Config, Credentials, Region, StalledStreamProtectionConfig};
use aws_sdk_dynamodb::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::{KeySchemaElement, TableDescription};
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use idem_runtime::{DynamoStore, Store};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::ServerName;

use super::{Access, Place, PlaceFuture, Server, parameters};
use crate::report::{Stop, chain};
use crate::shell;
use crate::tls;

/// Size in bytes of the longest answer that is read: more than any item or table description needs.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// A table, and its location.
pub(crate) struct Table {
    pub(crate) name: String,
    region: String,
    endpoint: Option<String>,
}

impl Table {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let rest = url.split_once(':').map_or("", |(_, rest)| rest);
        let (name, given) = parameters(rest.strip_prefix("//").unwrap_or(rest));
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !(3..=255).contains(&name.len()) || !name.chars().all(is_name) {
            return Err("the name of a table has 3 to 255 letters, digits, `_`, `-` and `.`".to_owned());
        }
        let (mut region, mut endpoint) = (None, None);
        for (parameter, value) in given {
            match parameter {
                "region" if !value.is_empty() => region = Some(value.to_owned()),
                "endpoint" if value.starts_with("http://") || value.starts_with("https://") => {
                    endpoint = Some(value.trim_end_matches('/').to_owned());
                }
                "endpoint" => return Err("`endpoint` begins with `http://` or `https://`".to_owned()),
                _ => return Err("its parameters are `region` and `endpoint`".to_owned()),
            }
        }
        let known = || ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().find_map(|name| std::env::var(name).ok());
        let region = region.or_else(known).ok_or("say which region: `?region=NAME`, or set AWS_REGION")?;
        Ok(Self { name: name.to_owned(), region, endpoint })
    }

    /// Returns a client, and the cell that receives the `Date` of its last answer.
    pub(crate) fn client(&self) -> Result<(Client, Date), Stop> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (Some(id), Some(secret)) = (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) else {
            return Err(Stop::Usage(
                "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN); `aws \
                 configure export-credentials --format env` prints those of a profile"
                    .to_owned(),
            ));
        };
        let date = Date::default();
        let plain = Plain { date: date.clone() };
        let mut config = Config::builder()
            .behavior_version(BehaviorVersion::v2026_01_12())
            .credentials_provider(Credentials::new(id, secret, variable("AWS_SESSION_TOKEN"), None, "environment"))
            .region(Region::new(self.region.clone()))
            .retry_config(RetryConfig::standard())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .http_client(plain);
        if let Some(endpoint) = &self.endpoint {
            config = config.endpoint_url(endpoint);
        }
        Ok((Client::from_conf(config.build()), date))
    }

    /// Returns the command line of `aws dynamodb` for this table.
    pub(crate) fn aws(&self, words: &[&str]) -> String {
        let (verb, rest) = words.split_first().expect("a verb");
        let endpoint = self.endpoint.iter().flat_map(|endpoint| ["--endpoint-url", endpoint]);
        let table = ["aws", "dynamodb", verb, "--region", &self.region, "--table-name", &self.name];
        shell::line(table.into_iter().chain(endpoint).chain(rest.iter().copied()))
    }

    fn store(&self, namespace: Option<String>, timeout: Duration) -> Result<DynamoStore, Stop> {
        let options = DynamoStore::options().response_timeout(timeout).namespace(namespace.unwrap_or_default());
        Ok(options.build(self.client()?.0, &self.name))
    }
}

impl Place for Table {
    fn kind(&self) -> &'static str {
        "dynamodb"
    }

    fn look_up(&self, namespace: Option<&str>, key: &str) -> (String, String) {
        let name = format!("{}{key}", namespace.unwrap_or_default());
        let item = serde_json::json!({ "key": { "S": name } }).to_string();
        let command = self.aws(&["get-item", "--key", &item]);
        (name, command)
    }

    fn open(&self, namespace: Option<String>, timeout: Duration, _: Access) -> PlaceFuture<'_, Arc<dyn Store>> {
        Box::pin(std::future::ready(self.store(namespace, timeout).map(|store| Arc::new(store) as _)))
    }

    fn create(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(async move { Ok(self.store(None, timeout)?.ensure_table().await?) })
    }

    fn differences(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        Box::pin(async move {
            let (client, _) = self.client()?;
            let described = in_time(timeout, client.describe_table().table_name(&self.name).send()).await?;
            match described {
                Ok(described) => Ok(described.table().map(differences)),
                Err(error) if error.code() == Some("ResourceNotFoundException") => Ok(None),
                Err(error) => Err(unreachable(&error)),
            }
        })
    }

    fn server(&self) -> Server<'_> {
        Server::Dynamo(self)
    }
}

/// Returns the answer to a call, if it arrives in time.
pub(crate) async fn in_time<T>(limit: Duration, call: impl Future<Output = T>) -> Result<T, Stop> {
    let late = |_| Stop::Unreachable("DynamoDB did not answer in time".to_owned());
    tokio::time::timeout(limit, call).await.map_err(late)
}

pub(crate) fn unreachable<E: std::error::Error + 'static>(error: &SdkError<E>) -> Stop {
    Stop::Unreachable(format!("DynamoDB can't be used: {}", chain(error)))
}

/// Attribute of a record that holds the time after which DynamoDB may delete the record.
pub(crate) const TTL: &str = "purge_at";

/// Lists the differences between the table and the table that this release needs.
pub(crate) fn differences(table: &TableDescription) -> Vec<String> {
    let keys: Vec<&str> = table.key_schema().iter().map(KeySchemaElement::attribute_name).collect();
    let is_text = table
        .attribute_definitions()
        .iter()
        .any(|it| it.attribute_name() == "key" && it.attribute_type().as_str() == "S");
    match keys[..] == ["key"] && is_text {
        true => Vec::new(),
        false => vec![format!(
            "its keys are `{}`; a partition key `key` of type S and no sort key are needed",
            keys.join("`, `")
        )],
    }
}

/// The `Date` field of the last answer.
#[derive(Clone, Default, Debug)]
pub(crate) struct Date(Arc<Mutex<Option<String>>>);

impl Date {
    pub(crate) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

/// HTTP/1.1 client that opens one connection for each request.
#[derive(Clone, Debug)]
struct Plain {
    date: Date,
}

impl HttpClient for Plain {
    fn http_connector(&self, _: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

impl HttpConnector for Plain {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let this = self.clone();
        HttpConnectorFuture::new(async move { this.exchange(&request).await.map_err(ConnectorError::io) })
    }
}

impl Plain {
    async fn exchange(&self, request: &HttpRequest) -> Result<HttpResponse, BoxError> {
        let (scheme, rest) = request.uri().split_once("://").ok_or("no scheme")?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let default = if scheme == "https" { 443 } else { 80 };
        let address = match authority.rsplit(']').next().is_some_and(|end| end.contains(':')) {
            true => authority.to_owned(),
            false => format!("{authority}:{default}"),
        };
        let body = request.body().bytes().ok_or("a body that is not in memory")?;
        let mut head = format!("{} /{path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n", request.method());
        for (name, value) in request.headers().iter().filter(|(name, _)| !name.eq_ignore_ascii_case("host")) {
            head.extend([name, ": ", value, "\r\n"]);
        }
        head.push_str("\r\n");
        let bytes = [head.as_bytes(), body].concat();
        let stream = TcpStream::connect(&address).await?;
        let answer = match scheme {
            "https" => {
                let host = address.rsplit_once(':').map_or(authority, |(host, _)| host);
                let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
                ask(tls::connector()?.connect(name, stream).await?, &bytes).await?
            }
            _ => ask(stream, &bytes).await?,
        };
        let (response, date) = read(answer)?;
        *self.date.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = date;
        Ok(response)
    }
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, bytes: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(bytes).await?;
    stream.flush().await?;
    let mut answer = Vec::new();
    let limit = MAX_ANSWER_BYTES as u64 + 1;
    match stream.take(limit).read_to_end(&mut answer).await {
        // Some servers close the connection without a TLS close message. The content length shows whether the answer is
        // complete.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(answer),
        Err(error) => Err(error),
        Ok(_) => Ok(answer),
    }
}

/// Parses the response in `answer`, and its `Date`.
fn read(mut answer: Vec<u8>) -> Result<(HttpResponse, Option<String>), BoxError> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(end) = head.parse(&answer)? else {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    };
    let status = head.code.ok_or("no status")?;
    let headers: Vec<_> = head
        .headers
        .iter()
        .map(|field| (field.name.to_ascii_lowercase(), String::from_utf8_lossy(field.value).into_owned()))
        .collect();
    let field = |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.trim());
    let body = answer.split_off(end);
    let length: usize = field("content-length").ok_or("an answer without a length")?.parse()?;
    if body.len() != length {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let date = field("date").map(str::to_owned);
    let mut response = HttpResponse::new(status.try_into()?, body.into());
    for (name, value) in headers {
        response.headers_mut().append(name, value);
    }
    Ok((response, date))
}
