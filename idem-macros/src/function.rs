//! The annotated function: its signature and its body.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::token::Brace;
use syn::{
    AssocType, Attribute, Block, Expr, FnArg, GenericArgument, GenericParam, Local, Pat, PatIdent, PatType,
    PathArguments, PathSegment, ReceiverKind, ReturnType, Signature, Stmt, Token, Type, TypeParamBound, Visibility,
    braced,
};

/// A function with a body.
///
/// The body stays a stream of tokens. The macro does not need the structure of the body, and parsing the body would
/// take most of the time of an expansion. Unparsed, the body may also contain syntax that `syn` does not know.
pub(crate) struct Function {
    attributes: Vec<Attribute>,
    visibility: Visibility,
    pub(crate) signature: Signature,
    braces: Brace,
    inner_attributes: Vec<Attribute>,
    body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let ahead = input.fork();
        let attributes = input.call(Attribute::parse_outer)?;
        let visibility = input.parse()?;
        if !is_function(&ahead) {
            return Err(input.error("`#[idempotent]` goes on an `async fn`; for a method, on the method itself"));
        }
        let mut signature: Signature = input.parse()?;
        if input.peek(Token![;]) {
            return Err(
                input.error("`#[idempotent]` needs a body to protect; write it on the implementation of this method")
            );
        }
        let body;
        let braces = braced!(body in input);
        let inner_attributes = body.call(Attribute::parse_inner)?;
        name_arguments(&mut signature);
        Ok(Self { attributes, visibility, signature, braces, inner_attributes, body: body.parse()? })
    }
}

/// Finds the span of a word, at any depth.
fn find(tokens: TokenStream, word: &str) -> Option<Span> {
    tokens.into_iter().find_map(|token| match token {
        TokenTree::Ident(found) if found == word => Some(found.span()),
        TokenTree::Group(group) => find(group.stream(), word),
        _ => None,
    })
}

