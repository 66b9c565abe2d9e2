//! The disposition of a message: one rule for the set of calls that its delivery made and for the result of the
//! delivery.
//!
//! The first row that applies decides. The order of the calls is not an input.
//!
//! | among the calls | the delivery returned `Ok` | `Err` | `Err`, together with a call's final error |
//! |---|---|---|---|
//! | none at all | `Retry` | `Retry` | |
//! | a call that may get further in a later delivery | `Retry` | `Retry` | `Retry` |
//! | a call that is refused permanently | `DeadLetter` | `DeadLetter` | `DeadLetter` |
//! | a call that finished with an error | `Ack` | `Retry` | as that error decides |
//! | only calls that finished with a value | `Ack` | `Retry` | |
//!
//! - *Refused permanently*: another payload under the key, an interrupted operation, exhausted attempts, an invalid
//!   message. The operation of the message has not finished, and no delivery finishes it. A handler that swallows such
//!   a refusal gets `DeadLetter` together with its own `Ok`.
//! - *Finished with an error*: the error is recorded, or the result can't be returned. The operation is over: a handler
//!   that swallows the error is done with the message.
//! - *Together*: the delivery returned its error in the poll in which the call ended. An error of a later poll is a
//!   different error, and may pass. Errors carry no identity, so this rule is a guess in both directions: another
//!   failure in the same poll counts as the call's error, and a handler that awaits something between the call and its
//!   own return is delivered again.
//!
//! On the last delivery that the broker allows, `Retry` becomes `DeadLetter`, because no other delivery follows.

use std::time::Duration;

use crate::error::Disposition;

/// Standing of one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// The operation has finished. The call returned a value, or an error with this disposition.
    Finished(Option<Disposition>),
    /// No delivery of this message finishes its operation.
    RefusedForGood,
    /// A later delivery may get further, after this time if it is known.
    MayPass(Option<Duration>),
}

/// The result of a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DeliveryResult {
    Ok,
    /// An error; `with_a_call`: returned in the poll in which a call of the delivery finished with an error.
    Err {
        with_a_call: bool,
    },
}

/// The verdict of the rule about a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Ack,
    /// Deliver the message again after this time, if it is known.
    Retry(Option<Duration>),
    DeadLetter,
}

/// Applies the rule; see the table of this module.
pub(super) fn judge(calls: impl Iterator<Item = Standing>, returned: DeliveryResult) -> Verdict {
    let (mut any, mut may_pass, mut refused) = (false, false, false);
    // Latest time of all calls that may pass, and latest time of all errors that may.
    let (mut after, mut error_after) = (None, None);
    let mut final_error = false;
    for call in calls {
        any = true;
        match call {
            Standing::MayPass(known) => {
                may_pass = true;
                after = after.max(known);
            }
            Standing::RefusedForGood => refused = true,
            Standing::Finished(Some(Disposition::Retry { after })) => error_after = error_after.max(Some(after)),
            Standing::Finished(Some(Disposition::DeadLetter)) => final_error = true,
            Standing::Finished(None | Some(Disposition::Ack)) => {}
        }
    }
    match returned {
        _ if may_pass => Verdict::Retry(after),
        _ if !any => Verdict::Retry(None),
        _ if refused => Verdict::DeadLetter,
        DeliveryResult::Ok => Verdict::Ack,
        DeliveryResult::Err { with_a_call: true } if final_error && error_after.is_none() => Verdict::DeadLetter,
        DeliveryResult::Err { .. } => Verdict::Retry(error_after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_secs(1);
    const DEAD: Standing = Standing::Finished(Some(Disposition::DeadLetter));
    const ALL: [Standing; 7] = [
        Standing::Finished(None),
        DEAD,
        Standing::Finished(Some(Disposition::Retry { after: LATER })),
        Standing::RefusedForGood,
        Standing::MayPass(None),
        Standing::MayPass(Some(SOON)),
        Standing::MayPass(Some(LATER)),
    ];
    const RESULTS: [DeliveryResult; 3] =
        [DeliveryResult::Ok, DeliveryResult::Err { with_a_call: false }, DeliveryResult::Err { with_a_call: true }];

    /// Every sequence of up to four calls.
    fn sequences() -> impl Iterator<Item = Vec<Standing>> {
        (0..=4_u32).flat_map(|calls| {
            (0..ALL.len().pow(calls))
                .map(move |number| (0..calls).map(|at| ALL[number / ALL.len().pow(at) % ALL.len()]).collect())
        })
    }

    #[test]
    fn the_order_of_the_calls_is_no_input() {
        for calls in sequences() {
            let mut sorted = calls.clone();
            sorted.sort_by_key(|call| ALL.iter().position(|it| it == call));
            for returned in RESULTS {
                assert_eq!(
                    judge(calls.iter().copied(), returned),
                    judge(sorted.iter().copied(), returned),
                    "{calls:?} {returned:?}"
                );
            }
        }
    }

    #[test]
    fn an_acknowledged_delivery_has_settled_everything_and_a_dead_one_can_not_pass() {
        for calls in sequences() {
            for returned in RESULTS {
                let may_pass = calls.iter().any(|call| matches!(call, Standing::MayPass(_)));
                match judge(calls.iter().copied(), returned) {
                    Verdict::Ack => {
                        assert_eq!(returned, DeliveryResult::Ok, "{calls:?}");
                        assert!(!calls.is_empty());
                        assert!(calls.iter().all(|call| matches!(call, Standing::Finished(_))), "{calls:?}");
                    }
                    Verdict::DeadLetter => {
                        assert!(!may_pass, "{calls:?} {returned:?}");
                        let of_calls = returned == DeliveryResult::Err { with_a_call: true } && calls.contains(&DEAD);
                        assert!(calls.contains(&Standing::RefusedForGood) || of_calls, "{calls:?} {returned:?}");
                    }
                    Verdict::Retry(after) => {
                        let longest = calls.iter().filter_map(|call| match call {
                            Standing::MayPass(after) => *after,
                            _ => None,
                        });
                        assert!(after >= longest.max(), "{calls:?} {returned:?}");
                    }
                }
            }
        }
    }
}
