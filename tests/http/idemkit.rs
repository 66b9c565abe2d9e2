//! The HTTP scenarios of idemkit's conformance vectors.

use std::time::Duration;

use http::header::HeaderName;
use idem_runtime::InProgress;

use crate::scenarios::Suite;

#[tokio::test]
async fn scenarios_of_idemkit_hold_except_for_documented_differences() {
    let suite = Suite {
        text: include_str!("data/idemkit.json"),
        marker: HeaderName::from_static("idempotency-replayed"),
        problem_base: "urn:idemkit:",
        in_progress: InProgress::Wait(Duration::from_secs(30)),
        section: "idemkit",
    };
    suite
        .run(&[
            (
                "payload-mismatch",
                "2: problem_type \"urn:idemkit:payload-mismatch\"",
                "urn:idemkit:fingerprint-mismatch",
            ),
            ("in-flight-wait-timeout", "2: status 423", "409"),
            ("corrupt-record-treated-as-absent", "2: handler_called true", "false"),
            ("corrupt-record-treated-as-absent", "2: status 201", "410"),
            ("corrupt-record-treated-as-absent", "2: emits_event \"idempotency.corrupt_record\"", "none"),
            ("body-size-exceeded-bypass", "1: headers_present Idempotency-Replay-Unavailable: size-exceeded", "none"),
            ("body-size-exceeded-bypass", "2: handler_called true", "false"),
        ])
        .await;
}
