//! Runs cases against a server.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};

use super::cases::{Case, Expect, Explanation, FIRST, Field, File, How, Profile, Send, Step, fill, header, key_text};
use super::wire::{Connection, Reply, Server};

/// Pause between two requests of a step that polls the server until its answer changes.
const POLL: Duration = Duration::from_millis(10);

/// Time after which a server has most likely noticed that the client hung up. No response confirms that the server has
/// noticed, so a slower server passes the case untested.
const NOTICE: Duration = Duration::from_millis(300);

/// Factor by which operations take longer when a case is repeated. A case is repeated if its operation ended before the
/// duplicates were answered.
const LONGER: u64 = 6;

/// State of one run of a case.
struct Run {
    /// Random number of this run, from which its keys derive.
    unique: u128,
    /// Factor by which operations take longer than the case states.
    factor: u64,
    /// Responses to which later steps refer, by their labels.
    replies: HashMap<String, Reply>,
    /// True if an operation ended before its duplicates were answered.
    was_too_fast: bool,
}

/// Checks a server with the cases of a file.
pub(super) struct Checker<'a> {
    pub(super) server: &'a Server,
    pub(super) file: &'a File,
    pub(super) profile: Profile,
    /// Time limit for each answer.
    pub(super) patience: Duration,
}

/// A request that is ready to be sent.
struct Message {
    bytes: Vec<u8>,
    body_len: usize,
}

