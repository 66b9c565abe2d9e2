//! The rules for the options of the attribute, and for the function below the attribute.

use std::fmt::Display;
use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Expr, ExprLit, ExprMacro, ExprUnary, GenericArgument, Lit, LitStr, Path, PathArguments, Type, UnOp};

use crate::duration;
use crate::function::{Function, Handler};
use crate::nearest::{distance, nearest};
use crate::parse::{Arg, Args, example, ungroup};
use crate::problems::Problems;
use crate::template::{self, Part};

const DEFAULT_LEASE: Duration = Duration::from_secs(30);
const MIN_LEASE: Duration = Duration::from_millis(100);
const MAX_SCOPE_BYTES: usize = 200;

/// A use of the attribute that complies with every rule.
pub(crate) struct Call {
    pub(crate) handler: Handler,
    pub(crate) output: Output,
    pub(crate) krate: Option<Path>,
    pub(crate) key: Vec<Part>,
    pub(crate) store: Expr,
    pub(crate) scope: Option<Scope>,
    pub(crate) policy: Base,
    pub(crate) settings: Vec<Setting>,
    pub(crate) on_error: OnError,
    /// The future that settles the doubt about an earlier attempt.
    pub(crate) reconciler: Option<Expr>,
    pub(crate) fingerprint: Option<Expr>,
    pub(crate) codec: Option<Type>,
}

/// The return type of the function, and the tokens at which the compiler reports problems of its parts.
pub(crate) struct Output {
    pub(crate) ty: Type,
    pub(crate) value: Span,
    pub(crate) error: Span,
}

/// The scope that the user wrote.
pub(crate) struct Scope {
    pub(crate) name: ScopeName,
    pub(crate) shared: bool,
}

pub(crate) enum ScopeName {
    Literal(LitStr),
    /// A `concat!(..)` or `stringify!(..)`, whose text the compiler checks after it expands the macro.
    Made(ExprMacro),
}

/// The policy that the other options change.
pub(crate) enum Base {
    Ttl(Time),
    Policy(Expr, Option<Time>),
}

pub(crate) enum Time {
    Literal(Duration),
    Computed(Expr),
}

