//! Compares the messages at a broker with the orders.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::{self, stream};
use futures::StreamExt as _;
use idem_examples::Claims;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use tokio::time::{Instant, sleep};

use crate::kills::End;
use crate::{Failure, LETTERS, PAID, Receipt};

/// Time in which a server must have started.
const START: Duration = Duration::from_secs(60);

/// A message at a broker.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Message {
    destination: String,
    id: String,
    body: Vec<u8>,
}

impl Message {
    fn receipt(&self) -> Option<Receipt> {
        serde_json::from_slice(&self.body).ok()
    }
}

/// Messages of a run.
pub(crate) struct Messages {
    /// Messages that the server has received, with those that it has dropped as duplicates.
    received: Vec<Message>,
    /// Messages that the server keeps.
    kept: Vec<Message>,
    /// Number of messages that the server keeps, by its own counters.
    counted: u64,
    /// True if the server drops duplicates.
    drops_duplicates: bool,
}

/// A broker, with the means to read its messages.
pub(crate) enum AuditedBroker {
    JetStream {
        stream: Box<stream::Stream>,
        client: async_nats::Client,
        received: Arc<Mutex<Vec<Message>>>,
    },
    /// URL of the server.
    RabbitMq(String),
}

impl AuditedBroker {
    /// Creates the stream, and counts what the server receives: a plain subscriber gets each published message, also
    /// those that the stream does not store because it knows their ids.
    pub(crate) async fn jetstream(url: &str) -> Result<Self, Failure> {
        let client = async_nats::connect(url).await?;
        let settings =
            stream::Config { name: "orders".to_owned(), subjects: vec!["orders.>".to_owned()], ..Default::default() };
        let stream = Box::new(jetstream::new(client.clone()).create_stream(settings).await?);
        let mut subscriber = client.subscribe("orders.>").await?;
        client.flush().await?;
        let received = Arc::new(Mutex::new(Vec::new()));
        let books = Arc::clone(&received);
        tokio::spawn(async move {
            while let Some(message) = subscriber.next().await {
                let message = nats_message(&message.subject, message.headers.as_ref(), &message.payload);
                books.lock().unwrap_or_else(PoisonError::into_inner).push(message);
            }
        });
        Ok(Self::JetStream { stream, client, received })
    }

    /// Creates the queues, once the server has started.
    pub(crate) async fn rabbitmq(url: &str) -> Result<Self, Failure> {
        let connection = connect(url).await?;
        let channel = connection.create_channel().await?;
        for queue in [PAID, LETTERS] {
            channel.queue_declare(queue.into(), QueueDeclareOptions::durable(), FieldTable::default()).await?;
        }
        connection.close(200, "created".into()).await?;
        Ok(Self::RabbitMq(url.to_owned()))
    }

    /// Reads all messages, after the workers have ended.
    pub(crate) async fn messages(self) -> Result<Messages, Failure> {
        match self {
            Self::JetStream { mut stream, client, received } => {
                let state = stream.info().await?.state.clone();
                let mut kept = Vec::new();
                for sequence in state.first_sequence..=state.last_sequence {
                    let message = stream.get_raw_message(sequence).await?;
                    kept.push(nats_message(&message.subject, Some(&message.headers), &message.payload));
                }
                // The server answers in order, so the subscription has got everything by then.
                client.flush().await?;
                sleep(Duration::from_millis(200)).await;
                let mut received = std::mem::take(&mut *received.lock().unwrap_or_else(PoisonError::into_inner));
                // The subscriber misses messages while it connects to a server that was killed.
                let seen: BTreeSet<_> = received.iter().cloned().collect();
                received.extend(kept.iter().filter(|message| !seen.contains(message)).cloned());
                Ok(Messages { received, kept, counted: state.messages, drops_duplicates: true })
            }
            Self::RabbitMq(url) => {
                let connection = connect(&url).await?;
                let channel = connection.create_channel().await?;
                let (mut kept, mut counted) = (Vec::new(), 0);
                for queue in [PAID, LETTERS] {
                    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::durable() };
                    let known = channel.queue_declare(queue.into(), passive, FieldTable::default()).await?;
                    counted += u64::from(known.message_count());
                    let options = BasicGetOptions { no_ack: true };
                    while let Some(message) = channel.basic_get(queue.into(), options).await? {
                        let id = message.properties.message_id().as_ref();
                        let id = id.map(ToString::to_string).unwrap_or_default();
                        kept.push(Message { destination: queue.to_owned(), id, body: message.data.clone() });
                    }
                }
                connection.close(200, "audited".into()).await?;
                Ok(Messages { received: kept.clone(), kept, counted, drops_duplicates: false })
            }
        }
    }
}

