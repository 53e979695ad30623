//! A small S3 server in this process, which answers some requests badly.

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

use super::{patience::Patience, patient::Patient, stores::for_s3, tests::small_parts};
use crate::file_io::Files;

/// Number of entries of a page of a list.
const PAGE: usize = 3;

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
    /// An object is read with the ETag of another version.
    OtherVersion,
}

impl Bad {
    /// Every kind that is worth another attempt, without the expensive one.
    pub(crate) const ALL: [Bad; 14] = [
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
        Bad::Status(302, "Found"),
        Bad::Late(500),
        Bad::OtherVersion,
    ];
}

impl Content {
    /// One object, in the bucket.
    pub(crate) fn of(key: &str, bytes: &[u8]) -> Content {
        Content { objects: [(key.to_owned(), bytes.to_vec())].into(), ..Content::default() }
    }
}

/// The objects and unfinished uploads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Content {
    pub(crate) objects: BTreeMap<String, Vec<u8>>,
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    started: u64,
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

/// A request.
struct Request {
    method: String,
    key: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// An answer: status, headers, body.
struct Answer(u16, Vec<(&'static str, String)>, Vec<u8>);

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
            Bad::OtherVersion => request.headers.contains_key("if-match"),
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

/// An ETag that changes with the bytes.
fn tag(bytes: &[u8]) -> String {
    format!("\"{}\"", crate::digest::DigestKind::Crc64.of(bytes).value)
}

impl Content {
    fn answer(&mut self, request: &Request) -> Answer {
        let refused = |status, code| {
            Answer(status, Vec::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes())
        };
        let (key, query) = (&request.key, &request.query);
        let upload = query.get("uploadId").map(|id| self.uploads.get_mut(id));
        match (&*request.method, upload) {
            (_, Some(None)) => refused(404, "NoSuchUpload"),
            ("PUT", Some(Some(parts))) => {
                parts.insert(query["partNumber"].parse().unwrap(), request.body.clone());
                Answer(200, vec![("ETag", tag(&request.body))], Vec::new())
            }
            ("POST", Some(Some(parts))) => {
                let listed = String::from_utf8_lossy(&request.body).matches("<PartNumber>").count();
                assert_eq!(parts.len(), listed, "the client names all parts");
                let bytes = parts.values().flatten().copied().collect();
                self.objects.insert(key.clone(), bytes);
                self.uploads.remove(&query["uploadId"]);
                Answer(200, Vec::new(), b"<R><ETag>\"parts\"</ETag></R>".to_vec())
            }
            ("DELETE", Some(Some(_))) => {
                self.uploads.remove(&query["uploadId"]);
                Answer(204, Vec::new(), Vec::new())
            }
            ("POST", None) => {
                self.started += 1;
                let id = self.started.to_string();
                let text = format!("<R><UploadId>{id}</UploadId></R>").into_bytes();
                self.uploads.insert(id, BTreeMap::new());
                Answer(200, Vec::new(), text)
            }
            ("PUT", None)
                if request.headers.contains_key("if-none-match") && self.objects.contains_key(key) =>
            {
                refused(412, "PreconditionFailed")
            }
            ("PUT", None) => {
                self.objects.insert(key.clone(), request.body.clone());
                Answer(200, vec![("ETag", tag(&request.body))], Vec::new())
            }
            ("DELETE", None) => {
                self.objects.remove(key);
                Answer(204, Vec::new(), Vec::new())
            }
            (_, None) if query.contains_key("list-type") => self.list(query),
            _ => match self.objects.get(key) {
                None => refused(404, "NoSuchKey"),
                Some(bytes)
                    if request.headers.get("if-match").is_some_and(|tagged| *tagged != tag(bytes)) =>
                {
                    refused(412, "PreconditionFailed")
                }
                Some(bytes) => part_of(bytes, request.headers.get("range")),
            },
        }
    }

    /// A page of a list.
    fn list(&self, query: &BTreeMap<String, String>) -> Answer {
        let prefix = query.get("prefix").map_or("", |prefix| prefix);
        let mut entries: BTreeMap<String, String> = BTreeMap::new();
        for (key, bytes) in self.objects.range(prefix.to_owned()..) {
            let Some(name) = key.strip_prefix(prefix) else { break };
            let (entry, text) = match name.split_once('/') {
                Some((dir, _)) => {
                    let dir = format!("{prefix}{dir}/");
                    (dir.clone(), format!("<CommonPrefixes><Prefix>{dir}</Prefix></CommonPrefixes>"))
                }
                None => {
                    let text = format!(
                        "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                         <ETag>{}</ETag><Size>{}</Size></Contents>",
                        tag(bytes),
                        bytes.len()
                    );
                    (key.clone(), text)
                }
            };
            entries.insert(entry, text);
        }
        let after = query.get("continuation-token").map_or("", |token| token);
        let rest: Vec<_> = entries.into_iter().filter(|(entry, _)| &**entry > after).collect();
        let page = &rest[..rest.len().min(PAGE)];
        let next = if rest.len() > PAGE {
            format!("<NextContinuationToken>{}</NextContinuationToken>", page[PAGE - 1].0)
        } else {
            String::new()
        };
        let texts: String = page.iter().map(|(_, text)| text.as_str()).collect();
        Answer(200, Vec::new(), format!("<ListBucketResult>{next}{texts}</ListBucketResult>").into_bytes())
    }
}

/// The answer for an object, or for a range of it.
fn part_of(bytes: &[u8], range: Option<&String>) -> Answer {
    let mut headers =
        vec![("ETag", tag(bytes)), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT".to_owned())];
    let Some(range) = range else { return Answer(200, headers, bytes.to_vec()) };
    let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let last = last.min(bytes.len() - 1);
    headers.push(("Content-Range", format!("bytes {first}-{last}/{}", bytes.len())));
    Answer(206, headers, bytes[first..=last].to_vec())
}
