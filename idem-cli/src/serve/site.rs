//! Answers to requests.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION, SET_COOKIE};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Incoming};
use idem_runtime::operator::Operator;
use idem_runtime::store::{Cursor, Inspection, Revision};
use idem_runtime::{Key, Store, StoreExt};

use super::decision::Verb;
use super::form::Form;
use super::guard::{Guard, Refusal};
use super::html::Target;
use super::page::{Frame, Refresh, ResultView, STYLE, of_key};
use crate::list::{Age, standing};
use crate::records;
use crate::report::{Stop, hidden};
use crate::watch::{Look, LookArguments};

/// Time in which a request has to arrive.
pub(super) const ARRIVAL: Duration = Duration::from_secs(10);
/// Largest form, in bytes: a result has at most 256 KiB by default, and a form may need three bytes for one byte.
const MAX_FORM_BYTES: usize = 1 << 20;
/// Number of records on one page of a list.
const PAGE: u32 = 100;
/// Number of records that a count reads.
const MOST_COUNTED: u64 = 1_000_000;

/// Headers of every answer, next to its content type and `no-store`. A page with these headers loads nothing from other
/// sites, runs no script, can't be framed or read by another site, and is not named in requests to other sites.
const HEADERS: [(&str, &str); 7] = [
    (
        "content-security-policy",
        "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    // With `no-referrer`, browsers send forms with `Origin: null`.
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
];

/// The site: its store and its rules.
pub(super) struct Site {
    pub(super) store: Arc<dyn Store>,
    pub(super) guard: Guard,
    /// Name of the person who decides.
    pub(super) by: String,
    pub(super) shows_results: bool,
    /// Seconds between two loads of the first page.
    pub(super) refresh: u64,
    pub(super) look: LookArguments,
}

/// Answer to a request before the headers that all answers have.
struct Answer {
    status: StatusCode,
    kind: &'static str,
    body: String,
    headers: Vec<(HeaderName, String)>,
}

impl Answer {
    fn page(status: StatusCode, body: String) -> Self {
        Self { status, kind: "text/html; charset=utf-8", body, headers: Vec::new() }
    }

    /// Makes an answer that leads the browser to another page.
    fn elsewhere(target: &Target) -> Self {
        let headers = vec![(LOCATION, target.as_str().to_owned())];
        Self { headers, ..Self::page(StatusCode::SEE_OTHER, String::new()) }
    }
}

/// Reason why a request has no page.
enum Failure {
    Stop(Stop),
    Refusal(Refusal),
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refusal(refusal)
    }
}

