//! Tests of the commands for steps, with SQLite files.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::policy::StepPolicy;
use idem_runtime::store::Journal;
use idem_runtime::{Compressed, Error, Key, Offloaded, Operation, Policy, SqliteStore, Store, current};
use idem_tests::sqlite::raw;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use serde_json::{Value, json};

use super::support::{Records, completed, doubtful, file, key, on_terminal, state};

/// Runs `pay/<text>` to its end, with the steps of [`doubtful`]. Returns its result: the value of the step in doubt.
async fn ends(store: &SqliteStore, text: &str) -> String {
    let operation = Operation::new(store, Key::new("pay", text), Policy::new(Duration::from_secs(3600)));
    let body = async {
        let attempt = current()?;
        let _: Value = attempt.step("charge").fingerprint(&7).run(async |_| Ok::<_, Error>(json!("again"))).await?;
        attempt.step("book").fail().run(async |_| Ok::<_, Error>("booked again".to_owned())).await
    };
    operation.run(body).await.unwrap()
}

/// Returns the object of a record with its steps.
fn shown(records: &Records, text: &str, options: &[&str]) -> Value {
    records.idem(&[&["show", &format!("pay/{text}"), "--json"], options].concat()).ends(0).json()
}

#[tokio::test]
async fn show_prints_the_steps_in_order_and_their_values_only_on_request() {
    let records = Records::new().await;
    doubtful(&records.store, "42").await;
    let run = records.idem(&["show", "pay/42"]).ends(0);
    let run = run.says("steps        2, 1 in doubt: `book`\n").says("the effect of step `book` happened");
    assert!(!run.out.contains("step 1"), "{run:?}");
    let object = shown(&records, "42", &[]);
    assert_eq!((&object["steps"], &object["steps_in_doubt"], object.get("journal")), (&json!(2), &json!(1), None));

    let run = records.idem(&["show", "pay/42", "--steps"]).ends(0);
    let run = run.says("step 1       charge: ended in attempt 1, inputs ").says(", 15 bytes of json\n");
    let run = run.says("step 2       book: in doubt since attempt 1\n");
    assert!(!run.out.contains("4111"), "{run:?}");
    let object = shown(&records, "42", &["--steps"]);
    assert!(!object.to_string().contains("4111"), "{object}");
    let inputs = object["journal"][0]["inputs"].as_str().expect("a fingerprint").to_owned();
    let value = json!({ "is": "encoded", "codec": "json", "bytes": 15 });
    let charge = json!({ "name": "charge", "attempt": 1, "state": "ended", "inputs": inputs, "value": value });
    let book = json!({ "name": "book", "attempt": 1, "state": "in_doubt", "inputs": null, "value": null });
    assert_eq!(object["journal"], json!([charge, book]));

    records.idem(&["show", "pay/42", "--steps", "--result"]).ends(0).says("\n             {\"card\":\"4111\"}\n");
    let object = shown(&records, "42", &["--steps", "--result"]);
    assert_eq!(object["journal"][0]["value"]["text"], "{\"card\":\"4111\"}");

    // A finished operation has its steps only if its policy keeps them.
    let kept = Operation::new(&records.store, Key::new("pay", "kept"), Policy::new(Duration::from_secs(3600)));
    let body = async {
        current()?.set_step_policy(StepPolicy::new().keep());
        current()?.step("charge").run(async |_| Ok::<_, Error>(17)).await
    };
    kept.run(body).await.unwrap();
    let run = records.idem(&["show", "pay/kept", "--steps", "--result"]).ends(0);
    run.says("result       2 bytes of json")
        .says("step 1       charge: ended in attempt 1, 2 bytes of json")
        .says("\n17\n");
    completed(&records.store, "done", b"1").await;
    let run = records.idem(&["show", "pay/done", "--steps"]).ends(0);
    assert!(!run.out.contains("step"), "{run:?}");
    let object = shown(&records, "done", &["--steps"]);
    assert_eq!((&object["steps"], &object["journal"]), (&json!(0), &json!([])));
}

