//! `idem key`: the key of an operation, in its stored form.

use std::process::ExitCode;

use idem_runtime::Key;
use idem_runtime::key::{KeyBuilder, KeyError, Scope};
use serde_json::json;

use crate::report::{Output, STATUSES, Stop};
use crate::shell::quoted;
use crate::store::StoreArguments;

/// Prints the stored key of a handler's call or of an HTTP request, to find the record for a support ticket.
///
/// There are three forms: a key as an error shows it (`idem key pay/42`); a template of a handler and its values (`idem
/// key --scope pay --template 'order:{}:{}' acme 42`); an HTTP request (`idem key --http --method POST --route
/// /payments --caller alice CLIENT-KEY`). With a store, the output also contains the command that shows the record in
/// the store's own client. All lines can be pasted into a shell: a key with spaces or other special characters is
/// printed in quotes.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct KeyArguments {
    /// The key, the values of the template, or the `Idempotency-Key` of the request
    #[arg(required = true)]
    values: Vec<String>,
    /// Scope of the handler, or of the HTTP layer (there the default is `http`)
    #[arg(long, value_name = "NAME")]
    scope: Option<String>,
    /// Template of the handler; each part in braces is replaced by the next value
    #[arg(long, value_name = "TEXT", requires = "scope", conflicts_with = "http")]
    template: Option<String>,
    /// The values are the parts of a tuple, as in `key = (tenant, order.id)`
    #[arg(long, requires = "scope", conflicts_with_all = ["http", "template"])]
    tuple: bool,
    /// Treats the value as the key of an HTTP request
    #[arg(long)]
    http: bool,
    /// Method of the request
    #[arg(long, value_name = "NAME", default_value = "POST", requires = "http")]
    method: String,
    /// Route of the request: under a profile that compares JSON, the path; under other profiles, axum's template
    /// without the names of its parameters (`/payments/{}`), or empty if the layer has a scope; with separate hosts,
    /// the host precedes the route (`api.example.com/payments/{}`)
    #[arg(long, value_name = "PATH", default_value = "", requires = "http")]
    route: String,
    /// Sender of the request, as the layer's `Caller` returns it
    #[arg(long, value_name = "NAME", default_value = "", requires = "http")]
    caller: String,
    #[command(flatten)]
    store: StoreArguments,
    /// Prints one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn main(arguments: &KeyArguments) -> Result<ExitCode, Stop> {
    let key = key(arguments)?;
    let place = match arguments.store.url()? {
        Some(_) => Some(arguments.store.place()?),
        None => None,
    };
    let (stored, look_up) = match &place {
        Some(place) => {
            let namespace = arguments.store.namespace(&**place)?;
            let (stored, look_up) = place.look_up(namespace.as_deref(), key.as_str());
            (stored, Some((place.kind(), look_up)))
        }
        None => (format!("{}{}", arguments.store.any_namespace()?.unwrap_or_default(), key.as_str()), None),
    };
    let mut object = json!({ "key": key.to_string(), "scope": key.scope(), "text": key.text(), "stored": stored });
    let shown = key.to_string();
    let mut text = format!("key     {}\nstored  {}", quoted(&shown), quoted(&stored));
    if let Some((kind, look_up)) = look_up {
        object["store"] = kind.into();
        object["look_up"] = look_up.as_str().into();
        text = format!("{text}\n{kind:7} {look_up}");
    }
    Output { json: arguments.json }.line(&object, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn key(arguments: &KeyArguments) -> Result<Key, Stop> {
    let KeyArguments { values, scope, template, tuple, http, method, route, caller, .. } = arguments;
    let wrong = |error: KeyError| Stop::Usage(error.to_string());
    let one = || match &values[..] {
        [one] => Ok(one),
        _ => Err(Stop::Usage("one key at a time; several values need `--template` or `--tuple`".to_owned())),
    };
    // The keys of HTTP requests have their own form, which the HTTP layer builds.
    if *http {
        let name = unquoted(one()?);
        return idem_runtime::http::request_key(scope.as_deref(), method, route, caller, &name).map_err(wrong);
    }
    // Without a scope, the value is a complete key.
    let Some(scope) = scope else {
        let shown = one()?;
        return shown.parse().map_err(|error: KeyError| {
            Stop::Usage(format!("`{shown}` is no key: {error}; write `<scope>/<text>`, or give `--scope`"))
        });
    };
    // A tuple and a plain key become a template: a tuple with one placeholder per value, a plain key with one
    // placeholder.
    let template = match (template, tuple) {
        (Some(template), _) => template.clone(),
        (None, true) => vec!["{}"; values.len()].join(":"),
        (None, false) => {
            one()?;
            "{}".to_owned()
        }
    };
    let parts = parts(&template).map_err(Stop::Usage)?;
    if parts.iter().filter(|part| part.is_none()).count() != values.len() {
        let places = parts.iter().filter(|part| part.is_none()).count();
        return Err(Stop::Usage(format!("the template has {places} places for values, {} are given", values.len())));
    }
    // The text is leaked, because a `Scope` needs a `'static` text; this program makes only one key.
    let scope = Scope::named(String::leak(scope.clone()));
    let mut builder = KeyBuilder::new(&scope);
    let mut values = values.iter();
    for (at, part) in parts.iter().enumerate() {
        match (part, parts.get(at + 1)) {
            (Some(text), _) => builder.text(text),
            (None, next) => {
                let next = next.and_then(|next| next.as_ref()?.chars().next());
                builder.part(values.next().map_or("", String::as_str), next);
            }
        }
    }
    builder.build().map_err(wrong)
}

/// Returns the literal texts of a template, and `None` for each placeholder.
fn parts(template: &str) -> Result<Vec<Option<String>>, String> {
    if template.contains(|c: char| c == '%' || c.is_control()) {
        return Err("a template has no `%` and no control characters".to_owned());
    }
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = template.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            // A doubled brace is one literal brace.
            '{' | '}' if rest.peek() == Some(&c) => {
                rest.next();
                text.push(c);
            }
            '{' => {
                if !text.is_empty() {
                    parts.push(Some(std::mem::take(&mut text)));
                }
                // The expression between the braces may itself contain braces.
                let mut depth = 1;
                while depth > 0 {
                    match rest.next() {
                        Some('{') => depth += 1,
                        Some('}') => depth -= 1,
                        Some(_) => {}
                        None => return Err("a `{` of the template is not closed".to_owned()),
                    }
                }
                if parts.last() == Some(&None) {
                    return Err(
                        "two places of the template stand side by side; write a character between them".to_owned()
                    );
                }
                parts.push(None);
            }
            '}' => return Err("a `}` of the template closes nothing; write `}}` for the character".to_owned()),
            c => text.push(c),
        }
    }
    if !text.is_empty() {
        parts.push(Some(text));
    }
    Ok(parts)
}

/// Reads the key in a header value: `"k"` and `k` are one key.
fn unquoted(field: &str) -> String {
    let field = field.trim();
    match field.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(quoted) => quoted.replace("\\\"", "\"").replace("\\\\", "\\"),
        None => field.to_owned(),
    }
}