impl Failure {
    fn told(&self) -> (StatusCode, String) {
        let (status, text) = match self {
            Self::Refusal(refusal) => (refusal.status(), refusal.text().to_owned()),
            Self::Stop(Stop::Refused(text)) => (StatusCode::CONFLICT, text.clone()),
            Self::Stop(Stop::Usage(text)) => (StatusCode::BAD_REQUEST, text.clone()),
            Self::Stop(Stop::Nothing(text)) => (StatusCode::NOT_FOUND, text.clone()),
            Self::Stop(Stop::Unreachable(text)) => (StatusCode::SERVICE_UNAVAILABLE, text.clone()),
            Self::Stop(Stop::Output(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        };
        (status, hidden(&text))
    }
}

impl Site {
    /// Answers a request.
    pub(super) async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        // A request that names another host is refused with a text that shows nothing of the store, and no form.
        let answer = match self.guard.admit(&request) {
            Ok(()) => {
                let (head, body) = request.into_parts();
                let answer = self.route(&head, body).await;
                answer.unwrap_or_else(|failure| {
                    let (status, text) = failure.told();
                    Answer::page(status, self.frame(&head.headers).problem(status, &text))
                })
            }
            Err(refusal) => Answer {
                kind: "text/plain; charset=utf-8",
                ..Answer::page(refusal.status(), format!("{}\n", refusal.text()))
            },
        };
        let mut response = Response::new(Full::new(Bytes::from(answer.body)));
        *response.status_mut() = answer.status;
        let headers = response.headers_mut();
        for (name, value) in HEADERS {
            headers.insert(name, HeaderValue::from_static(value));
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(answer.kind));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        let own =
            answer.headers.into_iter().filter_map(|(name, value)| Some((name, HeaderValue::try_from(value).ok()?)));
        headers.extend(own);
        response
    }

    async fn route(&self, head: &Parts, body: Incoming) -> Result<Answer, Failure> {
        let query = Form::parse(head.uri.query().unwrap_or_default().as_bytes());
        let is_post = head.method == Method::POST;
        if !is_post && head.method != Method::GET && head.method != Method::HEAD {
            return Ok(Answer { kind: "text/plain", ..Answer::page(StatusCode::METHOD_NOT_ALLOWED, String::new()) });
        }
        let page = |body| Ok(Answer::page(StatusCode::OK, body));
        match (head.uri.path(), is_post) {
            ("/", false) => {
                let refresh = Refresh { seconds: self.refresh, is_on: query.get("refresh").is_some() };
                let look = Look::at(&*self.store, &self.look, false, None).await?;
                page(self.frame(&head.headers).now(&look, &refresh))
            }
            ("/records", false) => page(self.records(&head.headers, &query).await?),
            ("/counts", false) => {
                let stats = self.store.operator().stats(&self.look.all(), MOST_COUNTED).await.map_err(Stop::from)?;
                page(self.frame(&head.headers).counts(&stats))
            }
            ("/record", false) => {
                let (key, found) = self.found(&query).await?;
                let result = match (self.shows_results, query.get("result")) {
                    (false, _) => ResultView::Refused,
                    (true, None) => ResultView::Hidden,
                    (true, Some(_)) => ResultView::Shown,
                };
                page(self.frame(&head.headers).record(&key, &found, result))
            }
            ("/decide", false) => {
                let form_token = self.guard.form_token(&head.headers)?;
                let (key, found, verb) = self.about(&query).await?;
                let frame = self.frame(&head.headers);
                page(frame.decision(&key, &found, verb, &form_token, &Form::default(), None))
            }
            ("/decide", true) => self.decide(&head.headers, &query, &form(body).await?).await,
            ("/session", false) if self.guard.allows_decisions() => page(self.frame(&head.headers).session(None)),
            ("/session", true) => self.sign_in(&head.headers, &form(body).await?),
            ("/style.css", false) => {
                Ok(Answer { kind: "text/css; charset=utf-8", ..Answer::page(StatusCode::OK, STYLE.to_owned()) })
            }
            _ => Err(Stop::Nothing("There is no such page.".to_owned()).into()),
        }
    }

    fn frame(&self, headers: &HeaderMap) -> Frame {
        Frame {
            store: self.store.name(),
            operator: self.guard.form_token(headers).ok().map(|_| self.by.clone()),
            allows_decisions: self.guard.allows_decisions(),
            message: self.guard.message(headers),
        }
    }

    async fn records(&self, headers: &HeaderMap, query: &Form) -> Result<String, Failure> {
        let mut filter = self.look.all().limit(PAGE).after(query.get("after").map(Cursor::new));
        let mut rest = Target::new("/records");
        for name in query.all("state") {
            filter = filter.standing(standing(name).map_err(Stop::Usage)?);
            rest = rest.with("state", name);
        }
        if let Some(scope) = query.get("scope") {
            filter.scope = Some(scope.into());
            rest = rest.with("scope", scope);
        }
        if let Some(older) = query.get("older") {
            filter.older_than = Some(older.parse::<Age>().map_err(Stop::Usage)?.0);
            rest = rest.with("older", older);
        }
        // Stores skip records that do not match, so a page may be empty although more pages follow.
        let mut page = self.store.operator().list(&filter).await.map_err(Stop::from)?;
        while page.records.is_empty()
            && let Some(next) = page.next.take()
        {
            let skipped = page.unreadable;
            filter = filter.after(next);
            page = self.store.operator().list(&filter).await.map_err(Stop::from)?;
            page.unreadable += skipped;
        }
        let rest = page.next.as_ref().map(|next| rest.with("after", next.as_str()));
        Ok(self.frame(headers).records(&page, query, rest.as_ref()))
    }

    fn operator(&self) -> Operator<'_, Arc<dyn Store>> {
        self.store.operator().by(&*self.by)
    }

