//! Messages that leave after the commit of the user's transaction.

use std::collections::BTreeSet;
use std::sync::Mutex;

use idem_runtime::StoreExt as _;
use idem_runtime::outbox::{OutboxProblem, OutgoingMessage, Resender, SendError, SendFuture, Sender};

use super::super::*;

/// A broker that counts, and can be away.
#[derive(Clone, Default)]
struct Broker(Arc<Mutex<Messages>>, Arc<tokio::sync::Notify>);

/// Place at which the broker hangs, once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hang {
    BeforeArrival,
    AfterArrival,
}

#[derive(Default)]
struct Messages {
    is_away: bool,
    hang: Option<Hang>,
    /// Ids and bodies of the messages that have arrived.
    arrived: Vec<(String, String)>,
    /// Till whose payments are counted when a message arrives, and the counts.
    watched: Option<Arc<Till>>,
    paid: Vec<i64>,
}

impl Broker {
    fn is_away(&self, is_away: bool) {
        self.0.lock().unwrap().is_away = is_away;
    }

    fn arrives(&self, message: &OutgoingMessage) -> Result<Option<Hang>, SendError> {
        let mut messages = self.0.lock().unwrap();
        if messages.is_away {
            return Err("the broker is away".into());
        }
        let hang = messages.hang.take();
        if hang != Some(Hang::BeforeArrival) {
            let body = String::from_utf8(message.body().to_vec()).unwrap();
            messages.arrived.push((message.id().to_owned(), body));
            let paid = messages.watched.as_ref().map(|till| till.payments());
            messages.paid.extend(paid);
        }
        Ok(hang)
    }

    /// Returns the bodies of the messages that have arrived since the last call, and checks that each body has an id of
    /// its own.
    fn take(&self) -> Vec<String> {
        let arrived = std::mem::take(&mut self.0.lock().unwrap().arrived);
        let (ids, bodies): (BTreeSet<_>, Vec<_>) = arrived.into_iter().unzip();
        assert_eq!(ids.len(), bodies.iter().collect::<BTreeSet<_>>().len());
        bodies
    }
}

impl Sender for Broker {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let hang = self.arrives(message)?;
            if hang.is_some() {
                self.1.notify_one();
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    }
}

fn push(body: &str) -> Result<(), Error> {
    current()?.outbox().push("orders.paid", OutgoingMessage::new(body.as_bytes().to_vec()))
}

/// A database, a handle of its records, and a broker.
struct Shop {
    driver: Driver,
    broker: Broker,
}

impl Shop {
    async fn all() -> Vec<Self> {
        let mut shops = Vec::new();
        for driver in Driver::all().await {
            let broker = Broker::default();
            if let Driver::TokioPostgres(bank) | Driver::Sqlx(bank, _) | Driver::NewSqlx(bank, _) = &driver {
                let _shared = bank.store.clone().with_sender(broker.clone());
            }
            if let Driver::MySqlAsync(bank) | Driver::MySqlSqlx(bank, _) = &driver {
                let _shared = bank.store.clone().with_sender(broker.clone());
            }
            shops.push(Self { driver, broker });
        }
        shops
    }

