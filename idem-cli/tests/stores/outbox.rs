//! Tests of the commands for messages, with SQLite files.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};
use idem_runtime::{Error, Key, Operation, Policy, SqliteStore, StoreExt as _, current};
use serde_json::json;

use super::support::{Records, completed};

/// A broker that refuses each message until it is repaired.
#[derive(Clone, Default)]
struct Broker(Arc<AtomicBool>);

impl Sender for Broker {
    fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            match self.0.load(Ordering::SeqCst) {
                true => Ok(()),
                false => Err(SendError::refused("no such queue")),
            }
        })
    }

    fn max_refusals(&self) -> u32 {
        1
    }
}

/// Delivers `pay/<text>`, whose body publishes a message.
async fn delivers(store: &SqliteStore, text: &str) {
    let operation = Operation::new(store, Key::new("pay", text), Policy::new(Duration::from_secs(3600)));
    let body = async {
        current()?.outbox().push("orders.paid", OutgoingMessage::new("secret"))?;
        Ok::<_, Error>(7)
    };
    assert_eq!(operation.run(body).await.unwrap(), 7);
}

#[tokio::test]
async fn a_message_that_was_set_aside_is_listed_shown_and_sent_again_or_given_up() {
    let records = Records::new().await;
    let broker = Broker::default();
    let store = records.store.clone().with_sender(broker.clone());
    completed(&store, "other", b"1").await;
    for text in ["resent", "dropped"] {
        delivers(&store, text).await;
    }
    let listed = records.idem(&["list", "--unsent", "--json"]).ends(0).lines();
    let keys: Vec<_> = listed.iter().filter_map(|line| line["key"].as_str()).collect();
    assert_eq!(keys, ["pay/dropped", "pay/resent"]);

    let run = records.idem(&["show", "pay/resent"]).ends(0);
    let run = run.says("(6 bytes for `orders.paid`, set aside after 1 refusals)").says("1 bytes of json");
    assert!(!run.out.contains("secret"), "{run:?}");
    let object = records.idem(&["show", "pay/resent", "--json", "--result"]).ends(0).json();
    let unsent = &object["unsent"][0];
    assert_eq!((&unsent["destination"], &unsent["set_aside"]), (&json!("orders.paid"), &json!(true)));
    assert_eq!(object["result"]["text"], "7");

    // A delivery does not send it before an operator decides.
    broker.0.store(true, Ordering::SeqCst);
    delivers(&store, "resent").await;
    assert_eq!(records.idem(&["list", "--unsent", "--json"]).ends(0).lines().len(), 2);
    records.decides(&["outbox", "resend"], "pay/resent").ends(0).says("or a resender, sends its messages");
    delivers(&store, "resent").await;
    records.decides(&["outbox", "resend"], "pay/resent").ends(4).complains("no messages");
    records.decides(&["outbox", "drop"], "pay/dropped").ends(0).says("gave up the unsent messages");
    records.idem(&["list", "--unsent", "--json"]).ends(4);
    delivers(&store, "dropped").await;
    let object = records.idem(&["show", "pay/dropped", "--json", "--result"]).ends(0).json();
    assert_eq!((object.get("unsent"), &object["result"]["text"]), (None, &json!("7")));
}
