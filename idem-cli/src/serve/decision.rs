//! Decisions that a page offers, and the forms for them.

use bytes::Bytes;
use idem_runtime::Key;
use idem_runtime::codec::CodecName;
use idem_runtime::record::{Ruling, StoredResult};
use idem_runtime::store::{Action, Decision, Finish, Inspection};

use super::form::Form;
use super::html::Html;
use crate::records::{Act, encoded};
use crate::report::{Stop, described};

/// Kind of decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verb {
    Resolve,
    Reopen,
    Replace,
    Discard,
    Release,
    Forget,
}

/// End of an operation that a form offers: the value of the field, and its label.
const ENDS: [(&str, &str); 4] = [
    ("completed", "It completed with this result"),
    ("completed-without-result", "It completed, and its result is unknown"),
    ("failed", "It failed permanently with this error"),
    ("failed-without-result", "It failed permanently, and its error is unknown"),
];

impl Verb {
    const ALL: [Self; 6] = [Self::Resolve, Self::Reopen, Self::Replace, Self::Discard, Self::Release, Self::Forget];

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Reopen => "reopen",
            Self::Replace => "replace",
            Self::Discard => "discard",
            Self::Release => "release",
            Self::Forget => "forget",
        }
    }

    /// Returns the text of the link to the form of this decision.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Resolve => "Resolve: the effect happened",
            Self::Reopen => "Reopen: the effect did not happen, let the next delivery run",
            Self::Replace => "Replace: the recorded result is wrong, duplicates get another one",
            Self::Discard => "Discard: give up the recorded result, let the next delivery run",
            Self::Release => "Release: its process is certainly gone, end its lease",
            Self::Forget => "Forget: remove the record, the next delivery runs as the first one",
        }
    }

    /// Returns the text of the button that sends the form.
    pub(super) fn button(self) -> &'static str {
        match self {
            Self::Resolve => "Resolve",
            Self::Reopen => "Reopen",
            Self::Replace => "Replace",
            Self::Discard => "Discard",
            Self::Release => "End the lease",
            Self::Forget => "Forget",
        }
    }

    /// Returns the decisions that are possible about a record.
    pub(super) fn possible(key: &Key, found: &Inspection) -> Vec<Self> {
        let is_possible = |verb: &Self| {
            let decides = |action| {
                let decision = Decision::new(key, found, action);
                matches!(found.decide(&decision), Ruling::Replace(_) | Ruling::Remove)
            };
            match verb {
                Self::Resolve => ends(Action::Resolve).into_iter().any(decides),
                Self::Replace => ends(Action::Replace).into_iter().any(decides),
                Self::Reopen => decides(Action::Reopen),
                Self::Discard => decides(Action::Discard),
                // Only a live lease is offered: a lapsed lease has ended already.
                Self::Release => found.lapses_in.is_some_and(|left| !left.is_zero()) && decides(Action::BreakLease),
                Self::Forget => decides(Action::Forget),
            }
        };
        Self::ALL.into_iter().filter(is_possible).collect()
    }

    /// Returns the question above the form of this decision, without the values of the form's fields.
    pub(super) fn question(self, key: &Key, found: &Inspection) -> String {
        let act = match self {
            Self::Resolve => return format!("Resolve `{key}`, attempt {}", found.attempt()),
            Self::Replace => return format!("Replace the recorded end of `{key}`, attempt {}", found.attempt()),
            Self::Reopen => Act::Reopen,
            Self::Discard => Act::Discard,
            Self::Release => Act::BreakLease,
            Self::Forget => Act::Forget,
        };
        act.words(key, found, found.attempt()).0
    }

    /// Returns the decision of a form that was sent.
    pub(super) fn act(self, form: &Form) -> Result<Act, Stop> {
        match self {
            Self::Resolve => resolution(form).map(|(finish, end)| Act::Resolve(finish, end)),
            Self::Replace => resolution(form).map(|(finish, end)| Act::Replace(finish, end)),
            Self::Reopen => Ok(Act::Reopen),
            Self::Discard => Ok(Act::Discard),
            Self::Release => Ok(Act::BreakLease),
            Self::Forget => Ok(Act::Forget),
        }
    }

    /// Writes the fields of this decision. `sent` holds the values of a form that was refused.
    pub(super) fn fields(self, html: &mut Html, sent: &Form) {
        if matches!(self, Self::Resolve | Self::Replace) {
            end_fields(html, sent);
        }
        let labelled = |html: &mut Html, id, label| html.element("label", &[("for", id)], label);
        html.nest("p", &[], |html| {
            labelled(html, "reason", "Reason, which the record keeps");
            let reason = sent.get("reason").unwrap_or_default();
            html.void(
                "input",
                &[("id", "reason"), ("name", "reason"), ("value", reason), ("autocomplete", "off"), ("size", "60")],
            );
        });
    }
}

fn end_fields(html: &mut Html, sent: &Form) {
    html.nest("fieldset", &[], |html| {
        html.element("legend", &[], "How did the operation end?");
        for (value, label) in ENDS {
            html.nest("p", &[("class", "choice")], |html| {
                let id = format!("end-{value}");
                let mut attributes =
                    vec![("type", "radio"), ("id", &*id), ("name", "end"), ("value", value), ("required", "")];
                if sent.get("end") == Some(value) {
                    attributes.push(("checked", ""));
                }
                html.void("input", &attributes);
                html.element("label", &[("for", &id)], label);
            });
        }
    });
    html.nest("p", &[], |html| {
        html.element("label", &[("for", "result")], "Result or error, as the JSON that the handler returns");
        let attributes =
            [("id", "result"), ("name", "result"), ("rows", "6"), ("cols", "80"), ("aria-describedby", "result-note")];
        html.element("textarea", &attributes, sent.get("result").unwrap_or_default());
    });
    let note = "The JSON is checked, but not that it is of the handler's return type. For another codec, or for the response \
                of an HTTP request, use `idem resolve` with a file.";
    html.element("p", &[("id", "result-note"), ("class", "note")], note);
}

fn resolution(form: &Form) -> Result<(Finish, String), Stop> {
    let result = || {
        let typed = form.get("result").unwrap_or_default();
        let json = CodecName::new(b"json").expect("a name");
        encoded(Bytes::copy_from_slice(typed.as_bytes()), json)
            .map_err(|problem| Stop::Usage(format!("the result can't be recorded: {problem}; nothing was changed")))
    };
    match form.get("end") {
        Some("completed") => {
            let result = result()?;
            let end = format!("completed with {}", described(&result));
            Ok((Finish::Completed(result), end))
        }
        Some("failed") => {
            let result = result()?;
            let end = format!("failed with {}", described(&result));
            Ok((Finish::Failed(result), end))
        }
        Some("completed-without-result") => {
            Ok((Finish::Completed(StoredResult::Unencodable), "completed, its result unknown".to_owned()))
        }
        Some("failed-without-result") => {
            Ok((Finish::Failed(StoredResult::Unencodable), "failed, its error unknown".to_owned()))
        }
        _ => Err(Stop::Usage("choose how the operation ended; nothing was changed".to_owned())),
    }
}

/// Returns one action for each kind of end.
fn ends(action: fn(Finish) -> Action) -> [Action; 4] {
    let result = || StoredResult::Encoded { codec: CodecName::new(b"json").expect("a name"), bytes: Bytes::new() };
    [
        Finish::Completed(result()),
        Finish::Completed(StoredResult::Unencodable),
        Finish::Failed(result()),
        Finish::Failed(StoredResult::Unencodable),
    ]
    .map(action)
}
