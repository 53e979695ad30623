//! A small S3 server in this process, which answers some requests badly.

mod content;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use object_store::aws::{AmazonS3, AmazonS3Builder};
use rustix::net::sockopt::set_socket_linger;

use crate::file_io::Files;
use crate::files::object::{patience::Patience, patient::Patient, stores::for_s3, tests::small_parts};
pub(crate) use content::Content;
use content::{Answer, Request};

/// A bad answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bad {
    /// The connection is reset; the request has no effect.
    Reset,
    /// The request takes effect, but the connection is closed before the answer.
    Lost,
    /// The request takes effect, but the connection is closed in the middle of the answer.
    Cut,
    /// The request takes effect, but the answer ends in the middle of its body, or has no headers if it has no body.
    Short,
    /// The request takes effect, but the answer is not HTTP.
    Garbage,
    /// The page of a proxy, with status 200; the request has no effect.
    Page,
    /// An error of the server; the request has no effect.
    Status(u16, &'static str),
    /// The request takes effect, but the answer is an error of the server.
    Late(u16),
    /// An answer that does not end.
    Endless,
    /// An object is read with the ETag of another version, or looks as if it had that.
    OtherVersion,
}

impl Bad {
    /// Every kind that is worth another attempt, without the expensive one.
    pub(crate) const ALL: [Bad; 13] = [
        Bad::Reset,
        Bad::Lost,
        Bad::Cut,
        Bad::Short,
        Bad::Garbage,
        Bad::Page,
        Bad::Status(500, "InternalError"),
        Bad::Status(503, "SlowDown"),
        Bad::Status(429, "TooManyRequests"),
        Bad::Status(400, "RequestTimeout"),
        Bad::Status(200, "InternalError"),
        Bad::Late(500),
        Bad::OtherVersion,
    ];
}

#[derive(Debug, Default)]
struct State {
    content: Content,
    /// Number of good answers since the plan was made.
    good: u64,
    /// Number of requests since then.
    requests: u64,
    /// The bad answer, the number of good answers before it, and how many of them there are in a row.
    plan: Option<(Bad, u64, u64)>,
}

/// The server; it listens as long as the process lives.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    /// A client that repeats requests without long pauses.
    client: Arc<Patient<AmazonS3>>,
}

impl Server {
    pub(crate) fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = AmazonS3Builder::new()
            .with_bucket_name("bucket")
            .with_endpoint(format!("http://{}", listener.local_addr().unwrap()))
            .with_allow_http(true)
            .with_region("us-east-1")
            .with_access_key_id("key")
            .with_secret_access_key("secret");
        let pause = Duration::from_micros(1);
        let patience = Patience { pause, pause_max: pause, ..Patience::USUAL };
        let client = Arc::new(Patient::new(for_s3(store).build().unwrap(), patience));
        let server = Server { state: Arc::default(), client };
        let serving = server.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                let serving = serving.clone();
                thread::spawn(move || serving.serve(client.unwrap()));
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn content(&self) -> Content {
        self.state().content.clone()
    }

    /// Number of requests since the last call of [`Server::plan`].
    pub(crate) fn requests(&self) -> u64 {
        self.state().requests
    }

    /// Replaces the content, and plans `count` bad answers in a row after `good` good ones.
    pub(crate) fn plan(&self, content: &Content, bad: Option<Bad>, good: u64, count: u64) {
        let plan = bad.map(|bad| (bad, good, count));
        *self.state() = State { content: content.clone(), plan, ..State::default() };
    }

    /// A client whose files have many parts.
    pub(crate) fn files(&self) -> Files {
        small_parts(Arc::clone(&self.client) as _)
    }