#[tokio::test]
async fn a_step_in_doubt_gets_the_value_of_an_operator() {
    let records = Records::new().await;
    let value = records.file(b" \"parcel 7\"\n");
    let value = value.to_str().unwrap();
    for (text, end, says, result) in [
        ("value", &["--completed", value][..], "ended with 10 bytes of json", "parcel 7"),
        ("not done", &["--not-done"], "not done", "booked again"),
    ] {
        doubtful(&records.store, text).await;
        let shown = format!("pay/{text}");
        let resolve = [&["resolve", "--step", "book", "--reason", "INC-7", "--by", "bob"], end].concat();
        let seen = records.revision(&shown);
        let again = [&resolve[..], &[&shown, "--seen", &seen, "--yes"]].concat();
        let said = format!("reopened `{shown}`, attempt 1, with step `book` {says}; the next delivery runs again");
        records.idem(&again).ends(0).says(&said);
        let object = self::shown(&records, text, &["--steps"]);
        assert_eq!((&object["state"], &object["steps_in_doubt"]), (&json!("released"), &json!(0)));
        assert_eq!((&object["decided_by"], &object["decided_reason"]), (&json!("bob"), &json!("INC-7")));
        assert_eq!(object["journal"][1]["state"], if result == "parcel 7" { "ended" } else { "undone" });
        // The step has been settled.
        let told = records.decides(&resolve, &shown).ends(1);
        told.complains("the step is not in doubt").complains("`idem reopen --from`");
        assert_eq!(ends(&records.store, text).await, result);
    }
    // The effect happened, and nobody knows the value: the step never runs again.
    doubtful(&records.store, "unknown").await;
    records.decides(&["resolve", "--step", "book", "--without-result", "--json"], "pay/unknown").ends(0);
    let object = shown(&records, "unknown", &["--steps"]);
    assert_eq!(object["journal"][1]["value"], json!({ "is": "unknown" }));
    records.idem(&["show", "pay/unknown", "--steps"]).says("book: ended in attempt 1, its value is unknown");
}

#[tokio::test]
async fn decisions_about_steps_name_what_they_do_in_json() {
    let records = Records::new().await;
    for (verb, action) in [
        (&["resolve", "--step", "book", "--not-done"][..], "resolve_step"),
        (&["reopen", "--from", "book"], "reopen_from"),
        (&["reopen", "--drop-steps"], "reopen_without_steps"),
        (&["reopen"], "reopen"),
    ] {
        doubtful(&records.store, action).await;
        let done = records.decides(&[verb, &["--json"]].concat(), &format!("pay/{action}")).ends(0).json();
        assert_eq!((&done["action"], &done["attempt"]), (&json!(action), &json!(1)));
    }
}

#[tokio::test]
async fn reopen_from_a_step_keeps_the_steps_before_it() {
    let records = Records::new().await;
    for (verb, says, left) in [
        (&["reopen", "--from", "book"][..], "from step `book` on: `book` runs again, 1 of them in doubt", 1),
        (
            &["reopen", "--from", "charge"],
            "from step `charge` on: `charge` and `book` run again, 1 of them in doubt",
            0,
        ),
        (&["reopen", "--drop-steps"], "without its steps: `charge` and `book` run again, 1 of them in doubt", 0),
        (&["reopen"], "reopened `pay/reopen`, attempt 1; the next delivery runs again", 2),
    ] {
        let text = verb.concat();
        doubtful(&records.store, &text).await;
        records.decides(verb, &format!("pay/{text}")).ends(0).says(says);
        assert_eq!(shown(&records, &text, &[])["steps"], left, "{verb:?}");
    }
    // A plain `reopen` leaves the step in doubt, and the advice says so.
    records.idem(&["show", "pay/reopen"]).ends(0).says("the next delivery runs and asks the reconciler of step `book`");
    assert_eq!(ends(&records.store, "reopen--frombook").await, "booked again");
}