/// Connects to RabbitMQ, once the server has started.
async fn connect(url: &str) -> Result<Connection, lapin::Error> {
    let began = Instant::now();
    loop {
        match Connection::connect(url, ConnectionProperties::default()).await {
            Err(_) if began.elapsed() < START => sleep(Duration::from_millis(100)).await,
            connected => return connected,
        }
    }
}

fn nats_message(subject: &str, headers: Option<&async_nats::HeaderMap>, body: &[u8]) -> Message {
    let id = headers.and_then(|headers| headers.get(async_nats::header::NATS_MESSAGE_ID));
    let id = id.map(ToString::to_string).unwrap_or_default();
    Message { destination: subject.to_owned(), id, body: body.to_vec() }
}

/// Compares the messages with the ends of all orders.
pub(crate) fn audit(messages: &Messages, ended: &BTreeMap<u64, End>, claims: &mut Claims) {
    let Messages { received, kept, counted, drops_duplicates } = messages;
    let paid: BTreeMap<_, _> = ended
        .iter()
        .filter_map(|(order, end)| match end {
            End::Paid { payment } => Some((*order, payment.clone())),
            End::Declined => None,
        })
        .collect();
    let due: BTreeSet<_> = paid.keys().flat_map(|order| [(*order, PAID), (*order, LETTERS)]).collect();
    let name = |message: &'_ Message| {
        let destination = if message.destination == PAID { PAID } else { LETTERS };
        message.receipt().map(|receipt| (receipt.order, destination))
    };
    let arrived: BTreeSet<_> = kept.iter().filter_map(name).collect();
    let lost = due.difference(&arrived).count();
    let invented = received.iter().filter(|message| name(message).is_none_or(|name| !due.contains(&name))).count();
    let mut ids: BTreeMap<_, BTreeSet<&str>> = BTreeMap::new();
    let mut bodies: BTreeMap<&str, BTreeSet<(&str, &[u8])>> = BTreeMap::new();
    for message in received {
        ids.entry(name(message)).or_default().insert(&message.id);
        bodies.entry(&message.id).or_default().insert((&message.destination, &message.body));
    }
    let several_ids = ids.values().filter(|ids| ids.len() > 1).count();
    let several_bodies = bodies.values().filter(|bodies| bodies.len() > 1).count();
    let agrees = |receipt: &Receipt| paid.get(&receipt.order).is_none_or(|payment| *payment == receipt.payment);
    let disagree = received.iter().filter(|message| !message.receipt().is_some_and(|it| agrees(&it))).count();
    println!(
        "  orders: {} paid, {} declined; messages due: {}, received: {}, kept: {counted}",
        paid.len(),
        ended.len() - paid.len(),
        due.len(),
        received.len()
    );
    let duplicates = received.len().saturating_sub(bodies.len());
    match drops_duplicates {
        true => println!("  duplicates: the server dropped {} by their ids", received.len().saturating_sub(kept.len())),
        false => println!("  duplicates: {duplicates} with known ids arrived"),
    }
    println!(
        "  messages lost: {lost}, of orders that are not paid: {invented}, with a payment that is not recorded: {disagree}"
    );
    println!("  messages with several ids: {several_ids}, ids with several bodies: {several_bodies}");
    claims.check("the broker's counter agrees with its messages", *counted == kept.len() as u64);
    claims.check("every message of every paid order has arrived", lost == 0);
    claims.check("no message of another order was published", invented == 0);
    claims.check("every message carries the recorded payment", disagree == 0);
    claims.check("each message has one id, and each id one body", several_ids == 0 && several_bodies == 0);
    if *drops_duplicates {
        claims.check("the stream holds each message exactly once", *counted == due.len() as u64);
    } else {
        claims.check("apart from duplicates with known ids, each message has arrived once", bodies.len() == due.len());
    }
}