    /// Makes one delivery by `transact`, whose body pays and pushes two messages. If `fails_after` is true, the
    /// delivery fails after its call.
    async fn deliver(&self, fails_after: bool) -> (Result<u32, AnyError>, Outcome) {
        let after = |paid: Result<u32, Error>| -> Result<u32, AnyError> {
            if fails_after { Err("the work failed".into()) } else { Ok(paid?) }
        };
        let pushed = || {
            push("paid")?;
            push("shipped")?;
            Ok::<_, Error>(current()?.number())
        };
        let key = || Ok(key(&self.driver.payee()));
        match &self.driver {
            Driver::TokioPostgres(bank) => {
                let work = async |tx: &PgTx<'_>| {
                    let within = PostgresStore::within(tx).schema(&bank.schema).sender_of(&bank.store);
                    let paid = within.operation(key(), POLICY).run(async {
                        tx.execute("INSERT INTO payments VALUES ('a')", &[]).await.unwrap();
                        pushed()
                    });
                    after(paid.await)
                };
                PostgresStore::transact(&mut bank.client().await, work).await
            }
            Driver::Sqlx(bank, pool) => {
                let work = async |tx: &by_sqlx::SqlxTransaction<'_>| {
                    let within = PostgresStore::within(tx).schema(&bank.schema).sender_of(&bank.store);
                    let paid = within.operation(key(), POLICY).run(async {
                        by_sqlx::insert(tx, "a").await;
                        pushed()
                    });
                    after(paid.await)
                };
                PostgresStore::transact_sqlx_0_8(pool, work).await
            }
            Driver::NewSqlx(bank, pool) => {
                let work = async |tx: &by_new_sqlx::SqlxTransaction<'_>| {
                    let within = PostgresStore::within(tx).schema(&bank.schema).sender_of(&bank.store);
                    let paid = within.operation(key(), POLICY).run(async {
                        by_new_sqlx::insert(tx, "a").await;
                        pushed()
                    });
                    after(paid.await)
                };
                PostgresStore::transact_sqlx_0_9(pool, work).await
            }
            Driver::MySqlAsync(bank) => {
                let work = async |tx: &by_mysql_async::Tx<'_>| {
                    let within = MySqlStore::within(tx).table(&bank.table).sender_of(&bank.store);
                    let paid = within.operation(key(), POLICY).run(async {
                        by_mysql_async::insert(bank, tx, "a").await;
                        pushed()
                    });
                    after(paid.await)
                };
                MySqlStore::transact(&mut raw_mysql(&bank.url).await, work).await
            }
            Driver::MySqlSqlx(bank, pool) => {
                let work = async |tx: &mysql_by_sqlx::Tx<'_>| {
                    let within = MySqlStore::within(tx).table(&bank.table).sender_of(&bank.store);
                    let paid = within.operation(key(), POLICY).run(async {
                        mysql_by_sqlx::insert(bank, tx, "a").await;
                        pushed()
                    });
                    after(paid.await)
                };
                MySqlStore::transact_sqlx_0_9(pool, work).await
            }
            Driver::Rusqlite(till) => {
                let store = till.store(&self.broker).await;
                let work = async |tx: &SqliteTx<'_>| {
                    let within = SqliteStore::within(tx).sender_of(&store);
                    let paid = within.operation(key(), POLICY).run(async {
                        tx.execute("INSERT INTO payments VALUES ('a')", []).unwrap();
                        pushed()
                    });
                    after(paid.await)
                };
                SqliteStore::transact(&mut till.connection(), work).await
            }
        }
    }
}

impl Till {
    /// Opens a handle of the records, whose sender is `broker`.
    async fn store(&self, broker: &Broker) -> SqliteStore {
        SqliteStore::open(self.folder.file()).await.unwrap().with_sender(broker.clone())
    }
}

#[tokio::test]
async fn messages_leave_after_the_commit_and_once() {
    for shop in Shop::all().await {
        let name = shop.driver.name();
        let (paid, outcome) = shop.deliver(true).await;
        assert!(paid.is_err() && is_retry(&outcome) && !outcome.unsent(), "{name}: {outcome:?}");
        assert!(shop.broker.take().is_empty(), "{name}: the transaction was rolled back");

        for delivery in 1..3 {
            let (paid, outcome) = shop.deliver(false).await;
            // The delivery that was rolled back counts as an attempt.
            assert_eq!(paid.unwrap(), 2, "{name}");
            assert_eq!((outcome.disposition(), outcome.unsent()), (Disposition::Ack, false), "{name}: {outcome:?}");
            let expected: &[&str] = if delivery == 1 { &["paid", "shipped"] } else { &[] };
            assert_eq!(shop.broker.take(), expected, "{name}");
        }
        assert_eq!(shop.driver.payments().await, 1, "{name}");
    }
}

#[tokio::test]
async fn a_delivery_whose_messages_are_not_sent_comes_again() {
    for shop in Shop::all().await {
        let name = shop.driver.name();
        shop.broker.is_away(true);
        for delivery in 1..4 {
            let (paid, outcome) = shop.deliver(false).await;
            assert_eq!(paid.unwrap(), 1, "{name}: committed");
            assert!(outcome.unsent() && outcome.store_failed() && is_retry(&outcome), "{name}: {outcome:?}");
            assert_eq!(outcome.replayed(), delivery > 1, "{name}");
            assert_eq!(shop.driver.payments().await, 1, "{name}");
        }
        // An observation around it knows, too.
        let (_, outcome) = observe(async { shop.deliver(false).await.0 }).await;
        assert!(outcome.unsent() && is_retry(&outcome), "{name}: {outcome:?}");
        shop.broker.is_away(false);
        let (paid, outcome) = shop.deliver(false).await;
        assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack), "{name}");
        assert_eq!(shop.broker.take(), ["paid", "shipped"], "{name}");
        shop.deliver(false).await.0.unwrap();
        assert!(shop.broker.take().is_empty(), "{name}");
    }
}

