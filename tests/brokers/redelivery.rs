//! Retention of records, compared with the time for which a broker may deliver a message again.

use idem_runtime::brokers::{Redelivery, RedeliveryProblem};
use idem_runtime::policy::PolicyProblem;
use idem_runtime::{Disposition, Mode, Refusal, idempotent, observe};

use super::super::*;

const DAY: Duration = Duration::from_secs(86_400);

#[test]
fn a_ttl_shorter_than_the_redelivery_time_of_the_broker_is_refused_at_start() {
    let cases = [
        (Redelivery::sqs(DAY * 4), 4),
        // The dead-letter queue keeps a message for another 14 days.
        (Redelivery::sqs(DAY * 14).dlq(DAY * 14), 42),
        (Redelivery::kafka(DAY * 7, DAY * 7), 14),
        (Redelivery::kafka(DAY * 7, DAY * 7).segment(DAY), 8),
        (Redelivery::jetstream(DAY * 3), 3),
        (Redelivery::rabbitmq(DAY), 1),
        (Redelivery::rabbitmq(DAY).dlq(DAY * 5), 7),
        (Redelivery::pubsub(DAY * 31), 31),
        (Redelivery::at_most(DAY * 2), 2),
    ];
    for (redelivery, days) in cases {
        let longest = DAY * days;
        assert_eq!(redelivery.longest(), Some(longest), "{redelivery:?}");
        assert_eq!(POLICY.ttl(longest).check_redelivery(&redelivery), Ok(()));
        let short = longest - Duration::from_millis(1);
        let problem = POLICY.ttl(short).check_redelivery(&redelivery).unwrap_err();
        assert!(
            matches!(problem, RedeliveryProblem::TtlTooShort { ttl, longest: it, .. } if (ttl, it) == (short, longest))
        );
    }
}

#[test]
fn the_error_of_a_short_ttl_names_both_times_and_a_remedy() {
    let text = |ttl, redelivery| POLICY.ttl(ttl).check_redelivery(&redelivery).unwrap_err().to_string();
    assert_eq!(
        text(DAY * 7, Redelivery::sqs(DAY * 14)),
        "`ttl` is 7 d, and SQS may deliver a message again for up to 14 d: a duplicate that comes after `ttl` runs the body \
         again; give a `ttl` of at least 14 d, or let the broker keep messages for less long"
    );
    let kafka = text(Duration::from_secs(129_600), Redelivery::kafka(DAY * 7, DAY * 30));
    for part in ["`ttl` is 1 d 12 h", "up to 14 d", "7 d of retention, 7 d more for its segment", "away for 30 d"] {
        assert!(kafka.contains(part), "{kafka}");
    }
    let redriven = text(DAY * 20, Redelivery::sqs(DAY * 14).dlq(DAY * 4));
    for part in ["up to 32 d", "14 d of retention, 4 d in the dead-letter queue, and 14 d again"] {
        assert!(redriven.contains(part), "{redriven}");
    }
}

#[test]
fn no_ttl_suffices_for_a_broker_that_keeps_messages_for_ever() {
    let for_ever = [
        Redelivery::unbounded(),
        Redelivery::unbounded().dlq(DAY),
        Redelivery::jetstream(Duration::ZERO),
        Redelivery::kafka(Duration::MAX, DAY * 7),
    ];
    for redelivery in for_ever {
        let problem = POLICY.ttl(Policy::MAX_DURATION).check_redelivery(&redelivery).unwrap_err();
        assert!(matches!(problem, RedeliveryProblem::Unbounded { .. }));
        let text = problem.to_string();
        for part in ["`ttl` is 36600 d", "no `ttl` suffices", "a unique key", "in your own transaction"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[idempotent(key = "order:{id}", ttl = "7d", store = store, scope = "brokers::redelivery")]
async fn remembered_for_a_week(store: &FaultyStore, id: u32) -> Result<u32, Error> {
    Ok(id)
}

#[tokio::test]
async fn a_call_whose_ttl_ends_before_the_brokers_redelivery_is_refused() {
    let world = World::new();
    for (redelivery, is_long_enough) in [
        (Redelivery::sqs(DAY * 7), true),
        (Redelivery::sqs(DAY * 7 + Duration::from_millis(1)), false),
        (Redelivery::kafka(DAY * 7, DAY * 7), false),
        (Redelivery::unbounded(), false),
    ] {
        // The check also uses the redelivery time of a broker that only an outer `observe` names.
        for is_nested in [false, true] {
            let call = remembered_for_a_week(&world.store, 42);
            let nested = async { observe(remembered_for_a_week(&world.store, 42)).await.0 };
            let (result, outcome) = match is_nested {
                false => observe(call).redelivery(&redelivery).await,
                true => observe(nested).redelivery(&redelivery).await,
            };
            assert_eq!(result.is_ok(), is_long_enough, "{redelivery:?}: {result:?}");
            if let Err(error) = result {
                let Error::InvalidPolicy { problem: PolicyProblem::TtlBelowRedelivery { ttl, .. }, .. } = &error else {
                    panic!("{error:?}")
                };
                assert_eq!(*ttl, DAY * 7);
                assert!(error.to_string().contains("the body did not run"), "{error}");
                assert!(outcome.misconfigured() && !outcome.executed());
                assert!(
                    matches!(outcome.disposition(), Disposition::Retry { .. }),
                    "the broker delivers the message again"
                );
            }
        }
    }
}

#[tokio::test]
async fn shadow_mode_runs_a_call_whose_ttl_is_too_short_for_its_broker() {
    let world = World::new();
    let call = world.lasting("k", POLICY.mode(Mode::Shadow), Duration::ZERO);
    let (result, outcome) = observe(call).redelivery(&Redelivery::sqs(DAY * 14)).await;
    assert!(result.is_ok());
    assert_eq!(outcome.bypassed(), Some(Refusal::InvalidPolicy));
}
