//! Turns a checked use of the attribute into tokens.
//!
//! ```text
//! Input:   #[idempotent(key = "order:{event.id}", ttl = "7d", store = app.store)]
//!          async fn ship(app: &App, event: Event) -> Result<Shipment, ShipError> { BODY }
//!
//! Output:  async fn ship(app: &App, event: Event) -> Result<Shipment, ShipError> {
//!              let output = returning::<Result<Shipment, ShipError>>().result().value().error();
//!              let key = {                                    // Before BODY moves `event`.
//!                  let mut key = { static SCOPE: Scope = ..; key_of_values(&SCOPE, output) };
//!                  text(&mut key, "order:");
//!                  match &(event.id) { part => Part(part).append(&mut key, None) }
//!                  key.build()
//!              };
//!              let policy = const { Policy::new(..) }; // A constant: all its parts are literals.
//!              let operation = app.store.operation(key, policy); // Gets its own store handle: BODY may move `app`.
//!              let handler = output.values(codec);
//!              let never = never::<Result<Shipment, ShipError>>; // BODY may define another `Shipment`.
//!              return handler.on(operation).run(async move {
//!                  let _ = &event; // Owned by the body: dropped before the key is freed. `app` is a reference.
//!                  if false { return never(); }
//!                  BODY
//!              }).await;
//!          }
//! ```
//!
//! Generated locals have the hygiene of this macro, so they shadow no name of the user. The names of generated locals
//! are unusual, too: if the user had a constant called `NAME`, `let NAME = …` would compare with that constant instead
//! of binding a new name. Items are not hygienic, so each `static` stands in a block without tokens of the user, and
//! traits are imported without a name.

use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Expr, GenericArgument, PathArguments, Type, parse_quote_spanned};

use crate::function::Function;
use crate::template::Part;
use crate::validate::{Base, Call, OnError, Scope, ScopeName, Setting, Time};

pub(crate) fn expand(call: &Call, function: &Function) -> TokenStream {
    let site = Span::mixed_site();
    let expansion = Expansion { call, function, site };
    let krate = call.krate.as_ref().map_or_else(|| quote_spanned!(site=> ::idem_runtime), ToTokens::to_token_stream);
    let output = expansion.output();
    let operation = expansion.operation();
    let run = expansion.run(&operation);
    // The output has a single import, so that a wrong path to the crate causes only one error.
    let body = quote_spanned! {site=>
        use #krate::__private as __idem;
        #output
        #operation
        #run
    };
    function.with_body(&call.handler.frame(body))
}

/// Makes code that names the function but never runs, so that the compiler checks the name. The name has the hygiene of
/// a macro, so it can't resolve to an argument with the same name.
pub(crate) fn named(function: &TokenStream) -> TokenStream {
    let site = Span::mixed_site();
    let name = function.clone().into_iter().map(|mut token| {
        token.set_span(site);
        token
    });
    let name: TokenStream = name.collect();
    quote_spanned! {site=>
        if false {
            __idem::function(#name);
        }
    }
}

struct Expansion<'a> {
    call: &'a Call,
    function: &'a Function,
    /// Span of the generated names. The span gives the names their hygiene.
    site: Span,
}

