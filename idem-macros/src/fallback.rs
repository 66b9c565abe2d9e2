//! Code that is emitted next to error messages: the function as written, so that its absence causes no further errors.

use proc_macro2::TokenStream;
use quote::quote;

use crate::function::Function;

/// Emits the messages, and the function without protection.
pub(crate) fn keep(function: &Function, problems: &syn::Error) -> TokenStream {
    let messages = problems.to_compile_error();
    let arguments = function.argument_names();
    let body = function.body();
    // Each argument is used, because an argument that only the attribute uses must cause no warning.
    let function = function.with_body(&quote! { let _ = (#(&#arguments,)*); #body });
    quote! { #messages #function }
}

/// Emits the messages, and the item below the attribute.
pub(crate) fn keep_item(item: &TokenStream, problems: &syn::Error) -> TokenStream {
    let messages = problems.to_compile_error();
    quote! { #messages #item }
}
