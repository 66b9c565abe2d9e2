//! Renewals of many leases. One script call renews up to 100 leases, and all calls to one node share one exchange.

use futures_util::future::join_all;
use redis::Value;

use super::access::{Access, attempt_of};
use super::batch::OpFuture;
use super::cluster::slot_of;
use super::command::RedisCommand;
use super::failure::{damaged, failed, unexpected};
use super::op::{Op, OpAnswer};
use crate::record::format::millis;
use crate::record::{Lease, Verdict};
use crate::store::{Answers, StoreError};

/// Largest number of leases that one script call renews. This number limits the time for which the call blocks the
/// server.
const RENEWED_AT_ONCE: usize = 100;

/// The slot of a lease's key (0 outside a cluster), and the index of the lease in the batch.
type LeaseIndex = (u16, usize);

/// Renews `leases`, and passes on each answer as soon as it arrives.
pub(super) async fn renew(access: &Access<'_>, leases: &[Lease], answer: &Answers<'_>) -> Result<(), StoreError> {
    // All calls to a node are sent together, in one exchange. The leases of a call are answered as soon as its answer
    // arrives. Calls are short, so that the server is not blocked. In a cluster a call names keys of one slot.
    let is_cluster = access.core.terms.one_key;
    let slot = |lease: &Lease| if is_cluster { slot_of(access.name_of(&lease.key)) } else { 0 };
    let mut places: Vec<LeaseIndex> = leases.iter().enumerate().map(|(at, lease)| (slot(lease), at)).collect();
    if is_cluster {
        places.sort_unstable();
    }
    let groups = places.chunk_by(|a, b| a.0 == b.0).flat_map(|of_slot| of_slot.chunks(RENEWED_AT_ONCE));
    let calls = groups.map(|group| renew_group(access, leases, group, answer));
    // `join_all` polls only the calls that are woken. With thousands of calls, polling every call after each answer
    // would take longer than the servers take to answer.
    join_all(calls).await.into_iter().collect()
}

/// Renews the `leases` in `group`, in one call of the script. In a cluster, the keys of these leases have one slot.
async fn renew_group(
    access: &Access<'_>,
    leases: &[Lease],
    group: &[LeaseIndex],
    answer: &Answers<'_>,
) -> Result<(), StoreError> {
    match renew_call(access, leases, group).await {
        // The slot is migrating, and the call renewed nothing. A call that names a single key can still succeed.
        Err(failure) if failure.is_split_slot() && group.len() > 1 => {
            let each = group.chunks(1).map(|one| async move {
                let answers = renew_call(access, leases, one).await;
                renewed(one, answers, answer)
            });
            join_all(each).await.into_iter().collect()
        }
        answers => renewed(group, answers, answer),
    }
}

fn renew_call<'a>(access: &'a Access<'_>, leases: &'a [Lease], group: &[LeaseIndex]) -> OpFuture<'a> {
    let some = || group.iter().map(|(_, at)| &leases[*at]);
    let names = some().map(|lease| access.name_of(&lease.key));
    let command = RedisCommand::script(&access.core.scripts().renew, names, |command| {
        for lease in some() {
            command.arg(&attempt_of(lease)[..]).arg(millis(lease.duration.saturating_add(lease.ttl)));
        }
    });
    access.run(access.name_of(&leases[group[0].1].key), Op::Renew(command))
}

/// Passes on the answers of one script call to its leases.
fn renewed(group: &[LeaseIndex], answers: OpAnswer, answer: &Answers<'_>) -> Result<(), StoreError> {
    let answers = match answers.map_err(failed)? {
        Value::BulkString(answers) if answers.len() == group.len() => answers,
        other => return Err(unexpected(&other)),
    };
    let mut result = Ok(());
    for ((_, at), byte) in group.iter().zip(answers) {
        match byte {
            b'1' => answer(*at, Verdict::Applied),
            b'0' => answer(*at, Verdict::Refused),
            _ => result = Err(damaged()),
        }
    }
    result
}