/// An option that becomes a call of the method of `Policy` with the same name.
pub(crate) enum Setting {
    Lease(Time),
    Timeout(Time),
    Wait(Time),
    ErrorTtl(Time),
    Attempts(Expr),
    /// A method of `Policy`, then the enum and the variant that the method gets as its argument.
    Choice(&'static str, &'static str, &'static str),
    /// The function that migrates results.
    Migrate(Expr),
    ResultBytes(Expr),
}

pub(crate) enum OnError {
    Release,
    Uncertain,
    Record(Span),
    Decide(Expr),
}

/// Checks every rule and collects every problem. Returns `None` only if there is a problem.
pub(crate) fn call(args: Args, function: &Function, problems: &mut Problems) -> Option<Call> {
    missing(&args, problems);
    if let Some(span) = function.repeated() {
        problems.at(span, "`#[idempotent]` stands here twice; keep one of them");
    }
    if args.is_missing("scope") {
        own_scope(function, problems);
    }
    let default_lease = (args.is_missing("lease") && args.is_missing("policy")).then_some(DEFAULT_LEASE);
    // All options are checked even after a problem, so that one compilation reports every problem.
    let handler = handler(function, problems);
    let output = handler.as_ref().and_then(|handler| output(function, handler, problems));
    let names = function.bound_names();
    let key = args.key.and_then(|arg| problems.note(key(arg, names.as_deref())));
    let store = args.store.and_then(|arg| problems.note(place(arg)));
    let lease = args.lease.and_then(|arg| problems.note(lease(arg)));
    // The lease is known if it is a literal or the default; a literal `ttl` is then compared with it.
    let known_lease = match &lease {
        Some(Time::Literal(lease)) => Some(*lease),
        _ => default_lease,
    };
    let ttl = args.ttl.and_then(|arg| problems.note(ttl(arg, known_lease)));
    let policy = match args.policy {
        Some(arg) => problems.note(place(arg)).map(|policy| Base::Policy(policy, ttl)),
        None => ttl.map(Base::Ttl),
    };
    let scope = args.scope.and_then(|arg| problems.note(scope(arg)));
    let on_error = args.on_error.map_or(Some(OnError::Release), |arg| problems.note(on_error(arg)));
    let mut settings: Vec<_> = lease.map(Setting::Lease).into_iter().collect();
    settings.extend(args.error_ttl.and_then(|arg| problems.note(error_ttl(arg))));
    settings.extend(args.timeout.and_then(|arg| problems.note(timeout(arg))));
    settings.extend(args.in_progress.and_then(|arg| problems.note(in_progress(arg))));
    settings.extend(args.max_attempts.and_then(|arg| problems.note(max_attempts(arg))));
    let on_crash = args.on_crash.and_then(|arg| problems.note(on_crash(arg)));
    let reconciler = match on_crash {
        Some(OnCrash::Choice(choice)) => {
            settings.push(choice);
            None
        }
        Some(OnCrash::Reconcile(reconciler)) => Some(reconciler),
        None => None,
    };
    // Options that take one of two words.
    let choices = [
        (args.missing_key, "missing_key", "MissingKey", [("reject", "Reject"), ("run", "Run")]),
        (args.on_store_error, "on_store_error", "OnStoreError", [("fail", "Fail"), ("run", "Run")]),
    ];
    for (arg, option, name, variants) in choices {
        let word = arg.and_then(|arg| problems.note(choose(option, &arg.value, variants.map(|(word, _)| word))));
        let variant = variants.iter().find(|(known, _)| word == Some(known));
        settings.extend(variant.map(|(_, variant)| Setting::Choice(option, name, variant)));
    }
    settings.extend(args.on_undecodable.and_then(|arg| problems.note(on_undecodable(arg, function))));
    settings.extend(args.max_result_bytes.and_then(|arg| problems.note(max_result_bytes(arg))));
    settings.extend(args.mode.and_then(|arg| problems.note(mode(&arg))));
    // A missing part has caused a problem above, so this function just returns `None`.
    Some(Call {
        handler: handler?,
        output: output?,
        krate: args.krate.map(|arg| arg.value),
        key: key?,
        store: store?,
        scope,
        policy: policy?,
        settings,
        on_error: on_error?,
        reconciler,
        fingerprint: args.fingerprint.map(|arg| arg.value),
        codec: args.codec.map(|arg| arg.value),
    })
}

fn missing(args: &Args, problems: &mut Problems) {
    // A `policy` contains a `ttl`, so a use with the option `policy` does not require the option `ttl`.
    let is_missing = |name: &&str| args.is_missing(name) && (*name != "ttl" || args.is_missing("policy"));
    let names: Vec<_> = ["key", "ttl", "store"].into_iter().filter(is_missing).collect();
    if !names.is_empty() {
        let examples: Vec<_> = names.iter().map(|name| example(name)).collect();
        let (names, examples) = (names.join("`, `"), examples.join(", "));
        // The span is the whole attribute, because a missing option has no token.
        problems.at(Span::call_site(), format_args!("missing `{names}`; write for example `{examples}`"));
    }
}

fn handler(function: &Function, problems: &mut Problems) -> Option<Handler> {
    let handler = function.handler();
    if handler.is_none() {
        problems.at(function.signature.fn_token.span, "`#[idempotent]` needs an `async fn`; write `async fn` here");
    }
    handler
}

fn output(function: &Function, handler: &Handler, problems: &mut Problems) -> Option<Output> {
    let Some(ty) = handler.output.clone() else {
        let span = function.signature.paren_token.span.close();
        problems.at(span, "`#[idempotent]` needs a result to record; write `-> Result<T, E>` behind the arguments");
        return None;
    };
    let mut types = type_arguments(&ty);
    let (value, error) = (types.next(), types.next());
    // The value is decoded from a record, so it can't borrow. The error type is checked later, if errors are recorded.
    let borrowed = value.map_or_else(|| find_reference(&ty), find_reference);
    if let Some(span) = borrowed {
        problems.at(span, "a replay has nothing to borrow from; return an owned value, for example `String`");
    }
    let (value, error) = (value.map_or_else(|| blamed(&ty), blamed), error.map_or_else(|| blamed(&ty), blamed));
    drop(types);
    Some(Output { ty, value, error })
}

fn type_arguments(ty: &Type) -> impl Iterator<Item = &Type> {
    let last = match ty {
        Type::Path(path) => path.path.segments.last(),
        _ => None,
    };
    let arguments = match last.map(|last| &last.arguments) {
        Some(PathArguments::AngleBracketed(arguments)) => Some(&arguments.args),
        _ => None,
    };
    arguments.into_iter().flatten().filter_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    })
}

fn find_reference(ty: &Type) -> Option<Span> {
    fn find(tokens: TokenStream) -> Option<Span> {
        tokens.into_iter().find_map(|token| match token {
            TokenTree::Punct(punct) if punct.as_char() == '&' => Some(punct.span()),
            TokenTree::Group(group) => find(group.stream()),
            _ => None,
        })
    }
    find(ty.to_token_stream())
}

/// Returns the token at which the compiler should report that a type lacks a trait.
fn blamed(ty: &Type) -> Span {
    match ty {
        Type::Path(path) => path.path.segments.last().map_or_else(|| ty.span(), |last| last.ident.span()),
        Type::Group(group) => blamed(&group.elem),
        _ => ty.span(),
    }
}

fn key(arg: Arg<Expr>, names: Option<&[String]>) -> syn::Result<Vec<Part>> {
    let constant = "every call would have the same key; write a template such as `key = \"order:{event.id}\"`";
    match arg.value {
        Expr::Lit(ExprLit { lit: Lit::Str(template), .. }) => template::parse(&template, names),
        Expr::Lit(literal) => fail(literal, constant),
        Expr::Macro(call) if call.mac.path.is_ident("concat") || call.mac.path.is_ident("stringify") => {
            fail(call, constant)
        }
        Expr::Tuple(tuple) if tuple.elems.iter().all(|elem| matches!(elem, Expr::Lit(_))) => fail(tuple, constant),
        Expr::Tuple(tuple) => {
            let mut parts = Vec::new();
            for elem in tuple.elems {
                if !parts.is_empty() {
                    parts.push(Part::Text(":".to_owned()));
                }
                parts.push(Part::Value(elem));
            }
            Ok(parts)
        }
        value => Ok(vec![Part::Value(value)]),
    }
}

