//! Records inside your own open transaction.
//!
//! [`OpenTransaction`] guards your transaction, and [`Within`] puts the record of a call in it.

#[cfg(feature = "with-mysql_async-0_37")]
mod by_mysql_async;
#[cfg(feature = "with-tokio-postgres-0_7")]
mod by_tokio_postgres;
mod call;
mod journal;
mod mailbox;
#[cfg(feature = "mysql")]
mod mysql;
mod open;
mod outbox;
#[cfg(feature = "postgres")]
mod postgres;
mod savepoint;
#[cfg(feature = "with-rusqlite")]
mod sqlite;
mod step;
mod transact;
mod turns;

use std::fmt;
use std::sync::Arc;

pub use self::call::InTransaction;
use self::mailbox::{Mailbox, UntilCommit};
pub use self::open::OpenTransaction;
use self::open::TransactionNotes;
pub use self::step::StepWithin;
use crate::codec::Json;
use crate::engine::{Operation, RecordValues};
use crate::key::{Key, KeyError};
use crate::policy::{Mode, Policy};
use crate::store::Store;
use crate::store::sender::Sender;
pub use crate::store::transaction::{DriverTransaction, SharedTransaction, TransactionStore};

/// Records inside your open transaction; made by `PostgresStore::within`, `MySqlStore::within` and
/// `SqliteStore::within`, for `store = PostgresStore::within(tx)`.
///
/// The record, and the writes that the body makes through the same transaction, commit together or not at all. The
/// effect thus happens exactly once, no matter which step fails. `transact`, `transact_sqlx_0_9` and
/// `transact_sqlx_0_8` of these stores begin the transaction, run the call in it, commit, and return the
/// disposition of the message: use these functions to handle messages.
///
/// - *The commit* follows after the call has returned `Ok`: you commit the transaction, or `transact` does. The record
///   and the result become visible to other transactions at the commit; before the commit, it is unknown whether the
///   operation takes effect. So the [`Outcome`](crate::Outcome) of a call that ran its body in your transaction is
///   [pending](crate::Outcome::is_pending_commit), and its disposition is to deliver the message again, until
///   [`Outcome::committed`](crate::Outcome::committed) notes that the commit succeeded; the library logs a warning
///   about a pending outcome. The next delivery replays the committed result, and is acknowledged. A driver may answer
///   `Ok` to the `COMMIT` of a transaction in which a statement has failed, although the server has rolled it back;
///   `transact` detects such a rollback.
/// - *A rollback* undoes the record with everything else, and frees the key. Roll back when the call returns an error.
///   After a rollback `transact` writes the ends of the attempts in a separate transaction, so that `max_attempts`
///   counts the attempts, and the pauses grow. A process that dies leaves no trace of its attempt. `max_attempts` is
///   refused in a transaction that you begin yourself, with [`Error::Store`] of kind [`Misconfigured`], because a
///   rollback would also undo the number of attempts in the record.
/// - *A swallowed error* leaves no write of the body. Each call has a savepoint, and the writes of the body are undone
///   when the body returns an error, panics or is cancelled. All other writes through the transaction during the call
///   are undone as well. On MySQL a call that panics or is cancelled dooms the transaction: only a rollback remains. If
///   you then commit the transaction, the record of a body that returned an error shows that the attempt ended without
///   a result, and the next delivery runs the body; under `on_error = record` the record holds the error. A call that
///   was cancelled or panicked leaves no record. Under `on_crash = fail` such a call leaves the record of an attempt
///   that died, and the operation is interrupted when the lease has lapsed.
/// - *To keep the writes of a failing body*, return a value instead of an error: `Ok(Declined)` is committed together
///   with the writes.
/// - *No lease and no heartbeat*: the transaction holds the key for as long as it is open.
/// - *A concurrent duplicate* gets [`Error::InProgress`] immediately (on MySQL after a second), or waits with
///   `in_progress = wait("…")`.
/// - *Several calls in one transaction* may be nested, or made one after the other. Concurrent calls, by a `join!`,
///   take turns.
/// - *A failed statement of the library* is undone, and the transaction goes on. If the statement can't be undone, the
///   error is [`Error::Store`] or [`Error::Unrecorded`] of kind [`Aborted`], and nothing takes effect.
///
/// Use a scope either inside of transactions or with the store itself, but not both: a call of one kind would wait for
/// a call of the other kind.
///
/// [`Aborted`]: crate::StoreErrorKind::Aborted
/// [`Error::InProgress`]: crate::Error::InProgress
/// [`Error::Store`]: crate::Error::Store
/// [`Error::Unrecorded`]: crate::Error::Unrecorded
/// [`Misconfigured`]: crate::StoreErrorKind::Misconfigured
#[derive(Clone)]
pub struct Within<'a, C> {
    transaction: C,
    notes: &'a TransactionNotes,
    namespace: Box<str>,
    holder: Box<str>,
    /// Store whose sender publishes the messages after the commit.
    outbox: Option<Arc<dyn Store>>,
}

