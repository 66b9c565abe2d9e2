//! The time for which a broker may deliver a message again, compared with the retention of records.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use crate::engine::Observe;
use crate::policy::Policy;

/// Longest time for which a broker may deliver a message again, as input of [`Policy::check_redelivery`] and
/// [`Observe::redelivery`].
///
/// Each constructor takes values from the configuration of the broker. The time begins with the publication of the
/// message, and a record's `ttl` begins later, with the completion of the operation. So a `ttl` as long as
/// [`longest`](Redelivery::longest) suffices.
///
/// This time does not cover a producer that publishes the same operation again, hours later.
///
/// ```
/// use std::time::Duration;
///
/// use idem_runtime::Policy;
/// use idem_runtime::brokers::Redelivery;
///
/// const fn days(days: u64) -> Duration {
///     Duration::from_secs(days * 86_400)
/// }
///
/// // `MessageRetentionPeriod` of the queue, and of its dead-letter queue, from which messages are moved back.
/// const QUEUE: Redelivery = Redelivery::sqs(days(4)).dlq(days(14));
///
/// const PAYMENTS: Policy = Policy::new(days(30));
/// assert!(PAYMENTS.check_redelivery(&QUEUE).is_ok());
///
/// // A message may come back when its record is gone.
/// let problem = Policy::new(days(7)).check_redelivery(&QUEUE).unwrap_err();
/// println!("{problem}");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Redelivery {
    broker: &'static str,
    /// Retention of a message; `None` means forever.
    retention: Option<Duration>,
    /// Time that a message may be kept beyond `retention`.
    segment: Duration,
    /// Time for which Kafka keeps the offsets of a consumer group that is away. After this time the group starts again
    /// at the beginning of the topic.
    offsets_retention: Option<Duration>,
    /// Time for which a dead-letter queue keeps the message.
    dlq: Option<Duration>,
}

impl Redelivery {
    /// Default of Kafka's `segment.ms`.
    const KAFKA_SEGMENT: Duration = Duration::from_secs(7 * 86_400);

    const fn of(broker: &'static str, retention: Option<Duration>) -> Self {
        Self { broker, retention, segment: Duration::ZERO, offsets_retention: None, dlq: None }
    }

    /// Amazon SQS: the queue's `MessageRetentionPeriod` (default: 4 days; at most 14 days). If messages are redriven
    /// from a dead-letter queue, add [`dlq`](Redelivery::dlq).
    pub const fn sqs(retention: Duration) -> Self {
        Self::of("SQS", Some(retention))
    }

    /// Kafka: the topic's `retention.ms` ([`Duration::MAX`] for -1, and for a compacted topic), and the broker's
    /// `offsets.retention.minutes`. After a reset of the offsets, the broker delivers all messages of the topic again.
    /// The same happens to a group that was away for longer than its offsets are kept. A message is deleted together
    /// with its segment, and so may stay for `segment.ms` longer: see [`segment`](Redelivery::segment).
    pub const fn kafka(retention: Duration, offsets_retention: Duration) -> Self {
        let retention = if retention.as_nanos() == Duration::MAX.as_nanos() { None } else { Some(retention) };
        let kafka = Self::of("Kafka", retention);
        Self { segment: Self::KAFKA_SEGMENT, offsets_retention: Some(offsets_retention), ..kafka }
    }

    /// Sets Kafka's `segment.ms` of the topic (default: 7 days).
    #[must_use]
    pub const fn segment(self, segment: Duration) -> Self {
        Self { segment, ..self }
    }

    /// NATS JetStream: the stream's `max_age`; zero means forever, as in JetStream. A new consumer may start at the
    /// beginning of the stream.
    pub const fn jetstream(max_age: Duration) -> Self {
        Self::of("JetStream", if max_age.is_zero() { None } else { Some(max_age) })
    }

