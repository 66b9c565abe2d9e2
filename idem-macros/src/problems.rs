//! All problems of one use of the attribute, reported together.

use proc_macro2::Span;
use std::fmt::Display;

#[derive(Default)]
pub(crate) struct Problems(Option<syn::Error>);

impl Problems {
    pub(crate) fn at(&mut self, span: Span, message: impl Display) {
        self.push(syn::Error::new(span, message));
    }

    pub(crate) fn push(&mut self, problem: syn::Error) {
        match &mut self.0 {
            Some(problems) => problems.combine(problem),
            none => *none = Some(problem),
        }
    }

    /// Returns the value, or collects the problem and returns `None`.
    pub(crate) fn note<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|problem| self.push(problem)).ok()
    }

    /// Returns the value if there is no problem. If `value` is `None`, a problem must have been collected.
    pub(crate) fn check<T>(self, value: Option<T>) -> syn::Result<T> {
        match (self.0, value) {
            (None, Some(value)) => Ok(value),
            (Some(problems), _) => Err(problems),
            (None, None) => Err(syn::Error::new(Span::call_site(), "this use of `#[idempotent]` is not understood")),
        }
    }
}
