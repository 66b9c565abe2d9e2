//! Shapes of recorded results: names and types of their fields, without their values.
//!
//! The command does not know the type that a handler returns. A result of the same handler shows which fields that type
//! has, so a result that lacks a field or has another type is refused before duplicates fail to decode it.

use std::collections::BTreeMap;
use std::fmt;

use idem_runtime::codec::CodecName;
use idem_runtime::operator::Operator;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::{Filter, Finish, Inspection, Standing};
use idem_runtime::{Key, Store};
use serde_json::Value;

use crate::report::{Stop, printable};

/// Largest number of results that one shape is made of.
const SAMPLES: usize = 5;
/// Largest number of fields that the text of an object names.
const SHOWN_FIELDS: usize = 30;
/// Start of the names of codecs under which a wrapper stores a transformed result, whose shape is not visible.
const WRAPPED: &str = "idem:";

/// Types that a JSON value has in the results that were read. A shape without any type is unknown.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "a set of types")]
struct Shape {
    null: bool,
    boolean: bool,
    integer: bool,
    float: bool,
    text: bool,
    list: Option<Box<Shape>>,
    object: Option<BTreeMap<String, Field>>,
}

/// A field of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Field {
    shape: Shape,
    /// True if some object lacks the field.
    optional: bool,
}

impl Shape {
    fn of(value: &Value) -> Self {
        let mut shape = Self::default();
        match value {
            Value::Null => shape.null = true,
            Value::Bool(_) => shape.boolean = true,
            Value::Number(number) => match number.is_f64() {
                true => shape.float = true,
                false => shape.integer = true,
            },
            Value::String(_) => shape.text = true,
            Value::Array(values) => {
                let mut all = Self::default();
                for value in values {
                    all.add(Self::of(value));
                }
                shape.list = Some(Box::new(all));
            }
            Value::Object(fields) => {
                let field = |(name, value): (&String, &Value)| {
                    (name.clone(), Field { shape: Self::of(value), optional: false })
                };
                shape.object = Some(fields.iter().map(field).collect());
            }
        }
        shape
    }

    /// Adds the types of another value in the same place.
    fn add(&mut self, other: Self) {
        let Self { null, boolean, integer, float, text, list, object } = other;
        self.null |= null;
        self.boolean |= boolean;
        self.integer |= integer;
        self.float |= float;
        self.text |= text;
        match (&mut self.list, list) {
            (Some(own), Some(other)) => own.add(*other),
            (own @ None, other) => *own = other,
            (Some(_), None) => {}
        }
        match (&mut self.object, object) {
            (Some(own), Some(other)) => {
                own.iter_mut().filter(|(name, _)| !other.contains_key(*name)).for_each(|(_, it)| it.optional = true);
                for (name, Field { shape, optional }) in other {
                    match own.get_mut(&name) {
                        Some(field) => {
                            field.shape.add(shape);
                            field.optional |= optional;
                        }
                        None => _ = own.insert(name, Field { shape, optional: true }),
                    }
                }
            }
            (own @ None, other) => *own = other,
            (Some(_), None) => {}
        }
    }

    /// Adds the differences between the value at `path` and this shape to `found`. The texts name fields and types, but
    /// no values: a result may be confidential.
    fn compare(&self, value: &Value, path: &str, found: &mut Vec<String>) {
        let is_whole = path.is_empty();
        let only_null = *self == Self { null: true, ..Self::default() };
        // A field that is null in all samples may have any type. A whole result that is null is a `()`.
        if *self == Self::default() || (only_null && !is_whole) {
            return;
        }
        let fits = match value {
            Value::Null => self.null,
            Value::Bool(_) => self.boolean,
            Value::Number(number) => self.float || (self.integer && !number.is_f64()),
            Value::String(_) => self.text,
            Value::Array(_) => self.list.is_some(),
            Value::Object(_) => self.object.is_some(),
        };
        let name =
            |path: &str| if path.is_empty() { "the result".to_owned() } else { format!("`{}`", printable(path)) };
        if !fits {
            found.push(format!("{} is {}, and {self} in a good result", name(path), Self::of(value).kind()));
            return;
        }
        if let (Value::Array(values), Some(shape)) = (value, &self.list) {
            values.iter().enumerate().for_each(|(at, value)| shape.compare(value, &format!("{path}[{at}]"), found));
        }
        if let (Value::Object(values), Some(fields)) = (value, &self.object) {
            let inner = |field: &str| if is_whole { field.to_owned() } else { format!("{path}.{field}") };
            for (field, Field { shape, optional }) in fields {
                match values.get(field) {
                    Some(value) => shape.compare(value, &inner(field), found),
                    None if *optional => {}
                    None => found.push(format!("{} is missing", name(&inner(field)))),
                }
            }
            let unknown = values.keys().filter(|field| !fields.contains_key(*field));
            found.extend(unknown.map(|field| format!("{} is not in a good result", name(&inner(field)))));
        }
    }

