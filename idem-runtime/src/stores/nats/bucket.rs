//! The bucket: the stream that holds the records, its settings, and the settings that would lose or change a record.

use std::borrow::Cow;

use serde::Deserialize;

use super::failure::{ApiError, misconfigured};
use crate::store::StoreError;

/// First version of the server that removes single messages after their own retention. An earlier server accepts the
/// setting and ignores it: it would forget no record, and so count attempts and replay results forever.
const FIRST_VERSION: [u64; 2] = [2, 11];
/// First version of the server whose batches this store uses, and with which they were tried.
const FIRST_VERSION_WITH_BATCHES: [u64; 2] = [2, 14];

/// The bucket that a store wants.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub(super) name: String,
    /// Name of the stream.
    pub(super) stream: String,
    /// Least number of replicas; `None` accepts any number.
    pub(super) replicas: Option<usize>,
    /// True if a stream that keeps messages in memory is accepted, or created.
    pub(super) in_memory: bool,
    /// Subjects of messages of handlers.
    pub(super) outbox: Vec<String>,
}

/// Answer to a question about a stream.
#[derive(Deserialize)]
pub(super) struct StreamInfo<'a> {
    #[serde(default)]
    pub(super) error: Option<ApiError>,
    #[serde(default)]
    config: Option<StreamConfig>,
    /// Time of the leader's clock.
    #[serde(borrow, default)]
    pub(super) ts: Option<Cow<'a, str>>,
}

/// Settings of a stream, as far as they concern records. A server leaves out a setting that has its default.
#[derive(Deserialize, Default)]
#[serde(default)]
#[allow(clippy::struct_excessive_bools, reason = "settings of the server")]
struct StreamConfig {
    subjects: Vec<String>,
    retention: String,
    max_msgs: i64,
    max_bytes: i64,
    max_age: i64,
    max_msgs_per_subject: i64,
    max_msg_size: i64,
    discard: String,
    storage: String,
    num_replicas: usize,
    allow_direct: bool,
    no_ack: bool,
    sealed: bool,
    allow_msg_ttl: bool,
    allow_msg_counter: bool,
    allow_atomic: bool,
    subject_delete_marker_ttl: i64,
    discard_new_per_subject: bool,
    persist_mode: String,
    mirror: Option<serde_json::Value>,
    sources: Option<serde_json::Value>,
    subject_transform: Option<serde_json::Value>,
}

impl Bucket {
    pub(super) fn new(name: &str) -> Self {
        let (name, stream) = (name.to_owned(), format!("KV_{name}"));
        Self { name, stream, replicas: None, in_memory: false, outbox: Vec::new() }
    }

    /// Returns the subject of a request about the stream.
    pub(super) fn api(&self, verb: &str) -> String {
        format!("$JS.API.STREAM.{verb}.{}", self.stream)
    }

    /// Returns the settings with which the store creates the stream: those of a key-value bucket with per-message
    /// retention, except that no header of a message can remove other records.
    ///
    /// `first` is the first sequence number. Writes name sequence numbers, so a stream that replaces a deleted one must
    /// not use the same numbers again: a late write of an attempt from before the deletion could replace a record of
    /// the new stream. The microseconds since 1970 are larger than all numbers of an earlier stream that has stored
    /// less than a million messages a second.
    pub(super) fn settings(&self, first: u64) -> String {
        let subjects = [&[format!("$KV.{}.>", self.name)], &self.outbox[..]].concat();
        let mut settings = serde_json::json!({
            "name": self.stream,
            "description": "records of idempotent operations",
            "subjects": subjects,
            "retention": "limits",
            "storage": if self.in_memory { "memory" } else { "file" },
            "num_replicas": self.replicas.unwrap_or(1),
            "discard": "new",
            "max_msgs_per_subject": 1,
            "first_seq": first.max(1),
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "allow_msg_ttl": true,
            "allow_direct": true,
            "allow_rollup_hdrs": false,
            "deny_delete": true,
        });
        if !self.outbox.is_empty() {
            settings["allow_atomic"] = true.into();
        }
        settings.to_string()
    }

    /// Checks that the stream in the answer can hold records, and returns the largest message that it takes, in bytes;
    /// `None` if only the server limits messages.
    pub(super) fn check(&self, info: &StreamInfo<'_>) -> Result<Option<usize>, StoreError> {
        let config = info.config.as_ref().ok_or_else(|| super::failure::unexpected("it names no settings"))?;
        match self.problem(config) {
            Some(problem) => Err(misconfigured(format!("the stream {} can't hold records: {problem}", self.stream))),
            None => Ok(usize::try_from(config.max_msg_size).ok().filter(|most| *most > 0)),
        }
    }

