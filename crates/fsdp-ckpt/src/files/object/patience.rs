//! How often and how long a request is repeated, and for which errors.

use std::{
    fmt,
    future::Future,
    hash::{BuildHasher, RandomState},
    pin::pin,
    time::{Duration, Instant},
};

use object_store::{Error, Result};

/// Codes of S3 in answers with a status of 4xx that ask for the request to be repeated: the connection was idle or broke
/// while the request was sent, or another request for the object was in progress.
const PASSING_CODES: [&str; 5] =
    ["RequestTimeout", "IncompleteBody", "BadDigest", "ConditionalRequestConflict", "OperationAborted"];

/// How often it is looked whether this process was asked to stop.
const TICK: Duration = Duration::from_millis(100);

/// Limits on the repetition of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Maximum number of times that a request is repeated.
    pub(super) retries: u32,
    /// Maximum time after which a request is repeated.
    pub(super) time: Duration,
    /// The first pause; each later one is twice as long, up to `pause_max`.
    pub(super) pause: Duration,
    /// The longest pause.
    pub(super) pause_max: Duration,
    /// Whether this process was asked to stop.
    pub(super) is_hurried: fn() -> bool,
    /// How long a failing request is repeated from then on: long enough for a store to recover from a hiccup, so that the last
    /// state still gets there; short enough for someone who waits.
    pub(super) hurried_time: Duration,
}

impl Patience {
    pub(super) const USUAL: Patience = Patience {
        retries: 10,
        time: Duration::from_secs(180),
        pause: Duration::from_millis(100),
        pause_max: Duration::from_secs(15),
        is_hurried: crate::files::hurry::is_hurried,
        hurried_time: Duration::from_secs(10),
    };

    /// Starts with no failed attempt.
    pub(super) fn attempts(self) -> Attempts {
        Attempts { patience: self, start: Instant::now(), failed: 0, hurried: None }
    }

    /// Sends a request until it succeeds, fails for good, or has been tried long enough.
    pub(super) async fn ask<T, F>(self, request: impl Fn() -> F + Send) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send,
        T: Send,
    {
        let mut attempts = self.attempts();
        loop {
            match attempts.send(request()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => attempts.pause_after(error).await?,
            }
        }
    }
}

/// The attempts of one request.
#[derive(Debug)]
pub(super) struct Attempts {
    patience: Patience,
    start: Instant,
    failed: u32,
    /// Since when it should not be repeated for long.
    hurried: Option<Instant>,
}

impl Attempts {
    /// Whether an attempt has failed that may have taken effect all the same: its answer may be lost or damaged.
    pub(super) fn may_have_worked(&self) -> bool {
        self.failed > 0
    }

    /// Sends the request. A repeated one may be cut short.
    ///
    /// # Errors
    /// The error of the request, or that it is not waited for.
    pub(super) async fn send<T>(&mut self, request: impl Future<Output = Result<T>>) -> Result<T> {
        if self.failed == 0 {
            return request.await;
        }
        let mut request = pin!(request);
        loop {
            if let Ok(answer) = tokio::time::timeout(TICK, &mut request).await {
                return answer;
            }
            if self.is_late() {
                let reason = "the process was asked to stop, and does not wait for an answer";
                return Err(Error::Generic { store: "object store", source: reason.into() });
            }
        }
    }

    /// Whether the time is over that is left when there is a hurry.
    fn is_late(&mut self) -> bool {
        let is_hurried = (self.patience.is_hurried)();
        is_hurried && self.hurried.get_or_insert_with(Instant::now).elapsed() > self.patience.hurried_time
    }

    /// Waits until the next attempt.
    ///
    /// # Errors
    /// The error of the last attempt, if it is final or was the last one.
    pub(super) async fn pause_after(&mut self, error: Error) -> Result<()> {
        if !may_pass(&error) {
            return Err(error);
        }
        let (elapsed, limits) = (self.start.elapsed(), self.patience);
        if self.failed == limits.retries || elapsed > limits.time || self.is_late() {
            let given_up = GivenUp { attempts: self.failed + 1, elapsed, last: error };
            return Err(Error::Generic { store: "object store", source: Box::new(given_up) });
        }
        let pause = limits.pause.saturating_mul(1 << self.failed.min(20)).min(limits.pause_max);
        self.failed += 1;
        // Ranks that failed together should not come back together. A new hasher has random keys.
        let random = RandomState::new().hash_one(self.failed) % 1024;
        let end = Instant::now() + pause.mul_f64(0.75 + random as f64 / 2048.0);
        while !self.is_late() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            tokio::time::sleep(left.min(TICK)).await;
        }
        Ok(())
    }
}

