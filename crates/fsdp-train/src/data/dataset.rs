//! Samples: what goes into the model, and what should come out.
//!
//! A sample is up to `seq_len + 1` tokens; the inputs are all but the last, the targets all but the first,
//! so position p predicts the token after it. Packing "stream" cuts the joined documents every `seq_len`
//! tokens (neighbours share one token, so that each token but the first is a target once; the incomplete
//! rest is dropped). Packing "documents" makes one sample per document: bos and eos are put around it, what
//! is longer is clipped (and loses its eos, because the text does not end there), what is shorter is
//! padded.

use std::path::Path;

use fsdp_ckpt::digest::Digest;

use super::cache::{DataWarning, Stage};
use super::corpus::Corpus;
use super::error::DataError;
use super::tokenizer::Tokenizer;
use crate::config::{DataConfig, Packing};

/// A target that does not count in the loss.
pub const IGNORE: u32 = u32::MAX;

/// Samples of equal length.
#[derive(Debug)]
pub struct Dataset {
    pub(super) corpus: Corpus,
    seq_len: usize,
    layout: Layout,
}

#[derive(Debug)]
enum Layout {
    Stream,
    Documents { special: Special, documents: Vec<usize> },
}

/// Ids that packing "documents" adds.
#[derive(Clone, Copy, Debug)]
struct Special {
    bos: Option<u32>,
    eos: Option<u32>,
    pad: u32,
}

impl Dataset {
    /// Opens files and folders (`config.train` or `config.eval`) as `config` says; what lies in `out_dir`, the output
    /// folder of the run, is not data. A file of tokens is mapped, so it must not change afterwards.
    ///
    /// # Errors
    /// If something cannot be read or tokenized, a path lies in `out_dir`, or a token that is to be added does not exist.
    pub fn load(paths: &[String], config: &DataConfig, out_dir: &Path) -> Result<Dataset, DataError> {
        let tokenizer = Tokenizer::load(&config.tokenizer)?;
        let special = match config.packing {
            Packing::Stream => None,
            Packing::Documents => Some(Special::resolve(config, &tokenizer)?),
        };
        let corpus = Corpus::open(paths, config, out_dir, &tokenizer)?;
        let layout = match special {
            None => Layout::Stream,
            Some(special) => Layout::Documents { special, documents: special.trainable(&corpus) },
        };
        Ok(Dataset { corpus, seq_len: config.seq_len, layout })
    }

    /// The number of samples.
    pub fn len(&self) -> usize {
        match &self.layout {
            Layout::Stream => self.corpus.len().saturating_sub(1) / self.seq_len,
            Layout::Documents { documents, .. } => documents.len(),
        }
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Inputs, and targets, per sample.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// CRC-64 of the tokens that were read, each as four little-endian bytes. Where documents begin does not
    /// count.
    pub fn digest(&self) -> Digest {
        self.corpus.scan.digest
    }

    /// What the user should know of how it was read.
    pub fn warnings(&self) -> &[DataWarning] {
        &self.corpus.warnings
    }

    /// Keeps the tokens of text for later starts where they belong into the output folder, in which nothing may be made
    /// before the run is accepted. (All others are kept already.) Returns why that was not possible, if it was not.
    pub fn keep(&self) -> Option<DataWarning> {
        self.corpus.reach(Stage::Kept)
    }

    /// Puts such tokens there already, for other processes of this run. They go when the value is dropped, unless they are
    /// [kept](Dataset::keep). Returns why that was not possible, if it was not.
    pub fn share(&self) -> Option<DataWarning> {
        self.corpus.reach(Stage::Shared)
    }

    /// The inputs and targets of a sample; targets that do not count are [`IGNORE`].
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn sample(&self, index: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut inputs, mut targets) = (vec![0; self.seq_len], vec![0; self.seq_len]);
        self.fill(Some(index), &mut inputs, &mut targets);
        (inputs, targets)
    }

