//! The shared secret of the processes of a run.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use fsdp_core::FailureKind;

const LEN: usize = 32;

/// Maximum number of bytes read from a file.
const FILE_LEN_MAX: u64 = 4096;

/// Permission bits of everyone but the owner.
const OTHERS_MASK: u32 = 0o077;

/// 32 secret bytes. `Debug` does not show them.
#[derive(Clone)]
pub struct Token([u8; LEN]);

/// Why a token could not be obtained.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// It is not 64 hexadecimal digits. The message does not show the text: it may be a secret.
    #[error("a token is 64 hexadecimal digits, but this has {got} characters, or some outside 0-9 and a-f")]
    Hex {
        /// Number of characters found.
        got: usize,
    },
    /// The file cannot be read.
    #[error("cannot read the token in {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file does not hold a token.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error in its contents.
        source: Box<TokenError>,
    },
    /// Users other than the owner have access to the file.
    #[error("{} has mode {mode:03o}, so others may know the token: create a new one with mode 600", path.display())]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The operating system cannot provide random numbers.
    #[error("cannot get random numbers: {0}")]
    Random(#[from] getrandom::Error),
}

impl TokenError {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            TokenError::Hex { .. } | TokenError::File { .. } | TokenError::Mode { .. } => FailureKind::Input,
            TokenError::Read { source, .. } => FailureKind::of_io(source),
            TokenError::Random(_) => FailureKind::Temporary,
        }
    }
}

impl Token {
    /// Generates a random token.
    ///
    /// # Errors
    /// [`TokenError::Random`].
    pub fn generate() -> Result<Self, TokenError> {
        let mut bytes = [0; LEN];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The publicly known token, for worlds that nothing outside this machine can reach.
    pub fn open() -> Self {
        Self(*b"fsdp: everybody knows this token")
    }

    /// Reads the token that a variable names: `FSDP_TOKEN_FILE` names a file, `FSDP_TOKEN` holds the token itself.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn named(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, TokenError> {
        match (variable("FSDP_TOKEN_FILE"), variable("FSDP_TOKEN")) {
            (Some(path), _) => Self::from_file(Path::new(&path)).map(Some),
            (None, Some(hex)) => Self::from_hex(&hex).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Parses 64 hexadecimal digits; surrounding white space is ignored.
    ///
    /// # Errors
    /// [`TokenError::Hex`].
    pub fn from_hex(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let error = || TokenError::Hex { got: text.chars().count() };
        let digits: Option<Vec<u8>> = text.chars().map(|digit| digit.to_digit(16).map(|d| d as u8)).collect();
        let digits = digits.filter(|digits| digits.len() == 2 * LEN).ok_or_else(error)?;
        Ok(Self(std::array::from_fn(|byte| digits[2 * byte] << 4 | digits[2 * byte + 1])))
    }

    /// Formats the token as [`Token::from_hex`] reads it.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads a token from a file to which only its owner may have access.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let read_error = |source| TokenError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(read_error)?;
        // Mode of the open file, so that the file cannot be swapped in between.
        let mode = file.metadata().map_err(read_error)?.mode() & 0o777;
        if mode & OTHERS_MASK != 0 {
            return Err(TokenError::Mode { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.take(FILE_LEN_MAX).read_to_string(&mut text).map_err(read_error)?;
        let content_error = |source| TokenError::File { path: path.to_owned(), source: Box::new(source) };
        Self::from_hex(&text).map_err(content_error)
    }

    pub(super) fn bytes(&self) -> &[u8; LEN] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
