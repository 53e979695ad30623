//! Recognizes URLs of object stores, and the errors for URLs.

use std::path::Path;

/// The separator after the scheme of a URL.
const MARK: &str = "://";

/// Whether a path is a URL, such as `s3://bucket/run`. URLs of object stores are accepted wherever a path is.
pub fn is_url(path: impl AsRef<Path>) -> bool {
    split(path.as_ref()).is_some()
}

/// Splits a URL into its scheme, its host or bucket, and the path after it; `None` if the path is not a URL.
pub(crate) fn split(path: &Path) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = path.to_str()?.split_once(MARK)?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let (host, names) = rest.split_once('/').unwrap_or((rest, ""));
    is_scheme.then_some((scheme, host, names))
}

/// The reason why a URL cannot be read or written. Wrapped in an [`std::io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UrlFault {
    /// The crate was built without object stores.
    #[cfg_attr(feature = "object-store", expect(dead_code, reason = "the other build has it"))]
    #[error("this fsdp was built without object stores; build it with `--features object-store`")]
    NotBuilt,
    /// The scheme is not supported.
    #[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "the other build has it"))]
    #[error("no object store uses `{scheme}:` URLs; there are s3, gs, az, abfs, file and memory")]
    UnknownScheme {
        /// The scheme.
        scheme: String,
    },
    /// The settings of the store are invalid.
    #[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "the other build has it"))]
    #[error("{detail}; settings come from the variables {variables}")]
    Settings {
        /// The problem.
        detail: String,
        /// The environment variables that are read.
        variables: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_distinguished_from_paths() {
        for url in ["s3://bucket", "s3://bucket/a/b", "gs://b/", "memory:///a", "abfs+x://c/d"] {
            assert!(is_url(url), "{url}");
        }
        for path in ["", "a", "/a/b", "s3:/bucket", "a b://c", "://c", "a/b://c", "1s://c"] {
            assert!(!is_url(path), "{path}");
        }
        assert_eq!(split(Path::new("s3://bucket/a/b")), Some(("s3", "bucket", "a/b")));
        assert_eq!(split(Path::new("s3://bucket")), Some(("s3", "bucket", "")));
        assert!(
            is_url(Path::new("s3://bucket/a").join("b"))
                && is_url(Path::new("s3://bucket/a").parent().unwrap())
        );
    }
}
