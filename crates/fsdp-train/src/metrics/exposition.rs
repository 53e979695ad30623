//! Exposes the metrics of the last step to Prometheus over HTTP.
//!
//! Clients receive text (<https://prometheus.io/docs/instrumenting/exposition_formats>), and cannot change anything.
//! Requests are answered one at a time, with limits on time and size, on a separate thread: no network traffic can
//! delay a step or end a run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::sink::Figure;

/// Time limit for a request and its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum size of the head of a request, in bytes.
const HEAD_MAX: usize = 8 << 10;

/// Pause after a connection could not be accepted, for instance because file descriptors are temporarily exhausted.
const PAUSE: Duration = Duration::from_millis(100);

/// The exposed figures of a step: name in `metrics.jsonl`, name in Prometheus, and description.
const STEP_FIGURES: [(&str, &str, &str); 15] = [
    (
        "loss",
        "fsdp_loss",
        "Mean loss over the counted tokens of the global batch, with z-loss and router loss.",
    ),
    ("grad_norm", "fsdp_grad_norm", "Global L2 norm of the gradient, before clipping."),
    ("lr", "fsdp_learning_rate", "Learning rate."),
    ("tokens_per_s", "fsdp_tokens_per_second", "Input tokens per second, over all ranks."),
    ("step_ms", "fsdp_step_milliseconds", "Wall time of the step."),
    ("mfu", "fsdp_model_flops_utilization", "Model FLOP/s over peak FLOP/s."),
    ("wait_ms", "fsdp_wait_milliseconds", "How long ranks waited for each other in a step, on average."),
    ("slowest_rank", "fsdp_slowest_rank", "The rank that the others waited for."),
    ("cross_entropy", "fsdp_cross_entropy", "The part of the loss that is cross-entropy."),
    ("z_loss", "fsdp_z_loss", "The part of the loss that is z-loss."),
    ("router_loss", "fsdp_router_loss", "The part of the loss that balances routers."),
    ("router_z_loss", "fsdp_router_z_loss", "The part of the loss that is z-loss of routers."),
    (
        "router_sequence_loss",
        "fsdp_router_sequence_loss",
        "The part of the loss that balances routers within sequences.",
    ),
    (
        "expert_imbalance",
        "fsdp_expert_imbalance",
        "Largest load of an expert over the mean of its layer, in the worst layer.",
    ),
    ("idle_experts", "fsdp_idle_experts", "Experts without a token in a step, over all layers."),
];

/// The exposed figures of an evaluation: name in `metrics.jsonl`, name in Prometheus, and description.
const EVAL_FIGURES: [(&str, &str, &str); 2] = [
    ("eval_loss", "fsdp_eval_loss", "Mean cross-entropy over the counted tokens of the set."),
    ("eval_perplexity", "fsdp_eval_perplexity", "e to the power of the loss."),
];

/// A server that exposes metrics until it is dropped.
pub(crate) struct MetricsServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    is_shut_down: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    steps: u64,
    step: u64,
    /// Time of the last update, in seconds since 1970.
    updated_s: f64,
    step_figures: BTreeMap<String, f64>,
    eval_figures: BTreeMap<String, BTreeMap<String, f64>>,
}

impl MetricsServer {
    /// Listens on an address for a run of `steps` steps, of which `done` are done.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub(crate) fn listen(address: SocketAddr, steps: u64, done: u64) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let state = State { steps, step: done, updated_s: now_s(), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let serving = Arc::clone(&shared);
        let thread =
            thread::Builder::new().name("metrics".to_owned()).spawn(move || serve(&listener, &serving))?;
        Ok(Self { shared, address, thread: Some(thread) })
    }

    /// The address that it listens on.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Updates the figures after a step.
    pub(super) fn step(&self, step: u64, figures: &[Figure]) {
        let mut state = self.shared.state();
        (state.step, state.updated_s) = (step, now_s());
        state.step_figures.extend(figures.iter().map(|figure| (figure.name.clone(), figure.value)));
    }

    /// Updates the figures of an evaluation set.
    pub(super) fn evaluation(&self, set: &str, figures: &[Figure]) {
        let figures = figures.iter().map(|figure| (figure.name.clone(), figure.value)).collect();
        self.shared.state().eval_figures.insert(set.to_owned(), figures);
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.shared.is_shut_down.store(true, Ordering::Relaxed);
        // The thread blocks until a client connects. If this machine cannot connect to itself, the thread lives until
        // the process ends.
        if TcpStream::connect_timeout(&reachable(self.address), REQUEST_TIMEOUT).is_ok() {
            // It does not matter whether the thread panicked or ended.
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns an address at which this machine can connect to a listener, even if that listens on all addresses.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        let local = SocketAddr::from(([127, 0, 0, 1], address.port()));
        let local_v6 = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, address.port()));
        address = if address.is_ipv4() { local } else { local_v6 };
    }
    address
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn serve(listener: &TcpListener, shared: &Shared) {
    for stream in listener.incoming() {
        if shared.is_shut_down.load(Ordering::Relaxed) {
            return;
        }
        let result = stream.and_then(|stream| respond(stream, || shared.state().text()));
        if let Err(error) = result {
            tracing::debug!(%error, "a request for metrics failed");
            if !is_client_error(&error) {
                thread::sleep(PAUSE);
            }
        }
    }
}

