//! Work of operators: lists of records, and decisions about single records.

use redis::Value;

use super::access::{Access, Core, call, keeps_changing, written};
use super::command::{Name, RedisCommand};
use super::failure::{failed, unexpected};
use super::inspection::{StoredValue, glance, look_at};
use super::op::Op;
use crate::combine::all;
use crate::kit::looks::{LOOKS, pause_before};
use crate::record::format::{self, millis};
use crate::record::{Decision, DecisionAnswer, Record, Ruling, State, Verdict};
use crate::store::{Cursor, Filter, Page, StoreError, StoreErrorKind};

/// Approximate number of keys that one `SCAN` visits. This number limits the time for which the `SCAN` blocks the
/// server.
const SCANNED_AT_ONCE: usize = 250;

/// Lists the records that one `SCAN` of one server visits. The returned cursor names the server and holds its scan
/// cursor.
pub(super) async fn scan(access: &Access<'_>, filter: &Filter) -> Result<Page, StoreError> {
    if !filter.scan {
        let message = "Redis has no order of keys to walk by: ask for a scan of all keys (`Filter::scan`), which may miss \
                       records and repeat them";
        return Err(StoreError::new(StoreErrorKind::Unsupported, message));
    }
    let (server, place) = match &filter.after {
        None => ("", "0"),
        Some(cursor) => cursor.as_str().rsplit_once('|').ok_or_else(|| cursor.is_foreign())?,
    };
    if place.is_empty() || !place.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(filter.after.as_ref().map_or_else(keeps_changing, Cursor::is_foreign));
    }
    let prefix = &*access.core.prefix;
    let mut command = redis::cmd("SCAN");
    command.arg(place).arg("MATCH").arg(format!("{}*", escaped(&[prefix, &filter.prefix()].concat())));
    command.arg("COUNT").arg(SCANNED_AT_ONCE);
    let asked = access.connections.route.ask_in_turn(server, RedisCommand::plain(command)).await;
    let (server, found, following) = asked.map_err(failed)?;
    let (place, keys) = scanned(&found).ok_or_else(|| unexpected(&found))?;
    let names: Vec<String> = keys.into_iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    let mut looks: Vec<_> = names.iter().map(|key| Box::pin(glance(access, Name { prefix: "", key }))).collect();
    let looks = all(&mut looks).await;
    let mut page = Page::default();
    for (name, look) in names.iter().zip(looks) {
        match look {
            // Another application may have written a value of another Redis type (a list, a hash) under this prefix.
            // The page counts such a key as unreadable.
            Err(error) if error.kind() != StoreErrorKind::Corrupt => return Err(error),
            found => page.add(filter, name.strip_prefix(prefix).unwrap_or_default(), found),
        }
    }
    page.next = match (place, following) {
        ("0", following) => following.map(|server| Cursor::new(format!("{server}|0"))),
        (place, _) => Some(Cursor::new(format!("{server}|{place}"))),
    };
    Ok(page)
}

/// Reads the record, decides, and writes if the record is unchanged.
pub(super) async fn decide(access: &Access<'_>, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
    let (limits, clock) = (&access.core.limits, access.core.clock());
    let name = access.name_of(&decision.key);
    for look in 0..LOOKS {
        pause_before(look, clock).await;
        let Some(stored) = look_at(access, name, Op::Read).await? else {
            return Ok(DecisionAnswer::NoRecord);
        };
        let found = stored.inspection();
        let value = match found.decide(decision) {
            Ruling::Answer(refused) => return Ok(refused),
            Ruling::Replace(with) => format::encode(&with),
            Ruling::Remove => Vec::new(),
        };
        limits.check(value.len(), clock)?;
        let asked = match found.damage {
            Some(_) => removal(access.core, name, &stored),
            None => replacement(access.core, name, decision, &found.record, &stored, &value),
        };
        let decided = access.run(name, Op::Write(asked)).await;
        match written(&limits.learn(value.len(), decided, clock)?)? {
            Verdict::Applied => return Ok(DecisionAnswer::Applied),
            Verdict::Refused => {}
        }
    }
    Err(keeps_changing())
}

/// Replaces the record that was found. The new record is `value`; an empty `value` removes the record.
fn replacement(
    core: &Core,
    name: Name<'_>,
    decision: &Decision,
    met: &Record,
    stored: &StoredValue,
    value: &[u8],
) -> RedisCommand {
    let seen = format::identity(&stored.value).unwrap_or_default();
    let lapsed = match met.state {
        State::Pending { ttl, .. } if !decision.ends_live_lease() => millis(ttl).to_string(),
        _ => String::new(),
    };
    call(&core.scripts().decide, name, |command| {
        command.arg(&seen[..]).arg(&lapsed).arg(value).arg(&*core.terms.channel);
    })
}

/// Removes a value that can't be read.
fn removal(core: &Core, name: Name<'_>, met: &StoredValue) -> RedisCommand {
    call(&core.scripts().remove, name, |command| {
        command.arg(&met.value[..]).arg(u8::from(met.expires())).arg(&*core.terms.channel);
    })
}

/// Returns a pattern that matches only this text.
fn escaped(text: &str) -> String {
    let is_special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '^' | '-' | '\\');
    text.chars().flat_map(|c| is_special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// Returns the next cursor and the keys in an answer of `SCAN`.
fn scanned(answer: &Value) -> Option<(&str, Vec<&[u8]>)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::BulkString(place), Value::Array(keys)] = &parts[..] else { return None };
    // An answer may contain the same key twice.
    let mut keys = keys
        .iter()
        .map(|it| {
            let Value::BulkString(key) = it else { return None };
            Some(key.as_slice())
        })
        .collect::<Option<Vec<_>>>()?;
    keys.sort_unstable();
    keys.dedup();
    Some((std::str::from_utf8(place).ok()?, keys))
}
