//! Shows a user a sample of the data before a run, as the model sees it.

use fsdp_config::DataConfig;

use super::dataset::Dataset;
use super::error::DataError;
use super::tokenizer::Tokenizer;
use super::tokens::Token;

/// A sample, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preview {
    /// Consecutive parts of the text, and whether the tokens of each count in the loss.
    pub parts: Vec<(String, bool)>,
    /// Number of tokens in the sample, without padding.
    pub tokens: usize,
    /// Number of tokens that count in the loss.
    pub counted: usize,
    /// Whether the sample has answers that end with no token that stops generation.
    pub is_open: bool,
}

impl Preview {
    /// Decodes a sample of a data set.
    ///
    /// # Errors
    /// If the tokenizer cannot be read again, or cannot decode a token.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(crate) fn of(dataset: &Dataset, sample: usize, config: &DataConfig) -> Result<Preview, DataError> {
        let tokenizer = Tokenizer::load(&config.tokenizer)?;
        let tokens = dataset.sample_tokens(sample);
        let len = tokens.len();
        let mut runs: Vec<(Vec<u32>, bool)> = Vec::new();
        for Token { id, counts } in tokens {
            match runs.last_mut().filter(|(_, same)| *same == counts) {
                Some((ids, _)) => ids.push(id),
                None => runs.push((vec![id], counts)),
            }
        }
        let counted = runs.iter().filter(|(_, counts)| *counts).map(|(ids, _)| ids.len()).sum();
        let text = |(ids, counts): (Vec<u32>, bool)| tokenizer.decode(&ids).map(|text| (text, counts));
        let parts = runs.into_iter().map(text).collect::<Result<_, _>>();
        let parts =
            parts.map_err(|source| DataError::Tokenizer { file: (&config.tokenizer).into(), source })?;
        Ok(Preview { parts, tokens: len, counted, is_open: dataset.is_open(sample) })
    }
}

#[cfg(test)]
mod tests;
