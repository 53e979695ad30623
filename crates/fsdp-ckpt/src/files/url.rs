//! Which paths are URLs of object stores, and what can be wrong with one.

use std::path::Path;

/// What stands between the scheme of a URL and the rest.
const MARK: &str = "://";

/// Whether a path is a URL, such as `s3://bucket/run`: those of object stores are taken wherever a path is.
pub fn is_url(path: impl AsRef<Path>) -> bool {
    split(path.as_ref()).is_some()
}

/// The scheme of a URL, its host or bucket, and the names behind it.
pub(crate) fn split(path: &Path) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = path.to_str()?.split_once(MARK)?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let (host, names) = rest.split_once('/').unwrap_or((rest, ""));
    is_scheme.then_some((scheme, host, names))
}

/// Why nothing can be read or written at a URL. It comes inside an [`std::io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UrlFault {
    /// The crate knows no object stores.
    #[cfg_attr(feature = "object-store", expect(dead_code, reason = "the other build has it"))]
    #[error("this fsdp was built without object stores; build it with `--features object-store`")]
    NotBuilt,
    /// The scheme is none of ours.
    #[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "the other build has it"))]
    #[error("no object store has URLs of `{scheme}:`; there are s3, gs, az, abfs, file and memory")]
    UnknownScheme {
        /// The scheme.
        scheme: String,
    },
    /// The settings of the store do not make sense.
    #[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "the other build has it"))]
    #[error("{detail}; settings come from the variables {variables}")]
    Settings {
        /// What is wrong.
        detail: String,
        /// Which variables are read.
        variables: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
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