    /// Answers the requests of a connection until it ends.
    fn serve(&self, client: TcpStream) {
        let mut reader = BufReader::new(client.try_clone().unwrap());
        while let Some(request) = read(&mut reader) {
            let mut state = self.state();
            state.requests += 1;
            let bad = match &mut state.plan {
                Some((bad, good_before, left)) if *left > 0 => {
                    let (bad, good_before) = (*bad, *good_before);
                    let is_now = good_before <= state.good && bad.concerns(&request);
                    is_now.then(|| state.plan.as_mut().unwrap().2 -= 1).map(|()| bad)
                }
                _ => None,
            };
            state.good += u64::from(bad.is_none());
            let answer = match bad {
                Some(Bad::Reset | Bad::Status(..) | Bad::Page | Bad::Endless) => None,
                _ => Some(state.content.answer(&request)),
            };
            drop(state);
            if respond(&client, &request, bad, answer).is_none() {
                return;
            }
        }
    }
}

impl Bad {
    /// Whether a request can be answered so. An answer to HEAD has no body that could say which error it is.
    fn concerns(self, request: &Request) -> bool {
        match self {
            Bad::OtherVersion => request.headers.contains_key("if-match") || request.method == "HEAD",
            Bad::Status(200 | 400, _) | Bad::Endless => request.method != "HEAD",
            _ => true,
        }
    }
}

/// Sends an answer; `None` if the connection has ended.
fn respond(
    mut client: &TcpStream,
    request: &Request,
    bad: Option<Bad>,
    answer: Option<Answer>,
) -> Option<()> {
    let is_head = request.method == "HEAD";
    let page = || Answer(200, Vec::new(), b"<html><body>Please sign in.</body></html>".to_vec());
    let error = |status, code: &str| {
        Answer(status, Vec::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes())
    };
    let answer = match (bad, answer) {
        (Some(Bad::Reset), _) => {
            set_socket_linger(client, Some(Duration::ZERO)).unwrap();
            return None;
        }
        (Some(Bad::Lost), _) => return None,
        (Some(Bad::Garbage), _) => {
            let bytes: Vec<u8> = (0..500_u32).map(|i| (i * 7919 % 251) as u8).collect();
            let _ = client.write_all(&bytes);
            return None;
        }
        (Some(Bad::Endless), _) => {
            let head = b"HTTP/1.1 500 Said\r\nConnection: close\r\n\r\n";
            let sent = client.write_all(head).and_then(|()| {
                loop {
                    client.write_all(&[b' '; 1 << 16])?;
                }
            });
            return sent.ok();
        }
        (Some(Bad::Page), _) => page(),
        (Some(Bad::Status(status, code)), _) => error(status, code),
        (Some(Bad::Late(status)), _) => error(status, "InternalError"),
        (Some(Bad::Short), Some(Answer(status, headers, body))) if body.len() > 1 && !is_head => {
            Answer(status, headers, body[..body.len() / 2].to_vec())
        }
        (Some(Bad::Short), _) => Answer(200, Vec::new(), Vec::new()),
        (Some(Bad::OtherVersion), Some(Answer(status, mut headers, body))) => {
            headers.retain(|(name, _)| *name != "ETag");
            headers.push(("ETag", "\"another\"".to_owned()));
            Answer(status, headers, body)
        }
        (_, answer) => answer.unwrap(),
    };
    let Answer(status, headers, body) = answer;
    let mut bytes = format!("HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n", body.len()).into_bytes();
    headers.iter().for_each(|(name, value)| write!(bytes, "{name}: {value}\r\n").unwrap());
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(if is_head { &[] } else { &body });
    if bad == Some(Bad::Cut) {
        let _ = client.write_all(
            &bytes[..bytes.len() - if body.is_empty() || is_head { 9 } else { body.len().div_ceil(2) }],
        );
        return None;
    }
    client.write_all(&bytes).ok()
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&len| len > 0)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let len = headers.get("content-length").map_or(0, |len| len.parse().unwrap());
    let mut body = vec![0; len];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let query = pairs.map(|(name, value)| (name.to_owned(), value.replace("%2F", "/"))).collect();
    let key = path.strip_prefix("/bucket").unwrap().trim_start_matches('/').to_owned();
    Some(Request { method, key, query, headers, body })
}