fn time(arg: Arg<Expr>) -> syn::Result<Time> {
    let Arg { name, value } = arg;
    match ungroup(value) {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => {
            let duration = duration::parse(&text.value());
            duration.map(Time::Literal).map_err(|message| syn::Error::new(text.span(), message))
        }
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) if !number.suffix().is_empty() => {
            let text = format!("{}{}", number.base10_digits(), number.suffix());
            fail(number, unquoted(&text))
        }
        Expr::Lit(ExprLit { lit: Lit::Float(number), .. }) if !number.suffix().is_empty() => {
            let text = format!("{}{}", number.base10_digits(), number.suffix());
            fail(number, unquoted(&text))
        }
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => {
            let message = format!("a duration needs a unit; write `\"{}s\"`, or a `Duration`", number.base10_digits());
            fail(number, message)
        }
        Expr::Lit(literal) => {
            let message = format!("`{name}` is a duration; write `{}`", example(&name.to_string()));
            fail(literal, message)
        }
        value => Ok(Time::Computed(value)),
    }
}

/// Returns the message about a duration without quotes, which the compiler reads as a number with a suffix.
fn unquoted(text: &str) -> String {
    match duration::parse(text) {
        Ok(duration) => format!("a duration is written in quotes; write `\"{}\"`", duration::show(duration)),
        Err(message) => format!("a duration is written in quotes, and {message}"),
    }
}

fn lease(arg: Arg<Expr>) -> syn::Result<Time> {
    let written = arg.value.clone();
    match time(arg)? {
        Time::Literal(lease) if lease < MIN_LEASE => {
            let (lease, min) = (duration::show(lease), duration::show(MIN_LEASE));
            fail(written, format!("a lease of {lease} can't be renewed in time; write at least `{min}`"))
        }
        lease => Ok(lease),
    }
}

fn timeout(arg: Arg<Expr>) -> syn::Result<Setting> {
    let written = arg.value.clone();
    match time(arg)? {
        Time::Literal(timeout) if timeout.is_zero() => {
            fail(written, "a `timeout` of zero would cancel every body; write a longer one, for example `10m`")
        }
        timeout => Ok(Setting::Timeout(timeout)),
    }
}

fn ttl(arg: Arg<Expr>, lease: Option<Duration>) -> syn::Result<Time> {
    let written = arg.value.clone();
    let Time::Literal(ttl) = time(arg)? else { return Ok(Time::Computed(written)) };
    if ttl.is_zero() {
        let message = "a `ttl` of zero would forget every result at once; write more than the broker keeps a message, \
                       for example `7d`";
        return fail(written, message);
    }
    match lease.map(|lease| lease / 3) {
        Some(beat) if ttl < beat => {
            let (shown, beat) = (duration::show(ttl), duration::show(beat));
            let longest = duration::show((ttl * 3).max(MIN_LEASE));
            let message = format!(
                "a `ttl` of {shown} is shorter than the time between two renewals of the lease ({beat}); write a longer \
                 `ttl`, or a `lease` of at most `{longest}`"
            );
            fail(written, message)
        }
        _ => Ok(Time::Literal(ttl)),
    }
}

fn error_ttl(arg: Arg<Expr>) -> syn::Result<Setting> {
    let written = arg.value.clone();
    match time(arg)? {
        Time::Literal(ttl) if ttl.is_zero() => fail(
            written,
            "an `error_ttl` of zero would forget every error; write a longer one, or `on_error = release`",
        ),
        ttl => Ok(Setting::ErrorTtl(ttl)),
    }
}

/// Reads a store or a policy: any expression except a literal.
fn place(arg: Arg<Expr>) -> syn::Result<Expr> {
    let Arg { name, value } = arg;
    match value {
        Expr::Lit(literal) => {
            let message = format!("`{name}` names a value; write for example `{}`", example(&name.to_string()));
            fail(literal, message)
        }
        value => Ok(value),
    }
}

fn fail<T>(tokens: impl ToTokens, message: impl Display) -> syn::Result<T> {
    Err(syn::Error::new_spanned(tokens, message))
}

/// Reports a function whose default scope (module path and name) another function may also have.
///
/// A function in an `impl` or a `trait` is one of these functions. If its signature does not show that it is in an
/// `impl` or a `trait`, the compiler detects this later, when it resolves names.
fn own_scope(function: &Function, problems: &mut Problems) {
    let signature = &function.signature;
    let write = format!("write for example `scope = \"orders::{}\"`", signature.ident.unraw());
    let method = "`#[idempotent]` in an `impl` or a `trait` needs a scope of its own: functions of one name in one module would \
                  share the default";
    let generic = "a generic function needs a scope of its own, which all its instantiations share: the key has to tell them \
                   apart";
    if let Some(receiver) = signature.receiver() {
        problems.at(receiver.self_token.span, format_args!("{method}; {write}"));
    } else if let Some(span) = function.mentions_self() {
        problems.at(span, format_args!("{method}; {write}"));
    } else if signature.generics.lifetimes().any(|parameter| parameter.lifetime.ident == "async_trait") {
        problems.at(signature.ident.span(), format_args!("{method}; {write}"));
    } else if let Some(span) = function.generic() {
        problems.at(span, format_args!("{generic}; {write}"));
    }
}