/// Pays for `name` in a transaction of SQLite, and pushes its name.
async fn sell_and_push(tx: &SqliteTx<'_>, store: &SqliteStore, name: &str, policy: Policy) -> Result<u32, Error> {
    let operation = SqliteStore::within(tx).sender_of(store).operation(Ok(key(name)), policy);
    operation
        .run(async {
            tx.execute("INSERT INTO payments VALUES (?1)", [name]).unwrap();
            push(name)?;
            if name == "declined" { Err(Error::NoAttempt) } else { Ok(current()?.number()) }
        })
        .await
}

#[tokio::test]
async fn a_message_is_sent_when_its_payment_is_visible() {
    let (till, broker) = (Arc::new(Till::new()), Broker::default());
    broker.0.lock().unwrap().watched = Some(Arc::clone(&till));
    let store = till.store(&broker).await;
    let work = async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> {
        sell_and_push(tx, &store, "a", POLICY).await?;
        assert!(broker.take().is_empty());
        // A duplicate in the same transaction replays a record that is not committed.
        Ok(sell_and_push(tx, &store, "a", POLICY).await?)
    };
    let (paid, outcome) = SqliteStore::transact(&mut till.connection(), work).await;
    assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!((broker.take(), broker.0.lock().unwrap().paid.clone()), (vec!["a".to_owned()], vec![1]));
}

#[tokio::test]
async fn messages_of_calls_whose_writes_are_undone_are_not_sent() {
    let (till, broker) = (Till::new(), Broker::default());
    let store = till.store(&broker).await;
    for (mode, beside) in [(Mode::Enforce, "enforced"), (Mode::Shadow, "in shadow"), (Mode::Off, "off")] {
        let policy = POLICY.mode(mode);
        let work = async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> {
            // The work swallows both errors, and is committed.
            sell_and_push(tx, &store, "declined", policy).await.unwrap_err();
            let outer = SqliteStore::within(tx).sender_of(&store).operation(Ok(key("outer")), POLICY);
            let outer = outer.run(async {
                sell_and_push(tx, &store, "inner", policy).await?;
                Err::<u32, _>(Error::NoAttempt)
            });
            let beside = sell_and_push(tx, &store, beside, policy);
            let (failed, beside) = futures::future::join(outer, beside).await;
            failed.unwrap_err();
            Ok(beside?)
        };
        let (_, outcome) = SqliteStore::transact(&mut till.connection(), work).await;
        assert!(!outcome.unsent(), "{mode:?}");
        assert_eq!(broker.take(), [beside], "{mode:?}");
    }
}

#[tokio::test]
async fn messages_that_no_record_holds_wait_for_the_commit() {
    for mode in [Mode::Shadow, Mode::Off] {
        let (till, broker) = (Till::new(), Broker::default());
        let store = till.store(&broker).await;
        for commits in [false, true] {
            let work = async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> {
                let paid = sell_and_push(tx, &store, "a", POLICY.mode(mode)).await?;
                assert!(broker.take().is_empty(), "{mode:?}: sent before the commit");
                if commits { Ok(paid) } else { Err("the work failed".into()) }
            };
            SqliteStore::transact(&mut till.connection(), work).await.0.ok();
            assert_eq!(broker.take().len(), usize::from(commits), "{mode:?}");
        }
    }
}

#[tokio::test]
async fn a_push_is_refused_where_nothing_could_send() {
    let (till, broker) = (Till::new(), Broker::default());
    let store = till.store(&broker).await;
    let is_refused = |pushed: Result<u32, Error>| {
        let error = pushed.unwrap_err();
        assert!(matches!(error, Error::Outbox { problem: OutboxProblem::InTransaction, .. }), "{error:?}");
        assert!(error.to_string().contains("`transact`") && error.is_misconfigured(), "{error}");
    };
    let mut connection = till.connection();
    let by_hand = begin(&mut connection);
    is_refused(sell_and_push(&by_hand, &store, "a", POLICY).await);
    drop(by_hand);
    let without = SqliteStore::open(till.folder.file()).await.unwrap();
    let work = async |tx: &SqliteTx<'_>| -> Result<(), AnyError> {
        is_refused(sell_and_push(tx, &without, "a", POLICY).await);
        let operation = SqliteStore::within(tx).operation(Ok(key("a")), POLICY);
        is_refused(operation.run(async { push("a").map(|()| 1) }).await);
        Ok(())
    };
    SqliteStore::transact(&mut connection, work).await.0.unwrap();
    assert_eq!((till.payments(), broker.take().len()), (0, 0));
}

