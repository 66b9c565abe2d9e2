//! Admission of requests: the site answers only a browser of this machine that asks for this site, and decides only in
//! the session of the person who started the command.

use std::sync::{Mutex, MutexGuard, PoisonError};

use http::header::{COOKIE, HOST, ORIGIN};
use http::{HeaderMap, Request, StatusCode};

use crate::report::Stop;

/// Number of random bytes of a token.
const TOKEN_BYTES: usize = 20;

/// Rules for requests to the site at one port, and the session of the person who may decide.
pub(super) struct Guard {
    port: u16,
    /// `None` if the site is read-only.
    sign_in: Option<Mutex<SignIn>>,
}

/// State of the single sign-in that the token allows.
enum SignIn {
    /// The token has not been used yet.
    Open { token: String },
    /// The token has been used, and works no more.
    Used(Session),
}

/// Session of the person who entered the token.
struct Session {
    id: String,
    /// Token that each form carries, so that no other site can send the form.
    form_token: String,
    /// Message about the latest decision, for the next page.
    message: Option<String>,
}

/// Reason why a request is not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// The request names another host, so another site may have sent the browser here (DNS rebinding).
    OtherHost,
    /// Another site has sent the form.
    OtherSite,
    /// The site is read-only.
    ReadOnly,
    /// The request has no session.
    NoSession,
    /// The token is wrong, or was used before.
    WrongToken,
}

impl Refusal {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::OtherHost => StatusCode::MISDIRECTED_REQUEST,
            _ => StatusCode::FORBIDDEN,
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::OtherHost => {
                "This page answers only at the address that `idem serve` has printed. Nothing was changed."
            }
            Self::OtherSite => "The form was not sent by this page. Nothing was changed. Open the record again.",
            Self::ReadOnly => "This page is read-only: start `idem serve --allow-decisions`. Nothing was changed.",
            Self::NoSession => "Enter the token that `idem serve` has printed. Nothing was changed.",
            Self::WrongToken => {
                "The token is wrong, or was used before: it works once. Start `idem serve` again for a new one."
            }
        }
    }
}

impl Guard {
    /// Makes the rules for this port. Returns the rules, and the token that allows one sign-in if decisions are
    /// allowed.
    pub(super) fn new(port: u16, allows_decisions: bool) -> Result<(Self, Option<String>), Stop> {
        let token = allows_decisions.then(random).transpose()?;
        let sign_in = token.clone().map(|token| Mutex::new(SignIn::Open { token }));
        Ok((Self { port, sign_in }, token))
    }

    /// Checks a request of any kind.
    pub(super) fn admit<B>(&self, request: &Request<B>) -> Result<(), Refusal> {
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        // A request with a whole URL names its host twice.
        let authority = request.uri().authority().map(http::uri::Authority::as_str);
        let is_one = request.headers().get_all(HOST).iter().count() == 1;
        let is_this_site = |host: &str| self.hosts().iter().any(|it| it.eq_ignore_ascii_case(host));
        match is_one && host.is_some_and(is_this_site) && authority.is_none_or(is_this_site) {
            true => Ok(()),
            false => Err(Refusal::OtherHost),
        }
    }

    /// Checks that no header of the browser names another site as the sender of a form.
    pub(super) fn admit_form(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let is_own = |origin: &str| self.hosts().iter().any(|host| origin == format!("http://{host}"));
        let origin = headers.get(ORIGIN).is_none_or(|origin| origin.to_str().is_ok_and(is_own));
        let fetch = headers.get("sec-fetch-site").is_none_or(|site| site == "same-origin");
        if origin && fetch { Ok(()) } else { Err(Refusal::OtherSite) }
    }

    /// Starts the session, once. Returns the cookie of the session.
    pub(super) fn sign_in(&self, typed: &str) -> Result<String, Refusal> {
        let mut sign_in = self.locked()?;
        let is_right = matches!(&*sign_in, SignIn::Open { token } if same(token, typed.trim()));
        let fresh = || random().map_err(|_| Refusal::WrongToken);
        if !is_right {
            return Err(Refusal::WrongToken);
        }
        let session = Session { id: fresh()?, form_token: fresh()?, message: None };
        // A cookie without `Max-Age` is forgotten when the browser ends. `Secure` is left out, as not every browser
        // accepts it on a loopback address without TLS.
        let cookie = format!("{}={}; Path=/; HttpOnly; SameSite=Strict", self.cookie_name(), session.id);
        *sign_in = SignIn::Used(session);
        Ok(cookie)
    }

    /// Returns whether decisions are allowed in some session.
    pub(super) fn allows_decisions(&self) -> bool {
        self.sign_in.is_some()
    }

    /// Returns the token for the forms of this session.
    pub(super) fn form_token(&self, headers: &HeaderMap) -> Result<String, Refusal> {
        self.in_session(headers, |session| session.form_token.clone())
    }

    /// Checks that a form of this session carries its token.
    pub(super) fn admit_decision(&self, headers: &HeaderMap, form_token: Option<&str>) -> Result<(), Refusal> {
        self.admit_form(headers)?;
        let is_own = self.in_session(headers, |session| same(&session.form_token, form_token.unwrap_or_default()))?;
        if is_own { Ok(()) } else { Err(Refusal::OtherSite) }
    }

    /// Keeps a message for the next page of this session.
    pub(super) fn leave_message(&self, headers: &HeaderMap, message: String) {
        let _ = self.in_session(headers, |session| session.message = Some(message));
    }