/// A request was given up.
#[derive(Debug)]
pub(super) struct GivenUp {
    pub(super) attempts: u32,
    pub(super) elapsed: Duration,
    /// The error of the last attempt.
    pub(super) last: Error,
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GivenUp { attempts, elapsed, last } = self;
        write!(f, "tried {attempts} times in {:.1} s: {last}", elapsed.as_secs_f64())
    }
}

impl std::error::Error for GivenUp {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.last)
    }
}

/// Whether the same request may succeed later: unless the service has understood and refused it.
fn may_pass(error: &Error) -> bool {
    let text = || error.to_string();
    match error {
        Error::Generic { .. } => !is_refusal(&text()),
        Error::AlreadyExists { .. } => PASSING_CODES.iter().any(|code| text().contains(code)),
        Error::JoinError { .. } => true,
        _ => false,
    }
}

/// Whether an error of no particular kind is an answer that will not change. The crate gives such statuses in its messages
/// only.
fn is_refusal(text: &str) -> bool {
    const STATUS: &str = "status code: ";
    if text.contains("redirect without LOCATION") {
        return true;
    }
    let status = text.find(STATUS).and_then(|at| text[at + STATUS.len()..].get(..3)?.parse::<u16>().ok());
    match status {
        // Request timeout, too early, too many requests.
        None | Some(408 | 425 | 429) => false,
        // Not implemented, unknown version of HTTP.
        Some(501 | 505) => true,
        Some(status) => status < 500 && !PASSING_CODES.iter().any(|code| text.contains(code)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn generic(text: &str) -> Error {
        Error::Generic { store: "test", source: text.into() }
    }

    #[test]
    fn repetition_ends_when_time_is_over() {
        let mut late = Patience { time: Duration::ZERO, ..Patience::USUAL }.attempts();
        let error = crate::files::object::runtime::wait(late.pause_after(generic("cut"))).unwrap_err();
        assert!(error.to_string().contains("tried 1 times in 0.0 s: "), "{error}");
    }

    /// Long pauses and requests without an answer end when the process should.
    #[test]
    fn hurry_ends_repetitions_within_seconds() {
        static STOP: AtomicBool = AtomicBool::new(false);
        let minute = Duration::from_secs(60);
        let patience = Patience {
            pause: minute,
            pause_max: minute,
            is_hurried: || STOP.load(Ordering::Relaxed),
            hurried_time: Duration::from_secs(1),
            ..Patience::USUAL
        };
        let start = Instant::now();
        let stop = std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            STOP.store(true, Ordering::Relaxed);
        });
        let asked =
            crate::files::object::runtime::wait(patience.ask(|| async { Result::<()>::Err(generic("cut")) }));
        assert!(asked.unwrap_err().to_string().contains("tried 2 times"), "once more after the pause");
        stop.join().unwrap();
        assert!((Duration::from_secs(1)..Duration::from_secs(10)).contains(&start.elapsed()));
        // The second request has no answer.
        let sent = AtomicBool::new(false);
        let asked = crate::files::object::runtime::wait(Patience { pause: TICK, ..patience }.ask(|| async {
            if sent.swap(true, Ordering::Relaxed) {
                tokio::time::sleep(minute).await;
            }
            Result::<()>::Err(generic("cut"))
        }));
        let error = asked.unwrap_err().to_string();
        assert!(error.contains("was asked to stop") && start.elapsed() < Duration::from_secs(20), "{error}");
    }

    #[test]
    fn only_refusals_are_final() {
        for text in [
            "status code: 500: x",
            "status code: 429",
            "status code: 408",
            "cut",
            "status code: 400: <Code>RequestTimeout",
        ] {
            assert!(may_pass(&generic(text)), "{text}");
        }
        for text in [
            "status code: 400: x",
            "status code: 413",
            "status code: 301",
            "status code: 501",
            "redirect without LOCATION",
        ] {
            assert!(!may_pass(&generic(text)), "{text}");
        }
        let exists = |text: &str| Error::AlreadyExists { path: "a".to_owned(), source: text.into() };
        assert!(may_pass(&exists("<Code>ConditionalRequestConflict</Code>")));
        assert!(!may_pass(&exists("<Code>PreconditionFailed</Code>")));
    }
}
