//! Why a `tokenizer.json` is refused.

/// How much longer a normalizer may make a text: writing `▁` for each space makes it three times as long, and published
/// tokenizers have few such steps.
pub(super) const GROWTH_MAX: u64 = 1024;

/// The rules of SentencePiece, a table in front of a text: its length in bytes is in its first four.
pub(super) const CHARSMAP: &str = "precompiled_charsmap";

/// What the library and [`TokenizerFault`] become in an error about a file.
pub(super) type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a tokenizer is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerFault {
    /// A table that says that it is longer than all that is there.
    #[error("its {CHARSMAP} says that it has a table of {table_bytes} bytes, and has {bytes} in all")]
    Charsmap {
        /// What it says.
        table_bytes: u64,
        /// What is there.
        bytes: u64,
    },
    /// Replacements that blow texts up.
    #[error(
        "its normalizer makes texts {growth} times as long or more, at most {GROWTH_MAX} times are accepted"
    )]
    Growth {
        /// How many times.
        growth: u64,
    },
    /// The library that reads it is not part of this build.
    #[error("this fsdp was built without tokenizers; build it with `--features tokenizers`")]
    Feature,
    /// The library panicked on it.
    #[error("it contradicts itself: {message}")]
    Panic {
        /// What the library said.
        message: String,
    },
}