    /// RabbitMQ: the message TTL of the queue or of its policy. A queue without a message TTL is
    /// [`unbounded`](Redelivery::unbounded). If messages come back from a dead-letter queue, add
    /// [`dlq`](Redelivery::dlq).
    pub const fn rabbitmq(ttl: Duration) -> Self {
        Self::of("RabbitMQ", Some(ttl))
    }

    /// Google Pub/Sub: the retention of the subscription (default: 7 days) or of its topic (at most 31 days), whichever
    /// is longer, because a `seek` delivers acknowledged messages again.
    pub const fn pubsub(retention: Duration) -> Self {
        Self::of("Pub/Sub", Some(retention))
    }

    /// Any other broker or client that delivers no message again after `longest`.
    pub const fn at_most(longest: Duration) -> Self {
        Self::of("the broker", Some(longest))
    }

    /// A broker that keeps a message until a client or an operator deletes it: a Redis stream that is not trimmed, a
    /// queue without a message TTL. No `ttl` is long enough for such a broker.
    pub const fn unbounded() -> Self {
        Self::of("the broker", None)
    }

    /// Adds a dead-letter queue, which keeps failed messages for `retention`, and from which messages may be put back.
    /// For a message that is put back, the retention of the original queue starts again.
    /// [`longest`](Redelivery::longest) covers a message that is put back once; each further time adds the same
    /// duration again.
    #[must_use]
    pub const fn dlq(self, retention: Duration) -> Self {
        Self { dlq: Some(retention), ..self }
    }

    /// Returns the longest time for which a message may be delivered again; `None` if this time has no limit.
    pub const fn longest(&self) -> Option<Duration> {
        let Some(retention) = self.retention else { return None };
        let kept = retention.saturating_add(self.segment);
        match self.dlq {
            Some(dlq) => Some(kept.saturating_add(dlq).saturating_add(kept)),
            None => Some(kept),
        }
    }
}

impl Policy {
    /// Checks that the `ttl` of a record is at least as long as the time for which the broker may deliver the message
    /// again. Call this function at the start of a program.
    ///
    /// # Errors
    /// [`RedeliveryProblem`] shows both times, and the remedy.
    ///
    /// ```
    /// use std::time::Duration;
    /// use idem_runtime::Policy;
    /// use idem_runtime::brokers::Redelivery;
    ///
    /// const DAY: Duration = Duration::from_secs(86_400);
    /// const PAYMENTS: Policy = Policy::new(DAY.saturating_mul(32));
    ///
    /// // 14 days in the queue, 4 in the dead-letter queue, and 14 again once it is put back.
    /// PAYMENTS.check_redelivery(&Redelivery::sqs(DAY * 14).dlq(DAY * 4))?;
    ///
    /// let problem = PAYMENTS.ttl(DAY * 7).check_redelivery(&Redelivery::sqs(DAY * 14)).unwrap_err();
    /// assert!(problem.to_string().starts_with("`ttl` is 7 d, and SQS may deliver a message again for up to 14 d"));
    /// # Ok::<(), idem_runtime::brokers::RedeliveryProblem>(())
    /// ```
    pub const fn check_redelivery(&self, redelivery: &Redelivery) -> Result<(), RedeliveryProblem> {
        let (ttl, redelivery) = (self.ttl, *redelivery);
        match redelivery.longest() {
            None => Err(RedeliveryProblem::Unbounded { ttl, redelivery }),
            Some(longest) if ttl.as_nanos() < longest.as_nanos() => {
                Err(RedeliveryProblem::TtlTooShort { ttl, longest, redelivery })
            }
            Some(_) => Ok(()),
        }
    }
}

