//! What is emitted beside errors: what was written, so that nothing else is reported.

use proc_macro2::TokenStream;
use quote::quote;

use crate::function::Function;

/// The messages, and the function without protection.
pub(crate) fn keep(function: &Function, problems: &syn::Error) -> TokenStream {
    let messages = problems.to_compile_error();
    let arguments = function.argument_names();
    let body = function.body();
    // Arguments that only the attribute uses are not unused.
    let function = function.with_body(&quote! { let _ = (#(&#arguments,)*); #body });
    quote! { #messages #function }
}

/// The messages, and whatever the attribute stands on.
pub(crate) fn keep_item(item: &TokenStream, problems: &syn::Error) -> TokenStream {
    let messages = problems.to_compile_error();
    quote! { #messages #item }
}
