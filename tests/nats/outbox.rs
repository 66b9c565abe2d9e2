//! Messages on subjects of the bucket's stream.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Instant;

use async_nats::jetstream::consumer::pull;
use async_nats::{HeaderMap, jetstream};
use idem_runtime::current;
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender, UnsentReason};
use idem_tests::nats::{NatsCluster, connect_replicated, shared_cluster};

use super::*;

const WEEK: Duration = Duration::from_secs(7 * 86_400);

fn options(bucket: &str, subjects: &str) -> NatsOptions {
    NatsStore::options().bucket(bucket).outbox(subjects, WEEK)
}

/// Calls a handler that pushes a message with each of these bodies.
async fn push(store: &NatsStore, name: &str, destination: &str, bodies: &[&str]) -> Result<u32, Error> {
    let body = async {
        for body in bodies {
            let message = OutgoingMessage::new((*body).to_owned()).key(name).header("Type", "test");
            current()?.outbox().push(destination, message)?;
        }
        Ok(1)
    };
    Operation::new(store, Ok(key(name)), POLICY).run(body).await
}

/// Message in a stream: number, subject, the headers `Idem-Message-Id`, `Idem-Message-Key` and `Type`, and the body.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Stored {
    sequence: u64,
    subject: String,
    headers: [Option<String>; 3],
    body: String,
}

/// Returns the messages of the stream on subjects that begin with `prefix`, in the order of the stream. A cluster that
/// has just lost a server answers only once it has elected its leaders.
async fn stored(client: &Client, stream: &str, prefix: &str) -> Vec<Stored> {
    let mut found = Vec::new();
    until("the stream shows its messages", async || match read(client, stream, prefix).await {
        Ok(messages) => {
            found = messages;
            true
        }
        Err(error) => {
            eprintln!("{error}");
            false
        }
    })
    .await;
    found
}

async fn read(client: &Client, stream: &str, prefix: &str) -> Result<Vec<Stored>, async_nats::Error> {
    let stream = jetstream::new(client.clone()).get_stream(stream).await?;
    let config = pull::Config { filter_subject: format!("{prefix}.>"), ..Default::default() };
    let consumer = stream.create_consumer(config).await?;
    let mut messages = consumer.fetch().max_messages(10_000).messages().await?;
    let mut found = Vec::new();
    while let Some(message) = messages.next().await {
        let message = message?;
        let header = |name: &str| Some(message.headers.as_ref()?.get(name)?.as_str().to_owned());
        found.push(Stored {
            sequence: message.info()?.stream_sequence,
            subject: message.subject.to_string(),
            headers: ["Idem-Message-Id", "Idem-Message-Key", "Type"].map(header),
            body: String::from_utf8_lossy(&message.payload).into_owned(),
        });
    }
    Ok(found)
}

fn bodies(stored: &[Stored]) -> Vec<&str> {
    stored.iter().map(|message| &*message.body).collect()
}

async fn is_unsent(store: &NatsStore, name: &str) -> bool {
    store.inspect(&key(name)).await.unwrap().expect("a record").unsent_messages().is_some()
}

#[tokio::test]
async fn messages_are_stored_in_the_stream_of_the_records() {
    let server = NatsServer::start();
    let store = options("b", "orders.>").connect(&server.url()).await.unwrap();
    for _ in 0..2 {
        assert_eq!(push(&store, "k", "orders.paid", &["one", "two"]).await.unwrap(), 1);
    }
    push(&store, "l", "orders", &["three"]).await.unwrap();
    let raw = raw(&server).await;
    let messages = stored(&raw, "KV_b", "orders").await;
    assert_eq!(bodies(&messages), ["one", "two", "three"]);
    for message in &messages {
        let [id, key, kind] = message.headers.each_ref().map(|header| header.as_deref().expect("a header"));
        let destination = if message.body == "three" { "orders" } else { "orders.paid" };
        assert_eq!(message.subject, format!("{destination}.{id}"));
        assert_eq!((key, kind), (if destination == "orders" { "l" } else { "k" }, "test"));
    }
    assert!(!is_unsent(&store, "k").await && !is_unsent(&store, "l").await);
    // Another stream takes the messages of one destination under its name.
    let source = json!({ "name": "KV_b", "subject_transforms": [{ "src": "orders.paid.*", "dest": "paid" }] });
    api(&raw, "STREAM.CREATE.PAID", json!({ "name": "PAID", "retention": "workqueue", "sources": [source] })).await;
    until("the other stream has the messages", async || {
        api(&raw, "STREAM.INFO.PAID", json!({})).await["state"]["messages"] == 2
    })
    .await;
    let paid = jetstream::new(raw.clone()).get_stream("PAID").await.unwrap();
    let first = paid.get_raw_message(1).await.unwrap();
    assert_eq!((&*first.subject, &first.payload[..]), ("paid", &b"one"[..]));
}