#[tokio::test]
async fn a_store_of_other_records_is_noticed() {
    let (till, other, broker) = (Till::new(), Till::new(), Broker::default());
    let store = other.store(&broker).await;
    for _ in 0..2 {
        let work =
            async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> { Ok(sell_and_push(tx, &store, "a", POLICY).await?) };
        let (paid, outcome) = SqliteStore::transact(&mut till.connection(), work).await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.unsent() && is_retry(&outcome), "{outcome:?}");
    }
    assert!(broker.take().is_empty());
}

#[tokio::test]
async fn equal_keys_of_two_tables_have_messages_of_their_own() {
    let (till, broker) = (Till::new(), Broker::default());
    let open = async |table: &str| {
        let options = SqliteStore::options().table(table);
        options.open(till.folder.file()).await.unwrap().with_sender(broker.clone())
    };
    let stores = [open("first").await, open("second").await];
    let sell = async |tx: &SqliteTx<'_>, table: &str, store: &SqliteStore| {
        let within = SqliteStore::within(tx).table(table).sender_of(store);
        within.operation(Ok(key("a")), POLICY).run(async { push(table).map(|()| 1) }).await
    };
    let work = async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> {
        sell(tx, "first", &stores[0]).await?;
        Ok(sell(tx, "second", &stores[1]).await?)
    };
    let (_, outcome) = SqliteStore::transact(&mut till.connection(), work).await;
    assert_eq!(
        (outcome.disposition(), broker.take()),
        (Disposition::Ack, vec!["first".to_owned(), "second".to_owned()])
    );
    // The store of the other table has the same key, in another record.
    let work = async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> {
        let within = SqliteStore::within(tx).table("third").sender_of(&stores[0]);
        Ok(within.operation(Ok(key("a")), POLICY).run(async { push("third").map(|()| 1) }).await?)
    };
    let (_, outcome) = SqliteStore::transact(&mut till.connection(), work).await;
    assert!(outcome.unsent() && is_retry(&outcome) && broker.take().is_empty(), "{outcome:?}");
}

#[tokio::test]
async fn messages_of_a_delivery_that_is_dropped_leave_with_the_next() {
    let (till, broker) = (Till::new(), Broker::default());
    let store = till.store(&broker).await;
    for (name, hangs) in [("before", Hang::BeforeArrival), ("after", Hang::AfterArrival)] {
        broker.0.lock().unwrap().hang = Some(hangs);
        let mut connection = till.connection();
        let work =
            async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> { Ok(sell_and_push(tx, &store, name, POLICY).await?) };
        let (_, outcome) = observe(async {
            tokio::select! {
                (ended, _) = SqliteStore::transact(&mut connection, work) => ended,
                () = broker.1.notified() => Ok(0),
            }
        })
        .await;
        assert!(outcome.unsent() && is_retry(&outcome), "{name}: {outcome:?}");
        assert!(matches!(till.state(name).await, Some(State::Completed(_))), "{name}");
        let (paid, outcome) = SqliteStore::transact(&mut connection, work).await;
        assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack), "{name}");
        let expected: &[&str] = if hangs == Hang::BeforeArrival { &[name] } else { &[name, name] };
        assert_eq!(broker.take(), expected, "{name}: with one id");
    }
}

#[tokio::test]
async fn a_resender_sends_what_a_delivery_has_left() {
    let (till, broker) = (Till::new(), Broker::default());
    let store = till.store(&broker).await;
    broker.is_away(true);
    let work = async |tx: &SqliteTx<'_>| -> Result<u32, AnyError> { Ok(sell_and_push(tx, &store, "a", POLICY).await?) };
    assert!(SqliteStore::transact(&mut till.connection(), work).await.1.unsent());
    broker.is_away(false);
    let resent = Resender::new(&store).older_than(Duration::ZERO).pass().await.unwrap();
    assert_eq!((resent.done, broker.take()), (1, vec!["a".to_owned()]));
    let (_, outcome) = SqliteStore::transact(&mut till.connection(), work).await;
    assert_eq!((outcome.disposition(), broker.take().len()), (Disposition::Ack, 0));
}