    /// Returns the type of a single value, without the parts of the value.
    fn kind(&self) -> String {
        match (&self.list, &self.object) {
            (Some(_), _) => "a list".to_owned(),
            (_, Some(_)) => "an object".to_owned(),
            _ => self.to_string(),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { null, boolean, integer, float, text, list, object } = self;
        let mut types = Vec::new();
        if let Some(fields) = object {
            let shown = fields.iter().take(SHOWN_FIELDS).map(|(name, Field { shape, optional })| {
                let name = printable(&Value::from(name.as_str()).to_string());
                format!("{name}{}: {shape}", if *optional { "?" } else { "" })
            });
            let more = (fields.len() > SHOWN_FIELDS).then(|| "…".to_owned());
            types.push(format!("{{{}}}", shown.chain(more).collect::<Vec<_>>().join(", ")));
        }
        if let Some(list) = list {
            types.push(format!("[{list}]"));
        }
        let plain = [
            (*text, "text"),
            (*float, "number"),
            (*integer && !*float, "integer"),
            (*boolean, "boolean"),
            (*null, "null"),
        ];
        types.extend(plain.into_iter().filter(|(is, _)| *is).map(|(_, name)| name.to_owned()));
        match types.is_empty() {
            true => f.write_str("anything"),
            false => f.write_str(&types.join(" or ")),
        }
    }
}

/// Good results of a handler: their codec, their shape, and the records that hold them.
pub(crate) struct Model {
    codec: CodecName,
    /// `None` for a codec other than JSON.
    shape: Option<Shape>,
    pub(crate) from: Vec<Key>,
}

impl Model {
    /// Makes a model of one recorded result; `None` if the result is not visible.
    fn of(key: &Key, found: &Inspection) -> Option<Self> {
        let Some(StoredResult::Encoded { codec, bytes }) = found.record.state.result() else { return None };
        let is_json = codec.as_str() == "json";
        let value = is_json.then(|| serde_json::from_slice::<Value>(bytes).ok()).flatten();
        if codec.as_str().starts_with(WRAPPED) || is_json != value.is_some() {
            return None;
        }
        Some(Self { codec: *codec, shape: value.as_ref().map(Shape::of), from: vec![key.clone()] })
    }

    fn add(&mut self, other: Self) {
        if self.codec != other.codec {
            return;
        }
        if let (Some(own), Some(shape)) = (&mut self.shape, other.shape) {
            own.add(shape);
        }
        self.from.extend(other.from);
    }

    /// Returns the differences between `result` and good results; empty if there are none, or if the codec hides them.
    pub(crate) fn differences(&self, result: &StoredResult) -> Vec<String> {
        let StoredResult::Encoded { codec, bytes } = result else { return Vec::new() };
        if *codec != self.codec {
            return vec![format!(
                "it is written as `{}`, and a good result as `{}`",
                codec.as_str(),
                self.codec.as_str()
            )];
        }
        let mut found = Vec::new();
        if let (Some(shape), Ok(value)) = (&self.shape, serde_json::from_slice(bytes)) {
            shape.compare(&value, "", &mut found);
        }
        found
    }

    pub(crate) fn codec(&self) -> &str {
        self.codec.as_str()
    }

    /// Returns the shape as text; `None` for a codec other than JSON.
    pub(crate) fn shape(&self) -> Option<String> {
        self.shape.as_ref().map(Shape::to_string)
    }
}

/// Writes the shape, and the key of a record that has it.
impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.shape, self.codec.as_str()) {
            (Some(shape), _) => write!(f, "{shape}")?,
            (None, "http1") => f.write_str("an HTTP response")?,
            (None, codec) => write!(f, "bytes of {codec}")?,
        }
        match &self.from[..] {
            [one] => write!(f, ", as in `{one}`"),
            [one, others @ ..] => write!(f, ", as in `{one}` and {} more", others.len()),
            [] => Ok(()),
        }
    }
}