#[tokio::test]
async fn a_person_is_asked_with_the_steps_that_run_again() {
    let records = Records::new().await;
    doubtful(&records.store, "42").await;
    let idem = format!("{} --store {}", env!("CARGO_BIN_EXE_idem"), records.url());
    let line = format!("{idem} reopen pay/42 --from charge");
    let (status, told) = on_terminal(&line, "n\n");
    assert_eq!(status, 1, "{told}");
    assert!(
        told.contains("Reopen `pay/42`, attempt 1, from step `charge` on: `charge` and `book` run again"),
        "{told}"
    );
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    // A decision that is not possible is refused before the question.
    let (status, told) = on_terminal(&format!("{idem} resolve pay/42 --step charge --not-done"), "y\n");
    assert!(status == 1 && told.contains("it has ended") && !told.contains("[y/N]"), "{told}");
    let (status, told) = on_terminal(&format!("{idem} resolve pay/42 --step book --not-done"), "y\n");
    assert!(status == 0 && told.contains("with step `book` not done? [y/N]"), "{told}");
}

#[tokio::test]
async fn decisions_about_steps_that_are_not_possible_are_refused() {
    let records = Records::new().await;
    doubtful(&records.store, "42").await;
    let resolve = ["resolve", "--step", "book", "--not-done"];
    for (verb, says) in [
        (&["resolve", "--step", "parcel", "--not-done"][..], "step `parcel`: the journal has no such step"),
        (&["reopen", "--from", "parcel"], "look at the steps (`idem show --steps`)"),
        (&["resolve", "--step", "charge", "--not-done"], "the step is not in doubt: it has ended"),
    ] {
        records.decides(verb, "pay/42").ends(1).complains(says).complains("nothing was changed");
    }
    // Wrong uses.
    let file = file(records.folder.path(), b"{");
    let file = file.to_str().unwrap();
    for (options, says) in [
        (&["--step", "book", "--failed", file][..], "cannot be used with"),
        (&["--step", "book", "--replace", "--not-done"], "cannot be used with"),
        (&["--step", "book", "--codec", "postcard", "--completed", file], "cannot be used with"),
        (&["--step", "book"], "required"),
        (&["--not-done"], "--step"),
        (&["--step", "book", "--without-result=failed"], "a step does not end with an error"),
        (&["--step", "book", "--completed", file], "it is not JSON"),
    ] {
        records.decides(&[&["resolve"], options].concat(), "pay/42").ends(2).complains(says);
    }
    records.decides(&["reopen", "--from", "book", "--drop-steps"], "pay/42").ends(2);
    let large = records.file(format!("\"{}\"", "x".repeat(256 << 10)).as_bytes());
    let verb = ["resolve", "--step", "book", "--completed", large.to_str().unwrap()];
    records.decides(&verb, "pay/42").ends(1).complains("the value of a step has 262144 bytes at most");
    assert_eq!(shown(&records, "42", &[])["steps_in_doubt"], 1);

    // A finished operation has no steps, and keeps its result.
    completed(&records.store, "done", b"1").await;
    records.decides(&resolve, "pay/done").ends(1).complains("what it recorded stands");
    records.decides(&["reopen", "--drop-steps"], "pay/done").ends(1).complains("`idem discard`");

    // An attempt runs: the step that it has begun is not in doubt.
    let file = raw(&records.folder.file());
    let journal = records.store.inspect(&key("42")).await.unwrap().unwrap().record.journal.unwrap();
    let lease = super::support::pending(&records.store, "runs").await;
    let _ = records.store.append(&lease, &journal).await.unwrap();
    for verb in [&resolve[..], &["reopen", "--from", "book"], &["reopen", "--drop-steps"]] {
        records.decides(verb, "pay/runs").ends(1).complains("attempt 1 is running; nothing was changed");
    }
    records.idem(&["show", "pay/runs", "--steps"]).ends(0).says("none in doubt").says("book: running since attempt 1");
    // The attempt has journaled a step since the operator looked, and its lease has lapsed again.
    let lapse = || file.execute_batch("UPDATE idem_records SET lapses_at = 1 WHERE key = '1/pay/runs'").unwrap();
    lapse();
    let seen = records.revision("pay/runs");
    let longer = Journal::new([&journal.bytes()[..], &journal.bytes()[1..]].concat()).unwrap();
    let _ = records.store.append(&lease, &longer).await.unwrap();
    lapse();
    let stale = [&resolve[..], &["pay/runs", "--seen", &seen, "--yes"]].concat();
    records.idem(&stale).ends(1).complains("it was written again, and is lapsed as before");
    records.decides(&resolve, "pay/runs").ends(0);
}