/// Adds all words of a pattern: the names that the pattern binds, and names of fields and types.
fn words(pattern: TokenStream, found: &mut Vec<String>) {
    for token in pattern {
        match token {
            TokenTree::Ident(word) => found.push(word.to_string()),
            TokenTree::Group(group) => words(group.stream(), found),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn is_function(item: ParseStream<'_>) -> bool {
    // A function has the word `fn` before its first brace. A few other items contain this word, too, such as `type F =
    // fn();`; the parser of signatures rejects these items.
    let tokens: TokenStream = item.fork().parse().unwrap_or_default();
    let is_braces =
        |token: &TokenTree| matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
    tokens
        .into_iter()
        .take_while(|token| !is_braces(token))
        .any(|token| matches!(token, TokenTree::Ident(word) if word == "fn"))
}

impl Function {
    /// Returns the function with another body.
    pub(crate) fn with_body(&self, body: &TokenStream) -> TokenStream {
        let Self { attributes, visibility, signature, inner_attributes, .. } = self;
        let mut function = quote!(#(#attributes)* #visibility #signature);
        self.braces.surround(&mut function, |tokens| tokens.extend(quote!(#(#inner_attributes)* #body)));
        function
    }

    pub(crate) fn body(&self) -> &TokenStream {
        &self.body
    }

    /// Returns the names of the arguments. An argument that is a pattern has no name.
    pub(crate) fn argument_names(&self) -> impl Iterator<Item = &Ident> {
        self.arguments().map(|(name, _)| name)
    }

    /// Returns all names that the arguments of an `async fn` bind; `None` for the output of another macro, which may
    /// give arguments other names.
    pub(crate) fn bound_names(&self) -> Option<Vec<String>> {
        self.signature.asyncness?;
        let mut names = Vec::new();
        for argument in &self.signature.inputs {
            if let FnArg::Typed(argument) = argument {
                words(argument.pat.to_token_stream(), &mut names);
            }
        }
        Some(names)
    }

    fn arguments(&self) -> impl Iterator<Item = (&Ident, &Type)> {
        self.signature.inputs.iter().filter_map(|argument| match argument {
            FnArg::Typed(PatType { pat, ty, .. }) => match &**pat {
                Pat::Ident(name) => Some((&name.ident, &**ty)),
                _ => None,
            },
            FnArg::Receiver(_) => None,
        })
    }

    /// Returns the number of `&` at the start of the type of an argument, or of `self`.
    pub(crate) fn references(&self, name: &Ident) -> usize {
        if name == "self" {
            let kind = self.signature.receiver().map(|receiver| &receiver.kind);
            return usize::from(matches!(kind, Some(ReceiverKind::Reference(..))));
        }
        let mut ty = self.arguments().find(|(argument, _)| *argument == name).map(|(_, ty)| ty);
        let mut count = 0;
        while let Some(Type::Reference(reference)) = ty {
            ty = Some(&reference.elem);
            count += 1;
        }
        count
    }

    /// Returns the span of `Self` in the signature. Only a function in an `impl` or a `trait` can use `Self`.
    pub(crate) fn mentions_self(&self) -> Option<Span> {
        let Signature { inputs, output, generics, .. } = &self.signature;
        let where_clause = &generics.where_clause;
        find(quote!(#generics #inputs #output #where_clause), "Self")
    }

    /// Returns the span of a generic parameter that is not a lifetime: `T`, `const N: usize`, `impl Trait`.
    pub(crate) fn generic(&self) -> Option<Span> {
        let parameter = self.signature.generics.params.iter().find_map(|parameter| match parameter {
            GenericParam::Type(parameter) => Some(parameter.ident.span()),
            GenericParam::Const(parameter) => Some(parameter.ident.span()),
            GenericParam::Lifetime(_) => None,
        });
        parameter.or_else(|| find(self.signature.inputs.to_token_stream(), "impl"))
    }

    /// Returns the span of a second use of the attribute.
    pub(crate) fn repeated(&self) -> Option<Span> {
        let names = self.attributes.iter().filter_map(|attribute| attribute.path().segments.last());
        names.map(|last| &last.ident).find(|name| *name == "idempotent").map(Ident::span)
    }

    /// Returns the asynchronous part of the function, if it has one.
    pub(crate) fn handler(&self) -> Option<Handler> {
        if self.signature.asyncness.is_some() {
            let output = match &self.signature.output {
                ReturnType::Type(_, output) => Some((**output).clone()),
                ReturnType::Default => None,
            };
            let owned = self.owned_arguments();
            return Some(Handler { output, body: self.body.clone(), owned, this: None, frame: None });
        }
        self.boxed()
    }

    /// Reads the output of `#[async_trait]`. On an `impl` or a `trait`, this macro runs first and turns the `async fn`
    /// into
    ///
    /// ```text
    /// fn ship<'async_trait>(&'async_trait self, ..) -> Pin<Box<dyn Future<Output = R> + Send + 'async_trait>> {
    ///     Box::pin(async move {
    ///         if let Some(__ret) = None::<R> { return __ret; }
    ///         let __self = self;
    ///         let (a, b) = { let __arg1 = __arg1; __arg1 };
    ///         let __ret: R = { BODY };
    ///         __ret
    ///     })
    /// }
    /// ```
    fn boxed(&self) -> Option<Handler> {
        let ReturnType::Type(_, output) = &self.signature.output else { return None };
        let output = boxed_output(output)?.clone();
        let body = &self.body;
        let mut frame: Block = syn::parse2(quote!({ #body })).ok()?;
        let block = pinned(&mut frame)?;
        let this = block.stmts.iter().find_map(alias_of_self);
        let owned = match block.stmts.iter_mut().position(|stmt| returned(stmt).is_some()) {
            Some(end) => block.stmts[..end].iter().filter_map(local_pattern).flat_map(|pat| owned(&[], pat)).collect(),
            None => self.owned_arguments(),
        };
        let statements = std::mem::take(&mut written(block).stmts);
        let body = quote!(#(#statements)*);
        Some(Handler { output: Some(output), body, owned, this, frame: Some(frame) })
    }

    /// Returns the names that the arguments bind, without references, whose drop does nothing.
    fn owned_arguments(&self) -> Vec<OwnedName> {
        let arguments = self.signature.inputs.iter().flat_map(|argument| match argument {
            FnArg::Typed(argument) if matches!(*argument.ty, Type::Reference(_)) => Vec::new(),
            FnArg::Receiver(receiver) if matches!(receiver.kind, ReceiverKind::Reference(..)) => Vec::new(),
            FnArg::Typed(argument) => owned(&argument.attrs, &argument.pat),
            FnArg::Receiver(receiver) => {
                vec![OwnedName {
                    attributes: receiver.attrs.clone(),
                    name: Ident::new("self", receiver.self_token.span),
                }]
            }
        });
        arguments.collect()
    }
}

/// Gives a name to each argument, and to each element of a tuple, that is written as `_`, because a value without a
/// name can't be moved into the body.
fn name_arguments(signature: &mut Signature) {
    fn name(pattern: &mut Pat, count: &mut usize) {
        match pattern {
            Pat::Wild(wild) => {
                let site = Span::mixed_site().located_at(wild.underscore_token.span);
                let ident = Ident::new(&format!("__idem_unnamed_{count}"), site);
                *count += 1;
                *pattern =
                    Pat::Ident(PatIdent { attrs: Vec::new(), by_ref: None, mutability: None, ident, subpat: None });
            }
            Pat::Tuple(tuple) => tuple.elems.iter_mut().for_each(|pattern| name(pattern, count)),
            _ => {}
        }
    }
    // Only an `async fn` needs names: in the output of `#[async_trait]` every argument already has a name.
    if signature.asyncness.is_none() {
        return;
    }
    let mut count = 0;
    for argument in &mut signature.inputs {
        if let FnArg::Typed(PatType { pat, ty, .. }) = argument
            && !matches!(**ty, Type::Reference(_))
        {
            name(pat, &mut count);
        }
    }
}

/// A name that an argument binds by value.
pub(crate) struct OwnedName {
    attributes: Vec<Attribute>,
    name: Ident,
}

impl OwnedName {
    /// Returns a statement that moves the value into the surrounding `async move` block. `used` are all tokens that the
    /// user wrote.
    pub(crate) fn moved(&self, used: &TokenStream) -> TokenStream {
        let Self { attributes, name } = self;
        // The macro, not the user, writes this use of `_name`, so no lint may report it.
        let quiet = quote_spanned!(Span::mixed_site()=> #[allow(clippy::used_underscore_binding, clippy::no_effect_underscore_binding)]);
        let is_used = name == "self" || find(used.clone(), &name.to_string()).is_some();
        if is_used || name.to_string().starts_with('_') {
            let compiled = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
            return quote_spanned!(Span::mixed_site()=> #(#compiled)* #quiet let _ = &#name;);
        }
        // Binds the name again, so that the compiler still reports an unused argument.
        quote_spanned!(Span::mixed_site()=> #(#attributes)* #quiet #[allow(clippy::shadow_same)] let #name = #name;)
    }
}

/// Returns the names that `pattern` binds by value. `attributes` are the attributes of the argument.
fn owned(attributes: &[Attribute], pattern: &Pat) -> Vec<OwnedName> {
    let each =
        |patterns: &mut dyn Iterator<Item = &Pat>| patterns.flat_map(|pattern| owned(attributes, pattern)).collect();
    match pattern {
        Pat::Ident(name) if name.by_ref.is_none() => {
            vec![OwnedName { attributes: attributes.to_vec(), name: name.ident.clone() }]
        }
        Pat::Paren(inner) => owned(attributes, &inner.pat),
        Pat::Reference(inner) => owned(attributes, &inner.pat),
        Pat::Slice(slice) => each(&mut slice.elems.iter()),
        Pat::Struct(fields) => each(&mut fields.fields.iter().map(|field| &*field.pat)),
        Pat::Tuple(tuple) => each(&mut tuple.elems.iter()),
        Pat::TupleStruct(tuple) => each(&mut tuple.elems.iter()),
        Pat::Type(typed) => owned(attributes, &typed.pat),
        _ => Vec::new(),
    }
}

fn local_pattern(stmt: &Stmt) -> Option<&Pat> {
    match stmt {
        Stmt::Local(local) => Some(&local.pat),
        _ => None,
    }
}

/// The asynchronous part of a function.
pub(crate) struct Handler {
    /// Type that the function returns when it is awaited.
    pub(crate) output: Option<Type>,
    /// The user's statements, which run as the protected body.
    pub(crate) body: TokenStream,
    /// Names that the arguments bind by value.
    pub(crate) owned: Vec<OwnedName>,
    /// Name of `self` in the statements, if they use another name.
    this: Option<Ident>,
    /// Code around the statements; `None` if only the braces of the function surround the statements.
    frame: Option<Block>,
}

impl Handler {
    /// Puts `body` in place of the statements.
    pub(crate) fn frame(&self, body: TokenStream) -> TokenStream {
        let Some(mut frame) = self.frame.clone() else { return body };
        if let Some(block) = pinned(&mut frame) {
            written(block).stmts.push(Stmt::Expr(Expr::Verbatim(body), None));
        }
        let statements = frame.stmts;
        quote!(#(#statements)*)
    }

    /// Renames `self` in the user's expressions in the attribute, as `#[async_trait]` renamed it in the body.
    pub(crate) fn rename_self(&self, tokens: TokenStream) -> TokenStream {
        let Some(this) = &self.this else { return tokens };
        let rename = |token| match token {
            TokenTree::Ident(word) if word == "self" => {
                let mut this = this.clone();
                this.set_span(word.span().resolved_at(this.span()));
                TokenTree::Ident(this)
            }
            TokenTree::Group(group) => {
                let inner = self.rename_self(group.stream());
                let mut renamed = Group::new(group.delimiter(), inner);
                renamed.set_span(group.span());
                TokenTree::Group(renamed)
            }
            other => other,
        };
        tokens.into_iter().map(rename).collect()
    }
}

/// Returns the type `R` in `Pin<Box<dyn Future<Output = R> + ..>>`.
fn boxed_output(ty: &Type) -> Option<&Type> {
    let Type::TraitObject(object) = type_argument(type_argument(ty, "Pin")?, "Box")? else { return None };
    object.bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else { return None };
        arguments(bound.path.segments.last()?, "Future")?.find_map(|argument| match argument {
            GenericArgument::AssocType(AssocType { ident, ty, .. }) if ident == "Output" => Some(ty),
            _ => None,
        })
    })
}

fn type_argument<'a>(ty: &'a Type, name: &str) -> Option<&'a Type> {
    let Type::Path(path) = ty else { return None };
    arguments(path.path.segments.last()?, name)?.find_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    })
}

fn arguments<'a>(segment: &'a PathSegment, name: &str) -> Option<impl Iterator<Item = &'a GenericArgument>> {
    match &segment.arguments {
        PathArguments::AngleBracketed(arguments) if segment.ident == name => Some(arguments.args.iter()),
        _ => None,
    }
}

/// Returns the block of `Box::pin(async move { .. })` at the end of a function.
fn pinned(block: &mut Block) -> Option<&mut Block> {
    let Some(Stmt::Expr(Expr::Call(call), None)) = block.stmts.last_mut() else { return None };
    let is_pin =
        matches!(&*call.func, Expr::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "pin"));
    match call.args.first_mut() {
        Some(Expr::Async(block)) if is_pin => Some(&mut block.block),
        _ => None,
    }
}

/// Returns the block of the user's statements: the block in `let __ret: R = { .. };`, or `block` itself if it has no
/// such statement.
///
/// The arguments are destructured before `__ret`, so only code inside of this block can read the parts of the key.
fn written(block: &mut Block) -> &mut Block {
    match block.stmts.iter_mut().position(|stmt| returned(stmt).is_some()) {
        Some(at) => returned(&mut block.stmts[at]).expect("it was found there"),
        None => block,
    }
}

fn returned(stmt: &mut Stmt) -> Option<&mut Block> {
    let Stmt::Local(Local { pat: Pat::Type(PatType { pat, .. }), init: Some(init), .. }) = stmt else { return None };
    match (&**pat, &mut *init.expr) {
        (Pat::Ident(name), Expr::Block(body)) if name.ident == "__ret" => Some(&mut body.block),
        _ => None,
    }
}

/// Returns the name `__self` in `let __self = self;`.
fn alias_of_self(stmt: &Stmt) -> Option<Ident> {
    let Stmt::Local(local) = stmt else { return None };
    match (&local.pat, &*local.init.as_ref()?.expr) {
        (Pat::Ident(name), Expr::Path(value)) if value.path.is_ident("self") => Some(name.ident.clone()),
        _ => None,
    }
}