    /// Returns the record of the key in the query.
    async fn found(&self, query: &Form) -> Result<(Key, Inspection), Stop> {
        let key = records::key(&self.operator(), query.get("key").unwrap_or_default())?;
        match self.operator().inspect(&key).await? {
            Some(found) => Ok((key, found)),
            None => Err(records::nothing(&key, self.store.name())),
        }
    }

    /// Returns the record and the kind of decision in the query.
    async fn about(&self, query: &Form) -> Result<(Key, Inspection, Verb), Stop> {
        let unknown = || Stop::Usage("there is no such decision".to_owned());
        let verb = query.get("verb").and_then(Verb::named).ok_or_else(unknown)?;
        let (key, found) = self.found(query).await?;
        Ok((key, found, verb))
    }

    fn sign_in(&self, headers: &HeaderMap, form: &Form) -> Result<Answer, Failure> {
        self.guard.admit_form(headers)?;
        match self.guard.sign_in(form.get("token").unwrap_or_default()) {
            Ok(cookie) => {
                let mut answer = Answer::elsewhere(&Target::new("/"));
                answer.headers.push((SET_COOKIE, cookie));
                Ok(answer)
            }
            Err(refusal @ Refusal::WrongToken) => {
                let page = self.frame(headers).session(Some(refusal.text()));
                Ok(Answer::page(refusal.status(), page))
            }
            Err(refusal) => Err(refusal.into()),
        }
    }

    async fn decide(&self, headers: &HeaderMap, query: &Form, form: &Form) -> Result<Answer, Failure> {
        self.guard.admit_decision(headers, form.get("form_token"))?;
        let form_token = self.guard.form_token(headers)?;
        let (key, found, verb) = self.about(query).await?;
        match self.carry_out(&key, &found, verb, form).await {
            Ok((done, is_gone)) => {
                self.guard.leave_message(headers, done);
                Ok(Answer::elsewhere(&if is_gone { Target::new("/") } else { of_key(&key) }))
            }
            // The page shows the record as it is now, and the values that were typed.
            Err(stop @ (Stop::Refused(_) | Stop::Usage(_) | Stop::Unreachable(_))) => {
                let (status, text) = Failure::from(stop).told();
                let page = self.frame(headers).decision(&key, &found, verb, &form_token, form, Some(&text));
                Ok(Answer::page(status, page))
            }
            Err(stop) => Err(stop.into()),
        }
    }

    /// Makes the decision of a form. Returns the message about the decision, and whether the record is gone.
    async fn carry_out(&self, key: &Key, found: &Inspection, verb: Verb, form: &Form) -> Result<(String, bool), Stop> {
        let unseen = || Stop::Usage("the form does not name the record that was seen; nothing was changed".to_owned());
        let seen: Revision = form.get("seen").and_then(|seen| seen.parse().ok()).ok_or_else(unseen)?;
        let act = verb.act(form)?;
        let (_, done) = act.words(key, found, seen.attempt());
        let operator = self.operator().reason(form.get("reason").unwrap_or_default());
        act.apply(&operator, key, seen, self.store.name()).await?;
        Ok((done, verb == Verb::Forget))
    }
}

/// Reads a form.
async fn form(body: Incoming) -> Result<Form, Stop> {
    let too_large = || Stop::Usage(format!("the form has more than {MAX_FORM_BYTES} bytes; nothing was changed"));
    if body.size_hint().lower() > MAX_FORM_BYTES as u64 {
        return Err(too_large());
    }
    let read = tokio::time::timeout(ARRIVAL, Limited::new(body, MAX_FORM_BYTES).collect());
    let late = |_| Stop::Usage("the form did not arrive in time; nothing was changed".to_owned());
    let body = read.await.map_err(late)?.map_err(|_| too_large())?;
    Ok(Form::parse(&body.to_bytes()))
}
