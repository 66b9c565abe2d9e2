//! Errors of tools, and their texts for the model.

use std::error::Error as StdError;
use std::fmt;

use idem_runtime::{Disposition, Error};
use rmcp::ErrorData;
use rmcp::handler::server::tool::IntoCallToolResult;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock, InputRequiredResult};

/// Reason why a call of a tool has no result. No variant is recorded: each variant frees the key, unless the function
/// has `on_error = uncertain`.
///
/// ```
/// use idem_rmcp::ToolError;
///
/// async fn pay(order: u64) -> Result<String, ToolError> {
///     let bank: Result<String, std::io::Error> = Err(std::io::Error::other("timed out"));
///     bank.map_err(|_| ToolError::again(format!("The bank does not answer for order {order}.")))
/// }
/// # let error = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(pay(1)).unwrap_err();
/// # assert!(error.to_string().starts_with("The bank does not answer for order 1. Make the same call again"));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum ToolError {
    /// An idempotent call returned no result. The model gets a text with the next step, without the details of the
    /// error, which contain the key.
    Idempotency(Error),
    /// The tool's own answer to the model, marked as an error.
    Answer(Box<CallToolResult>),
    /// The user must give input before the tool can run. Only clients with the protocol of 2026-07-28 accept this
    /// answer.
    InputRequired(Box<InputRequiredResult>),
}

impl ToolError {
    /// Makes an answer with this text. Write what happened, and what the model can do next.
    pub fn answer(text: impl Into<String>) -> Self {
        Self::Answer(Box::new(CallToolResult::error(vec![ContentBlock::text(text)])))
    }

    /// Makes an answer with this text and a request to make the same call again: for a failure that may pass, such as a
    /// bank that does not answer. The effect of the failed call may have happened, so pass the bank a
    /// [`child_key`](idem_runtime::Attempt::child_key), or give the error `on_error = uncertain`.
    pub fn again(text: impl fmt::Display) -> Self {
        Self::answer(format!("{text} Make the same call again, with the same arguments."))
    }

    /// Returns the answer to the model after a delivery with this disposition.
    pub(crate) fn into_response(self, disposition: Disposition) -> CallToolResponse {
        match self {
            Self::Idempotency(error) => {
                CallToolResult::error(vec![ContentBlock::text(advice(&error, disposition))]).into()
            }
            Self::Answer(mut answer) => {
                answer.is_error = Some(true);
                CallToolResponse::from(*answer)
            }
            Self::InputRequired(request) => (*request).into(),
        }
    }

    /// Disposition that follows from the error alone.
    fn disposition(&self) -> Disposition {
        match self {
            Self::Idempotency(error) => error.disposition(),
            Self::Answer(_) | Self::InputRequired(_) => Disposition::Ack,
        }
    }
}

/// Text for the model: what happened, what to do next, and what never to do.
fn advice(error: &Error, disposition: Disposition) -> String {
    let happened = match error {
        Error::InProgress { .. } => "An earlier call for the same operation is still running.",
        Error::FingerprintMismatch { .. } => {
            "Nothing was done: an earlier call for the same operation had other arguments."
        }
        Error::MissingKey { .. } | Error::InvalidKey { .. } => "Nothing was done: the call names no operation.",
        Error::ResultUnavailable { .. } => "The operation was done before, and its result can't be shown.",
        Error::Unsent { .. } => "The operation is done, and its messages have not all been sent.",
        error if error.is_uncertain() => "In doubt: the operation may have been done, or not.",
        Error::AttemptsExhausted { .. } => "The operation has failed too often.",
        _ => "There is no result.",
    };
    let next = match disposition {
        Disposition::Retry { after } => {
            format!("Make the same call again in {} s, with the same arguments.", after.as_secs() + 1)
        }
        Disposition::Ack | Disposition::DeadLetter => {
            "Do not call again. Tell the user that a person has to look at it.".to_owned()
        }
    };
    format!("{happened} {next} Never use another key or other arguments instead: the operation could be done twice.")
}

impl From<Error> for ToolError {
    fn from(error: Error) -> Self {
        Self::Idempotency(error)
    }
}

impl From<InputRequiredResult> for ToolError {
    fn from(request: InputRequiredResult) -> Self {
        Self::InputRequired(Box::new(request))
    }
}

/// Serves a tool that returns the error itself, without [`ToolCalls`](crate::ToolCalls). `rmcp` refuses
/// [`ToolError::InputRequired`] as the error of a `Result`: return it as a value.
impl IntoCallToolResult for ToolError {
    fn into_call_tool_result(self) -> Result<CallToolResponse, ErrorData> {
        let disposition = self.disposition();
        Ok(self.into_response(disposition))
    }
}

impl fmt::Display for ToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idempotency(error) => error.fmt(f),
            Self::Answer(answer) => {
                let text = answer.content.iter().find_map(ContentBlock::as_text);
                f.write_str(text.map_or("the tool answered with an error", |text| &text.text))
            }
            Self::InputRequired(_) => f.write_str("the tool needs input of the user"),
        }
    }
}

impl StdError for ToolError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Idempotency(error) => error.source(),
            Self::Answer(_) | Self::InputRequired(_) => None,
        }
    }
}