#[tokio::test]
async fn a_stream_that_can_not_hold_the_messages_is_refused() {
    let server = NatsServer::start();
    connect(&server).await;
    let error = refusal(NatsStore::options().outbox("orders.>", WEEK), &server.url()).await;
    assert!(error.kind() == StoreErrorKind::Misconfigured && error.to_string().contains("`orders.>`"), "{error}");
    options("other", "orders.>").connect(&server.url()).await.unwrap();
    let error = refusal(options("third", "orders.>"), &server.url()).await;
    assert!(error.to_string().contains("overlap"), "{error}");
    let error = refusal(options("third", "orders"), &server.url()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn a_message_that_the_stream_can_not_hold_is_not_sent() {
    let server = NatsServer::start();
    let store = options("b", "orders.>").connect(&server.url()).await.unwrap();
    let error = push(&store, "k", "invoices", &["one"]).await.expect_err("refused");
    let Error::Unsent { reason, .. } = &error else { panic!("{error}") };
    assert!(matches!(**reason, UnsentReason::NotConfirmed { refused: true, .. }), "{error}");
    assert!(is_unsent(&store, "k").await);
}

/// Sender that reaches no broker.
struct Away;

impl Sender for Away {
    fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async { Err("the broker is away".into()) })
    }
}

#[tokio::test]
async fn a_message_is_stored_once_although_its_mark_is_lost() {
    let server = NatsServer::start();
    let store = options("b", "orders.>").connect(&server.url()).await.unwrap();
    // The record keeps the message, because another handle can't send it.
    let other = NatsStore::options().bucket("b").connect(&server.url()).await.unwrap().with_sender(Away);
    push(&other, "k", "orders.paid", &["one"]).await.expect_err("not sent");
    assert!(is_unsent(&store, "k").await);
    let raw = raw(&server).await;
    let subject = subject_of("b", &key("k"));
    let record = api(&raw, "STREAM.MSG.GET.KV_b", json!({ "last_by_subj": subject })).await["message"]["data"].clone();
    let mut sequences = BTreeSet::new();
    for _ in 0..3 {
        push(&store, "k", "orders.paid", &["another"]).await.expect("a replay, after the message was sent");
        assert!(!is_unsent(&store, "k").await);
        // The server has lost the mark.
        put(&server.url(), &subject, &base64(record.as_str().expect("a record"))).await;
        assert!(is_unsent(&store, "k").await);
        let messages = stored(&raw, "KV_b", "orders").await;
        assert_eq!(bodies(&messages), ["one"]);
        sequences.insert(messages[0].sequence);
    }
    assert_eq!(sequences.len(), 1, "a consumer gets the message once: {sequences:?}");
}

// Streams with replicas.

