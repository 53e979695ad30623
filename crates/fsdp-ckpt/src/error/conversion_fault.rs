//! Why a conversion was not begun.

use std::path::PathBuf;

/// A request to convert that cannot be carried out as it was meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConversionFault {
    /// Two tensors or values would have one name.
    #[error("`{first}` and `{second}` would both be named `{name}`; change the renaming")]
    NamesCollide {
        /// The name that both get.
        name: String,
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// Renaming left nothing of a name.
    #[error("nothing is left of the name `{name}` after renaming; change the renaming")]
    EmptyName {
        /// The name in the source.
        name: String,
    },
    /// Nothing is to be written.
    #[error(
        "{} holds nothing of what was selected ({model} model tensors, {optimizer} optimizer tensors, {other} \
         others)", path.display()
    )]
    NothingSelected {
        /// The source.
        path: PathBuf,
        /// How many model tensors it has.
        model: usize,
        /// How many optimizer tensors.
        optimizer: usize,
        /// How many other tensors.
        other: usize,
    },
    /// A prefix that no name has.
    #[error("no name begins with `{prefix}`; names are, for example, {}", examples.join(", "))]
    PrefixUnused {
        /// The prefix.
        prefix: String,
        /// Some names.
        examples: Vec<String>,
    },
    /// A regular expression that no name matches.
    #[error("no name matches `{pattern}`; names are, for example, {}", examples.join(", "))]
    RenameUnused {
        /// The regular expression.
        pattern: String,
        /// Some names.
        examples: Vec<String>,
    },
    /// Not a renaming.
    #[error("`{text}` is not a renaming: {detail}; write REGEX=REPLACEMENT")]
    BadRename {
        /// What was given.
        text: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A type that tensors cannot be converted to.
    #[error("tensors cannot be converted to {dtype}; choose F64, F32, BF16 or F16")]
    BadDtype {
        /// The type.
        dtype: crate::safetensors::TensorType,
    },
    /// A configuration that is not JSON.
    #[error("{} is not a model configuration: {detail}", path.display())]
    BadConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// An output in the directory that is read.
    #[error(
        "{} lies in {}, which is what is to be converted; name a destination outside of it", path.display(),
        source_dir.display()
    )]
    InsideSource {
        /// The destination.
        path: PathBuf,
        /// The directory of the source.
        source_dir: PathBuf,
    },
    /// A configuration beside a single file.
    #[error("a configuration is written into a directory, but {} is to be one file; name a directory", path.display())]
    ConfigNeedsDirectory {
        /// The destination.
        path: PathBuf,
    },
    /// Weights that the configuration ties and that differ.
    #[error(
        "the configuration ties `{head}` to `{embedding}`, but their elements differ; correct tie_word_embeddings"
    )]
    TiedWeightsDiffer {
        /// The output weights.
        head: String,
        /// The input weights.
        embedding: String,
    },
}
