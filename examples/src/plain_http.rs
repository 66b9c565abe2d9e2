//! An HTTP client without TLS for the AWS SDK, so that the examples build no TLS library. For AWS itself, use the SDK's
//! own client (feature `default-https-client`).

use std::io;

use aws_sdk_sqs::config::http::{HttpRequest, HttpResponse};
use aws_sdk_sqs::config::{HttpClient, RuntimeComponents};
use aws_sdk_sqs::error::{BoxError, ConnectorError};
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// An HTTP client that opens a connection for each request.
#[derive(Clone, Debug)]
pub struct PlainHttp;

impl HttpClient for PlainHttp {
    fn http_connector(&self, _: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

impl HttpConnector for PlainHttp {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        HttpConnectorFuture::new(async move { exchange(&request).await.map_err(ConnectorError::io) })
    }
}

async fn exchange(request: &HttpRequest) -> Result<HttpResponse, BoxError> {
    let url = request.uri().strip_prefix("http://").ok_or("only http:// URLs can be used here")?;
    let (address, path) = url.split_once('/').unwrap_or((url, ""));
    let mut stream = TcpStream::connect(address).await?;
    let body = request.body().bytes().ok_or("a body that is not in memory")?;
    let mut head = format!("{} /{path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n", request.method());
    for (name, value) in request.headers().iter().filter(|(name, _)| !name.eq_ignore_ascii_case("host")) {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head.push_str("\r\n");
    stream.write_all(&[head.as_bytes(), body].concat()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").ok_or("an answer without an end")?;
    let body = answer.split_off(end + 4);
    let head = String::from_utf8(answer)?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).ok_or("no status")?.parse::<u16>()?;
    let headers: Vec<_> = lines.filter_map(|line| line.split_once(':')).collect();
    let length = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    if length.is_some_and(|(_, length)| length.trim().parse() != Ok(body.len())) {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let mut response = HttpResponse::new(status.try_into()?, body.into());
    for (name, value) in headers {
        response.headers_mut().append(name.to_lowercase(), value.trim().to_owned());
    }
    Ok(response)
}