fn scope(arg: Arg<Expr>) -> syn::Result<Scope> {
    let (value, shared) = match arg.value {
        Expr::Call(call) => {
            let Some(word) = word(&call.func).filter(|word| distance(&word.to_string(), "shared") <= 2) else {
                return fail(call, SCOPE);
            };
            if word != "shared" {
                return fail(word, format!("unknown `{word}`; did you mean `shared`?"));
            }
            let mut arguments = call.args.into_iter();
            let (Some(name), None) = (arguments.next(), arguments.next()) else {
                let message = "`shared` takes one name; write for example `scope = shared(\"orders\")`";
                return Err(syn::Error::new(call.paren_token.span.join(), message));
            };
            (ungroup(name), true)
        }
        value => (value, false),
    };
    let name = match value {
        Expr::Lit(ExprLit { lit: Lit::Str(scope), .. }) => ScopeName::Literal(scope_name(scope)?),
        Expr::Macro(made) if made.mac.path.is_ident("concat") || made.mac.path.is_ident("stringify") => {
            ScopeName::Made(made)
        }
        value if word(&value).is_some_and(|word| word == "shared") => {
            return fail(
                value,
                "`shared` needs the name that is shared; write for example `scope = shared(\"orders\")`",
            );
        }
        value => return fail(value, SCOPE),
    };
    Ok(Scope { name, shared })
}

const SCOPE: &str = "`scope` names the handler for as long as its records live; write a string literal, for example \
                     `scope = \"orders\"`, or `scope = shared(\"orders\")` on each of several handlers that share it";

fn scope_name(scope: LitStr) -> syn::Result<LitStr> {
    let text = scope.value();
    if text.is_empty() {
        return fail(scope, "an empty `scope` names nothing; write for example `scope = \"orders\"`");
    }
    if text.len() > MAX_SCOPE_BYTES {
        return fail(scope, format!("this `scope` has {} bytes; write at most {MAX_SCOPE_BYTES}", text.len()));
    }
    if text.contains('/') {
        return fail(scope, format!("`/` separates scope and key; write `{}`", text.replace('/', "::")));
    }
    if text.contains(char::is_control) {
        return fail(scope, "a `scope` has no control characters; write a printable separator such as `::`");
    }
    if text.starts_with("idem::") {
        return fail(
            scope,
            "scopes that begin with `idem::` belong to the library; write for example `scope = \"orders\"`",
        );
    }
    Ok(scope)
}

fn in_progress(arg: Arg<Expr>) -> syn::Result<Setting> {
    let (called, arguments) = match arg.value {
        Expr::Call(call) => (*call.func, Some((call.paren_token.span.join(), call.args))),
        value => (value, None),
    };
    let word = choose("in_progress", &called, ["reject", "wait"])?;
    let (span, arguments) = match (word, arguments) {
        ("reject", None) => return Ok(Setting::Choice("in_progress", "InProgress", "Reject")),
        ("reject", Some((span, _))) => {
            return Err(syn::Error::new(span, "`reject` takes no argument; write `in_progress = reject`"));
        }
        (_, None) => return fail(called, "`wait` needs to know how long; write `wait(\"10s\")`"),
        (_, Some(arguments)) => arguments,
    };
    let mut arguments = arguments.into_iter();
    let (Some(value), None) = (arguments.next(), arguments.next()) else {
        return Err(syn::Error::new(span, "`wait` takes one duration; write `wait(\"10s\")`"));
    };
    let written = value.clone();
    match time(Arg { name: arg.name, value })? {
        Time::Literal(wait) if wait.is_zero() => {
            fail(written, "a wait of zero is no wait; write a longer one, or `in_progress = reject`")
        }
        wait => Ok(Setting::Wait(wait)),
    }
}

/// The value of `on_crash`.
enum OnCrash {
    Choice(Setting),
    Reconcile(Expr),
}

fn on_crash(arg: Arg<Expr>) -> syn::Result<OnCrash> {
    let (called, arguments) = match arg.value {
        Expr::Call(call) => (*call.func, Some((call.paren_token.span.join(), call.args))),
        value => (value, None),
    };
    let Some(word) = known(&called, ["retry", "fail", "reconcile"])? else {
        return fail(called, "`on_crash` is `retry`, `fail`, or `reconcile(find_charge(app, order))`");
    };
    let choice = |variant| Ok(OnCrash::Choice(Setting::Choice("on_crash", "OnCrash", variant)));
    let (span, arguments) = match (word, arguments) {
        ("retry", None) => return choice("Retry"),
        ("fail", None) => return choice("Fail"),
        ("reconcile", Some(arguments)) => arguments,
        ("reconcile", None) => {
            return fail(called, "`reconcile` needs a future; write for example `reconcile(find_charge(app, order))`");
        }
        (word, Some((span, _))) => {
            return Err(syn::Error::new(span, format!("`{word}` takes no argument; write `on_crash = {word}`")));
        }
        (_, None) => unreachable!("every word is matched above"),
    };
    let mut arguments = arguments.into_iter();
    let (Some(future), None) = (arguments.next(), arguments.next()) else {
        return Err(syn::Error::new(
            span,
            "`reconcile` takes one future; write for example `reconcile(find_charge(app, order))`",
        ));
    };
    match future {
        Expr::Lit(_) | Expr::Closure(_) => fail(
            future,
            "`reconcile` takes a future; write the call of an `async fn`, for example `reconcile(find_charge(app, order))`",
        ),
        Expr::Await(awaited) => {
            let base = awaited.base.to_token_stream();
            fail(
                awaited,
                format!("the future is awaited only when it is needed; leave `.await` out: `reconcile({base})`"),
            )
        }
        future => Ok(OnCrash::Reconcile(future)),
    }
}