#[tokio::test]
async fn a_replicated_stream_stores_messages_and_record_in_one_step() {
    let url = &shared_cluster()[0];
    let store = connect_replicated(options("batches", "batches.>"), url).await;
    let raw = async_nats::connect(url).await.unwrap();
    let mut counted = Counted::of(raw.clone(), "$KV.batches.>", "$JS.API.STREAM.MSG.GET.KV_batches").await;
    assert_eq!(push(&store, "k", "batches.paid", &["one", "two"]).await.unwrap(), 1);
    assert_eq!(counted.since_all_of(&store).await, [2, 0, 0], "the reservation and the record, without a mark");
    assert!(!is_unsent(&store, "k").await);
    assert_eq!(push(&store, "k", "batches.paid", &["three"]).await.unwrap(), 1);
    let messages = stored(&raw, "KV_batches", "batches").await;
    assert_eq!(bodies(&messages), ["one", "two"]);
    let last = api(&raw, "STREAM.MSG.GET.KV_batches", json!({ "last_by_subj": messages[1].subject })).await;
    let record = subject_of("batches", &key("k"));
    let record = api(&raw, "STREAM.MSG.GET.KV_batches", json!({ "last_by_subj": record })).await;
    let sequence = |message: &Value| message["message"]["seq"].as_u64().expect("a number");
    assert_eq!(sequence(&record), sequence(&last) + 1, "one batch: {last} {record}");
}

#[tokio::test]
async fn a_refused_record_publishes_no_message() {
    let url = &shared_cluster()[1];
    let store = connect_replicated(options("refused", "refused.>"), url).await;
    let body = async {
        current()?.outbox().push("refused.paid", OutgoingMessage::new("one"))?;
        // Another program takes the place of the record.
        put(url, &subject_of("refused", &key("k")), b"x").await;
        Ok(1)
    };
    let lost: Result<u32, Error> = Operation::new(&store, Ok(key("k")), POLICY).run(body).await;
    assert!(matches!(lost, Err(Error::LeaseLost { .. })), "{lost:?}");
    // A later message shows that the stream has handled the batch.
    push(&store, "l", "refused.paid", &["two"]).await.unwrap();
    assert_eq!(bodies(&stored(&async_nats::connect(url).await.unwrap(), "KV_refused", "refused").await), ["two"]);
}

#[tokio::test]
async fn messages_leave_after_the_record_of_a_stream_that_takes_no_batches_any_more() {
    let url = &shared_cluster()[2];
    let store = connect_replicated(options("off", "off.>"), url).await;
    let raw = async_nats::connect(url).await.unwrap();
    let mut config = api(&raw, "STREAM.INFO.KV_off", json!({})).await["config"].clone();
    config["allow_atomic"] = false.into();
    let updated = api(&raw, "STREAM.UPDATE.KV_off", config).await;
    assert!(updated["error"].is_null(), "{updated}");
    push(&store, "k", "off.paid", &["one", "two"]).await.unwrap();
    assert_eq!(bodies(&stored(&raw, "KV_off", "off").await), ["one", "two"]);
    assert!(!is_unsent(&store, "k").await);
}

/// A server without replicas stores a part of a batch when it reaches its limit, so the store sends no batch there. If
/// this test fails with a later server, the store may send batches to it.
#[tokio::test]
async fn a_stream_without_replicas_stores_a_part_of_a_batch_at_the_limit_of_its_server() {
    let server = NatsServer::start_with(Kind::Nats, "jetstream { max_file_store: 500000 }\n");
    let raw = raw(&server).await;
    let mut settings: Value = serde_json::from_str(&options("b", "orders.>").stream_settings()).unwrap();
    settings["first_seq"] = 1.into();
    api(&raw, "STREAM.CREATE.KV_b", settings).await;
    for n in 0.. {
        let mut answer = Value::Null;
        for (place, subject) in ["$KV.b.k", "orders.a", "orders.b"].iter().enumerate() {
            let mut headers = HeaderMap::new();
            headers.insert("Nats-Batch-Id", &*format!("{n}"));
            headers.insert("Nats-Batch-Sequence", &*(place + 1).to_string());
            if place == 2 {
                headers.insert("Nats-Batch-Commit", "1");
            }
            let subject = format!("{subject}.{n}");
            let answered = raw.request_with_headers(subject, headers, vec![b'x'; 30_000].into()).await.unwrap();
            answer = serde_json::from_slice(&answered.payload).unwrap_or_default();
        }
        let mut there = [false; 3];
        for (there, subject) in there.iter_mut().zip(["$KV.b.k", "orders.a", "orders.b"]) {
            let found = api(&raw, "STREAM.MSG.GET.KV_b", json!({ "last_by_subj": format!("{subject}.{n}") })).await;
            *there = found["error"].is_null();
        }
        assert_eq!(answer["error"].is_null(), there == [true; 3], "{answer}");
        if there != [true; 3] {
            assert!(there.contains(&true), "all or nothing: {answer}");
            return;
        }
    }
}

