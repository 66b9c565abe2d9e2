//! The pages of the site.

use http::StatusCode;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::{Inspection, Page, Standing, Stats};
use idem_runtime::{Key, OnCrash};

use super::decision::Verb;
use super::form::Form;
use super::html::{Html, Target};
use crate::records::facts;
use crate::report::{content, human};
use crate::response;
use crate::watch::Look;

/// Style sheet of all pages.
pub(super) const STYLE: &str = include_str!("style.css");

/// Pages that the navigation names.
const SECTIONS: [(&str, &str); 3] = [("/", "Now"), ("/records", "Records"), ("/counts", "Counts")];

/// State of the site that every page shows.
pub(super) struct Frame {
    pub(super) store: &'static str,
    /// Name of the person who may decide; `None` outside of the session.
    pub(super) operator: Option<String>,
    /// True if the site would allow decisions in a session.
    pub(super) allows_decisions: bool,
    /// Message about the latest decision.
    pub(super) message: Option<String>,
}

/// Seconds between two loads of a page that refreshes, and the target of the page.
pub(super) struct Refresh {
    pub(super) seconds: u64,
    pub(super) is_on: bool,
}

impl Frame {
    /// Writes a document with this title around the content of `main`. `here` is the path of the page.
    pub(super) fn document(
        &self,
        title: &str,
        here: &str,
        refresh: Option<&Refresh>,
        main: impl FnOnce(&mut Html),
    ) -> String {
        let mut html = Html::document();
        html.nest("html", &[("lang", "en")], |html| {
            html.nest("head", &[], |html| {
                html.void("meta", &[("charset", "utf-8")]);
                html.element("title", &[], &format!("{title} - idem"));
                html.void("meta", &[("name", "viewport"), ("content", "width=device-width, initial-scale=1")]);
                html.void("meta", &[("name", "color-scheme"), ("content", "light dark")]);
                if let Some(refresh) = refresh.filter(|it| it.is_on) {
                    html.void("meta", &[("http-equiv", "refresh"), ("content", &refresh.seconds.to_string())]);
                }
                html.void("link", &[("rel", "stylesheet"), ("href", "/style.css")]);
            });
            html.nest("body", &[], |html| {
                html.element("a", &[("class", "skip"), ("href", "#main")], "Skip to the content");
                self.header(html, here);
                html.nest("main", &[("id", "main"), ("tabindex", "-1")], |html| {
                    // The region exists on every page, so a screen reader announces its text.
                    html.nest("div", &[("role", "status")], |html| {
                        if let Some(message) = &self.message {
                            html.element("p", &[("class", "box good")], message);
                        }
                    });
                    main(html);
                });
                html.element("footer", &[], &self.footer());
            });
        });
        html.finish()
    }

    fn header(&self, html: &mut Html, here: &str) {
        html.nest("header", &[], |html| {
            html.element("p", &[], &format!("idem, records in {}", self.store));
            html.nest("nav", &[("aria-label", "Pages")], |html| {
                html.nest("ul", &[], |html| {
                    for (path, name) in SECTIONS {
                        let current = [("href", path), ("aria-current", "page")];
                        let attributes = if path == here { &current[..] } else { &current[..1] };
                        html.nest("li", &[], |html| html.element("a", attributes, name));
                    }
                    if self.allows_decisions && self.operator.is_none() {
                        html.nest("li", &[], |html| html.link(&Target::new("/session"), "Enter the token"));
                    }
                });
            });
            html.nest("form", &[("role", "search"), ("action", "/record")], |html| {
                html.element("label", &[("for", "find")], "Key ");
                html.void("input", &[("id", "find"), ("name", "key"), ("required", ""), ("autocomplete", "off")]);
                html.element("button", &[], "Show");
            });
        });
    }

    fn footer(&self) -> String {
        match (&self.operator, self.allows_decisions) {
            (Some(name), _) if name.is_empty() => "Decisions name no operator (idem serve --by NAME).".to_owned(),
            (Some(name), _) => format!("Decisions are made by {name}."),
            (None, true) => "Decisions need the token that idem serve has printed.".to_owned(),
            (None, false) => "Read-only. idem serve --allow-decisions allows decisions.".to_owned(),
        }
    }

