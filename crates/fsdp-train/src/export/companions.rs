//! Files that a model needs in addition to weights and `config.json`: the base's tokenizer, chat template and
//! generation configuration.

use std::fs;
use std::io;
use std::path::Path;

use fsdp_ckpt::{is_url, objects};
use fsdp_core::FailureKind;

use crate::atomic_file::write_small;
use crate::error::TrainError;

/// The file names that transformers uses.
const NAMES: [&str; 14] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
];

/// The contents of these files. They are read when a run begins: by its end, the base may have been deleted or
/// replaced.
#[derive(Debug, Default)]
pub(crate) struct Companions {
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Companions {
    /// Reads the files that exist in the directory of a model.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], or [`TrainError::Failed`], for a file that cannot be read.
    pub(crate) fn read(base: &Path) -> Result<Self, TrainError> {
        let mut files = Vec::new();
        for name in NAMES {
            let path = base.join(name);
            let content = match is_url(base) {
                true => objects::read(&path)?,
                false => match fs::read(&path) {
                    Ok(content) => Some(content),
                    Err(error) if is_absent(&error) => None,
                    Err(source) => {
                        let message = format!(
                            "cannot read {} (model.path), which is copied next to the exported model: {source}",
                            path.display()
                        );
                        return Err(TrainError::Failed { kind: FailureKind::of_io(&source), message });
                    }
                },
            };
            files.extend(content.map(|content| (name, content)));
        }
        Ok(Self { files })
    }

    /// Writes the files into the directory of an exported model.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn write(&self, model: &Path) -> Result<(), TrainError> {
        self.files.iter().try_for_each(|(name, content)| write_small(&model.join(name), content))
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}
