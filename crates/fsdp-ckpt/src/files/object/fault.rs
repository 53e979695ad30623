//! Converts errors of object stores to I/O errors.

use std::{error::Error as _, io};

/// The reason why a store did not fulfill a request. Wrapped in an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreFault {
    /// Objects cannot be renamed.
    #[error("object stores cannot rename objects")]
    NoRenames,
    /// The object was replaced after it was opened.
    #[error(
        "the object was changed while it was read: it was {expected} when it was opened and is {got} now; start again when \
         nothing writes to it"
    )]
    Changed {
        /// The version that was opened.
        expected: String,
        /// The version that is there.
        got: String,
    },
    /// The store reported an error or did not respond, after all retries.
    #[error("{0}{1}")]
    Store(String, &'static str),
}

/// The error for an object that was changed while it was read. Versions are ETags and lengths.
pub(super) fn changed(expected: (Option<&str>, u64), got: Option<(Option<&str>, u64)>) -> io::Error {
    let words =
        |(tag, len): (Option<&str>, u64)| format!("version {} of {len} bytes", tag.unwrap_or("without ETag"));
    let (expected, got) = (words(expected), got.map_or_else(|| "not there".to_owned(), words));
    io::Error::new(io::ErrorKind::StaleNetworkFileHandle, StoreFault::Changed { expected, got })
}

/// Converts the error of a store to an I/O error.
pub(super) fn failed(error: object_store::Error) -> io::Error {
    use object_store::Error;
    let (kind, advice) = match &error {
        Error::NotFound { .. } => (io::ErrorKind::NotFound, ""),
        Error::AlreadyExists { .. } => (io::ErrorKind::AlreadyExists, ""),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            (io::ErrorKind::PermissionDenied, "; check credentials and region in the environment")
        }
        Error::InvalidPath { .. } => (io::ErrorKind::InvalidInput, ""),
        Error::NotSupported { .. } | Error::NotImplemented { .. } => (io::ErrorKind::Unsupported, ""),
        // Requests have been retried already; the network or the service may recover later.
        _ => (
            io::ErrorKind::TimedOut,
            "; check that the service can be reached, and credentials in the environment",
        ),
    };
    io::Error::new(kind, StoreFault::Store(words(&error), advice))
}

/// The message, followed by those of its causes that it does not contain.
fn words(error: &object_store::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !words.contains(&more) {
            words = format!("{words}: {more}");
        }
        cause = inner.source();
    }
    without_xml(&words)
}

/// Replaces the XML with which S3 and Azure describe an error, and all after it, by its code and message.
fn without_xml(words: &str) -> String {
    let Some(start) = ["<?xml", "<Error"].iter().filter_map(|mark| words.find(mark)).min() else {
        return words.to_owned();
    };
    let (before, xml) = words.split_at(start);
    let element = |name: &str| {
        let (_, rest) = xml.split_once(&format!("<{name}>"))?;
        rest.split_once(&format!("</{name}>")).map(|(text, _)| text.trim())
    };
    let said: Vec<&str> = ["Code", "Message"].into_iter().filter_map(element).collect();
    format!("{before}{}", said.join(", ")).trim_end_matches([' ', ':']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xml_of_service_is_reduced_to_code_and_message() {
        let said = "status code: 400: <?xml version=\"1.0\"?>\n<Error><Code>Slow</Code>\n<Message> Wait. </Message></Error>";
        assert_eq!(without_xml(said), "status code: 400: Slow, Wait.");
        assert_eq!(without_xml("500: <Error>"), "500");
        assert_eq!(without_xml("no markup: a < b"), "no markup: a < b");
    }
}