    /// Writes the page for a request that was not carried out.
    pub(super) fn problem(&self, status: StatusCode, text: &str) -> String {
        let title = match status {
            StatusCode::NOT_FOUND => "Nothing found",
            StatusCode::SERVICE_UNAVAILABLE => "The store does not answer",
            StatusCode::BAD_REQUEST => "Not possible",
            _ => "Refused",
        };
        self.document(title, "", None, |html| {
            html.element("h1", &[], title);
            alert(html, text);
        })
    }

    /// Writes the page of running and stuck records.
    pub(super) fn now(&self, look: &Look, refresh: &Refresh) -> String {
        self.document("Now", "/", Some(refresh), |html| {
            html.element("h1", &[], "Now");
            html.nest("div", &[("class", "box")], |html| {
                for line in look.head() {
                    html.element("p", &[], &line);
                }
            });
            html.nest("p", &[], |html| match refresh.is_on {
                true => html.link(&Target::new("/"), "Stop the refresh of this page"),
                false => {
                    let text = format!("Refresh this page every {} s", refresh.seconds);
                    html.link(&Target::new("/").with("refresh", "on"), &text);
                }
            });
            let groups: [RecordGroup; 3] = [
                ("Waits for a decision", "Keys that do not run until a person decides", waits_for_decision),
                ("Stuck", "Keys whose lease has lapsed: the next delivery takes over", |found| {
                    found.standing() == Standing::Lapsed && !waits_for_decision(found)
                }),
                ("Running", "Keys with a live lease", |found| found.standing() == Standing::Running),
            ];
            for (heading, caption, is_in) in groups {
                html.element("h2", &[], heading);
                let records: Vec<_> = look.records.iter().filter(|(_, found)| is_in(found)).collect();
                table(html, caption, &records);
            }
        })
    }

    /// Writes a page of a list, with the filter of `form`.
    pub(super) fn records(&self, page: &Page, form: &Form, rest: Option<&Target>) -> String {
        self.document("Records", "/records", None, |html| {
            html.element("h1", &[], "Records");
            filter(html, form);
            let records: Vec<_> = page.records.iter().collect();
            table(html, "Records in the order of the store", &records);
            if let Some(rest) = rest {
                html.nest("p", &[], |html| html.link(rest, "Next records"));
            }
            unreadable(html, page.unreadable);
        })
    }

    /// Writes the numbers of records by scope and standing.
    pub(super) fn counts(&self, stats: &Stats) -> String {
        self.document("Counts", "/counts", None, |html| {
            html.element("h1", &[], "Counts");
            html.nest(
                "div",
                &[("class", "wide"), ("tabindex", "0"), ("role", "region"), ("aria-label", "Counts")],
                |html| {
                    html.nest("table", &[], |html| {
                        html.element("caption", &[], "Number of records by scope and state");
                        html.nest("thead", &[], |html| {
                            html.nest("tr", &[], |html| {
                                html.element("th", &[("scope", "col")], "scope");
                                for standing in Standing::ALL {
                                    html.element("th", &[("scope", "col"), ("class", "number")], standing.name());
                                }
                            });
                        });
                        html.nest("tbody", &[], |html| {
                            for (scope, counts) in &stats.scopes {
                                html.nest("tr", &[], |html| {
                                    html.element("th", &[("scope", "row")], scope);
                                    for standing in Standing::ALL {
                                        let count = counts.of(standing);
                                        html.nest("td", &[("class", "number")], |html| match count {
                                            0 => html.text("0"),
                                            count => {
                                                let target = Target::new("/records").with("scope", scope);
                                                html.link(&target.with("state", standing.name()), &count.to_string());
                                            }
                                        });
                                    }
                                });
                            }
                        });
                        html.nest("tfoot", &[], |html| {
                            html.nest("tr", &[], |html| {
                                html.element("th", &[("scope", "row")], "all scopes");
                                for standing in Standing::ALL {
                                    let count = stats.total().of(standing).to_string();
                                    html.element("td", &[("class", "number")], &count);
                                }
                            });
                        });
                    });
                },
            );
            if stats.next.is_some() {
                let text = format!("The count ended after {} records; there are more.", stats.total().total());
                html.element("p", &[("class", "warn")], &text);
            }
            unreadable(html, stats.unreadable);
        })
    }