impl Checker<'_> {
    /// Returns the number of runs of the operations.
    pub(super) async fn count(&self) -> Result<u64, String> {
        let path = &self.file.counter;
        let bytes = self.server.request("GET", path, &[], b"");
        let reply = self.exchange(&bytes).await.map_err(|error| format!("GET {path}: {error}"))?;
        let numbers = match reply.json() {
            Value::Object(members) => members.values().filter_map(Value::as_u64).collect(),
            value => Vec::from_iter(value.as_u64()),
        };
        match (reply.status, &numbers[..]) {
            (200, [count]) => Ok(*count),
            (status, _) => Err(format!(
                "GET {path} answers {status} `{}`, which is no counter: a number, or a JSON object with one number",
                reply.excerpt()
            )),
        }
    }

    /// Runs a case. The error describes the violated rule.
    pub(super) async fn run(&self, case: &Case) -> Result<(), String> {
        match self.run_once(case, 1).await {
            // On a busy machine, duplicates may arrive after the operation has ended.
            Err((_, true)) => self.run_once(case, LONGER).await.map_err(|(error, was_too_fast)| match was_too_fast {
                true => format!("{error} (the operation was over by then, or its duplicates wait for it)"),
                false => error,
            }),
            ended => ended.map_err(|(error, _)| error),
        }
    }

    /// Runs a case once. The error comes with `was_too_fast`: whether an operation ended before its duplicates were
    /// answered.
    async fn run_once(&self, case: &Case, factor: u64) -> Result<(), (String, bool)> {
        let mut random = [0_u8; 16];
        getrandom::fill(&mut random).map_err(|error| (format!("there is no randomness: {error}"), false))?;
        let unique = u128::from_ne_bytes(random);
        let mut run = Run { unique, factor, replies: HashMap::new(), was_too_fast: false };
        let ended = async {
            let before = self.count().await?;
            self.steps(&case.steps, "", &mut run).await?;
            let runs = self.count().await?.checked_sub(before).ok_or("the counter went back")?;
            match case.runs.allows(&runs) {
                true => Ok(()),
                false => Err(format!("the number of runs is {runs}, not {}", case.runs)),
            }
        };
        let ended: Result<(), String> = ended.await;
        ended.map_err(|error| (error, run.was_too_fast))
    }

    fn steps<'b>(
        &'b self,
        steps: &'b [Step],
        within: &'b str,
        run: &'b mut Run,
    ) -> Pin<Box<dyn Future<Output = Result<(), String>> + 'b>> {
        Box::pin(async move {
            for (number, step) in steps.iter().enumerate() {
                let place = format!("{within}{}", number + 1);
                let at = |error: String| format!("step {place}: {error}");
                let message = self.message(&step.send, run).map_err(at)?;
                let received = match step.while_running.is_empty() {
                    true => self.send(&message, step.how).await.map_err(at)?,
                    false => vec![self.send_around(&message, &step.while_running, &place, run).await?],
                };
                for reply in &received {
                    self.check(&step.expect, reply, run).map_err(at)?;
                }
                alike(&received).map_err(at)?;
                if let (Some(label), Some(reply)) = (&step.label, received.into_iter().find(|it| it.status != 409)) {
                    run.replies.insert(label.clone(), reply);
                }
            }
            Ok(())
        })
    }

    /// Sends `message`, and runs `steps` while its operation runs.
    async fn send_around(
        &self,
        message: &Message,
        steps: &[Step],
        place: &str,
        run: &mut Run,
    ) -> Result<Reply, String> {
        let at = |error: String| format!("step {place}: {error}");
        let before = self.count().await?;
        let mut connection = self.connect().await.map_err(at)?;
        self.in_time(connection.write(&message.bytes)).await.map_err(at)?;
        self.begun(before).await.map_err(at)?;
        let ended = self.steps(steps, &format!("{place}."), run).await;
        run.was_too_fast |= timeout_at(Instant::now() + POLL, connection.first_byte()).await.is_ok();
        ended?;
        self.in_time(connection.reply()).await.map_err(at)
    }

    fn message(&self, send: &Send, run: &Run) -> Result<Message, String> {
        let caller = send.caller.as_deref().unwrap_or(FIRST);
        let lines = self.file.callers.get(caller).ok_or_else(|| format!("there is no caller `{caller}`"))?;
        let mut fields = lines.iter().map(|line| header(line)).collect::<Result<Vec<_>, _>>()?;
        fields.push(("content-type".to_owned(), "application/json".to_owned()));
        for line in &send.headers {
            fields.push(header(line)?);
        }
        let name = "idempotency-key";
        if let Some(key) = &send.key {
            let key = key_text(key, run.unique)?;
            // The keys of the IETF draft are strings of RFC 9651; the other profiles send keys without quotes.
            let value = if self.profile == Profile::Ietf { format!("\"{key}\"") } else { key };
            fields.push((name.to_owned(), value));
        }
        for line in &send.fields {
            fields.push((name.to_owned(), fill(line, run.unique)?));
        }
        let mut body = send.body.as_ref().unwrap_or(&self.file.body).clone();
        if let Some(takes) = body.get_mut("takes_ms") {
            *takes = takes.as_u64().map(|takes| takes.saturating_mul(run.factor)).into();
        }
        let body = match body {
            Value::String(text) => text,
            value => value.to_string(),
        };
        let mut path = if send.other_path { &self.file.other_path } else { &self.file.path }.clone();
        if let Some(query) = &send.query {
            path.push(if path.contains('?') { '&' } else { '?' });
            path.push_str(query);
        }
        let method = send.method.as_deref().unwrap_or("POST");
        let bytes = self.server.request(method, &path, &fields, body.as_bytes());
        Ok(Message { bytes, body_len: body.len() })
    }

    /// Sends `message`, and returns the responses: none if the client hangs up.
    async fn send(&self, message: &Message, how: How) -> Result<Vec<Reply>, String> {
        match how {
            How::Alone => Ok(vec![self.exchange(&message.bytes).await?]),
            // Open all connections before the first request is sent, so that the requests arrive together.
            How::Together(count) => {
                let mut connections = Vec::new();
                for _ in 0..count {
                    connections.push(self.connect().await?);
                }
                for connection in &mut connections {
                    self.in_time(connection.write(&message.bytes)).await?;
                }
                let mut replies = Vec::new();
                for connection in &mut connections {
                    replies.push(self.in_time(connection.reply()).await?);
                }
                Ok(replies)
            }
            How::Pipelined(count) => {
                let mut connection = self.connect().await?;
                self.in_time(connection.write(&message.bytes.repeat(count.into()))).await?;
                let mut replies = Vec::new();
                while replies.len() < usize::from(count) {
                    match self.in_time(connection.next_reply()).await? {
                        Some(reply) => replies.push(reply),
                        None if replies.is_empty() => return Err("the server closed the connection".to_owned()),
                        // A server may close a connection after a response. Requests that it has not answered may be
                        // sent again over another connection (RFC 9112, section 9.6).
                        None => replies.push(self.exchange(&message.bytes).await?),
                    }
                }
                Ok(replies)
            }
            How::UntilFree => {
                let deadline = Instant::now() + self.patience;
                loop {
                    let reply = self.exchange(&message.bytes).await?;
                    if reply.status != 409 {
                        return Ok(vec![reply]);
                    }
                    if Instant::now() > deadline {
                        return Err(format!("still 409 after {} s: the key is never free", self.patience.as_secs()));
                    }
                    sleep(10 * POLL).await;
                }
            }
            How::HangUpInBody => {
                let mut connection = self.connect().await?;
                // The server has only half of the body, so it must not reserve the key.
                let half = message.bytes.len() - message.body_len.div_ceil(2);
                self.in_time(connection.write(&message.bytes[..half])).await?;
                // Gives the server time to read the first half.
                sleep(NOTICE).await;
                Ok(Vec::new())
            }
            How::HangUpWhileRunning => {
                let before = self.count().await?;
                let mut connection = self.connect().await?;
                self.in_time(connection.write(&message.bytes)).await?;
                self.begun(before).await?;
                Ok(Vec::new())
            }
            How::HangUpInResponse => {
                let mut connection = self.connect().await?;
                self.in_time(connection.write(&message.bytes)).await?;
                self.in_time(connection.first_byte()).await?;
                drop(connection);
                // Gives the server time to notice the hang-up.
                sleep(NOTICE).await;
                Ok(Vec::new())
            }
        }
    }

    /// Waits until the operation has begun once more than `before`.
    async fn begun(&self, before: u64) -> Result<(), String> {
        let deadline = Instant::now() + self.patience;
        while self.count().await? == before {
            if Instant::now() > deadline {
                return Err(format!("the operation did not begin within {} s", self.patience.as_secs()));
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    async fn connect(&self) -> Result<Connection, String> {
        self.in_time(self.server.connect()).await
    }

    async fn exchange(&self, bytes: &[u8]) -> Result<Reply, String> {
        self.in_time(async {
            let mut connection = self.server.connect().await?;
            connection.write(bytes).await?;
            connection.reply().await
        })
        .await
    }

    async fn in_time<T>(&self, asking: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        let answer = timeout_at(Instant::now() + self.patience, asking).await;
        answer.unwrap_or_else(|_| Err(format!("no answer within {} s", self.patience.as_secs())))
    }

    fn check(&self, expect: &Expect, reply: &Reply, run: &Run) -> Result<(), String> {
        let status = reply.status;
        if let Some(expected) = expect.status.as_ref().and_then(|status| status.of(self.profile))
            && !expected.allows(&status)
        {
            return Err(format!("status {status}, not {expected}: `{}`", reply.excerpt()));
        }
        let labelled = |label: &String| run.replies.get(label).ok_or_else(|| format!("there is no response `{label}`"));
        if let Some(label) = &expect.same_as {
            let original = labelled(label)?;
            // If the case allows several statuses, a refusal need not equal the response `same_as`.
            if expect.status.is_none() || (200..300).contains(&status) {
                if status != original.status {
                    let was = original.status;
                    return Err(format!("status {status}, not the {was} of the first: `{}`", reply.excerpt()));
                }
                if reply.body != original.body {
                    return Err(format!("the body is `{}`, not `{}`", reply.excerpt(), original.excerpt()));
                }
            }
            for name in &expect.same_headers {
                let (now, then) = (reply.field(name), original.field(name));
                if now != then {
                    return Err(format!("{name} is {now:?}, not {then:?}"));
                }
            }
        }
        // Only successful responses must differ; two refusals may have equal bodies.
        if let Some(label) = &expect.differs_from
            && (200..300).contains(&status)
            && labelled(label)?.body == reply.body
        {
            return Err(format!("the response is that of another operation: `{}`", reply.excerpt()));
        }
        fields(&expect.headers, reply, run.unique)?;
        if let Some(expected) = &expect.body
            && !holds(&reply.json(), expected)
        {
            return Err(format!("the body is `{}`, without {expected}", reply.excerpt()));
        }
        match expect.explained {
            Some(explanation) if !(200..300).contains(&status) => explained(reply, explanation),
            _ => Ok(()),
        }
    }
}

/// Checks that a refusal has this explanation.
fn explained(reply: &Reply, explanation: Explanation) -> Result<(), String> {
    let is_problem = reply.field("content-type").first().is_some_and(|it| it.starts_with("application/problem+json"))
        && reply.json().get("title").is_some_and(Value::is_string);
    let body = String::from_utf8_lossy(&reply.body);
    let has_link = !reply.field("link").is_empty() || body.contains("://");
    match explanation {
        _ if is_problem || has_link => Ok(()),
        Explanation::Link => {
            Err(format!("neither application/problem+json nor a Link nor a URL: `{}`", reply.excerpt()))
        }
        Explanation::Text if body.trim().is_empty() => Err("neither a body nor a Link".to_owned()),
        Explanation::Text => Ok(()),
    }
}

/// Checks that all duplicates with a successful response got the same response.
fn alike(replies: &[Reply]) -> Result<(), String> {
    let mut successes = replies.iter().filter(|reply| (200..300).contains(&reply.status));
    let Some(first) = successes.next() else { return Ok(()) };
    match successes.find(|other| (other.status, &other.body) != (first.status, &first.body)) {
        Some(other) => Err(format!("two duplicates got `{}` and `{}`", first.excerpt(), other.excerpt())),
        None => Ok(()),
    }
}

fn fields(expected: &BTreeMap<String, Field>, reply: &Reply, unique: u128) -> Result<(), String> {
    for (name, expected) in expected {
        let values = reply.field(name);
        match expected {
            Field::Is(true) if values.is_empty() => return Err(format!("there is no {name}")),
            Field::Is(false) if !values.is_empty() => return Err(format!("{name} is there: {values:?}")),
            Field::Text(text) if values != [text] => return Err(format!("{name} is {values:?}, not `{text}`")),
            Field::Other { not } if values.contains(&&**not) => return Err(format!("{name} is there: `{not}`")),
            Field::Number { at_least } => match &values[..] {
                [value] if value.parse::<u64>().is_ok_and(|value| value >= *at_least) => {}
                _ => return Err(format!("{name} is {values:?}, not a whole number of at least {at_least}")),
            },
            Field::Key { key } if values != [key_text(key, unique)?] => {
                return Err(format!("{name} is {values:?}, not the key of the request"));
            }
            Field::Count { count } if values.len() != *count => {
                return Err(format!("{name} is there {}, not {count}", times(values.len() as u64)));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns whether `value` contains `expected`. Further members are allowed.
fn holds(value: &Value, expected: &Value) -> bool {
    match (value, expected) {
        (Value::Null, _) => false,
        (_, Value::Null) => true,
        (Value::Object(members), Value::Object(expected)) => {
            expected.iter().all(|(name, expected)| members.get(name).is_some_and(|value| holds(value, expected)))
        }
        _ => value == expected,
    }
}

fn times(count: u64) -> String {
    match count {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        count => format!("{count} times"),
    }
}
