//! Every request to a server is answered badly, once, several times and for ever.

use std::{io::ErrorKind, path::Path};

use fsdp_core::FailureKind;

use super::*;
use crate::{
    error::Error as CkptError,
    file_io::Files,
    files::object::testing::server::{Bad, Content, Server},
};

const DIR: &str = "s3://bucket/dir";

fn path(name: &str) -> std::path::PathBuf {
    Path::new(DIR).join(name)
}

/// Creates, replaces, lists, reads and removes objects of one part and of many; returns what was seen.
fn work(files: &Files) -> Result<Vec<String>, CkptError> {
    let mut seen = Vec::new();
    files.write_new(&path("small"), b"first")?;
    files.replace(&path("other"), b"second")?;
    files.replace(&path("other"), b"third")?;
    for name in ["long", "deep/long"] {
        let file = files.create_new(&path(name))?;
        file.set_len(1500)?;
        file.write_all_at(&[7; 1500], 0)?;
        file.sync()?;
    }
    seen.push(format!("{:?}", files.list(Path::new(DIR))?));
    seen.push(format!("{:?}", files.metadata_if_there(&path("deep"))?));
    seen.push(format!("{:?}", files.metadata_if_there(&path("none"))?));
    for name in ["small", "other", "long"] {
        seen.push(format!("{:?}", files.read_whole(&path(name))?));
    }
    seen.push(format!("{:?}", files.remove_if_there(&path("small"))?));
    files.remove_tree(&path("deep"))?;
    seen.push(format!("{:?}", files.list(Path::new(DIR))?));
    Ok(seen)
}

/// What is seen without faults, and the number of requests.
fn calm(server: &Server) -> (Vec<String>, Content, u64) {
    server.plan(&Content::default(), None, 0, 0);
    let seen = work(&server.files()).unwrap();
    (seen, server.content(), server.requests())
}

#[test]
fn bad_answers_at_every_request_are_survived() {
    let server = Server::start();
    let (expected, content, requests) = calm(&server);
    assert!(requests > 25 && content.objects.len() == 2, "{requests} {content:?}");
    for bad in Bad::ALL {
        let mut repeated = 0;
        for at in 0..requests {
            for count in [1, 9] {
                server.plan(&Content::default(), Some(bad), at, count);
                let seen = work(&server.files())
                    .unwrap_or_else(|error| panic!("{bad:?} at {at}, {count} times: {error}"));
                assert_eq!(seen, expected, "{bad:?} at {at}, {count} times");
                assert_eq!(server.content().objects, content.objects, "{bad:?} at {at}, {count} times");
                repeated += server.requests() - requests;
            }
        }
        assert!(repeated > 0, "{bad:?} was never met");
    }
}

#[test]
fn bad_answers_for_ever_end_with_their_number() {
    let server = Server::start();
    let (_, _, requests) = calm(&server);
    for bad in Bad::ALL {
        for at in 0..requests {
            server.plan(&Content::default(), Some(bad), at, u64::MAX);
            let Err(CkptError::Io { path, cause, .. }) = work(&server.files()) else {
                // The rest was not affected: it deletes, or does not read an object.
                let harmless = matches!(bad, Bad::Short | Bad::OtherVersion);
                assert!(harmless && at > 10, "{bad:?} at {at}");
                continue;
            };
            assert_eq!(cause.kind(), ErrorKind::TimedOut, "{bad:?} at {at}: {cause}");
            assert!(cause.to_string().contains("tried 11 times in "), "{bad:?} at {at}: {cause}");
            assert!(path.starts_with(DIR), "{}", path.display());
        }
    }
}

#[test]
fn endless_answers_are_not_collected() {
    let server = Server::start();
    server.plan(&Content::default(), Some(Bad::Endless), 1, 2);
    server.files().write_new(&path("a"), b"a").unwrap();
    assert_eq!(server.files().list(Path::new(DIR)).unwrap(), ["a"]);
    assert_eq!(server.requests(), 4);
}

#[test]
fn refused_requests_are_sent_once() {
    let server = Server::start();
    for (status, code) in
        [(400, "InvalidRequest"), (403, "AccessDenied"), (404, "NoSuchBucket"), (501, "NotImplemented")]
    {
        server.plan(&Content::default(), Some(Bad::Status(status, code)), 0, u64::MAX);
        let error = server.files().write_new(&path("a"), b"a").unwrap_err().to_string();
        assert!(error.contains(code) && !error.contains("<Code>"), "{error}");
        assert_eq!(server.requests(), 1, "{code}");
    }
}

#[test]
fn creation_with_lost_answer_yields_to_other_content() {
    let server = Server::start();
    let name = "dir/a";
    for bad in [Bad::Reset, Bad::Status(500, "InternalError"), Bad::Lost, Bad::Cut, Bad::Garbage] {
        for (there, is_ours) in [(&b"mine"[..], true), (b"they", false), (b"", false), (b"longer", false)] {
            server.plan(&Content::of(name, there), Some(bad), 0, 1);
            let created = server.files().write_new(&path("a"), b"mine");
            match created {
                Ok(()) => assert!(is_ours, "{bad:?} {there:?}"),
                Err(CkptError::Io { cause, .. }) => {
                    assert!(
                        !is_ours && cause.kind() == ErrorKind::AlreadyExists,
                        "{bad:?} {there:?}: {cause}"
                    );
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(server.content().objects[name], there);
        }
    }
    // Without a failed attempt, equal bytes are those of another writer.
    server.plan(&Content::of(name, b"mine"), None, 0, 0);
    assert!(server.files().write_new(&path("a"), b"mine").is_err());
}

#[test]
fn changed_object_is_named_with_both_versions() {
    let server = Server::start();
    server.plan(&Content::of("dir/a", b"before"), None, 0, 0);
    let (file, len) = server.files().open(&path("a")).unwrap();
    server.plan(&Content::of("dir/a", b"after!"), None, 0, 0);
    let error = file.read_first(len).unwrap_err();
    assert!(error.is_unanswered() && error.kind() == FailureKind::Temporary, "{error}");
    let error = error.to_string();
    assert!(error.contains("s3://bucket/dir/a"), "{error}");
    assert!(error.contains("it was version \"") && error.contains("start again"), "{error}");
    assert!(!error.contains('<') && server.requests() == 2, "{error}");
}