    /// Returns whether only the leader answers direct reads (`DIRECT.GET`), which cost the server a third of a question
    /// to the leader. On a stream with several replicas any of them answers, maybe with an earlier record.
    pub(super) fn reads_directly(info: &StreamInfo<'_>) -> bool {
        info.config.as_ref().is_some_and(|config| config.allow_direct && config.num_replicas == 1)
    }

    /// Returns whether the stream stores messages and their record completely or not at all. A stream without replicas
    /// does not: its server ignores that it could not store a message of a batch, for example because it has reached
    /// its limit (`max_file_store`), and stores the other messages. Replicas receive a whole batch as one decision.
    pub(super) fn takes_batches(&self, info: &StreamInfo<'_>, server: &str) -> bool {
        let takes = |config: &StreamConfig| config.allow_atomic && config.num_replicas > 1;
        !self.outbox.is_empty()
            && info.config.as_ref().is_some_and(takes)
            && version_of(server).is_some_and(|version| version >= FIRST_VERSION_WITH_BATCHES)
    }

    fn problem(&self, config: &StreamConfig) -> Option<String> {
        let records = format!("$KV.{}.>", self.name);
        let missing = [&records].into_iter().chain(&self.outbox).find(|subjects| !config.subjects.contains(subjects));
        let is_limited = config.max_msgs > 0 || config.max_bytes > 0;
        let problems = [
            (missing.is_some(), format!("it does not listen on `{}`", missing.map_or("", |it| it))),
            (
                !config.allow_msg_ttl,
                "`allow_msg_ttl` is off, or the leader's server is older than 2.11, so no record would be forgotten"
                    .to_owned(),
            ),
            (config.max_age != 0, "`max_age` is set, and would forget records before their retention ends".to_owned()),
            (
                config.max_msgs_per_subject != 1,
                "`max_msgs_per_subject` (the history) is not 1, so an earlier record would reappear".to_owned(),
            ),
            (
                is_limited && config.discard != "new",
                "`discard` is `old`, so a full stream would forget records; set `discard` to `new`".to_owned(),
            ),
            (
                config.subject_delete_marker_ttl != 0,
                "`subject_delete_marker_ttl` is set: the marker of an expired record could replace a reservation"
                    .to_owned(),
            ),
            (config.discard_new_per_subject, "`discard_new_per_subject` refuses every change of a record".to_owned()),
            (
                config.retention != "limits",
                format!("`retention` is `{}`, so a consumer would remove records", config.retention),
            ),
            (
                config.storage != "file" && !self.in_memory,
                "it keeps records in memory, and forgets them at a restart; see `NatsOptions::in_memory`".to_owned(),
            ),
            (
                config.persist_mode == "async",
                "`persist_mode` is `async`: it confirms what it has not written".to_owned(),
            ),
            (config.no_ack, "`no_ack` is set, so no write would be confirmed".to_owned()),
            (config.sealed, "it is sealed".to_owned()),
            (config.allow_msg_counter, "it holds counters".to_owned()),
            (
                config.mirror.is_some() || config.sources.is_some() || config.subject_transform.is_some(),
                "it copies or renames messages of other streams or subjects".to_owned(),
            ),
            (
                self.replicas.is_some_and(|least| config.num_replicas < least),
                format!("it has {} replicas, and `num_replicas` asks for more", config.num_replicas),
            ),
        ];
        problems.into_iter().find(|(is_problem, _)| *is_problem).map(|(_, problem)| problem)
    }
}

/// Checks the version of a server.
pub(super) fn check_version(version: &str) -> Result<(), StoreError> {
    let Some(found) = version_of(version) else {
        return Err(misconfigured(format!("the server has the unknown version `{version}`")));
    };
    if found < FIRST_VERSION {
        return Err(misconfigured(format!(
            "the server is NATS {version}; the store needs 2.11 or newer, because an earlier server ignores the \
             retention of single messages"
        )));
    }
    Ok(())
}

