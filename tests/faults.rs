//! Tests each store under each fault that it can have: worker processes call handlers while the fault begins and ends.
//! The test checks the answers to these calls and, at the end, the records.
//!
//! The table in docs/faults.md is generated from the table in this file. Each cell of the table is a
//! test with the name of its fault, in the module of its store.
// The futures of these tests are deep: they contain a store, its lanes and its connection.
#![recursion_limit = "256"]
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]
#![allow(missing_docs, unreachable_pub, reason = "only this test uses the module")]

#[path = "faults/exhausted.rs"]
mod exhausted;
#[path = "faults/leases.rs"]
mod leases;
#[path = "faults/messages.rs"]
mod messages;
#[path = "faults/play.rs"]
mod play;
#[path = "faults/rigs.rs"]
mod rigs;
#[path = "faults/tools.rs"]
mod tools;

/// Fault that a test causes. The name of each variant is also the name of a test.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    workers_killed,
    steps_killed_before_their_entries,
    steps_killed_in_their_entries,
    killed_before_sending,
    killed_before_the_mark,
    messages_refused,
    broker_away,
    store_away_at_the_mark,
    workers_stopped_and_continued,
    server_killed_and_restarted,
    server_stopped_and_continued,
    failover,
    connections_cut,
    connections_delayed,
    connections_half_closed,
    out_of_memory,
    disk_full,
    read_only,
    records_deleted,
    table_removed,
    index_removed,
    clock_stepped,
    clock_stepped_within_the_skew,
    threads_blocked,
    runtimes_stand_still,
    process_forked,
    bodies_paused,
    lines_slow,
    record_locked,
    insert_uncommitted,
    node_stopped,
    full_for_a_moment,
    renewals_refused,
    threads_exhausted,
    descriptors_exhausted,
}

use Fault::{
    bodies_paused, broker_away, clock_stepped, clock_stepped_within_the_skew, connections_cut, connections_delayed,
    connections_half_closed, descriptors_exhausted, disk_full, failover, full_for_a_moment, index_removed,
    insert_uncommitted, killed_before_sending, killed_before_the_mark, lines_slow, messages_refused, node_stopped,
    out_of_memory, process_forked, read_only, record_locked, records_deleted, renewals_refused, runtimes_stand_still,
    server_killed_and_restarted, server_stopped_and_continued, steps_killed_before_their_entries,
    steps_killed_in_their_entries, store_away_at_the_mark, table_removed, threads_blocked, threads_exhausted,
    workers_killed, workers_stopped_and_continued,
};

/// Each fault with its description, the first cell of its row in docs/faults.md.
const FAULTS: &[(Fault, &str)] = &[
    (workers_killed, "a worker is killed (`SIGKILL`)"),
    (
        steps_killed_before_their_entries,
        "a worker is killed between the effect of a step and its journal entry (`SIGKILL`)",
    ),
    (
        steps_killed_in_their_entries,
        "a worker is killed while the store writes the journal entry of a step (`SIGKILL`)",
    ),
    (
        killed_before_sending,
        "a worker is killed between the write of its record and the sending of its messages (`SIGKILL`)",
    ),
    (
        killed_before_the_mark,
        "a worker is killed between the sending of its messages and the write that marks them, or in that write (`SIGKILL`)",
    ),
    (messages_refused, "the broker refuses a message for a while, or for ever; a worker is killed meanwhile"),
    (
        broker_away,
        "the broker of the messages is away, or keeps messages without an answer, and comes back; a worker is killed meanwhile",
    ),
    (
        store_away_at_the_mark,
        "the server is stopped when messages are to be marked (SQLite: another session locks the file); workers are killed meanwhile",
    ),
    (workers_stopped_and_continued, "a worker is stopped beyond its lease and continued (`SIGSTOP`, `SIGCONT`)"),
    (server_killed_and_restarted, "the server is killed and restarted, with settings that lose nothing"),
    (
        server_stopped_and_continued,
        "the server is stopped for more than four leases and continued; a worker is killed meanwhile (`SIGSTOP`, `SIGCONT`)",
    ),
    (failover, "a replica replaces the primary; `min_replicas` is set (MariaDB: semi-synchronous replication)"),
    (connections_cut, "connections are reset, lose answers, lose requests, are refused"),
    (connections_delayed, "every line takes 100 ms longer, in both directions"),
    (connections_half_closed, "connections end in one direction, then in the other one"),
    (out_of_memory, "the server has no memory for further records"),
    (disk_full, "the disk is full (`ENOSPC`)"),
    (read_only, "the store accepts no writes"),
    (records_deleted, "all records are deleted (`FLUSHALL`, `TRUNCATE`, `DELETE`)"),
    (table_removed, "the table or the file is removed, and later created or put back"),
    (index_removed, "the index of the file's log (`-shm`) is removed while no transaction is open"),
    (clock_stepped, "the clock of a client is set an hour forward, then an hour back"),
    (
        clock_stepped_within_the_skew,
        "the clock of a client is set an hour forward, then an hour back, with a `max_clock_skew` of two hours",
    ),
    (threads_blocked, "bodies block their threads for ten leases, with and without `block_in_place`"),
    (runtimes_stand_still, "the runtime of the store, or that of the first body, stands still for ten leases"),
    (
        process_forked,
        "a process that has run a body forks two children, and all three processes serve the same keys and then keys of their own",
    ),
    (bodies_paused, "a worker is stopped beyond its lease, in the middle of its body"),
    (lines_slow, "all connections share 2 MB per second, and results have 1 MiB (MariaDB, DynamoDB and NATS: 40 KiB)"),
    (
        record_locked,
        "another session locks the record of one key for three leases (SQLite: the file, for half a lease)",
    ),
    (insert_uncommitted, "a transaction inserts the record of one key, and stays open for three leases"),
    (node_stopped, "one of several nodes is stopped for three leases"),
    (full_for_a_moment, "the store is full, or accepts no writes, for half a second in which bodies end"),
    (
        renewals_refused,
        "the store permanently refuses renewals: a right is taken from the login of the workers (SQLite: a trigger refuses)",
    ),
    (threads_exhausted, "a worker can start no thread at first (`RLIMIT_NPROC`), and is later allowed to"),
    (descriptors_exhausted, "a worker can open no descriptor (`RLIMIT_NOFILE`) for two leases"),
];

