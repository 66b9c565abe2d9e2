//! Every pair of `on_error` and `on_crash`, compared with the table of docs/guarantees.md.

use idem_runtime::Reconciliation;

use super::super::*;

const PAGE: &str = include_str!("../../docs/guarantees.md");

/// Observed reaction of the delivery after an attempt, in the words of the page.
fn reaction(bodies: u32, asked: bool, result: &Result<u32, Failure>) -> &'static str {
    match (bodies, asked, result) {
        (2, false, _) => "runs again",
        (1, true, Ok(7)) => "asks",
        (1, false, Err(Failure::Declined(1))) => "final",
        (1, false, Err(Failure::Idempotency(error))) if error.0.contains("in doubt") => "waits",
        _ => panic!("{bodies} bodies, asked: {asked}, {result:?}"),
    }
}

/// Lets one attempt end by an error, or by a crash, and returns the reaction of the next delivery.
async fn next_delivery(on_error: OnError, on_crash: &str, crashes: bool) -> &'static str {
    let world = World::new();
    let asked = Cell::new(false);
    let policy = match on_crash {
        "fail" => POLICY.on_crash(OnCrash::Fail),
        _ => POLICY,
    };
    let body = |ends: bool| {
        let runs = &world.runs;
        async move {
            let number = runs.fetch_add(1, Ordering::SeqCst) + 1;
            if !ends {
                std::future::pending::<()>().await;
            }
            Err::<u32, _>(Failure::Declined(number))
        }
    };
    let call = |ends: bool| {
        let operation = world.operation(policy).record_errors_if(move |_: &Failure| on_error);
        let reconciler = async {
            asked.set(true);
            Ok(Reconciliation::Done(7))
        };
        async move {
            match on_crash {
                "reconcile(…)" => operation.reconcile(reconciler).run(body(ends)).await,
                _ => operation.run(body(ends)).await,
            }
        }
    };
    if crashes {
        let mut crashing = Box::pin(call(false));
        assert!(poll_once(crashing.as_mut()).await.is_pending());
        drop(crashing);
        settle().await;
    } else {
        assert_eq!(call(true).await, Err(Failure::Declined(1)));
    }
    assert_eq!((world.runs(), asked.get()), (1, false), "one attempt has run");
    let result = call(true).await;
    reaction(world.runs(), asked.get(), &result)
}

#[tokio::test]
async fn each_combination_of_on_error_and_on_crash_does_what_its_row_says() {
    let (_, rows) = PAGE.split_once("| `on_error` | `on_crash` | after an error | after a crash |").expect("the table");
    let rows = rows.lines().skip(2).take_while(|row| row.starts_with('|'));
    let choices = [("`release`", OnError::Release), ("`record`", OnError::Record), ("`uncertain`", OnError::Uncertain)];
    let (mut pairs, mut judged) = (Vec::new(), 0);
    for row in rows {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let &[_, on_error, on_crash, after_error, after_crash, ..] = cells.as_slice() else { panic!("{row}") };
        let on_crash = on_crash.trim_matches('`');
        for (name, choice) in choices {
            if ![name, "`judge`"].contains(&on_error) {
                continue;
            }
            assert_eq!(next_delivery(choice, on_crash, true).await, after_crash, "{row}");
            let reaction = next_delivery(choice, on_crash, false).await;
            if on_error == name {
                assert_eq!(reaction, after_error, "{row}");
                pairs.push((name, on_crash, reaction));
            } else {
                // A function has the effect of the option that it chooses.
                assert_eq!(after_error, "as judged", "{row}");
                assert!(pairs.contains(&(name, on_crash, reaction)), "{row}");
                judged += 1;
            }
        }
    }
    assert_eq!((pairs.len(), judged), (9, 9), "every pair has a row");
}