impl<F: Future, B> Observe<F, B> {
    /// Sets the time for which the broker may deliver the message again. A call with a shorter `ttl` is refused with
    /// [`Error::InvalidPolicy`](crate::Error::InvalidPolicy), whether the `ttl` is set in the attribute, in a policy,
    /// or at run time. The message is kept and delivered again, as with every misconfiguration.
    ///
    /// [`Policy::check_redelivery`] makes the same comparison at the start of the program, if the `ttl` is in a policy.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # use idem_runtime::brokers::Redelivery;
    /// const QUEUE: Redelivery = Redelivery::sqs(Duration::from_secs(14 * 86_400));
    ///
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    ///     Ok(format!("parcel for {id}"))
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// # let store = MemoryStore::new();
    /// let (result, outcome) = observe(ship(&store, 42)).redelivery(&QUEUE).await;
    /// assert!(matches!(result, Err(Error::InvalidPolicy { .. })), "7 days are less than 14");
    /// assert!(outcome.misconfigured() && !outcome.executed());
    /// # });
    /// ```
    pub fn redelivery(self, redelivery: &Redelivery) -> Self {
        self.redelivered_for(redelivery.longest())
    }
}

/// The problem that the broker may still deliver a message after the `ttl` of its record, so that the body would run
/// again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RedeliveryProblem {
    /// The store removes the record while the broker may still deliver the message.
    #[non_exhaustive]
    TtlTooShort {
        /// Retention of the record.
        ttl: Duration,
        /// Longest time for which the message may be delivered.
        longest: Duration,
        /// The configuration of the broker, from which `longest` follows.
        redelivery: Redelivery,
    },
    /// The message may be delivered again forever.
    #[non_exhaustive]
    Unbounded {
        /// Retention of the record.
        ttl: Duration,
        /// The configuration of the broker.
        redelivery: Redelivery,
    },
}

impl fmt::Display for RedeliveryProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TtlTooShort { ttl, longest, redelivery } => write!(
                f,
                "`ttl` is {}, and {} may deliver a message again for up to {}{}: a duplicate that comes after `ttl` runs the \
                 body again; give a `ttl` of at least {}, or let the broker keep messages for less long",
                Days(*ttl),
                redelivery.broker,
                Days(*longest),
                TimeParts(redelivery),
                Days(*longest),
            ),
            Self::Unbounded { ttl, redelivery } => write!(
                f,
                "`ttl` is {}, and {} may deliver a message again at any time, so no `ttl` suffices: make the effect refuse a \
                 second time by itself (a unique key in your database that is never deleted, written in your own transaction), \
                 or let the broker delete messages after some time",
                Days(*ttl),
                redelivery.broker,
            ),
        }
    }
}

impl std::error::Error for RedeliveryProblem {}

/// The parts of a redelivery time, if there are several.
struct TimeParts<'a>(&'a Redelivery);

impl fmt::Display for TimeParts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Redelivery { retention, segment, offsets_retention, dlq, .. } = self.0;
        let Some(retention) = retention else { return Ok(()) };
        if segment.is_zero() && dlq.is_none() {
            return Ok(());
        }
        write!(f, " ({} of retention", Days(*retention))?;
        if !segment.is_zero() {
            write!(f, ", {} more for its segment", Days(*segment))?;
        }
        if let Some(dlq) = dlq {
            let kept = Days(retention.saturating_add(*segment));
            write!(f, ", {} in the dead-letter queue, and {kept} again once it is put back", Days(*dlq))?;
        }
        if let Some(offsets) = offsets_retention {
            write!(f, "; a group that is away for {} reads all of it again", Days(*offsets))?;
        }
        f.write_str(")")
    }
}

/// A time in the units of a configuration: `7 d`, `1 d 12 h`.
struct Days(Duration);

impl fmt::Display for Days {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut seconds, mut written) = (self.0.as_secs(), 0);
        for (unit, length) in [("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)] {
            let count = seconds / length;
            seconds %= length;
            if count > 0 {
                write!(f, "{}{count} {unit}", if written > 0 { " " } else { "" })?;
                written += 1;
            }
        }
        match (written, self.0.subsec_millis()) {
            (0, millis) => write!(f, "{millis} ms"),
            (_, 0) => Ok(()),
            (_, millis) => write!(f, " {millis} ms"),
        }
    }
}
