//! Reasons to reject a `tokenizer.json`.

/// Maximum factor by which a normalizer may lengthen a text. Writing `▁` for each space triples its length, and
/// published tokenizers have few such steps.
pub(super) const GROWTH_MAX: u64 = 1024;

/// Maximum number of characters that a WordPiece model may look up per word; published ones have 100. The time per word grows
/// with more than the square of it.
pub(super) const WORD_CHARS_MAX: u64 = 256;

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
    /// The class of the tokenizer builds it in a way that is not known.
    #[error(
        "the tokenizer_config.json next to it says \"tokenizer_class\": \"{name}\", for which transformers builds a tokenizer \
         of its own rather than using this file; to use the file as it is, here and in transformers, set it to \
         \"PreTrainedTokenizerFast\""
    )]
    Class {
        /// Name of the class.
        name: String,
    },
    /// The class of the tokenizer needs another kind of vocabulary.
    #[error(
        "its model is {kind}, but \"tokenizer_class\" in the tokenizer_config.json next to it (or the model's config.json) \
         makes it a {class}Tokenizer, which is BPE; to use the file as it is, set \"tokenizer_class\" to \
         \"PreTrainedTokenizerFast\""
    )]
    NotBpe {
        /// Name of the class, without `Tokenizer` at its end.
        class: &'static str,
        /// The kind of model in the file.
        kind: String,
    },
    /// The model applies its merges at random.
    #[error(
        "its model leaves out merges at random (\"dropout\": {dropout}), so that a text has no fixed tokens; set \"dropout\" \
         of its \"model\" to null"
    )]
    Dropout {
        /// The probability with which a merge is left out.
        dropout: f32,
    },
    /// transformers would replace the pattern of the pre-tokenizer.
    #[error(
        "the tokenizer_config.json next to it says \"fix_mistral_regex\": true, which is not supported; load it with \
         transformers, save it with `save_pretrained`, and remove the key"
    )]
    MistralRegex,
    /// The model would take too long for long words.
    #[error(
        "its model looks up words of up to {chars} characters (\"max_input_chars_per_word\"), which may take hours for one \
         word; the maximum is {WORD_CHARS_MAX}"
    )]
    WordLength {
        /// The maximum number of characters of a word.
        chars: u64,
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