/// Returns the model of a result for `key` that ends its operation as `finish` does; `None` if no good result is known.
///
/// The results of other keys of the scope come first, because the result on record may be the wrong one. Results of
/// other keys that a person has recorded are not used.
pub(crate) async fn model<S: Store + ?Sized>(
    operator: &Operator<'_, S>,
    key: &Key,
    found: &Inspection,
    completed: bool,
    can_list: bool,
) -> Result<Option<Model>, Stop> {
    let standing = if completed { Standing::Completed } else { Standing::Failed };
    let mut model: Option<Model> = None;
    let mut samples = 0;
    let keys = match can_list {
        true => {
            let filter = Filter::new().scope(key.scope()).standing(standing);
            // One page suffices, so that a decision does not read a large scope.
            operator.list(&filter).await?.records
        }
        false => Vec::new(),
    };
    for (other, listed) in keys {
        if samples == SAMPLES {
            break;
        }
        if other == *key || listed.decided_by().is_some() || listed.decided_reason().is_some() {
            continue;
        }
        let Some(whole) = operator.inspect(&other).await? else { continue };
        if let Some(sample) = Model::of(&other, &whole) {
            samples += 1;
            match &mut model {
                Some(model) => model.add(sample),
                None => model = Some(sample),
            }
        }
    }
    let same_end = matches!((&found.record.state, completed), (State::Completed(_), true) | (State::Failed(_), false));
    Ok(model.or_else(|| Model::of(key, found).filter(|_| same_end)))
}

/// Returns the model that is made of the result in the record of `like`.
pub(crate) async fn model_like<S: Store + ?Sized>(operator: &Operator<'_, S>, like: &Key) -> Result<Model, Stop> {
    let Some(found) = operator.inspect(like).await? else {
        return Err(Stop::Nothing(format!("there is no record `{like}`, which `--like` names; nothing was changed")));
    };
    let no_result = || Stop::Usage(format!("`{like}`, which `--like` names, has no result to compare with"));
    Model::of(like, &found).ok_or_else(no_result)
}

/// Returns whether the operation completes by `finish`; false if it fails by `finish`.
pub(crate) fn completes(finish: &Finish) -> bool {
    matches!(finish, Finish::Completed(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(values: &[Value]) -> Shape {
        let mut shape = Shape::of(&values[0]);
        values[1..].iter().for_each(|value| shape.add(Shape::of(value)));
        shape
    }

    #[test]
    fn a_result_of_another_shape_differs_without_its_values() {
        let samples = [
            json!({ "receipt": "r-1", "cents": 5, "tax": 0.5, "note": null, "lines": [], "paid": true }),
            json!({ "receipt": "r-2", "cents": 7, "tax": 1, "lines": [{ "sku": "a" }], "paid": false, "by": { "card": "x" } }),
        ];
        let shape = of(&samples);
        assert_eq!(
            shape.to_string(),
            r#"{"by"?: {"card": text}, "cents": integer, "lines": [{"sku": text}], "note"?: null, "paid": boolean, "receipt": text, "tax": number}"#
        );
        let good = json!({ "receipt": "r", "cents": 1, "tax": 2, "note": "any", "lines": [], "paid": true });
        let with = |name: &str, value: Value| {
            let mut result = good.clone();
            result[name] = value;
            result
        };
        let without = |name: &str| {
            let mut result = good.clone();
            result.as_object_mut().unwrap().remove(name);
            result
        };
        for (result, expected) in [
            (good.clone(), &[][..]),
            (without("note"), &[]),
            (with("by", json!({ "card": "4111" })), &[]),
            (without("receipt"), &["`receipt` is missing"]),
            (with("receipt", json!(4111)), &["`receipt` is integer, and text in a good result"]),
            (with("receipt", json!(null)), &["`receipt` is null, and text in a good result"]),
            (with("cents", json!(41.11)), &["`cents` is number, and integer in a good result"]),
            (with("amount", json!(4111)), &["`amount` is not in a good result"]),
            (
                with("lines", json!([{ "sku": "a" }, { "id": 4111 }])),
                &["`lines[1].sku` is missing", "`lines[1].id` is not in a good result"],
            ),
            (with("by", json!(["4111"])), &[r#"`by` is a list, and {"card": text} in a good result"#]),
        ] {
            let mut found = Vec::new();
            shape.compare(&result, "", &mut found);
            assert_eq!(found, expected, "{result}");
            assert!(!found.concat().contains("4111"));
        }
        let wrong = |shape: Shape, value: Value| {
            let mut found = Vec::new();
            shape.compare(&value, "", &mut found);
            found
        };
        assert_eq!(wrong(of(&[json!(null)]), json!({})), ["the result is an object, and null in a good result"]);
        assert_eq!(wrong(of(&[json!("Paid"), json!({ "Declined": "funds" })]), json!({ "Declined": "card" })), [""; 0]);
        assert_eq!(wrong(of(&[json!([])]), json!([1, "a"])), [""; 0]);
    }
}