// Kills.

/// Kills 100 processes whose bodies push one message for each key, in five lanes at the same time. At the end each key
/// has one message, whichever attempts were killed.
async fn kill_workers(client: &Client, spec: &str, stream: &str, prefix: &str, meanwhile: impl Future<Output = ()>) {
    const KILLS: usize = 20;
    let lane = |lane: usize| {
        let (spec, destination, first) = (spec.to_owned(), format!("{prefix}.paid"), lane * 10_000);
        move || {
            let mut next = first;
            let began = Instant::now();
            for kill in 0.. {
                let end = if kill >= KILLS { next + 5 } else { first + 10_000 };
                let mut command = Command::new("setpriv");
                command.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_recorder"), &spec]);
                command.args([&end.to_string(), &next.to_string(), &destination]).stdout(Stdio::piped());
                let mut worker = command.spawn().expect("starts");
                let lines = BufReader::new(worker.stdout.take().expect("a pipe")).lines();
                let mut served = lines.map_while(Result::ok).map(|line| line.parse::<usize>().expect("a number"));
                if kill >= KILLS {
                    let ended = worker.wait().expect("ends");
                    next = served.last().map_or(next, |key| key + 1);
                    if ended.success() {
                        assert_eq!(next, end, "the last worker of lane {lane}");
                        return first..end;
                    }
                    // Calls fail while the cluster has no leader.
                    assert!(began.elapsed() < Duration::from_secs(300), "the last worker of lane {lane} fails");
                    continue;
                }
                for key in served.by_ref().take(1 + kill % 4) {
                    next = key + 1;
                }
                std::thread::sleep(Duration::from_micros(200) * u32::try_from(kill).expect("a small number"));
                worker.kill().expect("can be killed");
                worker.wait().expect("ends");
                // Keys that the worker has served meanwhile.
                next = served.last().map_or(next, |key| key + 1);
            }
            unreachable!("the last worker is not killed")
        }
    };
    let lanes = (0..5).map(|n| tokio::task::spawn_blocking(lane(n)));
    let (served, ()) = futures::join!(futures::future::join_all(lanes), meanwhile);
    let served = served.into_iter().flat_map(|keys| keys.expect("no panic"));
    let expected: BTreeMap<usize, u32> = served.map(|key| (key, 1)).collect();
    let mut counts = BTreeMap::new();
    for message in stored(client, stream, prefix).await {
        *counts.entry(message.body.parse().expect("a key")).or_default() += 1;
    }
    assert_eq!(counts, expected);
}

#[tokio::test]
async fn each_operation_has_one_message_after_kills_of_its_workers() {
    let server = NatsServer::start();
    options("b", "orders.>").connect(&server.url()).await.unwrap();
    let spec = format!("nats {} b 1 orders.>", server.url());
    kill_workers(&raw(&server).await, &spec, "KV_b", "orders", async {}).await;
}

#[tokio::test]
async fn each_operation_has_one_message_in_a_batch_after_kills_of_workers_and_leader() {
    let mut cluster = NatsCluster::start("b").await;
    let url = cluster.url();
    let servers: Vec<async_nats::ServerAddr> = url.split(',').map(|url| url.parse().unwrap()).collect();
    let raw = async_nats::connect(servers).await.unwrap();
    api(&raw, "STREAM.DELETE.KV_b", json!({})).await;
    connect_replicated(options("b", "orders.>"), &url).await;
    let spec = format!("nats {url} b 3 orders.>");
    let kills = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let Some(leader) = cluster.leader(0, "b").await else { continue };
            let server = &mut cluster.servers[leader];
            server.kill();
            server.run();
        }
    };
    kill_workers(&raw, &spec, "KV_b", "orders", kills).await;
}