fn max_attempts(arg: Arg<Expr>) -> syn::Result<Setting> {
    let fail = |message| fail(&arg.value, message);
    match &arg.value {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => match number.base10_parse::<u32>() {
            Ok(0) => fail("with no attempts the body could never run; write at least 1, or leave `max_attempts` out"),
            Ok(_) => Ok(Setting::Attempts(arg.value)),
            Err(_) => fail("`max_attempts` is a `u32`; write a smaller number, or leave it out for no limit"),
        },
        Expr::Lit(_) | Expr::Unary(_) => {
            fail("`max_attempts` is a positive integer; write for example `max_attempts = 5`")
        }
        _ => Ok(Setting::Attempts(arg.value)),
    }
}

fn max_result_bytes(arg: Arg<Expr>) -> syn::Result<Setting> {
    let fail = |message| fail(&arg.value, message);
    match &arg.value {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => match number.base10_parse::<u64>() {
            // `usize` has at least 32 bits on the supported targets.
            Ok(bytes) if u32::try_from(bytes).is_ok() => Ok(Setting::ResultBytes(arg.value)),
            _ => fail("`max_result_bytes` is less than 4 GiB; no store takes as much"),
        },
        Expr::Lit(_) | Expr::Unary(ExprUnary { op: UnOp::Neg(_), .. }) => {
            fail("`max_result_bytes` is a number of bytes; write for example `max_result_bytes = 64 * 1024`")
        }
        _ => Ok(Setting::ResultBytes(arg.value)),
    }
}

fn mode(arg: &Arg<Expr>) -> syn::Result<Setting> {
    let modes = [("enforce", "Enforce"), ("shadow", "Shadow"), ("off", "Off")];
    if let Expr::Path(path) = &arg.value
        && let Some(last) = path.path.segments.last()
        && let Some((word, _)) = modes.iter().find(|(_, variant)| last.ident == variant)
    {
        return fail(&arg.value, format!("`mode` takes a word; write `{word}`"));
    }
    let Some(word) = known(&arg.value, modes.map(|(word, _)| word))? else {
        return fail(
            &arg.value,
            "`mode` is `enforce`, `shadow` or `off`; to switch it at run time write `policy = POLICY`, and for the policy \
             `Policy::new(..).mode_switch(&SWITCH)`",
        );
    };
    let variant = modes.iter().find(|(known, _)| *known == word).map_or("Enforce", |(_, variant)| variant);
    Ok(Setting::Choice("mode", "Mode", variant))
}

