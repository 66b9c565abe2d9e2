//! Disposition of a message: the rule that computes it from the calls and the result of a delivery.
//!
//! The first row that applies decides. The order of the calls has no influence.
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
//!   message. The operation of the message has not finished, and no delivery finishes it. A handler that swallows a
//!   permanent refusal gets `DeadLetter` although it returned `Ok`.
//! - *Finished with an error*: the error is recorded, or the result can't be returned. The operation is over: if the
//!   handler swallows the error, the message is done.
//! - *Together*: the delivery returned its error in the poll in which the call ended. An error of a later poll is a
//!   different error, which may be temporary. Errors carry no identity, so this rule is a guess and may be wrong in
//!   both directions. Another failure in the same poll is taken for the call's error. If a handler awaits something
//!   between the call and its own return, the message is delivered again although the error is final.
//!
//! In the last delivery that the broker allows, `Retry` becomes `DeadLetter`, because no further delivery follows.

use std::time::Duration;

use crate::error::Disposition;

/// State of one call, as input of the rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// The operation has finished. The call returned a value (`None`), or an error with this disposition.
    Finished(Option<Disposition>),
    /// No delivery of this message can finish the operation.
    RefusedForGood,
    /// A later delivery may finish the operation, after this time if the time is known.
    MayPass(Option<Duration>),
}

/// Result of a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DeliveryResult {
    Ok,
    /// An error. `with_a_call` is true if the delivery returned the error in the poll in which a call finished with
    /// an error.
    Err {
        with_a_call: bool,
    },
}

/// Result of the rule for a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Ack,
    /// The message must be delivered again, after this time if the time is known.
    Retry(Option<Duration>),
    DeadLetter,
}

/// Applies the rule; see the table in the module's documentation.
pub(super) fn judge(calls: impl Iterator<Item = Standing>, returned: DeliveryResult) -> Verdict {
    let (mut any, mut may_pass, mut refused) = (false, false, false);
    // Longest known pause of the calls that may succeed later, and of the calls that finished with a temporary error.
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

    /// Returns every sequence of at most four calls.
    fn sequences() -> impl Iterator<Item = Vec<Standing>> {
        (0..=4_u32).flat_map(|calls| {
            (0..ALL.len().pow(calls))
                .map(move |number| (0..calls).map(|at| ALL[number / ALL.len().pow(at) % ALL.len()]).collect())
        })
    }

    #[test]
    fn the_order_of_the_calls_of_a_delivery_does_not_change_its_verdict() {
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
    fn no_delivery_is_acknowledged_or_set_aside_while_a_call_may_pass() {
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
