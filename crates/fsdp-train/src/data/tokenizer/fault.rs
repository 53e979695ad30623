//! Reasons to reject a `tokenizer.json`.

/// Maximum factor by which a normalizer may lengthen a text. Writing `▁` for each space triples its length, and
/// published tokenizers have few such steps.
pub(super) const GROWTH_MAX: u64 = 1024;

/// The rules of SentencePiece: a table followed by a text. The first four bytes are the length of the table in bytes.
pub(super) const CHARSMAP: &str = "precompiled_charsmap";

/// Common type for errors of the library and [`TokenizerFault`].
pub(super) type Source = Box<dyn std::error::Error + Send + Sync>;

/// A reason to reject a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerFault {
    /// The claimed length of a table exceeds the available bytes.
    #[error("its {CHARSMAP} claims a table of {table_bytes} bytes, but has {bytes} in total")]
    Charsmap {
        /// The claimed length of the table.
        table_bytes: u64,
        /// The available bytes.
        bytes: u64,
    },
    /// The normalizer lengthens texts too much.
    #[error("its normalizer can make texts {growth} times as long or more; the maximum is {GROWTH_MAX}")]
    Growth {
        /// The factor by which it may lengthen a text.
        growth: u64,
    },
    /// This build does not include the tokenizer library.
    #[error("this fsdp was built without tokenizers; build it with `--features tokenizers`")]
    Feature,
    /// The tokenizer library panicked.
    #[error("it is inconsistent: {message}")]
    Panic {
        /// The message of the panic.
        message: String,
    },
}