impl<C> fmt::Debug for Within<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Within")
    }
}

impl<'a, C> Within<'a, C> {
    fn new(transaction: C, notes: &'a TransactionNotes) -> Self {
        Self { transaction, notes, namespace: Box::default(), holder: Box::default(), outbox: None }
    }

    /// Name of this application, for its child keys (default: none); see [`Store::namespace`].
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Name of this program in its records, next to host and process (default: none). The process never frees a name,
    /// so don't use another name for each call.
    #[must_use]
    pub fn holder(mut self, name: &str) -> Self {
        self.holder = name.into();
        self
    }

    /// Names the store whose [sender](crate::StoreExt::with_sender) publishes the messages of the calls
    /// ([`Attempt::outbox`](crate::Attempt::outbox)): a store of the same records.
    ///
    /// The messages are committed with the record and the rows of the body. After the commit `transact` sends them, and
    /// marks them as sent in `store`. If not all are sent, `transact` returns the value of its work, and the
    /// [`Outcome`](crate::Outcome) is [unsent](crate::Outcome::unsent): the next delivery sends the rest. Only
    /// `transact` takes messages, because the library does not see the commit of a transaction that you begin yourself.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{Disposition, SqliteStore, StoreExt, current, idempotent};
    /// use rusqlite::{Connection, Transaction};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// struct Printer;
    ///
    /// impl Sender for Printer {
    ///     fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
    ///         Box::pin(async move {
    ///             println!("{} for {}", message.id(), message.destination());
    ///             Ok(())
    ///         })
    ///     }
    /// }
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = SqliteStore::within(tx).sender_of(store), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, store: &SqliteStore, order: i64) -> Result<usize, AnyError> {
    ///     current()?.outbox().push("orders.paid", OutgoingMessage::json(&order)?.key(order))?;
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES (?1)", [order])?)
    /// }
    ///
    /// # let folder = std::env::temp_dir().join(format!("idem-sender-of-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// # let path = folder.join("shop.db");
    /// let store = SqliteStore::open(&path).await.unwrap().with_sender(Printer);
    /// let mut connection = Connection::open(&path).unwrap();
    /// connection.execute_batch("CREATE TABLE payments (order_id INTEGER)").unwrap();
    /// let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| pay(tx, &store, 42).await).await;
    /// assert_eq!(paid.unwrap(), 1);
    /// assert_eq!(outcome.disposition(), Disposition::Ack); // Committed, sent and marked.
    /// # drop((store, connection));
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # });
    /// ```
    #[must_use]
    pub fn sender_of<S: Store + ?Sized>(mut self, store: &S) -> Self {
        self.outbox = Some(store.handle());
        self
    }
}

impl<'a, C: TransactionStore> Within<'a, C> {
    /// Creates the operation with this `key` in this transaction.
    pub fn operation(
        &self,
        key: Result<Key, KeyError>,
        policy: Policy,
    ) -> Operation<RecordValues<Json>, InTransaction<'a, C>> {
        let Self { transaction, notes, namespace, holder, outbox } = self;
        let outbox = outbox.as_ref().filter(|store| store.context().sender().is_some());
        // Without a journal the user has begun the transaction, and nothing could send after its commit.
        let until_commit = match (outbox, &notes.journal, &key) {
            (Some(store), Some(journal), Ok(key)) => {
                let (journal, store, key) = (Arc::clone(journal), Arc::clone(store), key.clone());
                Some(Arc::new(UntilCommit { journal, store, key }) as Arc<dyn Sender>)
            }
            _ => None,
        };
        let (mailbox, asked) =
            Mailbox::open(C::NAME, (namespace, holder), transaction.place(), Arc::clone(&notes.clock), until_commit);
        // Shadow mode must not change the effect of the body, so it undoes no write of a body that fails.
        let undoes = policy.current_mode() == Mode::Enforce;
        let outbox = outbox.cloned();
        let place = InTransaction { asked, transaction: transaction.clone(), notes, undoes, outbox };
        Operation::new(&mailbox, key, policy).at(place).0
    }

    #[doc(hidden)]
    pub fn idem_operation(
        &self,
        key: Result<Key, KeyError>,
        policy: Policy,
    ) -> Operation<RecordValues<Json>, InTransaction<'a, C>> {
        self.operation(key, policy)
    }
}