    /// Writes the story of a record.
    pub(super) fn record(&self, key: &Key, found: &Inspection, result: ResultView) -> String {
        self.document(&key.to_string(), "", None, |html| {
            html.element("h1", &[], &key.to_string());
            story(html, key, self.store, found);
            if let Some(stored @ StoredResult::Encoded { .. }) = found.record.state.result() {
                html.element("h2", &[], "Result");
                match result {
                    ResultView::Shown => show_result(html, stored),
                    ResultView::Hidden => html.nest("p", &[], |html| {
                        html.link(&of_key(key).with("result", "show"), "Show the result, which may be confidential");
                    }),
                    ResultView::Refused => {
                        let text = "Results are not shown: every user of this machine can open this page. Use idem show \
                                    --result, or start idem serve --results.";
                        html.element("p", &[], text);
                    }
                }
            }
            html.element("h2", &[], "Decide");
            if self.operator.is_none() {
                html.element("p", &[], &self.footer());
                return;
            }
            html.nest("ul", &[], |html| {
                for verb in Verb::possible(key, found) {
                    let target = Target::new("/decide").with("key", key.as_str()).with("verb", verb.name());
                    html.nest("li", &[], |html| html.link(&target, verb.label()));
                }
            });
        })
    }

    /// Writes the form of a decision. If a form was refused, `sent` holds its values, and `problem` the reason.
    pub(super) fn decision(
        &self,
        key: &Key,
        found: &Inspection,
        verb: Verb,
        form_token: &str,
        sent: &Form,
        problem: Option<&str>,
    ) -> String {
        let question = format!("{}?", verb.question(key, found));
        self.document(&question, "", None, |html| {
            html.element("h1", &[], &question);
            if let Some(problem) = problem {
                alert(html, problem);
            }
            let target = Target::new("/decide").with("key", key.as_str()).with("verb", verb.name());
            html.nest("form", &[("method", "post"), ("action", target.as_str())], |html| {
                html.void("input", &[("type", "hidden"), ("name", "form_token"), ("value", form_token)]);
                let seen = found.revision().to_string();
                html.void("input", &[("type", "hidden"), ("name", "seen"), ("value", &seen)]);
                verb.fields(html, sent);
                html.nest("p", &[], |html| {
                    html.element("button", &[], verb.button());
                    html.text(" ");
                    html.link(&of_key(key), "Back without a decision");
                });
            });
            html.element("h2", &[], "The record");
            story(html, key, self.store, found);
        })
    }

    /// Writes the form for the token.
    pub(super) fn session(&self, problem: Option<&str>) -> String {
        self.document("Enter the token", "", None, |html| {
            html.element("h1", &[], "Enter the token");
            if let Some(problem) = problem {
                alert(html, problem);
            }
            html.nest("form", &[("method", "post"), ("action", "/session")], |html| {
                html.nest("p", &[], |html| {
                    html.element("label", &[("for", "token")], "Token that idem serve has printed");
                    let kind = [("type", "password"), ("autocomplete", "off"), ("required", ""), ("size", "45")];
                    html.void("input", &[&[("id", "token"), ("name", "token")], &kind[..]].concat());
                });
                html.nest("p", &[], |html| html.element("button", &[], "Allow decisions in this browser"));
            });
        })
    }
}

/// Heading and caption of records on the first page, and the rule that selects them.
type RecordGroup = (&'static str, &'static str, fn(&Inspection) -> bool);

/// Form in which the page of a record shows the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ResultView {
    /// The result is shown, on request.
    Shown,
    /// A link shows the result.
    Hidden,
    /// This site shows no results.
    Refused,
}

/// Returns whether nothing runs under this key until a person decides.
fn waits_for_decision(found: &Inspection) -> bool {
    let has_begun = matches!(found.record.state, State::Pending { on_crash: OnCrash::Fail, begun: true, .. });
    match found.standing() {
        Standing::Damaged | Standing::Interrupted => true,
        Standing::Lapsed => has_begun,
        _ => false,
    }
}

/// Returns the target of a record's page.
pub(super) fn of_key(key: &Key) -> Target {
    Target::new("/record").with("key", key.as_str())
}

