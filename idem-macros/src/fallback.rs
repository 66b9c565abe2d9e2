//! The code that is emitted beside errors: the function as written, so that no errors follow from them.

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

/// The messages, and the item below the attribute.
pub(crate) fn keep_item(item: &TokenStream, problems: &syn::Error) -> TokenStream {
    let messages = problems.to_compile_error();
    quote! { #messages #item }
}