impl Expansion<'_> {
    /// Makes `let operation = ..;`, with all code that must run before the body takes the arguments.
    fn operation(&self) -> TokenStream {
        let Self { call, site, .. } = self;
        let key = self.key();
        let policy = self.policy();
        let store = self.place(&call.store);
        let method = Ident::new("idem_operation", blamed(&call.store));
        let operation = quote_spanned! {*site=>
            let __idem_key = #key;
            let __idem_policy = #policy;
            let __idem_operation = {
                use __idem::OperationOn as _;
                (#store).#method(__idem_key, __idem_policy)
            };
        };
        let fingerprint = call.fingerprint.as_ref().map(|payload| {
            let method = Ident::new("idem_fingerprint", blamed(payload));
            let payload = self.unmoved(payload);
            quote_spanned! {*site=>
                let __idem_operation = {
                    use __idem::FingerprintOf as _;
                    (#payload).#method(__idem_operation)
                };
            }
        });
        quote_spanned!(*site=> #operation #fingerprint)
    }

    fn key(&self) -> TokenStream {
        let site = self.site;
        let parts = &self.call.key;
        let parts = parts.iter().enumerate().map(|(at, part)| match part {
            Part::Text(text) => quote_spanned!(site=> __idem::text(&mut __idem_key, #text);),
            Part::Value(value) => self.part(value, parts.get(at + 1)),
        });
        let scope = self.scope();
        // The function that builds the key also registers the type of the recorded results, because a scope that is not
        // shared has only one such type.
        let recorded = match self.call.on_error {
            OnError::Release | OnError::Uncertain => quote_spanned!(site=> key_of_values),
            OnError::Record(_) | OnError::Decide(_) => quote_spanned!(site=> key_of_results),
        };
        quote_spanned! {site=>
            {
                let mut __idem_key = {
                    #scope
                    __idem::#recorded(&SCOPE, __idem_output)
                };
                #(#parts)*
                __idem_key.build()
            }
        }
    }

    /// Makes the `static` that holds the scope.
    fn scope(&self) -> TokenStream {
        let site = self.site;
        let Some(Scope { name, shared }) = &self.call.scope else {
            let function = &self.function.signature.ident;
            let name = function.unraw().to_string();
            return quote_spanned! {site=>
                // Only a function outside of every `impl` and `trait` can be named by its plain name.
                __idem::a_function_in_an_impl_or_a_trait_needs_a_scope_of_its_own!(#function);
                static SCOPE: __idem::Scope =
                    __idem::scope(__idem::concat!(__idem::module_path!(), "::", #name), false);
            };
        };
        let name = match name {
            ScopeName::Literal(name) => name.to_token_stream(),
            ScopeName::Made(made) => {
                let check = quote_spanned!(made.span()=> __idem::scope_name);
                quote_spanned!(made.span()=> #check(#made))
            }
        };
        quote_spanned!(site=> static SCOPE: __idem::Scope = __idem::scope(#name, #shared);)
    }

    fn part(&self, value: &Expr, next: Option<&Part>) -> TokenStream {
        let site = self.site;
        let method = Ident::new("idem_append", blamed(value));
        let value = self.written(value);
        // The character that follows a value in the template is escaped inside of the value. Only text can follow a
        // value.
        let next = match next {
            Some(Part::Text(text)) => text.chars().next(),
            _ => None,
        };
        let next =
            next.map_or_else(|| quote_spanned!(site=> __idem::None), |next| quote_spanned!(site=> __idem::Some(#next)));
        quote_spanned! {site=>
            match &(#value) {
                __idem_part => {
                    use __idem::parts::*;
                    (&&&&__idem::Part(__idem_part)).#method(&mut __idem_key, #next);
                }
            }
        }
    }

    fn policy(&self) -> TokenStream {
        let Self { call, site, .. } = self;
        let base = match &call.policy {
            Base::Ttl(ttl) => {
                let ttl = self.time(ttl);
                quote_spanned!(*site=> __idem::Policy::new(#ttl))
            }
            Base::Policy(policy, ttl) => {
                // A policy that requires `on_crash` is no `Policy` until the attribute names the option.
                let recovers = call.reconciler.is_some()
                    || call.settings.iter().any(|setting| matches!(setting, Setting::Choice("on_crash", ..)));
                let method = if recovers { "idem_recovering_policy" } else { "idem_policy" };
                let method = Ident::new(method, blamed(policy));
                let policy = self.place(policy);
                let ttl = ttl.as_ref().map(|ttl| self.time(ttl)).map(|ttl| quote_spanned!(*site=> .ttl(#ttl)));
                quote_spanned! {*site=> { use __idem::{PolicyOf as _, RecoveringPolicyOf as _}; (#policy).#method() } #ttl }
            }
        };
        let settings = call.settings.iter().map(|setting| self.setting(setting));
        let policy = quote_spanned!(*site=> #base #(#settings)*);
        if self.is_literal() { quote_spanned!(*site=> const { #policy }) } else { policy }
    }

    fn is_literal(&self) -> bool {
        let literal = |time: &Time| matches!(time, Time::Literal(_));
        let base = matches!(&self.call.policy, Base::Ttl(ttl) if literal(ttl));
        base && self.call.settings.iter().all(|setting| match setting {
            Setting::Lease(time) | Setting::Timeout(time) | Setting::Wait(time) | Setting::ErrorTtl(time) => {
                literal(time)
            }
            Setting::Attempts(number) | Setting::ResultBytes(number) => is_number(number),
            Setting::Choice(..) | Setting::Migrate(_) => true,
        })
    }

    fn setting(&self, setting: &Setting) -> TokenStream {
        let site = self.site;
        match setting {
            Setting::Lease(lease) => {
                let lease = self.time(lease);
                quote_spanned!(site=> .lease(#lease))
            }
            Setting::ErrorTtl(ttl) => {
                let ttl = self.time(ttl);
                quote_spanned!(site=> .error_ttl(#ttl))
            }
            Setting::Timeout(timeout) => {
                let timeout = self.time(timeout);
                quote_spanned!(site=> .timeout(#timeout))
            }
            Setting::ResultBytes(bytes) => {
                let bytes = self.written(bytes);
                quote_spanned!(site=> .max_result_bytes(#bytes))
            }
            Setting::Wait(wait) => {
                let wait = self.time(wait);
                quote_spanned!(site=> .in_progress(__idem::InProgress::Wait(#wait)))
            }
            Setting::Attempts(count) => {
                let count = self.written(count);
                quote_spanned!(site=> .max_attempts(const { __idem::at_least_one(#count) }))
            }
            Setting::Migrate(function) => {
                // This code has the span of the migrating function, so that a message about its signature points at
                // this function.
                let migrate = quote_spanned!(blamed(function)=> __idem::OnUndecodable::Migrate(#function));
                quote_spanned!(site=> .on_undecodable(#migrate))
            }
            Setting::Choice(method, choices, variant) => {
                let [method, choices, variant] = [method, choices, variant].map(|name| Ident::new(name, site));
                quote_spanned!(site=> .#method(__idem::#choices::#variant))
            }
        }
    }

    fn time(&self, time: &Time) -> TokenStream {
        let site = self.site;
        match time {
            Time::Literal(duration) => {
                let millis = u64::try_from(Duration::as_millis(duration)).expect("`duration` reads at most 100 years");
                quote_spanned!(site=> __idem::Duration::from_millis(#millis))
            }
            Time::Computed(expr) => self.written(expr),
        }
    }

    /// Makes `let output = ..;`, which checks the types one after another, each with the span at which the compiler
    /// should report an error.
    ///
    /// Each check is a method that only the right types have. If a type lacks the method, the compiler reports one
    /// error, with the message of the method's trait, and skips the later checks.
    fn output(&self) -> TokenStream {
        let output = without_impl_trait(&self.call.output.ty);
        let [value, error] = [self.call.output.value, self.call.output.error];
        let checks = [("idem_result", value), ("idem_value", value), ("idem_error", error)];
        let checks = checks.map(|(name, span)| Ident::new(name, span));
        let name = quote_spanned!(self.site=> __idem_output);
        quote_spanned! {value=>
            let #name = {
                use __idem::types::*;
                __idem::returning::<#output>()#(.#checks())*
            };
        }
    }

    /// Makes the code that runs the body, after `operation`.
    fn run(&self, operation: &TokenStream) -> TokenStream {
        let Self { call, site, .. } = self;
        let output = without_impl_trait(&call.output.ty);
        let value = call.output.value;
        // The check of the codec has the span of the user's type.
        let codec = if let Some(codec) = &call.codec {
            let method = Ident::new("idem_codec", codec.span());
            quote_spanned!(value=> __idem::returning::<#codec>().#method())
        } else {
            quote_spanned!(value=> __idem::returning::<__idem::Json>())
        };
        // The option `on_error` selects the recorder, which decides whether an error is recorded.
        let recorder = match &call.on_error {
            OnError::Release => quote_spanned!(value=> values(#codec)),
            OnError::Uncertain => quote_spanned!(value=> values_or_doubt(#codec)),
            OnError::Record(span) => {
                let method = Ident::new("idem_recorded_error", *span);
                quote_spanned!(value=> #method().results(#codec))
            }
            OnError::Decide(decide) => {
                let method = Ident::new("idem_recorded_error", decide.span());
                let decide = self.written(decide);
                quote_spanned!(value=> #method().results_if(#codec, #decide))
            }
        };
        // A `return` that is never taken fixes the output type, as in `tracing`: the compiler then reports a mismatch
        // inside of the user's body, and `?` converts errors to the error type of the function. The type is named
        // outside of the body, because the body may give the names in the type another meaning, by `use Kind::*;` or by
        // a struct of its own. A function item, which has no size, carries the type into the body.
        let never = quote_spanned!(value=> __idem::never::<#output>);
        let returned = quote_spanned!(value=> __idem_never());
        let body = &call.handler.body;
        let [checked, operation_name] = ["__idem_output", "__idem_operation"].map(|name| Ident::new(name, *site));
        // The reconciler is a part of the body's future, so that it can borrow the arguments that the body takes. A
        // handler without a reconciler has no code for it.
        let (reconciling, reconcile) = match &call.reconciler {
            Some(reconciler) => {
                let [reconciling, is_reconciler] =
                    ["idem_reconciling", "idem_reconciler"].map(|name| Ident::new(name, blamed(reconciler)));
                let reconciler = self.written(reconciler);
                let reconciling = quote_spanned!(*site=> .#reconciling());
                let reconcile = quote_spanned! {*site=>
                    if __idem::is_asked() {
                        let __idem_settled = {
                            use __idem::types::*;
                            #checked.#is_reconciler(#reconciler)
                        };
                        if let __idem::Some(__idem_result) = __idem_settled.await {
                            return __idem_result;
                        }
                    }
                };
                (Some(reconciling), Some(reconcile))
            }
            None => (None, None),
        };
        // The body also owns the arguments that it does not mention. If the body did not own such an argument, it would
        // be dropped only after the key is freed, when another attempt may already run.
        let used = quote_spanned!(*site=> #operation #recorder #body);
        let owned = call.handler.owned.iter().map(|argument| argument.moved(&used));
        let block = quote_spanned! {*site=>
            async move {
                #(#owned)*
                if false {
                    return #returned;
                }
                #reconcile
                #body
            }
        };
        // The generated code has the span of the value type, because every remaining error is about the value, for
        // example about a lifetime that a replay can't have.
        let call = match reconciling {
            Some(reconciling) => quote_spanned! {value=>
                {
                    use __idem::types::*;
                    __idem_handler.on(#operation_name)#reconciling
                }
            },
            None => quote_spanned!(value=> __idem_handler.on(#operation_name)),
        };
        // The `return` is explicit, because users may deny `clippy::implicit_return`. The `return` has the span of a
        // macro, because clippy would otherwise report it as needless.
        let returns = quote_spanned!(*site=> return);
        quote_spanned! {value=>
            let __idem_handler = {
                use __idem::types::*;
                #checked.#recorder
            };
            let __idem_never = #never;
            #returns #call.run(#block).await;
        }
    }

    /// Returns the user's expression, in which `self` has the name that it has in the body.
    fn written(&self, expr: &Expr) -> TokenStream {
        self.call.handler.rename_self(expr.to_token_stream())
    }

    /// Dereferences an argument that is a reference, so that a message names the type behind the reference.
    fn place(&self, expr: &Expr) -> TokenStream {
        let written = self.written(expr);
        let references = match expr {
            Expr::Path(path) => path.path.get_ident().map_or(0, |name| self.function.references(name)),
            _ => 0,
        };
        let stars = std::iter::repeat_n(quote_spanned!(self.site=> *), references);
        quote_spanned!(self.site=> #(#stars)* #written)
    }

    /// Dereferences like `place`. A tuple becomes a tuple of references, so that its elements aren't moved.
    fn unmoved(&self, expr: &Expr) -> TokenStream {
        match expr {
            Expr::Tuple(tuple) => {
                let elems = tuple.elems.iter().map(|elem| self.unmoved(elem));
                quote_spanned!(self.site=> #(&(#elems),)*)
            }
            expr => self.place(expr),
        }
    }
}

/// Returns whether an expression consists of literals only: `64 * 1024`.
fn is_number(expr: &Expr) -> bool {
    match expr {
        Expr::Lit(_) => true,
        Expr::Binary(binary) => is_number(&binary.left) && is_number(&binary.right),
        Expr::Paren(paren) => is_number(&paren.expr),
        Expr::Group(group) => is_number(&group.expr),
        _ => false,
    }
}

/// Returns the token at which the compiler should report that a value lacks a trait: for example the last name in
/// `app.clients.store`.
fn blamed(expr: &Expr) -> Span {
    match expr {
        Expr::Field(field) => field.member.span(),
        Expr::MethodCall(call) => call.method.span(),
        Expr::Path(path) => path.path.segments.last().map_or_else(|| expr.span(), |last| last.ident.span()),
        Expr::Call(call) => blamed(&call.func),
        Expr::Reference(reference) => blamed(&reference.expr),
        Expr::Unary(unary) => blamed(&unary.expr),
        Expr::Paren(paren) => blamed(&paren.expr),
        Expr::Group(group) => blamed(&group.expr),
        Expr::Index(index) => blamed(&index.expr),
        Expr::Await(awaited) => blamed(&awaited.base),
        Expr::Try(tried) => blamed(&tried.expr),
        _ => expr.span(),
    }
}

/// Replaces every `impl Trait` in the type by `_`, because an `impl Trait` has no name inside of the function.
fn without_impl_trait(ty: &Type) -> Type {
    let mut ty = ty.clone();
    erase(&mut ty);
    ty
}

fn erase(ty: &mut Type) {
    match ty {
        Type::ImplTrait(_) => *ty = parse_quote_spanned!(Span::mixed_site()=> _),
        Type::Path(path) => {
            for segment in &mut path.path.segments {
                if let PathArguments::AngleBracketed(arguments) = &mut segment.arguments {
                    for argument in &mut arguments.args {
                        if let GenericArgument::Type(ty) = argument {
                            erase(ty);
                        }
                    }
                }
            }
        }
        Type::Tuple(tuple) => tuple.elems.iter_mut().for_each(erase),
        Type::Array(array) => erase(&mut array.elem),
        Type::Paren(paren) => erase(&mut paren.elem),
        Type::Group(group) => erase(&mut group.elem),
        _ => {}
    }
}