    /// Writes a sample, or with `None` a masked one in which no target counts.
    ///
    /// # Panics
    /// If there is no such sample, or a slice is not `seq_len` long.
    pub fn fill(&self, index: Option<usize>, inputs: &mut [u32], targets: &mut [u32]) {
        assert_eq!((inputs.len(), targets.len()), (self.seq_len, self.seq_len), "slices are seq_len long");
        inputs.fill(self.pad());
        targets.fill(IGNORE);
        for (position, token) in index.into_iter().flat_map(|index| self.tokens(index).enumerate()) {
            if let Some(input) = inputs.get_mut(position) {
                *input = token;
            }
            if let Some(before) = position.checked_sub(1) {
                targets[before] = token;
            }
        }
    }

    /// Checks that every id is below the vocabulary size of the model.
    ///
    /// # Errors
    /// For the first that is not.
    pub fn check_vocabulary(&self, vocab_size: usize) -> Result<(), DataError> {
        if let Layout::Documents { special, .. } = &self.layout {
            special.check_vocabulary(vocab_size)?;
        }
        let beyond = |id: u32| id as usize >= vocab_size;
        if !self.corpus.scan.id_max.is_some_and(beyond) {
            return Ok(());
        }
        // It may be in no sample.
        for sample in 0..self.len() {
            if let Some((position, id)) = self.tokens(sample).enumerate().find(|&(_, id)| beyond(id)) {
                let file = self.file_of(sample, position).to_owned();
                let reason = format!(
                    "token id {id} (sample {sample}, position {position}), but the model's vocab_size is \
                     {vocab_size}; use the model's own tokenizer"
                );
                return Err(DataError::Malformed { file, reason });
            }
        }
        Ok(())
    }

    /// The tokens of a sample, at most `seq_len + 1`.
    fn tokens(&self, index: usize) -> impl Iterator<Item = u32> {
        let (bos, tokens, eos) = match &self.layout {
            Layout::Stream => {
                let start = index * self.seq_len;
                (None, start..start + self.seq_len + 1, None)
            }
            Layout::Documents { special, documents } => {
                (special.bos, self.corpus.document(documents[index]), special.eos)
            }
        };
        bos.into_iter().chain(self.corpus.tokens(tokens)).chain(eos).take(self.seq_len + 1)
    }

    fn pad(&self) -> u32 {
        match &self.layout {
            Layout::Stream => 0,
            Layout::Documents { special, .. } => special.pad,
        }
    }

    fn file_of(&self, sample: usize, position: usize) -> &Path {
        match &self.layout {
            Layout::Stream => self.corpus.file_of_token(sample * self.seq_len + position),
            Layout::Documents { documents, .. } => self.corpus.file_of_document(documents[sample]),
        }
    }
}

impl Special {
    fn resolve(config: &DataConfig, tokenizer: &Tokenizer) -> Result<Special, DataError> {
        let optional =
            |token: &Option<_>, key| token.as_ref().map(|token| tokenizer.resolve(token, key)).transpose();
        Ok(Special {
            bos: optional(&config.bos, "data.bos")?,
            eos: optional(&config.eos, "data.eos")?,
            pad: tokenizer.resolve(&config.pad, "data.pad")?,
        })
    }

    /// The documents that are not empty and have at least one target.
    fn trainable(self, corpus: &Corpus) -> Vec<usize> {
        let added = usize::from(self.bos.is_some()) + usize::from(self.eos.is_some());
        let has_target = |&index: &usize| {
            let len = corpus.document(index).len();
            len > 0 && len + added > 1
        };
        (0..corpus.document_count()).filter(has_target).collect()
    }

    fn check_vocabulary(self, vocab_size: usize) -> Result<(), DataError> {
        let ids = [("data.bos", self.bos), ("data.eos", self.eos), ("data.pad", Some(self.pad))];
        for (key, id) in ids {
            if let Some(id) = id.filter(|&id| id as usize >= vocab_size) {
                let reason = format!(
                    "has id {id}, but the model's vocab_size is {vocab_size}; choose another token or model"
                );
                return Err(DataError::SpecialToken { key, reason });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
