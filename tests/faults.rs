//! Every store, every fault: processes at work, what they see while it lasts, and what is recorded in the end.
//!
//! The table of ARCHITECTURE.md is made from the one here, and each of its cells is a test with that name.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]
#![allow(missing_docs, unreachable_pub, reason = "nobody else uses it")]

#[path = "faults/play.rs"]
mod play;
#[path = "faults/rigs.rs"]
mod rigs;
#[path = "faults/tools.rs"]
mod tools;

/// What happens. The names are those of tests.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    workers_killed,
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
    clock_stepped,
    clock_stepped_within_the_skew,
}

use Fault::{
    clock_stepped, clock_stepped_within_the_skew, connections_cut, connections_delayed, connections_half_closed,
    disk_full, failover, out_of_memory, read_only, records_deleted, server_killed_and_restarted,
    server_stopped_and_continued, table_removed, workers_killed, workers_stopped_and_continued,
};

/// The faults, and how each is brought about.
const FAULTS: &[(Fault, &str)] = &[
    (workers_killed, "a worker is killed (`SIGKILL`)"),
    (workers_stopped_and_continued, "a worker is stopped beyond its lease and continued (`SIGSTOP`, `SIGCONT`)"),
    (server_killed_and_restarted, "the server is killed and restarted, with settings that lose nothing"),
    (server_stopped_and_continued, "the server is stopped and continued"),
    (failover, "a replica replaces the primary; `min_replicas` is set"),
    (connections_cut, "connections are reset, lose answers, lose requests, are refused"),
    (connections_delayed, "everything takes 100 ms longer, in both directions"),
    (connections_half_closed, "connections end in one direction, then in the other one"),
    (out_of_memory, "the server has no memory for more"),
    (disk_full, "the disk is full (`ENOSPC`)"),
    (read_only, "the store can be read only"),
    (records_deleted, "all records are deleted (`FLUSHALL`, `TRUNCATE`, `DELETE`)"),
    (table_removed, "table or file is removed, and made or put back"),
    (clock_stepped, "the clock of a client is set an hour forward, then an hour back"),
    (clock_stepped_within_the_skew, "the same, with a `max_clock_skew` of two hours"),
];

/// What the user sees of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    TakenOver,
    LeaseLost,
    Refused,
    Retried,
    RunsAgain,
    Slower,
    GoesOn,
    LeasesMove,
}

/// The words of the table, and what they mean.
const SEEN: &[(Seen, &str, &str)] = &[
    (Seen::TakenOver, "taken over", "the key is held for a lease, then the next delivery runs the body again"),
    (
        Seen::LeaseLost,
        "lease lost",
        "as before; the worker that wakes gets `LeaseLost`, records nothing, and is replayed the other's result",
    ),
    (
        Seen::Refused,
        "refused",
        "`Error::Store` while it lasts, and no body begins; results of bodies that end are recorded once that can be done, \
         as long as their lease is held; afterwards everything goes on, and nothing is forgotten",
    ),
    (Seen::Retried, "retried", "calls under way may get `Error::Store`; nothing that was acknowledged is forgotten"),
    (
        Seen::RunsAgain,
        "runs again",
        "forgotten: finished operations run again, with attempts from 1, and running ones get `LeaseLost`",
    ),
    (Seen::Slower, "slower", "nothing else"),
    (Seen::GoesOn, "goes on", "nothing, but for calls under way that are asked again"),
    (
        Seen::LeasesMove,
        "leases shift",
        "leases end early or late by the step, so bodies may overlap; one outcome is recorded all the same",
    ),
];

struct Column {
    name: &'static str,
    title: &'static str,
    cells: &'static [(Fault, Seen)],
    absent: &'static [(Fault, &'static str)],
}

/// A module of tests for each store, and [`COLUMNS`].
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
                let (fault, seen) = (crate::Fault::$fault, crate::Seen::$seen);
                crate::play::play($start(fault).await, fault, seen).await;
            })*
        })*
        const COLUMNS: &[Column] = &[$(Column {
            name: stringify!($store),
            title: $title,
            cells: &[$((Fault::$fault, Seen::$seen)),*],
            absent: &[$((Fault::$absent, $reason)),*],
        }),*];
    };
}

stores! {
    sqlite ("SQLite", Sqlite::start) {
        workers_killed: TakenOver,
        workers_stopped_and_continued: LeaseLost,
        disk_full: Refused,
        read_only: Refused,
        records_deleted: RunsAgain,
        table_removed: Refused,
        clock_stepped: LeasesMove,
    } without {
        server_killed_and_restarted: "no server",
        server_stopped_and_continued: "no server",
        failover: "no server",
        connections_cut: "no connections",
        connections_delayed: "no connections",
        connections_half_closed: "no connections",
        out_of_memory: "no server",
        clock_stepped_within_the_skew: "no such setting",
    }
    redis ("Redis", Redis::one) {
        workers_killed: TakenOver,
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
    } without {
        failover: "one server",
        table_removed: "no table",
        clock_stepped_within_the_skew: "no such setting",
    }
    cluster ("Redis Cluster", Redis::cluster) {
        workers_killed: TakenOver,
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
    } without {
        table_removed: "no table",
        clock_stepped_within_the_skew: "no such setting",
    }
    sentinel ("Redis Sentinel", Redis::sentinel) {
        workers_killed: TakenOver,
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
    } without {
        table_removed: "no table",
        clock_stepped_within_the_skew: "no such setting",
    }
    postgres ("PostgreSQL", Postgres::start) {
        workers_killed: TakenOver,
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
    } without {
        failover: "one server",
        clock_stepped_within_the_skew: "no such setting",
    }
    dynamo ("DynamoDB", Dynamo::start) {
        workers_killed: TakenOver,
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
    } without {
        failover: "the service's own",
        out_of_memory: "the service's own",
        read_only: "no such state",
    }
}

const BEGIN: &str = "<!-- the table of faults -->\n";
const END: &str = "<!-- the end of the table of faults -->\n";

/// The table and what its words mean, as they stand in ARCHITECTURE.md.
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

/// `IDEM_FAULTS=write` writes the table instead.
#[test]
fn the_table_in_the_documentation_is_this_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../ARCHITECTURE.md");
    let text = std::fs::read_to_string(path).expect("ARCHITECTURE.md");
    let (before, rest) = text.split_once(BEGIN).expect("the table begins");
    let (table, after) = rest.split_once(END).expect("the table ends");
    if std::env::var("IDEM_FAULTS").is_ok_and(|it| it == "write") {
        std::fs::write(path, [before, BEGIN, &written(), END, after].concat()).expect("can be written");
        return;
    }
    assert_eq!(table, written(), "`IDEM_FAULTS=write` writes it anew");
}