/// Effect of a fault that a user can see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VisibleEffect {
    TakenOver,
    Continued,
    Sent,
    SentAgain,
    SetAside,
    Unsent,
    LeaseLost,
    Refused,
    Retried,
    RunsAgain,
    Slower,
    GoesOn,
    LeasesMove,
    Kept,
    OthersKept,
    Fenced,
    Recorded,
    Unrenewed,
}

/// Visible effects, each with its word in the table of docs/faults.md and the meaning of that word.
const SEEN: &[(VisibleEffect, &str, &str)] = &[
    (
        VisibleEffect::TakenOver,
        "taken over",
        "the key is held for a lease, then the next delivery runs the body again; under `on_crash = fail` the next \
         delivery gets `Interrupted`, until an operator decides",
    ),
    (
        VisibleEffect::Continued,
        "continued",
        "the key is held for a lease, then the next delivery gets the values of the steps whose entries the store has, and \
         runs the other steps; the effect of the interrupted step happens twice at most, with the same child key",
    ),
    (
        VisibleEffect::Sent,
        "sent",
        "the record holds the messages; the next delivery, or a `Resender`, sends them, and the body does not run again",
    ),
    (
        VisibleEffect::SentAgain,
        "sent again",
        "calls get `Error::Unsent`; the next delivery, or a `Resender`, sends the messages again with the same ids, if \
         they are not marked, and the body does not run again",
    ),
    (
        VisibleEffect::SetAside,
        "set aside",
        "calls get `Error::Unsent` until the broker accepts the message; after five refusals the call returns its \
         result, and the record keeps the message until an operator decides",
    ),
    (
        VisibleEffect::Unsent,
        "unsent",
        "calls get `Error::Unsent`, and no input is acknowledged; after the fault the next delivery, or a `Resender`, \
         sends the messages",
    ),
    (
        VisibleEffect::LeaseLost,
        "lease lost",
        "the key is taken over; the worker that continues gets `LeaseLost` and records nothing, and its next call replays \
         the other worker's result; under `on_crash = fail` its own result is recorded, because no other body runs",
    ),
    (
        VisibleEffect::Refused,
        "refused",
        "calls get `Error::Store` during the fault, and no body begins; the result of a body that ends is recorded if the \
         store recovers while the lease is held; after the fault all calls go on, and no record is forgotten",
    ),
    (VisibleEffect::Retried, "retried", "calls under way may get `Error::Store`; no acknowledged result is forgotten"),
    (
        VisibleEffect::RunsAgain,
        "runs again",
        "records are forgotten: finished operations run again, with attempts from 1, and running calls get `LeaseLost`",
    ),
    (VisibleEffect::Slower, "slower", "calls take longer, without any other effect"),
    (VisibleEffect::GoesOn, "goes on", "no effect, except that requests under way are repeated"),
    (
        VisibleEffect::LeasesMove,
        "leases shift",
        "leases end early or late by the step, so bodies may overlap; still only one result is recorded",
    ),
    (
        VisibleEffect::Kept,
        "kept",
        "no effect: every lease is kept, every body runs once, and its result is recorded and replayed",
    ),
    (
        VisibleEffect::OthersKept,
        "others kept",
        "a call for the stuck key waits, or gets `Error::Store`; calls for all other keys keep their leases and go on",
    ),
    (
        VisibleEffect::Fenced,
        "fenced",
        "the body is polled once more at most; then its call gets `LeaseLost`, or goes on if no other attempt took over, \
         as always under `on_crash = fail`",
    ),
    (VisibleEffect::Recorded, "recorded", "results are recorded half a second later; every body runs once"),
    (
        VisibleEffect::Unrenewed,
        "not renewed",
        "each body ends when its lease lapses, and `LeaseLost` holds the store's error; once the store renews leases \
         again, all calls go on",
    ),
];