/// Returns the first two numbers of a version.
fn version_of(version: &str) -> Option<[u64; 2]> {
    let mut parts = version.split(['.', '-']).map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some([major, minor]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind;

    fn check(bucket: &Bucket, changed: &[(&str, serde_json::Value)]) -> Result<Option<usize>, StoreError> {
        let mut config: serde_json::Value = serde_json::from_str(&bucket.settings(1)).expect("JSON");
        for (name, value) in changed {
            config[*name] = value.clone();
        }
        let text = serde_json::json!({ "config": config }).to_string();
        bucket.check(&serde_json::from_str(&text).expect("JSON"))
    }

    #[test]
    fn a_stream_that_could_lose_or_change_a_record_is_refused() {
        let bucket = Bucket::new("b");
        assert_eq!(check(&bucket, &[]).unwrap(), None);
        assert_eq!(check(&bucket, &[("max_msg_size", 4096.into())]).unwrap(), Some(4096));
        assert_eq!(check(&bucket, &[("max_bytes", 1000.into())]).unwrap(), None, "full, but not forgetful");
        let refused: &[&[(&str, serde_json::Value)]] = &[
            &[("subjects", serde_json::json!(["$KV.other.>"]))],
            &[("allow_msg_ttl", false.into())],
            &[("max_age", 1.into())],
            &[("max_msgs_per_subject", 2.into())],
            &[("max_msgs_per_subject", (-1).into())],
            &[("max_bytes", 1000.into()), ("discard", "old".into())],
            &[("max_msgs", 1000.into()), ("discard", "old".into())],
            &[("discard_new_per_subject", true.into())],
            &[("subject_delete_marker_ttl", 1.into())],
            &[("retention", "workqueue".into())],
            &[("storage", "memory".into())],
            &[("persist_mode", "async".into())],
            &[("no_ack", true.into())],
            &[("sealed", true.into())],
            &[("allow_msg_counter", true.into())],
            &[("mirror", serde_json::json!({ "name": "other" }))],
            &[("sources", serde_json::json!([{ "name": "other" }]))],
            &[("subject_transform", serde_json::json!({ "src": ">", "dest": ">" }))],
        ];
        for changed in refused {
            let error = check(&bucket, changed).expect_err("refused");
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{changed:?}");
        }
        let three = Bucket { replicas: Some(3), in_memory: true, ..Bucket::new("b") };
        assert!(check(&three, &[]).is_ok(), "in memory, on three servers, as asked");
        assert!(check(&three, &[("num_replicas", 1.into())]).is_err());
    }

    #[test]
    fn only_a_stream_without_replicas_is_read_directly() {
        for (replicas, allow_direct, direct) in [(1, true, true), (3, true, false), (1, false, false)] {
            let config = serde_json::json!({ "num_replicas": replicas, "allow_direct": allow_direct });
            let text = serde_json::json!({ "config": config }).to_string();
            assert_eq!(Bucket::reads_directly(&serde_json::from_str(&text).expect("JSON")), direct, "{replicas}");
        }
    }

    #[test]
    fn only_a_replicated_stream_stores_messages_and_record_together() {
        let bucket = Bucket { outbox: vec!["orders.>".to_owned()], ..Bucket::new("b") };
        let takes = |bucket: &Bucket, replicas: usize, allow_atomic: bool, server| {
            let config = serde_json::json!({ "num_replicas": replicas, "allow_atomic": allow_atomic });
            let text = serde_json::json!({ "config": config }).to_string();
            bucket.takes_batches(&serde_json::from_str(&text).expect("JSON"), server)
        };
        assert!(takes(&bucket, 3, true, "2.14.0"));
        assert!(!takes(&bucket, 1, true, "2.14.0") && !takes(&bucket, 3, false, "2.14.0"));
        assert!(!takes(&bucket, 3, true, "2.12.15") && !takes(&Bucket::new("b"), 3, true, "2.14.0"));
        assert_eq!(check(&bucket, &[]).unwrap(), None, "the settings name the subjects");
        let error = check(&bucket, &[("subjects", serde_json::json!(["$KV.b.>"]))]).expect_err("refused");
        assert!(error.to_string().contains("`orders.>`"), "{error}");
    }

    #[test]
    fn a_server_that_ignores_retentions_is_refused() {
        for version in ["2.9.10", "2.10.29", "1.4.0", "2", "", "two.eleven"] {
            let error = check_version(version).expect_err(version);
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
        }
        for version in ["2.11.0", "2.11.0-preview.1", "2.14.0", "3.0.0"] {
            assert!(check_version(version).is_ok(), "{version}");
        }
    }
}
