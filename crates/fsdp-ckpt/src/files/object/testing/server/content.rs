//! The objects and unfinished uploads of a server, and its right answers.

use std::collections::BTreeMap;

/// Number of entries of a page of a list.
const PAGE: usize = 3;

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

/// A request.
pub(super) struct Request {
    pub(super) method: String,
    pub(super) key: String,
    pub(super) query: BTreeMap<String, String>,
    pub(super) headers: BTreeMap<String, String>,
    pub(super) body: Vec<u8>,
}

/// An answer: status, headers, body.
pub(super) struct Answer(pub(super) u16, pub(super) Vec<(&'static str, String)>, pub(super) Vec<u8>);

/// An ETag that changes with the bytes.
fn tag(bytes: &[u8]) -> String {
    format!("\"{}\"", crate::digest::DigestKind::Crc64.of(bytes).value)
}

impl Content {
    pub(super) fn answer(&mut self, request: &Request) -> Answer {
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
    let second = crate::digest::DigestKind::Crc64.of(bytes).value % 3600;
    let modified = format!("Thu, 01 Jan 2026 00:{:02}:{:02} GMT", second / 60, second % 60);
    let mut headers = vec![("ETag", tag(bytes)), ("Last-Modified", modified)];
    let Some(range) = range else { return Answer(200, headers, bytes.to_vec()) };
    let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let last = last.min(bytes.len() - 1);
    headers.push(("Content-Range", format!("bytes {first}-{last}/{}", bytes.len())));
    Answer(206, headers, bytes[first..=last].to_vec())
}
