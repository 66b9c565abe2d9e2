//! Finds the primary through the sentinels that watch over it.
//!
//! - To open a connection, the store asks all sentinels. The answer with the highest *epoch* (number of the latest
//!   failover) wins: a sentinel that was cut off still names the old primary. The named server must report itself as
//!   the primary.
//! - The store asks the sentinels again when a sentinel announces a failover, and every five seconds. When the
//!   sentinels name another server, the store closes its connection to the old server, and does not trust a late answer
//!   of the old server.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::Stream;
use redis::{Client, ConnectionInfo, ErrorKind, Pipeline, RedisError, Value, from_redis_value};
use tokio::sync::{Notify, watch};

use super::connection::{Connection, elsewhere};
use super::failure::ExchangeFailure;
use super::task::OwnedTask;
use crate::clock::Clock;
use crate::combine::{all, race};
use crate::sync::lock;

/// Time limit for the answer of one sentinel. An unreachable sentinel must not delay the answers of other sentinels for
/// long.
const PATIENCE: Duration = Duration::from_millis(500);
/// Longest interval between two rounds of questions: an announcement can get lost with its connection.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// Pause before a broken subscription is made again.
const RESUBSCRIBE: Duration = Duration::from_millis(500);

/// The sentinels of one primary.
pub(super) struct Sentinels {
    name: String,
    /// Settings of a connection to the primary, except for its address.
    template: ConnectionInfo,
    each: Vec<(Client, Connection<Client>)>,
    clock: Arc<dyn Clock>,
    known: Mutex<Option<Primary>>,
    /// Number of primaries found so far.
    version: watch::Sender<u64>,
    /// Notified when the sentinels must be asked: after an announced failover, and after each new subscription, because
    /// earlier announcements are lost.
    announced: Notify,
}

/// The primary, as a sentinel names it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Primary {
    host: String,
    port: u16,
    /// Number of the latest failover that the sentinel knows.
    epoch: u64,
}

impl Sentinels {
    /// Makes the sentinels of the primary called `name`. `sentinels` must not be empty.
    pub(super) fn new(
        sentinels: &[Client],
        name: String,
        template: ConnectionInfo,
        clock: &Arc<dyn Clock>,
        timeout: Duration,
    ) -> Self {
        let connect = |client: &Client| {
            (client.clone(), Connection::ours(client.clone(), Arc::clone(clock), timeout.min(PATIENCE)))
        };
        Self {
            name,
            template,
            each: sentinels.iter().map(connect).collect(),
            clock: Arc::clone(clock),
            known: Mutex::default(),
            version: watch::channel(0).0,
            announced: Notify::new(),
        }
    }

    /// Returns the number of primaries found so far.
    pub(super) fn version(&self) -> u64 {
        *self.version.borrow()
    }

    /// Waits until the sentinels name another primary than the primary of `version`.
    pub(super) async fn moved(&self, version: u64) {
        let mut versions = self.version.subscribe();
        // The wait can't fail, because the sender lives as long as `self`.
        let _ = versions.wait_for(|now| *now != version).await;
    }

    /// Returns a client of the primary that the sentinels name now, and the version of the primary's address.
    pub(super) async fn primary(&self) -> Result<(Client, u64), RedisError> {
        let (Primary { host, port, .. }, version) = self.ask().await?;
        Ok((elsewhere(&self.template, &host, port)?, version))
    }

    async fn ask(&self) -> Result<(Primary, u64), RedisError> {
        let mut asked: Vec<_> = self.each.iter().map(|(_, connection)| Box::pin(ask(connection, &self.name))).collect();
        let mut answers = Vec::new();
        let (mut nameless, mut refused) = (false, None);
        for answer in all(&mut asked).await {
            match answer {
                Ok(Some(primary)) => answers.push(primary),
                Ok(None) => nameless = true,
                Err(ExchangeFailure::Refused(refusal)) => refused = Some(refusal),
                Err(_) => {}
            }
        }
        if let Some(latest) = answers.iter().max_by_key(|primary| primary.epoch) {
            return Ok(self.learn(latest, answers.len() == self.each.len()));
        }
        Err(match refused {
            Some(refusal) => RedisError::from((
                ErrorKind::AuthenticationFailed,
                "the sentinels refused the request",
                format!("{} {}", refusal.code, refusal.message),
            )),
            None if nameless => {
                (ErrorKind::MasterNameNotFoundBySentinel, "the sentinels know no primary of that name").into()
            }
            None => self.unreachable().await,
        })
    }

    /// Returns the reason why no sentinel answers. Prefers a refused login, which the user can correct, to an
    /// unreachable sentinel.
    async fn unreachable(&self) -> RedisError {
        for (_, connection) in &self.each {
            if let Err(error) = Box::pin(connection.try_open()).await
                && error.kind() == ErrorKind::AuthenticationFailed
            {
                return error;
            }
        }
        (ErrorKind::Io, "no sentinel answers").into()
    }