struct Column {
    name: &'static str,
    title: &'static str,
    cells: &'static [(Fault, VisibleEffect)],
    absent: &'static [(Fault, &'static str)],
}

/// Generates a module of tests for each store, and [`COLUMNS`].
macro_rules! stores {
    ($($store:ident ($title:literal, $start:expr) {
        $($fault:ident: $seen:ident,)*
    } without {
        $($absent:ident: $reason:literal,)*
    })*) => {
        $(mod $store {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $fault() {
                use crate::rigs::*;
                let (fault, seen) = (crate::Fault::$fault, crate::VisibleEffect::$seen);
                crate::play::play($start(fault).await, fault, seen).await;
            })*
        })*
        const COLUMNS: &[Column] = &[$(Column {
            name: stringify!($store),
            title: $title,
            cells: &[$((Fault::$fault, VisibleEffect::$seen)),*],
            absent: &[$((Fault::$absent, $reason)),*],
        }),*];
    };
}

stores! {
    sqlite ("SQLite", Sqlite::start) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        table_removed: Refused,
        index_removed: Retried,
        clock_stepped: LeasesMove,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        record_locked: OthersKept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Refused,
        descriptors_exhausted: Kept,
    } without {
        server_killed_and_restarted: "no server",
        server_stopped_and_continued: "no server",
        failover: "no server",
        connections_cut: "no connections",
        connections_delayed: "no connections",
        connections_half_closed: "no connections",
        out_of_memory: "no server",
        clock_stepped_within_the_skew: "no such setting",
        lines_slow: "no connections",
        insert_uncommitted: "one transaction writes at a time, as in `record_locked`",
        node_stopped: "no server",
    }
    redis ("Redis", Redis::one) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        out_of_memory: Refused,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        clock_stepped: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        index_removed: "no such file",
        failover: "one server",
        table_removed: "no table",
        clock_stepped_within_the_skew: "no such setting",
        record_locked: "no locks",
        insert_uncommitted: "no transactions",
        node_stopped: "one server",
    }
    cluster ("Redis Cluster", Redis::cluster) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        failover: Retried,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        out_of_memory: Refused,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        clock_stepped: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        node_stopped: OthersKept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        index_removed: "no such file",
        table_removed: "no table",
        clock_stepped_within_the_skew: "no such setting",
        record_locked: "no locks",
        insert_uncommitted: "no transactions",
    }
    sentinel ("Redis Sentinel", Redis::sentinel) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        failover: Retried,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        out_of_memory: Refused,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        clock_stepped: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        index_removed: "no such file",
        table_removed: "no table",
        clock_stepped_within_the_skew: "no such setting",
        record_locked: "no locks",
        insert_uncommitted: "no transactions",
        node_stopped: "one primary",
    }
    postgres ("PostgreSQL", Postgres::start) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        out_of_memory: Refused,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        table_removed: RunsAgain,
        clock_stepped: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        record_locked: OthersKept,
        insert_uncommitted: OthersKept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        index_removed: "no such file",
        failover: "one server",
        clock_stepped_within_the_skew: "no such setting",
        node_stopped: "one server",
    }
    mysql ("MariaDB", MySql::start) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        failover: Retried,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        table_removed: RunsAgain,
        clock_stepped: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        record_locked: OthersKept,
        insert_uncommitted: OthersKept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        index_removed: "no such file",
        clock_stepped_within_the_skew: "no such setting",
        node_stopped: "one primary",
        out_of_memory: "a server without memory ends, as in `server_killed_and_restarted`",
    }
    dynamo ("DynamoDB", Dynamo::start) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        disk_full: Refused,
        records_deleted: RunsAgain,
        table_removed: RunsAgain,
        clock_stepped: LeasesMove,
        clock_stepped_within_the_skew: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        full_for_a_moment: Recorded,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        renewals_refused: "the emulators know no rights",
        index_removed: "no such file",
        failover: "the service's own",
        out_of_memory: "the service's own",
        read_only: "no such state",
        record_locked: "no locks",
        insert_uncommitted: "no transactions",
        node_stopped: "the service's own",
    }
    nats ("NATS JetStream", Nats::start) {
        workers_killed: TakenOver,
        steps_killed_before_their_entries: Continued,
        steps_killed_in_their_entries: Continued,
        killed_before_sending: Sent,
        killed_before_the_mark: SentAgain,
        messages_refused: SetAside,
        broker_away: Unsent,
        store_away_at_the_mark: SentAgain,
        workers_stopped_and_continued: LeaseLost,
        server_killed_and_restarted: Refused,
        server_stopped_and_continued: Refused,
        failover: Retried,
        connections_cut: Refused,
        connections_delayed: Slower,
        connections_half_closed: GoesOn,
        out_of_memory: Refused,
        records_deleted: RunsAgain,
        table_removed: RunsAgain,
        clock_stepped: GoesOn,
        threads_blocked: Kept,
        runtimes_stand_still: Kept,
        process_forked: Kept,
        bodies_paused: Fenced,
        lines_slow: Kept,
        full_for_a_moment: Recorded,
        renewals_refused: Unrenewed,
        threads_exhausted: Kept,
        descriptors_exhausted: Kept,
    } without {
        disk_full: "a Go program loads no library",
        read_only: "no such state",
        index_removed: "no such file",
        clock_stepped_within_the_skew: "no such setting",
        record_locked: "no locks",
        insert_uncommitted: "no transactions",
        node_stopped: "one leader",
    }
}

