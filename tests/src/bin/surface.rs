//! Lists the crates whose types the public interface of a package uses, according to the JSON output of rustdoc.
//!
//! `surface FILE CRATE...` ends with status 1 unless the public interface uses types or traits of exactly these crates.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use serde_json::Value;

/// Adds to `ids` the ids of all types and traits in `part`, which is a part of an item.
fn named(part: &Value, ids: &mut BTreeSet<String>) {
    match part {
        Value::Array(parts) => parts.iter().for_each(|part| named(part, ids)),
        Value::Object(fields) => {
            for (name, field) in fields {
                if let ("resolved_path" | "trait" | "trait_", Some(id)) = (name.as_str(), field.get("id")) {
                    ids.insert(id.to_string());
                }
                named(field, ids);
            }
        }
        _ => {}
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().expect("the name of a file");
    let allowed: BTreeSet<_> = arguments.collect();
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let doc: Value = serde_json::from_str(&text).expect("JSON of rustdoc");
    let mut shown: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut items = 0;
    // The loop reads only items that this crate's source contains, without implementations that the compiler adds.
    for item in doc["index"].as_object().expect("items").values() {
        let implementation = &item["inner"]["impl"];
        let is_written =
            !implementation["is_synthetic"].as_bool().unwrap_or_default() && implementation["blanket_impl"].is_null();
        if item["crate_id"] != 0 || !is_written {
            continue;
        }
        items += 1;
        let mut ids = BTreeSet::new();
        named(&item["inner"], &mut ids);
        for id in ids {
            let of = &doc["paths"][&id];
            let owner = &doc["external_crates"][of["crate_id"].to_string()]["name"];
            if let Some(owner) = owner.as_str() {
                let path: Vec<_> = of["path"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
                let place = item["name"].as_str().unwrap_or("an impl");
                shown.entry(owner.to_owned()).or_default().insert(format!("{} in {place}", path.join("::")));
            }
        }
    }
    // The crates for frameworks are small.
    assert!(items > 20, "{items} items are too few: the check reads nothing");
    // A crate in use that is not allowed is an error, and so is an allowed crate that is not in use.
    let mut wrong = false;
    for (owner, places) in &shown {
        if !allowed.contains(owner) {
            wrong = true;
            println!("a type of `{owner}` is in the public interface: {places:?}");
        }
    }
    for name in allowed.iter().filter(|name| !shown.contains_key(*name)) {
        wrong = true;
        println!("the crate `{name}` is allowed, but the public interface has no type of it");
    }
    ExitCode::from(u8::from(wrong))
}