#[tokio::test]
async fn a_journal_that_can_not_be_read_is_only_removed() {
    let records = Records::new().await;
    doubtful(&records.store, "42").await;
    let file = raw(&records.folder.file());
    for (bytes, says) in [("01ff", "the journal is damaged"), ("0200", "the journal has version 2")] {
        file.execute_batch(&format!("UPDATE idem_records SET result = x'{bytes}'")).unwrap();
        records.idem(&["show", "pay/42", "--steps"]).ends(0).says(&format!("steps        can't be read: {says}"));
        let object = shown(&records, "42", &["--steps"]);
        assert!(object["steps"].is_null() && object["journal_damage"].as_str().unwrap().starts_with(says), "{object}");
        for verb in [&["resolve", "--step", "book", "--not-done"][..], &["reopen", "--from", "book"]] {
            records.decides(verb, "pay/42").ends(1).complains(says);
        }
    }
    let dropped = records.decides(&["reopen", "--drop-steps"], "pay/42").ends(0);
    dropped.says("without its steps, which can't be read and run again");
    let found = records.store.inspect(&key("42")).await.unwrap().unwrap();
    assert_eq!(found.record.journal, None);
    assert_eq!(found.decided_by(), Some("alice"));
}

/// The command opens the raw store, where a wrapper hides a kept journal together with its result.
#[tokio::test]
async fn show_does_not_claim_that_a_wrapped_value_has_no_steps() {
    let records = Records::new().await;
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let compressed = Compressed::options().above(0).wrap(records.store.clone());
    let offloaded = Offloaded::options().above(0).wrap(records.store.clone(), Arc::clone(&objects));
    let twice = Compressed::options().above(0).wrap(offloaded.clone());
    for (text, store, says) in [
        ("compressed", &compressed as &dyn Store, "the result is compressed"),
        ("offloaded", &offloaded, "the result is in an object"),
        ("twice", &twice, "the result is in an object"),
    ] {
        for keep in [true, false] {
            let name = format!("{text} {keep}");
            let operation = Operation::new(store, Key::new("pay", &*name), Policy::new(Duration::from_secs(3600)));
            let body = async {
                let attempt = current()?;
                if keep {
                    attempt.set_step_policy(StepPolicy::new().keep());
                }
                attempt.step("charge").run(async |_| Ok::<_, Error>("x".repeat(2000))).await
            };
            operation.run(body).await.unwrap();
            let run = records.idem(&["show", &format!("pay/{name}"), "--steps"]).ends(0);
            let object = shown(&records, &name, &["--steps"]);
            // A wrapper around a wrapper does not see the content.
            if !keep && text != "twice" {
                assert!(!run.out.contains("steps  "), "{run:?}");
                assert_eq!((&object["steps"], &object["journal"]), (&json!(0), &json!([])), "{name}");
                continue;
            }
            run.says(&format!("steps        can't be read: {says}, and any steps kept with it are not readable here"));
            for field in ["steps", "steps_in_doubt", "journal"] {
                assert_eq!(object.get(field), Some(&Value::Null), "{name}: {field} of {object}");
            }
            assert!(object["journal_damage"].as_str().unwrap().starts_with(says), "{object}");
        }
    }
}

#[tokio::test]
async fn a_record_of_the_library_is_found_by_its_key() {
    let records = Records::new().await;
    // The record of a step in a transaction. No handler may have this scope, so the key is parsed.
    let step: Result<Key, _> = "idem::steps/7d0f".parse();
    let policy = Policy::new(Duration::from_secs(3600));
    Operation::new(&records.store, step, policy).run(async { Ok::<_, Error>(17) }).await.unwrap();

    records.idem(&["show", "idem::steps/7d0f", "--result"]).ends(0).says("\n17\n");
    records.idem(&["list", "--scope", "idem::steps"]).ends(0).says("idem::steps/7d0f");
    records.idem(&["key", "idem::steps/7d0f"]).ends(0).says("1/idem::steps/7d0f");
    records.idem(&["key", "--scope", "idem::steps", "7d0f"]).ends(2).complains("belong to the library");
    records.decides(&["forget"], "idem::steps/7d0f").ends(0);
    records.idem(&["list", "--scope", "idem::steps"]).ends(4);
}
