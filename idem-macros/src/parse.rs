//! Reads the attribute: its options, as `name = value`.

use proc_macro2::{Ident, TokenTree};
use syn::ext::IdentExt;
use syn::parse::ParseStream;
use syn::{Expr, LitStr, Path, Token, Type};

use crate::nearest::nearest;
use crate::problems::Problems;

const OPTIONS: [&str; 20] = [
    "key",
    "ttl",
    "store",
    "scope",
    "lease",
    "timeout",
    "in_progress",
    "on_error",
    "error_ttl",
    "on_crash",
    "max_attempts",
    "fingerprint",
    "missing_key",
    "on_store_error",
    "codec",
    "on_undecodable",
    "max_result_bytes",
    "mode",
    "policy",
    "crate",
];

/// An option as the user wrote it: `name = value`.
pub(crate) struct Arg<T> {
    pub(crate) name: Ident,
    pub(crate) value: T,
}

#[derive(Default)]
pub(crate) struct Args {
    pub(crate) key: Option<Arg<Expr>>,
    pub(crate) ttl: Option<Arg<Expr>>,
    pub(crate) store: Option<Arg<Expr>>,
    pub(crate) scope: Option<Arg<Expr>>,
    pub(crate) lease: Option<Arg<Expr>>,
    pub(crate) timeout: Option<Arg<Expr>>,
    pub(crate) in_progress: Option<Arg<Expr>>,
    pub(crate) on_error: Option<Arg<Expr>>,
    pub(crate) error_ttl: Option<Arg<Expr>>,
    pub(crate) on_crash: Option<Arg<Expr>>,
    pub(crate) max_attempts: Option<Arg<Expr>>,
    pub(crate) fingerprint: Option<Arg<Expr>>,
    pub(crate) missing_key: Option<Arg<Expr>>,
    pub(crate) on_store_error: Option<Arg<Expr>>,
    pub(crate) codec: Option<Arg<Type>>,
    pub(crate) on_undecodable: Option<Arg<Expr>>,
    pub(crate) max_result_bytes: Option<Arg<Expr>>,
    pub(crate) mode: Option<Arg<Expr>>,
    pub(crate) policy: Option<Arg<Expr>>,
    pub(crate) krate: Option<Arg<Path>>,
    /// Names of all options that the user wrote, including options whose value can't be read.
    given: Vec<String>,
    /// Options that the user probably meant by a misspelt name. No further message reports these options as missing.
    meant: Vec<&'static str>,
}

impl Args {
    fn is_given(&self, name: &str) -> bool {
        self.given.iter().any(|given| given == name)
    }

    pub(crate) fn is_missing(&self, name: &str) -> bool {
        !self.is_given(name) && !self.meant.contains(&name)
    }
}

/// Reads the options. Collects a problem for each option that can't be read, and continues after it.
pub(crate) fn args(input: ParseStream<'_>, problems: &mut Problems) -> Args {
    let mut args = Args::default();
    while !input.is_empty() {
        if let Err(problem) = option(input, &mut args, problems) {
            problems.push(problem);
            skip_value(input);
        } else if !input.is_empty() && !input.peek(Token![,]) {
            problems.push(missing_comma(input, &mut args));
            skip_value(input);
        }
        // The next token is a comma, or the input has ended: after a mistake, `skip_value` stops at the comma before
        // the next option.
        let _ = input.parse::<Token![,]>();
    }
    args
}

fn option(input: ParseStream<'_>, args: &mut Args, problems: &mut Problems) -> syn::Result<()> {
    if input.peek(LitStr) {
        args.meant.push("key");
        return Err(input.error("name the option, for example `key = \"order:{event.id}\"`"));
    }
    // Reads the name of the option, and looks it up.
    let name = Ident::parse_any(input).map_err(|error| {
        syn::Error::new(error.span(), format!("write options as `name = value`, for example `{}`", example("key")))
    })?;
    let word = name.unraw().to_string();
    if !OPTIONS.contains(&word.as_str()) {
        let meant = meant(&word);
        args.meant.extend(meant);
        return Err(syn::Error::new(name.span(), unknown(&word, meant)));
    }
    if args.is_given(&word) {
        // The problem is collected instead of returned, so that the value is still read, and an error in the value is
        // reported, too.
        problems.at(name.span(), format_args!("`{word}` is given twice; keep one of them"));
    }
    args.given.push(word.clone());
    // Requires a value. In `name == …`, the option `name` has no value, because `==` is a comparison.
    if !input.peek(Token![=]) || input.peek(Token![==]) {
        return Err(syn::Error::new(name.span(), format!("`{word}` has no value; write `{}`", example(&word))));
    }
    input.parse::<Token![=]>()?;
    match word.as_str() {
        "key" => set_once(&mut args.key, name, input),
        "ttl" => set_once(&mut args.ttl, name, input),
        "store" => set_once(&mut args.store, name, input),
        "scope" => set_once(&mut args.scope, name, input),
        "lease" => set_once(&mut args.lease, name, input),
        "timeout" => set_once(&mut args.timeout, name, input),
        "in_progress" => set_once(&mut args.in_progress, name, input),
        "on_error" => set_once(&mut args.on_error, name, input),
        "error_ttl" => set_once(&mut args.error_ttl, name, input),
        "on_crash" => set_once(&mut args.on_crash, name, input),
        "max_attempts" => set_once(&mut args.max_attempts, name, input),
        "fingerprint" => set_once(&mut args.fingerprint, name, input),
        "missing_key" => set_once(&mut args.missing_key, name, input),
        "on_store_error" => set_once(&mut args.on_store_error, name, input),
        "codec" => set_once(&mut args.codec, name, input),
        "on_undecodable" => set_once(&mut args.on_undecodable, name, input),
        "max_result_bytes" => set_once(&mut args.max_result_bytes, name, input),
        "mode" => set_once(&mut args.mode, name, input),
        "policy" => set_once(&mut args.policy, name, input),
        _ => set_once(&mut args.krate, name, input),
    }
}