fn alert(html: &mut Html, text: &str) {
    html.element("p", &[("role", "alert"), ("class", "box alarm")], text);
}

fn class(found: &Inspection) -> &'static str {
    match found.standing() {
        Standing::Damaged | Standing::Interrupted => "alarm",
        Standing::Lapsed => "warn",
        _ => "plain",
    }
}

fn table(html: &mut Html, caption: &str, records: &[&(Key, Inspection)]) {
    if records.is_empty() {
        html.element("p", &[("class", "note")], "None.");
        return;
    }
    // A region that scrolls can be reached by keyboard, and so needs a name.
    let region = [("class", "wide"), ("tabindex", "0"), ("role", "region"), ("aria-label", caption)];
    html.nest("div", &region, |html| {
        html.nest("table", &[], |html| {
            html.element("caption", &[], caption);
            html.nest("thead", &[], |html| {
                html.nest("tr", &[], |html| {
                    for name in ["key", "state", "since", "attempt", "lease", "holder"] {
                        html.element("th", &[("scope", "col")], name);
                    }
                });
            });
            html.nest("tbody", &[], |html| {
                for (key, found) in records {
                    row(html, key, found);
                }
            });
        });
    });
}

fn row(html: &mut Html, key: &Key, found: &Inspection) {
    let left = found.lapses_in.filter(|left| !left.is_zero());
    let cells = [
        (class(found), found.standing().name().to_owned()),
        ("plain", found.began.map_or("?".to_owned(), human)),
        ("plain", found.attempt().to_string()),
        ("plain", left.map_or(String::new(), |left| format!("lapses in {}", human(left)))),
        ("plain", found.holder().map_or(String::new(), |holder| holder.to_string())),
    ];
    html.nest("tr", &[], |html| {
        html.nest("th", &[("scope", "row")], |html| html.link(&of_key(key), &key.to_string()));
        for (class, text) in cells {
            html.element("td", &[("class", class)], &text);
        }
    });
}

/// Writes the facts about a record.
fn story(html: &mut Html, key: &Key, store: &str, found: &Inspection) {
    html.nest("dl", &[], |html| {
        for (name, value) in facts(key, store, found) {
            html.element("dt", &[], name);
            let class = if name == "state" { class(found) } else { "plain" };
            html.element("dd", &[("class", class)], &value);
        }
    });
}

fn show_result(html: &mut Html, stored: &StoredResult) {
    let text = match (response::shown(stored, content), stored) {
        (Some((response, _)), _) => response,
        (None, StoredResult::Encoded { bytes, .. }) => {
            let (kind, text) = content(bytes);
            format!("{}{text}", if kind == "hex" { "(hex) " } else { "" })
        }
        (None, _) => return,
    };
    html.element("pre", &[("tabindex", "0"), ("role", "region"), ("aria-label", "Result")], &text);
}

fn filter(html: &mut Html, form: &Form) {
    html.nest("form", &[("action", "/records"), ("class", "filter")], |html| {
        html.nest("p", &[], |html| {
            html.element("label", &[("for", "state")], "State ");
            html.nest("select", &[("id", "state"), ("name", "state")], |html| {
                html.element("option", &[("value", "")], "any");
                for standing in Standing::ALL {
                    let name = standing.name();
                    let selected = [("value", name), ("selected", "")];
                    let is_selected = form.get("state") == Some(name);
                    html.element("option", if is_selected { &selected } else { &selected[..1] }, name);
                }
            });
            html.text(" ");
            html.element("label", &[("for", "scope")], "Scope ");
            html.void("input", &[("id", "scope"), ("name", "scope"), ("value", form.get("scope").unwrap_or_default())]);
            html.text(" ");
            html.element("label", &[("for", "older")], "Older than (15m, 24h) ");
            let older = form.get("older").unwrap_or_default();
            html.void("input", &[("id", "older"), ("name", "older"), ("value", older), ("size", "6")]);
            html.text(" ");
            html.element("button", &[], "Filter");
        });
    });
}

fn unreadable(html: &mut Html, count: u64) {
    if count > 0 {
        let text = format!("{count} entries are no records: another program keeps them there.");
        html.element("p", &[("class", "warn")], &text);
    }
}