    /// Takes the message that waits for this session.
    pub(super) fn message(&self, headers: &HeaderMap) -> Option<String> {
        self.in_session(headers, |session| session.message.take()).ok().flatten()
    }

    fn in_session<T>(&self, headers: &HeaderMap, act: impl FnOnce(&mut Session) -> T) -> Result<T, Refusal> {
        let name = self.cookie_name();
        let mut sign_in = self.locked()?;
        let SignIn::Used(session) = &mut *sign_in else { return Err(Refusal::NoSession) };
        let cookies = headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
        let mut cookies = cookies.flat_map(|line| line.split(';')).filter_map(|cookie| cookie.trim().split_once('='));
        match cookies.any(|(it, id)| it == name && same(&session.id, id)) {
            true => Ok(act(session)),
            false => Err(Refusal::NoSession),
        }
    }

    fn locked(&self) -> Result<MutexGuard<'_, SignIn>, Refusal> {
        let sign_in = self.sign_in.as_ref().ok_or(Refusal::ReadOnly)?;
        Ok(sign_in.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Browsers share cookies between the ports of a host, so the name holds the port.
    fn cookie_name(&self) -> String {
        format!("idem_session_{}", self.port)
    }

    fn hosts(&self) -> Vec<String> {
        let hosts = ["127.0.0.1", "localhost"];
        let with_port = hosts.map(|host| format!("{host}:{}", self.port));
        // Browsers leave out the port of the scheme.
        let without = hosts.into_iter().filter(|_| self.port == 80).map(str::to_owned);
        with_port.into_iter().chain(without).collect()
    }
}

fn random() -> Result<String, Stop> {
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| Stop::Refused(format!("this system has no random bytes: {error}")))?;
    Ok(bytes.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}")))
}

/// Compares two secrets in a time that depends only on their lengths.
fn same(secret: &str, other: &str) -> bool {
    let differences = secret.bytes().zip(other.bytes()).fold(0, |all, (one, other)| all | (one ^ other));
    secret.len() == other.len() && differences == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(headers: &[(&str, &str)]) -> Request<()> {
        let request = headers.iter().fold(Request::builder(), |request, (name, value)| request.header(*name, *value));
        request.body(()).unwrap()
    }

    #[test]
    fn a_request_for_another_host_is_refused() {
        let (guard, _) = Guard::new(8080, false).unwrap();
        for host in ["127.0.0.1:8080", "localhost:8080", "LocalHost:8080"] {
            assert_eq!(guard.admit(&request(&[("host", host)])), Ok(()), "{host}");
        }
        for host in ["evil.example:8080", "127.0.0.1", "127.0.0.1:80", "localhost:8080.evil.example", "[::1]:8080", ""]
        {
            assert_eq!(guard.admit(&request(&[("host", host)])), Err(Refusal::OtherHost), "{host}");
        }
        assert_eq!(guard.admit(&request(&[])), Err(Refusal::OtherHost));
        let twice = [("host", "localhost:8080"), ("host", "evil.example")];
        assert_eq!(guard.admit(&request(&twice)), Err(Refusal::OtherHost));
        let (guard, _) = Guard::new(80, false).unwrap();
        assert_eq!(guard.admit(&request(&[("host", "localhost")])), Ok(()));
    }

    #[test]
    fn a_form_of_another_site_is_refused() {
        let (guard, token) = Guard::new(8080, true).unwrap();
        let cookie = guard.sign_in(&token.unwrap()).unwrap();
        let cookie = cookie.split(';').next().unwrap();
        let decides = |headers: &[(&str, &str)], form_token: Option<&str>| {
            let request = request(&[headers, &[("cookie", cookie)]].concat());
            guard.admit_decision(request.headers(), form_token)
        };
        let form_token = guard.form_token(request(&[("cookie", cookie)]).headers()).unwrap();
        assert_eq!(decides(&[], Some(&form_token)), Ok(()));
        let own = [("origin", "http://127.0.0.1:8080"), ("sec-fetch-site", "same-origin")];
        assert_eq!(decides(&own, Some(&form_token)), Ok(()));
        for other in [
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", "http://127.0.0.1:8081"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert_eq!(decides(&[other], Some(&form_token)), Err(Refusal::OtherSite), "{other:?}");
        }
        for wrong in [None, Some(""), Some("0"), Some(&*"0".repeat(40))] {
            assert_eq!(decides(&[], wrong), Err(Refusal::OtherSite), "{wrong:?}");
        }
    }

    #[test]
    fn the_token_works_once() {
        let (guard, token) = Guard::new(8080, true).unwrap();
        let token = token.unwrap();
        assert_eq!(guard.sign_in("guess"), Err(Refusal::WrongToken));
        let cookie = guard.sign_in(&format!(" {token}\n")).unwrap();
        assert!(cookie.starts_with("idem_session_8080=") && cookie.ends_with("HttpOnly; SameSite=Strict"), "{cookie}");
        assert_eq!(guard.sign_in(&token), Err(Refusal::WrongToken));
        let other = request(&[("cookie", "idem_session_8080=guess")]);
        assert_eq!(guard.form_token(other.headers()), Err(Refusal::NoSession));
    }

    #[test]
    fn a_read_only_page_has_no_session() {
        let (guard, token) = Guard::new(8080, false).unwrap();
        assert_eq!((token, guard.sign_in("")), (None, Err(Refusal::ReadOnly)));
        assert_eq!(guard.admit_decision(request(&[]).headers(), Some("")), Err(Refusal::ReadOnly));
    }
}