/// Whether the client caused the error: it disconnected, was too slow, or sent too much.
fn is_client_error(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::BrokenPipe
            | Kind::ConnectionAborted
            | Kind::ConnectionReset
            | Kind::InvalidData
            | Kind::TimedOut
            | Kind::UnexpectedEof
            | Kind::WouldBlock
    )
}

/// Answers one request and closes the connection.
fn respond(mut stream: TcpStream, text: impl FnOnce() -> String) -> io::Result<()> {
    let head = head(&mut stream)?;
    let mut words = head.split(|byte| byte.is_ascii_whitespace());
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split(|&byte| byte == b'?').next().unwrap_or_default();
    let (status, body) = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics") => ("200 OK", text()),
        (b"GET" | b"HEAD", _) => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET and HEAD are supported\n".to_owned()),
    };
    let len = body.len();
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {len}\r\nConnection: close\r\n\r\n"
    );
    if method != b"HEAD" {
        response += &body;
    }
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    stream.write_all(response.as_bytes())
}

/// Reads up to the first empty line.
fn head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    let (mut head, mut buffer) = (Vec::new(), [0; 1024]);
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(remaining))?;
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        head.extend(&buffer[..count]);
        if head.len() > HEAD_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Ok(head)
}

impl State {
    fn text(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, f64)]| {
            if samples.is_empty() {
                return;
            }
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{labels} {}", number(*value));
            }
        };
        let unlabeled = |value: f64| vec![(String::new(), value)];
        family("fsdp_steps", "gauge", "Steps of the whole run.", &unlabeled(as_f64(self.steps)));
        family("fsdp_step", "counter", "Steps done.", &unlabeled(as_f64(self.step)));
        let help = "When the last step was done, in seconds since 1970.";
        family("fsdp_step_timestamp_seconds", "gauge", help, &unlabeled(self.updated_s));
        for (key, name, help) in STEP_FIGURES {
            let value = self.step_figures.get(key);
            family(name, "gauge", help, &value.map_or(Vec::new(), |&value| unlabeled(value)));
        }
        for (key, name, help) in EVAL_FIGURES {
            // The name of a set contains nothing that needs to be escaped.
            let sample = |(set, figures): (&String, &BTreeMap<String, f64>)| {
                Some((format!("{{set=\"{set}\"}}"), *figures.get(key)?))
            };
            let samples: Vec<(String, f64)> = self.eval_figures.iter().filter_map(sample).collect();
            family(name, "gauge", help, &samples);
        }
        text
    }
}

#[expect(clippy::cast_precision_loss, reason = "a number of steps")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

fn number(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".to_owned(),
        f64::NEG_INFINITY => "-Inf".to_owned(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exposition() -> MetricsServer {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        MetricsServer::listen(any_port, 50, 3).unwrap()
    }

    fn send(exposition: &MetricsServer, request: &str) -> String {
        let mut stream = TcpStream::connect(exposition.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    fn figure(name: &str, value: f64) -> Figure {
        Figure { name: name.to_owned(), value }
    }

    #[test]
    fn last_step_and_last_evaluations_are_exposed() {
        let exposition = exposition();
        exposition.step(4, &[figure("loss", 5.5), figure("tokens", 9.0)]);
        exposition.step(5, &[figure("loss", f64::NAN)]);
        exposition.evaluation("books", &[figure("eval_loss", 2.0), figure("eval_perplexity", f64::INFINITY)]);
        exposition.evaluation("code", &[figure("eval_loss", 3.0)]);
        let response = send(&exposition, "GET /metrics?a=b HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        let samples: Vec<&str> = body
            .lines()
            .filter(|line| !line.starts_with('#') && !line.starts_with("fsdp_step_timestamp"))
            .collect();
        let expected = [
            "fsdp_steps 50",
            "fsdp_step 5",
            "fsdp_loss NaN",
            "fsdp_eval_loss{set=\"books\"} 2",
            "fsdp_eval_loss{set=\"code\"} 3",
            "fsdp_eval_perplexity{set=\"books\"} +Inf",
        ];
        assert_eq!(samples, expected, "{body}");
        assert!(body.contains("# TYPE fsdp_step counter\n"), "{body}");
    }

    #[test]
    fn bad_requests_are_rejected_and_next_request_is_served() {
        let exposition = exposition();
        assert!(send(&exposition, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(send(&exposition, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(send(&exposition, "HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
        // Clients that send too much, or disconnect, get no response.
        let mut stream = TcpStream::connect(exposition.address()).unwrap();
        let _ = stream.write_all(&[b'a'; 2 * HEAD_MAX]);
        drop(TcpStream::connect(exposition.address()).unwrap());
        assert!(send(&exposition, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
    }

    #[test]
    fn address_in_use_is_error_until_server_is_dropped() {
        let first = exposition();
        let address = first.address();
        assert_eq!(MetricsServer::listen(address, 1, 0).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        drop(MetricsServer::listen(address, 1, 0).unwrap());
    }
}