const BEGIN: &str = "<!-- the table of faults -->\n";
const END: &str = "<!-- the end of the table of faults -->\n";

/// Returns the generated part of docs/faults.md: the table of faults, and the meanings of the words in its cells.
fn written() -> String {
    use std::fmt::Write as _;
    let mut text = String::from("\n| fault |");
    for column in COLUMNS {
        write!(text, " {} |", column.title).expect("a text");
    }
    text += "\n|---|";
    text += &"---|".repeat(COLUMNS.len());
    for (fault, how) in FAULTS {
        write!(text, "\n| {how}: `{fault:?}` |").expect("a text");
        for column in COLUMNS {
            let seen = column.cells.iter().find(|cell| cell.0 == *fault);
            let absent = column.absent.iter().find(|cell| cell.0 == *fault);
            let cell = match (seen, absent) {
                (Some((_, seen)), None) => {
                    let words = SEEN.iter().find(|it| it.0 == *seen).map(|it| it.1).expect("in words");
                    format!("{words}: `{}::{fault:?}`", column.name)
                }
                (None, Some((_, reason))) => format!("n/a: {reason}"),
                _ => panic!("{}: {fault:?} is there {}", column.name, if seen.is_some() { "twice" } else { "not" }),
            };
            write!(text, " {cell} |").expect("a text");
        }
    }
    text += "\n\n| what the user sees | |\n|---|---|\n";
    for (_, words, meaning) in SEEN {
        writeln!(text, "| {words} | {meaning} |").expect("a text");
    }
    text + "\n"
}

/// `IDEM_FAULTS=write` makes this test write the table.
#[test]
fn the_table_of_faults_in_the_documentation_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/faults.md");
    let text = std::fs::read_to_string(path).expect("docs/faults.md");
    let (before, rest) = text.split_once(BEGIN).expect("the table begins");
    let (table, after) = rest.split_once(END).expect("the table ends");
    if std::env::var("IDEM_FAULTS").is_ok_and(|it| it == "write") {
        std::fs::write(path, [before, BEGIN, &written(), END, after].concat()).expect("can be written");
        return;
    }
    assert_eq!(table, written(), "`IDEM_FAULTS=write` writes it anew");
}