fn set_once<T: Value>(slot: &mut Option<Arg<T>>, name: Ident, input: ParseStream<'_>) -> syn::Result<()> {
    if input.is_empty() || input.peek(Token![,]) {
        let word = name.unraw().to_string();
        return Err(syn::Error::new(name.span(), format!("`{word}` has no value; write `{}`", example(&word))));
    }
    let value = T::read(input).map_err(|error| {
        if !input.is_empty() {
            return error;
        }
        // The error of `syn` points at the whole attribute, so this error points at the name of the option.
        syn::Error::new(name.span(), format!("can't read the value of `{}`: {error}", name.unraw()))
    })?;
    slot.get_or_insert(Arg { name, value });
    Ok(())
}

trait Value: Sized {
    fn read(input: ParseStream<'_>) -> syn::Result<Self>;
}

impl Value for Expr {
    fn read(input: ParseStream<'_>) -> syn::Result<Self> {
        input.parse().map(ungroup)
    }
}

impl Value for Type {
    fn read(input: ParseStream<'_>) -> syn::Result<Self> {
        no_string(input, "`codec` names a type; write it without quotes")?;
        input.parse()
    }
}

impl Value for Path {
    fn read(input: ParseStream<'_>) -> syn::Result<Self> {
        no_string(input, "`crate` is a path; write it without quotes")?;
        let message = "`crate` is the path to `idem_runtime`; write for example `crate = my_crate::idem_runtime`";
        Path::parse_mod_style(input).map_err(|error| syn::Error::new(error.span(), message))
    }
}

fn no_string(input: ParseStream<'_>, message: &str) -> syn::Result<()> {
    if input.peek(LitStr) { Err(input.error(message)) } else { Ok(()) }
}

/// Removes the invisible delimiters around the value of a `macro_rules!` variable.
pub(crate) fn ungroup(expr: Expr) -> Expr {
    match expr {
        Expr::Group(group) if group.attrs.is_empty() => ungroup(*group.expr),
        other => other,
    }
}

fn meant(word: &str) -> Option<&'static str> {
    // Names that other libraries use for an option are listed, because `nearest` finds no similar option for these
    // names.
    let elsewhere = match word {
        "expires" | "expires_in" | "expiry" | "retention" => Some("ttl"),
        "id" | "idempotency_key" => Some("key"),
        "name" | "namespace" | "prefix" => Some("scope"),
        "hash" | "payload" => Some("fingerprint"),
        "retries" | "max_retries" | "attempts" => Some("max_attempts"),
        "wait" => Some("in_progress"),
        "migrate" | "migration" => Some("on_undecodable"),
        "max_run" | "time_limit" | "max_duration" => Some("timeout"),
        "max_bytes" | "max_size" | "max_result_size" => Some("max_result_bytes"),
        "shadow" | "enabled" | "dry_run" => Some("mode"),
        _ => None,
    };
    elsewhere.or_else(|| nearest(word, &OPTIONS))
}

fn unknown(word: &str, meant: Option<&str>) -> String {
    match meant {
        Some(option) => format!("unknown option `{word}`; did you mean `{option}`?"),
        None => format!("unknown option `{word}`; the options are `{}`", OPTIONS.join("`, `")),
    }
}

fn missing_comma(input: ParseStream<'_>, args: &mut Args) -> syn::Error {
    let word = input.cursor().ident().map(|(word, _)| word);
    match word.as_ref().and_then(|word| OPTIONS.into_iter().find(|option| word == option)) {
        Some(option) => {
            args.meant.push(option);
            input.error(format!("write a comma before `{option}`"))
        }
        None => input.error("write a comma here, or remove what follows the value"),
    }
}

/// Skips to the next option: a comma, a word and `=`.
fn skip_value(input: ParseStream<'_>) {
    while !input.is_empty() {
        let ahead = input.fork();
        let comma = ahead.parse::<Token![,]>().is_ok();
        let word = ahead.call(Ident::parse_any).is_ok();
        if comma && (ahead.is_empty() || word && ahead.peek(Token![=]) && !ahead.peek(Token![==])) {
            return;
        }
        if input.parse::<TokenTree>().is_err() {
            return;
        }
    }
}

/// Returns an example of the option, for messages.
pub(crate) fn example(option: &str) -> &'static str {
    match option {
        "key" => "key = \"order:{event.id}\"",
        "ttl" => "ttl = \"7d\"",
        "store" => "store = app.store",
        "scope" => "scope = \"orders\"",
        "lease" => "lease = \"30s\"",
        "timeout" => "timeout = \"10m\"",
        "in_progress" => "in_progress = wait(\"10s\")",
        "on_error" => "on_error = record",
        "error_ttl" => "error_ttl = \"1h\"",
        "on_crash" => "on_crash = fail",
        "max_attempts" => "max_attempts = 5",
        "fingerprint" => "fingerprint = event",
        "missing_key" => "missing_key = run",
        "on_store_error" => "on_store_error = run",
        "codec" => "codec = Json",
        "on_undecodable" => "on_undecodable = migrate",
        "max_result_bytes" => "max_result_bytes = 65536",
        "mode" => "mode = shadow",
        "policy" => "policy = app.policy",
        _ => "crate = my_crate::idem_runtime",
    }
}