    /// Notes the latest answer of the sentinels. Ignores an epoch earlier than the known epoch, unless all sentinels
    /// have answered: then an operator has set up the sentinels anew.
    fn learn(&self, latest: &Primary, all: bool) -> (Primary, u64) {
        let mut known = lock(&self.known);
        match &*known {
            Some(known) if known == latest || (known.epoch > latest.epoch && !all) => {}
            before => {
                if let Some(before) = before {
                    tracing::info!(
                        name = self.name, from = %format_args!("{}:{}", before.host, before.port),
                        to = %format_args!("{}:{}", latest.host, latest.port), "the sentinels now name another primary"
                    );
                }
                *known = Some(latest.clone());
                self.version.send_modify(|version| *version += 1);
            }
        }
        (known.clone().unwrap_or_else(|| latest.clone()), self.version())
    }

    /// Keeps asking the sentinels until the returned tasks are dropped.
    pub(super) fn watch(self: &Arc<Self>) -> Vec<OwnedTask> {
        let asking = {
            let this = Arc::clone(self);
            async move {
                loop {
                    race(this.announced.notified(), this.clock.sleep(ASK_AGAIN)).await;
                    // The error is ignored here: a caller that needs the primary asks the sentinels again, and gets the
                    // error.
                    let _ = this.ask().await;
                }
            }
        };
        let mut tasks = vec![OwnedTask(tokio::spawn(asking).abort_handle())];
        for (client, _) in &self.each {
            let listening = listen(Arc::clone(self), client.clone());
            tasks.push(OwnedTask(tokio::spawn(listening).abort_handle()));
        }
        tasks
    }
}

/// Passes on the announcements of one sentinel.
async fn listen(sentinels: Arc<Sentinels>, client: Client) {
    loop {
        let subscribed = async {
            let mut connection = client.get_async_pubsub().await?;
            connection.subscribe("+switch-master").await?;
            Ok::<_, RedisError>(connection)
        };
        if let Some(Ok(connection)) = race(subscribed, sentinels.clock.sleep(PATIENCE * 4)).await {
            // Announcements from before this subscription are lost, so the sentinels are asked now.
            sentinels.announced.notify_one();
            let mut announcements = pin!(connection.into_on_message());
            while poll_fn(|cx| announcements.as_mut().poll_next(cx)).await.is_some() {
                sentinels.announced.notify_one();
            }
        }
        sentinels.clock.sleep(RESUBSCRIBE).await;
    }
}

/// Returns the answer of one sentinel; `None` if the sentinel watches no primary called `name`.
async fn ask(sentinel: &Connection<Client>, name: &str) -> Result<Option<Primary>, ExchangeFailure> {
    let mut questions = Pipeline::new();
    // Two commands are needed: the address changes as soon as a replica is promoted, but the details, which hold the
    // epoch, change only at the end of the failover.
    questions.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    questions.cmd("SENTINEL").arg("MASTER").arg(name);
    let answers = sentinel.many(&questions).await?;
    let Ok([address, details]) = <[Value; 2]>::try_from(answers) else { return Err(ExchangeFailure::Lost) };
    let (host, port) = match address {
        Value::Nil => return Ok(None),
        Value::ServerError(error) => return Err(ExchangeFailure::from(&error)),
        address => from_redis_value::<(String, u16)>(address).map_err(|_| ExchangeFailure::Lost)?,
    };
    let details: HashMap<String, String> = from_redis_value(details).map_err(|_| ExchangeFailure::Lost)?;
    let epoch = details.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or_default();
    Ok(Some(Primary { host, port, epoch }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    fn primary(port: u16, epoch: u64) -> Primary {
        Primary { host: "h".to_owned(), port, epoch }
    }

    #[test]
    fn among_sentinels_the_answer_of_the_latest_failover_wins() {
        let client = Client::open("redis://localhost").unwrap();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
        let template = client.get_connection_info().clone();
        let sentinels = Sentinels::new(&[client], "name".to_owned(), template, &clock, PATIENCE);
        assert_eq!(sentinels.learn(&primary(1, 3), false), (primary(1, 3), 1));
        assert_eq!(sentinels.learn(&primary(1, 3), true), (primary(1, 3), 1), "nothing has changed");
        assert_eq!(sentinels.learn(&primary(2, 4), false), (primary(2, 4), 2));
        // A sentinel that was cut off answers while the other sentinels are silent.
        assert_eq!(sentinels.learn(&primary(1, 3), false), (primary(2, 4), 2));
        // All sentinels were set up anew.
        assert_eq!(sentinels.learn(&primary(5, 0), true), (primary(5, 0), 3));
    }
}
