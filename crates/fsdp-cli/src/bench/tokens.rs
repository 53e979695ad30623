//! Random tokens for benchmarks.

use std::fs;

use fsdp_config::Resolved;
use fsdp_nn::hf::HfConfig;
use fsdp_nn::random;
use fsdp_train::{Job, adapter};
use tempfile::TempPath;

use crate::error::CliError;
use crate::run_setup::{self, Model};
use crate::toml_text::string;

/// Maximum tokens per step: all are in a file and in memory, 256 MiB each.
const TOKENS_MAX: usize = 1 << 26;

/// A file of random tokens (`tokens-u32`), deleted on drop.
pub(crate) struct Tokens {
    file: TempPath,
    count: usize,
}

impl Tokens {
    /// Reserves a file for the tokens of one step and the target of the last one, without writing it; `option` is the
    /// option that set the number of sequences.
    ///
    /// # Errors
    /// [`CliError::Option`] if there are more than a measurement needs; [`CliError::Write`].
    pub(crate) fn of_step(option: &'static str, sequences: usize, seq: usize) -> Result<Self, CliError> {
        let tokens = sequences.saturating_mul(seq);
        if tokens > TOKENS_MAX {
            let what = format!(
                "{sequences} sequences of {seq} tokens are too many: a step has at most {TOKENS_MAX} tokens here"
            );
            return Err(CliError::Option { option, what });
        }
        let file = tempfile::Builder::new().prefix("fsdp-bench-").suffix(".u32").tempfile();
        let file = file.map_err(CliError::write(&std::env::temp_dir()))?.into_temp_path();
        Ok(Self { file, count: tokens + 1 })
    }

    /// The job of a model and a run file that trains on these tokens, which are random ones of a vocabulary.
    ///
    /// # Errors
    /// [`CliError`]: the texts do not fit together, or the tokens cannot be written.
    pub(crate) fn job(
        &self,
        origin: &str,
        vocab: usize,
        model: &str,
        run: &str,
    ) -> Result<Job<Model>, CliError> {
        let model =
            HfConfig::parse(model).map_err(|source| CliError::Model { origin: origin.to_owned(), source })?;
        let config = Resolved::parse(run, origin, &[])?.config;
        let architecture = adapter::adapt(&config, model.build()?)?;
        let bytes: Vec<u8> =
            (0..self.count as u64).flat_map(|index| token(vocab, index).to_le_bytes()).collect();
        fs::write(&self.file, bytes).map_err(CliError::write(&self.file))?;
        let init = run_setup::random(config.model.seed, &architecture);
        Ok(Job::new(config, architecture, init)?)
    }

    /// The file's path as a TOML string.
    pub(crate) fn toml(&self) -> String {
        string(&self.file.display().to_string())
    }
}

fn token(vocab: usize, index: u64) -> u32 {
    let tokens = u32::try_from(vocab).unwrap_or(u32::MAX);
    (random::uniform(random::key(&[0]), index) * f64::from(tokens)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stay_within_vocabulary() {
        assert!((0..1000).all(|index| token(7, index) < 7));
        assert!((0..1000).any(|index| token(7, index) == 6));
    }
}