/// Reads an option whose value is one of two words.
fn choose(option: &str, value: &Expr, words: [&'static str; 2]) -> syn::Result<&'static str> {
    if let Some(found) = known(value, words)? {
        return Ok(found);
    }
    let [first, second] = words.map(|word| if word == "wait" { "wait(\"10s\")" } else { word });
    fail(value, format!("`{option}` is `{first}` or `{second}`"))
}

/// Returns the word in `words` that the user wrote. Returns an error if the user wrote a similar word.
fn known<const N: usize>(value: &Expr, words: [&'static str; N]) -> syn::Result<Option<&'static str>> {
    if let Some(word) = word(value) {
        if let Some(found) = words.iter().find(|known| word == *known) {
            return Ok(Some(found));
        }
        if let Some(meant) = nearest(&word.to_string(), &words) {
            return fail(value, format!("unknown `{word}`; did you mean `{meant}`?"));
        }
    }
    match string(value).filter(|text| words.contains(&text.as_str())) {
        Some(text) => fail(value, format!("write `{text}` without quotes")),
        None => Ok(None),
    }
}

fn on_error(arg: Arg<Expr>) -> syn::Result<OnError> {
    let fail = |message| fail(&arg.value, message);
    match &arg.value {
        Expr::Path(path) => {
            let last = path.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default();
            match (word(&arg.value), last.as_str()) {
                (Some(_), "release") => return Ok(OnError::Release),
                (Some(_), "uncertain") => return Ok(OnError::Uncertain),
                (Some(word), "record") => return Ok(OnError::Record(word.span())),
                (_, "Release" | "Record" | "Uncertain") => {
                    return fail(format!("`on_error` takes a word or a function; write `{}`", last.to_lowercase()));
                }
                (Some(word), name) => {
                    let close = |meant: &&&str| distance(name, meant) <= 2;
                    if let Some(meant) = ["release", "record", "uncertain"].iter().find(close) {
                        return fail(format!(
                            "unknown `{word}`; did you mean `{meant}`? (for a function of this name write `self::{word}`)"
                        ));
                    }
                }
                (None, _) => {}
            }
            Ok(OnError::Decide(arg.value))
        }
        Expr::Lit(_) | Expr::Tuple(_) | Expr::Array(_) => match string(&arg.value).as_deref() {
            Some(text @ ("release" | "record" | "uncertain")) => fail(format!("write `{text}` without quotes")),
            _ => fail("`on_error` is `release`, `record`, `uncertain`, or a function `fn(&E) -> OnError`".to_owned()),
        },
        _ => Ok(OnError::Decide(arg.value)),
    }
}

fn on_undecodable(arg: Arg<Expr>, function: &Function) -> syn::Result<Setting> {
    let fail = |message| fail(&arg.value, message);
    let signature = "fn(Undecodable<'_>) -> Result<Vec<u8>, CodecError>";
    match &arg.value {
        Expr::Path(path) => {
            let last = path.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default();
            match (word(&arg.value), last.as_str()) {
                (Some(_), "error") => return Ok(Setting::Choice("on_undecodable", "OnUndecodable", "Error")),
                (_, "Error") => {
                    return fail("`on_undecodable` takes a word or a function; write `error`".to_owned());
                }
                (_, "Migrate") => {
                    return fail(
                        "`on_undecodable` takes a word or a function; write for example `on_undecodable = migrate`"
                            .to_owned(),
                    );
                }
                (Some(word), name) if name == "fail" || distance(name, "error") <= 2 => {
                    return fail(format!(
                        "unknown `{word}`; did you mean `error`? (for a function of this name write `self::{word}`)"
                    ));
                }
                (Some(word), _) if function.argument_names().any(|argument| argument == word) => {
                    return fail(format!("`{word}` is an argument; name a function, `{signature}`"));
                }
                _ => {}
            }
            Ok(Setting::Migrate(arg.value))
        }
        Expr::Closure(_) => fail(format!("a closure can't stand here; name a function, `{signature}`")),
        Expr::Call(call) if matches!(*call.func, Expr::Path(_)) => {
            let function = call.func.to_token_stream().to_string().replace(' ', "");
            fail(format!("name the function without calling it; write `{function}`"))
        }
        _ => match string(&arg.value).as_deref() {
            Some("error") => fail("write `error` without quotes".to_owned()),
            _ => fail(format!("`on_undecodable` is `error`, or a function `{signature}`")),
        },
    }
}

/// Returns the word, if the expression consists of one word only.
fn word(expr: &Expr) -> Option<&Ident> {
    match expr {
        Expr::Path(path) if path.qself.is_none() => path.path.get_ident(),
        _ => None,
    }
}

/// Returns the text, if the expression is a string.
fn string(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use syn::parse::{ParseStream, Parser};

    use super::*;
    use crate::parse;

    const REQUIRED: &str = r#"key = "{id}", ttl = "7d", store = store"#;

    fn check(args: &str) -> Result<Call, Vec<String>> {
        let function = "async fn f(store: &S, id: u32) -> Result<u32, E> { Ok(id) }";
        check_on(args, function)
    }

    fn check_on(args: &str, function: &str) -> Result<Call, Vec<String>> {
        let mut problems = Problems::default();
        let args = (|input: ParseStream<'_>| Ok(parse::args(input, &mut problems))).parse_str(args).unwrap();
        let call = call(args, &syn::parse_str(function).unwrap(), &mut problems);
        problems.check(call).map_err(|problems| problems.into_iter().map(|problem| problem.to_string()).collect())
    }

    #[track_caller]
    fn refused(more: &str, expected: &[&str]) {
        let Err(problems) = check(&format!("{REQUIRED}, {more}")) else { panic!("`{more}` is accepted") };
        assert_eq!(problems.len(), expected.len(), "{more}: {problems:#?}");
        for (problem, expected) in problems.iter().zip(expected) {
            assert!(problem.contains(expected), "{more}: {problem}");
        }
    }

    #[test]
    fn options_that_are_not_given_are_left_to_the_runtime() {
        let call = check(REQUIRED).unwrap_or_else(|problems| panic!("{problems:?}"));
        assert!(call.settings.is_empty());
        assert!(matches!(call.policy, Base::Ttl(Time::Literal(ttl)) if ttl == Duration::from_secs(7 * 86_400)));
        assert!(matches!(call.on_error, OnError::Release));
        assert!(call.scope.is_none() && call.fingerprint.is_none() && call.codec.is_none() && call.krate.is_none());
    }

    #[test]
    fn every_word_of_an_option_becomes_a_setting_of_the_policy() {
        let words = "in_progress = reject, on_crash = fail, missing_key = run, on_store_error = fail, \
                     on_undecodable = error, max_attempts = N, timeout = \"10m\", max_result_bytes = LIMIT, mode = off";
        let call = check(&format!("{REQUIRED}, {words}")).unwrap_or_else(|problems| panic!("{problems:?}"));
        let settings = call.settings.iter().map(|setting| match setting {
            Setting::Choice(method, choices, variant) => format!("{method} {choices} {variant}"),
            Setting::Attempts(_) => "attempts".to_owned(),
            Setting::Lease(_) | Setting::Timeout(_) | Setting::Wait(_) | Setting::ErrorTtl(_) => "time".to_owned(),
            Setting::Migrate(_) => "migrate".to_owned(),
            Setting::ResultBytes(_) => "bytes".to_owned(),
        });
        let expected = [
            "time",
            "in_progress InProgress Reject",
            "attempts",
            "on_crash OnCrash Fail",
            "missing_key MissingKey Run",
            "on_store_error OnStoreError Fail",
            "on_undecodable OnUndecodable Error",
            "bytes",
            "mode Mode Off",
        ];
        assert_eq!(settings.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_policy_makes_the_ttl_optional() {
        assert!(check(r#"key = "{id}", store = store, policy = P"#).is_ok());
        // The macro can't see the lease of the policy, so it accepts any `ttl` here.
        assert!(check(r#"key = "{id}", store = store, policy = P, ttl = "1s""#).is_ok());
        assert!(check(r#"key = "{id}", store = store, ttl = "1s""#).is_err());
        assert!(check(r#"key = "{id}", store = store, ttl = "1s", lease = "3s""#).is_ok());
        assert!(check(r#"key = "{id}", store = store, ttl = "1s", lease = app.lease"#).is_ok());
    }

    #[test]
    fn all_problems_of_an_attribute_are_reported_together_and_once() {
        refused("tll = 1", &["did you mean `ttl`"]);
        refused("ttl = 1, ttl = \"x\"", &["`ttl` is given twice", "`ttl` is given twice"]);
        refused("lease = \"x\", scope = \"\"", &["can't read `x`", "an empty `scope`"]);
        refused("on_error = , on_crash", &["`on_error` has no value", "`on_crash` has no value"]);
        refused("on_error = 1 2, on_crash = fial", &["write a comma", "`on_error` is", "did you mean `fail`"]);
        refused("lease = \"x\", ttl = \"1s\"", &["`ttl` is given twice", "can't read `x`"]);
        refused("in_progress = a::<b, c>(), lease = \"1ms\"", &["at least `100ms`", "`in_progress` is"]);
        let Err(problems) = check("") else { panic!("nothing is required") };
        assert_eq!(problems.len(), 1, "{problems:?}");
        // A misspelt option is not also reported as missing.
        let Err(problems) = check(r#"key = "{id}", tll = "7d", store = store"#) else { panic!("`tll` is accepted") };
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn only_a_plain_function_has_a_default_scope() {
        let args = r#"key = "{id}", ttl = "7d", store = store"#;
        let refused = |function: &str| check_on(args, function).err().unwrap_or_default();
        for plain in [
            "async fn f<'a, 'b: 'a>(a: &'a A<'b>) -> Result<(), E> {}",
            "fn f<'a>(a: &'a A) -> Pin<Box<dyn Future<Output = Result<(), E>> + Send + 'a>> { Box::pin(async move { g(a).await }) }",
            "async fn f(a: &dyn Fn(u8) -> Box<dyn A>) -> Result<(), E> { Self::f::<impl_<T>>() }",
        ] {
            assert_eq!(refused(plain), [""; 0], "{plain}");
        }
        for method in [
            "async fn f(&self) -> R<(), E> {}",
            "async fn f(self: Pin<Arc<Self>>) -> R<(), E> {}",
            "async fn f(a: Vec<[Self; 2]>) -> R<(), E> {}",
            "async fn f(a: A) -> R<Self::Value, E> {}",
            "async fn f(a: A) -> R<(), E> where Self: Sized {}",
            "fn f<'async_trait>(a: A) -> Pin<Box<dyn Future<Output = R> + Send + 'async_trait>> { Box::pin(async move {}) }",
            "async fn f<T>(&self, t: T) -> R<(), E> {}",
        ] {
            let refused = refused(method);
            assert!(matches!(&*refused, [one] if one.contains("`impl` or a `trait`")), "{method}: {refused:?}");
            assert!(refused[0].ends_with("write for example `scope = \"orders::f\"`"), "{refused:?}");
            assert!(check_on(&format!("{args}, scope = \"f\""), method).is_ok(), "{method}");
            assert!(check_on(&format!("{args}, scope = shared(\"f\")"), method).is_ok(), "{method}");
        }
        for generic in [
            "async fn f<T>(a: A) -> R<(), E> {}",
            "async fn f<'a, const N: usize>(a: A) -> R<(), E> {}",
            "async fn f(a: (u8, Option<impl A>)) -> R<(), E> {}",
        ] {
            let refused = refused(generic);
            assert!(matches!(&*refused, [one] if one.contains("generic function")), "{generic}: {refused:?}");
            assert!(check_on(&format!("{args}, scope = concat!(\"f\", 1)"), generic).is_ok(), "{generic}");
        }
        // A misspelt scope is not also reported as missing.
        let Err(problems) = check_on(&format!("{args}, scop = \"f\""), "async fn f<T>(a: A) -> R<(), E> {}") else {
            panic!("`scop` is accepted")
        };
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn wrong_numbers_durations_and_modes_are_refused() {
        refused("timeout = \"0s\"", &["a `timeout` of zero"]);
        refused("timeout = 10", &["a duration needs a unit"]);
        refused("timeout = 7d", &["written in quotes; write `\"7d\"`"]);
        refused("timeout = 1_000ms", &["written in quotes; write `\"1s\"`"]);
        refused("in_progress = wait(30s)", &["write `\"30s\"`"]);
        refused("timeout = 7days", &["in quotes, and can't read `7days` as a duration; write `7d`"]);
        refused("timeout = 1.5h", &["in quotes, and can't read `1.5h` as a duration; write whole numbers"]);
        refused("time_out = \"10m\"", &["did you mean `timeout`"]);
        refused("max_run = \"10m\"", &["did you mean `timeout`"]);
        refused("max_result_bytes = \"64k\"", &["is a number of bytes"]);
        refused("max_result_bytes = -1", &["is a number of bytes"]);
        refused("max_result_bytes = 4294967296", &["less than 4 GiB"]);
        refused("max_bytes = 1", &["did you mean `max_result_bytes`"]);
        refused("mode = shadows", &["unknown `shadows`; did you mean `shadow`?"]);
        refused("mode = \"off\"", &["write `off` without quotes"]);
        refused("mode = Mode::Shadow", &["write `shadow`"]);
        refused("mode = app.mode", &["mode_switch"]);
        for fine in ["64 * 1024", "app.limit", "1_000usize", "!0", "{ LIMIT }"] {
            assert!(check(&format!("{REQUIRED}, max_result_bytes = {fine}")).is_ok(), "{fine}");
        }
    }

    #[test]
    fn a_function_named_like_a_word_of_an_option_is_given_by_its_path() {
        refused("on_error = records", &["write `self::records`"]);
        for function in
            ["decide", "self::records", "record::decide", "|error| decide(error)", "{ decide }", "app.decide"]
        {
            assert!(check(&format!("{REQUIRED}, on_error = {function}")).is_ok(), "{function}");
        }
    }

    #[test]
    fn only_a_future_can_reconcile() {
        let call =
            check(&format!("{REQUIRED}, on_crash = reconcile(find(app, id))")).unwrap_or_else(|it| panic!("{it:?}"));
        assert!(call.reconciler.is_some() && call.settings.is_empty());
        refused("on_crash = reconcile", &["`reconcile` needs a future"]);
        refused("on_crash = reconcile()", &["takes one future"]);
        refused("on_crash = reconcile(a, b)", &["takes one future"]);
        refused("on_crash = reconcile(|| find(id))", &["takes a future"]);
        refused("on_crash = reconcile(find(id).await)", &["leave `.await` out: `reconcile(find (id))`"]);
        refused("on_crash = reconsile(find(id))", &["did you mean `reconcile`"]);
        refused("on_crash = fail(1)", &["`fail` takes no argument"]);
        refused("on_crash = find(id)", &["is `retry`, `fail`, or `reconcile("]);
        refused("on_error = uncertan", &["did you mean `uncertain`?"]);
        refused("on_error = \"uncertain\"", &["write `uncertain` without quotes"]);
        refused("error_ttl = \"0s\"", &["an `error_ttl` of zero"]);
        refused("error_ttl = 1", &["a duration needs a unit"]);
    }

    #[test]
    fn only_a_function_can_migrate_results() {
        for function in ["migrate", "self::error", "Self::migrate::<T>", "<T as Old>::migrate", "r#fn"] {
            assert!(check(&format!("{REQUIRED}, on_undecodable = {function}")).is_ok(), "{function}");
        }
        refused("on_undecodable = eror", &["did you mean `error`? (for a function of this name write `self::eror`)"]);
        refused("on_undecodable = fail", &["did you mean `error`?"]);
        refused("on_undecodable = \"error\"", &["without quotes"]);
        refused("on_undecodable = \"migrate\"", &["is `error`, or a function"]);
        refused("on_undecodable = OnUndecodable::Error", &["write `error`"]);
        refused("on_undecodable = OnUndecodable::Migrate", &["write for example `on_undecodable = migrate`"]);
        refused("on_undecodable = old::migrate()", &["write `old::migrate`"]);
        refused("on_undecodable = |recorded| migrate(recorded)", &["a closure can't stand here"]);
        refused("on_undecodable = id", &["`id` is an argument"]);
        refused("migrate = old", &["did you mean `on_undecodable`"]);
    }

    #[test]
    fn a_function_whose_output_borrows_is_refused() {
        let output =
            |output: &str| check_on(REQUIRED, &format!("async fn f() {output} {{}}")).err().unwrap_or_default();
        for fine in ["Result<T, E>", "Alias", "Alias<T>", "Result<Cow<'a, str>, E>", "Result<T, E<&'static str>>"] {
            assert_eq!(output(&format!("-> {fine}")), [""; 0], "{fine}");
        }
        for borrowed in ["Result<&str, E>", "Alias<Vec<(u8, &'a str)>>", "&'static Result<T, E>"] {
            assert!(output(&format!("-> {borrowed}"))[0].contains("nothing to borrow from"), "{borrowed}");
        }
        assert!(output("")[0].contains("write `-> Result<T, E>`"));
    }
}
