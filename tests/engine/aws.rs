//! Requirements of the conformance suite of AWS Lambda durable functions that no other test covers; docs/steps.md has
//! the table. <https://github.com/aws/aws-durable-execution-conformance-tests>

use std::collections::BTreeMap;

use super::super::*;

/// Runs two attempts of one body. The first attempt fails after the body.
async fn twice<T>(body: impl AsyncFn() -> Result<T, Error>) -> T
where
    T: Serialize + for<'a> Deserialize<'a>,
{
    let world = World::new();
    let failing = async {
        body().await?;
        Err::<T, _>(Error::NoAttempt)
    };
    world.operation(POLICY).run(failing).await.map(drop).unwrap_err();
    world.operation(POLICY).run(body()).await.unwrap()
}

#[tokio::test]
async fn a_step_uses_the_value_of_a_step_before() {
    let joined = twice(async || {
        let attempt = current()?;
        let first: String = attempt.step("first").run(async |_| Ok::<_, Error>("first".to_owned())).await?;
        attempt.step("second").run(async |_| Ok(format!("{first}_second"))).await
    });
    assert_eq!(joined.await, "first_second");
}

#[tokio::test]
async fn nested_objects_and_empty_values_are_journaled() {
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Response {
        user: BTreeMap<String, Vec<Option<String>>>,
        count: f64,
    }
    let tags = vec![Some("admin".to_owned()), None];
    let response = Response { user: BTreeMap::from([("tags".to_owned(), tags)]), count: 0.5 };
    let runs = AtomicU32::new(0);
    let (nested, nothing, none) = twice(async || {
        let attempt = current()?;
        let nested = attempt.step("nested").run(async |_| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<_, Error>(response.clone())
        });
        let nested = nested.await?;
        attempt.step("nothing").run(async |_| Ok::<_, Error>(())).await?;
        let none: Option<u32> = attempt.step("none").run(async |_| Ok::<_, Error>(None)).await?;
        Ok((nested, (), none))
    })
    .await;
    assert_eq!((nested, nothing, none, runs.into_inner()), (response, (), None, 1));
}

#[tokio::test]
async fn a_failure_that_is_a_value_is_journaled() {
    let runs = AtomicU32::new(0);
    let result = twice(async || {
        let charged = current()?.step("charge").run(async |_| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<Result<u32, String>, Error>(Err("declined".to_owned()))
        });
        // The handler catches the failure, and goes on with a second step.
        match charged.await? {
            Ok(_) => Ok("charged".to_owned()),
            Err(why) => current()?.step("fallback").run(async |_| Ok(format!("{why}, on account"))).await,
        }
    });
    assert_eq!((result.await.as_str(), runs.into_inner()), ("declined, on account", 1));
}
