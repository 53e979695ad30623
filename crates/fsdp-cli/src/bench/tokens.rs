//! Random tokens, for models whose speed is measured.

use std::fs;
use std::path::PathBuf;

use fsdp_nn::random;

use crate::error::CliError;

/// A file of random tokens (`tokens-u32`), which is gone when they have been read.
pub(super) struct Tokens {
    file: PathBuf,
}

impl Tokens {
    /// `count` tokens of a vocabulary.
    ///
    /// # Errors
    /// [`CliError::Write`].
    pub(super) fn create(vocab: usize, count: usize) -> Result<Self, CliError> {
        let file = std::env::temp_dir().join(format!("fsdp-bench-{}.u32", std::process::id()));
        let tokens = Self { file };
        let bytes: Vec<u8> = (0..count as u64).flat_map(|index| token(vocab, index).to_le_bytes()).collect();
        fs::write(&tokens.file, bytes).map_err(CliError::write(&tokens.file))?;
        Ok(tokens)
    }

    /// The file's path as a TOML string: a string in JSON spelling, whose escapes are TOML's too.
    pub(super) fn toml(&self) -> String {
        serde_json::Value::from(self.file.display().to_string()).to_string()
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        // A file left in the folder for temporary files is no reason to fail.
        let _ = fs::remove_file(&self.file);
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
    fn tokens_are_within_the_vocabulary() {
        assert!((0..1000).all(|index| token(7, index) < 7));
        assert!((0..1000).any(|index| token(7, index) == 6));
    }
}
