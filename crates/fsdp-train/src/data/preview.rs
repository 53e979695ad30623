//! What a user should see of the data before a run: a sample, as the model hears it.

use super::dataset::Dataset;
use super::error::DataError;
use super::tokenizer::Tokenizer;
use super::tokens::Token;
use crate::config::DataConfig;

/// A sample, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preview {
    /// Its parts in order, and whether the tokens of each count in the loss.
    pub parts: Vec<(String, bool)>,
    /// Tokens of the sample, without padding.
    pub tokens: usize,
    /// Those of them that count.
    pub counted: usize,
}

impl Preview {
    /// A sample of a data set.
    ///
    /// # Errors
    /// A tokenizer that can not be read again, or that has no text for a token.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(crate) fn of(dataset: &Dataset, sample: usize, config: &DataConfig) -> Result<Preview, DataError> {
        let tokenizer = Tokenizer::load(&config.tokenizer)?;
        let tokens = dataset.heard(sample);
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
        Ok(Preview { parts, tokens: len, counted })
    }
}

#[cfg(test)]
mod tests;
